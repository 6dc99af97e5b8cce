"""Codec of the load-balancing maps: keys and values as bytes, plans of writes, and parsing after a restart.

``LoadBalancer`` encodes entries into a WritePlan, which ``ServicesTarget`` writes batch by batch; ``read``
parses the entries of an earlier agent. Pure functions.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from itertools import groupby
from typing import Final, NamedTuple

from cells.maps.bpf import PackedColumn, joined
from cells.services import (
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    ServiceAddress,
    ServiceFlag,
    ServiceName,
    ServiceType,
)

_FLAG_OF_TYPE = {
    ServiceType.EXTERNAL_IPS: ServiceFlag.EXTERNAL_IP,
    ServiceType.NODE_PORT: ServiceFlag.NODE_PORT,
    ServiceType.LOAD_BALANCER: ServiceFlag.LOAD_BALANCER,
    ServiceType.HOST_PORT: ServiceFlag.HOST_PORT,
    ServiceType.LOCAL_REDIRECT: ServiceFlag.LOCAL_REDIRECT,
}
"""The order in which the flags of restored frontends are checked."""
_TYPE_FLAGS = [_FLAG_OF_TYPE[each].value if each in _FLAG_OF_TYPE else 0 for each in sorted(ServiceType)]
"""Flags by the type's number: hashing an enumeration member calls Python code."""
_EXT_LOCAL, _INT_LOCAL = ServiceFlag.EXT_LOCAL_SCOPE.value, ServiceFlag.INT_LOCAL_SCOPE.value
_TWO_SCOPES, _AFFINITY = ServiceFlag.TWO_SCOPES.value, ServiceFlag.AFFINITY.value
_ROUTABLE, _SOURCE_RANGE = ServiceFlag.ROUTABLE.value, ServiceFlag.SOURCE_RANGE.value
_L7, _LOOPBACK = ServiceFlag.L7_LOAD_BALANCER.value, ServiceFlag.LOOPBACK.value

ALGORITHMS = {"": 0, "random": 1, "maglev": 2}
"""In slot 0: the algorithm for clients outside the node; 0 means the default for all services."""

_SOURCE_RANGE_DENY = ServiceFlag.QUARANTINED.value
_DSR = ServiceFlag.DSR.value
"""Meanings of these bits in slot 0."""

_EXTERNAL_TYPES = (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER, ServiceType.EXTERNAL_IPS)

_LOCAL_TYPES = (ServiceType.HOST_PORT, ServiceType.LOCAL_REDIRECT)


def service_flags(frontend: Frontend, *, affinity: bool) -> int:
    """Return the flags of slot 0, as a plain number: combining enumeration members is slow."""
    return (
        _TYPE_FLAGS[frontend.type]
        | (_EXT_LOCAL if frontend.ext_local and frontend.type in _EXTERNAL_TYPES else 0)
        | (_INT_LOCAL if frontend.int_local and frontend.type not in _LOCAL_TYPES else 0)
        | (_TWO_SCOPES if frontend.two_scopes else 0)
        | (_AFFINITY if affinity else 0)
        | (_ROUTABLE if frontend.routable else 0)
        | (_SOURCE_RANGE if frontend.source_ranges else 0)
        | (_SOURCE_RANGE_DENY if frontend.source_ranges_deny else 0)
        | (_L7 if frontend.l7_proxy_port else 0)
        | (_LOOPBACK if frontend.loopback else 0)
        | (_DSR if frontend.direct else 0)
    )


# Keys and values of the load-balancing maps, as bytes.
#
# Layouts: ``struct lb4_key``, ``lb4_service``, ``lb4_backend``, ``lb4_reverse_nat``, ``lb4_src_range_key``,
# ``lb_affinity_match`` of Cilium's bpf/lib/common.h (and their IPv6 twins). Addresses, ports and the number
# of a frontend are in network order, the rest in the machine's, which is little-endian.

