"""``hive policy``: why a connection is allowed or not, and what is wrong in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click import ClickException
from click.testing import CliRunner, Result

from hive.main import cli

SHOP = Path(__file__).parents[3] / "docs" / "examples" / "shop"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["policy", *map(str, arguments)], standalone_mode=False)


def explain(folder: Path, source: str, destination: str) -> tuple[bool, list[dict[str, Any]]]:
    result = run("explain", "--manifests", folder, source, destination, "-o", "json")
    answer = json.loads(result.output)
    assert result.return_value == {"allowed": 0, "denied": 1}[answer["verdict"]]
    (way,) = answer["ways"]
    return answer["allowed"], way["directions"]


def findings(folder: Path) -> list[tuple[str, str, str]]:
    result = run("check", folder, "-o", "json")
    return [(one["where"], one["severity"], one["text"]) for one in json.loads(result.output)]


def write(folder: Path, text: str) -> Path:
    (folder / "pods.yaml").write_text((SHOP / "pods.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "policy.yaml").write_text(text, encoding="utf-8")
    return folder


def cnp(spec: str, name: str = "p") -> str:
    head = f"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: {name}, namespace: shop}}"
    return f"{head}\nspec:\n{spec}"


def test_the_rule_that_allows_is_named_with_its_line() -> None:
    allowed, (egress, ingress) = explain(SHOP, "shop/frontend", "shop/cart:8080")
    assert allowed
    assert egress["enforced"] is False
    (rule,) = ingress["rules"]
    assert rule == "policies.yaml:21: spec.ingress[0].from[0] of NetworkPolicy shop/frontend-to-cart"


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


def test_requests_that_may_pass_are_named(tmp_path: Path) -> None:
    rules = "{method: GET, path: /a.*, host: shop}, {headers: [X-Token]}"
    spec = f"""
  endpointSelector: {{matchLabels: {{app: cart}}}}
  ingress:
  - fromEndpoints: [{{matchLabels: {{app: frontend}}}}]
    toPorts: [{{ports: [{{port: "8080", protocol: TCP}}], rules: {{http: [{rules}]}}}}]
  - fromEndpoints: [{{matchLabels: {{app: postgres}}}}]
    toPorts: [{{ports: [{{port: "8080", protocol: TCP}}]}}]
"""
    folder = write(tmp_path, cnp(spec))
    allowed, (_, ingress) = explain(folder, "shop/frontend", "shop/cart:8080")
    assert (allowed, ingress["verdict"]) == (True, "redirect")
    assert ingress["requests"] == ["GET /a.*, host shop", "any method any path, with X-Token"]
    spoken = run("explain", "--manifests", folder, "shop/frontend", "shop/cart:8080").output
    assert "requests: GET /a.*, host shop" in spoken
    _, (_, other) = explain(folder, "shop/postgres", "shop/cart:8080")
    assert (other["verdict"], other["requests"]) == ("allow", [])


def test_a_rule_that_almost_allows_is_shown_with_the_missing_part() -> None:
    allowed, (_, ingress) = explain(SHOP, "shop/frontend", "shop/postgres:5432")
    assert not allowed
    (near,) = ingress["near"]
    assert near["missing"] == "it allows 5432/TCP for peers with app=cart (the peer has frontend)"
    _, (_, other_port) = explain(SHOP, "shop/cart", "shop/postgres:1/UDP")
    assert other_port["near"][0]["missing"] == "it allows this peer on 5432/TCP only"


def test_networks_names_and_identities_are_asked_of(tmp_path: Path) -> None:
    spec = """
  endpointSelector: {matchLabels: {app: cart}}
  egress:
  - toCIDR: [10.0.0.0/8]
  - toCIDR: [10.1.0.0/16]
    toPorts: [{ports: [{port: "80", protocol: TCP}]}]
  - toFQDNs: [{matchPattern: "*.example.org"}]
  egressDeny:
  - toCIDR: [10.1.2.0/24]
  ingress:
  - fromEntities: [remote-node]
