"""Lets backends of local redirect policies reach the original address (skipRedirectFromBackend).

Reconciler: the tables ``local-redirects`` and ``endpoints`` in, the maps cilium_skip_lb4 and _lb6 out. A pod
that replaces an address, such as a metadata proxy, must reach the address itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from cells.endpoint import Endpoint
from cells.maps.node_maps import Maps
from cells.maps.records.flows import SkipLbKey
from cells.maps.target import BYTES, MapTarget, record
from cells.services import LoadBalancerOptions, ServiceName
from cells.services.control import LocalRedirect
from lifecycle import (
    Derived,
    Jobs,
    Reconciler,
    Table,
    Tables,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = ["RedirectSkip", "RedirectSkips", "cell"]


# Sockets that are not redirected, and their maps.

SWEEP: Final = minutes(1)
_PRESENT: Final = b"\0"


class RedirectSkip(msgspec.Struct, frozen=True):
    """A row of the table ``redirect-skips``: sockets of this network namespace are not redirected."""

    key: SkipLbKey


class RedirectSkips:
    """Reconciles the maps, if local redirect policies are enabled."""

    def __init__(
        self,
        redirects: Table[ServiceName, LocalRedirect],
        endpoints: Table[int, Endpoint],
        maps: Maps,
        options: LoadBalancerOptions,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self.wanted: Derived[SkipLbKey, RedirectSkip] = Derived("redirect-skips", skips, redirects, endpoints)
        """The desired entries."""
        if not options.enable_local_redirect_policy:
            return
        maps.use("skip_lb4", "skip_lb6")
        reconciler: Reconciler[SkipLbKey, RedirectSkip] = Reconciler(
            self.wanted, skip_target(maps), full_every=SWEEP
        )
        tables.add(self.wanted, reconciler.statuses)
        jobs.observe("reconcile redirect skips", reconciler)


def skips(redirects: list[LocalRedirect], endpoints: list[Endpoint]) -> Mapping[SkipLbKey, RedirectSkip]:
    """Return entries by netns cookie of each backend and address of its policy, if the policy sets this."""
    skipping = [each for each in redirects if each.frontends and each.redirect and each.redirect.skip]
    if not skipping:
        return {}
    cookies = {ip: each.netns_cookie for each in endpoints if each.netns_cookie for ip in each.addresses}
    keys = {
        SkipLbKey(cookies[backend.address.ip], frontend.key.address.ip, frontend.key.address.port)
        for each in skipping
        for frontend in each.frontends
        for backend in frontend.backends
        if backend.address.ip in cookies
    }
    return {key: RedirectSkip(key) for key in keys}


def skip_target(maps: Maps) -> MapTarget[SkipLbKey, RedirectSkip, bytes]:
    """Create the reconciler's target: both maps, by the family of the address."""
    return MapTarget(
        lambda: (maps.skip_lb4, maps.skip_lb6),
        record(SkipLbKey),
        BYTES,
        lambda _: _PRESENT,
        which=lambda key: int(key.ip.version == 6),
    )


cell = module(
    "redirect-skips",
    "Pods that are not redirected",
    provide(RedirectSkips),
    invoke(RedirectSkips),
)
