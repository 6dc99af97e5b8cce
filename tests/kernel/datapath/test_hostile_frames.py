"""Whatever frames arrive, pods and node receive exactly what a plain model of policy allows."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

import pytest

from cells.maps.map import Map, create_map
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.records.flows import DeviceConfig
from cells.maps.specs import policy_spec
from tests.kernel.datapath.model_packet import (
    ICMPV6,
    INVALID,
    IPV4,
    IPV6,
    UDP,
    Address,
    Direction,
    Flow,
    Fragments,
    RefusedError,
    read,
)
from tests.kernel.datapath.model_policy import decide
from tests.kernel.datapath.world import (
    IFINDEX,
    NODE,
    NODE6,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    ROUTER,
    ROUTER6,
    SHOT,
    A,
    B,
    Outcome,
    raw,
)
from tests.kernel.datapath_overlay.recorder import Route
from tests.kernel.datapath_overlay.world import REMOTE, REMOTE6, REMOTE_IDENTITY, STRANGER, OverlayWorld
from tests.support.hostile_frames import Attack, Attacker
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel

COUNT: Final = int(os.environ.get("FRAMES", "300"))
"""Frames by each way in; ``make soak`` sends more."""
HOST_NUMBER: Final = 20
BRIDGE: Final = 99
WORLD, WORLD6 = 2, 10
LOCAL: Final = (A.ip, B.ip, ROUTER, NODE, "127.0.0.1", A.ip6, B.ip6, ROUTER6, NODE6, "::1")
OTHERS: Final = (OUTSIDE, REMOTE, "0.0.0.0", OUTSIDE6, REMOTE6, "fe80::bad", "::")
TARGETS: Final = (
    *(A.ip, A.ip6, B.ip, B.ip, B.ip6, B.ip6, ROUTER, ROUTER6, NODE, NODE6, OUTSIDE, OUTSIDE6),
    *("127.0.0.1", "::1"),
    *(FOR_ALL := ("224.0.0.1", "255.255.255.255", "ff02::1", "fe80::7")),
)
NODES_OWN: Final = {ip_address(ip) for ip in (ROUTER, ROUTER6, NODE, NODE6)}
PODS: Final = {ip_address(ip): pod for pod in (A, B) for ip in (pod.ip, pod.ip6)}
RULES: Final = {
    A.id: {},
    B.id: {PolicyKey(peer, False, UDP, 53, 16): False for peer in (WORLD, WORLD6, REMOTE_IDENTITY)},
}
"""No peer may reach A; those outside and of the other node may reach B by UDP 53."""
MOST_TAGS: Final = 4
VLAN: Final = 182
"""The reason for drops of what is tagged too often."""
NEIGHBOUR_DISCOVERY: Final = range(130, 138)
IGMP: Final = 2


class HostileWorld(OverlayWorld):
    """Two pods and a node with policies, a device, a tunnel, and a way to every address elsewhere."""

    def reset(self) -> None:
        super().reset()
        self.maps["hive_devices"].update(struct.pack("<I", IFINDEX), DeviceConfig(bytes(6)).pack())
        self.recorder.nothing(Route(0, 9))
        self.report(host_endpoint=HOST_NUMBER)
        for pod in (A, B):
            rules = [(key, PolicyEntry(deny=deny)) for key, deny in RULES[pod.id].items()]
            self.allow(pod, [*rules, (PolicyKey(0, egress=True), PolicyEntry())])


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[HostileWorld, Map]]:
    """The world, and the policy of the node, which allows nothing."""
    need_root()
    with HostileWorld() as world, create_map(policy_spec(HOST_NUMBER, 256)) as policy:
        world.maps["hive_policies"].update(struct.pack("<I", HOST_NUMBER), struct.pack("<I", policy.fd))
        yield world, policy


@pytest.fixture
def hostile(guarded: tuple[HostileWorld, Map]) -> HostileWorld:
    """Without connections."""
    guarded[0].reset()
    return guarded[0]


def untagged(frame: bytes) -> bytes | None:
    """As the kernel takes priority tags off; None if it is a VLAN's, or tagged too often for anybody."""
    for _ in range(MOST_TAGS + 1):
        if frame[12:14] not in {b"\x81\x00", b"\x88\xa8"}:
            return frame
        if len(frame) < 18 or int.from_bytes(frame[14:16], "big") & 0xFFF:
            return None
        frame = frame[:12] + frame[16:]
    return None


