"""Devices of a node with addresses."""

from __future__ import annotations

from pathlib import Path

from cells.config import AgentConfig
from cells.node.devices import Device
from lifecycle import Table


def devices(*rows: Device) -> Table[int, Device]:
    table: Table[int, Device] = Table("devices", key=lambda row: row.ifindex)
    with table.txn() as write:
        for row in rows:
            write.put(row)
    return table


class Node(AgentConfig):
    """A state directory and the families; no lock on the node is taken."""

    def __init__(self, directory: Path, *, ipv4: bool = True, ipv6: bool = False) -> None:
        self.state_dir, self.ipv4, self.ipv6 = directory, ipv4, ipv6
