"""The datapath's lookup in computed entries: which entry decides on a packet.

Source: ``policy_can_access`` of Cilium's bpf/lib/policy.h: two longest-prefix matches, one with the peer's
identity and one with 0, and six classes in which the more specific port wins over the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from cells.policy.compute.entries import FULL_PORT, Entry, Key, PortKey
from cells.policy.compute.map_state import ANYBODY, Entries

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
        return redirect is not None and redirect.said is not None


def lookup(entries: Mapping[int, Entries], identity: int, protocol: int, port: int) -> Match:
    """Decide on a packet, by the entries of one direction by identity. For ICMP the port is the type."""
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
