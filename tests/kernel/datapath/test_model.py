"""For random packets, programs and plain model agree on the packet, the maps and the counters."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.records.flows import CtEntry, CtKey
from tests.kernel.datapath.model import Model, ModelPod, Walk
from tests.kernel.datapath.model_conntrack import Entry, Key
from tests.kernel.datapath.model_frames import (
    PODS,
    PORTS,
    damaged,
    host_frames,
    pod_frames,
    pods,
    questions,
    solicitations,
    spoken,
)
from tests.kernel.datapath.model_packet import Direction
from tests.kernel.datapath.packets import from_pod, tcp
from tests.kernel.datapath.world import (
    NET_MAC,
    NODE,
    NODE6,
    ROUTER,
    ROUTER6,
    A,
    B,
    Outcome,
    Pod,
    World,
    now,
    raw,
)
from tests.support.examples import scaled

pytestmark = pytest.mark.kernel

KNOWN_IDENTITY: Final = 4242
RX_CLOSING, TX_CLOSING, SEEN_NON_SYN = 1 << 0, 1 << 1, 1 << 4
TICK: Final = 2
"""Seconds by which the programs' clock and ours may be apart while a packet is under way."""

Seen = dict[CtKey, tuple[int, int, int, int]]
"""Of each entry: the identity, the flag bits, the TCP flags received and sent."""


class Pair:
    """The programs on a world, and the model of it; what is done to one is done to both."""

    def __init__(self, world: World) -> None:
        world.reset()
        self.world = world
        self.model_pods = {
            pod.id: ModelPod(
                *(IPv4Address(pod.ip), IPv6Address(pod.ip6), pod.identity, raw(pod.mac), raw(pod.host_mac))
            )
            for pod in PODS
        }
        own = {ip_address(ip) for ip in (ROUTER, NODE, ROUTER6, NODE6)}
        self.model = Model(list(self.model_pods.values()), own, IPv6Address(ROUTER6), raw(NET_MAC))
        self.identify("203.0.113.0/24", KNOWN_IDENTITY)
        self.identify("2001:db8:5::/48", KNOWN_IDENTITY)
        for pod in PODS:
            self.allow(pod, {PolicyKey(0, egress=False): False, PolicyKey(0, egress=True): False})

    def identify(self, network: str, identity: int) -> None:
        self.world.identify(network, identity)
        self.model.identities[ip_network(network)] = identity

    def allow(self, pod: Pod, rules: dict[PolicyKey, bool]) -> None:
        """Rules, and whether each denies."""
        self.world.allow(pod, [(key, PolicyEntry(deny=deny)) for key, deny in rules.items()])
        self.model_pods[pod.id].rules = rules

    def pod_sends(self, pod: Pod, frame: bytes) -> None:
        walk = self.model.pod_sends(self.model_pods[pod.id], frame, now())
        self.compare(walk, self.world.pod_sends(pod, frame))

    def host_sends(self, frame: bytes) -> None:
        self.compare(self.model.host_sends(frame, now()), self.world.host_sends(frame))

    def compare(self, walk: Walk, outcome: Outcome) -> None:
        counted = {walk.counted: 1} if walk.counted else {}
        got = outcome.action, outcome.counted, bytes(outcome.packet).hex()
        assert got == (walk.action, counted, walk.frame.hex())

    def age(self, seconds: int) -> None:
        """Let time pass for what is remembered. What would end just now is taken out: clocks differ."""
        entries = self.model.conntrack.entries
        for key, entry in list(entries.items()):
            entry.until = max(entry.until - seconds, 0)
            if abs(entry.until - now()) <= TICK:
                del entries[key]
        for name in (
            "cilium_ct4_global",
            "cilium_ct_any4_global",
            "cilium_ct6_global",
            "cilium_ct_any6_global",
        ):
            table = self.world.maps[name]
            for raw_key, value in list(table.items()):
                if model_key(CtKey.unpack(raw_key)) not in entries:
                    table.delete(raw_key)
                    continue
                table.update(raw_key, aged(CtEntry.unpack(value), seconds).pack())

    def compare_memory(self) -> None:
        """The entries are the same, and none ends at another time."""
        real: dict[CtKey, CtEntry] = {}
        for version in (4, 6):
            real |= self.world.connections(version=version)
            real |= self.world.connections(tcp=False, version=version)
        entries = self.model.conntrack.entries
        assert {key: contents(entry) for key, entry in real.items()} == {
            public_key(key): model_contents(entry) for key, entry in entries.items()
        }
        wrong = {key: (e.lifetime, entries[model_key(key)].until) for key, e in real.items()}
        assert [key for key, (one, other) in wrong.items() if abs(one - other) > TICK] == []


def aged(entry: CtEntry, seconds: int) -> CtEntry:
    """The entry as it would be that much later; a remembered verdict is of its time and so forgotten."""
    return CtEntry(
        lifetime=max(entry.lifetime - seconds, 0),
        flags=entry.flags,
        tx_flags_seen=entry.tx_flags_seen,
        rx_flags_seen=entry.rx_flags_seen,
        source_identity=entry.source_identity,
        last_tx_report=max(entry.last_tx_report - seconds, 0),
        last_rx_report=max(entry.last_rx_report - seconds, 0),
    )


def contents(entry: CtEntry) -> tuple[int, int, int, int]:
    return entry.source_identity, entry.flags, entry.rx_flags_seen, entry.tx_flags_seen


