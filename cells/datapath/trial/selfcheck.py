"""Tries an object on packets before it carries any, on maps of its own.

For:    Datapath, before a generation is put in force. Needs: generation, cells.maps.   Gives: self_check().
On a node that has just booted it is done on the node's, before they are in use. So neither counters nor
connections notice.
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec
from msgspec.structs import replace

from cells.datapath.generation import load
from cells.datapath.libbpf import LoadError
from cells.datapath.settings import DatapathSettings
from cells.datapath.trial.frames import ARP, IPV4, IPV6, advertisement, arp, ethernet, solicitation, udp, udp6
from cells.maps import (
    EndpointConfig,
    LxcKey,
    LxcValue,
    Map,
    MapSpec,
    MapType,
    MetricsKey,
    create_map,
    map_by_id,
    test_run,
)

TC_ACT_OK, SHOT, TC_ACT_REDIRECT = 0, 2, 7  # linux/pkt_cls.h
FORWARDED, DROPS = 0, 130  # bpf/lib/reasons.h: none, and the first of those that packets are dropped for
IFINDEX: Final = 1  # what BPF_PROG_TEST_RUN takes when none is given: lo

NOBODYS: Final = 60000
"""An endpoint id that no endpoint has, and the next one: they have no policy maps."""
USED: Final = ("hive_endpoints", "cilium_metrics", "cilium_lxc", "hive_node")
"""Maps that are written and read here, beside the programs."""

POD, NEIGHBOUR, STRANGER = (IPv4Address(f"192.0.2.{n}") for n in (1, 2, 3))  # RFC 5737
POD6, NEIGHBOUR6, STRANGER6 = (IPv6Address(f"2001:db8::{n}") for n in (1, 2, 3))  # RFC 3849
POD_MAC, HOST_MAC, BROADCAST = bytes.fromhex("0a0000000001"), bytes.fromhex("0a0000000002"), b"\xff" * 6


class Case(msgspec.Struct, frozen=True):
    """A packet for a program, the action expected, and the drop that must be counted, if any."""

    program: str
    says: str
    packet: bytes
    action: int
    reason: int | None = None
    becomes: bytes | None = None


def self_check(data: bytes, name: str, tables: Collection[Map], settings: DatapathSettings) -> None:
    """Load an object onto scratch maps like ``tables`` and see it treat packets right; LoadError if not."""
    with scratch(tables) as maps:
        tried = {case.program for case in CASES}  # verifying takes longest, and is done again for the node
        loaded, _ = load(data, name, maps.values(), 0, settings, tried)
        with loaded:
            try_packets(loaded.programs(), maps, name)


def try_packets(programs: Mapping[str, int], maps: Mapping[str, Map], name: str) -> None:
    """See programs that work on these maps treat packets right; LoadError if not. Its rows stay."""
    set_up(maps)
    for case in CASES:
        check(case, programs[case.program], maps["cilium_metrics"], name)


@contextmanager
def lent(tables: Iterable[Map]) -> Iterator[dict[str, Map] | None]:
    """The node's own maps to try packets on, before they are in use, and empty again afterwards; else None.

    For a node that has just booted: what is loaded for it need not be verified once more. Rows that are left
    when the agent is killed meanwhile belong to no endpoint, and are removed when endpoints are restored.
    """
    with ExitStack() as open_maps:
        known = {table.spec.name: table.id for table in tables}
        maps = {each: open_maps.enter_context(map_by_id(known[each])) for each in USED}  # this thread's own
        if (
            maps["hive_endpoints"].first_key()
            or any(maps["hive_node"].lookup(bytes(4)) or b"")
            or counted(maps["cilium_metrics"])
        ):
            yield None
            return
        try:
            yield maps
        finally:
            maps["hive_endpoints"].delete(struct.pack("<I", IFINDEX))
            for address in NEIGHBOUR, NEIGHBOUR6:
                maps["cilium_lxc"].delete(LxcKey(address).pack())
            forget(maps["cilium_metrics"])


@contextmanager
def scratch(tables: Collection[Map]) -> Iterator[dict[str, Map]]:
    """Small unpinned maps of the same kinds and names."""
    policy = MapSpec("scratch_policy", MapType.LPM_TRIE, 12, 24, 16, flags=1)
    with ExitStack() as open_maps:
        maps = {}
        for table in tables:
            inner = policy if table.spec.type == MapType.ARRAY_OF_MAPS else table.spec.inner
            small = replace(table.spec, max_entries=min(table.spec.max_entries, 64), inner=inner)
            maps[table.spec.name] = open_maps.enter_context(create_map(small))
        yield maps


def set_up(maps: Mapping[str, Map]) -> None:
    """One pod to send, one to receive, and no policy for either."""
    pod = EndpointConfig(
        POD, endpoint_id=NOBODYS, identity=1000, host_mac=HOST_MAC, pod_mac=POD_MAC, ipv6=POD6
    )
    neighbour = LxcValue(
        ifindex=IFINDEX, endpoint_id=NOBODYS + 1, mac=POD_MAC, node_mac=HOST_MAC, identity=1001
    )
    maps["hive_endpoints"].update(struct.pack("<I", IFINDEX), pod.pack())
    for address in NEIGHBOUR, NEIGHBOUR6:
        maps["cilium_lxc"].update(LxcKey(address).pack(), neighbour.pack())


def counted(metrics: Map) -> list[bytes]:
    """Keys of what programs have counted of packets; below :data:`DROPS` are those of sockets."""
    reasons = {key: MetricsKey.unpack(key).reason for key in metrics.keys()}  # noqa: SIM118  (not a dict)
    return [key for key, reason in reasons.items() if reason == FORWARDED or reason >= DROPS]


def forget(metrics: Map) -> None:
    """Remove what is counted of packets."""
    for key in counted(metrics):
        metrics.delete(key)


def check(case: Case, program: int, metrics: Map, name: str) -> None:
    """Run one case; LoadError says what went otherwise."""
    forget(metrics)
    run = test_run(program, case.packet)
    reasons = {MetricsKey.unpack(key).reason for key in counted(metrics)}
    wrong = [
        f"{what} {got!r}, expected {wanted!r}"
        for what, got, wanted in (
            ("action", run.retval, case.action),
            ("drop reason", reasons - {FORWARDED}, set() if case.reason is None else {case.reason}),
            ("packet", run.packet.hex(), (case.becomes or run.packet).hex()),
        )
        if got != wanted
    ]
    if wrong:
        raise LoadError(
            f"{name}: {case.program} fails its self-check, {case.says}: {'; '.join(wrong)}", 0, ""
        )


def from_pod(protocol: int, packet: bytes, destination: bytes = HOST_MAC) -> bytes:
    """A frame of the pod's."""
    return ethernet(destination, POD_MAC, protocol) + packet


