"""How many addresses a node requests from each pool: in use, waited for by pods, and some ahead.

For:    NodePools. Needs: Clock. Gives: Demand, PoolRequest, with_ahead().
Source: Cilium 1.17, pkg/ipam/multipool.go: neededIPCeil, pendingAllocationsPerPool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from cells.ipam.addresses import Family, IPNetwork
from cells.ipam.expiration import Clock

PENDING: Final = 300.0
"""Seconds that an address which could not be had is asked for."""

Key = tuple[str, Family]
"""A pool, and one of its families."""


class PoolRequest(msgspec.Struct, frozen=True):
    """This node's request to a pool, a row of the table ``pod-pool-requests``."""

    pool: str
    ipv4: int = 0
    ipv6: int = 0
    """How many addresses of each family, those in use among them."""
    released: tuple[IPNetwork, ...] = ()
    """Ranges that it gives back: none of their addresses is in use, and none is handed out."""


def with_ahead(needed: int, ahead: int) -> int:
    """The addresses needed, rounded up to a multiple of ``ahead`` with at least so many on top."""
    if not ahead:
        return needed
    return (-(-needed // ahead) + 1) * ahead


class Demand:
    """What is asked for, beside what is in use."""

    def __init__(self, ahead: Mapping[str, int], clock: Clock) -> None:
        self.ahead = ahead
        """How many addresses of a pool are held ready."""
        self.floor: dict[Key, int] = {}
        """No less is asked for; until endpoints are restored, what was asked for before."""
        self._clock = clock
        self._pending: dict[tuple[str, Family, str], float] = {}

    def wanted(self, pool: str, family: Family, owner: str) -> None:
        """Somebody could not have an address: ask for one more, for a while."""
        self._pending[pool, family, owner] = self._clock.now() + PENDING

    def met(self, pool: str, family: Family, owner: str) -> None:
        """Somebody has one."""
        self._pending.pop((pool, family, owner), None)

    def needed(self, in_use: Mapping[Key, int], families: Iterable[Family]) -> dict[Key, int]:
        """How many addresses of each pool are asked for; pools of which none is needed are left out."""
        now = self._clock.now()
        self._pending = {key: until for key, until in self._pending.items() if until > now}
        waiting: dict[Key, int] = {}
        for pool, family, _ in self._pending:
            waiting[pool, family] = waiting.get((pool, family), 0) + 1
        families = list(families)
        keys = {
            *in_use,
            *waiting,
            *self.floor,
            *((pool, family) for pool in self.ahead for family in families),
        }
        found = {
            key: max(
                with_ahead(in_use.get(key, 0) + waiting.get(key, 0), self.ahead.get(key[0], 0)),
                self.floor.get(key, 0),
            )
            for key in keys
            if key[1] in families
        }
        return {key: count for key, count in found.items() if count}
