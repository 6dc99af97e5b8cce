"""The CRDs equal Cilium's, field by field, except for the differences listed here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cells.operator.crds import Definition, definitions
from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer, StatusError
from tests.support.counts import Count
from tests.support.recordings import recordings

RECORDED = recordings("operator") / "crds"
DEFINITIONS = definitions(
    endpoints=True, endpoint_slices=True, local_redirects=True, egress_gateways=True, bgp=True
)
NOT_REGISTERED = {
    "ciliumenvoyconfigs": "listeners of users' own are not built",
    "ciliumclusterwideenvoyconfigs": "listeners of users' own are not built",
}

DIFFERENCES = {
    r"/conversion missing": "the API server fills it in",
    r"/names/listKind missing": "the API server fills it in",
    r"/subresources missing": "an empty one says nothing",
    r"/required .*'metadata'": "every object has metadata",
    r"ciliumloadbalancerippools .*/required": "a pool without a spec has no addresses",
    r"/x-kubernetes-preserve-unknown-fields added": "the struct is narrower: unknown fields are kept there",
    r"(alibaba-cloud|azure|eni|ipv6-pool|ipv6-used|release-ipv6s) missing": "kept as unknown fields",
    r"(controllers|health|log|visibility-policy-status|docker-\S+|container-name) missing": "kept so, too",
    r"(adding|allowed|denied|removing) missing": "kept so, too",
    r"static-ip-tags missing|assigned-static-ip missing": "kept so, too",
    r"/type/pattern": "ExtendedEchoReply without a blank, and no name twice",
    r"ciliumlocalredirectpolicies .*/(port|name|ip)/pattern": (
        "every alternative is anchored; ports that exist are taken"
    ),
    r"Entities/items/enum": "world-ipv4 and world-ipv6, which the agent knows",
    r"CIDRSet/items/(oneOf|properties/cidrGroupSelector)": "cidrGroupSelector, as in 1.17.0",
    r"/maxLength added 255": "a name of the DNS has no more, as in 1.17.0",
    r"Deny/.*/ports/maxItems added 40": "as for the rules that allow",
    r"nodeSelector added": "as in 1.17.0",
    r"CIDRs/items/pattern|alloc-cidr/pattern": "the same networks, anchored and without a stray letter",
    r"ciliumnetworkpolicies /versions\[0\]/additionalPrinterColumns": "the column Valid, as in 1.17.0",
    r"/additionalPrinterColumns\[\d\]/description missing": "it repeats the name",
    r"ciliumendpoints /versions\[0\]/additionalPrinterColumns": "no visibility policies, as in 1.17.0",
    r"(peer|local)Address/pattern": "the same addresses, with one way to write those within",
    r"ciliumbgp(cluster|node)configs .*peerASN/minimum": "0 takes any, as in 1.17.0",
    r"ciliumbgpclusterconfigs .*peerASN/default added 0": "as in 1.17.0",
    r"ciliumbgpnodeconfigoverrides .*/localASN added": "as in 1.17.0",
    r"ciliumbgp(cluster|peer)configs .*(properties/status added|/subresources/status added)": (
        "conditions, as in 1.17.0"
    ),
    r"ciliumclusterwide\S+ /versions\[0\]/additionalPrinterColumns": "the column Valid, as in 1.17.0",
}


def differences(recorded: Any, ours: Any, at: str = "") -> Iterator[str]:
    """Every place where ours is another, as text."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        for key in sorted(recorded.keys() | ours.keys()):
            where = f"{at}/{key}"
            if key not in ours:
                yield f"{where} missing"
            elif key not in recorded:
                yield f"{where} added {json.dumps(ours[key])[:60]}"
            else:
                yield from differences(recorded[key], ours[key], where)
    elif isinstance(recorded, list) and isinstance(ours, list):
        if all(isinstance(one, dict) for one in recorded + ours) and len(recorded) == len(ours):
            for number, (one, other) in enumerate(zip(recorded, ours, strict=True)):
                yield from differences(one, other, f"{at}[{number}]")
        elif sorted(map(str, recorded)) != sorted(map(str, ours)):
            yield f"{at} {recorded} {ours}"
    elif recorded != ours:
        yield f"{at} {recorded} {ours}"


def reason(plural: str, difference: str) -> str | None:
    return next((why for what, why in DIFFERENCES.items() if re.search(what, f"{plural} {difference}")), None)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda one: one.plural)