"""
    folder = write(tmp_path, cnp(spec))
    for peer, may in {
        "10.1.2.0/24": False,
        "10.1.2.7/32": False,
        "10.2.0.0/16": True,
        "11.0.0.0/8": False,
        "web.example.org": True,
        "Web.Example.Org.": True,
        "a.b.example.org": False,
        "1": False,
        "reserved:world": False,
    }.items():
        assert explain(folder, "shop/cart", f"{peer}:80")[0] is may, peer
    for peer, may in {"reserved:remote-node": True, "6": True, "reserved:health": False}.items():
        assert explain(folder, peer, "shop/cart:80")[0] is may, peer
    for peer, why in {
        "10.0.0.0/8": "rules name networks within 10.0.0.0/8: give one of them",
        "77": "there is no identity 77 in the manifests",
    }.items():
        with pytest.raises(ClickException, match=why):
            raise run("explain", "--manifests", folder, "shop/cart", peer).exception or AssertionError(peer)


SERVICES = """
apiVersion: v1
kind: Service
metadata: {name: all, namespace: shop}
spec:
  type: NodePort
  clusterIP: 10.96.0.7
  externalIPs: [192.0.2.80]
  selector: {}
  ports: [{name: main, port: 80, targetPort: 8080, nodePort: 30080}]
