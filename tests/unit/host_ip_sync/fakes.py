"""The maps with the host's addresses, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cells.base.addresses import IPAddress
from cells.maps.records.endpoints import LxcValue
from tests.unit.ipcache.fakes import FakeIpcacheMap
from tests.unit.local_addresses.fakes import FakeLxcMap

NONE: Mapping[str, bool] = MappingProxyType({})


class FakeMaps:
    """cilium_lxc and cilium_ipcache; ``broken`` makes every write fail."""

    def __init__(self, local: Mapping[str, bool] = NONE, identities: Mapping[str, int] = NONE) -> None:
        self.local = FakeLxcMap()
        self.local.put(local)
        self.prefixes = FakeIpcacheMap()
        self.prefixes.put(identities)

    @property
    def lxc(self) -> Mapping[IPAddress, LxcValue]:
        return self.local.rows

    @property
    def writes(self) -> int:
        return len(self.local.writes) + len(self.prefixes.writes)

    @property
    def broken(self) -> bool:
        return self.prefixes.broken

    @broken.setter
    def broken(self, broken: bool) -> None:
        self.prefixes.broken = self.local.broken = broken

    def seen(self) -> tuple[dict[str, bool], dict[str, int]]:
        return self.local.hosts, self.prefixes.identities