def test_a_definition_is_cilium_s_but_for_what_is_listed(definition: Definition, count: Count) -> None:
    recorded = json.loads((RECORDED / f"{definition.name}.json").read_text())
    found = list(differences(recorded["spec"], definition.body["spec"]))
    reasons = [(one, reason(definition.plural, one)) for one in found]
    assert [one for one, why in reasons if why is None] == []
    count("fields of custom resources that differ", Counter(why for _, why in reasons if why))


def test_every_recorded_definition_is_ours_or_left_out_with_a_reason(count: Count) -> None:
    ours = {one.name for one in DEFINITIONS}
    outcomes: Counter[str] = Counter()
    for path in RECORDED.glob("*.json"):
        name = path.name.removesuffix(".json")
        why = "compared" if name in ours else None
        why = why or next(why for start, why in NOT_REGISTERED.items() if name.startswith(start))
        outcomes[why] += 1
    count("recorded custom resources", outcomes)
    assert outcomes["compared"] == len(ours) == 20


RULE = {"endpointSelector": {"matchLabels": {"k8s:app": "web"}}}


def to_port(port: str) -> dict[str, Any]:
    return {"spec": {**RULE, "egress": [{"toPorts": [{"ports": [{"port": port}]}]}]}}


def of_peer(**peer: Any) -> dict[str, Any]:
    return {"spec": {"bgpInstances": [{"name": "i", "peers": [{"name": "p", **peer}]}]}}


OBJECTS: list[tuple[str, dict[str, Any], str]] = [
    ("CiliumNetworkPolicy", {"spec": RULE}, ""),
    ("CiliumNetworkPolicy", {"spec": RULE, "specs": [RULE]}, ""),
    ("CiliumNetworkPolicy", {"spec": {**RULE, "nodeSelector": {}}}, "oneOf"),
    ("CiliumNetworkPolicy", {"spec": {"ingress": []}}, "oneOf"),
    ("CiliumNetworkPolicy", {"spec": {**RULE, "ingress": [{"toPorts": [{"rules": {}}]}]}}, "oneOf"),
    ("CiliumNetworkPolicy", {"spec": {**RULE, "ingress": [{"fromEntities": ["world-ipv6"]}]}}, ""),
    ("CiliumNetworkPolicy", to_port("!"), "port"),
    ("CiliumNetworkPolicy", to_port("65536"), ""),
    ("CiliumNetworkPolicy", to_port("http"), ""),
    ("CiliumNetworkPolicy", {"spec": {**RULE, "egress": [{"toCIDR": ["10.0.0.0/33"]}]}}, "toCIDR"),
    ("CiliumNode", {"spec": {"eni": {"instance-type": "m5"}, "ipam": {"podCIDRs": ["10.0.0.0/24"]}}}, ""),
    ("CiliumPodIPPool", {"spec": {"ipv4": {"cidrs": ["10.0.0.0/16"], "maskSize": 24}}}, ""),
    ("CiliumPodIPPool", {"spec": {"ipv4": {"cidrs": [], "maskSize": 24}}}, "cidrs"),
    ("CiliumPodIPPool", {"spec": {"ipv4": {"cidrs": ["10.0.0.0/16"], "maskSize": 33}}}, "maskSize"),
    ("CiliumLoadBalancerIPPool", {"spec": {"blocks": [{"start": "10.0.0.1"}], "disabled": False}}, ""),
    ("CiliumEndpointSlice", {"endpoints": [], "namespace": "default"}, ""),
    ("CiliumIdentity", {"security-labels": {"k8s:app": "web"}}, ""),
    ("CiliumIdentity", {}, "security-labels"),
    ("CiliumBGPClusterConfig", of_peer(peerASN=0), ""),
    ("CiliumBGPClusterConfig", of_peer(peerASN=-1), "peerASN"),
]  # fmt: skip


@pytest.mark.anyio
async def test_the_server_accepts_valid_objects_and_refuses_invalid_ones() -> None:
    versions = {one.kind: one.body["spec"]["versions"][0]["name"] for one in DEFINITIONS}
    made = ApiServer()
    made.crd_delay = 0
    async with made.serving():
        for one in DEFINITIONS:
            made.add(one.body)
        await eventually(
            lambda: all(made.kinds.get("cilium.io", versions[one.kind], one.plural) for one in DEFINITIONS)
        )
        for number, (kind, body, refused) in enumerate(OBJECTS):
            obj = {
                "apiVersion": f"cilium.io/{versions[kind]}",
                "kind": kind,
                "metadata": {"name": f"one-{number}"},
                **body,
            }
            if not refused:
                retained = made.add(obj)
                assert {key: retained[key] for key in body} == body
                continue
            with pytest.raises(StatusError, match=refused):
                made.add(obj)
