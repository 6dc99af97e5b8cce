"""Rotates a node's key without loss: nodes reach it with both keys until all of them use the next one.

Why: a device has one key, and an address belongs to one peer of a device: so both nodes use a second device
     meanwhile. The rotating node has its next key on cilium_wg1, the others have the peer on cilium_wg2. Each
     sends over its second device once a message has arrived over it, and receives over both. Then cilium_wg0
     gets the next key, and nodes change back in the same way. Cilium's nodes read the next key when it is in
     force. The other node sends the first message: if two handshakes begin simultaneously, wireguard-go
     (noise-protocol.go, ConsumeMessageResponse) may combine the keys of one with the index of the other, and
     then decrypts nothing for fifteen seconds.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Mapping
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.encryption import ROTATION_READY
from cells.cluster.nodes.node import ClusterNode
from cells.datapath.datapath import Datapath
from cells.encryption.wireguard.device import Slot, WireguardDevice
from cells.encryption.wireguard.messages import MessageKind, MessageSocket, RotationMessage, rotation_token
from cells.encryption.wireguard.peers import (
    DUMMY_KEY,
    PeerCall,
    PeerDevice,
    WireguardPeers,
)
from cells.encryption.wireguard.settings import WireguardKey
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheKey
from cells.node.sysctl import Sysctls
from lifecycle import Health, Jobs, Logger, minutes, seconds

__all__ = [
    "Handover",
    "RotatingNode",
    "RotationRefusedError",
    "RotationState",
    "WireguardRotation",
    "handover",
]

INTERVAL: Final = seconds(30)
"""Interval of comparisons of second devices, in addition to those at changes of nodes, prefixes and links."""
PACE: Final = seconds(1)
"""Interval at which messages without an answer are repeated."""
HEAD_START: Final = seconds(3)
"""How long the rotating node lets other nodes send the first message."""
DRAIN: Final = seconds(1)
"""How long a device still receives packets after the last node has changed to another one."""
PATIENCE: Final = minutes(5)
"""How long a rotation waits for a node that does not answer."""


class RotatingNode(msgspec.Struct, frozen=True):
    """The part of a node that rotations depend on."""

    name: str
    """With its cluster: ``cluster/name``."""
    key: str
    rotation: str
    """Its announcement: ROTATION_READY, its next key, or empty."""
    addresses: Mapping[Family, IPAddress] = {}
    ranges: frozenset[IPNetwork] = frozenset()

    @property
    def next_key(self) -> str:
        """Empty if its key is not being rotated."""
        return "" if self.rotation == ROTATION_READY else self.rotation

    @property
    def prefixes(self) -> frozenset[IPNetwork]:
        """The prefixes by which programs look up the device for packets to it and its pods."""
        return self.ranges | {IpcacheKey.host(ip).network for ip in self.addresses.values()}


def rotating_node(node: ClusterNode) -> RotatingNode:
    """The RotatingNode of a node."""
    addresses = {family: ip for family in Family if (ip := node.node_ip(family)) is not None}
    return RotatingNode(
        *(node.full_name, node.wireguard_key, node.wireguard_rotation, addresses),
        frozenset(node.all_cidrs()),
    )


class Handover(msgspec.Struct, frozen=True):
    """The device to which this node and another one change."""

    slot: Slot
    key: str
    """The next key of the rotating node."""
    own: bool
    """Whether this node is the rotating one."""


def handover(own: RotatingNode, other: RotatingNode) -> Handover | None:
    """The handover of this node and another one; None if they use cilium_wg0.

    If both rotate their keys, the first by name begins.
    """
    if other.next_key and (not own.next_key or other.name < own.name):
        return Handover(Slot.MAIN if other.next_key == other.key else Slot.HELP, other.next_key, own=False)
    if own.next_key and other.rotation:
        return Handover(Slot.MAIN if own.next_key == own.key else Slot.NEXT, own.next_key, own=True)
    return None


class SecondPeer(msgspec.Struct, frozen=True):
    """A peer of a second device."""

    key: bytes
    endpoint: IPAddress
    allowed: frozenset[IPNetwork]
    port: int


class SecondPeers:
    """The peers of a second device. Methods block and raise OSError."""

    def __init__(self) -> None:
        self._present: dict[bytes, SecondPeer] = {}

    def sync(self, link: PeerDevice, wanted: Iterable[SecondPeer], *, made: bool) -> None:
        """Make these the peers of the device; ``made``: it is new.

        Addresses are added before others are removed.
        """
        if made:
            self._present = {}
        by_key = {peer.key: peer for peer in wanted}
        if by_key == self._present:
            return
        found = link.peers()
        for key in found.keys() - by_key.keys():
            link.configure(PeerCall(key, remove=True))
        for key, peer in by_key.items():
            missing = peer.allowed - found.get(key, frozenset())
            if self._present.get(key) == peer and key in found and not missing:
                continue
            link.configure(PeerCall(key, peer.endpoint, missing, port=peer.port))
        surplus = {
            prefix for key, peer in by_key.items() for prefix in found.get(key, frozenset()) - peer.allowed
        }
        surplus -= {prefix for peer in by_key.values() for prefix in peer.allowed}
        if surplus:
            link.configure(PeerCall(DUMMY_KEY, allowed=frozenset(surplus)))
            link.configure(PeerCall(DUMMY_KEY, remove=True))
        self._present = by_key


_IFINDEX: Final = struct.Struct("<I")


class EncryptionPaths:
    """The device for packets to each node, in hive_encryption_paths; cilium_wg0 for nodes without rows."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def read(self) -> dict[IPNetwork, int]:
        """The index of the device for each prefix with a row."""
        rows = self._maps.encryption_paths.items()
        return {IpcacheKey.unpack(key).network: _IFINDEX.unpack(value)[0] for key, value in rows}

    def use(self, prefixes: Iterable[IPNetwork], ifindex: int) -> None:
        """Send to these prefixes over the device; 0: over cilium_wg0."""
        for prefix in prefixes:
            key = IpcacheKey.of(prefix).pack()
            if ifindex:
                self._maps.encryption_paths.update(key, _IFINDEX.pack(ifindex))
            else:
                self._maps.encryption_paths.delete(key)


