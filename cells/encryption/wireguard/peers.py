"""The peers of the WireGuard device: one for each other node, with the addresses behind it.

Source: Cilium 1.17's calls to the device, in order, as recorded.
Why:    addresses are added before others are removed, and a list is never replaced, as the kernel does not
        do that atomically, so that packets would find no peer. An address to remove is moved to a peer with
        an all-zero key, and then that peer is deleted.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Final, Protocol

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.encryption import WIREGUARD_PORT

__all__ = ["DUMMY_KEY", "PeerCall", "PeerDevice", "PeerError", "PeerNode", "WireguardPeers"]

DUMMY_KEY: Final = bytes(32)
"""A key that no node can have, as X25519 refuses the point."""


class PeerError(ValueError):
    """A node that cannot become a peer because of its key or addresses."""


class PeerCall(msgspec.Struct, frozen=True):
    """A change of one peer of the device; addresses are added to its present ones."""

    key: bytes
    endpoint: IPAddress | None = None
    allowed: frozenset[IPNetwork] = frozenset()
    keepalive: float = 0
    """Seconds between keepalives; 0 disables them."""
    remove: bool = False
    port: int = WIREGUARD_PORT
    """Port of the endpoint."""


class PeerDevice(Protocol):
    """The WireGuard device."""

    def configure(self, call: PeerCall) -> None:
        """Apply one change. Raises OSError."""

    def peers(self) -> Mapping[bytes, frozenset[IPNetwork]]:
        """The allowed addresses of each peer, by public key. Raises OSError."""


class PeerNode(msgspec.Struct, frozen=True):
    """The part of a node that its peer depends on."""

    name: str
    """With its cluster: ``cluster/name``."""
    key: str
    """The public key in base64; empty if the node publishes none."""
    addresses: Mapping[Family, IPAddress]
    """The endpoint's address of each family."""
    ranges: frozenset[IPNetwork] = frozenset()
    """The node's pod ranges. Most are in the ipcache, too, but not those of nodes without IPv4."""


class _Peer(msgspec.Struct):
    key: bytes
    addresses: dict[Family, IPAddress] = {}
    """Addresses of both families, as prefixes may be at either."""
    ranges: frozenset[IPNetwork] = frozenset()
    endpoint: IPAddress | None = None
    allowed: set[IPNetwork] = set()
    """Allowed addresses on the device, as far as calls have succeeded."""
    added: set[IPNetwork] = set()
    removed: set[IPNetwork] = set()
    """Queued until all calls of a change have succeeded."""

    def add(self, prefix: IPNetwork) -> bool:
        self.removed.discard(prefix)
        if prefix in self.allowed:
            return False
        self.added.add(prefix)
        return True

    def drop(self, prefix: IPNetwork) -> bool:
        self.added.discard(prefix)
        if prefix not in self.allowed:
            return False
        self.removed.add(prefix)
        return True


