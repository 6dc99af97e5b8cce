"""What is encrypted between nodes, and the key that this node publishes, in the words of those that heed it.

Source: Cilium 1.17; the key of all nodes with WireGuard is the number 255.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = [
    "WIREGUARD_KEY",
    "WIREGUARD_LINK",
    "WIREGUARD_OVERHEAD",
    "ClusterEncryption",
    "EncryptionKey",
]

WIREGUARD_KEY: Final = 255
"""The number for "encrypted" in the ipcache, where IPsec has the number of its key."""
WIREGUARD_LINK: Final = "cilium_wg0"
"""The name of WireGuard's device, as Cilium has it."""
WIREGUARD_OVERHEAD: Final = 80
"""Bytes before and behind a packet: WireGuard 32, UDP 8, IPv6 40."""


class EncryptionKey(msgspec.Struct, frozen=True):
    """The row of the table ``encryption-key``: what other nodes are to know of this one."""

    number: int = 0
    """What its packets to nodes are encrypted with: 0, not at all; 255, WireGuard; else a key of IPsec's."""
    wireguard: str = ""
    """The public key of its WireGuard, in base64."""


class ClusterEncryption(msgspec.Struct, frozen=True):
    """What is encrypted, as far as others need to know."""

    pods: int = 0
    """The key's number in the ipcache for pods of all nodes; 0: each announces its own."""
    nodes: bool = False
    """Whether nodes are encrypted to, that publish a key."""
    overhead: int = 0
    """Bytes by which a packet grows."""
