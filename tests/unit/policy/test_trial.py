"""Trying policies on flows: what is cut is what the rules deny when they are in force, by the same engine."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from cells.base.addresses import IPAddress
from cells.policy.compute.policies import DIRECTIONS
from cells.policy.control import PolicyView, RulePolicy
from cells.policy.control.http_redirects import DNSProxyPort, HTTPRedirects, http_proxy, http_redirects
from cells.policy.explain import UnanswerableError
from cells.policy.explain.trial import Tried, TriedFlow
from lifecycle.testing import fake
from tests.support.examples import scaled
from tests.unit.policy.plain import (
    AT,
    EVERYBODY,
    LABELS,
    PACKETS,
    RESERVED,
    SUBJECT,
    WORLD,
    reads,
    specs,
    world_of,
)

CART = {"endpointSelector": {"matchLabels": {"app": "cart"}}}


def policies(some: list[dict[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "kind": "CiliumNetworkPolicy",
            "metadata": {"name": f"p{number}", "namespace": "shop"},
            "spec": CART | spec,
        }
        for number, spec in enumerate(some, first)
    ]


def flow(direction: Any, peer: int | str, packet: tuple[int, int] = (6, 443), **more: Any) -> TriedFlow:
    """As the agent's flows show a connection of the subject."""
    labels: tuple[str, ...]
    if isinstance(peer, str):
        version = ip_address(peer).version
        number, labels, address = WORLD[version], (f"reserved:world-ipv{version}",), peer
    else:
        number, address = peer, AT.get(peer, "10.1.0.9")
        labels = LABELS.get(peer, (f"reserved:{RESERVED.get(peer, '')}",))
    fields: dict[str, Any] = {
        "node": "node-1",
        "direction": direction,
        "endpoint": 1,
        "identity": SUBJECT,
        "labels": LABELS[SUBJECT],
        "peer": number,
        "peer_labels": labels,
        "address": address,
        "names": (),
        "protocol": packet[0],
        "port": packet[1],
    }
    return TriedFlow(**fields | more)


def tried(
    world: RulePolicy,
    objects: list[dict[str, Any]],
    flows: Iterable[TriedFlow],
    names: dict[IPAddress, list[str]] | None = None,
) -> list[Tried]:
    world.compute(1, SUBJECT, LABELS[SUBJECT], ("shop", "cart"))
    trial = PolicyView(world, None).trial(objects, "node-1", lambda address: (names or {}).get(address, ()))
    return [trial.of(one) for one in flows]


