"""A generation of programs is tried on packets before it carries any."""

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from cells.datapath.generation import WITHOUT_IPV6, Constants, build_of, load
from cells.datapath.libbpf import LoadError
from cells.datapath.programs import ENTRIES
from cells.datapath.settings import DatapathSettings
from cells.maps.bpf import test_run
from cells.maps.map import Map, MapSpec, MapType, create_map, map_by_id
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue
from cells.maps.records.flows import MetricsKey
from lifecycle import UsageError

__all__ = ["PreloadedPrograms", "WrongObjectError", "load_tried"]


# The frames of the self-check: small, and right in every byte that counts.
#
# Source: RFC 791, 826, 8200, 4443, 4861.

ARP: Final = 0x0806
IPV4: Final = 0x0800
IPV6: Final = 0x86DD
_UDP: Final = 17
_ICMPV6: Final = 58
_SOLICITATION, _ADVERTISEMENT = 135, 136
_SOLICITED_OVERRIDE: Final = 0x60000000


def ethernet(destination: bytes, source: bytes, protocol: int) -> bytes:
    """An Ethernet II header."""
    return destination + source + struct.pack(">H", protocol)


def checksum(data: bytes) -> bytes:
    """The Internet checksum (RFC 1071) of an even number of bytes."""
    words = sum(struct.unpack(f">{len(data) // 2}H", data))
    words = (words & 0xFFFF) + (words >> 16)
    return struct.pack(">H", ~(words + (words >> 16)) & 0xFFFF)


def udp(source: IPv4Address, destination: IPv4Address) -> bytes:
    """A small datagram in IPv4, its UDP checksum left out as RFC 768 allows."""
    header = struct.pack(">BBHIBBH4s4s", 0x45, 0, 36, 0, 64, _UDP, 0, source.packed, destination.packed)
    header = header[:10] + checksum(header) + header[12:]
    return header + struct.pack(">HHHH", 40000, 53, 16, 0) + bytes(8)


def udp6(source: IPv6Address, destination: IPv6Address) -> bytes:
    """The same in IPv6, where the checksum is needed."""
    body = struct.pack(">HHHH", 40000, 53, 16, 0) + bytes(8)
    full = checksum(_pseudo(source, destination, _UDP, len(body)) + body)
    return _ipv6(source, destination, _UDP, 64, body[:6] + full + body[8:])


def arp(operation: int, sender: tuple[bytes, IPv4Address], target: tuple[bytes, IPv4Address]) -> bytes:
    """An ARP message about IPv4 over Ethernet."""
    ends = sender[0] + sender[1].packed + target[0] + target[1].packed
    return struct.pack(">HHBBH", 1, IPV4, 6, 4, operation) + ends


def solicitation(source: IPv6Address, mac: bytes, target: IPv6Address) -> bytes:
    """Who has ``target``? Asked of its solicited-node group."""
    group = IPv6Address(int(IPv6Address("ff02::1:ff00:0")) | (int(target) & 0xFFFFFF))
    return _neighbour(_SOLICITATION, 0, (source, group), target, b"\x01\x01" + mac)


def advertisement(target: IPv6Address, mac: bytes, destination: IPv6Address) -> bytes:
    """The answer: ``target`` is at ``mac``."""
    ends = target, destination
    return _neighbour(_ADVERTISEMENT, _SOLICITED_OVERRIDE, ends, target, b"\x02\x01" + mac)


def _neighbour(
    kind: int, flags: int, ends: tuple[IPv6Address, IPv6Address], target: IPv6Address, option: bytes
) -> bytes:
    body = struct.pack(">BBHI", kind, 0, 0, flags) + target.packed + option
    full = checksum(_pseudo(*ends, _ICMPV6, len(body)) + body)
    return _ipv6(*ends, _ICMPV6, 255, body[:2] + full + body[4:])


def _ipv6(source: IPv6Address, destination: IPv6Address, following: int, hops: int, body: bytes) -> bytes:
    return (
        struct.pack(">IHBB", 6 << 28, len(body), following, hops) + source.packed + destination.packed + body
    )


def _pseudo(source: IPv6Address, destination: IPv6Address, following: int, length: int) -> bytes:
    return source.packed + destination.packed + struct.pack(">II", length, following)


# Tries an object on packets before it carries any, on maps of its own.

TC_ACT_OK, SHOT, TC_ACT_REDIRECT = 0, 2, 7  # linux/pkt_cls.h
FORWARDED, DROPS = 0, 130  # bpf/lib/reasons.h: none, and the first of those that packets are dropped for
IFINDEX: Final = 1  # what BPF_PROG_TEST_RUN takes when none is given: lo

UNUSED_ID: Final = 60000
"""An endpoint id that no endpoint has, and the next one: they have no policy maps."""
USED: Final = ("hive_endpoints", "cilium_metrics", "cilium_lxc", "hive_node")
"""Maps that are written and read here, beside the programs."""

POD, NEIGHBOUR, STRANGER = (IPv4Address(f"192.0.2.{n}") for n in (1, 2, 3))  # RFC 5737
POD6, NEIGHBOUR6, STRANGER6 = (IPv6Address(f"2001:db8::{n}") for n in (1, 2, 3))  # RFC 3849
POD_MAC, HOST_MAC, BROADCAST = bytes.fromhex("0a0000000001"), bytes.fromhex("0a0000000002"), b"\xff" * 6


