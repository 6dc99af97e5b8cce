"""The filters of an endpoint's policy: per direction and port, what holds for each peer selector.

Rules that speak of the same port are merged: deny beats allow, a rule without L7 rules opens L7 for its
selector, and what cannot be merged is an error of the endpoint's policy, not of one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from cells.policy.compute.selector_policy import RuleOrigin, SelectorPolicy, merged, merged_parser
from cells.policy.compute.steps import STEP, Steps, finish
from cells.policy.labels import ALL, LabelSet, PeerSelector, Requirement, Selector
from cells.policy.rules.options import PolicyOptions
from cells.policy.rules.rule import Above, Direction, PeerRule, PortRange, Ports, Rule

HOST = Selector.reserved("host")
EVERY_PORT = PortRange(0, 0)
_HOST = LabelSet.parse(["reserved:host"])

_Origins = dict[tuple[PortRange, PeerSelector], dict[RuleOrigin, None]]
"""Where selectors that several rules name on a port come from, in the order of the rules."""


class Filter(msgspec.Struct):
    """One port (or range, or name) of one direction, and the selectors it is open or closed for."""

    direction: Direction
    port: PortRange
    parser: str = ""
    selectors: dict[PeerSelector, SelectorPolicy] = {}

    @property
    def wildcard(self) -> SelectorPolicy | None:
        """What holds for everybody, if a rule says so."""
        return self.selectors.get(ALL)


def filters_of(
    rules: Iterable[Rule], direction: Direction, options: PolicyOptions
) -> dict[PortRange, Filter]:
    """The merged filters of the rules that select an endpoint.

    ``fromRequires`` and ``toRequires`` of any rule narrow every endpoint selector of all. Raises
    PolicyConflictError.
    """
    return finish(filters_in_steps(rules, direction, options))


def filters_in_steps(
    rules: Iterable[Rule], direction: Direction, options: PolicyOptions
) -> Steps[dict[PortRange, Filter]]:
    """What filters_of() gives, in steps."""
    rules = list(rules)
    found: dict[PortRange, Filter] = {}
    origins: _Origins = {}
    required = {
        deny: tuple(
            requirement
            for rule in rules
            for entry in rule.of(direction)
            if entry.deny == deny
            for selector in entry.requires
            for requirement in selector.requirements
        )
        for deny in (False, True)
    }
    for number, rule in enumerate(rules):
        if number % STEP == STEP - 1:
            yield
        for entry in rule.of(direction):
            origin = RuleOrigin(rule.labels, str(rule.source), entry.path)
            peers = _peers(entry, required[entry.deny])
            if peers is not None:
                _add(found, direction, entry, peers, origin, options, origins)
    for number, ((port, peer), several) in enumerate(origins.items()):
        if number % STEP == STEP - 1:
            yield
        selectors = found[port].selectors
        selectors[peer] = msgspec.structs.replace(selectors[peer], origins=tuple(several))
    return found


def _peers(entry: PeerRule, required: Sequence[Requirement]) -> Sequence[PeerSelector] | None:
    """The entry's selectors, everybody where it restricts nobody; None when it selects no endpoint."""
    if entry.peers is None:
        return (ALL,) if entry.ports is not None else None
    peers = [
        peer.also(*required) if index < entry.endpoint_peers and isinstance(peer, Selector) else peer
        for index, peer in enumerate(entry.peers)
    ]
    if ALL in peers:
        return (ALL,)
    return tuple(dict.fromkeys(peers)) or None


def _add(
    found: dict[PortRange, Filter],
    direction: Direction,
    entry: PeerRule,
    peers: Sequence[PeerSelector],
    origin: RuleOrigin,
    options: PolicyOptions,
    origins: _Origins,
) -> None:
    for ports in entry.ports if entry.ports is not None else (Ports((EVERY_PORT,)),):
        policy = _policy(entry, ports.above, origin)
        for port in ports.ranges:
            new = Filter(direction, port, policy.parser, dict.fromkeys(peers, policy))
            _keep_host_open(new, options)
            existing = found.get(port)
            if existing is None:
                found[port] = new
            else:
                _merge(existing, new, origins)


def _policy(entry: PeerRule, above: Above, origin: RuleOrigin) -> SelectorPolicy:
    if entry.deny:
        return SelectorPolicy(deny=True, origins=(origin,))
    return SelectorPolicy(
        parser=above.parser,
        rules=above.rules if above.rules is not None and not above.rules.empty else None,
        listener=above.listener,
        server_names=above.server_names,
        terminating_tls=above.terminating_tls,
        originating_tls=above.originating_tls,
        auth=entry.auth,
        origins=(origin,),
    )


def _keep_host_open(filter_: Filter, options: PolicyOptions) -> None:
    """The node may ask anything of its pods: where it is among the peers of L7 rules, it has none."""
    if filter_.direction != "ingress" or not options.always_allows_localhost:
        return
    if any(policy.rules is not None and peer.matches(_HOST) for peer, policy in filter_.selectors.items()):
        filter_.selectors.setdefault(HOST, SelectorPolicy())


def _merge(existing: Filter, new: Filter, origins: _Origins) -> None:
    """Add what another rule asks. Origins of the same selector are collected apart: each is added once."""
    existing.parser = merged_parser(existing.parser, new.parser)
    for peer, policy in new.selectors.items():
        held = existing.selectors.get(peer)
        if held is None:
            existing.selectors[peer] = policy
            continue
        several = origins.setdefault((existing.port, peer), dict.fromkeys(held.origins))
        several.update(dict.fromkeys(policy.origins))
        existing.selectors[peer] = merged(held, policy)