---
apiVersion: v1
kind: Service
metadata: {name: none, namespace: shop}
spec: {clusterIP: 10.96.0.8, selector: {app: nobody}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec: {clusterIP: 10.96.0.9, selector: {app: cart}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: all-1, namespace: shop, labels: {kubernetes.io/service-name: all}}
addressType: IPv4
ports: [{name: main, port: 8080}]
endpoints: [{addresses: [10.0.0.1]}, {addresses: [10.0.0.2]}]
---
apiVersion: v1
kind: Pod
metadata: {name: front, namespace: shop, labels: {app: front}}
spec: {nodeName: n1, containers: [{name: main}]}
status: {podIPs: [{ip: 10.0.0.1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: back, namespace: shop, labels: {app: back}}
spec: {nodeName: n1, containers: [{name: main}]}
status: {podIPs: [{ip: 10.0.0.2}]}
---
apiVersion: v1
kind: Node
metadata: {name: n1}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
"""


def answer(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = run("explain", "--manifests", folder, *arguments, "-o", "json")
    return result.return_value, json.loads(result.output)


@pytest.mark.parametrize("service", ["shop/all", "10.96.0.7:80", "192.0.2.80:80", "192.0.2.1:30080"])
def test_a_service_is_what_its_backends_are(tmp_path: Path, service: str) -> None:
    folder = write(
        tmp_path, cnp("  endpointSelector: {matchLabels: {app: back}}\n  ingress: [{fromEntities: [all]}]\n")
    )
    (folder / "services.yaml").write_text(SERVICES, encoding="utf-8")
    closed = "  endpointSelector: {matchLabels: {app: back}}\n  ingressDeny: [{fromEntities: [all]}]\n"
    assert answer(folder, "shop/cart", service)[0] == 0
    (folder / "closed.yaml").write_text(cnp(closed, "closed"), encoding="utf-8")
    code, found = answer(folder, "shop/cart", service)
    assert code == 4
    assert found["headline"] == "denied for shop/back; allowed for shop/front"
    assert {way["port"] for way in found["ways"]} == {"8080/TCP"}


@pytest.mark.parametrize("address", ["10.96.0.7", "10.0.0.1"])
def test_an_external_address_of_the_cluster_is_not_served(tmp_path: Path, address: str) -> None:
    """The agent refuses it: the address is that of its pod or its service alone."""
    folder = write(tmp_path, cnp("  endpointSelector: {}\n  ingress: [{fromEntities: [all]}]\n"))
    thief = f"""---
apiVersion: v1
kind: Service
metadata: {{name: thief, namespace: other}}
spec: {{clusterIP: 10.96.0.20, externalIPs: [{address}], selector: {{app: x}}, ports: [{{port: 81}}]}}
"""
    (folder / "services.yaml").write_text(SERVICES + thief, encoding="utf-8")
    found = run("explain", "--manifests", folder, "shop/cart", f"{address}:81")
    assert "other/thief" not in f"{found.output}{found.exception}"


def test_what_a_service_cannot_do_is_reported(tmp_path: Path) -> None:
    folder = write(tmp_path, cnp("  endpointSelector: {}\n  ingress: [{fromEntities: [all]}]\n"))
    (folder / "services.yaml").write_text(SERVICES, encoding="utf-8")
    code, found = answer(folder, "shop/cart", "shop/none")
    assert (code, found["headline"]) == (1, "denied: service shop/none has no ready backend")
    code, found = answer(folder, "world", "10.96.0.7:80")
    assert (code, found["headline"]) == (
        1,
        "denied: service shop/all is served to clients in the cluster only",
    )
    for arguments, why in {
        ("shop/front", "shop/cart"): "shop/cart is a pod and a service: write pod/shop/cart or svc/shop/cart",
        ("svc/shop/cart", "shop/front"): "svc/shop/cart is a service, which opens no connections",
        ("shop/front", "shop/none:81"): "service shop/none has no port 81 (it has: 80/TCP)",
        ("shop/front", "svc/shop/front"): "there is no service shop/front in the manifests",
    }.items():
        assert why in str(run("explain", "--manifests", folder, *arguments).exception)
    code, found = answer(folder, "shop/cart", "svc/shop/cart")
    assert code == 0
    assert found["ways"][0]["note"] == "shop/cart reaches itself: no policy applies"
    assert found["ways"][0]["via"] == "10.96.0.9:80/TCP of service shop/cart"


def test_without_a_port_every_port_is_asked_of_that_policies_name(tmp_path: Path) -> None:
    spec = """
  endpointSelector: {matchLabels: {app: cart}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: frontend}}]
    toPorts: [{ports: [{port: "8000", endPort: 8099, protocol: TCP}, {port: "53", protocol: ANY}]}]
  - fromEndpoints: [{matchLabels: {app: frontend}}]
    icmps: [{fields: [{family: IPv4, type: 8}]}]
"""
    code, found = answer(write(tmp_path, cnp(spec)), "shop/frontend", "shop/cart")
    assert code == 4
    assert {way["port"]: way["verdict"] for way in found["ways"]} == {
        "53/TCP": "allowed",
        "8000-8099/TCP": "allowed",
        "53/UDP": "allowed",
        "53/SCTP": "allowed",
        "8/ICMP": "allowed",
        "any other port": "denied",
    }
    assert found["headline"].endswith("; denied on any other port")


def test_what_of_the_folder_is_not_in_force_is_noted(tmp_path: Path) -> None:
    folder = write(
        tmp_path, cnp("  endpointSelector: {}\n  ingress: [{toPorts: [{ports: [{port: x y}]}]}]\n")
    )
    code, found = answer(folder, "shop/frontend", "shop/cart:80")
    assert code == 0
    (note,) = found["notes"]
    assert "policy p is refused, and not in force" in note


def test_a_deny_is_named(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        cnp(
            "  endpointSelector: {}\n"
            "  egress:\n    - toEntities: [all]\n"
            "  egressDeny:\n    - toCIDR: [192.0.2.0/24]\n"
        ),
    )
    allowed, (egress,) = explain(folder, "shop/cart", "192.0.2.7:443")
    assert not allowed
    assert egress["verdict"] == "deny"
    assert egress["rules"] == ["policy.yaml:9: spec.egressDeny[0] of CiliumNetworkPolicy shop/p"]
    assert explain(folder, "shop/cart", "198.51.100.7:443")[0]


def test_the_matrix_shows_source_and_destination_pairs() -> None:
    result = run("explain", "--manifests", SHOP, "--all", "shop", "--port", "5432")
    assert "shop/cart       shop/postgres   5432/TCP   allowed" in result.output
    assert "shop/frontend   shop/postgres   5432/TCP   denied by ingress" in result.output


@pytest.mark.parametrize(
    ("arguments", "spoken"),
    [
        (("shop/frontnd", "shop/cart"), "did you mean shop/frontend?"),
        (("shop/frontend", "shop/cart:70000"), "expected a number up to 65535, or a port's name"),
        (("shop/frontend", "shop/cart:0"), "port 0: expected a number from 1 to 65535, or a port's name"),
        (("shop/frontend", "shop/cart:80/XTP"), "expected one of ICMP, TCP, UDP, ICMPV6, SCTP"),
        (("shop/frontend", "shop/cart:grpc"), "shop/cart has no port named grpc"),
        (("world", "host:80"), "neither end is a pod of the manifests"),
        (("shop/frontend",), "expected SRC and DST"),
        (("shop/frontend", "shop/cart", "--port", "80"), "write the port behind DST, as in shop/cart:80"),
        (("shop/frontend", "shop/cart", "--all", "shop"), "expected no SRC and DST beside it"),
    ],
)
def test_wrong_input_gets_one_line(arguments: tuple[str, ...], spoken: str) -> None:
    result = run("explain", "--manifests", SHOP, *arguments)
    assert spoken in str(result.exception)


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
        "policy.yaml:16": f"{prefix}pods call several ports admin (1, 2)",
        "policy.yaml:18": f"{prefix}pods call a port of UDP query, and none of TCP",
    }


def test_broken_files_and_documents_that_are_not_objects_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: Pod\nmetadata: {name: [}\n", encoding="utf-8")
    (tmp_path / "b.json").write_text("[1, 2]", encoding="utf-8")
    (tmp_path / "c.yml").write_bytes(b"\xff\xfe\x00")
    found = {where: text for where, _, text in findings(tmp_path)}
    assert found["a.yaml:2"].startswith("column ")
    assert found["b.json:1"] == "expected a Kubernetes object with kind and metadata"
    assert "UTF-8" in found["c.yml:1"]


def test_commands_of_the_page_print_the_documented_output(monkeypatch: pytest.MonkeyPatch) -> None:
    page = SHOP.parents[2] / "docs" / "operate" / "policy.md"
    monkeypatch.chdir(SHOP.parents[2])
    blocks = [block.split("```")[0] for block in page.read_text(encoding="utf-8").split("```console\n")[1:]]
    assert blocks
    for block in blocks:
        for call in block.split("$ hive policy ")[1:]:
            command, _, printed = call.partition("\n")
            assert run(*command.split()).output.strip() == printed.strip()


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


BLOCKS = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: blocks, namespace: shop}
spec:
  podSelector: {matchLabels: {app: client}}
  policyTypes: [Egress]
  egress: [{to: [{ipBlock: {cidr: 10.9.0.0/16, except: [10.9.0.2/32]}}]}]
"""
PLACED = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: shop, labels: {{app: {name}}}}}
status: {{podIPs: [{addresses}]}}
"""


def test_networks_of_a_folder_select_pods_where_that_is_asked_for(tmp_path: Path) -> None:
    placed = {"client": "{ip: 10.8.0.1}", "in": "{ip: 10.9.0.1}", "out": "{ip: 10.9.0.2}", "new": ""}
    texts = [BLOCKS, *(PLACED.format(name=name, addresses=one) for name, one in placed.items())]
    (tmp_path / "all.yaml").write_text("---".join(texts), encoding="utf-8")

    def reached(*mode: str) -> dict[str, int]:
        return {
            name: run(
                "explain", "--manifests", tmp_path, "shop/client", f"shop/{name}:80", *mode
            ).return_value
            for name in ("in", "out", "new")
        }

    by_labels, by_address = {"in": 1, "out": 1, "new": 1}, {"in": 0, "out": 1, "new": 1}
    assert reached() == by_labels
    assert reached("--policy-cidr-match-mode", "pods") == by_address
    result = run(
        "explain", "--manifests", tmp_path, "shop/client", "shop/new", "--policy-cidr-match-mode=pods"
    )
    assert "note: shop/new has no address in the manifests: no network selects it" in result.output
    config = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: cilium-config}\n"
    (tmp_path / "config.yaml").write_text(f'{config}data: {{policy-cidr-match-mode: "nodes pods"}}\n')
    assert reached() == by_address, "the agents' ConfigMap beside them is meant"
    refused = run("explain", "shop/a", "shop/b", "--policy-cidr-match-mode", "pods").exception
    assert "goes with --manifests" in str(refused)