AFFINITY_MATCH = "cilium_lb_affinity_match"
PRESENT = b"\x00"

SERVICES = {version: f"cilium_lb{version}_services_v2" for version in (4, 6)}
BACKENDS = {version: f"cilium_lb{version}_backends_v3" for version in (4, 6)}
REVERSE_NAT = {version: f"cilium_lb{version}_reverse_nat" for version in (4, 6)}
MAGLEV = {version: f"cilium_lb{version}_maglev" for version in (4, 6)}
SOURCE_RANGES = {version: f"cilium_lb{version}_source_range" for version in (4, 6)}
"""Names of maps, by family."""

_U16, _U32 = struct.Struct("<H").pack, struct.Struct("<I").pack
_BE16 = struct.Struct(">H").pack
_AFTER_PROTOCOL = struct.Struct(">BHBx").pack  # byte order does not matter for the cluster's number 0
_AFTER_SLOT = struct.Struct("<BBxx").pack
_MASTER = struct.Struct("<IH2sHH").pack
_SLOTS = [_U16(slot) for slot in range(1 << 8)]
"""Slot numbers, prepared for nearly all frontends."""


@cache
def _slot_ends(protocol: int, scope: int) -> list[bytes]:
    """Return the last bytes of the keys of the first 256 slots."""
    tail = _AFTER_SLOT(protocol, scope)
    return [slot + tail for slot in _SLOTS]


BACKEND_ENDS = [_AFTER_PROTOCOL(state, 0, 0) for state in sorted(BackendState)]
"""The bytes of a backend's value after its address, by state, without a zone."""

_QUARANTINED = ServiceFlag.QUARANTINED.value
NUMBER_SIZE = 4
SLOT_SIZE = 12
"""Bytes of a slot: three words of 32 bits."""


Entries = dict[str, dict[bytes, bytes]]
"""Entries by map."""

TABLE: Final = b""
"""Placeholder for a Maglev table, which is not read because of its size."""

UNKNOWN: Final = b"?"
"""The value of an entry that may or may not have been written."""

LOOK_UP_TABLES: Final = frozenset(MAGLEV.values())


def digest(table: bytes) -> bytes:
    """Return the digest of a Maglev table, which is stored in place of the table."""
    return hashlib.sha256(table).digest()


class MapKey(NamedTuple):
    """A key of a named map."""

    map: str
    key: bytes


class MapWrite(NamedTuple):
    """One change of a map; a value of None deletes the key."""

    where: MapKey
    value: bytes | None


class Batch(NamedTuple):
    """Entries of one map to set, in this order, or to delete if ``values`` is None."""

    map: str
    keys: Sequence[bytes]
    values: Sequence[bytes] | None

    def writes(self) -> Iterator[MapWrite]:
        """Yield the entries one by one."""
        values = self.values if self.values is not None else (None,) * len(self.keys)
        for key, value in zip(self.keys, values, strict=True):
            yield MapWrite(MapKey(self.map, key), value)


class WriteStep(IntEnum):
    """The steps of a plan: referenced entries are added before references, and deleted after them.

    ``STALE`` steps delete before new slots are written, ``DELETED`` steps afterwards.
    """

    BACKENDS = 0
    AFFINITY_STALE = 1
    SOURCE_RANGES_STALE = 2
    SOURCE_RANGES = 3
    MAGLEV = 4
    SLOTS = 5
    REVERSE_NAT = 6
    FRONTENDS = 7
    FRONTENDS_DELETED = 8
    SLOTS_DELETED = 9
    MAGLEV_DELETED = 10
    REVERSE_NAT_DELETED = 11
    AFFINITY = 12
    AFFINITY_DELETED = 13
    SOURCE_RANGES_DELETED = 14
    BACKENDS_DELETED = 15


