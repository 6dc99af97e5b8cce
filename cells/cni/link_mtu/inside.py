"""Changes of links inside pods, by entering their network namespaces.

For:    LinkMtu.   Needs: CAP_SYS_ADMIN.   Gives: PodSize, resize_pods().
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from cells.node.netlink import NetlinkError, PodLink, own_netns_cookie, run_in_each


class PodSize(NamedTuple):
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
