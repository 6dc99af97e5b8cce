"""One endpoint's policy: the filters of its rules, and the map entries they make for the known identities."""

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
    merged,
    merged_parser,
    same,
)
from cells.policy.compute.map_state import (
    ANYBODY,
    Entries,
    anybody_entries,
    identity_entries,
    with_inherited_auth,
)
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.labels import LabelSet
from cells.policy.rules import (
    PROTOCOLS,
    Above,
    Direction,
    PeerRule,
    PolicyOptions,
    PortRange,
    Ports,
    Rule,
    masked_ports,
)
from cells.policy.selectors import ALL, PeerSelector, Requirement, Selector

__all__ = ["DirectionPolicy", "Filter"]


# The filters of an endpoint's policy: per direction and port, what holds for each peer selector.
#
# Rules that speak of the same port are merged: deny beats allow, a rule without L7 rules opens L7 for its
# selector, and what cannot be merged is an error of the endpoint's policy, not of one object.

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
        """The filter of all peers, if a rule has one."""
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
    """The entry's selectors, the wildcard where it has no peers; None when it selects no endpoint."""
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


HOST_IDENTITY = 1
WORLD_IDENTITY = 2
WORLD_OF_FAMILY = (9, 10)
BY_ITSELF = (HOST_IDENTITY, *WORLD_OF_FAMILY)
"""Identities that have entries for other reasons than that a selector selects them."""
DERIVED = "reserved:io.cilium.policy.derived-from"
ALLOW_LOCALHOST = RuleOrigin((f"{DERIVED}=allow-localhost-ingress",))
ALLOW_ANY = {
    "ingress": RuleOrigin((f"{DERIVED}=allow-any-ingress",)),
    "egress": RuleOrigin((f"{DERIVED}=allow-any-egress",)),
}
ICMP = (PROTOCOLS["ICMP"], PROTOCOLS["ICMPV6"])

NamedPorts = Callable[[str, int], Iterable[int]]
"""The numbers of a port name for a protocol, as the direction sees it: none or several is not a port."""

Proxies = Callable[[Filter, SelectorPolicy], Redirect | None]
"""The proxy that serves a filter for a selector, None while there is none: then nothing is let through."""


