"""Frontends to map entries: numbers, differences, the order of writes.

Pure values; no cell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from operator import itemgetter

import msgspec

from cells.services import (
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceType,
    map_entries,
)
from cells.services.map_entries import (
    ALGORITHMS,
    Batch,
    IdAllocator,
    IdsExhaustedError,
    LookUpTable,
    MapKey,
    Maps,
    MapWrite,
    Restored,
    RestoredFrontend,
    batched,
    read,
    service_flags,
)
from cells.services.model.frontends import selectable

__all__ = ["LoadBalancer", "MaglevTable"]


# Frontends and backends with their numbers, and the map entries they need, written in a safe order.
#
# A frontend's work is planned as the difference of its entries; the order makes sure that no entry ever
# points at one that is not there (yet, or any more), wherever the agent is killed.

LAST_SERVICE_ID = 65534
LAST_BACKEND_ID = (1 << 32) - 1

MaglevTable = Callable[[Sequence[Backend], Mapping[ServiceAddress, int]], bytes]
"""The look-up table over some backends, by their numbers, as the bytes of the inner map's entry."""


class BackendRecord(msgspec.Struct, gc=False):
    """A backend, in use by so many frontends."""

    id: int
    key: bytes
    """The number as maps have it."""
    address: ServiceAddress
    state: BackendState
    zone: int = 0
    users: int = 0


