"""The operator needs exactly the RBAC rules of its roles."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from lifecycle.testing import eventually
from tests.support import chart
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, User
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.support.rights import unused

pytestmark = pytest.mark.anyio
MANIFESTS = Path(__file__).resolve().parents[3] / "configs" / "manifests"
ACCOUNT = "system:serviceaccount:kube-system:cilium-operator"
TOKEN = "operator-token"  # of the fake API server
READY = {
    "phase": "Running",
    "startTime": "2025-01-01T00:00:00Z",
    "conditions": [{"type": "Ready", "status": "True"}],
}
LEASE = ("kube-system", "cilium-operator-resource-lock")
MERGE = b"application/merge-patch+json"
TAINT = "node.cilium.io/agent-not-ready"
RULE = {"k8s:app": "x"}


def roles() -> list[dict[str, Any]]:
    found = yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text())
    return [one for one in found if one["metadata"]["name"] == "cilium-operator"]


async def test_nothing_is_denied_and_no_right_is_unused(tmp_path: Path) -> None:
    server = ApiServer({ADMIN_TOKEN: User("admin", ("system:masters",)), TOKEN: User(ACCOUNT)})
    server.crd_delay = 0
    for one in roles():
        server.add(one)
    operators = Operators(server, tmp_path)
    values = {
        "cluster-pool-ipv4-cidr": "10.0.0.0/8",
        "nodes-gc-interval": "100ms",
        "cilium-endpoint-gc-interval": "100ms",
        "identity-gc-interval": "100ms",
        "identity-heartbeat-timeout": "200ms",
        "unmanaged-pod-watcher-interval": 1,
    }
    async with server.serving():
        async with operators.running(values, token=TOKEN):
            for body in everything():
                server.add(body)
            async with operators.client() as client:
                for name in ("cilium-a", "dns"):
                    path = f"/api/v1/namespaces/kube-system/pods/{name}/status"
                    await client.raw("PATCH", path, None, json.dumps({"status": READY}).encode(), MERGE)
            await eventually(lambda: done(server), 30)
        async with operators.client() as client:
            label = b'{"metadata":{"labels":{"io.cilium.k8s.crd.schema.version":"1.0.0"}}}'
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/ciliumnodes.cilium.io"
            await client.raw("PATCH", path, None, label, MERGE)
        before = len(server.requests)
        async with operators.running(values, token=TOKEN):
            assert len(server.requests) > before
    assert unused(roles(), server.requests) == set(), "rights that are not used"


def done(server: ApiServer) -> bool:
    """Whether the operator has done one of everything."""

    def there(group: str, plural: str, name: str, namespace: str = "") -> dict[str, Any] | None:
        return server.store.get(Resource(group, plural), (namespace, name))

    node, service = there("", "nodes", "a"), there("", "services", "s", "default")
    assert node is not None
    assert service is not None
    retained = there("cilium.io", "ciliumnodes", "a")
    refused, dns = there("cilium.io", "ciliumnodes", "refused"), there("", "pods", "dns", "kube-system")
    policies = [
        there("cilium.io", "ciliumnetworkpolicies", "policy", "default"),
        there("cilium.io", "ciliumclusterwidenetworkpolicies", "policy"),
    ]
    return bool(
        refused is not None
        and all(one is not None and one.get("status") for one in policies)
        and refused.get("status")
        and (dns is None or "deletionTimestamp" in dns["metadata"])
        and not any(one["key"].startswith("node.cilium.io") for one in node["spec"].get("taints") or ())
        and node["status"].get("conditions")
        and service["status"]["loadBalancer"].get("ingress")
        and retained is not None
        and retained["spec"]["ipam"].get("podCIDRs")
        and there("cilium.io", "ciliumnodes", "orphan") is None
        and there("cilium.io", "ciliumendpoints", "orphan", "default") is None
        and there("cilium.io", "ciliumidentities", "1000") is None
    )


def everything() -> list[dict[str, Any]]:
    """Something to do for every part."""
    v2, alpha = "cilium.io/v2", "cilium.io/v2alpha1"
    taint = {"key": TAINT, "effect": "NoSchedule"}
    containers = [{"name": "c", "image": "example.invalid/c"}]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "refused", "uid": "u"}
    dns = {"name": "dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    pod = {"name": "cilium-a", "namespace": "kube-system", "labels": {"k8s-app": "cilium"}}
    port = {"port": 80}
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "a"},
            "spec": {"taints": [taint]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": pod,
            "spec": {"nodeName": "a", "containers": containers},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": dns,
            "spec": {"nodeName": "a", "containers": containers},
        },
        {"apiVersion": v2, "kind": "CiliumNode", "metadata": {"name": "a"}, "spec": {}},
        {
            "apiVersion": v2,
            "kind": "CiliumNode",
            "metadata": {"name": "refused", "ownerReferences": [owner]},
            "spec": {"ipam": {"podCIDRs": ["192.0.2.0/24"]}},
        },
        {"apiVersion": v2, "kind": "CiliumNode", "metadata": {"name": "orphan"}, "spec": {}},
        {"apiVersion": v2, "kind": "CiliumEndpoint", "metadata": {"name": "orphan", "namespace": "default"}},
        {"apiVersion": v2, "kind": "CiliumIdentity", "metadata": {"name": "1000"}, "security-labels": RULE},
        {
            "apiVersion": v2,
            "kind": "CiliumNetworkPolicy",
            "metadata": {"name": "policy", "namespace": "default"},
            "spec": {"endpointSelector": {}},
        },
        {
            "apiVersion": v2,
            "kind": "CiliumClusterwideNetworkPolicy",
            "metadata": {"name": "policy"},
            "spec": {"endpointSelector": {}},
        },
        {
            "apiVersion": alpha,
            "kind": "CiliumLoadBalancerIPPool",
            "metadata": {"name": "p"},
            "spec": {"blocks": [{"cidr": "203.0.113.0/28"}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "s", "namespace": "default"},
            "spec": {"type": "LoadBalancer", "ports": [port]},
        },
    ]


async def test_the_rights_of_multi_pool_suffice_where_that_is_the_mode(tmp_path: Path) -> None:
    server = ApiServer({ADMIN_TOKEN: User("admin", ("system:masters",)), TOKEN: User(ACCOUNT)})
    server.crd_delay = 0
    rendered = chart.render({"ipam": {"mode": "multi-pool"}})
    texts = [text for name, text in rendered.items() if name.endswith("rbac-operator.yaml")]
    for one in yaml.safe_load_all("\n---\n".join(texts)):
        server.add(one)
    operators = Operators(server, tmp_path)
    values = {
        "ipam": "multi-pool",
        "auto-create-cilium-pod-ip-pools": "p=ipv4-cidrs:10.0.0.0/28;ipv4-mask-size:28",
    }

    def states(name: str) -> dict[str, Any]:
        found = server.store.get(Resource("cilium.io", "ciliumnodes"), ("", name)) or {}
        return {**found.get("spec", {}).get("ipam", {}).get("pools", {}), **found.get("status", {})}

    async with server.serving(), operators.running(values, token=TOKEN):
        for name in ("a", "b"):
            pools = {"requested": [{"pool": "p", "needed": {"ipv4-addrs": 3}}]}
            owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": "u"}
            kind = {"apiVersion": "cilium.io/v2", "kind": "CiliumNode"}
            meta = {"name": name, "ownerReferences": [owner]}
            server.add({**kind, "metadata": meta, "spec": {"ipam": {"pools": pools}}})
            await eventually(lambda: states("a").get("allocated"), 30)
        assert states("a")["allocated"] == [{"pool": "p", "cidrs": ["10.0.0.0/28"]}]
        await eventually(lambda: "pool empty" in states("b")["ipam"]["operator-status"]["error"], 30)


FAST = {
    "nodes-gc-interval": "100ms",
    "cilium-endpoint-gc-interval": "100ms",
    "identity-gc-interval": "100ms",
    "identity-heartbeat-timeout": "200ms",
    "unmanaged-pod-watcher-interval": "1",
}
"""Intervals, where the values of the chart do not switch them off."""
OPTIONS: list[dict[str, Any]] = [
    {"ciliumEndpointSlice": {"enabled": True}},
    {"nodeIPAM": {"enabled": True}, "enableLBIPAM": False, "defaultLBServiceIPAM": "nodeipam"},
    {"operator": {"removeNodeTaints": False, "unmanagedPodWatcher": {"restart": False}}},
    {"operator": {"setNodeNetworkStatus": False, "nodeGCInterval": "0s", "identityGCInterval": "0s"}},
    {"ipam": {"mode": "kubernetes"}, "disableEndpointCRD": True},
    {"bgpControlPlane": {"enabled": True}},
]


@pytest.mark.parametrize("values", OPTIONS, ids="-".join)
async def test_rights_follow_what_the_values_switch_on(values: dict[str, Any], tmp_path: Path) -> None:
    server = ApiServer({ADMIN_TOKEN: User("admin", ("system:masters",)), TOKEN: User(ACCOUNT)})
    server.crd_delay = 0
    rendered = chart.render({**values, "operator": {"skipCRDCreation": True, **values.get("operator", {})}})
    rights = list(yaml.safe_load_all(rendered["rbac-operator.yaml"]))
    for one in rights:
        server.add(one)
    config: dict[str, Any] = yaml.safe_load(rendered["configmap.yaml"])["data"]
    config = {**config, **{name: text for name, text in FAST.items() if config.get(name) not in {"0", "0s"}}}
    config = {name: text for name, text in config.items() if not name.endswith("-serve-addr")}
    operators = Operators(server, tmp_path)
    async with server.serving():
        registered = {"ipam": "kubernetes", "enable-cilium-endpoint-slice": "true"}
        registered |= {"enable-bgp-control-plane": config.get("enable-bgp-control-plane", "false")}
        async with operators.running(registered):  # with every right, for the definitions
            pass
        server.store.delete(Resource("coordination.k8s.io", "leases"), LEASE)
        server.requests.clear()
        degraded: set[str] = set()
        async with operators.running(config, token=TOKEN) as hive:
            for body in everything():
                server.add(body)
            async with operators.client() as client:
                for name in ("cilium-a", "dns"):
                    path = f"/api/v1/namespaces/kube-system/pods/{name}/status"
                    await client.raw("PATCH", path, None, json.dumps({"status": READY}).encode(), MERGE)

            if "enable-bgp-control-plane" in config:
                for body in routers():
                    server.add(body)
            if "enable-cilium-endpoint-slice" in config:
                await slices_come_and_go(server)

            def all_used() -> bool:
                degraded.update(f"{one.message} {one.error or ''}" for one in hive.health.snapshot())
                return unused(rights, server.requests) == set()

            with suppress(AssertionError):  # the assertion below names those that are not
                await eventually(all_used, 30)
        assert unused(rights, server.requests) == set(), "rights that are not used"
        assert not [one for one in degraded if "orbidden" in one or "403" in one], "nothing is denied"


def routers() -> list[dict[str, Any]]:
    """Something to do for BGP: one NodeConfig is made and changed, one is deleted, conditions are written."""

    def made(kind: str, name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
        whole = {"name": name, **metadata}
        return {
            "apiVersion": "cilium.io/v2alpha1",
            "kind": f"CiliumBGP{kind}",
            "metadata": whole,
            "spec": spec,
        }

    kind = {"apiVersion": "cilium.io/v2alpha1", "kind": "CiliumBGPClusterConfig"}
    owner = {**kind, "name": "racks", "uid": "u"}
    instances = {"bgpInstances": [{"name": "i", "localASN": 65001}]}
    return [
        made("NodeConfig", "absent", instances, ownerReferences=[owner]),
        made("NodeConfig", "a", instances, ownerReferences=[owner]),
        made("PeerConfig", "tor", {"authSecretRef": "absent"}),
        made("NodeConfigOverride", "a", {"bgpInstances": [{"name": "i", "localPort": 1179}]}),
        made("ClusterConfig", "racks", instances),
    ]


async def slices_come_and_go(server: ApiServer) -> None:
    """One is made, changed and deleted."""
    slices, pods = Resource("cilium.io", "ciliumendpointslices"), Resource("", "pods")

    def endpoint_names() -> list[str]:
        found = server.store.of(slices).objects.values()
        return sorted(one["name"] for each in found for one in each["endpoints"])

    for number, name in enumerate(("web-1", "web-2"), start=1):
        meta = {"name": name, "namespace": "default"}
        spec = {"nodeName": "a", "containers": [{"name": "c", "image": "example.invalid/c"}]}
        server.add({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        networking = {"addressing": [{"ipv4": f"10.0.0.{number}"}], "node": "192.0.2.1"}
        status = {"id": number, "identity": {"id": 300}, "networking": networking}
        server.add(
            {"apiVersion": "cilium.io/v2", "kind": "CiliumEndpoint", "metadata": meta, "status": status}
        )
        await eventually(lambda: len(endpoint_names()) == number, 10)  # noqa: B023  # it waits here
    for name in ("web-1", "web-2"):
        server.store.delete(pods, ("default", name))
    await eventually(lambda: not endpoint_names(), 30)
