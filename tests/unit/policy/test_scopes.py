"""Scopes of policy selectors, and reasons of rejected objects, as in Cilium."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest

from cells.policy.compute.repository import Repository
from cells.policy.labels import LabelSet
from cells.policy.rules import PolicyError, PolicyOptions
from cells.policy.rules.peers import TranslationContext
from cells.policy.rules.translate import translate

WORLD = TranslationContext(PolicyOptions())
INIT = LabelSet.parse(["reserved:init"])
OUTSIDE = LabelSet.parse(["reserved:world"])
NODE = LabelSet.parse(["reserved:remote-node"])
NAMESPACE = "io.kubernetes.pod.namespace"
TEAM = "io.cilium.k8s.namespace.labels.team"
CART = LabelSet.parse(["k8s:app=cart", f"k8s:{NAMESPACE}=shop", f"k8s:{TEAM}=red"])


def policy(spec: dict[str, Any], name: str = "p", namespace: str = "shop") -> dict[str, Any]:
    """A CiliumNetworkPolicy, or a clusterwide one without a namespace."""
    if namespace:
        return {
            "kind": "CiliumNetworkPolicy",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
    return {"kind": "CiliumClusterwideNetworkPolicy", "metadata": {"name": name}, "spec": spec}


def selects(object_: dict[str, Any], labels: LabelSet) -> bool:
    repository = Repository(WORLD)
    repository.apply(object_)
    return bool(repository.selecting(labels))


def allows(object_: dict[str, Any], subject: LabelSet, peer: LabelSet) -> bool:
    """Whether the policy allows a peer to reach its subject."""
    repository = Repository(WORLD)
    repository.apply(object_)
    filters = repository.resolve(subject, "ingress").filters
    return any(selector.matches(peer) for one in filters for selector in one.selectors)


def not_in(key: str, value: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]}


def test_a_policy_of_a_namespace_selects_no_endpoint_in_init() -> None:
    spec = {"endpointSelector": {"matchLabels": {"reserved:init": ""}}, "ingress": [{}]}
    assert not selects(policy(spec), INIT)
    assert selects(policy(spec, namespace=""), INIT)


@pytest.mark.parametrize("key", [NAMESPACE, f"k8s:{NAMESPACE}"])
def test_a_condition_on_namespaces_in_a_subject_holds_beside_the_policys_own(key: str) -> None:
    assert not selects(policy({"endpointSelector": not_in(key, "shop"), "ingress": [{}]}), CART)
    assert selects(policy({"endpointSelector": not_in(key, "other"), "ingress": [{}]}), CART)


def test_another_namespace_in_a_subjects_labels_is_replaced() -> None:
    spec = {"endpointSelector": {"matchLabels": {f"k8s:{NAMESPACE}": "other"}}, "ingress": [{}]}
    assert selects(policy(spec), CART)


@pytest.mark.parametrize("outside", [OUTSIDE, NODE], ids=["world", "remote-node"])
def test_a_label_of_namespaces_that_is_excluded_opens_no_clusterwide_policy_to_what_has_no_namespace(
    outside: LabelSet,
) -> None:
    spec = {"endpointSelector": {}, "ingress": [{"fromEndpoints": [not_in(TEAM, "blue")]}]}
    assert allows(policy(spec, namespace=""), CART, CART)
    assert not allows(policy(spec, namespace=""), CART, outside)


def test_a_requirement_of_reserved_labels_is_limited_to_the_namespace() -> None:
    def spec(key: str) -> dict[str, Any]:
        absent = {"matchExpressions": [{"key": "reserved:host", "operator": "DoesNotExist"}]}
        endpoints = [{"matchLabels": {f"k8s:{NAMESPACE}": "other"}}] if key == "fromRequires" else [absent]
        return {"endpointSelector": {}, "ingress": [{"fromEndpoints": endpoints, "fromRequires": [absent]}]}

    other = LabelSet.parse([f"k8s:{NAMESPACE}=other"])
    assert not allows(policy(spec("fromRequires")), CART, other)
    assert allows(policy(spec("fromEndpoints")), CART, CART)


MASKS = ["10.0.0.0/255.0.0.0", "10.0.0.0/0.255.255.255", "fe80::%1/64", "10.0.0.0/08"]


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize("member", ["toCIDR", "toCIDRSet"])
def test_a_network_with_a_mask_or_a_zone_is_refused(text: str, member: str) -> None:
    networks = [text] if member == "toCIDR" else [{"cidr": text}]
    with pytest.raises(PolicyError, match="must be of type cidr") as caught:
        translate(policy({"endpointSelector": {}, "egress": [{member: networks}]}), WORLD)
    assert caught.value.stage == "schema"


NO_RULE = 'Unable to parse CIDRRule "{0}": netip.ParsePrefix("{0}"): '


@pytest.mark.parametrize(
    ("cidr", "excepted", "reason"),
    [
        ("10.0.0.0/33", [], f"{NO_RULE}prefix length out of range"),
        ("10.0.0.0/255.0.0.0", [], f'{NO_RULE}bad bits after slash: "255.0.0.0"'),
        ("fe80::%eth0/64", [], f"{NO_RULE}IPv6 zones cannot be present in a prefix"),
        ("10.0.0.0/8", ["ten/16"], 'netip.ParsePrefix("ten/16"): ParseAddr("ten"): unable to parse IP'),
    ],
)
def test_a_block_of_a_network_policy_is_refused_in_ciliums_words(
    cidr: str, excepted: list[str], reason: str
) -> None:
    metadata = {"name": "p", "namespace": "shop"}
    spec = {"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": cidr, "except": excepted}}]}]}
    with pytest.raises(PolicyError) as caught:
        translate({"kind": "NetworkPolicy", "metadata": metadata, "spec": spec}, WORLD)
    assert caught.value.reason == reason.format(cidr)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (
            {"key": "app", "operator": "NotIn"},
            "Required value: must be specified when `operator` is 'In' or 'NotIn'",
        ),
        (
            {"key": "app", "operator": "Exists", "values": ["a"]},
            "Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
        ),
    ],
)
def test_a_network_policy_with_values_that_do_not_go_with_their_operator_is_refused(
    expression: Any, reason: str
) -> None:
    metadata = {"name": "p", "namespace": "shop"}
    spec = {"podSelector": {"matchExpressions": [expression]}, "ingress": [{}]}
    with pytest.raises(PolicyError) as caught:
        translate({"kind": "NetworkPolicy", "metadata": metadata, "spec": spec}, WORLD)
    assert caught.value.reason == f"invalid label selector: matchExpressions[0].values: {reason}"


IN_WITHOUT_VALUES = {"matchExpressions": [{"key": "app", "operator": "In"}]}
PORT_TOO_LARGE = [{"ports": [{"port": "65536", "protocol": "TCP"}]}]
OUTSIDE_OF_ITS_PREFIX = [{"cidr": "10.0.0.0/8", "except": ["192.0.2.0/24"]}]
NODES_OFF = 'FromNodes/ToNodes rules can only be applied when the "enable-node-selector-labels" flag is set'


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"fromEndpoints": [IN_WITHOUT_VALUES], "toPorts": PORT_TOO_LARGE}, "invalid label selector"),
        ({"fromRequires": [IN_WITHOUT_VALUES], "toPorts": PORT_TOO_LARGE}, "invalid label selector"),
        ({"fromNodes": [IN_WITHOUT_VALUES], "toPorts": PORT_TOO_LARGE}, "Unable to parse port"),
        ({"fromCIDRSet": OUTSIDE_OF_ITS_PREFIX, "toPorts": PORT_TOO_LARGE}, "Unable to parse port"),
        ({"fromNodes": [{}], "toPorts": PORT_TOO_LARGE}, "Unable to parse port"),
        ({"fromNodes": [IN_WITHOUT_VALUES]}, "invalid label selector"),
        ({"fromNodes": [{}]}, NODES_OFF),
    ],
)
@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_of_two_faults_of_a_rule_the_one_that_cilium_finds_first_is_reported(
    members: dict[str, Any], reason: str, direction: str
) -> None:
    if direction == "egress":
        members = {key.replace("from", "to"): value for key, value in members.items()}
    with pytest.raises(PolicyError) as caught:
        translate(policy({"endpointSelector": {}, direction: [members]}), WORLD)
    assert caught.value.reason.startswith(reason)


@pytest.mark.parametrize("member", ["matchName", "matchPattern"])
def test_a_long_name_that_is_none_is_refused_at_once(member: str) -> None:
    spec = {"endpointSelector": {}, "egress": [{"toFQDNs": [{member: "a" * 250 + "!"}]}]}
    with pytest.raises(PolicyError, match="matching regex"):
        translate(policy(spec), WORLD)


def test_rules_stay_in_the_order_of_their_objects_whatever_was_deleted_before() -> None:
    repository = Repository(WORLD)
    spec: dict[str, Any] = {"endpointSelector": {}, "ingress": [{}]}
    for name in ("first", "second", "third"):
        repository.apply(policy(spec, name))
    for name in ("first", "second"):
        repository.delete(next(one for one in repository.sources() if one.name == name))
    repository.apply(policy(spec, "fourth"))
    assert [rule.source.name for rule in repository.selecting(CART)] == ["third", "fourth"]


def test_a_cidr_group_that_changes_has_only_policies_translated_anew_that_name_it() -> None:
    repository = Repository(WORLD)
    for name in ("corp", "partners"):
        egress = [{"toCIDRSet": [{"cidrGroupRef": name}]}]
        repository.apply(policy({"endpointSelector": {}, "egress": egress}, name))
    changed, failed = repository.follow(
        TranslationContext(PolicyOptions(), {"corp": (ip_network("192.0.2.0/24"),)}), {"corp"}
    )
    assert not failed
    assert {rule.source.name for rule in changed.rules} == {"corp"}
    assert repository.prefixes() == {ip_network("192.0.2.0/24")}
