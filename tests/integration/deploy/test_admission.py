"""The chart's admission policies for writes of agents, evaluated as the API server does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import kubernetes_validate
import pytest

from cells.kubernetes.objects.cilium_endpoint import NODE_NAME
from tests.support import chart

celpy = pytest.importorskip("celpy", reason="cel-python is not installed: make install-test")
pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")

AGENT: Final = "system:serviceaccount:kube-system:cilium"
CLAIM: Final = "authentication.kubernetes.io/node-name"


def escaped(value: Any) -> Any:
    """Fields as CEL in Kubernetes names them: ``security-labels`` is ``security__dash__labels``."""
    if not isinstance(value, dict):
        return value
    names = {key: key.replace("-", "__dash__") if key == "security-labels" else key for key in value}
    return {names[key]: escaped(one) for key, one in value.items()}


class Policies:
    """The policies of a rendered chart."""

    def __init__(self, **values: Any) -> None:
        found = chart.objects(values)
        self.policies = {
            one["metadata"]["name"]: one["spec"]
            for one in found.values()
            if one["kind"] == "ValidatingAdmissionPolicy"
        }
        bindings = [one for one in found.values() if one["kind"] == "ValidatingAdmissionPolicyBinding"]
        assert {one["spec"]["policyName"] for one in bindings} == self.policies.keys()
        assert all(one["spec"]["validationActions"] == ["Deny"] for one in bindings)

    def refusals(
        self,
        operation: str,
        resource: str,
        new: Mapping[str, Any] | None,
        old: Mapping[str, Any] | None = None,
        *,
        user: str = AGENT,
        node: str | None = "n1",
        group: str = "cilium.io",
    ) -> list[str]:
        """What the API server answers to a request; nothing where it is admitted."""
        about: dict[str, Any] = {"username": user}
        if node is not None:
            about["extra"] = {CLAIM: [node]}
        request = {"operation": operation, "userInfo": about}
        values = celpy.json_to_cel({"request": request, "object": escaped(new), "oldObject": escaped(old)})
        texts: list[str] = []
        for spec in self.policies.values():
            matched = any(
                group in rule["apiGroups"]
                and operation in rule["operations"]
                and resource in rule["resources"]
                for rule in spec["matchConstraints"]["resourceRules"]
            )
            conditions = spec["matchConditions"]
            if matched and all(evaluate(one["expression"], values, {}) for one in conditions):
                texts += self._answers(spec, values)
        return texts

    @staticmethod
    def _answers(spec: Mapping[str, Any], values: Any) -> list[str]:
        variables: dict[str, Any] = {}
        for one in spec.get("variables", ()):
            variables[one["name"]] = evaluate(one["expression"], values, variables)
        return [
            one.get("message") or str(evaluate(one["messageExpression"], values, variables))
            for one in spec["validations"]
            if not evaluate(one["expression"], values, variables)
        ]


def evaluate(expression: str, values: Mapping[str, Any], variables: Mapping[str, Any]) -> Any:
    environment = celpy.Environment()
    known = {**values, "variables": celpy.celtypes.MapType(variables)}
    return environment.program(environment.compile(expression)).evaluate(known)


@pytest.fixture(scope="module")
def policies() -> Policies:
    return Policies(annotateK8sNode=True)


def node(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"addresses": []}}


def endpoint(written_by: str | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "web", "namespace": "shop"}
    if written_by is not None:
        metadata["annotations"] = {NODE_NAME: written_by}
    return {"metadata": metadata, "status": {}}


def identity(**labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "4711"}, "security-labels": labels}


@pytest.mark.parametrize(("group", "resource"), [("cilium.io", "ciliumnodes"), ("", "nodes/status")])
def test_an_agent_writes_the_object_of_its_own_node_only(
    policies: Policies, group: str, resource: str
) -> None:
    for operation, new, old in (("CREATE", "n1", None), ("UPDATE", "n1", "n1"), ("DELETE", None, "n1")):
        asked = (operation, resource, node(new) if new else None, node(old) if old else None)
        assert policies.refusals(*asked, group=group) == []
        (text,) = policies.refusals(*asked, group=group, node="n2")
        assert text.endswith("of its own node only, n2")


def with_ipam(**ipam: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n1"}, "spec": {"ipam": ipam}}


def test_an_agent_assigns_no_range_where_the_operator_does(policies: Policies) -> None:
    one, two = with_ipam(podCIDRs=["10.1.0.0/24"]), with_ipam(podCIDRs=["10.1.0.0/24", "203.0.113.0/24"])
    assert policies.refusals("UPDATE", "ciliumnodes", one, one) == []
    assert policies.refusals("DELETE", "ciliumnodes", None, one) == []
    for operation, new, old in (("UPDATE", two, one), ("UPDATE", node("n1"), one), ("CREATE", one, None)):
        (text,) = policies.refusals(operation, "ciliumnodes", new, old)
        assert text == "the operator writes spec.ipam.podCIDRs, not an agent"
    by_node = Policies(ipam={"mode": "kubernetes"})
    assert by_node.refusals("UPDATE", "ciliumnodes", two, one) == []


def test_an_agent_gives_ranges_of_pools_back_and_takes_none() -> None:
    policies = Policies(ipam={"mode": "multi-pool"})

    def pools(**cidrs: list[str]) -> dict[str, Any]:
        allocated = [{"pool": pool, "cidrs": several} for pool, several in cidrs.items()]
        return with_ipam(pools={"requested": [{"pool": "default"}], "allocated": allocated})

    held = pools(default=["10.1.0.0/28", "10.1.0.16/28"], green=["10.2.0.0/28"])
    for fewer in (held, pools(default=["10.1.0.16/28"], green=["10.2.0.0/28"]), pools(), with_ipam(pools={})):
        assert policies.refusals("UPDATE", "ciliumnodes", fewer, held) == []
    assert policies.refusals("CREATE", "ciliumnodes", held) == []
    for more in (pools(default=["203.0.113.0/28"]), pools(green=["10.1.0.0/28"]), pools(red=["10.2.0.0/28"])):
        (text,) = policies.refusals("UPDATE", "ciliumnodes", more, held)
        assert text == "the operator adds ranges of pools, an agent only gives them back"


def test_a_token_without_a_node_writes_nothing_of_nodes(policies: Policies) -> None:
    objects: dict[str, dict[str, Any]] = {"ciliumnodes": node("n1"), "ciliumendpoints": endpoint("n1")}
    for resource, obj in objects.items():
        assert "the token is bound to no node" in policies.refusals("CREATE", resource, obj, node=None)[0]
        assert "the token is bound to no node" in policies.refusals("CREATE", resource, obj, node="")[0]


@pytest.mark.parametrize(
    "user",
    [
        "system:serviceaccount:kube-system:cilium-operator",
        "system:serviceaccount:kube-system:generic-garbage-collector",
        "system:serviceaccount:shop:cilium",
        "admin",
    ],
)
def test_admission_policies_ignore_other_users(policies: Policies, user: str) -> None:
    for resource, obj in (("ciliumnodes", node("n2")), ("ciliumendpoints", endpoint("n2"))):
        assert policies.refusals("UPDATE", resource, obj, obj, user=user, node=None) == []
    assert policies.refusals("DELETE", "ciliumidentities", None, identity(app="a"), user=user) == []


def test_an_agent_writes_endpoints_that_name_its_own_node(policies: Policies) -> None:
    own, foreign, unnamed = endpoint("n1"), endpoint("n2"), endpoint(None)
    asked = "ciliumendpoints"
    assert policies.refusals("CREATE", asked, own) == []
    assert policies.refusals("UPDATE", asked, own, own) == []
    assert policies.refusals("DELETE", asked, None, own) == []
    for new in (foreign, unnamed, {"metadata": {"name": "web", "annotations": {}}, "status": {}}):
        (text,) = policies.refusals("CREATE", asked, new)
        assert text.endswith("with the annotation network.cilium.io/node-name: n1")
    for operation, changed in (("UPDATE", own), ("DELETE", None)):
        (text,) = policies.refusals(operation, asked, changed, foreign)
        assert text == "the CiliumEndpoint is that of node n2, the agent is that of n1"
    assert len(policies.refusals("UPDATE", asked, foreign, foreign)) == 2
    assert len(policies.refusals("UPDATE", asked, unnamed, own)) == 1, "the name does not go again"


def test_an_agent_takes_over_endpoints_of_cilium(policies: Policies) -> None:
    for operation, new in (("UPDATE", endpoint("n1")), ("DELETE", None)):
        assert policies.refusals(operation, "ciliumendpoints", new, endpoint(None)) == []


def test_an_agent_changes_the_meaning_of_no_identity(policies: Policies) -> None:
    asked = "ciliumidentities"
    assert policies.refusals("CREATE", asked, identity(app="web"), node=None) == []
    used = {**identity(app="web"), "metadata": {"name": "4711", "annotations": {"a": "b"}}}
    assert policies.refusals("UPDATE", asked, used, identity(app="web")) == []
    for new in (identity(app="admin"), identity(), identity(app="web", team="a")):
        assert len(policies.refusals("UPDATE", asked, new, identity(app="web"))) == 1
    assert len(policies.refusals("DELETE", asked, None, identity(app="web"))) == 1


def test_the_chart_renders_admission_policies_for_the_given_values() -> None:
    names = {"cilium-agent-nodes", "cilium-agent-identities", "cilium-agent-endpoints"}
    assert Policies().policies.keys() == names
    assert Policies(annotateK8sNode=True).policies.keys() == {*names, "cilium-agent-k8s-nodes"}
    less = Policies(agentAdmissionPolicy={"ciliumEndpoints": False})
    assert less.policies.keys() == names - {"cilium-agent-endpoints"}
    assert not Policies(agentAdmissionPolicy={"enabled": False}).policies
    assert not Policies(agent=False).policies
    account = Policies(
        namespaceOverride="net", serviceAccounts={"cilium": {"name": "agent"}}, commonLabels={"team": "a"}
    )
    foreign = account.refusals("CREATE", "ciliumnodes", node("n2"), user="system:serviceaccount:net:agent")
    assert foreign


@pytest.mark.parametrize(
    ("version", "served"), [("v1.29.14", False), ("v1.30.0", True), ("v1.31.2-gke.1", True)]
)
def test_api_servers_before_1_30_get_none_unless_asked(version: str, served: bool) -> None:
    found = chart.objects({}, kubernetes=version)
    assert ("ValidatingAdmissionPolicy/cilium-agent-nodes" in found) is served
    asked = chart.objects({"agentAdmissionPolicy": {"enabled": True}}, kubernetes=version)
    assert "ValidatingAdmissionPolicy/cilium-agent-nodes" in asked


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.36"])
def test_kubernetes_takes_the_policies(version: str) -> None:
    for one in chart.objects({"annotateK8sNode": True}).values():
        if "Admission" in one["kind"]:
            kubernetes_validate.validate(one, version, strict=True)


def test_expressions_name_the_annotation_that_agents_write() -> None:
    text = chart.render({})["admission.yaml"]
    assert set(re.findall(r"network\.cilium\.io/[a-z-]+", text)) == {NODE_NAME}
