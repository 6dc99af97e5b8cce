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
from cells.services.balancer.ids import IdAllocator
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
    ServiceType.CLUSTER_IP: ServiceFlag(0),
    ServiceType.NODE_PORT: ServiceFlag.NODE_PORT,
    ServiceType.EXTERNAL_IPS: ServiceFlag.EXTERNAL_IP,
    ServiceType.HOST_PORT: ServiceFlag.HOST_PORT,
    ServiceType.LOAD_BALANCER: ServiceFlag.LOAD_BALANCER,
    ServiceType.LOCAL_REDIRECT: ServiceFlag.LOCAL_REDIRECT,
}

_ALGORITHMS = {"": 0, "random": 1, "maglev": 2}
"""As slot 0 tells how backends are chosen for clients outside; 0: as for every service."""

SOURCE_RANGE_DENY = ServiceFlag.QUARANTINED
"""What the bit means of slot 0."""

_FROM_OUTSIDE = (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER, ServiceType.EXTERNAL_IPS)

MaglevTable = Callable[[Sequence[Backend], Mapping[Address, int]], bytes]
"""The look-up table over some backends, by their numbers, as the bytes of the inner map's entry."""


class Write(NamedTuple):
    """One change of a map; a value of None deletes the key."""

    where: MapKey
    value: bytes | None


