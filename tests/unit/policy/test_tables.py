"""The recorded lookup tables: prefixes without exceptions, labels, names, ports, ICMP types, entities."""

from __future__ import annotations

import json
from ipaddress import ip_network
from typing import Any

import msgspec
import pytest

from cells.base.labels import cidr_label
from cells.policy.labels import dns_pattern, except_prefixes, prefix_labels, sanitised_pattern
from cells.policy.rules import PROTOCOLS, PolicyError, PolicyOptions, icmp_type, is_service_name, masked_ports
from cells.policy.rules.peers import entities
from cells.policy.rules.schema import ICMPField
from tests.unit.policy.replay import DATA

TABLES: dict[str, Any] = json.loads((DATA / "tables.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", TABLES["cidr_except"], ids=lambda row: f"{row['cidr']}-{len(row['except'])}")
def test_a_prefix_without_exceptions_is_split(row: Any) -> None:
    remaining = except_prefixes(ip_network(row["cidr"]), [ip_network(one) for one in row["except"]])
    assert sorted(map(str, remaining)) == sorted(row["remaining"])


@pytest.mark.parametrize("row", TABLES["cidr_labels"], ids=lambda row: f"{row['prefix']}-{row['dual_stack']}")
def test_a_prefix_has_cidr_labels(row: Any) -> None:
    prefix = ip_network(row["prefix"])
    assert f"cidr:{cidr_label(prefix)}" == row["selector_label"]
    labels = prefix_labels(prefix, dual_stack=row["dual_stack"])
    assert sorted(map(str, labels)) == sorted(row["identity_labels"])
    if prefix.prefixlen:
        assert labels.prefixes == (prefix,)


@pytest.mark.parametrize("row", TABLES["fqdn_patterns"], ids=lambda row: str(row["pattern"]))
def test_match_patterns_match_dns_names(row: Any) -> None:
    pattern = dns_pattern(row["pattern"])
    assert sanitised_pattern(row["pattern"]) == row["sanitised"]
    assert pattern.pattern == row["regex"]
    names = TABLES["fqdn_pattern_candidates"]
    assert [name for name in names if pattern.fullmatch(name)] == row["matches"]


@pytest.mark.parametrize("row", TABLES["port_names"], ids=lambda row: str(row["port"]))
def test_named_ports_are_recognised(row: Any) -> None:
    assert is_service_name(row["port"]) == row["is_name"]


@pytest.mark.parametrize("row", TABLES["port_ranges"], ids=lambda row: f"{row['start']}-{row['end']}")
def test_a_port_range_is_split_into_prefixes(row: Any) -> None:
    prefixes = [
        {"port": port, "mask": (0xFFFF << (16 - bits)) & 0xFFFF, "end_port": port + (1 << (16 - bits)) - 1}
        for port, bits in masked_ports(row["start"], row["end"])
    ]
    assert prefixes == row["prefixes"]


@pytest.mark.parametrize("row", TABLES["icmp_types"], ids=lambda row: f"{row['field']}")
def test_icmp_types_are_read_by_name(row: Any) -> None:
    field = msgspec.convert(row["field"], ICMPField)
    if isinstance(field.type, int) and field.type > 255:  # upstream lets it through as a number
        row = {"error": f"ICMP type {field.type} is out of range: 0 to 255"}
    if "error" in row:
        with pytest.raises(PolicyError) as caught:
            icmp_type(field)
        assert str(caught.value).startswith(row["error"])
    else:
        known = icmp_type(field)
        assert (known.port, known.protocol) == (int(row["port"]), PROTOCOLS[row["protocol"].upper()])


@pytest.mark.parametrize("row", TABLES["entities"], ids=lambda row: str(row["entity"]))
def test_an_entity_has_its_selectors(row: Any) -> None:
    shown = [selector.as_object() for selector in entities([row["entity"]], PolicyOptions())]
    assert shown == [selector or "*" for selector in row["selectors"]]
