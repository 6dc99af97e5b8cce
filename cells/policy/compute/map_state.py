"""A direction's map entries, so that the datapath's lookup finds the deny first, else the allow.

The lookup compares an identity's entries with those of identity 0, and a more specific port of the
identity wins over any port of 0 (``policy_can_access`` in Cilium's bpf/lib/policy.h). So a deny of
everybody's port is repeated for each identity that is allowed more ports, and a deny of an identity for
each port that is open to everybody.

The entries of an identity follow from what rules say of it and of everybody. So an identity that comes or
goes costs its own entries, and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy.compute import EVERYTHING, FULL_PORT, Entry, Key, PortKey

__all__ = ["Match", "lookup", "map_entry", "map_key"]


Entries = dict[PortKey, Entry]
"""What happens to the packets of one identity, by ports."""

ANYBODY = 0
"""The identity of entries that hold for every peer."""


def merge(entries: Entries, ports: PortKey, entry: Entry) -> None:
    """Add an entry to those of one identity."""
    held = entries.get(ports)
    entries[ports] = entry if held is None else Entry.merged((held, entry))


def anybody_entries(anybody: Entries) -> Entries:
    """The entries of identity 0, from what rules say of everybody."""
    return _without_covered(anybody, {})


def identity_entries(own: Entries, anybody: Entries) -> Entries:
    """The entries of one identity, from what rules say of it and from :func:`anybody_entries`."""
    if not _speak_of_each_other(own) and not _speak_of_each_other(anybody):
        return own
    denied_to_all = {ports: entry for ports, entry in anybody.items() if entry.deny}
    if EVERYTHING in denied_to_all:
        return {}
    entries = _without_covered(own | _auth_copies(own, anybody), denied_to_all)
    allows = [ports for ports, entry in entries.items() if not entry.deny]
    denies = [(ports, entry) for ports, entry in entries.items() if entry.deny]
    for ports, deny in denied_to_all.items():
        covered = any(_inside(ports, denied) for denied, _ in denies)
        if not covered and any(_inside(ports, allowed) for allowed in allows):
            merge(entries, ports, deny)
    for ports, entry in anybody.items():
        if not entry.deny:
            for denied, deny in denies:
                if _loses_to(denied, ports):
                    merge(entries, ports, deny)
    return with_inherited_auth(entries, anybody)


def _speak_of_each_other(entries: Entries) -> bool:
    """Whether some entry decides for others, too: a deny, or a rule's authentication."""
    return any(entry.deny or entry.auth is not None for entry in entries.values())


def _inside(inner: PortKey, outer: PortKey) -> bool:
    return inner != outer and outer.covers(inner)


def _loses_to(own: PortKey, anybody: PortKey) -> bool:
    """Whether the lookup prefers everybody's entry although the identity's covers its packets.

    It does so only against entries without a port: any port of the identity, however broad, comes first.
    """
    return own.bits == 0 and _inside(anybody, own)


def _without_covered(entries: Entries, denied_to_all: Mapping[PortKey, Entry]) -> Entries:
    """Without what a deny of more ports, or of the same to everybody, decides already."""
    denies = [ports for ports, entry in entries.items() if entry.deny]
    if not denies and not denied_to_all:
        return dict(entries)
    return {
        ports: entry
        for ports, entry in entries.items()
        if not any(_inside(ports, denied) for denied in denies)
        and not any(denied.covers(ports) for denied in denied_to_all)
    }


def _auth_copies(own: Entries, anybody: Entries) -> Entries:
    """Ports open to everybody that lie inside ports for which this identity has an authentication of its own.

    Without a copy, the entry of everybody would win, and the authentication would not be asked for.
    """
    copies: Entries = {}
    asked = [(ports, entry) for ports, entry in own.items() if entry.auth is not None and not entry.deny]
    for ports, entry in anybody.items():
        if entry.deny or entry.auth is not None or ports in own:
            continue
        outer = [(around.specificity, asking) for around, asking in asked if _loses_to(around, ports)]
        asking = max(outer, key=lambda one: one[0])[1] if outer else None
        if asking is not None and (ports.bits or asking.auth_type):
            copies[ports] = Entry(
                redirect=entry.redirect,
                auth=entry.auth,
                inherited_auth=asking.auth_type,
                origins=entry.origins | asking.origins,
            )
    return copies