class DirectionPolicy:
    """One direction of one endpoint."""

    __slots__ = (
        "_anybody",
        "_cache",
        "_dual_stack",
        "_entries",
        "_known",
        "_localhost",
        "_named_ports",
        "_peers",
        "_proxies",
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
        self._known: dict[frozenset[PeerSelector], Entries] = {}
        """The entries of identities by the selectors that select them: most identities share theirs."""
        finish(self.read(filters))

    def read(self, filters: Iterable[Filter]) -> Steps[None]:
        """Take these filters in place of those there are, in steps; not to be used before the last one."""
        self.filters = tuple(filters)
        self._entries: dict[PeerSelector, list[tuple[tuple[PortKey, ...], Entry]]] = {}
        if self.enforced:
            for number, filter_ in enumerate(self.filters):
                if number % STEP == STEP - 1:
                    yield
                yield from self._read(filter_)
        else:
            allow = Entry(auth=AUTH_DISABLED, origins=frozenset([ALLOW_ANY[self.direction]]))
            self._entries[ALL] = [((EVERYTHING,), allow)]
        self._anybody = anybody_entries(self._merged(self._entries.get(ALL, ())))
        self._peers = self._entries.keys() - {ALL}

    def _read(self, filter_: Filter) -> Steps[None]:
        """What a filter allows the peers of each of its selectors.

        What it allows some peers on a port is left out where it allows all peers the same.
        """
        ports = self.port_keys(filter_.port)
        if not ports:
            return
        wildcard = filter_.wildcard if filter_.port.port or filter_.port.name else None
        for_everybody = self._entry(filter_, ALL, wildcard, None) if wildcard is not None else None
        for number, (peer, policy) in enumerate(filter_.selectors.items()):
            if number % STEP == STEP - 1:
                yield
            entry = self._entry(filter_, peer, policy, wildcard if peer != ALL else None)
            if entry is None or (
                peer != ALL and for_everybody is not None and entry.same_effect(for_everybody)
            ):
                continue
            self._entries.setdefault(peer, []).append((ports, entry))

    def _entry(
        self, filter_: Filter, peer: PeerSelector, policy: SelectorPolicy, wildcard: SelectorPolicy | None
    ) -> Entry | None:
        """The entry of one selector; None while the proxy that must serve it is not there.

        A proxy that serves everybody on the port serves this selector, too.
        """
        origins = frozenset(policy.origins)
        if policy.deny:
            return same(Entry(deny=True, origins=origins))
        redirect = None
        asking = policy if policy.redirects or wildcard is None else wildcard
        if asking.redirects:
            redirect = self._proxies(filter_, asking)
            if redirect is None:
                return None
            if redirect.filter_peers is not None:
                peers = (peer,) if wildcard is None else (peer, ALL)
                redirect = redirect._replace(filter_peers=frozenset((filter_.port, one) for one in peers))
        auth = AUTH_TYPES[policy.auth] if policy.auth is not None else None
        return same(Entry(redirect=redirect, auth=auth, origins=origins))

    def port_keys(self, port: PortRange) -> tuple[PortKey, ...]:
        """The keys of a range of ports; none for a name that stands for no port, or for several."""
        number = port.port
        if port.name:
            numbers = set(self._named_ports(port.name, port.protocol))
            if len(numbers) != 1:
                return ()
            number = numbers.pop()
        if port.protocol in ICMP:  # type 0 is a type; for other protocols port 0 is every port
            return (PortKey(port.protocol, number, 16),)
        return tuple(PortKey(port.protocol, first, bits) for first, bits in masked_ports(number, port.end))

    @staticmethod
    def _merged(parts: Iterable[tuple[tuple[PortKey, ...], Entry]]) -> Entries:
        found: dict[PortKey, list[Entry]] = {}
        for ports, entry in parts:
            for key in ports:
                found.setdefault(key, []).append(entry)
        return {key: Entry.merged(several) for key, several in found.items()}

    @property
    def peers(self) -> Iterable[PeerSelector]:
        """The selectors that the direction's entries depend on."""
        return self._entries.keys()

    def anybody(self) -> Entries:
        """The entries that hold for every peer."""
        return with_inherited_auth(self._anybody, {})

    def of(self, identity: int) -> Entries:
        """The entries of one identity, from the selectors that select it now; not to be changed."""
        selecting = frozenset(self._cache.selecting(identity) & self._peers)
        if self._dual_stack and identity in WORLD_OF_FAMILY:
            selecting |= self._cache.selecting(WORLD_IDENTITY) & self._peers
        if self._localhost and identity == HOST_IDENTITY:
            return self._entries_of(selecting, self._from_localhost())
        known = self._known.get(selecting)
        if known is None:
            known = self._known[selecting] = self._entries_of(selecting)
        return known

    def _entries_of(
        self, selecting: Iterable[PeerSelector], *more: tuple[tuple[PortKey, ...], Entry]
    ) -> Entries:
        own = self._merged([*(part for peer in selecting for part in self._entries[peer]), *more])
        return identity_entries(own, self._anybody) if own else {}

    @staticmethod
    def _from_localhost() -> tuple[tuple[PortKey, ...], Entry]:
        return (EVERYTHING,), Entry(auth=AUTH_DISABLED, origins=frozenset([ALLOW_LOCALHOST]))

    def identities(self) -> set[int]:
        """Every identity that has entries of its own."""
        return self._selected(self._entries) | ({HOST_IDENTITY} if self._localhost else set())

    def identities_since(self, previous: DirectionPolicy) -> set[int] | None:
        """The identities with entries that may differ from an earlier policy of this; None: any may.

        The selector cache must still have the selectors of both.
        """
        if (self._anybody, self._dual_stack, self._localhost) != (
            previous._anybody,
            previous._dual_stack,
            previous._localhost,
        ):
            return None
        either = self._entries.keys() | previous._entries.keys()
        return self._selected(
            peer for peer in either if self._entries.get(peer) != previous._entries.get(peer)
        )

    def _selected(self, peers: Iterable[PeerSelector]) -> set[int]:
        found: set[int] = set().union(*(self._cache.selections(peer) for peer in peers if peer != ALL))
        if self._dual_stack and WORLD_IDENTITY in found:
            found |= set(WORLD_OF_FAMILY)
        return found

    def entries(self) -> Mapping[Key, Entry]:
        """All entries of the direction."""
        found = {Key(ANYBODY, ports): entry for ports, entry in self.anybody().items()}
        for identity in self.identities():
            found.update((Key(identity, ports), entry) for ports, entry in self.of(identity).items())
        return found