def model_contents(entry: Entry) -> tuple[int, int, int, int]:
    flags = RX_CLOSING * (Direction.INGRESS in entry.closed) | TX_CLOSING * (Direction.EGRESS in entry.closed)
    return entry.source_identity, flags | SEEN_NON_SYN * entry.seen_non_syn, *entry.seen


def public_key(key: Key) -> CtKey:
    """As the maps have it: the addresses of the answer, the ports of the question."""
    return CtKey(key.starter, key.peer, key.dport, key.sport, key.protocol, key.flags)


def model_key(key: CtKey) -> Key:
    return Key(key.daddr, key.saddr, key.dport, key.sport, key.protocol, key.flags)


identities = st.sampled_from((0, 0, 0, A.identity, B.identity, A.identity, B.identity, 1, 2, KNOWN_IDENTITY))


@st.composite
def policy_keys(draw: st.DrawFn) -> PolicyKey:
    identity, egress = draw(identities), draw(st.booleans())
    protocol = draw(st.sampled_from((0, 6, 6, 17, 1, 58)))
    if not protocol or draw(st.booleans()):
        return PolicyKey(identity, egress, protocol)
    if protocol == 1:
        return PolicyKey(identity, egress, protocol, draw(st.sampled_from((0, 3, 8))), 16)
    if protocol == 58:
        return PolicyKey(identity, egress, protocol, draw(st.sampled_from((1, 128, 129))), 16)
    bits = draw(st.sampled_from((16, 16, 9, 2)))
    return PolicyKey(
        identity, egress, protocol, draw(st.sampled_from((80, *PORTS))) & ~(0xFFFF >> bits), bits
    )


policies = st.dictionaries(policy_keys(), st.booleans(), max_size=6)


class Node(RuleBasedStateMachine):
    """Any sequence of packets, policy changes and time."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(self.world)

    @rule(data=st.data(), pod=pods)
    def pod_sends(self, data: st.DataObject, pod: Pod) -> None:
        self.pair.pod_sends(pod, data.draw(pod_frames(pod)))

    @rule(packets=st.lists(spoken(), min_size=1, max_size=6))
    def they_talk(self, packets: list[tuple[Pod | None, bytes]]) -> None:
        for pod, frame in packets:
            if pod:
                self.pair.pod_sends(pod, frame)
            else:
                self.pair.host_sends(frame)

    @rule(frame=host_frames())
    def host_sends(self, frame: bytes) -> None:
        self.pair.host_sends(frame)

    @rule(pod=pods, rules=policies)
    def policy_changes(self, pod: Pod, rules: dict[PolicyKey, bool]) -> None:
        self.pair.allow(pod, rules)

    @rule(pod=pods)
    def policy_allows_all(self, pod: Pod) -> None:
        self.pair.allow(pod, {PolicyKey(0, egress=False): False, PolicyKey(0, egress=True): False})

    @rule(seconds=st.sampled_from((7, 33, 71, 8200)))
    def time_passes(self, seconds: int) -> None:
        self.pair.age(seconds)

    @invariant()
    def memory_is_the_same(self) -> None:
        self.pair.compare_memory()


def test_any_sequence_of_packets_matches_the_model(loaded_world: World) -> None:
    bounded = settings(
        max_examples=scaled(100),
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),
    )
    on_this_world = type("OnThisWorld", (Node,), {"world": loaded_world})
    run_state_machine_as_test(on_this_world, settings=bounded)


def any_frame() -> st.SearchStrategy[tuple[Pod, bytes]]:
    def of(pod: Pod) -> st.SearchStrategy[tuple[Pod, bytes]]:
        frames = st.one_of(
            damaged(pod_frames(pod)), damaged(questions(pod)), questions(pod), damaged(solicitations(pod))
        )
        return frames.map(lambda frame: (pod, frame))

    return pods.flatmap(of)


one_each = settings(
    max_examples=scaled(400),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@given(sent=any_frame(), rules=policies)
@one_each
def test_any_frame_of_a_pod_matches_the_model(
    loaded_world: World, sent: tuple[Pod, bytes], rules: dict[PolicyKey, bool]
) -> None:
    pair = Pair(loaded_world)
    pair.allow(B, rules)
    pair.pod_sends(*sent)
    pair.compare_memory()


@given(frame=damaged(host_frames()), rules=policies)
@one_each
def test_any_frame_of_the_host_matches_the_model(
    loaded_world: World, frame: bytes, rules: dict[PolicyKey, bool]
) -> None:
    pair = Pair(loaded_world)
    pair.allow(A, rules)
    pair.host_sends(frame)
    pair.compare_memory()


close_rules = st.dictionaries(
    st.sampled_from(
        [
            PolicyKey(identity, True, *kind)
            for identity in (0, B.identity)
            for kind in ((0,), (6,), (6, 80, 16), (6, 64, 10))
        ]
    ),
    st.booleans(),
    min_size=1,
    max_size=3,
)
"""Rules that are all about the packet below: few, or the most specific of them hides what the others do."""


@given(rules=close_rules)
@one_each
def test_any_policy_entries_decide_as_in_the_model(loaded_world: World, rules: dict[PolicyKey, bool]) -> None:
    pair = Pair(loaded_world)
    pair.allow(A, rules)
    pair.pod_sends(A, bytes(from_pod(A) / tcp(A.ip, B.ip, "S")))
