"""The self-check: new programs are tested on packets (BPF_PROG_TEST_RUN) before they are activated.

load_tried() loads a generation and checks it; PreloadedPrograms does so in a thread while the agent starts.
"""

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


# Encoders of the test frames.
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
    """Encode an Ethernet II header."""
    return destination + source + struct.pack(">H", protocol)


def checksum(data: bytes) -> bytes:
    """Compute the Internet checksum (RFC 1071) of an even number of bytes."""
    words = sum(struct.unpack(f">{len(data) // 2}H", data))
    words = (words & 0xFFFF) + (words >> 16)
    return struct.pack(">H", ~(words + (words >> 16)) & 0xFFFF)


def udp(source: IPv4Address, destination: IPv4Address) -> bytes:
    """Encode a small UDP datagram in IPv4, without UDP checksum, as RFC 768 allows."""
    header = struct.pack(">BBHIBBH4s4s", 0x45, 0, 36, 0, 64, _UDP, 0, source.packed, destination.packed)
    header = header[:10] + checksum(header) + header[12:]
    return header + struct.pack(">HHHH", 40000, 53, 16, 0) + bytes(8)


def udp6(source: IPv6Address, destination: IPv6Address) -> bytes:
    """Encode a small UDP datagram in IPv6, which requires the checksum."""
    body = struct.pack(">HHHH", 40000, 53, 16, 0) + bytes(8)
    full = checksum(_pseudo(source, destination, _UDP, len(body)) + body)
    return _ipv6(source, destination, _UDP, 64, body[:6] + full + body[8:])


def arp(operation: int, sender: tuple[bytes, IPv4Address], target: tuple[bytes, IPv4Address]) -> bytes:
    """Encode an ARP message for IPv4 over Ethernet."""
    ends = sender[0] + sender[1].packed + target[0] + target[1].packed
    return struct.pack(">HHBBH", 1, IPV4, 6, 4, operation) + ends


def solicitation(source: IPv6Address, mac: bytes, target: IPv6Address) -> bytes:
    """Encode a neighbour solicitation for ``target``, to its solicited-node multicast group."""
    group = IPv6Address(int(IPv6Address("ff02::1:ff00:0")) | (int(target) & 0xFFFFFF))
    return _neighbour(_SOLICITATION, 0, (source, group), target, b"\x01\x01" + mac)


def advertisement(target: IPv6Address, mac: bytes, destination: IPv6Address) -> bytes:
    """Encode a neighbour advertisement of ``target`` at ``mac``."""
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


# The test cases, and their evaluation.

TC_ACT_OK, SHOT, TC_ACT_REDIRECT = 0, 2, 7  # linux/pkt_cls.h
FORWARDED, DROPS = 0, 130  # bpf/lib/reasons.h: 0, and the first drop reason of packets
IFINDEX: Final = 1  # lo: the default of BPF_PROG_TEST_RUN

UNUSED_ID: Final = 60000
"""An endpoint id that is never used; nor is the next one. Both have no policy maps."""
USED: Final = ("hive_endpoints", "cilium_metrics", "cilium_lxc", "hive_node")
"""Maps that the check itself writes and reads."""

POD, NEIGHBOUR, UNKNOWN = (IPv4Address(f"192.0.2.{n}") for n in (1, 2, 3))  # RFC 5737
POD6, NEIGHBOUR6, UNKNOWN6 = (IPv6Address(f"2001:db8::{n}") for n in (1, 2, 3))  # RFC 3849
POD_MAC, HOST_MAC, BROADCAST = bytes.fromhex("0a0000000001"), bytes.fromhex("0a0000000002"), b"\xff" * 6


class Case(msgspec.Struct, frozen=True):
    """A packet for a program, the expected action, and the drop reason that must be counted, if any."""

    program: str
    expects: str
    packet: bytes
    action: int
    reason: int | None = None
    becomes: bytes | None = None

    @property
    def is_ipv6(self) -> bool:
        """Whether the packet is IPv6."""
        return self.packet.startswith(struct.pack(">H", IPV6), 12)


def self_check(data: bytes, name: str, tables: Collection[Map], settings: DatapathSettings) -> None:
    """Load an object onto scratch maps like ``tables`` and test it. Raises LoadError on a difference."""
    with scratch_maps(tables) as maps:
        tried = {case.program for case in CASES}  # verify no others: they are verified for the node anyway
        loaded, constants = load(data, name, maps.values(), 0, settings, tried)
        with loaded:
            try_packets(loaded.programs(), maps, name, constants)


