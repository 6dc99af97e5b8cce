"""Local identities for addresses outside the cluster, as recorded: by prefix or set of DNS names."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from cells.policy.labels import FQDNSelector, LabelSet, Prefix, address_labels, canonical_name, prefix_labels
from tests.unit.policy.exclusions import upstream_faults
from tests.unit.policy.replay import DIRECTIONS, Case, load, names


@pytest.mark.parametrize("name", [name for name in names() if "ipcache" in load(name)["expect"]])
def test_the_recorded_prefixes_have_the_recorded_labels(name: str) -> None:
    case = Case(name)
    case.import_objects()
    if upstream_faults(case):
        return
    expected = case.recording["expect"]
    dual = case.options.dual_stack
    prefixes = case.repository.prefixes()
    assert sorted(map(str, prefixes)) == sorted(expected.get("prefixes_referenced", ()))
    found: dict[Prefix, LabelSet] = {prefix: prefix_labels(prefix, dual_stack=dual) for prefix in prefixes}
    selectors = {
        peer
        for direction in DIRECTIONS
        for rule in case.repository.rules
        for entry in rule.of(direction)
        for peer in entry.peers or ()
        if isinstance(peer, FQDNSelector)
    }
    answers = case.recording.get("dns_answers", ())
    for address in {ip for answer in answers for ip in answer["ips"]}:
        asked = {canonical_name(answer["name"]) for answer in answers if address in answer["ips"]}
        meant = [one for one in selectors if any(map(one.matches_name, asked))]
        if meant:
            prefix = ip_network(address)
            found[prefix] = address_labels(prefix, meant, prefixes, dual_stack=dual)
    recorded = {
        ip_network(one["prefix"]): case.labels[one["identity"]]
        for one in expected["ipcache"]
        if case.labels[one["identity"]]
    }
    assert found == recorded
