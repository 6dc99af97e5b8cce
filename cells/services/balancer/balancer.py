"""Frontends and backends with their numbers, and the map entries they need, written in a safe order.

A frontend's work is planned as the difference of its entries; the order makes sure that no entry ever points
at one that is not there (yet, or any more), wherever the agent is killed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from typing import NamedTuple

import msgspec

from cells.services.balancer import entries
from cells.services.balancer.entries import MapKey
from cells.services.balancer.ids import IdAllocator, IdsExhaustedError
from cells.services.balancer.restore import Maps, Restored, RestoredFrontend, read
from cells.services.model import (
    Address,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceFlag,
    ServiceType,
    selectable,
)
from cells.services.model.types import is_wildcard

LAST_SERVICE_ID = 65534
LAST_BACKEND_ID = (1 << 32) - 1

_TYPE_FLAGS = {
    ServiceType.CLUSTER_IP: 0,
    ServiceType.NODE_PORT: ServiceFlag.NODE_PORT.value,
    ServiceType.EXTERNAL_IPS: ServiceFlag.EXTERNAL_IP.value,
    ServiceType.HOST_PORT: ServiceFlag.HOST_PORT.value,
    ServiceType.LOAD_BALANCER: ServiceFlag.LOAD_BALANCER.value,
    ServiceType.LOCAL_REDIRECT: ServiceFlag.LOCAL_REDIRECT.value,
}
_EXT_LOCAL, _INT_LOCAL = ServiceFlag.EXT_LOCAL_SCOPE.value, ServiceFlag.INT_LOCAL_SCOPE.value
_TWO_SCOPES, _AFFINITY = ServiceFlag.TWO_SCOPES.value, ServiceFlag.AFFINITY.value
_ROUTABLE, _SOURCE_RANGE = ServiceFlag.ROUTABLE.value, ServiceFlag.SOURCE_RANGE.value
_L7, _LOOPBACK = ServiceFlag.L7_LOAD_BALANCER.value, ServiceFlag.LOOPBACK.value

_ALGORITHMS = {"": 0, "random": 1, "maglev": 2}
"""As slot 0 tells how backends are chosen for clients outside; 0: as for every service."""

_SOURCE_RANGE_DENY = ServiceFlag.QUARANTINED.value
_DSR = ServiceFlag.DSR.value
"""What the bit means of slot 0."""

_FROM_OUTSIDE = (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER, ServiceType.EXTERNAL_IPS)

_OF_ONE_NODE = (ServiceType.HOST_PORT, ServiceType.LOCAL_REDIRECT)

MaglevTable = Callable[[Sequence[Backend], Mapping[Address, int]], bytes]
"""The look-up table over some backends, by their numbers, as the bytes of the inner map's entry."""


class Write(NamedTuple):
    """One change of a map; a value of None deletes the key."""

    where: MapKey
    value: bytes | None


class BackendRecord(msgspec.Struct, gc=False):
    """A backend, in use by so many frontends."""

    id: int
    address: Address
    state: BackendState
    zone: int = 0
    users: int = 0


class Installed(msgspec.Struct, frozen=True):
    """A frontend as it is in the maps. Each part is keyed by map and key.

    ``confirmed`` is false while only the maps know of it; ``pending`` are backends of which only they know.
    """

    id: int
    frontend: Frontend
    slots: tuple[bytes, ...] = ()
    master: bytes = b""
    affinity: frozenset[MapKey] = frozenset()
    ranges: frozenset[MapKey] = frozenset()
    maglev: bytes | None = None
    """A digest of its look-up table, which is large."""
    confirmed: bool = True
    pending: frozenset[Address] = frozenset()


