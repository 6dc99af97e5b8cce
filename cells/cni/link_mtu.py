"""Updates the MTU of running pods after a change of the node's devices: their links, and routes inside.

Reconciler: Devices and Endpoints in; both ends of pods' links and pods' routes out.

Why: after a decrease, pods would lose packets until path MTU discovery; an increase would have no effect
until they are recreated.

Source: Cilium 1.17, which also changes the MTU at run time.
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


# Changes of links in the network namespaces of pods.


class PodSize(msgspec.Struct, frozen=True):
    """The desired MTUs of a pod's link and routes, in bytes."""

    ifindex: int
    """Index of the pod's end, in the pod's namespace."""
    mtu: int
    route_mtu: int


def resize_pods(wanted: Mapping[int, PodSize]) -> dict[int, str]:
    """Set the MTUs of pods, by netns cookie; return the errors by cookie. Blocks."""
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


# Comparison of the pods' links with the desired MTU.

SWEEP_INTERVAL: Final = minutes(1)
DEBOUNCE: Final = 0.2
"""Seconds; several devices may change at once."""


class LinkMtu:
    """Compares the MTU of pods' links after a change of a device, and every minute.

    The node's end of a link is changed last, so its MTU shows that the link is done. Links of other plugins
    are left unchanged.
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
        self._last_mtu = 0
        self._timer = jobs.timer("compare", self._compare, SWEEP_INTERVAL, debounce=DEBOUNCE)
        jobs.observe("watch devices", devices.changes, self._follow_devices)

    async def _follow_devices(self, _: list[Change[Any, Any]]) -> None:
        if self._last_mtu != (mtu := self._mtu()):
            self._last_mtu = mtu
            self._timer.trigger()

    async def _compare(self) -> None:
        """Update links with another MTU. Raises HiveError if some failed."""
        await self._endpoints.wait_initialized()
        mtu, route_mtu = self._mtu(), self._route_mtu()
        links = {link.ifindex: link for link in self._links.links()}
        outdated = {
            one.netns_cookie: (one, link)
            for one in self._endpoints.all()
            if (link := links.get(one.ifindex)) is not None and link.mtu != mtu and _is_ours(one, link)
        }
        if not outdated:
            return
        sizes = {cookie: PodSize(link.peer_ifindex, mtu, route_mtu) for cookie, (_, link) in outdated.items()}
        failed = await anyio.to_thread.run_sync(resize_pods, sizes)
        for cookie, (_, link) in outdated.items():
            if cookie not in failed:
                self._links.set_mtu(link.ifindex, mtu)
        self._log.info(
            "MTU of running pods changed", mtu=mtu, route_mtu=route_mtu, pods=len(outdated) - len(failed)
        )
        if failed:
            (cookie, why), *_ = failed.items()
            raise HiveError(
                f"MTU of {len(failed)} pods not changed to {mtu}: {outdated[cookie][0].title}: {why}"
            )


def _is_ours(endpoint: Endpoint, link: LinkInfo) -> bool:
    return bool(endpoint.netns_cookie) and not endpoint.datapath.egress_prog and link.peer_ifindex > 0


cell = module("link-mtu", "MTU of running pods' links", provide(LinkMtu), invoke(LinkMtu))
