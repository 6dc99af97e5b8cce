"""The programs of native devices without Ethernet headers: wireguard, tun, ipip.

For:    Datapath. Needs: DatapathSettings, Maps. Gives: L3Programs.
Few nodes have such a device, so they are loaded when there is one first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from cells.datapath.generation import enter, ids_in_force
from cells.datapath.programs import L3_ENTRIES
from cells.datapath.settings import PACKAGED_OBJECTS, DatapathSettings
from cells.maps import Map, Maps, map_by_id

OBJECT: Final = PACKAGED_OBJECTS / "l3.o"


class L3Programs:
    """Both, in hive_l3_entry; none before they are needed. All but ``programs`` is for a worker thread."""

    def __init__(self, settings: DatapathSettings, maps: Maps) -> None:
        self._settings = settings
        self._maps = maps
        self.programs: MappingProxyType[str, int] = MappingProxyType({})
        """Kernel ids by name."""

    @property
    def needed(self) -> bool:
        """Whether they are in force, here or for an agent before."""
        if self.programs:
            return True
        with map_by_id(self._maps.l3_entry.id) as entry:
            return bool(ids_in_force(entry, L3_ENTRIES))

    def put_in_force(self, tables: tuple[Map, ...], data: bytes, generation: int) -> None:
        """Load and enter them, unless they are. Raises LoadError and BpfError."""
        with map_by_id(self._maps.l3_entry.id) as entry:
            enter(entry, L3_ENTRIES, data, OBJECT.name, tables, generation, self._settings)
            self.programs = MappingProxyType(ids_in_force(entry, L3_ENTRIES))

    def missing(self) -> list[str]:
        """Names of programs that are no longer in force."""
        if not self.programs:
            return []
        with map_by_id(self._maps.l3_entry.id) as entry:
            now = ids_in_force(entry, L3_ENTRIES)
        return [name for name, number in self.programs.items() if now.get(name) != number]