class BackendRecord(msgspec.Struct):
    """A backend that is in use."""

    id: int
    address: Address
    state: BackendState
    zone: int = 0
    frontends: set[FrontendKey] = msgspec.field(default_factory=set)


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
        of no frontend, unless no backend is referred to at all.
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
        if self.backends:
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
        for record in [one for one in self.backends.values() if not one.frontends]:
            writes.append(self._forget(record))
        current = {where for one in self.installed.values() for where in one.affinity}
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
            self.backends[backend.address].frontends.add(key)
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
        number = held.id if held is not None else self._service_ids.allocate(key)
        frontend = self._with_states(frontend, held)
        pending: frozenset[Address] = frozenset()
        if held is not None and held.pending:
            pending = held.pending - {one.address for one in frontend.backends}
            left = [one for one in held.frontend.backends if one.address in pending]
            frontend = msgspec.structs.replace(frontend, backends=(*frontend.backends, *left))
        writes: list[Write] = []
        new_backends = self._use_backends(frontend, writes)
        wanted, table = self._entries(number, frontend)
        new = msgspec.structs.replace(wanted, pending=pending)
        old = held if held is not None else Installed(number, frontend)
        version = key.address.ip.version
        writes += [Write(where, None) for where in sorted(old.affinity - new.affinity)]
        writes += [Write(where, None) for where in sorted(old.ranges - new.ranges)]
        writes += [Write(where, entries.PRESENT) for where in sorted(new.ranges - old.ranges)]
        writes += new_backends
        if table is not None and new.maglev != old.maglev:
            writes.append(Write(entries.maglev_key(number, version), table))
        for slot, value in enumerate(new.slots, 1):
            if slot > len(old.slots) or old.slots[slot - 1] != value:
                writes.append(Write(entries.service_key(key, slot), value))
        if held is None:
            writes.append(
                Write(entries.reverse_nat_key(number, version), entries.reverse_nat_value(key.address))
            )
        if new.master != old.master:
            writes.append(Write(entries.service_key(key, 0), new.master))
        writes += [
            Write(entries.service_key(key, slot), None)
            for slot in range(len(new.slots) + 1, len(old.slots) + 1)
        ]
        writes += [Write(where, entries.PRESENT) for where in sorted(new.affinity - old.affinity)]
        self.installed[key] = new
        writes += self._drop_backends(old, {one.address for one in frontend.backends})
        return writes

    def delete(self, key: FrontendKey) -> list[Write]:
        """Serve a frontend no more; nothing to write for an unknown one."""
        held = self.installed.pop(key, None)
        if held is None:
            return []
        version = key.address.ip.version
        writes = [Write(entries.service_key(key, slot), None) for slot in range(len(held.slots) + 1)]
        if held.maglev is not None:
            writes.append(Write(entries.maglev_key(held.id, version), None))
        writes.append(Write(entries.reverse_nat_key(held.id, version), None))
        writes += [Write(where, None) for where in sorted(held.affinity)]
        writes += [Write(where, None) for where in sorted(held.ranges)]
        writes += self._drop_backends(held, set())
        self._service_ids.release(held.id)
        return writes

    def _with_states(self, frontend: Frontend, held: Installed | None) -> Frontend:
        """A backend that was not active stays as it was until its source says otherwise, or it has been gone.

        Sources say active by default: terminating is final, and quarantine is lifted by who set it.
        """
        if held is None:
            return frontend
        states = {
            one.address: one.state for one in held.frontend.backends if one.state is not BackendState.ACTIVE
        }
        return msgspec.structs.replace(
            frontend,
            backends=tuple(
                msgspec.structs.replace(one, state=states[one.address])
                if one.state is BackendState.ACTIVE and one.address in states
                else one
                for one in frontend.backends
            ),
        )

    def _use_backends(self, frontend: Frontend, writes: list[Write]) -> list[Write]:
        """Number new backends; their entries. Entries that become terminating are written at once."""
        new: list[Write] = []
        for backend in frontend.backends:
            record = self.backends.get(backend.address)
            version = backend.address.ip.version
            if record is None:
                number = self._backend_ids.allocate(backend.address)
                record = BackendRecord(number, backend.address, backend.state)
                self.backends[backend.address] = record
                new.append(Write(entries.backend_key(number, version), self._backend_value(record)))
            elif BackendState.TERMINATING is backend.state is not record.state:
                record.state = backend.state
                writes.append(Write(entries.backend_key(record.id, version), self._backend_value(record)))
            record.frontends.add(frontend.key)
        return new

    @staticmethod
    def _backend_value(record: BackendRecord) -> bytes:
        return entries.backend_value(record.address, record.state, record.zone)

    def _drop_backends(self, held: Installed, kept: set[Address]) -> Iterator[Write]:
        """Backends that the frontend had and nobody uses any more."""
        for address in sorted({one.address for one in held.frontend.backends} - kept):
            record = self.backends[address]
            record.frontends.discard(held.frontend.key)
            if not record.frontends:
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

    def _entries(self, number: int, frontend: Frontend) -> tuple[Installed, bytes | None]:
        """What a frontend needs in the maps, its backends being numbered, and its look-up table."""
        ids = {one.address: self.backends[one.address].id for one in frontend.backends}
        chosen, others = selectable(sorted(frontend.backends, key=lambda one: ids[one.address]))
        preferred = [one for one in chosen if one.preferred]
        ordered = [*preferred, *(one for one in chosen if not one.preferred)]
        slots = [
            entries.slot_value(backend=ids[one.address], number=number, quarantined=False) for one in ordered
        ]
        slots += [
            entries.slot_value(backend=ids[one.address], number=number, quarantined=True) for one in others
        ]
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
            affinity=frozenset(entries.affinity_key(number, ids[one.address]) for one in matches),
            ranges=frozenset(self._ranges(number, frontend)),
            maglev=digest,
        )
        return installed, table

    def _ranges(self, number: int, frontend: Frontend) -> Iterable[MapKey]:
        for text in frontend.source_ranges:
            prefix = ip_network(text)
            if prefix.version == frontend.key.address.ip.version:
                yield entries.source_range_key(number, prefix)

    def _flags(self, frontend: Frontend, *, affinity: bool) -> ServiceFlag:
        flags = _TYPE_FLAGS[frontend.type]
        for flag, holds in (
            (ServiceFlag.EXT_LOCAL_SCOPE, frontend.ext_local and frontend.type in _FROM_OUTSIDE),
            (ServiceFlag.INT_LOCAL_SCOPE, frontend.int_local),
            (ServiceFlag.TWO_SCOPES, frontend.two_scopes),
            (ServiceFlag.AFFINITY, affinity),
            (ServiceFlag.ROUTABLE, frontend.routable),
            (ServiceFlag.SOURCE_RANGE, bool(frontend.source_ranges)),
            (SOURCE_RANGE_DENY, frontend.source_ranges_deny),
            (ServiceFlag.L7_LOAD_BALANCER, bool(frontend.l7_proxy_port)),
            (ServiceFlag.LOOPBACK, frontend.loopback),
        ):
            if holds:
                flags |= flag
        return flags

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


def _discard(maps: Maps, families: Iterable[int]) -> list[Write]:
    """Delete frontends, then translations, then backends."""
    kinds = ("services_v2", "reverse_nat", "backends_v3")
    names = [f"cilium_lb{family}_{kind}" for kind in kinds for family in families]
    return [Write(MapKey(name, key), None) for name in names for key in sorted(maps.get(name, {}))]
