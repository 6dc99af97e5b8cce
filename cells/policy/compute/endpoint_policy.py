"""One endpoint's policy: filters per port from its rules, and the map entries of known identities.

``policies`` creates a DirectionPolicy for each direction and each distinct set of rules.

Source: Cilium's pkg/policy/l4.go and resolve.go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from cells.policy.compute import (
    AUTH_DISABLED,
    AUTH_TYPES,
    EVERYTHING,
    STEP,
    Entry,
    Key,
    PortKey,
    Redirect,
    RuleOrigin,
    SelectorPolicy,
    Steps,
    finish,
    interned,
    merged,
    merged_parser,
)
from cells.policy.compute.map_state import (
    ANY_IDENTITY,
    Entries,
    identity_entries,
    wildcard_entries,
    with_inherited_auth,
)
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.labels import LabelSet
from cells.policy.rules import (
    PROTOCOLS,
    Direction,
    L7Settings,
    PeerRule,
    PolicyOptions,
    PortRange,
    Ports,
    Rule,
    masked_ports,
)
from cells.policy.selectors import ALL, PeerSelector, Requirement, Selector

__all__ = ["DirectionPolicy", "Filter"]


# Filters: per direction and port, the policy of each peer selector.
#
# Rules for the same port are merged: a deny wins over an allow, and an allow without L7 rules allows all
# requests of its selector. A conflict is an error of the endpoint's policy, not of one object.

HOST = Selector.reserved("host")
EVERY_PORT = PortRange(0, 0)
_HOST = LabelSet.parse(["reserved:host"])

_Origins = dict[tuple[PortRange, PeerSelector], dict[RuleOrigin, None]]
"""Origins of selectors that several rules name on a port, in the order of the rules."""


class Filter(msgspec.Struct):
    """One port (or range, or name) of one direction, with a policy per peer selector.

    Source: Cilium's ``L4Filter``.
    """

    direction: Direction
    port: PortRange
    parser: str = ""
    selectors: dict[PeerSelector, SelectorPolicy] = {}

    @property
    def wildcard(self) -> SelectorPolicy | None:
        """The policy for all peers; None if no rule has one."""
        return self.selectors.get(ALL)


def filters_of(
    rules: Iterable[Rule], direction: Direction, options: PolicyOptions
) -> dict[PortRange, Filter]:
    """Return the merged filters of the rules that select an endpoint.

    ``fromRequires`` and ``toRequires`` of any rule restrict the endpoint selectors of all rules. Raises
    PolicyConflictError.
    """
    return finish(filters_in_steps(rules, direction, options))


def filters_in_steps(
    rules: Iterable[Rule], direction: Direction, options: PolicyOptions
) -> Steps[dict[PortRange, Filter]]:
    """Compute filters_of() in steps."""
    rules = list(rules)
    found: dict[PortRange, Filter] = {}
    origins: _Origins = {}
    required = {
        deny: tuple(
            requirement._replace(is_label=False)
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
    """Return the entry's selectors, the wildcard if it has no peers, or None if it selects no peer."""
    if entry.peers is None:
        return (ALL,) if entry.ports is not None else None
    peers = [
        peer.with_requirements(*required)
        if index < entry.endpoint_peers and isinstance(peer, Selector)
        else peer
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
        policy = _policy(entry, ports.l7, origin)
        for port in ports.ranges:
            new = Filter(direction, port, policy.parser, dict.fromkeys(peers, policy))
            _allow_host_without_l7(new, options)
            existing = found.get(port)
            if existing is None:
                found[port] = new
            else:
                _merge(existing, new, origins)


def _policy(entry: PeerRule, l7: L7Settings, origin: RuleOrigin) -> SelectorPolicy:
    if entry.deny:
        return SelectorPolicy(deny=True, origins=(origin,))
    return SelectorPolicy(
        parser=l7.parser,
        rules=l7.rules if l7.rules is not None and not l7.rules.empty else None,
        listener=l7.listener,
        server_names=l7.server_names,
        terminating_tls=l7.terminating_tls,
        originating_tls=l7.originating_tls,
        auth=entry.auth,
        origins=(origin,),
    )


def _allow_host_without_l7(filter_: Filter, options: PolicyOptions) -> None:
    """Allow the host without L7 rules if it is among the peers of L7 rules and is always allowed."""
    if filter_.direction != "ingress" or not options.always_allows_localhost:
        return
    if any(policy.rules is not None and peer.matches(_HOST) for peer, policy in filter_.selectors.items()):
        filter_.selectors.setdefault(HOST, SelectorPolicy())


def _merge(existing: Filter, new: Filter, origins: _Origins) -> None:
    """Merge another rule's filter. Origins of a selector are collected separately, in linear time."""
    existing.parser = merged_parser(existing.parser, new.parser)
    for peer, policy in new.selectors.items():
        held = existing.selectors.get(peer)
        if held is None:
            existing.selectors[peer] = policy
            continue
        several = origins.setdefault((existing.port, peer), dict.fromkeys(held.origins))
        several.update(dict.fromkeys(policy.origins))
        existing.selectors[peer] = merged(held, policy)


HOST_IDENTITY = 1
WORLD_IDENTITY = 2
WORLD_OF_FAMILY = (9, 10)
IMPLICIT_IDENTITIES = (HOST_IDENTITY, *WORLD_OF_FAMILY)
"""Identities that have entries even if no selector selects them."""
DERIVED = "reserved:io.cilium.policy.derived-from"
ALLOW_LOCALHOST = RuleOrigin((f"{DERIVED}=allow-localhost-ingress",))
ALLOW_ANY = {
    "ingress": RuleOrigin((f"{DERIVED}=allow-any-ingress",)),
    "egress": RuleOrigin((f"{DERIVED}=allow-any-egress",)),
}
ICMP = (PROTOCOLS["ICMP"], PROTOCOLS["ICMPV6"])

NamedPorts = Callable[[str, int], Iterable[int]]
"""Returns the port numbers of a port name and protocol; the name resolves only if there is exactly one."""

Proxies = Callable[[Filter, SelectorPolicy], Redirect | None]
"""Returns the redirect of a filter and selector; None while there is no proxy, then its traffic is dropped.
"""


class DirectionPolicy:
    """The policy of one direction of endpoints with the same rules: its filters and map entries."""

    __slots__ = (
        "_cache",
        "_dual_stack",
        "_entries",
        "_entries_by_selectors",
        "_localhost",
        "_named_ports",
        "_peers",
        "_proxies",
        "_wildcard",
        "direction",
        "enforced",
        "filters",
    )  # fmt: skip

    def __init__(
        self,
        direction: Direction,
        filters: Iterable[Filter],
        cache: SelectorCache,
        *,
        enforced: bool,
        named_ports: NamedPorts,
        proxies: Proxies,
        dual_stack: bool = False,
        localhost: bool = False,
    ) -> None:
        self.direction = direction
        self.enforced = enforced
        self._cache = cache
        self._proxies = proxies
        self._named_ports = named_ports
        self._dual_stack = dual_stack
        self._localhost = localhost
        self._entries_by_selectors: dict[frozenset[PeerSelector], Entries] = {}
        """Entries of identities by the selectors that select them: many identities share theirs."""
        finish(self.set_filters(filters))

    def set_filters(self, filters: Iterable[Filter]) -> Steps[None]:
        """Replace the filters, in steps. The policy is unusable until the last step."""
        self.filters = tuple(filters)
        self._entries: dict[PeerSelector, list[tuple[tuple[PortKey, ...], Entry]]] = {}
        if self.enforced:
            for number, filter_ in enumerate(self.filters):
                if number % STEP == STEP - 1:
                    yield
                yield from self._add_filter(filter_)
        else:
            allow = Entry(auth=AUTH_DISABLED, origins=frozenset([ALLOW_ANY[self.direction]]))
            self._entries[ALL] = [((EVERYTHING,), allow)]
        self._wildcard = wildcard_entries(self._merged_by_ports(self._entries.get(ALL, ())))
        self._peers = self._entries.keys() - {ALL}

    def _add_filter(self, filter_: Filter) -> Steps[None]:
        """Add the entries of a filter's selectors, except those with the effect of the filter's wildcard."""
        ports = self.port_keys(filter_.port)
        if not ports:
            return
        wildcard = filter_.wildcard if filter_.port.port or filter_.port.name else None
        wildcard_entry = self._entry(filter_, ALL, wildcard, None) if wildcard is not None else None
        for number, (peer, policy) in enumerate(filter_.selectors.items()):
            if number % STEP == STEP - 1:
                yield
            entry = self._entry(filter_, peer, policy, wildcard if peer != ALL else None)
            if entry is None or (
                peer != ALL and wildcard_entry is not None and entry.same_effect(wildcard_entry)
            ):
                continue
            self._entries.setdefault(peer, []).append((ports, entry))

    def _entry(
        self, filter_: Filter, peer: PeerSelector, policy: SelectorPolicy, wildcard: SelectorPolicy | None
    ) -> Entry | None:
        """Return the entry of one selector; None while its proxy does not exist.

        If all peers on the port are redirected to a proxy, so is this selector.
        """
        origins = frozenset(policy.origins)
        if policy.deny:
            return interned(Entry(deny=True, origins=origins))
        redirect = None
        redirecting = policy if policy.redirects or wildcard is None else wildcard
        if redirecting.redirects:
            redirect = self._proxies(filter_, redirecting)
            if redirect is None:
                return None
            if redirect.filter_peers is not None:
                peers = (peer,) if wildcard is None else (peer, ALL)
                redirect = redirect._replace(filter_peers=frozenset((filter_.port, one) for one in peers))
        auth = AUTH_TYPES[policy.auth] if policy.auth is not None else None
        return interned(Entry(redirect=redirect, auth=auth, origins=origins))

    def port_keys(self, port: PortRange) -> tuple[PortKey, ...]:
        """Return the keys of a port range; none for a name that does not resolve to exactly one port."""
        number = port.port
        if port.name:
            numbers = set(self._named_ports(port.name, port.protocol))
            if len(numbers) != 1:
                return ()
            number = numbers.pop()
        if port.protocol in ICMP:  # ICMP type 0 is a single type; for other protocols port 0 is every port
            return (PortKey(port.protocol, number, 16),)
        return tuple(PortKey(port.protocol, first, bits) for first, bits in masked_ports(number, port.end))

    @staticmethod
    def _merged_by_ports(parts: Iterable[tuple[tuple[PortKey, ...], Entry]]) -> Entries:
        found: dict[PortKey, list[Entry]] = {}
        for ports, entry in parts:
            for key in ports:
                found.setdefault(key, []).append(entry)
        return {key: Entry.merged(several) for key, several in found.items()}

    @property
    def peers(self) -> Iterable[PeerSelector]:
        """The selectors on which the entries of the direction depend."""
        return self._entries.keys()

    def wildcard_entries(self) -> Entries:
        """Return the entries of identity 0."""
        return with_inherited_auth(self._wildcard, {})

    def of(self, identity: int) -> Entries:
        """Return the entries of one identity, by the selectors that select it now. Do not modify them."""
        selecting = frozenset(self._cache.selecting(identity) & self._peers)
        if self._dual_stack and identity in WORLD_OF_FAMILY:
            selecting |= self._cache.selecting(WORLD_IDENTITY) & self._peers
        if self._localhost and identity == HOST_IDENTITY:
            return self._entries_of(selecting, self._localhost_entry())
        known = self._entries_by_selectors.get(selecting)
        if known is None:
            known = self._entries_by_selectors[selecting] = self._entries_of(selecting)
        return known

    def _entries_of(
        self, selecting: Iterable[PeerSelector], *more: tuple[tuple[PortKey, ...], Entry]
    ) -> Entries:
        own = self._merged_by_ports([*(part for peer in selecting for part in self._entries[peer]), *more])
        return identity_entries(own, self._wildcard) if own else {}

    @staticmethod
    def _localhost_entry() -> tuple[tuple[PortKey, ...], Entry]:
        return (EVERYTHING,), Entry(auth=AUTH_DISABLED, origins=frozenset([ALLOW_LOCALHOST]))

    def identities(self) -> set[int]:
        """Return the identities that have entries, except 0."""
        return self._selected(self._entries) | ({HOST_IDENTITY} if self._localhost else set())

    def identities_since(self, previous: DirectionPolicy) -> set[int] | None:
        """Return identities with entries that may differ from a previous policy's; None: any may.

        The selector cache must still contain the selectors of both.
        """
        if (self._wildcard, self._dual_stack, self._localhost) != (
            previous._wildcard,
            previous._dual_stack,
            previous._localhost,
        ):
            return None
        peers = self._entries.keys() | previous._entries.keys()
        return self._selected(
            peer for peer in peers if self._entries.get(peer) != previous._entries.get(peer)
        )

    def _selected(self, peers: Iterable[PeerSelector]) -> set[int]:
        found: set[int] = set().union(*(self._cache.selections(peer) for peer in peers if peer != ALL))
        if self._dual_stack and WORLD_IDENTITY in found:
            found |= set(WORLD_OF_FAMILY)
        return found

    def entries(self) -> Mapping[Key, Entry]:
        """Return all entries of the direction."""
        found = {Key(ANY_IDENTITY, ports): entry for ports, entry in self.wildcard_entries().items()}
        for identity in self.identities():
            found.update((Key(identity, ports), entry) for ports, entry in self.of(identity).items())
        return found
