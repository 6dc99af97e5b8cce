"""Encryption between nodes, and this node's published key, for the cells that depend on them.

Source: Cilium 1.17; all nodes with WireGuard have the key number 255.
"""

from __future__ import annotations

from typing import Final

import msgspec

from lifecycle import Table, Tables

__all__ = [
    "ROTATION_READY",
    "UNANNOUNCED_KEY",
    "WIREGUARD_KEY",
    "WIREGUARD_LINK",
    "WIREGUARD_LINKS",
    "WIREGUARD_OVERHEAD",
    "WIREGUARD_PORT",
    "ClusterEncryption",
    "EncryptionKey",
    "PublishedKey",
]

WIREGUARD_KEY: Final = 255
"""The key number of WireGuard in the ipcache; IPsec has the number of its key."""
UNANNOUNCED_KEY: Final = 255
"""With IPsec, the key number in the ipcache for pods of nodes without a published key.

Programs then use this node's own key, so that no packet leaves in clear text; IPsec's own numbers are 1 to
15.
"""
WIREGUARD_LINK: Final = "cilium_wg0"
"""The name of WireGuard's device, as in Cilium."""
WIREGUARD_LINKS: Final = (WIREGUARD_LINK, "cilium_wg1", "cilium_wg2")
"""Names of all its devices: the second and third exist during rotations of keys."""
ROTATION_READY: Final = "ready"
"""The announcement of a node that takes part in rotations of keys while its own is not being rotated."""
WIREGUARD_PORT: Final = 51871
"""The UDP port of WireGuard on every node, as in Cilium."""
WIREGUARD_OVERHEAD: Final = 80
"""Bytes that are added to a packet: WireGuard 32, UDP 8, IPv6 40."""


class EncryptionKey(msgspec.Struct, frozen=True):
    """The row of the table ``encryption-key``: the key that this node publishes."""

    number: int = 0
    """The key for its packets to nodes: 0, none; 255, WireGuard; otherwise one of IPsec."""
    wireguard: str = ""
    """Its public WireGuard key, in base64."""
    rotation: str = ""
    """ROTATION_READY, or its next public WireGuard key in base64; empty: no rotations."""
    overhead: int = 0
    """Bytes that encryption adds to a packet."""


class PublishedKey:
    """The table ``encryption-key``: one row, of WireGuard or IPsec, which are never enabled together."""

    def __init__(self, tables: Tables) -> None:
        self.table: Table[str, EncryptionKey] = Table("encryption-key", key=lambda row: row.wireguard)
        tables.add(self.table)

    @property
    def number(self) -> int:
        """Number of the published key; 0: none."""
        return next((row.number for row in self.table.all()), 0)

    def publish(self, row: EncryptionKey) -> None:
        """Publish this node's key, replacing the last one."""
        with self.table.txn() as txn:
            txn.replace_all([row])


class ClusterEncryption(msgspec.Struct, frozen=True):
    """What is encrypted, for other cells."""

    pods: int = 0
    """The key number in the ipcache for pods of nodes without another one; 0: each claim has its own."""
    nodes: bool = False
    """Whether packets to nodes with a published key are encrypted."""