_STEPS = tuple(WriteStep)
_UPDATE_STEPS = frozenset(
    {
        WriteStep.BACKENDS,
        WriteStep.SOURCE_RANGES,
        WriteStep.MAGLEV,
        WriteStep.SLOTS,
        WriteStep.REVERSE_NAT,
        WriteStep.FRONTENDS,
        WriteStep.AFFINITY,
    }
)


class WritePlan:
    """Writes for some frontends, executed step by step, in one call per step and map.

    The order ensures that no entry refers to a missing one, even if the agent is killed between two writes.
    """

    def __init__(self) -> None:
        self._steps: list[dict[str, dict[bytes, bytes]] | None] = [None] * len(_STEPS)
        self._new_entries: dict[tuple[WriteStep, str], list[tuple[Sequence[bytes], Sequence[bytes]]]] = {}
        self._new_slots: dict[str, tuple[list[bytes], list[bytes]]] = {}
        self._selectable_columns: dict[str, tuple[list[bytes], list[Sequence[int]], list[bytes]]] = {}

    def at(self, step: WriteStep, name: str) -> dict[bytes, bytes]:
        """Return the writes to a map in one step; steps that delete ignore the values."""
        by_map = self._steps[step]
        if by_map is None:
            by_map = self._steps[step] = {}
        if (entries := by_map.get(name)) is None:
            entries = by_map[name] = {}
        return entries

    def remove(self, step: WriteStep, name: str, keys: Iterable[bytes]) -> None:
        """Delete entries in a step."""
        self.at(step, name).update(dict.fromkeys(keys, b""))

    def add(self, step: WriteStep, name: str, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Write many new entries, before the other writes of the step."""
        self._new_entries.setdefault((step, name), []).append((keys, values))

    def add_slots(self, name: str, keys: bytes, values: bytes) -> None:
        """Write the slots of a new frontend: joined keys and joined values."""
        if (columns := self._new_slots.get(name)) is None:
            columns = self._new_slots[name] = ([], [])
        columns[0].append(keys)
        columns[1].append(values)

    def add_selectable(self, name: str, keys: bytes, backends: Sequence[int], frontend: int) -> None:
        """Write the slots of a new frontend with selectable backends only, by backend and service ID."""
        if (columns := self._selectable_columns.get(name)) is None:
            columns = self._selectable_columns[name] = ([], [], [])
        columns[0].append(keys)
        columns[1].append(backends)
        columns[2].append(_BE16(frontend) * len(backends))

    def batches(self) -> Iterator[Batch]:
        """Yield all writes in order."""
        for step, by_map in zip(_STEPS, self._steps, strict=True):
            for (when, name), columns in self._new_entries.items():
                if when is step:
                    yield from (Batch(name, keys, values) for keys, values in columns)
            if step is WriteStep.SLOTS:
                yield from self._slots()
            for name, entries in by_map.items() if by_map else ():
                if entries:
                    yield Batch(
                        name, list(entries), list(entries.values()) if step in _UPDATE_STEPS else None
                    )

    def _slots(self) -> Iterator[Batch]:
        columns = [(name, keys, b"".join(values)) for name, (keys, values) in self._new_slots.items()]
        for name, (keys, backends, frontends) in self._selectable_columns.items():
            columns.append((name, keys, _selectable_slots(backends, b"".join(frontends))))
        for name, keys, values in columns:
            slots = PackedColumn(values, SLOT_SIZE)
            if slots:
                all_keys = b"".join(keys)
                yield Batch(name, PackedColumn(all_keys, len(all_keys) // len(slots)), slots)


def batched(writes: Iterable[MapWrite]) -> list[Batch]:
    """Group writes into as few batches as their order allows."""
    found: list[Batch] = []
    for (name, sets), group in groupby(writes, key=lambda one: (one.where.map, one.value is not None)):
        ones = list(group)
        values = [one.value for one in ones if one.value is not None] if sets else None
        found.append(Batch(name, [one.where.key for one in ones], values))
    return found


def service_key(frontend: FrontendKey, slot: int) -> MapKey:
    """Return the key of a slot: slot 0 is the frontend, the others are its backends."""
    return MapKey(SERVICES[frontend.address.version], slot_keys(frontend, slot, slot + 1)[0])


def slot_keys(frontend: FrontendKey, first: int, end: int) -> list[bytes]:
    """Return the keys of slots ``first`` to ``end`` - 1."""
    address, scope = frontend
    head, protocol = address[1:-1], address[-1]
    if end <= len(_SLOTS):
        return [head + each for each in _slot_ends(protocol, scope)[first:end]]
    tail = _AFTER_SLOT(protocol, scope)
    return [head + _U16(slot) + tail for slot in range(first, end)]


def slot_key_columns(frontend: FrontendKey, count: int) -> tuple[bytes, bytes]:
    """Return the key of slot 0, and the joined keys of slots 1 to ``count``."""
    address, scope = frontend
    ends = _slot_ends(address[-1], scope)
    if count >= len(_SLOTS):
        return slot_keys(frontend, 0, 1)[0], slot_key_column(frontend, count)
    head = address[1:-1]
    return head + ends[0], head.join([b"", *ends[1 : count + 1]])


def slot_key_column(frontend: FrontendKey, count: int) -> bytes:
    """Return the joined keys of slots 1 to ``count``."""
    address, scope = frontend
    if not 0 < count < len(_SLOTS):
        return b"".join(slot_keys(frontend, 1, count + 1))
    head = address[1:-1]
    return head + head.join(_slot_ends(address[-1], scope)[1 : count + 1])


def slots_behind(held: Mapping[bytes, bytes], key: FrontendKey, last: int) -> list[bytes]:
    """Return a frontend's slots after ``last``, in descending order: deleting them leaves no gap."""
    if not held:
        return []
    (master,) = slot_keys(key, 0, 1)
    value = held.get(master, b"")
    top = max(last, int.from_bytes(value[4:6], "little") + int.from_bytes(value[10:12], "little"))
    while slot_keys(key, top + 1, top + 2)[0] in held:
        top += 1
    if top == last:
        return []
    return [each for each in reversed(slot_keys(key, last + 1, top + 1)) if each in held]


def master_value(
    *,
    count: int,
    quarantined: int,
    number: int,
    flags: int,
    timeout: int = 0,
    algorithm: int = 0,
    proxy_port: int = 0,
) -> bytes:
    """Return slot 0: counts of backends, and the frontend's properties."""
    union = struct.unpack("<H", struct.pack(">H", proxy_port))[0] if proxy_port else timeout
    union |= algorithm << 24
    return _MASTER(union, count, _BE16(number), flags, quarantined)


def slot_values(backends: Sequence[int], number: int, active: int) -> bytes:
    """Return the joined values of a frontend's slots, by backend ID, selectable backends first."""
    words = array("I", (0, int.from_bytes(_BE16(number), "little") << 16, 0)) * len(backends)
    words[::3] = array("I", backends)
    if active < len(backends):
        words[3 * active + 2 :: 3] = array("I", (_QUARANTINED,)) * (len(backends) - active)
    return words.tobytes()


def _selectable_slots(backends: Iterable[Sequence[int]], frontends: bytes) -> bytes:
    """Return joined slots of several frontends; ``frontends`` has a 16-bit service ID per slot."""
    numbers = array("I")
    for some in backends:
        numbers.extend(some)
    words = array("I", bytes(SLOT_SIZE * len(numbers)))
    words[::3] = numbers
    halves = array("H", words.tobytes())
    halves[3::6] = array("H", frontends)
    return halves.tobytes()


def backend_number(number: int) -> bytes:
    """Return the key of a backend, in both families."""
    return _U32(number)


def numbers_of(keys: Sequence[bytes]) -> Sequence[int]:
    """Return the backend IDs in these keys."""
    return array("I", joined(keys))


def active_backends(addresses: Sequence[bytes]) -> PackedColumn:
    """Return the values of active backends of one family, without a zone; built by column."""
    width = len(addresses[0]) if addresses else 1
    blank = bytes(width - 1) + BACKEND_ENDS[BackendState.ACTIVE]
    values, given = bytearray(blank * len(addresses)), b"".join(addresses)
    for at in range(1, width):
        values[at - 1 :: len(blank)] = given[at::width]
    return PackedColumn(bytes(values), len(blank))


def backend_value(address: bytes, state: BackendState, zone: int = 0) -> bytes:
    """Return the value of a backend."""
    return address[1:] + (_AFTER_PROTOCOL(state, 0, zone) if zone else BACKEND_ENDS[state])


def reverse_nat_key(number: int, version: int) -> MapKey:
    """Return the reverse NAT key of a frontend."""
    return MapKey(REVERSE_NAT[version], _BE16(number))


def reverse_nat_value(address: ServiceAddress) -> bytes:
    """Return the reverse NAT value: the frontend's address, the source of replies to clients."""
    return address[1:-1]


def source_range_key(number: int, prefix: IPv4Network | IPv6Network) -> MapKey:
    """Return the key of a frontend's source range."""
    head = struct.pack("<I", 32 + prefix.prefixlen) + struct.pack(">Hxx", number)
    return MapKey(SOURCE_RANGES[prefix.version], head + prefix.network_address.packed)


def affinity_key(number: int, backend: int) -> MapKey:
    """Return the key that lets a frontend's session affinity use a backend."""
    return MapKey(AFFINITY_MATCH, struct.pack("<I", backend) + struct.pack(">Hxx", number))


def maglev_key(number: int, version: int) -> MapKey:
    """Return the key of a frontend's Maglev table in the outer map."""
    return MapKey(MAGLEV[version], _BE16(number))


# Frontends and backends of an earlier agent in the maps.
#
# Names, annotations and session affinity are not in the maps; the sources provide them again.

Maps = Mapping[str, Mapping[bytes, bytes]]
"""Every entry of the load-balancing maps, by map."""

FAMILIES = {4: 4, 6: 16}
"""Bytes of an address by family."""

_STATES: Mapping[int, BackendState] = {state.value: state for state in BackendState}
"""No version of Cilium has other states."""

NAMELESS = ServiceName("", "")


class RestoredFrontend(NamedTuple):
    """A frontend in the maps, with its ID and the values of its slots; a missing slot is empty."""

    id: int
    frontend: Frontend
    slots: tuple[bytes, ...]
    master: bytes


class Restored(NamedTuple):
    """The contents of the maps. ``ranges`` and ``affinity`` are keyed by service ID."""

    frontends: list[RestoredFrontend]
    stray_slots: list[MapKey]
    """Slots without slot 0: an agent was killed before it wrote, or after it deleted, slot 0."""
    backends: dict[int, Backend]
    zones: dict[int, int]
    ranges: dict[int, dict[MapKey, str]]
    affinity: dict[int, set[MapKey]]


def read(maps: Maps, families: tuple[int, ...]) -> Restored:
    """Parse the maps of enabled families; slots without their backend are omitted."""
    backends: dict[int, Backend] = {}
    zones: dict[int, int] = {}
    for family in families:
        for key, value in maps.get(BACKENDS[family], {}).items():
            length = FAMILIES[family]
            address = ServiceAddress.read(bytes([family]) + value[: length + 3])
            number = int.from_bytes(key, "little")
            backends[number] = Backend(address, _STATES.get(value[length + 3], BackendState.ACTIVE))
            zones[number] = value[length + 6]
    ranges = _ranges(maps, families)
    frontends: list[RestoredFrontend] = []
    stray: list[MapKey] = []
    for family in families:
        of_family, without_frontend = _frontends(maps, family, backends, ranges)
        frontends += of_family
        stray += without_frontend
    return Restored(frontends, stray, backends, zones, ranges, _affinity(maps))


def _frontends(
    maps: Maps, family: int, backends: Mapping[int, Backend], ranges: Mapping[int, Mapping[MapKey, str]]
) -> tuple[list[RestoredFrontend], list[MapKey]]:
    """Return the frontends of a family, and slots without a frontend."""
    masters: dict[FrontendKey, bytes] = {}
    slots: dict[FrontendKey, dict[int, bytes]] = {}
    length = FAMILIES[family]
    for key, value in maps.get(SERVICES[family], {}).items():
        address = ServiceAddress.read(bytes([family]) + key[: length + 2] + key[length + 4 : length + 5])
        where = FrontendKey(address, key[length + 5])
        slot = int.from_bytes(key[length + 2 : length + 4], "little")
        if slot:
            slots.setdefault(where, {})[slot] = value
        else:
            masters[where] = value
    found = []
    for where, master in sorted(masters.items()):
        number = int.from_bytes(master[6:8], "big")
        held = slots.get(where, {})
        own = tuple(held.get(slot, b"") for slot in range(1, max(held, default=0) + 1))
        texts = tuple(sorted(ranges.get(number, {}).values()))
        found.append(RestoredFrontend(number, _frontend(where, master, own, backends, texts), own, master))
    stray = [service_key(where, slot) for where in slots.keys() - masters.keys() for slot in slots[where]]
    return found, sorted(stray)


def _frontend(
    key: FrontendKey,
    master: bytes,
    slots: tuple[bytes, ...],
    backends: Mapping[int, Backend],
    ranges: tuple[str, ...],
) -> Frontend:
    flags = ServiceFlag(int.from_bytes(master[8:10], "little"))
    attached: dict[ServiceAddress, Backend] = {}
    for value in slots:
        backend = backends.get(int.from_bytes(value[:4], "little")) if value else None
        if backend is not None:
            attached.setdefault(backend.address, _with_slot_state(backend, value))
    return Frontend(
        key=key,
        type=_type(flags),
        service=NAMELESS,
        backends=tuple(attached.values()),
        ext_local=ServiceFlag.EXT_LOCAL_SCOPE in flags,
        int_local=ServiceFlag.INT_LOCAL_SCOPE in flags,
        two_scopes=ServiceFlag.TWO_SCOPES in flags,
        source_ranges=ranges,
        source_ranges_deny=ServiceFlag.QUARANTINED in flags,
        routable=ServiceFlag.ROUTABLE in flags,
        direct=ServiceFlag.DSR in flags,
    )


def _with_slot_state(backend: Backend, slot: bytes) -> Backend:
    """Apply a slot's flag: it may be quarantined although the shared backend entry is active."""
    flags = ServiceFlag(int.from_bytes(slot[8:10], "little"))
    if ServiceFlag.QUARANTINED in flags and backend.state is BackendState.ACTIVE:
        return Backend(backend.address, BackendState.QUARANTINED)
    return backend


def _type(flags: ServiceFlag) -> ServiceType:
    return next((kind for kind, flag in _FLAG_OF_TYPE.items() if flag in flags), ServiceType.CLUSTER_IP)


def _ranges(maps: Maps, families: tuple[int, ...]) -> dict[int, dict[MapKey, str]]:
    found: dict[int, dict[MapKey, str]] = {}
    for family in families:
        name = SOURCE_RANGES[family]
        for key in maps.get(name, {}):
            bits = int.from_bytes(key[:4], "little") - 32
            prefix = ip_network((ip_address(key[8:]), bits), strict=False)
            found.setdefault(int.from_bytes(key[4:6], "big"), {})[MapKey(name, key)] = str(prefix)
    return found


def _affinity(maps: Maps) -> dict[int, set[MapKey]]:
    found: dict[int, set[MapKey]] = {}
    for key in maps.get(AFFINITY_MATCH, {}):
        found.setdefault(int.from_bytes(key[4:6], "big"), set()).add(MapKey(AFFINITY_MATCH, key))
    return found
