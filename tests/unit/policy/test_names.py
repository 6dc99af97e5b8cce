"""Addresses of DNS names in policies: their identities, in policy maps and the ipcache."""

from __future__ import annotations

import json
from collections import Counter
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from cells.base.addresses import IPNetwork
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy.labels import canonical_name
from lifecycle.testing import eventually
from tests.support.counts import Count
from tests.unit.policy.replay import Json, load, names
from tests.unit.policy.room import PORT, Room, room

pytestmark = pytest.mark.anyio

ONE, TWO = ip_address("198.51.100.1"), ip_address("198.51.100.2")
WEB = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: names, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: cart}}
  egress:
    - toFQDNs: [{matchPattern: "*.example"}]
      toPorts: [{ports: [{port: "443", protocol: TCP}]}]
    - toEntities: [world]
      toPorts: [{ports: [{port: "53", protocol: UDP}], rules: {dns: [{matchName: a.example}]}}]
"""


def labels_of(node: Room) -> dict[str, tuple[str, ...]]:
    """By prefix, what verdicts on packets follow from; prefixes of the node are left out."""
    found = {}
    for prefix, number in node.kernel.identities.items():
        identity = node.identities.get(number)
        if identity is not None and number >> 24 == 1:
            found[prefix] = identity.labels
    return found


async def test_a_name_opens_the_port_for_its_addresses_and_not_longer_than_it_has_them(
    tmp_path: Path,
) -> None:
    async with room(tmp_path, proxy=PORT) as node:
        node.write(WEB)
        dns = PolicyKey(2, egress=True, protocol=17, port=53, port_bits=16)
        await eventually(lambda: node.entries.get(dns) == PolicyEntry(proxy_port=PORT))
        await eventually(lambda: not node.names.selectors_changed)
        node.names.learn("a.example.", [ONE])
        node.names.learn("b.example.", [ONE, TWO])
        assert node.names.stale([ONE])
        await node.names.wait_written([ONE, TWO])
        number = node.kernel.identities[f"{ONE}/32"]
        assert number == node.kernel.identities[f"{TWO}/32"], "the same labels are one identity"
        assert labels_of(node)[f"{ONE}/32"] == ("fqdn:*.example", "reserved:world")
        web = PolicyKey(number, egress=True, protocol=6, port=443, port_bits=16)
        assert node.entries[web] == PolicyEntry()
        node.names.forget("a.example.", [ONE])
        await node.names.wait_written([ONE])
        assert f"{ONE}/32" in node.kernel.identities, "the other name has it"
        node.names.forget("b.example.", [ONE, TWO])
        await eventually(lambda: not labels_of(node) and web not in node.entries)


async def test_a_name_that_no_rule_speaks_of_costs_no_identity_until_one_does(tmp_path: Path) -> None:
    async with room(tmp_path, proxy=PORT) as node:
        node.names.learn("a.example.", [ONE])
        assert not node.names.stale([ONE])
        node.write(WEB)
        await eventually(lambda: f"{ONE}/32" in labels_of(node))
        (node.folder / "policy.yaml").unlink()
        await eventually(lambda: not labels_of(node))


async def test_a_rule_for_the_address_itself_holds_beside_the_rule_for_its_name(tmp_path: Path) -> None:
    async with room(tmp_path, proxy=PORT) as node:
        node.write(WEB)
        node.names.learn("a.example.", [ONE])
        await eventually(lambda: f"{ONE}/32" in labels_of(node))
        deny = WEB.replace("name: names", "name: deny").partition("  egress:")[0]
        node.write(f"{deny}  egressDeny:\n    - toCIDR: [{ONE}/32]\n", "deny.yaml")
        both = (f"cidr:{ONE}/32", "fqdn:*.example", "reserved:world")
        await eventually(lambda: labels_of(node).get(f"{ONE}/32") == both)
        number = node.kernel.identities[f"{ONE}/32"]
        await eventually(lambda: node.entries[PolicyKey(number, egress=True)] == PolicyEntry(deny=True))
        (node.folder / "deny.yaml").unlink()
        await eventually(lambda: labels_of(node).get(f"{ONE}/32") == both[1:])


with_answers = [name for name in names() if load(name).get("dns_answers")]


def without_requests(value: Json) -> Json:
    """The objects without what no proxy of this agent reads: the owners of addresses do not depend on it."""
    if isinstance(value, list):
        return [without_requests(one) for one in value]
    if isinstance(value, dict):
        return {key: without_requests(one) for key, one in value.items() if key != "rules" or "dns" in one}
    return value


@pytest.mark.parametrize("name", with_answers)
async def test_a_recorded_fqdn_case_is_reproduced(name: str, tmp_path: Path, count: Count) -> None:
    """The identities that Cilium's engine gave the addresses, by their labels."""
    recording = load(name)
    config, expected = recording["config"], recording["expect"]
    async with room(tmp_path, proxy=PORT, ipv6=config["enable-ipv6"]) as node:
        objects = map(json.dumps, without_requests(recording["objects"]))
        (tmp_path / "objects.yaml").write_text("\n---\n".join(objects))
        accepted = sum(one["result"] == "accepted" for one in expected["imports"])
        await eventually(lambda: sum(one.valid for one in node.objects.all()) == accepted)
        for answer in recording["dns_answers"]:
            addresses = [ip_address(one) for one in answer["ips"]]
            node.names.learn(canonical_name(answer["name"]), addresses)
            await node.names.wait_written(addresses)
        labels = {one["id"]: tuple(one["labels"]) for one in recording["identities"]}
        wanted: dict[IPNetwork, tuple[str, ...]] = {
            ip_network(one["prefix"]): labels[one["identity"]] for one in expected["ipcache"]
        }
        wanted = {prefix: own for prefix, own in wanted.items() if prefix.prefixlen}
        await eventually(
            lambda: {ip_network(prefix): own for prefix, own in labels_of(node).items()} == wanted
        )
        count("recordings with names", Counter(replayed=1, addresses=len(wanted)))
