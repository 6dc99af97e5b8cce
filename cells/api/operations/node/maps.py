"""The node's maps as the API shows them.

Needs: Maps.   Gives: NodeMaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cells.maps import Map, Maps


class NodeMaps:
    """The real :class:`~cells.api.node_operations.MapReader`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @property
    def directory(self) -> Path:
        """Where they are pinned."""
        return self._maps.directory

    def names(self) -> Sequence[str]:
        """Of all pinned maps, policy maps too."""
        return sorted(path.name for path in self.directory.iterdir() if not path.name.startswith("."))

    def kept(self, name: str) -> Map | None:
        """cilium_lxc or cilium_ipcache."""
        found = (table for table in (self._maps.lxc, self._maps.ipcache) if table.spec.name == name)
        return next(found, None)