class NodePath(msgspec.Struct, frozen=True):
    """The path to a node: the device, and the prefixes with a row for it."""

    slot: Slot = Slot.MAIN
    prefixes: frozenset[IPNetwork] = frozenset()


FIRST: Final = NodePath()


class RotationState(msgspec.Struct, frozen=True):
    """The progress of the rotation of this node's key."""

    public_key: str
    """The key in force for nodes that do not take part."""
    next_key: str = ""
    """Empty if no rotation is in progress."""
    step: str = "none"
    """none; announced: other nodes change to the next key; in force: they change back to cilium_wg0."""
    waits_for: list[str] = []
    """Nodes that have not changed yet, or that rotate their own key first."""
    missed: list[str] = []
    """Nodes that did not change in time, in this rotation or the last."""


class RotationRefusedError(Exception):
    """A rotation cannot begin; one line."""


class WireguardRotation:
    """Rotates this node's key, and takes part in the rotations of other nodes.

    The devices follow from the announcements of nodes; the kernel's map has the device for each node. So the
    next agent continues a rotation if this one is killed at any point.
    """

    def __init__(
        self,
        key: WireguardKey,
        device: WireguardDevice,
        peers: WireguardPeers,
        maps: Maps,
        datapath: Datapath,
        sysctls: Sysctls,
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._key = key
        self._device = device
        self._peers = peers
        self._rows = EncryptionPaths(maps)
        self._datapath = datapath
        self._sysctls = sysctls
        self._jobs = jobs
        self._health = health.child("rotation")
        self._log = log
        self._own = RotatingNode("", "", "")
        self._others: dict[str, RotatingNode] = {}
        self._rotating: set[str] = set()
        """Nodes that announce a next key."""
        self._handovers: dict[str, Handover] = {}
        self._paths: dict[str, NodePath] = {}
        """Nodes to which packets are sent over a second device."""
        self._indexes: dict[Slot, int] = {}
        """Existing devices with programs."""
        self._second = {slot: SecondPeers() for slot in (Slot.NEXT, Slot.HELP)}
        self._known = self._loaded = False
        self._was_active = True
        self._arranged = 0.0
        """When second devices were last compared; 0: compare them now."""
        self._changed_nodes: set[str] = set()
        """During a rotation of this node's key, nodes that send over the device to change to."""
        self._progress = 0.0
        """When the last node changed, or the step began."""
        self._missed: list[str] = []
        self._socket: MessageSocket | None = None
        self._exchanging = False
        self._beginning = anyio.Lock()
        self._timer = (
            jobs.timer("rotate keys", self._step, INTERVAL) if key.settings.enable_wireguard else None
        )

    # Announcements of nodes

    def note(self, node: ClusterNode) -> None:
        """Add or update a node."""
        row = rotating_node(node)
        if node.local:
            self._own = row
            self.forget(row.name)  # the table may have had this node as published by its last agent
            return
        self._others[row.name] = row
        (self._rotating.add if row.next_key else self._rotating.discard)(row.name)

    def forget(self, name: str) -> None:
        """Remove a node."""
        self._others.pop(name, None)
        self._rotating.discard(name)
        self._changed_nodes.discard(name)

    @property
    def active(self) -> bool:
        """Whether this node takes part in the rotation of any key."""
        return bool(self._key.next_private or self._rotating or self._handovers or self._paths)

    @property
    def _busy(self) -> bool:
        """Whether work is due that no change triggers."""
        return bool(self._handovers or self._key.next_private)

    # A rotation of this node's key

    async def begin(self) -> RotationState:
        """Create the next key and announce it.

        Raises RotationRefusedError, and OSError for the key's file.
        """
        async with self._beginning:
            if not self._key.settings.enable_wireguard:
                raise RotationRefusedError("there is no key to rotate: set enable-wireguard=true")
            if self._key.next_private:
                raise RotationRefusedError(
                    f"a rotation to key {self._key.next_public} runs already, step: {self.state().step}"
                )
            if not self._loaded:
                raise RotationRefusedError("the other nodes are not known yet: try again in a moment")
            if self._rotating:
                names = ", ".join(sorted(self._rotating))
                raise RotationRefusedError(f"keys are rotated one after the other: wait for {names}")
            await to_thread.run_sync(self._key.make_next)
            self._start_step()
            self._missed = []
            self._key.publish()
            self._log.info("rotation of the WireGuard key announced", next_key=self._key.next_public)
            self.look()
            return self.state()

    def state(self) -> RotationState:
        """The progress of the rotation."""
        key = self._key
        if not key.next_public:
            return RotationState(key.public, missed=self._missed)
        step = "in force" if key.next_public == key.public else "announced"
        return RotationState(key.public, key.next_public, step, self._waits_for(), self._missed)

    def _waits_for(self) -> list[str]:
        own = {name for name, one in self._handovers.items() if one.own} - self._changed_nodes
        first = {name for name, one in self._handovers.items() if not one.own}
        return sorted(own | first)

    def _start_step(self) -> None:
        self._changed_nodes.clear()
        self._progress = anyio.current_time()

    # Devices and paths

    def start(self) -> None:
        """Take part in rotations, as all nodes and prefixes are known."""
        self._known = True
        self.look()

    def look(self) -> None:
        """Process changes of nodes or devices."""
        self._arranged = 0.0
        self._run_soon()

    def _run_soon(self) -> None:
        if self._timer is not None:
            self._timer.trigger()

    async def _step(self) -> None:
        """Advance each handover as far as possible. Raises OSError, HiveError."""
        if not (self._known and self._own.name):
            return
        if not self._loaded:
            self._load()
        if not (active := self.active) and not self._was_active:
            return
        self._decide()
        if not self._arranged or anyio.current_time() - self._arranged >= INTERVAL:
            await self._arrange()
        self._find_ready_devices()
        if self._busy and not self._exchanging:
            self._exchanging = True
            self._jobs.one_shot("exchange messages about keys", self._exchange_messages)
        for name, one in self._handovers.items():
            if self._asks(name, one):
                self._send(name, MessageKind.ASK)
        if self._key.next_private:
            await self._advance()
        self._was_active = active
        self._report()

    def _load(self) -> None:
        """Read the paths of the previous agent from the kernel."""
        rows = self._rows.read()
        slots = {self._device.links[slot].ifindex: slot for slot in (Slot.NEXT, Slot.HELP)}
        slots.pop(0, None)
        for name, node in self._others.items():
            found = {prefix: slots[rows[prefix]] for prefix in node.prefixes if rows.get(prefix) in slots}
            for slot in found.values():
                self._paths[name] = NodePath(slot, frozenset(found))
        known = {prefix for path in self._paths.values() for prefix in path.prefixes}
        self._rows.use(rows.keys() - known, 0)
        self._start_step()
        self._loaded = True

    def _decide(self) -> None:
        """Choose the handovers; packets of ended ones are sent over cilium_wg0 from now on."""
        rotation = self._key.next_public or ROTATION_READY
        own = msgspec.structs.replace(self._own, key=self._key.public, rotation=rotation)
        names = self._others.keys() if own.next_key else self._rotating
        found = {name: handover(own, self._others[name]) for name in sorted(names)}
        self._handovers = {name: one for name, one in found.items() if one is not None}
        for name, path in list(self._paths.items()):
            if name not in self._handovers:
                self._use(name, Slot.MAIN)
            elif path.prefixes != self._others[name].prefixes and path.slot in self._indexes:
                self._use(name, path.slot)

    async def _arrange(self) -> None:
        """Create and remove second devices with their peers. Raises OSError, HiveError."""
        self._arranged = anyio.current_time()
        needed = {Slot.NEXT: bool(self._key.next_private), Slot.HELP: False}
        wanted: dict[Slot, list[SecondPeer]] = {slot: [] for slot in needed}
        try:
            async with self._device.lock:
                for name, one in self._handovers.items():
                    slot = Slot.NEXT if one.own else Slot.HELP
                    needed[slot] = True
                    if (peer := self._second_peer(name, one)) is not None:
                        wanted[slot].append(peer)
                for slot, wants in needed.items():
                    if wants:
                        await to_thread.run_sync(self._ensure_second_device, slot, wanted[slot])
                    else:
                        await to_thread.run_sync(self._device.remove_rotating, slot)
        except BaseException:
            self._arranged = 0.0
            raise

    def _ensure_second_device(self, slot: Slot, peers: list[SecondPeer]) -> None:
        """Create a second device if it is missing, and set its peers. Runs in a worker thread."""
        made = self._device.ensure(slot)
        if made:
            self._sysctls.write({f"net/ipv4/conf/{slot.link}/rp_filter": "0"})
        self._second[slot].sync(self._device.links[slot], peers, made=made)

    def _second_peer(self, name: str, one: Handover) -> SecondPeer | None:
        node, allowed = self._others.get(name), self._peers.allowed(name)
        if node is None:
            return None
        endpoint, key = self._peers.endpoint(node.addresses), _decoded(node.key if one.own else one.key)
        if endpoint is None or not allowed or key is None:
            return None
        return SecondPeer(key, endpoint, allowed, (Slot.HELP if one.own else Slot.NEXT).port)

    def _find_ready_devices(self) -> None:
        """Find the devices with programs, as packets must not arrive over a device without."""
        before, self._indexes = self._indexes, {}
        for slot, link in self._device.links.items():
            ifindex = link.ifindex
            if ifindex and self._datapath.serves_device(ifindex, l3=True, accelerated=False):
                self._indexes[slot] = ifindex
        if self._indexes == before:
            return
        if self._socket is not None:
            self._socket.listen(self._indexes.values())
        for path in self._paths.values():
            if path.slot in self._indexes and before.get(path.slot) != self._indexes[path.slot]:
                self._rows.use(path.prefixes, self._indexes[path.slot])

    def _use(self, name: str, slot: Slot) -> None:
        """Send to a node over this device from now on."""
        old, node = self._paths.pop(name, FIRST), self._others.get(name)
        prefixes = frozenset[IPNetwork]()
        if slot is not Slot.MAIN and node is not None:
            prefixes = node.prefixes
            self._rows.use(prefixes, self._indexes[slot])
            self._paths[name] = NodePath(slot, prefixes)
        self._rows.use(old.prefixes - prefixes, 0)
        if old.slot is not slot:
            self._log.debug("packets to a node leave by another device", node=name, device=slot.link)

    # Steps of the rotation

    async def _advance(self) -> None:
        waits, passed = self._waits_for(), anyio.current_time() - self._progress
        if passed < (PATIENCE if waits else DRAIN):
            return
        if waits:
            self._missed = sorted({*self._missed, *waits})
            self._log.warning(
                "nodes have not changed to the next WireGuard key in time: packets to and from them are lost"
                " until they have",
                nodes=waits,
            )
        if self._key.next_public == self._key.public:
            for name in [name for name, one in self._handovers.items() if one.own and name in self._paths]:
                self._use(name, Slot.MAIN)
            await to_thread.run_sync(self._key.end_rotation)
            self._log.info("rotation of the WireGuard key is complete", public_key=self._key.public)
        else:
            await to_thread.run_sync(self._key.adopt_next)
            async with self._device.lock:
                await to_thread.run_sync(self._device.ensure)
            self._log.info("the next WireGuard key is in force", public_key=self._key.public)
        self._start_step()
        self._key.publish()
        self.look()

    def _report(self) -> None:
        state = self.state()
        if self._missed:
            self._health.degraded(f"step {state.step}; not changed in time: {', '.join(self._missed)}")
        elif state.waits_for:
            self._health.ok(f"step {state.step}, waits for {', '.join(state.waits_for)}")
        else:
            self._health.ok(f"step {state.step}")

    # Messages between nodes

    async def _exchange_messages(self) -> None:
        """Receive messages, and repeat those without an answer, until no key is being rotated."""
        with MessageSocket() as messages:
            self._socket = messages
            try:
                messages.listen(self._indexes.values())
                async with anyio.create_task_group() as group:
                    group.start_soon(self._receive_messages, messages)
                    while self._busy:
                        self._run_soon()
                        await anyio.sleep(PACE)
                    group.cancel_scope.cancel()
            finally:
                self._socket = None
        self._exchanging = False
        self.look()

    async def _receive_messages(self, messages: MessageSocket) -> None:
        while True:
            for device, message in await messages.wait():
                self._receive(device, message)

    def _asks(self, name: str, one: Handover) -> bool:
        """Whether this node must send the first message."""
        sends_by_it = self._paths.get(name, FIRST).slot is one.slot
        if not one.own:
            return not sends_by_it
        late = anyio.current_time() - self._progress >= HEAD_START
        return name not in self._changed_nodes and (sends_by_it or late)

    def _receive(self, device: str, message: RotationMessage) -> None:
        """Process a message that arrived over a device: also send to its sender over that device."""
        name = self._peers.node_by_ip.get(message.source, "")
        one = self._handovers.get(name)
        if one is None or one.slot.link != device or message.token != rotation_token(one.key):
            return
        if not self._can_use(name, one):
            return
        if self._paths.get(name, FIRST).slot is not one.slot:
            self._use(name, one.slot)
        waits = one.own and name not in self._changed_nodes
        if message.kind is MessageKind.ASK:
            self._send(name, MessageKind.ASK if waits else MessageKind.IN_USE)
        elif waits:
            self._changed_nodes.add(name)
            self._progress = anyio.current_time()

    def _can_use(self, name: str, one: Handover) -> bool:
        """Whether the device is ready: cilium_wg0 only with the new key, as the old one still decrypts."""
        return one.slot in self._indexes and (
            one.own or one.slot is not Slot.MAIN or self._peers.key(name) == _decoded(one.key)
        )

    def _send(self, name: str, kind: MessageKind) -> None:
        node, one = self._others.get(name), self._handovers[name]
        there = self._peers.endpoint(node.addresses) if node is not None else None
        own = self._own.addresses.get(Family.of(there)) if there is not None else None
        if self._socket is None or there is None or own is None or not self._can_use(name, one):
            return
        try:
            self._socket.send(one.slot.link, RotationMessage(own, there, kind, rotation_token(one.key)))
        except OSError as error:  # the next step sends it again
            self._log.debug("message not sent", node=name, device=one.slot.link, error=str(error))


def _decoded(key: str) -> bytes | None:
    """Decode a public key; None if it is invalid or no node may have it."""
    try:
        found = base64.b64decode(key, validate=True)
    except binascii.Error:
        return None
    return found if len(found) == len(DUMMY_KEY) and found != DUMMY_KEY else None