class LoadBalancer:
    """The frontends of this node. Methods return what must be written, in order, and take it as written."""

    def __init__(
        self,
        options: LoadBalancerOptions,
        maglev: MaglevTable | None = None,
        *,
        last_service_id: int = LAST_SERVICE_ID,
    ) -> None:
        self._options = options
        self._maglev = maglev
        self._orphans: list[Write] = []
        self._service_ids: IdAllocator[FrontendKey] = IdAllocator(1, last_service_id)
        self._backend_ids: IdAllocator[Address] = IdAllocator(1, LAST_BACKEND_ID)
        self.installed: dict[FrontendKey, Installed] = {}
        self.backends: dict[Address, BackendRecord] = {}

    def restore(self, maps: Maps) -> list[Write]:
        """Take over what an earlier agent installed, with its numbers; what must be deleted at once.

        Frontends and backends that the sources do not confirm stay until :meth:`synced`: a source that has
        not said everything must cut nobody off. Source ranges of no frontend go at once, and so do backends
        of no frontend, unless no backend is referred to at all, or look-up tables may lead to them, which are
        written before the slots.
        """
        restored = read(maps, self._families())
        for one in restored.frontends:
            self._take_over(one, restored)
        numbers = {one.id for one in self.installed.values()}
        writes = [
            Write(where, None)
            for number, ranges in sorted(restored.ranges.items())
            if number not in numbers
            for where in sorted(ranges)
        ]
        unused = [
            (number, backend)
            for number, backend in sorted(restored.backends.items())
            if backend.address not in self.backends or self.backends[backend.address].id != number
        ]
        if self.backends and self._maglev is None:
            writes += [
                Write(entries.backend_key(number, backend.address.ip.version), None)
                for number, backend in unused
            ]
        else:
            for number, backend in unused:
                self._restore_backend(number, backend, restored.zones[number])
        known = {where for one in self.installed.values() for where in one.affinity}
        matches = {where for wheres in restored.affinity.values() for where in wheres}
        self._orphans += [Write(where, None) for where in sorted(matches - known)]
        self._orphans += self._reverse_nat_orphans(maps, numbers)
        return writes

    def discard(self, maps: Maps) -> list[Write]:
        """Take nothing over: delete the frontends, backends and translations that the maps hold."""
        return _discard(maps, self._families())

    def discard_off(self, maps: Maps) -> list[Write]:
        """Delete what the maps hold of a family that is switched off: nothing can lead there any more."""
        return _discard(maps, tuple({4, 6} - set(self._families())))

    def synced(self) -> list[Write]:
        """The sources have said everything: what only the maps knew goes."""
        writes: list[Write] = []
        for key, held in list(self.installed.items()):
            if not held.confirmed:
                writes += self.delete(key)
            elif held.pending:
                kept = tuple(one for one in held.frontend.backends if one.address not in held.pending)
                self.installed[key] = msgspec.structs.replace(held, pending=frozenset())
                writes += self.upsert(msgspec.structs.replace(held.frontend, backends=kept))
        for record in [one for one in self.backends.values() if not one.users]:
            writes.append(self._forget(record))
        if not self._orphans:
            return writes
        current = {where for one in self.installed.values() for where in one.affinity}
        current |= {
            entries.reverse_nat_key(one.id, key.address.ip.version) for key, one in self.installed.items()
        }
        writes += [one for one in self._orphans if one.where not in current]
        self._orphans = []
        return writes

    def _families(self) -> tuple[int, ...]:
        families = ((4, self._options.enable_ipv4), (6, self._options.enable_ipv6))
        return tuple(family for family, enabled in families if enabled)

    def _take_over(self, one: RestoredFrontend, restored: Restored) -> None:
        key = one.frontend.key
        self._service_ids.restore(one.id, key)
        ids = {backend.address: number for number, backend in reversed(restored.backends.items())}
        for backend in one.frontend.backends:
            number = ids[backend.address]
            if backend.address not in self.backends:
                self._restore_backend(number, restored.backends[number], restored.zones[number])
            self.backends[backend.address].users += 1
        self.installed[key] = Installed(
            id=one.id,
            frontend=one.frontend,
            slots=one.slots,
            master=one.master,
            affinity=frozenset(restored.affinity.get(one.id, ())),
            ranges=frozenset(restored.ranges.get(one.id, ())),
            confirmed=False,
            pending=frozenset(backend.address for backend in one.frontend.backends),
        )

    def _restore_backend(self, number: int, backend: Backend, zone: int) -> None:
        self._backend_ids.restore(number, backend.address)
        self.backends[backend.address] = BackendRecord(number, backend.address, backend.state, zone)

    def _reverse_nat_orphans(self, maps: Maps, numbers: set[int]) -> Iterator[Write]:
        for family in self._families():
            name = f"cilium_lb{family}_reverse_nat"
            for raw in sorted(maps.get(name, {})):
                if int.from_bytes(raw, "big") not in numbers:
                    yield Write(MapKey(name, raw), None)

    def upsert(self, frontend: Frontend) -> list[Write]:
        """Serve a frontend, new or changed. Raises IdsExhaustedError; then nothing has changed."""
        key = frontend.key
        held = self.installed.get(key)
        number = held.id if held is not None else self._number(frontend)
        pending: frozenset[Address] = frozenset()
        before: set[Address] = set()
        if held is not None:
            frontend = self._with_states(frontend, held)
            before = {one.address for one in held.frontend.backends}
            if held.pending:
                pending = held.pending - {one.address for one in frontend.backends}
                left = [one for one in held.frontend.backends if one.address in pending]
                frontend = msgspec.structs.replace(frontend, backends=(*frontend.backends, *left))
        writes: list[Write] = []
        now = {one.address for one in frontend.backends}
        new_backends = self._use_backends(frontend, now - before, writes)
        new, table = self._entries(number, frontend, pending)
        old = held if held is not None else Installed(number, frontend)
        version = key.address.ip.version
        writes += [Write(where, None) for where in sorted(old.affinity - new.affinity)]
        writes += [Write(where, None) for where in sorted(old.ranges - new.ranges)]
        writes += [Write(where, entries.PRESENT) for where in sorted(new.ranges - old.ranges)]
        writes += new_backends
        if table is not None and new.maglev != old.maglev:
            writes.append(Write(entries.maglev_key(number, version), table))
        first = _same(old.slots, new.slots)
        if first < len(new.slots):
            keys = entries.service_keys(key, first + 1, len(new.slots) + 1)
            had = old.slots[first:]
            for slot, (where, value) in enumerate(zip(keys, new.slots[first:], strict=True)):
                if slot >= len(had) or had[slot] != value:
                    writes.append(Write(where, value))
        if held is None:
            writes.append(
                Write(entries.reverse_nat_key(number, version), entries.reverse_nat_value(key.address))
            )
        if new.master != old.master:
            writes.append(Write(entries.service_key(key, 0), new.master))
        surplus = entries.service_keys(key, len(new.slots) + 1, len(old.slots) + 1)
        writes += [Write(where, None) for where in surplus]
        writes += [Write(where, entries.PRESENT) for where in sorted(new.affinity - old.affinity)]
        self.installed[key] = new
        writes += self._drop_backends(before - now)
        return writes

    def _number(self, frontend: Frontend) -> int:
        if not frontend.number:
            return self._service_ids.allocate(frontend.key)
        if not self._service_ids.restore(frontend.number, frontend.key):
            raise IdsExhaustedError(f"number {frontend.number} is another frontend's")
        return frontend.number

    def delete(self, key: FrontendKey) -> list[Write]:
        """Serve a frontend no more; nothing to write for an unknown one."""
        held = self.installed.pop(key, None)
        if held is None:
            return []
        version = key.address.ip.version
        writes = [Write(where, None) for where in entries.service_keys(key, 0, len(held.slots) + 1)]
        if held.maglev is not None:
            writes.append(Write(entries.maglev_key(held.id, version), None))
        writes.append(Write(entries.reverse_nat_key(held.id, version), None))
        writes += [Write(where, None) for where in sorted(held.affinity)]
        writes += [Write(where, None) for where in sorted(held.ranges)]
        writes += self._drop_backends({one.address for one in held.frontend.backends})
        self._service_ids.release(held.id)
        return writes

    @staticmethod
    def _with_states(frontend: Frontend, held: Installed) -> Frontend:
        """A backend that was not active stays as it was until its source says otherwise, or it has been gone.

        Sources say active by default: terminating is final, and other states are lifted by hand, as they are
        set.
        """
        states = {
            one.address: one.state for one in held.frontend.backends if one.state is not BackendState.ACTIVE
        }
        if not states:
            return frontend
        return msgspec.structs.replace(
            frontend,
            backends=tuple(
                msgspec.structs.replace(one, state=state)
                if one.state is BackendState.ACTIVE
                and (state := states.get(one.address)) is not None
                and (state is BackendState.TERMINATING or not one.by_hand)
                else one
                for one in frontend.backends
            ),
        )

    def _use_backends(self, frontend: Frontend, more: set[Address], writes: list[Write]) -> list[Write]:
        """Number new backends; their entries. What becomes of others' states is written at once.

        ``more`` are those that the frontend did not have.
        """
        new: list[Write] = []
        backends = self.backends
        allocate = self._backend_ids.allocate
        for backend in frontend.backends:
            address = backend.address
            record = backends.get(address)
            if record is None:
                backends[address] = record = BackendRecord(allocate(address), address, backend.state)
                new.append(_backend_write(record))
            elif backend.state is not record.state and (
                backend.by_hand or backend.state is BackendState.TERMINATING
            ):
                record.state = backend.state
                writes.append(_backend_write(record))
        for address in more:
            backends[address].users += 1
        return new

    def _drop_backends(self, addresses: Iterable[Address]) -> Iterator[Write]:
        """A frontend has these no more; those go that nobody uses."""
        for address in sorted(addresses):
            record = self.backends[address]
            record.users -= 1
            if not record.users:
                yield self._forget(record)

    def _forget(self, record: BackendRecord) -> Write:
        del self.backends[record.address]
        self._backend_ids.release(record.id)
        return Write(entries.backend_key(record.id, record.address.ip.version), None)

    def look_up_table(self, where: MapKey) -> bytes | None:
        """The look-up table that belongs there, None if none does."""
        for key, held in self.installed.items():
            if held.maglev is not None and entries.maglev_key(held.id, key.address.ip.version) == where:
                return self._entries(held.id, held.frontend)[1]
        return None

    def _entries(
        self, number: int, frontend: Frontend, pending: frozenset[Address] = frozenset()
    ) -> tuple[Installed, bytes | None]:
        """What a frontend needs in the maps, its backends being numbered, and its look-up table."""
        records = self.backends
        ids = {one.address: records[one.address].id for one in frontend.backends}
        chosen, others = selectable(sorted(frontend.backends, key=lambda one: ids[one.address]))
        preferred = [one for one in chosen if one.preferred]
        ordered = [*preferred, *(one for one in chosen if not one.preferred)] if preferred else chosen
        slots = entries.slot_values([ids[one.address] for one in ordered], number, quarantined=False)
        slots += entries.slot_values([ids[one.address] for one in others], number, quarantined=True)
        affinity = bool(frontend.affinity_timeout) and not frontend.l7_proxy_port
        master = entries.master_value(
            count=len(preferred or ordered),
            quarantined=len(others),
            number=number,
            flags=self._flags(frontend, affinity=affinity),
            timeout=frontend.affinity_timeout if affinity else 0,
            algorithm=_ALGORITHMS[frontend.algorithm],
            proxy_port=frontend.l7_proxy_port,
        )
        matches = frontend.backends if affinity and self._options.enable_session_affinity else ()
        table, digest = self._table(frontend, preferred or ordered, ids)
        installed = Installed(
            id=number,
            frontend=frontend,
            slots=tuple(slots),
            master=master,
            affinity=frozenset([entries.affinity_key(number, ids[one.address]) for one in matches]),
            ranges=frozenset(self._ranges(number, frontend)),
            maglev=digest,
            pending=pending,
        )
        return installed, table

    @staticmethod
    def _ranges(number: int, frontend: Frontend) -> Iterable[MapKey]:
        for text in frontend.source_ranges:
            prefix = ip_network(text)
            if prefix.version == frontend.key.address.ip.version:
                yield entries.source_range_key(number, prefix)

    @staticmethod
    def _flags(frontend: Frontend, *, affinity: bool) -> int:
        """As a plain number: combining members of an enumeration costs more than all else here."""
        return (
            _TYPE_FLAGS[frontend.type]
            | _EXT_LOCAL * (frontend.ext_local and frontend.type in _FROM_OUTSIDE)
            | _INT_LOCAL * (frontend.int_local and frontend.type not in _OF_ONE_NODE)
            | _TWO_SCOPES * frontend.two_scopes
            | _AFFINITY * affinity
            | _ROUTABLE * frontend.routable
            | _SOURCE_RANGE * bool(frontend.source_ranges)
            | _SOURCE_RANGE_DENY * frontend.source_ranges_deny
            | _L7 * bool(frontend.l7_proxy_port)
            | _LOOPBACK * frontend.loopback
            | _DSR * frontend.direct
        )

    def _table(
        self, frontend: Frontend, backends: Sequence[Backend], ids: Mapping[Address, int]
    ) -> tuple[bytes | None, bytes | None]:
        """The Maglev table, and its digest. Without backends the old one stays; it goes with the frontend."""
        wildcard_node_port = frontend.type is ServiceType.NODE_PORT and is_wildcard(frontend.key.address.ip)
        inside_only = frontend.type is ServiceType.CLUSTER_IP and not self._options.bpf_lb_external_clusterip
        chosen = (frontend.algorithm or self._options.bpf_lb_algorithm) == "maglev"
        if self._maglev is None or not chosen or wildcard_node_port or inside_only:
            return None, None
        held = self.installed.get(frontend.key)
        if not backends:
            return None, held.maglev if held is not None else None
        table = self._maglev(backends, ids)
        return table, hashlib.sha256(table).digest()


def _backend_write(record: BackendRecord) -> Write:
    return Write(*entries.backend_entry(record.id, record.address, record.state, record.zone))


def _same(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    """How many are the same from the first on."""
    if not old:
        return 0
    return next(
        (at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other),
        min(len(old), len(new)),
    )


def _discard(maps: Maps, families: Iterable[int]) -> list[Write]:
    """Delete frontends, then translations, then backends."""
    kinds = ("services_v2", "reverse_nat", "backends_v3")
    names = [f"cilium_lb{family}_{kind}" for kind in kinds for family in families]
    return [Write(MapKey(name, key), None) for name in names for key in sorted(maps.get(name, {}))]