class Installed(msgspec.Struct, frozen=True, gc=False):
    """A frontend as it is in the maps. Each part is keyed by map and key.

    ``confirmed`` is false while only the maps know of it; ``pending`` are backends of which only they know.
    """

    id: int
    frontend: Frontend
    slots: Sequence[bytes] = ()
    master: bytes = b""
    affinity: frozenset[MapKey] = frozenset()
    ranges: frozenset[MapKey] = frozenset()
    maglev: bytes | None = None
    """A digest of its look-up table, which is large."""
    confirmed: bool = True
    pending: frozenset[ServiceAddress] = frozenset()


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
        self._orphans: list[MapWrite] = []
        self._second_numbers: dict[int, MapKey] = {}
        """Of restored backends: slots and look-up tables may lead there until they are written."""
        self._service_ids: IdAllocator[FrontendKey] = IdAllocator(1, last_service_id)
        self._backend_ids: IdAllocator[ServiceAddress] = IdAllocator(1, LAST_BACKEND_ID)
        self.installed: dict[FrontendKey, Installed] = {}
        self.backends: dict[ServiceAddress, BackendRecord] = {}

    def restore(self, maps: Maps) -> list[Batch]:
        """Take over what an earlier agent installed, with its numbers; what must be deleted at once.

        Frontends and backends that the sources do not confirm stay until :meth:`synced`: a source that has
        not said everything must cut nobody off. Slots and source ranges of no frontend go at once, and so do
        backends of no frontend, unless no backend is referred to at all, or look-up tables may lead to them,
        which are written before the slots.
        """
        restored = read(maps, self._families())
        for one in restored.frontends:
            self._take_over(one, restored)
        numbers = {one.id for one in self.installed.values()}
        writes = [MapWrite(where, None) for where in restored.stray_slots]
        writes += [
            MapWrite(where, None)
            for number, ranges in sorted(restored.ranges.items())
            if number not in numbers
            for where in sorted(ranges)
        ]
        unused = [
            (number, backend)
            for number, backend in sorted(restored.backends.items())
            if backend.address not in self.backends or self.backends[backend.address].id != number
        ]
        at_once = bool(self.backends) and self._maglev is None
        named = {slot[:4] for one in restored.frontends for slot in one.slots}
        for number, backend in unused:
            where = map_entries.backend_key(number, backend.address.version)
            if at_once and where.key not in named:
                writes.append(MapWrite(where, None))
            elif backend.address not in self.backends:
                self._restore_backend(number, backend, restored.zones[number])
            else:  # it has another number, too: an agent ended before all led there
                self._backend_ids.restore(number, backend.address)
                self._second_numbers[number] = where
        known = {where for one in self.installed.values() for where in one.affinity}
        matches = {where for wheres in restored.affinity.values() for where in wheres}
        self._orphans += [MapWrite(where, None) for where in sorted(matches - known)]
        self._orphans += self._reverse_nat_orphans(maps, numbers)
        return batched(writes)

    def discard(self, maps: Maps) -> list[Batch]:
        """Take nothing over: delete the frontends, backends and translations that the maps hold."""
        return _discard(maps, self._families())

    def discard_off(self, maps: Maps) -> list[Batch]:
        """Delete what the maps hold of a family that is switched off: nothing can lead there any more."""
        return _discard(maps, tuple({4, 6} - set(self._families())))

    def synced(self) -> dict[FrontendKey | None, list[Batch]]:
        """The sources have said everything: what only the maps knew goes.

        By frontend that is still served; of none what belongs to no such.
        """
        served: dict[FrontendKey | None, list[Batch]] = {}
        batches: list[Batch] = []
        for key, held in list(self.installed.items()):
            if not held.confirmed:
                batches += self.delete(key)
            elif held.pending:
                ready = tuple(one for one in held.frontend.backends if one.address not in held.pending)
                self.installed[key] = msgspec.structs.replace(held, pending=frozenset())
                served[key] = self.upsert(msgspec.structs.replace(held.frontend, backends=ready))
        writes = [self._forget(one) for one in list(self.backends.values()) if not one.users]
        for number, where in self._second_numbers.items():
            self._backend_ids.release(number)
            writes.append(MapWrite(where, None))
        self._second_numbers = {}
        served[None] = [*batches, *batched(writes)]
        if not self._orphans:
            return served
        current = {where for one in self.installed.values() for where in one.affinity}
        current |= {
            map_entries.reverse_nat_key(one.id, key.address.version) for key, one in self.installed.items()
        }
        served[None] += batched(one for one in self._orphans if one.where not in current)
        self._orphans = []
        return served

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
        self.backends[backend.address] = BackendRecord(
            number, map_entries.backend_number(number), backend.address, backend.state, zone
        )

    def _reverse_nat_orphans(self, maps: Maps, numbers: set[int]) -> Iterator[MapWrite]:
        for family in self._families():
            name = f"cilium_lb{family}_reverse_nat"
            for raw in sorted(maps.get(name, {})):
                if int.from_bytes(raw, "big") not in numbers:
                    yield MapWrite(MapKey(name, raw), None)

    def upsert(self, frontend: Frontend) -> list[Batch]:
        """Serve a frontend, new or changed. Raises IdsExhaustedError; then nothing has changed."""
        key = frontend.key
        held = self.installed.get(key)
        number = held.id if held is not None else self._number(frontend)
        pending: frozenset[ServiceAddress] = frozenset()
        before: set[ServiceAddress] = set()
        if held is not None:
            frontend = self._with_states(frontend, held)
            before = {one.address for one in held.frontend.backends}
            if held.pending:
                pending = held.pending - {one.address for one in frontend.backends}
                left = [one for one in held.frontend.backends if one.address in pending]
                frontend = msgspec.structs.replace(frontend, backends=(*frontend.backends, *left))
        now = {one.address for one in frontend.backends}
        new_backends, batches = self._use_backends(frontend, now - before)
        new, table = self._entries(number, frontend, pending)
        old = held if held is not None else Installed(number, frontend)
        version = key.address.version
        if old.affinity or old.ranges or new.ranges:
            writes = [MapWrite(where, None) for where in sorted(old.affinity - new.affinity)]
            writes += [MapWrite(where, None) for where in sorted(old.ranges - new.ranges)]
            writes += [MapWrite(where, map_entries.PRESENT) for where in sorted(new.ranges - old.ranges)]
            batches += batched(writes)
        batches += new_backends
        if table is not None and new.maglev != old.maglev:
            batches.append(_batch(map_entries.maglev_key(number, version), table))
        services = map_entries.SERVICES[version]
        batches += self._changed_slots(services, key, old.slots, new.slots)
        if held is None:
            batches.append(
                _batch(
                    map_entries.reverse_nat_key(number, version), map_entries.reverse_nat_value(key.address)
                )
            )
        if new.master != old.master:
            batches.append(Batch(services, map_entries.slot_keys(key, 0, 1), (new.master,)))
        if len(old.slots) > len(new.slots):
            surplus = map_entries.slot_keys(key, len(new.slots) + 1, len(old.slots) + 1)
            batches.append(Batch(services, surplus, None))
        if new.affinity:
            more = sorted(new.affinity - old.affinity)
            batches += batched(MapWrite(where, map_entries.PRESENT) for where in more)
        self.installed[key] = new
        if before:
            batches += batched(self._drop_backends(before - now))
        return batches

    @staticmethod
    def _changed_slots(
        name: str, key: FrontendKey, old: Sequence[bytes], new: Sequence[bytes]
    ) -> Iterator[Batch]:
        """Those that are to be written, from the first on."""
        if not new:
            return
        keys = map_entries.slot_keys(key, 1, len(new) + 1)
        if not old:
            yield Batch(name, keys, new)
            return
        changed = [at for at, value in enumerate(new) if at >= len(old) or old[at] != value]
        if changed:
            yield Batch(name, [keys[at] for at in changed], [new[at] for at in changed])

    def _number(self, frontend: Frontend) -> int:
        if not frontend.number:
            return self._service_ids.allocate(frontend.key)
        if not self._service_ids.restore(frontend.number, frontend.key):
            raise IdsExhaustedError(f"number {frontend.number} is another frontend's")
        return frontend.number

    def delete(self, key: FrontendKey) -> list[Batch]:
        """Serve a frontend no more; nothing to write for an unknown one."""
        held = self.installed.pop(key, None)
        if held is None:
            return []
        version = key.address.version
        services = map_entries.SERVICES[version]
        batches = [Batch(services, map_entries.slot_keys(key, 0, 1), None)]
        if held.slots:
            batches.append(Batch(services, map_entries.slot_keys(key, 1, len(held.slots) + 1), None))
        writes: list[MapWrite] = []
        if held.maglev is not None:
            writes.append(MapWrite(map_entries.maglev_key(held.id, version), None))
        writes.append(MapWrite(map_entries.reverse_nat_key(held.id, version), None))
        writes += [MapWrite(where, None) for where in sorted(held.affinity)]
        writes += [MapWrite(where, None) for where in sorted(held.ranges)]
        writes += self._drop_backends({one.address for one in held.frontend.backends})
        self._service_ids.release(held.id)
        return [*batches, *batched(writes)]

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
                and (state is BackendState.TERMINATING or not one.manual)
                else one
                for one in frontend.backends
            ),
        )

    def _use_backends(self, frontend: Frontend, more: set[ServiceAddress]) -> tuple[list[Batch], list[Batch]]:
        """Number new backends: their entries; and those of others whose states are others now.

        ``more`` are those that the frontend did not have.
        """
        backends = self.backends
        if len(more) == len(frontend.backends) and backends.keys().isdisjoint(more):
            return self._number_backends({one.address: one.state for one in frontend.backends}), []
        fresh: dict[ServiceAddress, BackendState] = {}
        states: list[MapWrite] = []
        for backend in frontend.backends:
            record = backends.get(backend.address)
            if record is None:
                fresh.setdefault(backend.address, backend.state)
            elif backend.state is not record.state and (
                backend.manual or backend.state is BackendState.TERMINATING
            ):
                record.state = backend.state
                states.append(_backend_write(record))
        new = self._number_backends(fresh)
        if len(fresh) < len(more):
            for address in more - fresh.keys():
                backends[address].users += 1
        return new, batched(states)

    def _number_backends(self, fresh: Mapping[ServiceAddress, BackendState]) -> list[Batch]:
        """Their entries; each is in use by one frontend."""
        if not fresh:
            return []
        numbers = self._backend_ids.allocate_all(list(fresh))
        keys = [map_entries.backend_number(number) for number in numbers]
        known = zip(numbers, keys, fresh.items(), strict=True)
        self.backends.update(
            [
                (address, BackendRecord(number, key, address, state, 0, 1))
                for number, key, (address, state) in known
            ]
        )
        ends = map_entries.BACKEND_ENDS
        values = [address[1:] + ends[state] for address, state in fresh.items()]
        versions = set(map(itemgetter(0), fresh))
        if len(versions) == 1:
            return [Batch(map_entries.BACKENDS[versions.pop()], keys, values)]
        maps = [map_entries.BACKENDS[address[0]] for address in fresh]
        named = map(MapKey, maps, keys)
        return batched(map(MapWrite, named, values))

    def _drop_backends(self, addresses: Iterable[ServiceAddress]) -> Iterator[MapWrite]:
        """A frontend has these no more; those go that nobody uses."""
        for address in sorted(addresses):
            record = self.backends[address]
            record.users -= 1
            if not record.users:
                yield self._forget(record)

    def _forget(self, record: BackendRecord) -> MapWrite:
        del self.backends[record.address]
        self._backend_ids.release(record.id)
        return MapWrite(map_entries.backend_key(record.id, record.address.version), None)

    def look_up_table(self, where: MapKey) -> LookUpTable | None:
        """The look-up table that belongs there, None if none does."""
        for key, held in self.installed.items():
            if held.maglev is not None and map_entries.maglev_key(held.id, key.address.version) == where:
                return self._entries(held.id, held.frontend)[1]
        return None

    def _entries(
        self, number: int, frontend: Frontend, pending: frozenset[ServiceAddress] = frozenset()
    ) -> tuple[Installed, LookUpTable | None]:
        """What a frontend needs in the maps, its backends being numbered, and its look-up table."""
        records = self.backends
        backends: Sequence[Backend] = frontend.backends
        own = [records[one.address] for one in backends]
        ids = [one.id for one in own]
        if ids != sorted(ids):
            backends = [one for _, one in sorted(zip(ids, backends, strict=True), key=itemgetter(0))]
            own = [records[one.address] for one in backends]
        chosen, others = selectable(backends)
        preferred = [one for one in chosen if one.preferred]
        ordered: Sequence[Backend] = chosen
        if preferred or others:
            ordered = [*preferred, *(one for one in chosen if not one.preferred)]
            own = [records[one.address] for one in (*ordered, *others)]
        slots = map_entries.slot_values([one.key for one in own], number, len(ordered))
        affinity = bool(frontend.affinity_timeout) and not frontend.l7_proxy_port
        master = map_entries.master_value(
            count=len(preferred or ordered),
            quarantined=len(others),
            number=number,
            flags=service_flags(frontend, affinity=affinity),
            timeout=frontend.affinity_timeout if affinity else 0,
            algorithm=ALGORITHMS[frontend.algorithm],
            proxy_port=frontend.l7_proxy_port,
        )
        matches = frontend.backends if affinity and self._options.enable_session_affinity else ()
        table, digest = self._table(frontend, preferred or ordered)
        installed = Installed(
            id=number,
            frontend=frontend,
            slots=slots,
            master=master,
            affinity=frozenset(
                [map_entries.affinity_key(number, records[one.address].id) for one in matches]
            ),
            ranges=frozenset(self._ranges(number, frontend)) if frontend.source_ranges else frozenset(),
            maglev=digest,
            pending=pending,
        )
        return installed, table

    @staticmethod
    def _ranges(number: int, frontend: Frontend) -> Iterable[MapKey]:
        for text in frontend.source_ranges:
            prefix = ip_network(text)
            if prefix.version == frontend.key.address.version:
                yield map_entries.source_range_key(number, prefix)

    def _table(
        self, frontend: Frontend, backends: Sequence[Backend]
    ) -> tuple[LookUpTable | None, bytes | None]:
        """The Maglev table, and its digest. Without backends the old one stays; it goes with the frontend."""
        if self._maglev is None:
            return None, None
        wildcard_node_port = frontend.type is ServiceType.NODE_PORT and frontend.key.address.is_wildcard
        inside_only = frontend.type is ServiceType.CLUSTER_IP and not self._options.bpf_lb_external_clusterip
        chosen = (frontend.algorithm or self._options.bpf_lb_algorithm) == "maglev"
        if not chosen or wildcard_node_port or inside_only:
            return None, None
        held = self.installed.get(frontend.key)
        if not backends:
            return None, held.maglev if held is not None else None
        records = [self.backends[one.address] for one in backends]
        table = LookUpTable(self._maglev(backends, {one.address: one.id for one in records}))
        table.backends = frozenset([one.key for one in records])
        return table, hashlib.sha256(table).digest()


def _backend_write(record: BackendRecord) -> MapWrite:
    value = map_entries.backend_value(record.address, record.state, record.zone)
    return MapWrite(map_entries.backend_key(record.id, record.address.version), value)


def _batch(where: MapKey, value: bytes) -> Batch:
    return Batch(where.map, (where.key,), (value,))


def _discard(maps: Maps, families: Iterable[int]) -> list[Batch]:
    """Delete frontends, then translations, then backends."""
    kinds = ("services_v2", "reverse_nat", "backends_v3")
    names = [f"cilium_lb{family}_{kind}" for kind in kinds for family in families]
    return [Batch(name, sorted(maps[name]), None) for name in names if maps.get(name)]
