"""The routing rule that has the stack take what is marked for a proxy for its own, kept there.

Reconciler: a rule and a route for each family; what somebody removes comes back.
Needs:  ProxyPort, for the families; PolicyRuleSettings; pyroute2, in worker threads.   Gives: ProxyRoutes.
Why:    the datapath chooses the socket, but a packet for a foreign address would be sent on before that.
Source: Cilium 1.17, table 2004 and the rule with priority 9; ip-rule(8), ip-route(8) type local.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Collection
from typing import Any, Final

import anyio
from anyio import to_thread

from cells.node.netlink import NetlinkError, news
from cells.policy.control import PolicyRuleSettings
from cells.proxy.dns.port import ProxyPort
from lifecycle import Jobs

TABLE: Final = 2004
PRIORITY: Final = 9
TO_PROXY: Final = 0x0200
MASK: Final = 0x0F00
"""The mark that the datapath gives, of which the port is another part."""
ABSENT: Final = frozenset({2, 3, 95, 97, 101})  # ENOENT, ESRCH, EOPNOTSUPP, EAFNOSUPPORT, ENETUNREACH
EEXIST: Final = 17

_RTMGRP: Final = 0x40 | 0x400 | 0x80 | 0x40000  # routes and rules of both families
_RTM_DELROUTE, _RTM_DELRULE = 25, 33
_TABLE_AT, _LARGE_TABLE = 20, 252
_REMOVED: Final = news.passing(
    (news.kinds(_RTM_DELRULE),),
    (news.kinds(_RTM_DELROUTE), news.Field(news.LOAD_BYTE, _TABLE_AT, (_LARGE_TABLE,))),
)
"""A rule, or a route of a table whose number is above 255, is gone."""


class ProxyRoutes:
    """There once there() returns, and from then on."""

    def __init__(self, port: ProxyPort, switches: PolicyRuleSettings, *, jobs: Jobs) -> None:
        self._port = port
        self._there = anyio.Event()
        if switches.enable_l7_proxy:
            jobs.observe("keep routes", self._hints, self._keep)
        else:
            jobs.one_shot("remove routes", self._remove)

    async def there(self) -> None:
        """Return once rules and routes are there."""
        await self._there.wait()

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in news.hints(_RTMGRP, _REMOVED):
            yield hint

    async def _keep(self, _: None) -> None:
        """Raises OSError."""
        await to_thread.run_sync(_make, self._port.families)
        self._there.set()

    async def _remove(self) -> None:
        await to_thread.run_sync(_remove, (socket.AF_INET, socket.AF_INET6))


def _make(families: Collection[int]) -> None:
    from pyroute2 import IPRoute
    from pyroute2 import NetlinkError as Refused

    with IPRoute() as ip:
        loopback = ip.link_lookup(ifname="lo")[0]
        for family in families:
            try:
                ip.route(
                    "replace", family=family, type="local", table=TABLE, oif=loopback, **_everything(family)
                )
            except Refused as error:
                raise NetlinkError(error.code, f"set the route of table {TABLE}") from error
            try:
                ip.rule("add", family=family, **_rule())
            except Refused as error:
                if error.code != EEXIST:
                    raise NetlinkError(error.code, f"add the rule for table {TABLE}") from error


def _remove(families: Collection[int]) -> None:
    from pyroute2 import IPRoute
    from pyroute2 import NetlinkError as Refused

    with IPRoute() as ip:
        for family in families:
            try:
                ip.rule("del", family=family, **_rule())
                ip.flush_routes(family=family, table=TABLE)
            except Refused as error:
                if error.code not in ABSENT:
                    raise NetlinkError(error.code, f"remove the rule for table {TABLE}") from error


def _rule() -> dict[str, Any]:
    return {"fwmark": TO_PROXY, "fwmask": MASK, "table": TABLE, "priority": PRIORITY}


def _everything(family: int) -> dict[str, Any]:
    return {"dst": "0.0.0.0/0" if family == socket.AF_INET else "::/0", "scope": 254}  # of the host
