"""Running pods follow the MTU of the node's devices: their links, and the routes inside.

Reconciler: Devices and Endpoints in; both ends of pods' links out, and pods' own routes.
Why:        a network that gets smaller would leave pods to find out with each packet that is lost, and one
            that gets larger would not be used before they are created again.
Source:     Cilium 1.17, which follows the MTU at run time as well.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Final

import anyio.to_thread
import msgspec

from cells.endpoint import Endpoint
from cells.netlink.connection import NetlinkError
from cells.netlink.links import HostLinks
from cells.netlink.namespaces import PodLink, own_netns_cookie, run_in_each
from cells.netlink.rows import LinkInfo
from cells.node.devices import Device, PodMtu
from cells.tunnel.settings import RouteMtu
from lifecycle import Change, HiveError, Jobs, Logger, Table, invoke, minutes, module, provide

__all__ = ["LinkMtu", "cell", "resize_pods"]


# Changes of links inside pods, by entering their network namespaces.


class PodSize(msgspec.Struct, frozen=True):
    """What a pod's link is to have; bytes."""

    ifindex: int
    """Of the pod's own end, where that is."""
    mtu: int
    route_mtu: int


def resize_pods(wanted: Mapping[int, PodSize]) -> dict[int, str]:
    """Give pods, by the cookies of their namespaces, other MTUs; why it failed, by cookie. Blocks."""
    missing = dict(wanted)
    failed: dict[int, str] = {}

    def work() -> bool:
        size = missing.pop(cookie := own_netns_cookie(), None)
        if size is not None:
            try:
                with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
                    PodLink(netlink.fileno()).resize(size.ifindex, size.mtu, size.route_mtu)
            except NetlinkError as error:
                failed[cookie] = str(error)
        return bool(missing)

    run_in_each(work, others=True)
    return failed | dict.fromkeys(missing, "its network namespace is not found")


# Which pods' links have another MTU than they should, and their change.

SWEEP: Final = minutes(1)
DEBOUNCE: Final = 0.2
"""Seconds: of several devices one may follow the other."""


class LinkMtu:
    """Looks when a device's MTU changes, and every minute.

    The node's end of a link is changed last, so its MTU shows whether all is done. Links of other plugins'
    are left alone: those know what they are for.
    """

    def __init__(
        self,
        devices: Table[int, Device],
        endpoints: Table[int, Endpoint],
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

    async def _look(self, _: list[Change[Any, Any]]) -> None:
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


cell = module("link-mtu", "MTU of running pods' links", provide(LinkMtu), invoke(LinkMtu))
