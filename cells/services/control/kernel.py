"""The load-balancing maps in the kernel.

Needs: Maps.   Gives: KernelServices.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping

from cells.maps import Map, Maps, map_by_id
from cells.services.balancer import MapKey
from cells.services.control.target import ServiceMaps
from lifecycle import HiveError


class KernelServices:
    """The real :class:`~cells.services.control.target.ServiceMaps`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps) -> ServiceMaps:
        """The maps of this node."""
        return KernelServices(maps)

    def dump(self) -> dict[MapKey, bytes]:
        """Through descriptors of its own, as the loop may use the others meanwhile."""
        found: dict[MapKey, bytes] = {}
        for held in self._held():
            with map_by_id(held.id, held.spec.name) as table:
                found.update((MapKey(held.spec.name, key), value) for key, value in table.items())
        return found

    def write(self, where: MapKey, value: bytes | None) -> None:
        """Set the entry, or remove it."""
        table = self._by_name[where.map]
        try:
            if value is None:
                table.delete(where.key)
            else:
                table.update(where.key, value)
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise HiveError(f"{where.map} is full: raise bpf-lb-map-max") from error
            raise

    def void_verdicts(self) -> None:
        """The node's epoch: flows that were sent to an address as it is go to its backends now."""
        self._maps.epochs.bump()

    @property
    def _by_name(self) -> Mapping[str, Map]:
        return {table.spec.name: table for table in self._held()}

    def _held(self) -> Iterator[Map]:
        maps = self._maps
        yield from (maps.backends4, maps.backends6, maps.reverse_nat4, maps.reverse_nat6)
        yield from (maps.services4, maps.services6, maps.affinity_match)
        yield from (maps.source_range4, maps.source_range6)
