"""Compute the policy map entries of one direction from the entries that rules request.

The datapath looks up an identity's entries and those of identity 0, and prefers a more specific port of
identity 0 (``policy_can_access`` in Cilium's bpf/lib/policy.h). For denies to win nevertheless, a deny of
identity 0 is copied to each identity that is allowed more ports, and a deny of an identity to each more
specific port that identity 0 allows.

The entries of an identity depend only on the requests for it and for identity 0, so adding or removing an
identity changes no other entries.

Source: Cilium's pkg/policy/mapstate.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy.compute import EVERYTHING, FULL_PORT, Entry, Key, PortKey

__all__ = ["Match", "lookup", "map_entry", "map_key"]


Entries = dict[PortKey, Entry]
"""The entries of one identity, by protocol and port prefix."""

ANY_IDENTITY = 0
"""The identity of entries that apply to every peer."""


def merge(entries: Entries, ports: PortKey, entry: Entry) -> None:
    """Add an entry to those of one identity, merged with one for the same ports."""
    held = entries.get(ports)
    entries[ports] = entry if held is None else Entry.merged((held, entry))


def wildcard_entries(wildcard: Entries) -> Entries:
    """Return the entries of identity 0, from those that rules request for all peers."""
    return _without_covered(wildcard, {})


def identity_entries(own: Entries, wildcard: Entries) -> Entries:
    """Return the entries of one identity, from those requested for it and from :func:`wildcard_entries`."""
    if not _affect_other_entries(own) and not _affect_other_entries(wildcard):
        return own
    denied_ports = {ports: entry for ports, entry in wildcard.items() if entry.deny}
    if EVERYTHING in denied_ports:
        return {}
    entries = _without_covered(own | _auth_copies(own, wildcard), denied_ports)
    allows = [ports for ports, entry in entries.items() if not entry.deny]
    denies = [(ports, entry) for ports, entry in entries.items() if entry.deny]
    for ports, deny in denied_ports.items():
        covered = any(_is_within(ports, denied) for denied, _ in denies)
        if not covered and any(_is_within(ports, allowed) for allowed in allows):
            merge(entries, ports, deny)
    for ports, entry in wildcard.items():
        if not entry.deny:
            for denied, deny in denies:
                if _is_overridden_by(denied, ports):
                    merge(entries, ports, deny)
    return with_inherited_auth(entries, wildcard)


def _affect_other_entries(entries: Entries) -> bool:
    """Whether an entry affects others of the same packets: a deny, or explicit authentication."""
    return any(entry.deny or entry.auth is not None for entry in entries.values())


def _is_within(inner: PortKey, outer: PortKey) -> bool:
    return inner != outer and outer.covers(inner)


def _is_overridden_by(own: PortKey, wildcard: PortKey) -> bool:
    """Whether the lookup prefers identity 0's entry, although the identity's entry covers its packets.

    Only an entry without a port is overridden: any port of the identity, even a range, comes first.
    """
    return own.bits == 0 and _is_within(wildcard, own)


def _without_covered(entries: Entries, denied_ports: Mapping[PortKey, Entry]) -> Entries:
    """Return the entries without those that a deny of more ports, or of identity 0, decides already."""
    denies = [ports for ports, entry in entries.items() if entry.deny]
    if not denies and not denied_ports:
        return dict(entries)
    return {
        ports: entry
        for ports, entry in entries.items()
        if not any(_is_within(ports, denied) for denied in denies)
        and not any(denied.covers(ports) for denied in denied_ports)
    }


def _auth_copies(own: Entries, wildcard: Entries) -> Entries:
    """Return copies of identity 0's port entries that require this identity's explicit authentication.

    Without a copy, the lookup would prefer the entry of identity 0, which requires no authentication.
    """
    copies: Entries = {}
    explicit = [(ports, entry) for ports, entry in own.items() if entry.auth is not None and not entry.deny]
    for ports, entry in wildcard.items():
        if entry.deny or entry.auth is not None or ports in own:
            continue
        outer = [
            (around.specificity, requiring)
            for around, requiring in explicit
            if _is_overridden_by(around, ports)
        ]
        requiring = max(outer, key=lambda one: one[0])[1] if outer else None
        if requiring is not None and (ports.bits or requiring.auth_type):
            copies[ports] = Entry(
                redirect=entry.redirect,
                auth=entry.auth,
                inherited_auth=requiring.auth_type,
                origins=entry.origins | requiring.origins,
            )
    return copies


def with_inherited_auth(entries: Entries, wildcard: Entries) -> Entries:
    """Let entries without explicit authentication inherit it from the most specific covering entry."""
    explicit = [
        *((True, ports, entry) for ports, entry in entries.items() if entry.auth is not None),
        *((False, ports, entry) for ports, entry in wildcard.items() if entry.auth is not None),
    ]
    if not explicit:
        return entries
    found = {}
    for ports, entry in entries.items():
        around = [
            (own, outer.specificity, requiring.auth_type)
            for own, outer, requiring in explicit
            if (outer.covers(ports) if not own else _is_within(ports, outer))
        ]
        inherits = entry.auth is None and not entry.deny and around
        found[ports] = entry.inheriting(max(around)[2]) if inherits else entry
    return found


# The datapath's lookup, on computed entries.
#
# Source: ``policy_can_access`` of Cilium's bpf/lib/policy.h: a longest-prefix match with the peer's identity
#         and one with identity 0. Among the six classes of matches, a more specific port wins.

Verdict = Literal["allow", "redirect", "auth-required", "deny", "drop"]


class Match(NamedTuple):
    """The verdict on a packet, and the entry that decided; None if no entry matched.

    ``kind`` is the class of the match: ``l3-l4``, ``l4-only``, ``l3-proto``, ``proto-only``, ``l3-only``,
    ``all``.
    """

    verdict: Verdict
    kind: str = "none"
    key: Key | None = None
    entry: Entry | None = None

    @property
    def allowed(self) -> bool:
        """Whether the packet passes, possibly through a proxy or after authentication."""
        return self.verdict not in ("deny", "drop")

    @property
    def has_http_filter(self) -> bool:
        """Whether the packet is redirected to the proxy that enforces HTTP rules."""
        redirect = self.entry.redirect if self.verdict == "redirect" and self.entry is not None else None
        return redirect is not None and redirect.filter_peers is not None


def lookup(
    entries: Mapping[int, Entries], identity: int, protocol: int, port: int, network: int = 0
) -> Match:
    """Return the verdict on a packet by one direction's entries. For ICMP the port is the type.

    ``network`` is the identity of the prefix around the peer's address if CIDR rules select pods, else 0.
    """
    found = _of_identity(entries, identity, protocol, port)
    return _with_network(found, entries, network, protocol, port) if network else found


def _with_network(
    chosen: Match, entries: Mapping[int, Entries], network: int, protocol: int, port: int
) -> Match:
    """Combine the peer's match with that of the prefix around its address.

    A deny wins, else the more specific port; at equal specificity an entry of an identity wins over one of
    identity 0, else a redirect over none.
    """
    best = _best(entries, network, PortKey(protocol, port, FULL_PORT))
    if best is None or chosen.verdict == "deny":
        return chosen
    bits = best[0].ports.specificity
    found = Match(_verdict(best[1]), "l3-l4" if bits > 8 else "l3-proto" if bits else "l3-only", *best)
    if found.verdict == "deny" or chosen.key is None:
        return found
    rank, held = _rank(found.kind), _rank(chosen.kind)
    if rank != held:
        return found if rank > held else chosen
    if chosen.key.identity == ANY_IDENTITY:
        return found
    return found if best[1].redirect is not None and chosen.verdict != "redirect" else chosen


def _rank(kind: str) -> int:
    """Return the specificity of the port in a class of matches: 2 port, 1 protocol, 0 neither."""
    return {"l3-l4": 2, "l4-only": 2, "l3-proto": 1, "proto-only": 1}.get(kind, 0)


def _of_identity(entries: Mapping[int, Entries], identity: int, protocol: int, port: int) -> Match:
    packet = PortKey(protocol, port, FULL_PORT)
    own, wildcard = _best(entries, identity, packet), _best(entries, ANY_IDENTITY, packet)
    own_bits = own[0].ports.specificity if own is not None else -1
    any_bits = wildcard[0].ports.specificity if wildcard is not None else -1
    for kind, hit, found in (
        ("l3-l4", own_bits > 8, own),
        ("l4-only", any_bits > 8, wildcard),
        ("l3-proto", own_bits == 8, own),
        ("proto-only", any_bits == 8, wildcard),
        ("l3-only", own_bits == 0, own),
        ("all", any_bits == 0, wildcard),
    ):
        if hit and found is not None:
            return Match(_verdict(found[1]), kind, *found)
    return Match("drop")


def _best(entries: Mapping[int, Entries], identity: int, packet: PortKey) -> tuple[Key, Entry] | None:
    matching = [(ports, entry) for ports, entry in entries.get(identity, {}).items() if ports.covers(packet)]
    if not matching:
        return None
    ports, entry = max(matching, key=lambda one: one[0].specificity)
    return Key(identity, ports), entry


def _verdict(entry: Entry) -> Verdict:
    if entry.deny:
        return "deny"
    if entry.auth_type:
        return "auth-required"
    return "redirect" if entry.redirect is not None else "allow"


# Encoding of computed entries for policy maps. Source: the layout of ``cilium_policy_*``.


def map_key(key: Key, *, egress: bool) -> PolicyKey:
    """Return the policy map's key of an entry."""
    identity, ports = key
    return PolicyKey(identity, egress, *ports)  # protocol, port, bits


def map_entry(entry: Entry) -> PolicyEntry:
    """Return the policy map's value of an entry.

    ``only_by_proxy`` makes the datapath enforce a redirect to the proxy of HTTP rules: bypassing it would
    skip the rules.
    """
    redirect = entry.redirect
    return PolicyEntry(
        deny=entry.deny,
        proxy_port=redirect.port if redirect is not None else 0,
        auth_type=0 if entry.deny else entry.auth_type,
        only_by_proxy=redirect is not None and redirect.filter_peers is not None,
    )
