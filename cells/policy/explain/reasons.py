"""Decide on a connection in one direction: the deciding entry and rules, and rules that almost allow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from cells.policy.compute import FULL_PORT, PortKey, RuleOrigin
from cells.policy.compute.endpoint_policy import DirectionPolicy, Filter
from cells.policy.compute.map_state import ANY_IDENTITY, Entries, Match, lookup
from cells.policy.labels import LabelSet
from cells.policy.rules import PROTOCOLS, Direction
from cells.policy.rules.schema import HTTPRule
from cells.policy.selectors import PeerSelector, Selector

__all__ = ["NearMiss", "OtherSide", "Reason", "decide"]


class OtherSide(msgspec.Struct, frozen=True):
    """The peer: its identity, and the identity of the prefix around its address if CIDR rules select pods."""

    identity: int
    labels: LabelSet
    network: int = 0
    network_labels: LabelSet = LabelSet(())

    @property
    def numbers(self) -> tuple[int, ...]:
        """The identities that entries are looked up by."""
        return (self.identity, self.network) if self.network else (self.identity,)

    def is_selected(self, selector: PeerSelector) -> bool:
        """Whether a selector selects the peer, by its labels or its address."""
        return selector.matches(self.labels) or bool(self.network and selector.matches(self.network_labels))


class NearMiss(msgspec.Struct, frozen=True):
    """A rule that almost allows the connection, and what it lacks."""

    origin: RuleOrigin
    missing: str


class Reason(msgspec.Struct, frozen=True):
    """The decision in one direction; ``enforced`` is false if no policy applies to it."""

    direction: Direction
    match: Match
    enforced: bool
    origins: tuple[RuleOrigin, ...]
    near: tuple[NearMiss, ...] = ()
    requests: tuple[str, ...] = ()
    """HTTP requests that the rules allow, as text; empty without HTTP rules, or if all are allowed."""

    @property
    def allowed(self) -> bool:
        """Whether the packet is allowed in this direction."""
        return self.match.allowed

    @property
    def entry_text(self) -> str:
        """The deciding map entry as text."""
        key = self.match.key
        if key is None:
            return "none matches"
        names = {number: name for name, number in PROTOCOLS.items()}
        ports = key.ports
        last = ports.port + (1 << (FULL_PORT - ports.bits)) - 1
        port = "any port" if not ports.bits else f"port {ports.port}"
        if ports.bits and last != ports.port:
            port = f"ports {ports.port}-{last}"
        return f"{names[ports.protocol]}, {port}, identity {key.identity or 'any'} ({self.match.kind})"


def decide(
    policy: DirectionPolicy, peer: OtherSide, protocol: int, port: int, no_http_proxy: str = ""
) -> Reason:
    """Decide on a packet from or to a peer by an endpoint's policy.

    ``no_http_proxy`` is why traffic with HTTP rules is dropped; empty if the HTTP proxy runs.
    """
    entries: Mapping[int, Entries] = {ANY_IDENTITY: policy.wildcard_entries()} | {
        number: policy.of(number) for number in peer.numbers
    }
    match = lookup(entries, peer.identity, protocol, port, peer.network)
    origins = tuple(sorted(match.entry.origins)) if match.entry is not None else ()
    if no_http_proxy and match.has_http_filter:
        near = tuple(NearMiss(origin, no_http_proxy) for origin in origins)
        return Reason(policy.direction, match._replace(verdict="drop"), policy.enforced, origins, near)
    near = (
        () if match.allowed or match.verdict == "deny" else tuple(_near_misses(policy, peer, protocol, port))
    )
    requests = tuple(_requests(policy, peer, protocol, port)) if match.verdict == "redirect" else ()
    return Reason(policy.direction, match, policy.enforced, origins, near, requests)


def _requests(policy: DirectionPolicy, peer: OtherSide, protocol: int, port: int) -> dict[str, None]:
    """Return the HTTP requests that rules allow the peer on the port, as text."""
    packet = PortKey(protocol, port, FULL_PORT)
    found: dict[str, None] = {}
    for filter_ in policy.filters:
        if filter_.parser != "http" or not any(
            ports.covers(packet) for ports in policy.port_keys(filter_.port)
        ):
            continue
        for selector, selector_policy in filter_.selectors.items():
            if selector_policy.deny or not peer.is_selected(selector):
                continue
            if selector_policy.rules is None or not selector_policy.rules.http:
                return {}
            found |= dict.fromkeys(map(request_text, selector_policy.rules.http))
    return found


def request_text(rule: HTTPRule) -> str:
    """Format an HTTP rule: ``GET /public/.*``, ``any method any path, with X-Token``."""
    words = [f"{rule.method or 'any method'} {rule.path or 'any path'}"]
    if rule.host:
        words.append(f"host {rule.host}")
    headers = [*rule.headers, *(f"{one.name}: {one.value}".rstrip(": ") for one in rule.header_matches)]
    return ", ".join([*words, *(f"with {one}" for one in headers)])


def _near_misses(policy: DirectionPolicy, peer: OtherSide, protocol: int, port: int) -> Iterator[NearMiss]:
    """Yield rules that allow the peer on other ports, or other peers on this port."""
    packet = PortKey(protocol, port, FULL_PORT)
    for filter_ in policy.filters:
        covers = any(ports.covers(packet) for ports in policy.port_keys(filter_.port))
        for selector, selector_policy in filter_.selectors.items():
            if selector_policy.deny or not selector_policy.origins:
                continue
            matches = peer.is_selected(selector)
            if matches and not covers:
                yield NearMiss(
                    selector_policy.origins[0], f"it allows this peer on {port_text(filter_)} only"
                )
            elif covers and not matches:
                yield NearMiss(
                    selector_policy.origins[0],
                    f"it allows {port_text(filter_)} for {_unmet(selector, peer.labels)}",
                )


def _unmet(selector: PeerSelector, peer: LabelSet) -> str:
    """Return the requirements of a selector that the peer does not meet, as text."""
    if not isinstance(selector, Selector):
        return f"addresses of {selector.text} only"
    unmet = [one for one in selector.requirements if not one.matches(peer)]
    reasons = []
    for one in unmet:
        has = peer.value(one.source, one.key)
        key = one.text_key.removeprefix("any:")
        wanted = f"{key} {one.operator} {', '.join(one.values)}".strip()
        if one.operator == "In" and len(one.values) == 1:
            wanted = f"{key}={one.values[0]}" if one.values[0] else key
        reasons.append(f"{wanted} (the peer has {has or 'an empty value'})" if has is not None else wanted)
    return f"peers with {' and '.join(reasons)}"


def port_text(filter_: Filter) -> str:
    """Format a filter's port: ``8080/TCP``, ``http/TCP``, ``8000-8100/TCP``, ``any port``."""
    port = filter_.port
    names = {number: name for name, number in PROTOCOLS.items()}
    if port.protocol == 0:
        return "any port"
    number = port.name or (str(port.port) if port.port else "any")
    return f"{number}{f'-{port.end}' if port.end else ''}/{names[port.protocol]}"
