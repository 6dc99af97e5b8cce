"""During a policy map update, no packet gets a verdict that neither policy has.

The agent may be killed after any of the writes, and packets come between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cells.maps.policy_map import PolicyMap
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.specs import policy_spec
from cells.policy.compute import Entry, Key, PortKey, Redirect
from cells.policy.compute.map_state import (
    ANY_IDENTITY,
    Entries,
    identity_entries,
    lookup,
    map_entry,
    map_key,
    merge,
    wildcard_entries,
)
from tests.support.examples import scaled
from tests.support.fake_map import FakeMap

PROXY = Redirect(15001, 15001, "http")
PEERS = (ANY_IDENTITY, 300, 301)
PORTS = (
    PortKey(),
    PortKey(6),
    PortKey(17),
    PortKey(6, 80, 16),
    PortKey(6, 80, 12),
    PortKey(6, 64, 10),
    PortKey(17, 80, 16),
)
PACKETS = [*product((300, 301, 302), (6,), (80, 81, 64, 1)), *product((300, 302), (17, 1), (80, 1))]
ALLOW, READ, DENY = "allow", "read", "deny"
Rule = tuple[int, PortKey, str]
Policy = Mapping[int, Entries]
rules = st.lists(
    st.tuples(st.sampled_from(PEERS), st.sampled_from(PORTS), st.sampled_from((ALLOW, READ, DENY))),
    max_size=6,
)


def policy(spoken: list[Rule]) -> Policy:
    """What the rules (a peer, ports, what becomes of it) come to, by identity."""
    own: dict[int, Entries] = {peer: {} for peer in PEERS}
    for peer, ports, what in spoken:
        redirect = PROXY if what == READ and ports.bits else None
        merge(own[peer], ports, Entry(deny=what == DENY, redirect=redirect))
    wildcard = wildcard_entries(own[ANY_IDENTITY])
    others = {
        peer: identity_entries(own[peer], wildcard) for peer in PEERS if own[peer] and peer != ANY_IDENTITY
    }
    return {ANY_IDENTITY: wildcard, **others}


def entries(of: Policy) -> dict[PolicyKey, PolicyEntry]:
    return {
        map_key(Key(peer, ports), egress=False): map_entry(entry)
        for peer, found in of.items()
        for ports, entry in found.items()
    }


class Recorded(FakeMap[bytes, bytes]):
    """A map that remembers how it was after every single write."""

    def __init__(self) -> None:
        super().__init__(replace(policy_spec(1, 16384), invalidates=1))
        self.states: list[dict[bytes, bytes]] = []

    def _changed(self, key: bytes, value: bytes | None, invalidated: int | None) -> None:
        super()._changed(key, value, invalidated)
        self.states.append(dict(self.raw))

    def policies(self) -> Iterator[Policy]:
        for state in self.states:
            found: dict[int, Entries] = {}
            for packed, value in state.items():
                key = PolicyKey.unpack(packed)
                ports = PortKey(key.protocol, key.port, key.port_bits)
                entry = PolicyEntry.unpack(value)
                redirect = PROXY if entry.proxy_port else None
                found.setdefault(key.identity, {})[ports] = Entry(deny=entry.deny, redirect=redirect)
            yield found


def _seen(verdict: str) -> str:
    """What a packet shows of it."""
    return "refused" if verdict in ("deny", "drop") else verdict


@settings(deadline=None, max_examples=scaled(150))
@given(rules, rules)
@example([(300, PortKey(6), DENY), (ANY_IDENTITY, PortKey(), ALLOW)], [])
@example(
    [(ANY_IDENTITY, PortKey(6, 80, 16), ALLOW)], [(ANY_IDENTITY, PortKey(6), ALLOW), (300, PortKey(), DENY)]
)
@example([], [(300, PortKey(), ALLOW), (300, PortKey(6, 80, 16), READ)])
@example([(300, PortKey(6, 80, 16), READ), (ANY_IDENTITY, PortKey(), ALLOW)], [])
def test_between_two_policies_the_map_is_never_wider_nor_narrower(old: list[Rule], new: list[Rule]) -> None:
    before, after = policy(old), policy(new)
    kernel = Recorded()
    assert kernel.epochs is not None
    slot = PolicyMap(1, kernel, kernel.epochs)
    slot.replace(entries(before))
    kernel.states.clear()
    slot.replace(entries(after))
    for between in kernel.policies():
        for packet in PACKETS:
            ways = {_seen(lookup(before, *packet).verdict), _seen(lookup(after, *packet).verdict)}
            assert _seen(lookup(between, *packet).verdict) in ways, (packet, between)
    assert {PolicyKey.unpack(key) for key in kernel.raw} == entries(after).keys()
