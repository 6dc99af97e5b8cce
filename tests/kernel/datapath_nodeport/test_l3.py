"""Devices without Ethernet headers handle packets as others do."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6
from scapy.packet import Packet, Raw

from cells.datapath.generation import load
from cells.datapath.programs import L3_ENTRIES
from cells.maps.bpf import test_run as run_program
from cells.maps.map import create_map
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.records.flows import DEVICE_MASQUERADE_IPV4, DEVICE_MASQUERADE_IPV6, DeviceConfig
from cells.maps.specs import policy_spec
from cells.services import ServiceFlag
from tests.kernel.datapath.world import EGRESS, IFINDEX, INGRESS, OK, REDIRECT, SHOT, A, Outcome, raw
from tests.kernel.datapath_nodeport.world import (
    CLIENT,
    DIRECT,
    ELSEWHERE,
    NODE_PORT,
    OWN_MAC,
    SERVICE,
    SETTINGS,
    NodePortWorld,
    segment,
)
from tests.kernel.datapath_overlay.recorder import recorded_object
from tests.kernel.datapath_services.services import TARGET, Backend
from tests.support.examples import scaled
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel

BEFORE = ("cilium_ct4_global", "cilium_ct_any4_global", "cilium_ct6_global", "cilium_ct_any6_global")
NAT = ("cilium_snat_v4_external", "cilium_snat_v6_external")
FIRST_PORT, LAST_PORT = 32768, 65535
"""A flow keeps its own port if it is one of these, so that both have the same."""


class Fate(NamedTuple):
    """What became of a packet, but for how it is framed."""

    action: int
    network: bytes
    macs: tuple[str, str] | None
    """Of a packet that goes on by another device."""
    counted: dict[tuple[int, int], int]
    known: set[bytes]
    """Keys of connections and translations."""


class BothWorld(NodePortWorld):
    """The programs of both kinds of devices, on the same maps."""

    def __init__(self) -> None:
        super().__init__()
        data, tables = recorded_object("recorded_l3"), [*self.maps.values(), self.recorder.map]
        self.l3, _ = load(data, "l3.o", tables, 7, SETTINGS, programs=L3_ENTRIES.keys())

    def __exit__(self, *_: object) -> None:
        self.l3.close()
        super().__exit__()

    def reset(self) -> None:
        """As new, with a device that masquerades."""
        super().reset()
        masquerades = DEVICE_MASQUERADE_IPV4 | DEVICE_MASQUERADE_IPV6
        row = DeviceConfig(raw(OWN_MAC), IPv4Address(DIRECT[4]), IPv6Address(DIRECT[6]), flags=masquerades)
        self.maps["hive_devices"].update(struct.pack("<I", IFINDEX), row.pack())

    def passes(self, packet: Packet, *, out: bool, l3: bool) -> Fate:
        """The device brings the packet, or sends it."""
        if not l3:
            framed = self.framed(packet)
            outcome = self.device_sends(framed) if out else self.device_gets(framed)
            return self._fate(outcome, bytes(outcome.packet))
        before = self.counts()
        program = "hive_to_l3_device" if out else "hive_from_l3_device"
        run = run_program(self.l3.programs()[program], bytes(packet))
        counted = {cause: n - before.get(cause, 0) for cause, n in self.counts().items()}
        result = run.packet if run.retval == REDIRECT else bytes(14) + run.packet
        retained = {cause: n for cause, n in counted.items() if n}
        return self._fate(Outcome(run.retval, packet, retained), result)

    def _fate(self, outcome: Outcome, frame: bytes) -> Fate:
        macs = (frame[:6].hex(":"), frame[6:12].hex(":")) if outcome.action == REDIRECT else None
        known = {key for name in (*BEFORE, *NAT) for key, _ in self.maps[name].items()}
        return Fate(outcome.action, frame[14:], macs, outcome.counted, known)


@pytest.fixture(scope="module")
def both() -> Iterator[BothWorld]:
    """Maps and programs."""
    need_root()
    with BothWorld() as world:
        yield world


versions = st.sampled_from((4, 6))
ports = st.integers(FIRST_PORT, LAST_PORT)
kinds = st.sampled_from(("tcp", "udp"))


@given(version=versions, kind=kinds, sport=ports, dport=ports, size=st.integers(0, 1200))
@settings(max_examples=scaled(20), deadline=None, derandomize=True)
def test_pods_are_masqueraded_on_a_device_without_ethernet(
    both: BothWorld, version: int, kind: str, sport: int, dport: int, size: int
) -> None:
    pod = A.ip if version == 4 else A.ip6
    fates = []
    for l3 in (False, True):
        both.reset()
        asked = segment(kind, pod, CLIENT[version], sport, dport) / Raw(bytes(size))
        answer = segment(kind, CLIENT[version], DIRECT[version], dport, sport, "A") / Raw(bytes(size))
        fates.append([both.passes(asked, out=True, l3=l3), both.passes(answer, out=False, l3=l3)])
    assert fates[0] == fates[1]
    source = slice(12, 16) if version == 4 else slice(8, 24)
    own = (IPv4Address if version == 4 else IPv6Address)(DIRECT[version]).packed
    assert fates[1][0].network[source] == own


@given(version=versions, kind=kinds, sport=ports, far=st.booleans(), flags=st.sampled_from("SA"))
@settings(max_examples=scaled(20), deadline=None, derandomize=True)
def test_node_ports_are_served_on_a_device_without_ethernet(
    both: BothWorld, version: int, kind: str, sport: int, far: bool, flags: str
) -> None:
    near = A.ip if version == 4 else A.ip6
    backend = ELSEWHERE[version].format(9) if far else near
    fates = []
    for l3 in (False, True):
        both.reset()
        what = ServiceFlag.ROUTABLE | ServiceFlag.NODE_PORT
        both.services.serve(SERVICE[version], [Backend(1, backend)], port=NODE_PORT, flags=what)
        asked = segment(kind, CLIENT[version], SERVICE[version], sport, NODE_PORT, flags)
        found = [both.passes(asked, out=False, l3=l3)]
        if far:
            answer = segment(kind, backend, DIRECT[version], TARGET, sport, "A")
            found.append(both.passes(answer, out=False, l3=l3))
        fates.append(found)
    assert fates[0] == fates[1]
    assert {each.action for each in fates[1]} == {REDIRECT}


@pytest.mark.parametrize("version", [4, 6])
def test_echoes_and_foreign_packets_pass_a_device_without_ethernet(both: BothWorld, version: int) -> None:
    pod = A.ip if version == 4 else A.ip6
    head = IP if version == 4 else IPv6
    echo = ICMP(id=FIRST_PORT) if version == 4 else ICMPv6EchoRequest(id=FIRST_PORT)
    packets = [
        (head(src=pod, dst=CLIENT[version]) / echo, True),
        (head(src=CLIENT[version], dst=DIRECT[version]) / Raw(b"no transport"), False),
        (segment("udp", CLIENT[version], DIRECT[version], 1, 2), False),
        (segment("tcp", DIRECT[version], CLIENT[version], 1, 2), True),
    ]
    for packet, out in packets:
        fates = []
        for l3 in (False, True):
            both.reset()
            fates.append(both.passes(packet, out=out, l3=l3))
        assert fates[0] == fates[1]


@pytest.mark.parametrize("version", [4, 6])
def test_host_policy_is_enforced_on_a_device_without_ethernet(both: BothWorld, version: int) -> None:
    number, world_identity = 20, {4: 9, 6: 10}[version]
    packets = [
        (segment("tcp", CLIENT[version], DIRECT[version], 1, 22), False),
        (segment("tcp", CLIENT[version], DIRECT[version], 1, 23), False),
        (segment("udp", DIRECT[version], CLIENT[version], 1, 53), True),
    ]
    with create_map(policy_spec(number, 256)) as policy:
        key = PolicyKey(world_identity, False, 6, 22, 16)
        policy.update(key.pack(), PolicyEntry().pack(key))
        both.maps["hive_policies"].update(struct.pack("<I", number), struct.pack("<I", policy.fd))
        fates = []
        for l3 in (False, True):
            both.reset()
            both.report(host_endpoint=number)
            both.bump(0)
            fates.append([both.passes(packet, out=out, l3=l3) for packet, out in packets])
        both.maps["hive_policies"].delete(struct.pack("<I", number))
    for fate in fates:  # a packet that is dropped may be framed for its event
        assert [(each.action, each.counted) for each in fate] == [
            (OK, {}),
            (SHOT, {(133, INGRESS): 1}),
            (SHOT, {(133, EGRESS): 1}),
        ]
    assert fates[0][0] == fates[1][0]
