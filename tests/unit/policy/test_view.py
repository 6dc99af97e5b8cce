"""Policies in the API: rules in Cilium's form, selectors, and an endpoint's policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cells.api.operations.policy import EndpointPolicyModels, PolicyOperations
from cells.endpoint import Endpoint, State
from cells.policy.control import PolicyView
from cells.policy.explain.reasons import OtherSide, decide
from cells.policy.labels import FQDNSelector, LabelSet
from cells.policy.selectors import Requirement, Selector, selector_text
from lifecycle.testing import eventually
from tests.unit.api.node import FixedFacts
from tests.unit.policy.room import CART, FRONTEND, WEB, Room, room

pytestmark = pytest.mark.anyio
NETWORK_POLICY = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: isolated, namespace: shop, uid: u-1}
spec:
  podSelector: {matchLabels: {app: cart}}
  policyTypes: [Ingress, Egress]
  ingress:
    - from:
        - namespaceSelector: {}
        - ipBlock: {cidr: 192.0.2.0/24, except: [192.0.2.128/25]}
      ports: [{port: 80, endPort: 90}, {protocol: UDP}]
"""


def test_selectors_read_as_cilium_writes_them() -> None:
    web = Selector.of([Requirement("any", "x", "NotIn", ("b", "a")), Requirement.label("k8s:app", "web")])
    assert selector_text(web) == (
        "&LabelSelector{MatchLabels:map[string]string{k8s.app: web,},MatchExpressions:[]"
        "LabelSelectorRequirement{LabelSelectorRequirement{Key:any.x,Operator:NotIn,Values:[b a],},},}"
    )
    assert selector_text(FQDNSelector("a.example")) == "MatchName: a.example, MatchPattern: "


def endpoint(node: Room) -> Endpoint:
    """The cart, as far as its policy is concerned."""
    return Endpoint(
        id=node.cart,
        container_id="c",
        container_ifname="eth0",
        ifname="lxc1",
        ifindex=7,
        pod_mac=b"",
        host_mac=b"",
        ipv4=None,
        pool="",
        identity=1000,
        labels=CART,
        pod_name="cart",
        pod_namespace="shop",
        pod_uid="",
        netns_cookie=0,
        state=State.READY,
        created=0.0,
    )


async def settled(node: Room, text: str) -> PolicyView:
    node.write(text)
    await eventually(lambda: [one.valid for one in node.objects.all()] == [True])
    await eventually(lambda: node.policies.status(node.cart).ingress_enforced)
    return PolicyView(node.policy, None)


