"""``hive policy check``: faults in a folder of manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.policy.policy_command import SHOP, cnp, run, write


def findings(folder: Path) -> list[tuple[str, str, str]]:
    result = run("check", folder, "-o", "json")
    return [(one["where"], one["severity"], one["text"]) for one in json.loads(result.output)]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("apiVersion: v1\nkind: Pod\nmetadata: null\n", ("3", "metadata.name of the Pod is missing")),
        ("apiVersion: v1\nkind: Pod\nmetadata: [a]\n", ("3", "metadata.name of the Pod is missing")),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: 5\n",
            ("4", "metadata.name of the Namespace is 5, expected text"),
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n  labels: 5\n",
            ("5", "Pod a: metadata.labels: expected `object | null`, got `int`"),
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: 5\n",
            ("4", "Pod a: spec: expected `object`, got `int`"),
        ),
        (
            (
                "apiVersion: cilium.io/v2alpha1\nkind: CiliumCIDRGroup\nmetadata: {name: a}\n"
                "spec: {externalCIDRs: 7}\n"
            ),
            ("4", "CiliumCIDRGroup a: spec.externalCIDRs: expected `array | null`, got `int`"),
        ),
        (
            (
                "apiVersion: cilium.io/v2alpha1\nkind: CiliumCIDRGroup\nmetadata: {name: a}\n"
                "spec:\n  externalCIDRs:\n    - 10.0.0.0/8\n    - 10.0.0.0/255.0.0.0\n"
            ),
            (
                "7",
                (
                    'CiliumCIDRGroup a: spec.externalCIDRs[1]: netip.ParsePrefix("10.0.0.0/255.0.0.0"):'
                    ' bad bits after slash: "255.0.0.0"'
                ),
            ),
        ),
        (
            "apiVersion: cilium.io/v1\nkind: CiliumNetworkPolicy\nmetadata: {name: a}\n",
            ("1", "CiliumNetworkPolicy is read as cilium.io/v2 only, not cilium.io/v1"),
        ),
        (
            "kind: Pod\nmetadata: {name: a}\n",
            ("1", "Pod is read as v1 only, not without apiVersion"),
        ),
    ],
)
def test_an_object_that_the_agent_ignores_is_reported(
    tmp_path: Path, text: str, finding: tuple[str, str]
) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    line, what = finding
    assert findings(tmp_path) == [(f"a.yaml:{line}", "error", what)]


def test_what_is_null_is_absent_to_the_check_too(tmp_path: Path) -> None:
    text = (
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n"
        "metadata: {name: a, namespace: shop, labels: null, creationTimestamp: 2025-01-15T10:00:00Z}\n"
        "spec: {podSelector: {matchLabels: {app: cart}}, ingress: [{from: null, ports: null}]}\n"
        "status: null\n"
    )
    assert [one for one in findings(write(tmp_path, text)) if one[1] == "error"] == []


def test_a_good_folder_has_no_error() -> None:
    assert {severity for _, severity, _ in findings(SHOP)} == {"note"}


def test_an_invalid_policy_is_reported_with_its_line(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        cnp(
            "  endpointSelector: {}\n  ingress:\n    - toPorts:\n"
            '        - ports:\n            - {port: "70000"}\n'
        ),
    )
    where, severity, text = findings(folder)[-1]
    assert (where, severity) == ("policy.yaml:9", "error")
    assert "value out of range" in text


def test_a_deny_rule_that_cannot_be_read_is_an_error_with_its_line(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        cnp(
            "  endpointSelector: {}\n  ingressDeny:\n    - toPorts:\n"
            '        - ports:\n            - {port: "70000"}\n'
        ),
    )
    found = [one for one in findings(folder) if one[1] == "error"]
    assert [where for where, *_ in found] == ["policy.yaml:9"]
    assert found[0][2].endswith("; until it is corrected, it denies everything that it might select")


def test_misspelt_fields_and_labels_are_reported_with_suggestions(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        cnp(
            "  endpointSelector: {matchLabels: {app: crat}}\n"
            "  ingress:\n    - fromEndpoint: [{}]\n    - fromEndpoints: [{matchLabels: {teir: web}}]\n"
        ),
    )
    texts = [text for _, _, text in findings(folder)]
    assert any("did you mean fromEndpoints?" in text for text in texts)
    assert any("selects no pod: no pod has app=crat; did you mean app=cart?" in text for text in texts)
    assert any("no pod has the label teir; did you mean tier?" in text for text in texts)


def test_a_redundant_rule_is_reported(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        cnp(
            "  endpointSelector: {matchLabels: {app: cart}}\n  ingress:\n"
            "    - fromEndpoints: [{}]\n"
            "    - fromEndpoints: [{matchLabels: {app: frontend}}]\n"
            "    - fromEntities: [world]\n"
        ),
    )
    warnings = [(where, text) for where, severity, text in findings(folder) if severity == "warning"]
    assert warnings == [
        (
            "policy.yaml:8",
            "this rule of CiliumNetworkPolicy shop/p has no effect: other rules decide everything it selects",
        )
    ]


def test_a_port_name_without_a_pod_is_reported(tmp_path: Path) -> None:
    def pod(name: str, ports: str) -> str:
        spec = f"{{containers: [{{name: c, image: i, ports: [{ports}]}}]}}"
        metadata = f"{{name: {name}, namespace: shop, labels: {{app: {name}}}}}"
        return f"---\napiVersion: v1\nkind: Pod\nmetadata: {metadata}\nspec: {spec}\n"

    peer = "{matchLabels: {app: b}}"

    def rule(way: str, name: str, protocol: str = "TCP") -> str:
        return f"  - {way}: [{peer}]\n    toPorts: [{{ports: [{{port: {name}, protocol: {protocol}}}]}}]\n"

    (tmp_path / "pods.yaml").write_text(
        pod("a", "{name: http, containerPort: 80}, {name: admin, containerPort: 1}")
        + pod("b", "{name: admin, containerPort: 2}, {name: query, containerPort: 3, protocol: UDP}")
    )
    spec = (
        "  endpointSelector: {matchLabels: {app: a}}\n  ingress:\n"
        + rule("fromEndpoints", "htpt")
        + rule("fromEndpoints", "HTTP")
        + rule("fromEndpoints", "admin")
        + rule("fromEndpoints", "query")
        + "  egress:\n"
        + rule("toEndpoints", "admin")
        + rule("toEndpoints", "query")
        + rule("toEndpoints", "query", "ANY")
    )
    (tmp_path / "policy.yaml").write_text(cnp(spec))
    warnings = {where: text for where, severity, text in findings(tmp_path) if severity == "warning"}
    prefix = "a named port of CiliumNetworkPolicy shop/p matches no port: "
    assert warnings == {
        "policy.yaml:7": f"{prefix}no pod it selects has a port named htpt; did you mean http?",
        "policy.yaml:13": f"{prefix}no pod it selects has a port named query",
        "policy.yaml:16": f"{prefix}pods have several ports named admin (1, 2)",
        "policy.yaml:18": f"{prefix}pods have a UDP port named query, but none for TCP",
    }


def test_broken_files_and_documents_that_are_not_objects_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: Pod\nmetadata: {name: [}\n", encoding="utf-8")
    (tmp_path / "b.json").write_text("[1, 2]", encoding="utf-8")
    (tmp_path / "c.yml").write_bytes(b"\xff\xfe\x00")
    found = {where: text for where, _, text in findings(tmp_path)}
    assert found["a.yaml:2"].startswith("column ")
    assert found["b.json:1"] == "expected a Kubernetes object with kind and metadata"
    assert "UTF-8" in found["c.yml:1"]


CLUSTER = """
apiVersion: v1
kind: Service
metadata: {name: kubernetes, namespace: default}
spec: {clusterIP: 10.96.0.1, ports: [{port: 443}]}
---
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: n1}
spec: {addresses: [{type: InternalIP, ip: 192.0.2.1}], ipam: {podCIDRs: [10.1.0.0/24]}}
"""
THIEF = """
apiVersion: v1
kind: Service
metadata:
  name: thief
  annotations:
    service.cilium.io/forwarding-mode: fast