def try_packets(
    programs: Mapping[str, int], maps: Mapping[str, Map], name: str, constants: Constants
) -> None:
    """Test programs that use these maps. Raises LoadError on a difference. Test entries stay in the maps."""
    fill_maps(maps)
    for case in CASES:
        if not (case.is_ipv6 and constants.features & WITHOUT_IPV6):
            check(case, programs[case.program], maps["cilium_metrics"], name)


@contextmanager
def borrowed_maps(tables: Iterable[Map]) -> Iterator[dict[str, Map] | None]:
    """Yield the node's own maps for the test while they are empty, else None; empty them afterwards.

    On a node that has just booted this saves a second verification. Entries left by an agent that was killed
    here belong to no endpoint, and endpoint restore removes them.
    """
    with ExitStack() as open_maps:
        known = {table.spec.name: table.id for table in tables}
        maps = {  # opened again: the buffers are this thread's
            each: open_maps.enter_context(map_by_id(known[each], writable=True)) for each in USED
        }
        if (
            maps["hive_endpoints"].first_key()
            or any(maps["hive_node"].lookup(bytes(4)) or b"")
            or packet_metric_keys(maps["cilium_metrics"])
        ):
            yield None
            return
        try:
            yield maps
        finally:
            maps["hive_endpoints"].delete(struct.pack("<I", IFINDEX))
            for address in NEIGHBOUR, NEIGHBOUR6:
                maps["cilium_lxc"].delete(LxcKey(address).pack())
            clear_packet_counts(maps["cilium_metrics"])


@contextmanager
def scratch_maps(tables: Collection[Map]) -> Iterator[dict[str, Map]]:
    """Create small unpinned maps of the same types and names."""
    policy = MapSpec("scratch_policy", MapType.LPM_TRIE, 12, 24, 16, flags=1)
    with ExitStack() as open_maps:
        maps = {}
        for table in tables:
            inner = policy if table.spec.type == MapType.ARRAY_OF_MAPS else table.spec.inner
            small = replace(table.spec, max_entries=min(table.spec.max_entries, 64), inner=inner)
            maps[table.spec.name] = open_maps.enter_context(create_map(small))
        yield maps


def fill_maps(maps: Mapping[str, Map]) -> None:
    """Write entries for one sending and one receiving pod, without policy."""
    pod = EndpointConfig(
        POD, endpoint_id=UNUSED_ID, identity=1000, host_mac=HOST_MAC, pod_mac=POD_MAC, ipv6=POD6
    )
    neighbour = LxcValue(
        ifindex=IFINDEX, endpoint_id=UNUSED_ID + 1, mac=POD_MAC, node_mac=HOST_MAC, identity=1001
    )
    maps["hive_endpoints"].update(struct.pack("<I", IFINDEX), pod.pack())
    for address in NEIGHBOUR, NEIGHBOUR6:
        maps["cilium_lxc"].update(LxcKey(address).pack(), neighbour.pack())


def packet_metric_keys(metrics: Map) -> list[bytes]:
    """Return the keys of packet counters; reasons below :data:`DROPS` other than 0 count sockets."""
    reasons = {key: MetricsKey.unpack(key).reason for key in metrics.keys()}  # noqa: SIM118  (not a dict)
    return [key for key, reason in reasons.items() if reason == FORWARDED or reason >= DROPS]


def clear_packet_counts(metrics: Map) -> None:
    """Delete the packet counters."""
    for key in packet_metric_keys(metrics):
        metrics.delete(key)


def check(case: Case, program: int, metrics: Map, name: str) -> None:
    """Run one case. Raises LoadError that shows the differences."""
    clear_packet_counts(metrics)
    run = test_run(program, case.packet)
    reasons = {MetricsKey.unpack(key).reason for key in packet_metric_keys(metrics)}
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
    """Encode a frame that the pod sends."""
    return ethernet(destination, POD_MAC, protocol) + packet