async def test_the_rules_in_force_have_their_namespace_labels_and_default_deny(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        view = await settled(node, WEB)
        (rule,) = view.rules()
        assert rule["endpointSelector"] == {
            "matchLabels": {"any:app": "cart", "k8s:io.kubernetes.pod.namespace": "shop"}
        }
        (entry,) = rule["ingress"]
        assert entry["fromEndpoints"] == [
            {"matchLabels": {"any:app": "frontend", "k8s:io.kubernetes.pod.namespace": "shop"}}
        ]
        assert entry["toPorts"] == [{"ports": [{"port": "8080", "protocol": "TCP"}]}]
        assert rule["enableDefaultDeny"] == {"ingress": True, "egress": False}
        assert {"source": "k8s", "key": "io.cilium.k8s.policy.name", "value": "cart"} in rule["labels"]
        assert view.rules(["io.cilium.k8s.policy.name=cart"]) == [rule]
        assert view.rules(["k8s:io.cilium.k8s.policy.name=cake"]) == []
        operations = PolicyOperations(node.policies, view)
        shown = operations.policy(["k8s:io.cilium.k8s.policy.name=cart"])
        assert shown is not None
        assert json.loads(shown.policy) == [rule]
        assert operations.policy(["k8s:io.cilium.k8s.policy.name=cake"]) is None


async def test_a_network_policy_is_shown_as_its_translated_rule(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        (rule,) = (await settled(node, NETWORK_POLICY)).rules()
        ports = [
            {"ports": [{"port": "80", "protocol": "TCP", "endPort": 90}]},
            {"ports": [{"port": "0", "protocol": "UDP"}]},
        ]
        exists = [{"key": "k8s:io.kubernetes.pod.namespace", "operator": "Exists"}]
        block = {"cidr": "192.0.2.0/24", "except": ["192.0.2.128/25"]}
        assert rule["ingress"] == [
            {"fromEndpoints": [{"matchExpressions": exists}], "toPorts": ports},
            {"fromCIDRSet": [block], "toPorts": ports},
        ]
        assert rule["egress"] == [{}]


async def test_selectors_list_selected_identities_and_a_rule(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        view = await settled(node, WEB)
        await eventually(lambda: any(one.identities for one in view.selectors()))
        use, everybody = view.selectors()
        assert everybody.selector.startswith("&LabelSelector{MatchLabels:map[string]string{},")
        assert "any.app: frontend" in use.selector
        assert use.identities == (frontend.id,)
        assert use.users == 1
        assert "k8s:io.cilium.k8s.policy.name=cart" in map(str, use.labels)


RANGE = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cart, namespace: shop, uid: u-1}
spec:
  endpointSelector: {matchExpressions: [{key: app, operator: In, values: [cart]}]}
  ingress:
    - fromEndpoints:
        - matchLabels: {app: web}
        - matchExpressions: [{key: app, operator: In, values: [frontend]}]
      toPorts: [{ports: [{port: "8080", endPort: 8090, protocol: TCP}]}]
"""


async def test_selectors_and_ranges_are_shown_as_written(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        view = await settled(node, RANGE)
        (rule,) = view.rules()
        written = [{"key": "any:app", "operator": "In", "values": ["cart"]}]
        namespace = {"k8s:io.kubernetes.pod.namespace": "shop"}
        assert rule["endpointSelector"] == {"matchLabels": namespace, "matchExpressions": written}
        policy = EndpointPolicyModels(node.policies, view, FixedFacts(), None).of(endpoint(node)).realized
        (port,) = policy.l4.ingress
        assert port.rule.startswith('{"port":8080,"endPort":8090,"protocol":"TCP","l7-rules":[{')
        first, second = (selector for one in json.loads(port.rule)["l7-rules"] for selector in one)
        assert "{any.app: web,k8s.io.kubernetes.pod.namespace: shop,}" in first
        assert (
            "MatchExpressions:[]LabelSelectorRequirement{LabelSelectorRequirement{Key:any.app,Operator:In"
            in second
        )


async def test_an_endpoint_shows_identities_and_rules_of_both_directions(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        view = await settled(node, WEB)
        policy = EndpointPolicyModels(node.policies, view, FixedFacts(), None).of(endpoint(node)).realized
        assert policy.policy_enabled == "ingress"
        assert policy.allowed_ingress_identities == [1]
        assert policy.allowed_egress_identities == [0]
        (rule,) = policy.l4.ingress
        decoded = json.loads(rule.rule)
        assert (decoded["port"], decoded["protocol"]) == (8080, "TCP")
        assert [*rule.rules_by_selector.values()] == [rule.derived_from_rules]
        assert "k8s:io.cilium.k8s.policy.name=cart" in rule.derived_from_rules[0]
        assert policy.l4.egress == []


async def test_a_packet_is_decided_by_an_entry_that_knows_its_rules(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        view = await settled(node, WEB)
        await eventually(
            lambda: view.decide(node.cart, "ingress", frontend.id, 6, 8080, address=None).verdict == "allow"
        )
        entry = view.decide(node.cart, "ingress", frontend.id, 6, 8080, address=None).entry
        assert entry is not None
        assert [origin.path for origin in entry.origins] == ["spec.ingress[0]"]
        assert view.decide(node.cart, "ingress", frontend.id, 6, 80, address=None).verdict == "drop"
        assert view.decide(9999, "ingress", frontend.id, 6, 80, address=None).verdict == "drop"


async def test_a_rule_and_an_entry_say_why(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        view = await settled(node, WEB)
        await eventually(
            lambda: view.decide(node.cart, "ingress", frontend.id, 6, 8080, address=None).verdict == "allow"
        )
        policy = view.policy(node.cart, "ingress")
        assert policy is not None
        reason = decide(policy, OtherSide(frontend.id, LabelSet.parse(FRONTEND)), 6, 8080)
        assert [one.text for one in reason.origins] == ["spec.ingress[0] of CiliumNetworkPolicy shop/cart"]
        assert reason.entry_text == f"TCP, port 8080, identity {frontend.id} (l3-l4)"
        other = decide(policy, OtherSide(2, LabelSet.parse(("reserved:world",))), 6, 8080)
        assert not other.allowed
        assert [near.missing for near in other.near] != []
        assert view.policy(9999, "ingress") is None