spec:
  clusterIP: 10.96.0.9
  externalIPs:
  - 203.0.113.4
  - 10.96.0.1
  - 192.0.2.1
  - 10.1.0.9
  ports:
  - port: 80
    protocol: TCP
  - port: 5000
    protocol: QUIC
"""
NOT = ": not served"
REDIRECT = """
apiVersion: cilium.io/v2
kind: CiliumLocalRedirectPolicy
metadata: {name: near, namespace: shop}
spec:
  redirectFrontend:
    addressMatcher:
      ip: 10.96.0.1
      toPorts: [{port: "443", protocol: TCP}]
  redirectBackend:
    localEndpointSelector: {matchLabels: {app: near}}
    toPorts: [{port: "9090", protocol: TCP}]
"""


def test_what_services_would_not_get_is_found(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "thief.yaml").write_text(THIEF.replace("QUIC", "SCTP"))
    refused = [one for one in findings(tmp_path) if one[1] == "error"]
    assert refused == [
        (
            "thief.yaml:12",
            "error",
            "default/thief: externalIPs: 10.96.0.1 is the cluster address of default/kubernetes" + NOT,
        ),
        (
            "thief.yaml:13",
            "error",
            "default/thief: externalIPs: 192.0.2.1 is an address of node n1: not served",
        ),
        (
            "thief.yaml:14",
            "error",
            "default/thief: externalIPs: 10.1.0.9 is in 10.1.0.0/24, the pods' range of node n1" + NOT,
        ),
    ]
    warned = [(where, text) for where, severity, text in findings(tmp_path) if severity == "warning"]
    (place, text), *_ = warned
    assert place == "thief.yaml:7"
    assert text.startswith("default/thief: service.cilium.io/forwarding-mode has no effect")


def test_a_word_that_is_none_is_found_in_a_service(tmp_path: Path) -> None:
    (tmp_path / "thief.yaml").write_text(THIEF)
    ((where, severity, text),) = findings(tmp_path)
    assert (where, severity) == ("thief.yaml:19", "error")
    assert text == "Service thief: spec.ports[1].protocol: 'QUIC'; expected TCP, UDP or SCTP"


def test_a_redirection_of_anothers_cluster_address_is_found(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "near.yaml").write_text(REDIRECT)
    problem = "is the cluster address of default/kubernetes: not redirected"
    assert findings(tmp_path) == [
        ("near.yaml:8", "error", f"shop/near: addressMatcher.ip=10.96.0.1 {problem}")
    ]
    (tmp_path / "near.yaml").write_text(REDIRECT.replace("ip: 10.96.0.1", "ip: 169.254.169.254"))
    assert findings(tmp_path) == []


def test_backends_that_are_no_hosts_are_found(tmp_path: Path) -> None:
    (tmp_path / "slice.yaml").write_text(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n"
        "metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}\naddressType: IPv4\n"
        "endpoints:\n- addresses: [127.0.0.1]\nports: [{port: 80}]\n"
    )
    assert findings(tmp_path) == [
        ("slice.yaml:5", "error", "default/web-1: 127.0.0.1 is not a backend's address")
    ]
