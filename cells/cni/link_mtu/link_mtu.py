"""Which pods' links have another MTU than they should, and their change.

For:    running pods.   Needs: Table[Device], Table[Endpoint], HostLinks, PodMtu, RouteMtu.   Gives: LinkMtu.
"""

from __future__ import annotations

from typing import Any, Final

import anyio.to_thread

from cells.cni.link_mtu.inside import PodSize, resize_pods
from cells.endpoint import Endpoint
from cells.node.devices import Device, PodMtu
from cells.node.netlink import HostLinks, LinkInfo
from cells.tunnel import RouteMtu
from lifecycle import Change, HiveError, Jobs, Logger, Table, minutes

SWEEP: Final = minutes(1)
DEBOUNCE: Final = 0.2
"""Seconds: of several devices one may follow the other."""


class LinkMtu:
    """Looks when a device's MTU changes, and every minute.

    The node's end of a link is changed last, so its MTU tells whether all is done. Links of other plugins'
    are left alone: those know what they are for.
    """

    def __init__(
        self,
        devices: Table[Device],
        endpoints: Table[Endpoint],
        links: HostLinks,
        mtu: PodMtu,
        route_mtu: RouteMtu,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._endpoints = endpoints
        self._links = links
        self._mtu = mtu
        self._route_mtu = route_mtu
        self._log = log
        self._seen = 0
        self._timer = jobs.timer("compare", self._compare, SWEEP, debounce=DEBOUNCE)
        jobs.observe("watch devices", devices.changes, self._look)

    async def _look(self, _: list[Change[Any]]) -> None:
        if self._seen != (mtu := self._mtu()):
            self._seen = mtu
            self._timer.trigger()

    async def _compare(self) -> None:
        """Make them right. Raises HiveError when some could not be."""
        await self._endpoints.wait_initialized()
        mtu, route_mtu = self._mtu(), self._route_mtu()
        there = {link.ifindex: link for link in self._links.links()}
        wrong = {
            one.netns_cookie: (one, link)
            for one in self._endpoints.all()
            if (link := there.get(one.ifindex)) is not None and link.mtu != mtu and _is_ours(one, link)
        }
        if not wrong:
            return
        sizes = {cookie: PodSize(link.peer_ifindex, mtu, route_mtu) for cookie, (_, link) in wrong.items()}
        failed = await anyio.to_thread.run_sync(resize_pods, sizes)
        for cookie, (_, link) in wrong.items():
            if cookie not in failed:
                self._links.set_mtu(link.ifindex, mtu)
        self._log.info(
            "MTU of running pods changed", mtu=mtu, route_mtu=route_mtu, pods=len(wrong) - len(failed)
        )
        if failed:
            (cookie, why), *_ = failed.items()
            raise HiveError(
                f"MTU of {len(failed)} pods not changed to {mtu}: {wrong[cookie][0].title}: {why}"
            )


def _is_ours(endpoint: Endpoint, link: LinkInfo) -> bool:
    return bool(endpoint.netns_cookie) and not endpoint.datapath.egress_prog and link.peer_ifindex > 0