CASES: Final = (
    Case(
        "hive_from_pod",
        "a pod's ARP request for its gateway",
        from_pod(ARP, arp(1, (POD_MAC, POD), (bytes(6), UNKNOWN)), BROADCAST),
        TC_ACT_REDIRECT,
        becomes=ethernet(POD_MAC, HOST_MAC, ARP) + arp(2, (HOST_MAC, UNKNOWN), (POD_MAC, POD)),
    ),
    Case(
        "hive_from_pod",
        "a pod's neighbour solicitation",
        from_pod(IPV6, solicitation(POD6, POD_MAC, NEIGHBOUR6), bytes.fromhex("3333ff000002")),
        TC_ACT_REDIRECT,
        becomes=ethernet(POD_MAC, HOST_MAC, IPV6) + advertisement(NEIGHBOUR6, HOST_MAC, POD6),
    ),
    Case(
        "hive_from_pod", "a source that is not the pod's", from_pod(IPV4, udp(UNKNOWN, NEIGHBOUR)), SHOT, 132
    ),
    Case("hive_from_pod", "a packet of a pod without policy", from_pod(IPV4, udp(POD, NEIGHBOUR)), SHOT, 203),
    Case(
        "hive_from_host",
        "a packet from the host to no endpoint",
        from_pod(IPV4, udp(UNKNOWN, POD)),
        SHOT,
        151,
    ),
    Case(
        "hive_from_host",
        "a packet from the host to a pod without policy",
        from_pod(IPV4, udp(UNKNOWN, NEIGHBOUR)),
        SHOT,
        203,
    ),
    Case(
        "hive_to_pod",
        "a packet at the link of a pod without policy",
        from_pod(IPV4, udp(UNKNOWN, POD)),
        SHOT,
        203,
    ),
    Case(
        "hive_to_pod",
        "an IPv6 packet at the link of a pod without policy",
        from_pod(IPV6, udp6(UNKNOWN6, POD6)),
        SHOT,
        203,
    ),
    Case(
        "hive_to_pod",
        "an ARP request to a pod",
        from_pod(ARP, arp(1, (HOST_MAC, UNKNOWN), (bytes(6), POD)), BROADCAST),
        TC_ACT_OK,
    ),
    Case("hive_to_host", "a packet to the host", from_pod(IPV4, udp(POD, UNKNOWN)), TC_ACT_OK),
    Case(
        "hive_from_pod",
        "an IPv6 source that is not the pod's",
        from_pod(IPV6, udp6(UNKNOWN6, NEIGHBOUR6)),
        SHOT,
        132,
    ),
    Case(
        "hive_from_pod",
        "an IPv6 packet of a pod without policy",
        from_pod(IPV6, udp6(POD6, NEIGHBOUR6)),
        SHOT,
        203,
    ),
    Case(
        "hive_from_host",
        "an IPv6 packet from the host to no endpoint",
        from_pod(IPV6, udp6(UNKNOWN6, POD6)),
        SHOT,
        151,
    ),
    Case(
        "hive_from_host",
        "an IPv6 packet from the host to a pod without policy",
        from_pod(IPV6, udp6(UNKNOWN6, NEIGHBOUR6)),
        SHOT,
        203,
    ),
    Case("hive_to_host", "an IPv6 packet to the host", from_pod(IPV6, udp6(POD6, UNKNOWN6)), TC_ACT_OK),
)


# Loading a generation with its self-check.

_FIRST: Final = {"hive_from_pod", "hive_from_host"}
PARTS: Final = (_FIRST, ENTRIES.keys() - _FIRST)
"""Two sets of programs, loaded concurrently: the verifier takes as long for these two as for all others."""


class WrongObjectError(LoadError, UsageError):
    """Raised when the setting ``datapath-object`` is not a datapath of this agent."""

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
    """Load the programs onto the node's maps and test them; return descriptors by name, and constants.

    ``parts`` closes the programs. Verification takes longest, so two threads load. Raises LoadError, also if
    the test fails; nothing is activated then.
    """
    with ExitStack() as test_maps:
        own = test_maps.enter_context(borrowed_maps(tables)) if first else None
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
"""The stack that closes the programs, the ids of their maps, and the result of load_tried()."""


class PreloadedPrograms:
    """Programs of a new node that another thread loads while Python imports the agent's cells.

    They are neither entered nor attached. Their errors are not reported: the start hook meets them again.
    """

    def __init__(self, loading: Future[Preloaded]) -> None:
        self._loading = loading
        self._taken = False

    @property
    def done(self) -> bool:
        """Whether loading has finished or failed."""
        return self._loading.done()

    def take(
        self,
        data: bytes,
        tables: tuple[Map, ...],
        generation: int,
        settings: DatapathSettings,
        parts: ExitStack,
    ) -> tuple[dict[str, int], Constants] | None:
        """Return the result of load_tried() once, if object, maps and settings match; else close them.

        Waits until they are loaded: for a worker thread.
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