CASES: Final = (
    Case(
        "hive_from_pod",
        "a pod asking for its gateway",
        from_pod(ARP, arp(1, (POD_MAC, POD), (bytes(6), STRANGER)), BROADCAST),
        TC_ACT_REDIRECT,
        becomes=ethernet(POD_MAC, HOST_MAC, ARP) + arp(2, (HOST_MAC, STRANGER), (POD_MAC, POD)),
    ),
    Case(
        "hive_from_pod",
        "a pod asking for its neighbour, in IPv6",
        from_pod(IPV6, solicitation(POD6, POD_MAC, NEIGHBOUR6), bytes.fromhex("3333ff000002")),
        TC_ACT_REDIRECT,
        becomes=ethernet(POD_MAC, HOST_MAC, IPV6) + advertisement(NEIGHBOUR6, HOST_MAC, POD6),
    ),
    Case(
        "hive_from_pod", "a source that is not the pod's", from_pod(IPV4, udp(STRANGER, NEIGHBOUR)), SHOT, 132
    ),
    Case("hive_from_pod", "a pod without policy", from_pod(IPV4, udp(POD, NEIGHBOUR)), SHOT, 203),
    Case("hive_from_host", "the host to no endpoint", from_pod(IPV4, udp(STRANGER, POD)), SHOT, 151),
    Case("hive_from_host", "to a pod without policy", from_pod(IPV4, udp(STRANGER, NEIGHBOUR)), SHOT, 203),
    Case("hive_to_pod", "what a link brings", from_pod(IPV4, udp(STRANGER, POD)), SHOT, 203),
    Case("hive_to_pod", "IPv6 a link brings", from_pod(IPV6, udp6(STRANGER6, POD6)), SHOT, 203),
    Case(
        "hive_to_pod",
        "a question",
        from_pod(ARP, arp(1, (HOST_MAC, STRANGER), (bytes(6), POD)), BROADCAST),
        TC_ACT_OK,
    ),
    Case("hive_to_host", "anything to the host", from_pod(IPV4, udp(POD, STRANGER)), TC_ACT_OK),
    Case(
        "hive_from_pod",
        "an IPv6 source not the pod's",
        from_pod(IPV6, udp6(STRANGER6, NEIGHBOUR6)),
        SHOT,
        132,
    ),
    Case("hive_from_pod", "IPv6 of a pod without policy", from_pod(IPV6, udp6(POD6, NEIGHBOUR6)), SHOT, 203),
    Case(
        "hive_from_host", "the host to no endpoint, in IPv6", from_pod(IPV6, udp6(STRANGER6, POD6)), SHOT, 151
    ),
    Case("hive_from_host", "to no policy, in IPv6", from_pod(IPV6, udp6(STRANGER6, NEIGHBOUR6)), SHOT, 203),
    Case("hive_to_host", "IPv6 to the host", from_pod(IPV6, udp6(POD6, STRANGER6)), TC_ACT_OK),
)
