"""Plans writes to the load-balancing maps: allocates service and backend IDs, and compares entries.

``ServicesTarget`` passes frontends in, executes the plans, and reports the written batches. A plan contains
only the difference from the present entries. A failed plan leaves no state: the next one starts from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ipaddress import ip_network
from itertools import chain
from operator import itemgetter
from typing import Final

from cells.maps.bpf import PackedColumn
from cells.services import (
    ANY_PROTOCOL,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceType,
    map_entries,
)
from cells.services.control.numbers import (
    IdAllocator,
    IdsExhaustedError,
    NumberedBackends,
    active_entries,
)
from cells.services.control.tables import PlannedFrontend, ServedFrontend, range_keys
from cells.services.map_entries import (
    AFFINITY_MATCH,
    ALGORITHMS,
    BACKENDS,
    LOOK_UP_TABLES,
    MAGLEV,
    PRESENT,
    REVERSE_NAT,
    SERVICES,
    SLOT_SIZE,
    SOURCE_RANGES,
    UNKNOWN,
    Batch,
    Entries,
    MapKey,
    Restored,
    WritePlan,
    WriteStep,
    digest,
    numbers_of,
    read,
    service_flags,
)
from cells.services.model.backends import SliceBackends, addresses_of, selectable
from lifecycle import ReadTable

LAST_SERVICE_ID: Final = 65534

MaglevTable = Callable[[Sequence[Backend], Mapping[bytes, int]], bytes]
"""Computes a Maglev table of backends, given their IDs, as the value of the inner map's entry."""


