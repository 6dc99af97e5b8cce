"""What proxies let through is what one reads in the rules of HTTP requests and of names.

A request passes where a rule that matches it allows it. Two readings leave room, as in Cilium: behind a rule
of requests for a port, rules without ports open nothing; and of two rules for ports that do not say the same
ports, the one that the datapath finds may open what the other does not speak of.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cells.policy.control.http_redirects import DNSProxyPort, HTTPRedirects, http_proxy, http_redirects
from cells.policy.control.names import NameRules
from lifecycle.testing import fake
from tests.support.examples import scaled
from tests.unit.policy.plain import (
    EVERYBODY,
    LABELS,
    SUBJECT,
    TCP,
    UDP,
    Rule,
    decisive,
    identity_of,
    indexed,
    peers,
    ports,
    reads,
    speaks,
    world_of,
)

DNS_PORT = 4000
PATHS = "/cart", "/shop"
NAMES = "cart.example.", "shop.example."
PACKETS = (TCP, 79), (TCP, 80), (TCP, 81), (UDP, 81), (TCP, 443), (UDP, 443)
HOST = 1

requests = st.builds(
    lambda numbers, paths: {
        "toPorts": [
            {
                "ports": [{"port": one, "protocol": "TCP"} for one in numbers],
                "rules": {"http": [{"path": path} for path in paths]},
            }
        ]
    },
    st.lists(st.sampled_from(("80", "443", "web")), min_size=1, max_size=2, unique=True),
    st.lists(st.sampled_from(PATHS), min_size=1, max_size=2, unique=True),
)
names = st.builds(
    lambda protocol, asked: {
        "toPorts": [
            {
                "ports": [{"port": "81", "protocol": protocol}],
                "rules": {"dns": [{"matchName": name} for name in asked]},
            }
        ]
    },
    st.sampled_from(("TCP", "UDP", "ANY")),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True),
)


def rule(direction: str, what: st.SearchStrategy[Rule]) -> st.SearchStrategy[Rule]:
    way = "from" if direction == "ingress" else "to"
    return st.builds(lambda who, what: {f"{way}{key}": one for key, one in who.items()} | what, peers, what)


def section(direction: str) -> st.SearchStrategy[dict[str, Any]]:
    read = requests if direction == "ingress" else requests | names
    return st.builds(
        lambda allows, denies, closed: {
            direction: allows,
            **({f"{direction}Deny": denies} if denies else {}),
            **({"enableDefaultDeny": {direction: closed}} if closed is not None else {}),
        },
        st.lists(rule(direction, read | read | ports), min_size=1, max_size=3),
        st.lists(rule(direction, ports), max_size=1),
        st.sampled_from((None, None, True, False)),
    )


def spoken(
    specs: list[dict[str, Any]], direction: str, peer: int | str, packet: tuple[int, int]
) -> list[Rule]:
    """The entries of ``toPorts`` of the allowing rules that speak of a packet."""
    return [
        entry
        for spec in specs
        for one in spec.get(direction, ())
        for entry in one.get("toPorts", ())
        if speaks({**one, "toPorts": [entry]}, peer, packet)
    ]


def passes(entry: Rule, what: str) -> bool:
    """Whether an entry lets a request to a path pass, or a query for a name."""
    rules = [one for some in entry.get("rules", {}).values() for one in some]
    return not rules or any(what in (one.get("path"), one.get("matchName")) for one in rules)


class Proxies:
    """A port of each redirect of requests."""

    serves = True

    def __init__(self) -> None:
        self._given: dict[str, int] = {}

    def port(self, name: str) -> int:
        return self._given.setdefault(name, 10000 + len(self._given))


@settings(deadline=None, max_examples=scaled(60), derandomize=True)  # the same ones in every run
@given(st.lists(st.sampled_from(("ingress", "egress")).flatmap(section), min_size=1, max_size=3))
def test_what_a_proxy_lets_through_is_what_the_rules_say(specs: list[dict[str, Any]]) -> None:
    table = http_redirects()
    redirects = HTTPRedirects(table, Proxies(), http_proxy())
    world, prefixes = world_of(specs, redirects, fake(DNSProxyPort, port=DNS_PORT))
    entries = indexed(world.compute(1, SUBJECT, LABELS[SUBJECT], ("shop", "cart")).entries)
    asked = NameRules(world)
    behind = {row.port: row for row in table.all()}
    for direction, peer, packet in product(("ingress", "egress"), EVERYBODY, PACKETS):
        identity = identity_of(peer, prefixes)
        entry = decisive(entries, identity, direction == "egress", packet)
        assert entry.deny != reads(specs, direction, peer, packet), (direction, peer, packet, specs)
        if entry.deny:
            continue
        speaking = spoken(specs, direction, peer, packet)
        read = any("rules" in one for one in speaking)
        for what in NAMES if packet[1] == 81 else PATHS:
            if not entry.proxy_port:
                through = True
            elif entry.proxy_port == DNS_PORT:
                names = asked.of(1, identity, *packet)
                assert names is not None
                through = names.allows(what)
            else:
                rules = behind[entry.proxy_port].rules
                through = rules is None or any(one.path == what for one in rules)
            case = direction, peer, packet, what, specs
            may = [passes(one, what) for one in speaking]
            if not read:
                assert not entry.proxy_port, case
            elif (direction, peer) == ("ingress", HOST):
                assert through or _names_host(specs), case
            elif all(may):
                assert through, case
            elif not any(may):
                assert not through, case


def _names_host(specs: list[dict[str, Any]]) -> bool:
    """Whether a rule means the node by name: then the rule's conditions for requests apply to it."""
    entities = {
        one for spec in specs for rule in spec.get("ingress", ()) for one in rule.get("fromEntities", ())
    }
    return not entities.isdisjoint(("host", "cluster"))
