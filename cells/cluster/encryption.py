"""What is encrypted between nodes, and the key that this node publishes, in the words of those that heed it.

Source: Cilium 1.17; the key of all nodes with WireGuard is the number 255.
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
"""The number for "encrypted" in the ipcache, where IPsec has the number of its key."""
UNANNOUNCED_KEY: Final = 255
"""With IPsec: the number in the ipcache for pods of nodes that announce no key. Programs take this node's own
then, for no packet leaves in clear text; IPsec's own numbers are 1 to 15."""
WIREGUARD_LINK: Final = "cilium_wg0"
"""The name of WireGuard's device, as Cilium has it."""
WIREGUARD_LINKS: Final = (WIREGUARD_LINK, "cilium_wg1", "cilium_wg2")
"""Names of all its devices: the second and third are there while keys are rotated."""
ROTATION_READY: Final = "ready"
"""What a node announces that takes part in rotations of keys, while its own is not rotated."""
WIREGUARD_PORT: Final = 51871
"""The UDP port that every node listens on with WireGuard, as Cilium has it."""
WIREGUARD_OVERHEAD: Final = 80
"""Bytes before and behind a packet: WireGuard 32, UDP 8, IPv6 40."""


class EncryptionKey(msgspec.Struct, frozen=True):
    """The row of the table ``encryption-key``: what other nodes are to know of this one."""

    number: int = 0
    """What its packets to nodes are encrypted with: 0, not at all; 255, WireGuard; else a key of IPsec's."""
    wireguard: str = ""
    """The public key of its WireGuard, in base64."""
    rotation: str = ""
    """ROTATION_READY, or the next public key of its WireGuard, in base64; empty: it has none."""
    overhead: int = 0
    """Bytes by which a packet grows that is encrypted with it."""


class PublishedKey:
    """The table ``encryption-key``: one row, of WireGuard's or of IPsec's, which are never on together."""

    def __init__(self, tables: Tables) -> None:
        self.table: Table[str, EncryptionKey] = Table("encryption-key", key=lambda row: row.wireguard)
        tables.add(self.table)

    @property
    def number(self) -> int:
        """Of the key that is published; 0: none is."""
        return next((row.number for row in self.table.all()), 0)

    def publish(self, row: EncryptionKey) -> None:
        """Publish it as this node's key, in place of the last one."""
        with self.table.txn() as txn:
            txn.replace_all([row])


class ClusterEncryption(msgspec.Struct, frozen=True):
    """What is encrypted, as far as others need to know."""

    pods: int = 0
    """The key's number in the ipcache for pods of nodes that announce no other; 0: each claim has its own."""
    nodes: bool = False
    """Whether nodes are encrypted to, that publish a key."""