class LoadBalancer:
    """Plans writes from the entries in the maps, and allocates service and backend IDs.

    The slots of a settled frontend follow from its row in the table ``services``. Frontends are ``unsettled``
    while they are restored, or their plan is unwritten or failed: their rows have every backend and source
    range that may be in the maps, and ``held`` has their slots.
    """

    def __init__(
        self,
        options: LoadBalancerOptions,
        served: ReadTable[FrontendKey, ServedFrontend],
        maglev: MaglevTable | None = None,
        *,
        last_service_id: int = LAST_SERVICE_ID,
    ) -> None:
        self._options = options
        self._served = served
        self._maglev = maglev
        self._last_service_id = last_service_id
        self._backend_maps = {BACKENDS[family] for family in self._families()}
        self._reset()

    def _reset(self) -> None:
        self.held: Entries = {}
        """Present entries that rows and IDs do not imply: digests of Maglev tables, slots of unsettled
        frontends, and backends with a duplicate ID."""
        self.unsettled: dict[FrontendKey, ServedFrontend] = {}
        self._service_ids: IdAllocator[FrontendKey] = IdAllocator(self._last_service_id)
        self._backends = NumberedBackends()
        self._duplicate_ids: dict[int, str] = {}
        """Second IDs of restored backends, with their map: slots may refer to them until rewritten."""
        self._restored_tables: set[MapKey] = set()
        """Restored Maglev tables, which may refer to any backend until they are written."""
        self._protocol_less = {one.key for one in self._served.all() if one.key.address[-1] == ANY_PROTOCOL}
        """Frontends in the maps without a protocol: of an agent with bpf-lb-proto-diff=false."""

    def realised(self, key: FrontendKey) -> ServedFrontend | None:
        """Return the frontend as it is, or may be, in the maps; None if it is not."""
        return self.unsettled.get(key) or self._served.get(key)

    def _mark_unsettled(self, row: ServedFrontend) -> None:
        self.unsettled[row.key] = row
        if row.key.address[-1] == ANY_PROTOCOL:
            self._protocol_less.add(row.key)

    def _of_any_protocol(self, key: FrontendKey) -> ServedFrontend | None:
        """Return the frontend of the address without a protocol: an earlier agent's, or a manual one."""
        if not self._protocol_less or key.address[-1] == ANY_PROTOCOL:
            return None  # without creating a key for each frontend
        return self.realised(key.of_any_protocol)

    # Restoring the maps' entries.

    def restore(self, held: Entries) -> WritePlan:
        """Restore IDs and frontends from the maps; return a plan that deletes stray entries."""
        self._reset()
        self.held = held
        found = read(held, self._families())
        self._restore_backends(found)
        numbers = set()
        for one in found.frontends:
            numbers.add(one.id)
            self._service_ids.restore(one.id, one.frontend.key)
            self._backends.use(addresses_of(one.frontend.backends))
            self._mark_unsettled(ServedFrontend(one.id, one.frontend))
        self._restored_tables = {MapKey(name, key) for name in LOOK_UP_TABLES for key in held.get(name, ())}
        plan = WritePlan()
        for where in found.stray_slots:
            plan.remove(WriteStep.SLOTS_DELETED, where.map, [where.key])
        for number, ranges in found.ranges.items():
            known = {map_entries.source_range_key(number, ip_network(text)) for text in ranges.values()}
            for where in ranges if number not in numbers else ranges.keys() - known:
                plan.remove(WriteStep.SOURCE_RANGES_STALE, where.map, [where.key])
        self._remove_stray_affinity(found, plan)
        for name in (*REVERSE_NAT.values(), *MAGLEV.values()):
            stray = [key for key in held.get(name, ()) if int.from_bytes(key, "big") not in numbers]
            step = WriteStep.REVERSE_NAT_DELETED if name in _REVERSE_NAT_MAPS else WriteStep.MAGLEV_DELETED
            plan.remove(step, name, stray)
        self._remove_disabled_families(plan)
        return plan

    def _families(self) -> tuple[int, ...]:
        return (4,) * self._options.enable_ipv4 + (6,) * self._options.enable_ipv6

    def _restore_backends(self, found: Restored) -> None:
        for number, backend in found.backends.items():
            address = backend.address
            if not self._backends.restore(number, address, backend.state, found.zones[number]):
                # the earlier agent was killed before it rewrote all slots to one ID
                self._duplicate_ids[number] = BACKENDS[address.version]
        for version in self._families():
            held = self.held.pop(BACKENDS[version], {})
            self._backends.observe(version, held)
            second = map(map_entries.backend_number, self._duplicate_ids)
            self.held[BACKENDS[version]] = {key: held[key] for key in second if key in held}

    def wanted(self, held: Entries) -> Entries:
        """Return the desired entries, except slots; for unwritten backends, the present ones."""
        found = {**self.held}
        for version, name in BACKENDS.items():
            found[name] = found.get(name, {}) | self._backends.wanted(version, held.get(name, _NO_ENTRIES))
        return found

    def _remove_stray_affinity(self, found: Restored, plan: WritePlan) -> None:
        known = {
            map_entries.affinity_key(one.id, self._backends.numbers[each.address])
            for one in found.frontends
            if one.id in found.affinity
            for each in one.frontend.backends
        }
        stray = [where.key for keys in found.affinity.values() for where in keys if where not in known]
        plan.remove(WriteStep.AFFINITY_STALE, AFFINITY_MATCH, stray)

    def _remove_disabled_families(self, plan: WritePlan) -> None:
        """Delete entries of disabled families, which no packet reaches."""
        for family in {4, 6} - set(self._families()):
            for step, names in (
                (WriteStep.SLOTS_DELETED, SERVICES),
                (WriteStep.REVERSE_NAT_DELETED, REVERSE_NAT),
                (WriteStep.BACKENDS_DELETED, BACKENDS),
            ):
                plan.remove(step, names[family], self.held.get(names[family], ()))

    # Adding and changing frontends.

    def put_all(
        self, frontends: Collection[Frontend], plan: WritePlan
    ) -> tuple[list[PlannedFrontend], dict[FrontendKey, Exception]]:
        """Plan to serve frontends; return the planned ones, and the errors of the others."""
        planned: list[PlannedFrontend] = []
        failures: dict[FrontendKey, Exception] = {}
        numbered = self._allocate_new(frontends, plan) if len(frontends) > 1 else _NO_IDS
        for frontend in frontends:
            try:
                if (numbers := numbered.get(frontend.key)) is not None:
                    planned.append(self._put_new(frontend, numbers, plan))
                else:
                    planned.append(self.put(frontend, plan))
            except IdsExhaustedError as error:
                failures[frontend.key] = error
        return planned, failures

    def _allocate_new(
        self, frontends: Collection[Frontend], plan: WritePlan
    ) -> Mapping[FrontendKey, Sequence[int]]:
        """Allocate IDs for the backends of new frontends in one pass: at start-up nearly all are new.

        Skips frontends with inactive or shared backends; skips all if service IDs may not suffice.
        """
        if len(self._service_ids) + len(frontends) > self._last_service_id:
            return _NO_IDS
        found: dict[FrontendKey, Sequence[int]] = {}
        for version, some in self._with_unshared_backends(frontends).items():
            addresses = list(chain.from_iterable([addresses_of(one.backends) for one in some]))
            try:
                numbers = self._allocate_backends(addresses, BACKENDS[version], plan)
            except IdsExhaustedError:
                return found
            first = 0
            for frontend in some:
                end = first + len(frontend.backends)
                found[frontend.key] = numbers[first:end]
                first = end
        return found

    def _with_unshared_backends(self, frontends: Collection[Frontend]) -> Mapping[int, Sequence[Frontend]]:
        """Return new frontends, by family, with active backends only that no other frontend uses."""
        known = self._backends.numbers.keys()
        found: dict[int, list[Frontend]] = {version: [] for version in BACKENDS}
        seen: set[bytes] = set()
        for frontend in frontends:
            own = addresses_of(frontend.backends)
            before = len(seen)
            seen.update(own)
            if len(seen) - before != len(own) or frontend.number:
                continue
            if self.realised(frontend.key) or self._of_any_protocol(frontend.key):
                continue
            if _all_selectable(frontend.backends) and known.isdisjoint(own):
                found[frontend.key.address[0]].append(frontend)
        return found

    def _put_new(self, frontend: Frontend, numbers: Sequence[int], plan: WritePlan) -> PlannedFrontend:
        """Plan to serve a new frontend with these backend IDs, all selectable, in this order."""
        key, name = frontend.key, SERVICES[frontend.key.address[0]]
        number = self._service_ids.allocate(key)
        row = ServedFrontend(number, frontend)
        self._mark_unsettled(row)
        if self.held.setdefault(name, {}) or not isinstance(numbers, range):  # slots are sorted by numbers
            self._put_entries(row, None, plan)
        else:
            first, others = map_entries.slot_key_columns(key, len(numbers))
            if numbers:
                plan.add_selectable(name, others, numbers, number)
            plan.at(WriteStep.FRONTENDS, name)[first] = self._master(row, len(numbers), 0)
            self._put_reverse_nat(row, plan)
            self._put_optional(row, None, frontend.backends, plan)
        return PlannedFrontend(row, _NO_ADDRESSES, was_served=False)

    def put(self, frontend: Frontend, plan: WritePlan) -> PlannedFrontend:
        """Plan to serve a frontend. Raises IdsExhaustedError without planning anything."""
        key, wanted = frontend.key, frontend
        old = self.realised(key)
        before = _NO_ADDRESSES
        if old is None:
            number = self._allocate_id(frontend)
            if (earlier := self._of_any_protocol(key)) is not None:
                frontend = earlier.with_states(frontend)
        else:
            number = old.id
            before = frozenset(addresses_of(old.in_maps.backends))
            frontend = old.with_unconfirmed(old.with_states(frontend))
        now = frozenset(addresses_of(frontend.backends))
        try:
            self._add_backends(frontend, now - before, plan)
        except IdsExhaustedError:
            if old is None:
                self._service_ids.release(number)
            raise
        row = ServedFrontend(number, wanted, None if frontend is wanted or frontend == wanted else frontend)
        self._unsettle(old)
        self._mark_unsettled(row if old is None else old.merged(row))
        masters = self.held.setdefault(SERVICES[key.address[0]], {})
        was_served = old is not None and map_entries.slot_keys(key, 0, 1)[0] in masters
        self._put_entries(row, old, plan)
        return PlannedFrontend(row, before - now, was_served)

    def mark_settled(self, planned: Collection[PlannedFrontend]) -> None:
        """Record that the plan of these frontends was written: their rows imply their slots again."""
        for one in planned:
            self._release(one.dropped)
            del self.unsettled[one.row.key]
        if not self.unsettled:
            for name in SERVICES.values():
                self.held.pop(name, None)
            return
        for one in planned:
            held = self.held[SERVICES[one.row.key.address.version]]
            slots = map_entries.slots_behind(held, one.row.key, 0)
            for key in (*slots, *map_entries.slot_keys(one.row.key, 0, 1)):
                held.pop(key, None)

    def _unsettle(self, old: ServedFrontend | None) -> None:
        """Record the slots of a frontend before they change."""
        if old is not None and old.key not in self.unsettled:
            self.unsettled[old.key] = old
            self.held.setdefault(SERVICES[old.key.address.version], {}).update(self.slots_of(old))

    def slots_of(self, row: ServedFrontend) -> Iterable[tuple[bytes, bytes]]:
        """Return the keys and values of a frontend's slots, as its row implies them."""
        master, values, _ = self._slots(row)
        slots = PackedColumn(values, SLOT_SIZE)
        return zip(map_entries.slot_keys(row.key, 0, len(slots) + 1), (master, *slots), strict=True)

    def _allocate_id(self, frontend: Frontend) -> int:
        if not frontend.number:
            return self._service_ids.allocate(frontend.key)
        if not self._service_ids.restore(frontend.number, frontend.key):
            raise IdsExhaustedError(f"number {frontend.number} is another frontend's")
        return frontend.number

    def _add_backends(self, frontend: Frontend, more: frozenset[bytes], plan: WritePlan) -> None:
        """Allocate IDs for new backends; plan missing entries and changed states.

        ``more`` has the addresses that the frontend did not have before.
        """
        backends, own = self._backends, frontend.backends
        addresses = addresses_of(own)
        fresh = dict.fromkeys([one for one in addresses if one not in backends.numbers])
        if fresh:
            backends.add(list(fresh))
        if len(more) > len(fresh):
            backends.use(more.difference(fresh))
        if not isinstance(own, SliceBackends):
            known = {one for one in addresses if one not in fresh}
            for one in own:
                if one.address not in known:
                    known.add(one.address)
                elif one.address in fresh or not (one.manual or one.state is BackendState.TERMINATING):
                    continue
                backends.set_state(one.address, one.state)
        name = BACKENDS[frontend.key.address[0]]  # backends are of its family
        plan.at(WriteStep.BACKENDS, name).update(backends.missing(addresses))

    def _allocate_backends(self, addresses: Sequence[bytes], name: str, plan: WritePlan) -> Sequence[int]:
        """Allocate IDs for new active backends of one frontend each, and plan their entries."""
        if not addresses:
            return ()
        numbers = self._backends.add(addresses)
        plan.add(WriteStep.BACKENDS, name, *active_entries(addresses, numbers))
        return numbers

    def _release(self, addresses: Iterable[bytes]) -> None:
        self._backends.release(sorted(addresses))

    def _slots(self, row: ServedFrontend) -> tuple[bytes, bytes, Sequence[Backend]]:
        """Return slot 0, the other slots joined, and the backends for new connections."""
        frontend, known = row.in_maps, self._backends.numbers
        chosen: Sequence[Backend] = frontend.backends
        others: Sequence[Backend] = ()
        preferred: Sequence[Backend] = ()
        numbers = [known[one] for one in addresses_of(chosen)] if _all_selectable(chosen) else None
        if numbers is None or numbers != sorted(numbers):
            chosen, others = selectable(self._by_number(frontend))
            if preferred := [one for one in chosen if one.preferred]:
                chosen = [*preferred, *(one for one in chosen if not one.preferred)]
            numbers = [known[one.address] for one in (*chosen, *others)]
        slots = map_entries.slot_values(numbers, row.id, len(chosen))
        return self._master(row, len(preferred or chosen), len(others)), slots, preferred or chosen

    def _master(self, row: ServedFrontend, count: int, quarantined: int) -> bytes:
        """Return slot 0: counts of backends for new connections, and of others."""
        frontend = row.in_maps
        affinity = frontend.affinity_timeout > 0 and not frontend.l7_proxy_port
        return map_entries.master_value(
            count=count,
            quarantined=quarantined,
            number=row.id,
            flags=service_flags(frontend, affinity=affinity),
            timeout=frontend.affinity_timeout if affinity else 0,
            algorithm=ALGORITHMS[frontend.algorithm],
            proxy_port=frontend.l7_proxy_port,
        )

    def _put_entries(self, row: ServedFrontend, old: ServedFrontend | None, plan: WritePlan) -> None:
        """Plan the entries of a frontend; its backends have IDs."""
        master, slots, backends = self._slots(row)
        self._put_slots(row.key, master, slots, plan)
        self._put_reverse_nat(row, plan)
        self._put_optional(row, old, backends, plan)

    def _put_reverse_nat(self, row: ServedFrontend, plan: WritePlan) -> None:
        address = row.frontend.key.address
        name, key = map_entries.reverse_nat_key(row.id, address[0])
        value = map_entries.reverse_nat_value(address)
        if self.held.get(name, _NO_ENTRIES).get(key) != value:
            plan.at(WriteStep.REVERSE_NAT, name)[key] = value

    def _put_optional(
        self, row: ServedFrontend, old: ServedFrontend | None, backends: Sequence[Backend], plan: WritePlan
    ) -> None:
        """Plan entries of optional features; ``backends`` are those for new connections."""
        frontend, number = row.in_maps, row.id
        matching = (
            frontend.affinity_timeout and not frontend.l7_proxy_port and self._options.enable_session_affinity
        )
        if matching or self.held.get(AFFINITY_MATCH):
            self._put_affinity(row if matching else None, old, number, plan)
        if frontend.source_ranges or (old is not None and old.in_maps.source_ranges):
            self._put_source_ranges(row, old, plan)
        if self._maglev is not None:
            self._put_maglev(frontend, number, backends, plan)

    def _by_number(self, frontend: Frontend) -> Sequence[Backend]:
        """Return the backends sorted by ID."""
        known = self._backends.numbers
        ids = [known[address] for address in addresses_of(frontend.backends)]
        if ids == sorted(ids):
            return frontend.backends
        return [one for _, one in sorted(zip(ids, frontend.backends, strict=True), key=itemgetter(0))]

    def _put_slots(self, key: FrontendKey, master: bytes, slots: bytes, plan: WritePlan) -> None:
        name = SERVICES[key.address[0]]
        held = self.held.get(name, _NO_ENTRIES)
        count = len(slots) // SLOT_SIZE
        (first,) = map_entries.slot_keys(key, 0, 1)
        was = held.get(first)
        if was is None:
            plan.add_slots(name, map_entries.slot_key_column(key, count), slots)
        else:
            own = zip(map_entries.slot_keys(key, 1, count + 1), PackedColumn(slots, SLOT_SIZE), strict=True)
            plan.at(WriteStep.SLOTS, name).update([each for each in own if held.get(each[0]) != each[1]])
        if was != master:
            plan.at(WriteStep.FRONTENDS, name)[first] = master
        if held:
            plan.remove(WriteStep.SLOTS_DELETED, name, map_entries.slots_behind(held, key, count))

    def _put_affinity(
        self, row: ServedFrontend | None, old: ServedFrontend | None, number: int, plan: WritePlan
    ) -> None:
        before, now = self._affinity_keys(old, number), self._affinity_keys(row, number)
        stale = [key for key in before if key not in now]
        self._delete(WriteStep.AFFINITY_STALE, AFFINITY_MATCH, stale, plan)
        self._put_keys(WriteStep.AFFINITY, AFFINITY_MATCH, now, plan)

    def _affinity_keys(self, row: ServedFrontend | None, number: int) -> dict[bytes, None]:
        addresses = addresses_of(row.in_maps.backends) if row is not None else ()
        known = self._backends.numbers
        return dict.fromkeys([map_entries.affinity_key(number, known[one]).key for one in addresses])

    def _put_source_ranges(self, row: ServedFrontend, old: ServedFrontend | None, plan: WritePlan) -> None:
        name, before, now = SOURCE_RANGES[row.key.address.version], range_keys(old), range_keys(row)
        self._delete(WriteStep.SOURCE_RANGES_STALE, name, [key for key in before if key not in now], plan)
        self._put_keys(WriteStep.SOURCE_RANGES, name, now, plan)

    def _put_keys(self, step: WriteStep, name: str, keys: Iterable[bytes], plan: WritePlan) -> None:
        """Plan to add missing keys to a map without values."""
        held = self.held.get(name, _NO_ENTRIES)
        plan.at(step, name).update({key: PRESENT for key in keys if held.get(key) != PRESENT})

    def _put_maglev(
        self, frontend: Frontend, number: int, backends: Sequence[Backend], plan: WritePlan
    ) -> None:
        """Plan the Maglev table; without backends, the old one stays until the frontend is deleted."""
        where = map_entries.maglev_key(number, frontend.key.address.version)
        was = self.held.get(where.map, _NO_ENTRIES).get(where.key)
        if not self._uses_maglev(frontend):
            if was is not None:
                plan.remove(WriteStep.MAGLEV_DELETED, where.map, [where.key])
        elif backends:
            table = self._look_up_table(backends)
            if digest(table) != was:
                plan.at(WriteStep.MAGLEV, where.map)[where.key] = table

    def _uses_maglev(self, frontend: Frontend) -> bool:
        wildcard_node_port = frontend.type is ServiceType.NODE_PORT and frontend.key.address.is_wildcard
        inside_only = frontend.type is ServiceType.CLUSTER_IP and not self._options.bpf_lb_external_clusterip
        chosen = (frontend.algorithm or self._options.bpf_lb_algorithm) == "maglev"
        return chosen and not wildcard_node_port and not inside_only

    def _look_up_table(self, backends: Sequence[Backend]) -> bytes:
        return self._maglev(backends, self._backends.numbers) if self._maglev is not None else b""

    def look_up_tables(self, places: Collection[MapKey]) -> Mapping[MapKey, bytes]:
        """Compute the Maglev tables of these keys; keys without a frontend are omitted."""
        rows = {
            map_entries.maglev_key(row.id, row.key.address.version): row
            for row in (*self._served.all(), *self.unsettled.values())
        }
        found = {where: self._slots(rows[where])[2] for where in places if where in rows}
        return {where: self._look_up_table(backends) for where, backends in found.items() if backends}

    # Deleting frontends and backends.

    def drop(self, key: FrontendKey, plan: WritePlan) -> None:
        """Plan to delete a frontend; a no-op if it is unknown."""
        old = self.realised(key)
        if old is None:
            return
        self._unsettle(old)
        version = key.address.version
        name, ranges = SERVICES[version], SOURCE_RANGES[version]
        maglev = map_entries.maglev_key(old.id, version)
        reverse_nat = map_entries.reverse_nat_key(old.id, version)
        slots = map_entries.slots_behind(self.held.get(name, _NO_ENTRIES), key, 0)
        self._delete(WriteStep.FRONTENDS_DELETED, name, map_entries.slot_keys(key, 0, 1), plan)
        self._delete(WriteStep.SLOTS_DELETED, name, slots, plan)
        self._delete(WriteStep.MAGLEV_DELETED, maglev.map, [maglev.key], plan)
        self._delete(WriteStep.REVERSE_NAT_DELETED, reverse_nat.map, [reverse_nat.key], plan)
        self._delete(WriteStep.AFFINITY_DELETED, AFFINITY_MATCH, self._affinity_keys(old, old.id), plan)
        self._delete(WriteStep.SOURCE_RANGES_DELETED, ranges, range_keys(old), plan)

    def _delete(self, step: WriteStep, name: str, keys: Iterable[bytes], plan: WritePlan) -> None:
        """Plan to delete these keys, except missing ones."""
        held = self.held.get(name, _NO_ENTRIES)
        plan.remove(step, name, [key for key in keys if key in held])

    def removed(self, key: FrontendKey) -> None:
        """Release the IDs of a frontend that was deleted from the maps; a no-op if it is unknown."""
        old = self.unsettled.pop(key, None)
        if old is not None:
            self._release(set(addresses_of(old.in_maps.backends)))
            self._service_ids.release(old.id)
            self._protocol_less.discard(key)

    def collect(self) -> WritePlan:
        """Plan to delete unused backends; none while restored Maglev tables may refer to them."""
        plan = WritePlan()
        if self._restored_tables:
            return plan
        for address, key in self._backends.unused():
            plan.remove(WriteStep.BACKENDS_DELETED, BACKENDS[address.version], [key])
        if self._duplicate_ids:
            slots = [self.held.get(name, _NO_ENTRIES) for name in SERVICES.values()]
            named = {value[:4] for entries in slots for value in entries.values()}
            for number, name in self._duplicate_ids.items():
                key = map_entries.backend_number(number)
                if key not in named:
                    plan.remove(WriteStep.BACKENDS_DELETED, name, [key])
        return plan

    # Results of writes.

    def written(self, batch: Batch) -> None:
        """Record that a batch was written."""
        held = self.held.setdefault(batch.map, {})
        if batch.map in LOOK_UP_TABLES:
            self._restored_tables -= {MapKey(batch.map, key) for key in batch.keys}
            values = map(digest, batch.values or ())
            held.update(zip(batch.keys, values, strict=False))
        elif batch.map in self._backend_maps and batch.values is not None:
            self._backends.unwritten.difference_update(numbers_of(batch.keys))
        elif batch.values is not None:
            held.update(zip(batch.keys, batch.values, strict=True))
        if batch.values is None:
            for key in batch.keys:
                held.pop(key, None)
            if batch.map in self._backend_maps:
                self._remove_backends(batch.keys)

    def resolve_unknown(self, held: Entries) -> None:
        """Replace entries of unknown state by those in the maps."""
        for name, own in self.held.items():
            present = held.get(name, _NO_ENTRIES)
            for key in [key for key, value in own.items() if value == UNKNOWN]:
                if key not in present:
                    del own[key]
                elif name not in LOOK_UP_TABLES:
                    own[key] = present[key]

    def record_failed_write(self, batch: Batch) -> None:
        """Record that a write failed, and an unknown part of the batch was written."""
        if batch.map in self._backend_maps:
            self._backends.unwritten.update(numbers_of(batch.keys))
        elif batch.values is not None:
            self.held.setdefault(batch.map, {}).update(dict.fromkeys(batch.keys, UNKNOWN))

    def _remove_backends(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            number = int.from_bytes(key, "little")
            self._duplicate_ids.pop(number, None)
            self._backends.remove(number)


def _all_selectable(backends: Sequence[Backend]) -> bool:
    """Whether all backends are active, and none is preferred."""
    if isinstance(backends, SliceBackends):
        return True
    return not [one for one in backends if one.preferred or one.state is not BackendState.ACTIVE]


_NO_ADDRESSES: Final[frozenset[bytes]] = frozenset()
_NO_IDS: Final[Mapping[FrontendKey, Sequence[int]]] = {}
_NO_ENTRIES: Final[Mapping[bytes, bytes]] = {}
_REVERSE_NAT_MAPS: Final = frozenset(REVERSE_NAT.values())
