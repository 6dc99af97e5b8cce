"""Pods that local redirect policies lead to reach what is redirected, where a policy says so.

Reconciler: the tables ``local-redirects`` and ``endpoints`` in, the maps cilium_skip_lb4 and _lb6 out.
Why:        a pod that stands in for an address, such as a metadata proxy, must reach the address itself.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from cells.config.shared import ServiceSettings
from cells.endpoint import Endpoint
from cells.maps.map import Map
from cells.maps.node_maps import Maps
from cells.maps.records.flows import SkipLbKey
from cells.services.control import LocalRedirect
from lifecycle import (
    BatchError,
    Derived,
    HiveError,
    Jobs,
    Reconciler,
    Table,
    Tables,
    Target,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = ["RedirectSkip", "RedirectSkips", "cell"]


# Which sockets are not redirected, and the maps that say so.

SWEEP: Final = minutes(1)
_PRESENT: Final = b"\0"


class RedirectSkip(msgspec.Struct, frozen=True):
    """A row of the table ``redirect-skips``: sockets of this namespace reach the address itself."""

    key: SkipLbKey


class RedirectSkips:
    """Follows both tables."""

    def __init__(
        self,
        redirects: Table[LocalRedirect],
        endpoints: Table[Endpoint],
        maps: Maps,
        settings: ServiceSettings,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self.wanted: Derived[RedirectSkip] = Derived("redirect-skips", skips, redirects, endpoints)
        """Who is left alone."""
        if not settings.enable_local_redirect_policy:
            return
        maps.use("skip_lb4", "skip_lb6")
        reconciler: Reconciler[SkipLbKey, RedirectSkip] = Reconciler(
            self.wanted, SkipTarget(maps), full_every=SWEEP
        )
        tables.add(self.wanted, reconciler.statuses)
        jobs.observe("reconcile redirect skips", reconciler)


def skips(redirects: list[LocalRedirect], endpoints: list[Endpoint]) -> Mapping[SkipLbKey, RedirectSkip]:
    """Every pod of a policy that asks for it, by each of the policy's addresses of its family."""
    asked = [each for each in redirects if each.frontends and each.redirect and each.redirect.skip]
    if not asked:
        return {}
    cookies = {ip: each.netns_cookie for each in endpoints if each.netns_cookie for ip in each.addresses}
    keys = {
        SkipLbKey(cookies[backend.address.ip], frontend.key.address.ip, frontend.key.address.port)
        for each in asked
        for frontend in each.frontends
        for backend in frontend.backends
        if backend.address.ip in cookies
    }
    return {key: RedirectSkip(key) for key in keys}


class SkipTarget(Target[SkipLbKey, RedirectSkip, RedirectSkip]):
    """The maps, as the target of a reconciler."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    async def observe(self) -> Mapping[SkipLbKey, RedirectSkip]:
        """What they have."""
        found = [SkipLbKey.unpack(raw) for held in self._both() for raw, _ in held.items()]
        return {key: RedirectSkip(key) for key in found}

    async def put(self, batch: Mapping[SkipLbKey, RedirectSkip]) -> None:
        """Leave these alone. Raises BatchError."""
        failures: dict[SkipLbKey, Exception] = {}
        for key in batch:
            held = self._of(key)
            try:
                held.update(key.pack(), _PRESENT)
            except OSError as error:
                full = HiveError(f"{held.spec.name} is full: it has {held.spec.max_entries} entries")
                failures[key] = full if error.errno == errno.E2BIG else error
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[SkipLbKey]) -> None:
        """These no more."""
        for key in batch:
            self._of(key).delete(key.pack())

    def _both(self) -> tuple[Map, Map]:
        return self._maps.skip_lb4, self._maps.skip_lb6

    def _of(self, key: SkipLbKey) -> Map:
        four, six = self._both()
        return four if key.ip.version == 4 else six


cell = module(
    "redirect-skips",
    "Pods that are not redirected",
    provide(RedirectSkips),
    invoke(RedirectSkips),
)
