"""``hive policy explain``: why a connection is allowed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click import ClickException

from tests.unit.policy.policy_command import SHOP, cnp, run, write


def explain(folder: Path, source: str, destination: str) -> tuple[bool, list[dict[str, Any]]]:
    result = run("explain", "--manifests", folder, source, destination, "-o", "json")
    answer = json.loads(result.output)
    assert result.return_value == {"allowed": 0, "denied": 1}[answer["verdict"]]
    (way,) = answer["ways"]
    return answer["allowed"], way["directions"]


def test_the_rule_that_allows_is_named_with_its_line() -> None:
    allowed, (egress, ingress) = explain(SHOP, "shop/frontend", "shop/cart:8080")
    assert allowed
    assert egress["enforced"] is False
    (rule,) = ingress["rules"]
    assert rule == "policies.yaml:21: spec.ingress[0].from[0] of NetworkPolicy shop/frontend-to-cart"


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
        "10.0.0.0/8": "rules distinguish networks within 10.0.0.0/8: give one of them",
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


def test_commands_of_the_page_print_the_documented_output(monkeypatch: pytest.MonkeyPatch) -> None:
    page = SHOP.parents[2] / "docs" / "operate" / "policy.md"
    monkeypatch.chdir(SHOP.parents[2])
    blocks = [block.split("```")[0] for block in page.read_text(encoding="utf-8").split("```console\n")[1:]]
    assert blocks
    for block in blocks:
        for call in block.split("$ hive policy ")[1:]:
            command, _, printed = call.partition("\n")
            assert run(*command.split()).output.strip() == printed.strip()


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