def with_inherited_auth(entries: Entries, anybody: Entries) -> Entries:
    """Entries that no rule asks authentication of take that of the most specific one around them."""
    asked = [
        *((True, ports, entry) for ports, entry in entries.items() if entry.auth is not None),
        *((False, ports, entry) for ports, entry in anybody.items() if entry.auth is not None),
    ]
    if not asked:
        return entries
    found = {}
    for ports, entry in entries.items():
        around = [
            (own, outer.specificity, asking.auth_type)
            for own, outer, asking in asked
            if (outer.covers(ports) if not own else _inside(ports, outer))
        ]
        inherits = entry.auth is None and not entry.deny and around
        found[ports] = entry.inheriting(max(around)[2]) if inherits else entry
    return found


# The datapath's lookup in computed entries: which entry decides on a packet.
#
# Source: ``policy_can_access`` of Cilium's bpf/lib/policy.h: two longest-prefix matches, one with the peer's
#         identity and one with 0, and six classes in which the more specific port wins over the identity.

Verdict = Literal["allow", "redirect", "auth-required", "deny", "drop"]


class Match(NamedTuple):
    """The verdict, and the entry it comes from; none when no entry matches.

    ``kind`` names the class: ``l3-l4``, ``l4-only``, ``l3-proto``, ``proto-only``, ``l3-only``, ``all``.
    """

    verdict: Verdict
    kind: str = "none"
    key: Key | None = None
    entry: Entry | None = None

    @property
    def allowed(self) -> bool:
        """Whether the packet passes, if need be by a proxy or once authenticated."""
        return self.verdict not in ("deny", "drop")

    @property
    def is_read(self) -> bool:
        """Whether a proxy reads its requests of HTTP."""
        redirect = self.entry.redirect if self.verdict == "redirect" and self.entry is not None else None
        return redirect is not None and redirect.filter_peers is not None


def lookup(
    entries: Mapping[int, Entries], identity: int, protocol: int, port: int, network: int = 0
) -> Match:
    """Decide on a packet, by the entries of one direction by identity. For ICMP the port is the type.

    ``network``: the number of the network around the peer's address, where networks select pods, too.
    """
    found = _of_identity(entries, identity, protocol, port)
    return _also_by_network(found, entries, network, protocol, port) if network else found


def _also_by_network(
    chosen: Match, entries: Mapping[int, Entries], network: int, protocol: int, port: int
) -> Match:
    """What denies wins, else the more specific port; of two alike what is not everybody's, else a proxy's."""
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
    if chosen.key.identity == ANYBODY:
        return found
    return found if best[1].redirect is not None and chosen.verdict != "redirect" else chosen


def _rank(kind: str) -> int:
    """How closely an entry of a class names the port."""
    return {"l3-l4": 2, "l4-only": 2, "l3-proto": 1, "proto-only": 1}.get(kind, 0)


def _of_identity(entries: Mapping[int, Entries], identity: int, protocol: int, port: int) -> Match:
    packet = PortKey(protocol, port, FULL_PORT)
    own, anybody = _best(entries, identity, packet), _best(entries, ANYBODY, packet)
    own_bits = own[0].ports.specificity if own is not None else -1
    any_bits = anybody[0].ports.specificity if anybody is not None else -1
    for kind, hit, found in (
        ("l3-l4", own_bits > 8, own),
        ("l4-only", any_bits > 8, anybody),
        ("l3-proto", own_bits == 8, own),
        ("proto-only", any_bits == 8, anybody),
        ("l3-only", own_bits == 0, own),
        ("all", any_bits == 0, anybody),
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


# Computed entries as policy maps have them.
#
# Source: the layout of ``cilium_policy_*``.


def map_key(key: Key, *, egress: bool) -> PolicyKey:
    """Where an entry stands in a policy map."""
    identity, ports = key
    return PolicyKey(identity, egress, *ports)  # protocol, port, bits


def map_entry(entry: Entry) -> PolicyEntry:
    """What stands there. A proxy of one port by which it knows what holds must not be passed by."""
    redirect = entry.redirect
    return PolicyEntry(
        deny=entry.deny,
        proxy_port=redirect.port if redirect is not None else 0,
        auth_type=0 if entry.deny else entry.auth_type,
        only_by_proxy=redirect is not None and redirect.filter_peers is not None,
    )