def kind(frame: bytes) -> int:
    return int.from_bytes(frame[12:14], "big")


def target(frame: bytes) -> Address | None:
    """Where the kernel would take an IP frame to be for."""
    if kind(frame) == IPV4 and len(frame) >= 34:
        return ip_address(frame[30:34])
    return ip_address(frame[38:54]) if kind(frame) == IPV6 and len(frame) >= 54 else None


def is_local(ip: Address) -> bool:
    """Whether it is this node's, a pod's of it, or loopback's."""
    return ip in NODES_OWN or ip in PODS or ip.is_loopback


@dataclass
class Model:
    """Who gets what, by policy alone."""

    identity: Callable[[Address], int | None]
    """Who comes from the address, by this way; None: no endpoint."""
    fragments: Fragments = field(default_factory=dict)
    reached: set[Address] = field(default_factory=set)
    """Pods that have flows, about which errors may come."""

    def flow(self, frame: bytes) -> Flow | None:
        """What a frame without tags is; None if it cannot be read, or its source has no owner."""
        source = frame[26:30] if kind(frame) == IPV4 else frame[22:38]
        try:
            if kind(frame) not in {IPV4, IPV6} or self.identity(ip_address(source)) is None:
                return None
            return read(frame, self.fragments)
        except (RefusedError, ValueError):
            return None

    def allows(self, flow: Flow) -> bool:
        """Whether a pod gets it."""
        peer, pod = self.identity(flow.source), PODS.get(flow.destination)
        if peer is None or pod is None or flow.hops <= 1:
            return False
        return decide(RULES[pod.id], flow, Direction.INGRESS, peer) is None

    def check(self, attack: Attack, seen: bytes | None, got: Outcome | None) -> None:
        """``seen``: the frame as the node reads it; ``got``: what became of it, if a pod got it."""
        flow = self.flow(seen) if seen is not None else None
        allowed = flow is not None and self.allows(flow)
        if flow is not None and allowed:
            self.reached.add(flow.destination)
        if got is None:
            assert not allowed, f"{attack} was dropped"
            return
        assert flow is not None, f"{attack} was delivered, and cannot be read"
        assert got.packet.dst == PODS[flow.destination].mac
        assert allowed or (flow.related and flow.destination in self.reached), f"{attack} was delivered"


def from_outside(ip: Address) -> int | None:
    """By a device. From link-local addresses the stack forwards nothing."""
    if is_local(ip) or ip.is_link_local:
        return None
    return REMOTE_IDENTITY if str(ip) in {REMOTE, REMOTE6} else WORLD


def attacks(seed: int, *, tagged: bool = True) -> Iterator[Attack]:
    made = Attacker(seed, ("0a:00:00:00:99:01", "0a:00:00:00:99:02"), (*LOCAL, *OTHERS), TARGETS, (53, 80))
    for attack in made.frames(COUNT):
        shortest = 54 if kind(attack.frame) == IPV6 else 34
        if len(attack.frame) >= shortest and (tagged or kind(attack.frame) in {IPV4, IPV6}):
            yield attack  # of shorter ones the kernel runs no program


def nothing_is_remembered_of_a(world: HostileWorld) -> None:
    entries = [
        key
        for version in (4, 6)
        for tcp in (True, False)
        for key in world.connections(tcp=tcp, version=version)
    ]
    assert not [key for key in entries if {str(key.saddr), str(key.daddr)} & {A.ip, A.ip6}]