class WireguardPeers:
    """Keeps the device's peers equal to the other nodes and to the prefixes behind them.

    Encrypted packets are sent to a node's address of ``families``, or to one of ``others`` if it has none.
    The packets inside may have either as destination.
    """

    def __init__(
        self,
        device: PeerDevice,
        families: frozenset[Family],
        keepalive: float = 0,
        others: frozenset[Family] = frozenset(),
    ) -> None:
        self._device = device
        self._families = families
        self._others = others
        self._keepalive = keepalive
        self._peers: dict[str, _Peer] = {}
        self._node_by_ip: dict[IPAddress, str] = {}
        self._node_by_key: dict[bytes, str] = {}
        self._owners: dict[IPNetwork, _Peer] = {}
        self._hosts: dict[IPNetwork, IPAddress] = {}
        """The node of each prefix in the ipcache."""

    @property
    def node_by_ip(self) -> Mapping[IPAddress, str]:
        return self._node_by_ip

    def key(self, name: str) -> bytes | None:
        """The public key of a node's peer; None if it has none."""
        peer = self._peers.get(name)
        return peer.key if peer is not None else None

    def allowed(self, name: str) -> frozenset[IPNetwork]:
        """The addresses behind a node; empty if it has no peer."""
        peer = self._peers.get(name)
        return frozenset(peer.allowed | peer.added) if peer is not None else frozenset()

    def endpoint(self, addresses: Mapping[Family, IPAddress]) -> IPAddress | None:
        """The address of a node to which encrypted packets are sent, preferably IPv4; None if it has none."""
        for families in (self._families, self._others):
            for family in (Family.IPV4, Family.IPV6):
                if family in families and family in addresses:
                    return addresses[family]
        return None

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def upsert(self, node: PeerNode) -> None:
        """Create or change the peer of a node; a no-op for a node without a key.

        Raises PeerError for an invalid key or address, and OSError of the device. After either, the next call
        for this node completes the change.
        """
        if not node.key:
            return
        key = _public_key(node)
        owner = self._node_by_key.get(key, node.name)
        if owner != node.name:
            raise PeerError(
                f'detected duplicate public key. node "{node.name}" uses same key as existing node "{owner}"'
            )
        peer = self._fresh(node, key)
        addresses = dict(node.addresses)
        endpoint = self.endpoint(addresses)
        for family, old in peer.addresses.items():
            # another node may have the address by now: it stays with that node's peer
            if addresses.get(family) != old and self._node_by_ip.get(old) == node.name:
                del self._node_by_ip[old]
                peer.removed.add(ip_network(old))
        for family, address in addresses.items():
            if family in self._families | self._others:
                peer.add(ip_network(address))
        self._have_ranges(peer, node.ranges)
        if endpoint is None:
            raise PeerError(f'missing node IP for node "{node.name}"')
        peer.addresses, peer.ranges, peer.endpoint = addresses, node.ranges, endpoint
        self._apply(peer)
        self._peers[node.name] = peer
        self._node_by_key[key] = node.name
        for address in addresses.values():
            self._node_by_ip[address] = node.name

    def _fresh(self, node: PeerNode, key: bytes) -> _Peer:
        """The peer of a node; a new one if no peer has its key, with the addresses that the device has."""
        peer = self._peers.get(node.name)
        if peer is not None and peer.key == key:
            return peer
        if peer is not None:
            self._device.configure(PeerCall(peer.key, remove=True))
            self._forget(node.name)
        hosts = set(node.addresses.values())
        return _Peer(key, added={prefix for prefix, host in self._hosts.items() if host in hosts})

    def _have_ranges(self, peer: _Peer, ranges: frozenset[IPNetwork]) -> None:
        for prefix in peer.ranges - ranges:
            if self._peer_at(self._hosts.get(prefix)) is not peer:
                peer.drop(prefix)
        for prefix in ranges:
            peer.add(prefix)

    def delete(self, name: str) -> None:
        """Delete the peer of a node. Raises PeerError if it has none, and OSError of the device."""
        peer = self._peers.get(name)
        if peer is None:
            raise PeerError(f'cannot find peer for "{name}" node')
        self._device.configure(PeerCall(peer.key, remove=True))
        self._forget(name)

    def prefix_upserted(self, prefix: IPNetwork, host: IPAddress | None) -> None:
        """Route a prefix to the node with this address. Raises OSError."""
        old = self._hosts.pop(prefix, None)
        if host is not None:
            self._hosts[prefix] = host
        before, after = self._peer_at(old), self._peer_at(host)
        if before is not None and before is not after:
            if host is None:
                if prefix not in before.ranges and before.drop(prefix):
                    self._apply(before)
            elif after is not None:
                before.added.discard(prefix)
        if after is not None and after.add(prefix):
            self._apply(after)

    def restore_changed(self) -> int:
        """Restore peers that others changed. Returns their number; raises OSError.

        Repeats failed calls. Call it only when all nodes and prefixes are known, as other peers are removed.
        """
        found = self._device.peers()
        known = {peer.key for peer in self._peers.values()}
        foreign = found.keys() - known
        for key in foreign:
            self._device.configure(PeerCall(key, remove=True))
        changed = len(foreign)
        for peer in self._peers.values():
            self._compare(peer, found.get(peer.key, frozenset()))
            if peer.added or peer.removed or peer.key not in found:
                self._apply(peer)
                changed += 1
        return changed

    @staticmethod
    def _compare(peer: _Peer, found: frozenset[IPNetwork]) -> None:
        """Queue the differences between the device and the desired peer."""
        missing, foreign = peer.allowed - found, found - peer.allowed - peer.added
        peer.added |= missing
        peer.removed |= foreign
        peer.allowed = (peer.allowed - missing) | foreign

    def _peer_at(self, host: IPAddress | None) -> _Peer | None:
        return self._peers.get(self._node_by_ip.get(host, "")) if host is not None else None

    def _forget(self, name: str) -> None:
        peer = self._peers.pop(name)
        self._owners = {prefix: owner for prefix, owner in self._owners.items() if owner is not peer}
        self._node_by_key = {key: owner for key, owner in self._node_by_key.items() if owner != name}
        for address in peer.addresses.values():
            if self._node_by_ip.get(address) == name:
                del self._node_by_ip[address]

    def _apply(self, peer: _Peer) -> None:
        self._device.configure(PeerCall(peer.key, peer.endpoint, frozenset(peer.added), self._keepalive))
        if peer.removed:
            self._device.configure(PeerCall(DUMMY_KEY, allowed=frozenset(peer.removed)))
            self._device.configure(PeerCall(DUMMY_KEY, remove=True))
        for prefix in peer.added:  # the device takes it from the peer that had it
            owner = self._owners.get(prefix)
            if owner is not None and owner is not peer:
                owner.allowed.discard(prefix)
                owner.removed.discard(prefix)
            self._owners[prefix] = peer
        for prefix in peer.removed:
            if self._owners.get(prefix) is peer:
                del self._owners[prefix]
        peer.allowed = (peer.allowed | peer.added) - peer.removed
        peer.added, peer.removed = set(), set()


def _public_key(node: PeerNode) -> bytes:
    try:
        key = base64.b64decode(node.key, validate=True)
    except binascii.Error as error:
        raise PeerError(f"wgtypes: failed to parse base64-encoded key: {error}") from None
    if len(key) != len(DUMMY_KEY):
        raise PeerError(f"wgtypes: incorrect key size: {len(key)}")
    if key == DUMMY_KEY:
        raise PeerError(f'node "{node.name}" is not allowed to use the dummy peer key')
    return key
