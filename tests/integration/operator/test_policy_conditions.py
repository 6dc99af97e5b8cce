"""The operator writes a policy's validity to its status once, in Cilium's words."""

from __future__ import annotations

from typing import Any

import pytest

from cells.operator.policies import PolicyVerdict, with_condition
from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer, Fault, on
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators

pytestmark = pytest.mark.anyio
POLICIES = Resource("cilium.io", "ciliumnetworkpolicies")
CLUSTERWIDE = Resource("cilium.io", "ciliumclusterwidenetworkpolicies")
OTHER = {"type": "Other", "status": "True", "lastTransitionTime": "2025-01-01T00:00:00Z"}
SUCCEEDED = "Policy validation succeeded"
Json = dict[str, Any]


def policy(name: str, spec: Json, **status: Any) -> Json:
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"endpointSelector": {}, **spec},
        **({"status": status} if status else {}),
    }


def condition(server: ApiServer, name: str, kind: Resource = POLICIES) -> tuple[str, str] | None:
    """Status and message of an object's condition."""
    found = server.store.get(kind, ("default" if kind is POLICIES else "", name)) or {}
    conditions = (found.get("status") or {}).get("conditions") or ()
    return next(((one["status"], one["message"]) for one in conditions if one["type"] == "Valid"), None)


@pytest.mark.parametrize(
    ("port", "reason"),
    [
        ("70000", "value out of range"),
        ("80x!", "invalid syntax"),
        ("80-90", "invalid syntax"),
        ("my_port", "invalid syntax"),
        ("web/http", "invalid syntax"),
    ],
)
async def test_a_port_that_the_schema_lets_pass_is_reported_by_the_condition(
    server: ApiServer, operators: Operators, port: str, reason: str
) -> None:
    ports = {"ingress": [{"toPorts": [{"ports": [{"port": port}]}]}]}
    wrong = f'Unable to parse port: strconv.ParseUint: parsing "{port}": {reason}'
    async with operators.running({"cluster-pool-ipv4-cidr": "10.0.0.0/8"}):
        server.add(policy("port", ports))
        await eventually(lambda: condition(server, "port") == ("False", wrong), 30)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("bad key!", "name part must consist of alphanumeric characters"),
        ("a/b/c", "a qualified name must consist of"),
        ("Upper.example/x", "prefix part a lowercase RFC 1123 subdomain must consist of"),
        ("k8s:" + "x" * 64, "name part must be no more than 63 bytes"),
        ("example.com/", "name part must be non-empty"),
    ],
)
async def test_an_invalid_label_is_reported_by_name(
    server: ApiServer, operators: Operators, key: str, wrong: str
) -> None:
    async with operators.running({"cluster-pool-ipv4-cidr": "10.0.0.0/8"}):
        server.add(policy("key", {"ingress": [{"fromEndpoints": [{"matchLabels": {key: "x"}}]}]}))
        await eventually(lambda: condition(server, "key") is not None, 30)
        status, message = condition(server, "key") or ("", "")
        assert status == "False"
        assert message.startswith("invalid label selector: matchLabels: Invalid value: ")
        assert wrong in message


async def test_rules_with_node_selectors_are_valid_only_with_enable_node_selector_labels(
    server: ApiServer, operators: Operators
) -> None:
    pool = {"cluster-pool-ipv4-cidr": "10.0.0.0/8"}
    nodes = policy("nodes", {"ingress": [{"fromNodes": [{}]}]})
    async with operators.running(pool):
        server.add(nodes)
        await eventually(lambda: (condition(server, "nodes") or ("", ""))[0] == "False", 30)
    async with operators.running(pool | {"enable-node-selector-labels": "true"}):
        await eventually(lambda: condition(server, "nodes") == ("True", SUCCEEDED), 30)


async def test_a_policy_condition_is_retried_after_a_refused_write(
    server: ApiServer, operators: Operators
) -> None:
    where = on("/apis/cilium.io/v2/namespaces/default/ciliumnetworkpolicies/one/status", method="PUT")
    server.faults.add(Fault(where, times=2, status=409))
    server.faults.add(Fault(where, times=1, status=500))
    async with operators.running():
        server.add(policy("one", {}))
        await eventually(lambda: condition(server, "one") == ("True", SUCCEEDED), 30)


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (
            {"toPorts": [{"ports": [{"port": "53"}], "rules": {"dns": [{"matchPattern": "*"}]}}]},
            "leave dns out",
        ),
        ({"toFQDNs": [{"matchName": "example.org"}]}, "use toCIDR"),
    ],
)
async def test_names_in_policies_of_the_node_itself_are_refused_with_the_reason(
    server: ApiServer, operators: Operators, rule: Json, wrong: str
) -> None:
    host = {**policy("host", {}), "kind": "CiliumClusterwideNetworkPolicy", "metadata": {"name": "host"}}
    async with operators.running({"cluster-pool-ipv4-cidr": "10.0.0.0/8"}):
        server.add({**host, "spec": {"nodeSelector": {}, "egress": [rule]}})
        await eventually(lambda: condition(server, "host", CLUSTERWIDE) is not None, 30)
        status, message = condition(server, "host", CLUSTERWIDE) or ("", "")
        assert status == "False"
        assert wrong in message
        assert "the node itself" in message


def test_conditions_of_others_stay_in_their_place() -> None:
    verdict = PolicyVerdict("CiliumNetworkPolicy", "default", "p", "u", valid=True, message=SUCCEEDED)
    live = {**policy("p", {}, conditions=[OTHER]), "metadata": {"name": "p", "uid": "u"}}
    first = with_condition(verdict, live)
    assert first is not None
    other, valid = first["status"]["conditions"]
    assert other == OTHER
    assert with_condition(verdict, first) is None
    first["status"]["conditions"].append(OTHER)
    valid["message"] = "in other words"
    again = with_condition(verdict, first)
    assert again is not None
    assert [one["type"] for one in again["status"]["conditions"]] == ["Other", "Valid", "Other"]
    assert again["status"]["conditions"][1]["lastTransitionTime"] == valid["lastTransitionTime"]


def test_another_object_of_the_name_is_left_alone() -> None:
    verdict = PolicyVerdict("CiliumNetworkPolicy", "default", "p", "u", valid=True, message=SUCCEEDED)
    assert with_condition(verdict, {"metadata": {"name": "p", "uid": "another"}}) is None
