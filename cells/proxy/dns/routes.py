"""The routing rule that has the stack take what is marked for a proxy for its own, kept there.

Reconciler: a rule and a route for each family; what somebody removes comes back.
Needs:  ProxyPort, for the families; PolicyRuleSettings.   Gives: ProxyRoutes.
Why:    the datapath chooses the socket, but a packet for a foreign address would be sent on before that.
Source: Cilium 1.17, table 2004 and the rule with priority 9; ip-rule(8), ip-route(8) type local.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Final

import anyio
from anyio import to_thread

from cells.node.netlink import Marked, leave_marked, news, take_marked
from cells.policy.control import PolicyRuleSettings
from cells.proxy.dns.port import ProxyPort
from lifecycle import Jobs

MARKED: Final = Marked(mark=0x0200, mask=0x0F00, table=2004, priority=9)
"""The mark that the datapath gives, of which the port is another part."""

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
        await to_thread.run_sync(take_marked, MARKED, self._port.families)
        self._there.set()

    async def _remove(self) -> None:
        await to_thread.run_sync(leave_marked, MARKED, (socket.AF_INET, socket.AF_INET6))