@settings(deadline=None, max_examples=scaled(10))
@given(specs, specs)
def test_what_is_cut_is_what_the_rules_say_and_those_in_force_did_not(
    in_force: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    world, _ = world_of(in_force)
    together = [*more, *in_force[len(more) :]]  # one that is tried takes the place of its name
    asked = list(product(DIRECTIONS, EVERYBODY, PACKETS))
    for found, (direction, peer, packet) in zip(
        tried(world, policies(more), [flow(*one) for one in asked]), asked, strict=True
    ):
        before, after = (reads(some, direction, peer, packet) for some in (in_force, together))
        wanted = "passes" if after else "cut" if before else "denied"
        assert found.fate == wanted, (direction, peer, packet, in_force, more)
    assert world.repository.revision == world_of(in_force)[0].repository.revision, "nothing is in force"


@settings(deadline=None, max_examples=scaled(8))
@given(specs)
def test_networks_select_pods_where_the_node_has_it_so(more: list[dict[str, Any]]) -> None:
    world, _ = world_of([])
    world.repository.use(replace(world.repository.options, cidr_matches_pods=True))
    asked = list(product(DIRECTIONS, AT, PACKETS))
    for found, (direction, peer, packet) in zip(
        tried(world, policies(more), [flow(*one) for one in asked]), asked, strict=True
    ):
        passes = reads(more, direction, peer, packet, address=AT[peer])
        assert found.fate == ("passes" if passes else "cut"), (direction, peer, packet, more)


def egress(*rules: dict[str, Any]) -> list[dict[str, Any]]:
    return policies([{"egress": list(rules)}])


def test_the_rule_that_cuts_is_named_and_what_comes_near() -> None:
    world, _ = world_of([])
    denies = policies([{"egressDeny": [{"toCIDR": ["192.0.2.0/24"]}]}])
    (cut,) = tried(world, denies, [flow("egress", "192.0.2.1")])
    assert (cut.fate, cut.verdict) == ("cut", "deny")
    assert [one.text for one in cut.rules] == ["spec.egressDeny[0] of CiliumNetworkPolicy shop/p0"]
    allows = egress({"toCIDR": ["192.0.2.0/24"], "toPorts": [{"ports": [{"port": "80", "protocol": "TCP"}]}]})
    (cut,) = tried(world, allows, [flow("egress", "192.0.2.1")])
    assert (cut.fate, cut.verdict) == ("cut", "drop")
    assert [(one.source, one.path) for one in cut.rules] == [("CiliumNetworkPolicy shop/p0", "spec")]
    assert cut.near[0][1] == "it allows this peer on 80/TCP only"


DNS = {"toPorts": [{"ports": [{"port": "53", "protocol": "UDP"}], "rules": {"dns": [{"matchPattern": "*"}]}}]}


def test_addresses_of_names_are_known_by_the_names_that_dns_gave_them() -> None:
    world, _ = world_of([], names=fake(DNSProxyPort, port=7))
    named = {"toFQDNs": [{"matchName": "api.example.org"}]}
    there = flow("egress", "198.51.100.7")
    for rules, seen, known, fate, why in (
        ([named, DNS], ("api.example.org",), [], "passes", ""),
        ([named, DNS], (), ["api.example.org."], "passes", ""),
        ([named, DNS], ("www.example.org",), [], "cut", ""),
        ([named, DNS], (), [], "unknown", "the names of 198.51.100.7 are unknown"),
        ([named], ("api.example.org",), [], "unknown", "no rule lets the DNS proxy see the pod's lookups"),
    ):
        names = {ip_address("198.51.100.7"): known}
        (found,) = tried(world, egress(*rules), [replace(there, names=seen)], names)
        assert found.fate == fate, (rules, seen, known, found)
        assert why in found.why


def test_what_flows_do_not_show_is_not_known() -> None:
    requests = HTTPRedirects(http_redirects(), None, http_proxy())
    world, _ = world_of([], requests)
    web = {"fromEndpoints": [{}], "toPorts": [{"ports": [{"port": "web", "protocol": "TCP"}]}]}
    named = policies([{"ingress": [web]}])
    for changes, why in (
        ({"node": "node-2"}, "seen on node node-2, which enforces its policy"),
        ({"endpoint": 9}, "the pod is deleted, and rules name its ports (web)"),
        ({"peer": 0, "peer_labels": ()}, "the labels of 192.0.2.1 (identity 0) are unknown"),
        ({"identity": 4711, "labels": ()}, "the labels of identity 4711 are unknown"),
    ):
        (found,) = tried(world, named, [replace(flow("ingress", 1002), **changes)])
        assert found.fate == "unknown", (changes, found)
        assert why in found.why
    http = {"rules": {"http": [{"method": "GET", "path": "/public"}]}}
    read = {"toPorts": [{"ports": [{"port": "443", "protocol": "TCP"}]} | http]}
    (found,) = tried(world, policies([{"ingress": [read]}]), [flow("ingress", 1002)])
    assert (found.fate, found.verdict) == ("cut", "drop"), "no proxy reads requests"


def test_a_policy_that_is_refused_is_one_line_and_groups_are_taken_along() -> None:
    world, _ = world_of([])
    with pytest.raises(UnanswerableError, match=r"p0 is refused: .*must be of type cidr"):
        tried(world, egress({"toCIDR": ["300.0.0.0/8"]}), [])
    far = {"externalCIDRs": ["300.0.0.0/8"]}
    for wrong, reason in (
        ({}, "None is not supported: expected NetworkPolicy, CiliumNetworkPolicy, "),
        ({"kind": "CiliumNetworkPolicy", "metadata": {}}, "a CiliumNetworkPolicy is refused: it has no name"),
        ({"kind": "NetworkPolicy", "metadata": []}, r"Expected `object`, got `array` - at `\$.metadata`"),
        (
            {"kind": "CiliumCIDRGroup", "metadata": {"name": "g"}, "spec": far},
            "CiliumCIDRGroup g is refused: .*300.0.0.0.*: unable to parse IP",
        ),
    ):
        with pytest.raises(UnanswerableError, match=reason):
            tried(world, [wrong], [])
    group = {
        "kind": "CiliumCIDRGroup",
        "metadata": {"name": "partners"},
        "spec": {"externalCIDRs": ["198.51.100.0/24"]},
    }
    objects = [*egress({"toCIDRSet": [{"cidrGroupRef": "partners"}]}), group]
    found = tried(world, objects, [flow("egress", "198.51.100.7"), flow("egress", "192.0.2.1")])
    assert [one.fate for one in found] == ["passes", "cut"]
