"""Whether a pod may ask a server for a name.

Needs:  Table[Endpoint], Ipcache, NameRules, NameStore.   Gives: Judge, Verdict.
Until the rules are known after a restart, an endpoint may ask what it might ask the same server before.
"""

from __future__ import annotations

from enum import Enum

from cells.cluster.identity import WORLD
from cells.cluster.ipcache import Ipcache
from cells.endpoint import Endpoint
from cells.ipam import text_of
from cells.policy.control import NameRules
from cells.proxy.dns.exchange import Asking
from cells.proxy.dns.store import NameStore
from lifecycle import Table


class Verdict(Enum):
    """What becomes of a query."""

    FORWARD = "forward"
    REFUSE = "refuse"
    WAIT = "wait"
    """The rules are not known yet."""


class Judge:
    """Asks policy, and what policy was."""

    def __init__(
        self, endpoints: Table[Endpoint], ipcache: Ipcache, rules: NameRules, store: NameStore
    ) -> None:
        self._by_name = endpoints.by("name")
        self._ipcache = ipcache
        self._rules = rules
        self._store = store

    def endpoint(self, asking: Asking) -> Endpoint | None:
        """Whose query it is."""
        address = asking.client[0]
        return next(iter(self._by_name.get(f"ipv{address.version}:{text_of(address)}")), None)

    def verdict(self, endpoint: Endpoint, asking: Asking, name: str) -> Verdict:
        """May it? Raises OSError."""
        address, port = asking.server
        server = text_of(address), asking.protocol, port
        if self._rules.changed(endpoint.id):
            self._store.rules_changed(endpoint.id)
        identity = self._ipcache.identity_at(address) or WORLD
        may = self._rules.of(endpoint.id, identity, asking.protocol, port)
        if may is None:
            may = self._store.might_ask(endpoint.id, server)
            if may is None:
                return Verdict.WAIT
        else:
            self._store.asked(endpoint, server, may)
        return Verdict.FORWARD if may.allows(name) else Verdict.REFUSE
