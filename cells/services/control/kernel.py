"""The load-balancing maps in the kernel.

Needs: Maps, ServiceSettings.   Gives: KernelServices.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

from cells.maps import Map, Maps, create_map, map_by_id
from cells.services.balancer import Batch, MapKey, Write
from cells.services.control.pending import TABLE, Entries, ServiceMaps
from cells.services.control.shortage import MapFullError
from cells.services.settings import ServiceSettings


class KernelServices:
    """The real :class:`~cells.services.control.pending.ServiceMaps`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps, settings: ServiceSettings) -> ServiceMaps:
        """The maps of this node: those that services of these settings need."""
        maps.use("services4", "services6", "backends4", "backends6", "reverse_nat4", "reverse_nat6")
        maps.use("source_range4", "source_range6")
        if settings.session_affinity:
            maps.use("affinity4", "affinity6", "affinity_match")
        if settings.maglev:
            maps.use("maglev4", "maglev6")
        return KernelServices(maps)

    def dump(self) -> Entries:
        """Through descriptors of its own, as the loop may use the others meanwhile."""
        found: Entries = {}
        for held in self._held():
            with map_by_id(held.id, held.spec.name) as table:
                found[held.spec.name] = dict(table.items())
        for outer in (self._maps.maglev4, self._maps.maglev6):
            with map_by_id(outer.id, outer.spec.name) as table:
                found[outer.spec.name] = dict.fromkeys([key for key, _ in table.items()], TABLE)
        return {name: entries for name, entries in found.items() if entries}

    def write_tables(self, writes: Sequence[Write]) -> None:
        """Through descriptors of its own. New tables at once: the kernel waits once for all of them."""
        for outer in (self._maps.maglev4, self._maps.maglev6):
            own = [write for write in writes if write.where.map == outer.spec.name]
            inner = outer.spec.inner
            if not own or inner is None:
                continue
            with map_by_id(outer.id, outer.spec.name) as table, ExitStack() as made:
                entries = []
                for where, value in own:
                    if value is None:
                        table.delete(where.key)
                        continue
                    numbers = made.enter_context(create_map(inner))
                    numbers.update(bytes(4), value)
                    entries.append((where.key, struct.pack("<I", numbers.fd)))
                self._update(table, entries)

    @staticmethod
    def _update(table: Map, entries: list[tuple[bytes, bytes]]) -> None:
        with _full(table):
            table.update_batch(entries)

    def write(self, where: MapKey, value: bytes | None) -> None:
        """Set the entry, or remove it."""
        table = self._by_name[where.map]
        if value is None:
            table.delete(where.key)
            return
        with _full(table):
            table.update(where.key, value)

    def write_many(self, batch: Batch) -> None:
        """Set entries, or remove them, with one system call."""
        table = self._by_name[batch.map]
        if batch.values is None:
            table.delete_batch(batch.keys)
        else:
            with _full(table):
                table.update_all(batch.keys, batch.values)

    def void_verdicts(self) -> None:
        """The node's epoch: flows that were sent to an address as it is go to its backends now."""
        self._maps.epochs.bump()

    @cached_property
    def _by_name(self) -> Mapping[str, Map]:
        return {table.spec.name: table for table in self._held()}

    def _held(self) -> Iterator[Map]:
        maps = self._maps
        yield from (maps.backends4, maps.backends6, maps.reverse_nat4, maps.reverse_nat6)
        yield from (maps.services4, maps.services6, maps.affinity_match)
        yield from (maps.source_range4, maps.source_range6)


@contextmanager
def _full(table: Map) -> Iterator[None]:
    """Say what to do about a full map."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise MapFullError(f"{table.spec.name} is full: raise bpf-lb-map-max") from error
        raise
