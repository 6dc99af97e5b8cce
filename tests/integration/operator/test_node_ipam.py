"""Node IPAM: services get the addresses of the nodes that may receive their traffic."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.kubernetes.objects.core import ENDPOINT_SLICES, NODES, EndpointSlice, Node
from cells.operator.lb_ipam import MATCH, addresses_for, entry_node_of
from cells.operator.objects import CLUSTER_SERVICES, ClusterService
from lifecycle import GraphError
from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.examples import scaled
from tests.support.operator import Operators
from tests.support.operator.running import POOL

pytestmark = pytest.mark.anyio
SERVICES = Resource("", "services")
ON = {**POOL, "enable-node-ipam": "true"}


def node(name: str, *addresses: tuple[str, str], taint: str = "", **labels: str) -> dict[str, Any]:
    listed = [{"type": kind, "address": address} for kind, address in addresses]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {key.replace("_", "-"): value for key, value in labels.items()}},
        "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]} if taint else {},
        "status": {"addresses": listed},
    }


def service(name: str, annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "annotations": annotations or {}},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80}], **spec},
    }


def backends(name: str, **nodes: bool | None) -> dict[str, Any]:
    endpoints = [
        {
            "addresses": [f"10.0.0.{number}"],
            "nodeName": on,
            "conditions": {} if ready is None else {"ready": ready},
        }
        for number, (on, ready) in enumerate(nodes.items())
    ]
    labels = {"kubernetes.io/service-name": name}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{name}-1", "namespace": "default", "labels": labels},
        "addressType": "IPv4",
        "endpoints": endpoints,
    }


def a_node(body: dict[str, Any]) -> Node:
    return NODES.decoder.decode(msgspec.json.encode(body))


def a_service(body: dict[str, Any]) -> ClusterService:
    return CLUSTER_SERVICES.decoder.decode(msgspec.json.encode(body))


def a_slice(body: dict[str, Any]) -> EndpointSlice:
    return ENDPOINT_SLICES.decoder.decode(msgspec.json.encode(body))


NODES_OF = st.lists(
    st.tuples(
        st.sampled_from(["ExternalIP", "InternalIP", "Hostname"]),
        st.sampled_from(["192.0.2.1", "192.0.2.2", "203.0.113.9", "2001:db8::1", "2001:db8::2", "a-name"]),
        st.sampled_from(["", "ToBeDeletedByClusterAutoscaler", "example.com/other"]),
        st.booleans(),
        st.sampled_from([True, False, None, "absent"]),
    ),
    max_size=6,
)


@settings(max_examples=scaled(150), deadline=None)
@given(NODES_OF, st.sampled_from([("IPv4",), ("IPv6",), ("IPv4", "IPv6")]), st.booleans())
def test_addresses_are_those_that_a_plain_reading_gives(
    nodes: list[tuple[str, str, str, bool, Any]], families: tuple[str, ...], local: bool
) -> None:
    names = {f"n{number}": one for number, one in enumerate(nodes)}
    objects = [
        a_node(
            node(
                name,
                (kind, ip),
                taint=taint,
                **({"node.kubernetes.io/exclude-from-external-load-balancers": ""} if excluded else {}),
            )
        )
        for name, (kind, ip, taint, excluded, _) in names.items()
    ]
    slices = [a_slice(backends("s", **{name: one[4] for name, one in names.items() if one[4] != "absent"}))]
    policy = "Local" if local else "Cluster"
    asked = a_service(service("s", ipFamilies=list(families), externalTrafficPolicy=policy))
    found = addresses_for(
        asked, [one for each in objects if (one := entry_node_of(each)) is not None], slices
    )

    usable = [
        (kind, ip)
        for kind, ip, taint, excluded, ready in nodes
        if taint != "ToBeDeletedByClusterAutoscaler"
        and not excluded
        and ip != "a-name"
        and ("IPv6" if ":" in ip else "IPv4") in families
        and (not local or ready in (True, None))
    ]
    external = {ip for kind, ip in usable if kind == "ExternalIP"}
    internal = {ip for kind, ip in usable if kind == "InternalIP"}
    assert found == tuple(sorted(external or internal))


def addresses(server: ApiServer, name: str) -> list[str]:
    found = server.store.of(SERVICES).objects["default", name]
    return [one["ip"] for one in (found.get("status") or {}).get("loadBalancer", {}).get("ingress") or ()]


async def test_services_follow_nodes_and_their_labels(server: ApiServer, operators: Operators) -> None:
    of_node: dict[str, Any] = {"loadBalancerClass": "io.cilium/node"}
    async with operators.running(ON) as hive:
        server.add(node("a", ("InternalIP", "192.0.2.1"), zone="one"))
        server.add(node("b", ("InternalIP", "192.0.2.2"), zone="two"))
        server.add(service("all", **of_node))
        server.add(service("two", {MATCH: "zone in (two)"}, **of_node))
        server.add(service("wrong", {MATCH: "zone in two"}, **of_node))
        server.add(service("pooled"))
        await eventually(lambda: addresses(server, "all") == ["192.0.2.1", "192.0.2.2"], 30)
        await eventually(lambda: addresses(server, "two") == ["192.0.2.2"], 30)
        assert addresses(server, "wrong") == addresses(server, "pooled") == []
        degraded = [one for one in hive.health.snapshot() if one.level == "degraded"]
        assert [one.message.split(":")[0] for one in degraded if one.module.endswith("node-ipam")] == [
            "service default/wrong keeps its addresses"
        ]
    async with operators.running({**ON, "default-lb-service-ipam": "nodeipam"}):
        await eventually(lambda: addresses(server, "pooled") == ["192.0.2.1", "192.0.2.2"], 30)


async def test_default_lb_service_ipam_nodeipam_needs_enable_node_ipam(operators: Operators) -> None:
    with pytest.raises(GraphError, match="expected enable-node-ipam=true"):
        async with operators.running({**POOL, "default-lb-service-ipam": "nodeipam"}):
            pass