def may_be_taken(frame: bytes) -> bool:
    """Whether the node may get an IP frame for itself though its policy allows nothing.

    It finds neighbours, routers ask for groups; or its stack cannot read it either.
    """
    try:
        flow = read(frame, {})
    except RefusedError as refused:
        return refused.reason == INVALID or (kind(frame) == IPV4 and frame[23] == IGMP)
    return flow.protocol == ICMPV6 and flow.policy_port in NEIGHBOUR_DISCOVERY


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_frames_by_a_device_pass_only_as_policy_allows(hostile: HostileWorld, seed: int) -> None:
    model = Model(from_outside)
    for attack in attacks(seed):
        first = hostile.device_gets(attack.frame)
        seen, got = untagged(attack.frame), None
        if seen is None:
            assert first.counted.keys() <= {(VLAN, Direction.INGRESS)}, f"{attack} was read as the device's"
        elif first.action == OK:
            after = untagged(bytes(first.packet))
            to = target(after) if after is not None else None
            if after is not None and to in PODS:  # the stack forwards it
                got = hostile.host_sends(after, device=IFINDEX)
                got = got if got.action == REDIRECT else None
            elif after is not None and to is not None and (to in NODES_OWN or str(to) in FOR_ALL):
                assert may_be_taken(after), f"the node got {attack}"
        model.check(attack, seen, got)
    nothing_is_remembered_of_a(hostile)


@pytest.mark.parametrize("node", ["of the cluster", "stranger", "as host"])
def test_hostile_frames_by_the_tunnel_pass_only_from_nodes_as_policy_allows(
    hostile: HostileWorld, node: str
) -> None:
    believed = node == "of the cluster"
    model = Model(lambda ip: None if is_local(ip) or not believed else REMOTE_IDENTITY)
    more = {"stranger": {"node": STRANGER}, "as host": {"vni": 1}}.get(node, {})
    for attack in attacks(3, tagged=False):
        done = hostile.tunnel_brings(attack.frame, **more)  # type: ignore[arg-type]  # as it takes them
        assert done.action in {SHOT, REDIRECT}
        model.check(attack, attack.frame, done if done.action == REDIRECT else None)
    nothing_is_remembered_of_a(hostile)


def test_hostile_frames_by_a_bridge_pass_only_as_policy_allows(hostile: HostileWorld) -> None:
    model = Model(from_outside)
    for attack in attacks(4, tagged=False):
        if target(attack.frame) not in PODS or ip_address(attack.source).is_loopback:
            continue  # the kernel refuses those itself
        done = hostile.host_sends(attack.frame, device=BRIDGE)
        model.check(attack, attack.frame, done if done.action == REDIRECT else None)
    nothing_is_remembered_of_a(hostile)


def test_hostile_frames_of_a_pod_reach_no_neighbour_node_or_other_identity(hostile: HostileWorld) -> None:
    own = {ip_address(ip) for ip in (A.ip, A.ip6)}
    made = Attacker(5, (A.mac, A.host_mac), (A.ip, A.ip6) * 6 + LOCAL + OTHERS, TARGETS, (53, 80))
    for attack in made.frames(COUNT):
        if len(attack.frame) < (54 if kind(attack.frame) == IPV6 else 34):
            continue
        done = hostile.pod_sends(A, attack.frame)
        if done.action == REDIRECT:  # an answer to itself
            assert raw(done.packet.dst) == attack.frame[6:12], attack
            assert done.packet.dst == A.mac or attack.what.startswith("damaged"), attack
        elif done.action == OK:
            frame = bytes(done.packet)
            to = target(frame)
            assert to is not None, attack
            source = ip_address(frame[26:30] if kind(frame) == IPV4 else frame[22:38])
            assert source in own or may_be_taken(frame), attack
            node = to in NODES_OWN or str(to) in FOR_ALL
            assert not node or may_be_taken(frame), f"the node got {attack}"