class Case(msgspec.Struct, frozen=True):
    """A packet for a program, the action expected, and the drop that must be counted, if any."""

    program: str
    expects: str
    packet: bytes
    action: int
    reason: int | None = None
    becomes: bytes | None = None

    @property
    def is_ipv6(self) -> bool:
        """Whether its packet is."""
        return self.packet.startswith(struct.pack(">H", IPV6), 12)


def self_check(data: bytes, name: str, tables: Collection[Map], settings: DatapathSettings) -> None:
    """Load an object onto scratch maps like ``tables`` and see it treat packets right; LoadError if not."""
    with scratch(tables) as maps:
        tried = {case.program for case in CASES}  # verifying takes longest, and is done again for the node
        loaded, constants = load(data, name, maps.values(), 0, settings, tried)
        with loaded:
            try_packets(loaded.programs(), maps, name, constants)


def try_packets(
    programs: Mapping[str, int], maps: Mapping[str, Map], name: str, constants: Constants
) -> None:
    """See programs that work on these maps treat packets right; LoadError if not. Its rows stay."""
    set_up(maps)
    for case in CASES:
        if not (case.is_ipv6 and constants.features & WITHOUT_IPV6):
            check(case, programs[case.program], maps["cilium_metrics"], name)


@contextmanager
def lent(tables: Iterable[Map]) -> Iterator[dict[str, Map] | None]:
    """The node's own maps to try packets on, before they are in use, and empty again afterwards; else None.

    For a node that has just booted: what is loaded for it need not be verified once more. Rows that are left
    when the agent is killed meanwhile belong to no endpoint, and are removed when endpoints are restored.
    """
    with ExitStack() as open_maps:
        known = {table.spec.name: table.id for table in tables}
        maps = {  # this thread's own
            each: open_maps.enter_context(map_by_id(known[each], writable=True)) for each in USED
        }
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
        POD, endpoint_id=UNUSED_ID, identity=1000, host_mac=HOST_MAC, pod_mac=POD_MAC, ipv6=POD6
    )
    neighbour = LxcValue(
        ifindex=IFINDEX, endpoint_id=UNUSED_ID + 1, mac=POD_MAC, node_mac=HOST_MAC, identity=1001
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
    """Run one case; LoadError reports the difference."""
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
            f"{name}: {case.program} fails its self-check, {case.expects}: {'; '.join(wrong)}", 0, ""
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


# Loads a compiled object and tries it on packets, before any of it is in force.

_FIRST: Final = {"hive_from_pod", "hive_from_host"}
PARTS: Final = (_FIRST, ENTRIES.keys() - _FIRST)
"""Loaded at the same time: the verifier takes as long over these two as over all the others."""


class WrongObjectError(LoadError, UsageError):
    """The setting ``datapath-object`` names something else than a datapath of this agent."""

    def __init__(self, path: Path, error: LoadError) -> None:
        super().__init__(
            f"datapath-object={path}: {error}; expected a datapath compiled for this agent, or leave it out"
        )
        self.log = error.log


def load_tried(
    data: bytes,
    name: str,
    tables: tuple[Map, ...],
    generation: int,
    settings: DatapathSettings,
    parts: ExitStack,
    *,
    first: bool,
) -> tuple[dict[str, int], Constants]:
    """Load the programs onto the node's maps and try them on packets; descriptors by name, and constants.

    ``parts`` closes the programs. Verifying takes longest, so two threads load. Raises LoadError, also if the
    programs fail the check; nothing is in force then.
    """
    with ExitStack() as borrowed:
        own = borrowed.enter_context(lent(tables)) if first else None
        with ThreadPoolExecutor(2) as both:
            loading = [both.submit(load, data, name, tables, generation, settings, each) for each in PARTS]
            check = None if own is not None else both.submit(self_check, data, name, tables, settings)
        for each in loading:
            if each.exception() is None:
                parts.enter_context(each.result()[0])
        loaded = [each.result() for each in loading]
        programs = {known: fd for part, _ in loaded for known, fd in part.programs().items()}
        if own is not None:
            try_packets(programs, own, name, loaded[0][1])
        elif check is not None:
            check.result()
    return programs, loaded[0][1]


Preloaded = tuple[ExitStack, frozenset[int], dict[str, int], Constants]
"""What closes programs, the ids of their maps, and what load_tried() gives."""


class PreloadedPrograms:
    """Programs of a new node that another thread loads while Python imports the agent's cells.

    Nothing is entered or attached by it. Its errors need no report: the start meets them again.
    """

    def __init__(self, loading: Future[Preloaded]) -> None:
        self._loading = loading
        self._taken = False

    @property
    def done(self) -> bool:
        """Whether all are loaded, or have failed."""
        return self._loading.done()

    def take(
        self,
        data: bytes,
        tables: tuple[Map, ...],
        generation: int,
        settings: DatapathSettings,
        parts: ExitStack,
    ) -> tuple[dict[str, int], Constants] | None:
        """As load_tried(), without loading; None, and they are closed, if that would load others. Once.

        For a worker thread: it waits until they are loaded.
        """
        if self._taken or self._loading.exception() is not None:
            return None
        self._taken = True
        closing, maps, descriptors, constants = self._loading.result()
        if (
            maps == {table.id for table in tables}
            and constants.build == build_of(data)
            and constants.generation == generation
            and constants == constants.configured(settings)
        ):
            parts.push(closing)
            return descriptors, constants
        closing.close()
        return None
