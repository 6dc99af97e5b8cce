"""Malformed cluster objects: readable ones are used, others are reported, none blocks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cells.agent import agent
from lifecycle import HealthTree
from lifecycle.testing import eventually, started
from tests.support.ports import free_port
from tests.unit.agent.fakes import fakes, without_links
from tests.unit.endpoint.fakes import FakeKernel
from tests.unit.kubernetes.cluster import Body, cluster, kubeconfig

pytestmark = pytest.mark.anyio

OWN = "node1"
DEFINITIONS = ("ciliumendpoints", "ciliumidentities", "ciliumnodes", "ciliumnetworkpolicies")
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 32, 1 << 70, 1.5, "", " ", "\u0000", "10.0.1.7", "10.0.1.0/24", "fd00::1%1"),
    *("::ffff:10.0.1.7", "999.1.1.1", "x" * 300, "é", [], {}, [None], [[]], {"": ""}, {"a": {"a": []}}),
)


def examples() -> list[Body]:
    """One of each kind, whole."""
    networking = {"addressing": [{"ipv4": "10.9.0.1", "ipv6": "fd09::1"}], "node": "192.0.2.9"}
    port = {"port": 80, "targetPort": 8080, "protocol": "TCP", "name": "http", "nodePort": 30080}
    rule = {
        "fromEndpoints": [{"matchLabels": {"app": "a"}}],
        "toPorts": [{"ports": [{"port": "80", "protocol": "TCP"}]}],
    }
    cidrs = {"toCIDRSet": [{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}]}
    peer = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
    return [
        _object(
            "v1",
            "Node",
            spec={"podCIDRs": ["10.8.0.0/24", "fd08::/112"], "podCIDR": "10.8.0.0/24"},
            status={"addresses": [{"type": "InternalIP", "address": "192.0.2.8"}]},
        ),
        _object("v1", "Namespace"),
        _object(
            "v1",
            "Pod",
            "default",
            spec={
                "nodeName": OWN,
                "containers": [{"name": "c", "ports": [{"name": "p", "containerPort": 1, "hostPort": 2}]}],
            },
            status={"podIP": "10.0.1.9", "podIPs": [{"ip": "10.0.1.9"}], "phase": "Running"},
        ),
        _object(
            "v1",
            "Service",
            "default",
            spec={"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"], "ports": [port], "type": "NodePort"},
        ),
        _object(
            "discovery.k8s.io/v1",
            "EndpointSlice",
            "default",
            addressType="IPv4",
            ports=[{"port": 8080, "name": "http", "protocol": "TCP"}],
            endpoints=[{"addresses": ["10.0.1.9"], "conditions": {"ready": True}}],
        ),
        _object(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            "default",
            spec={"podSelector": {}, "ingress": [{"from": [peer], "ports": [{"port": 80}]}]},
        ),
        _object(
            "cilium.io/v2",
            "CiliumNode",
            spec={
                "addresses": [{"type": "InternalIP", "ip": "192.0.2.8"}],
                "ipam": {"podCIDRs": ["10.8.0.0/24"]},
                "health": {"ipv4": "10.8.0.2"},
                "encryption": {"key": 1},
            },
        ),
        _object(
            "cilium.io/v2",
            "CiliumEndpoint",
            "default",
            status={
                "id": 7,
                "identity": {"id": 700, "labels": ["k8s:app=a"]},
                "networking": networking,
                "named-ports": [{"name": "p", "port": 1, "protocol": "TCP"}],
                "encryption": {"key": 1},
            },
        ),
        {**_object("cilium.io/v2", "CiliumIdentity"), "security-labels": {"k8s:app": "a", "k8s:b": "c"}},
        _object(
            "cilium.io/v2",
            "CiliumNetworkPolicy",
            "default",
            spec={"endpointSelector": {}, "ingress": [rule], "egress": [cidrs]},
        ),
    ]


def _object(version: str, kind: str, namespace: str = "", **parts: Any) -> Body:
    metadata: Body = {"name": "x", "labels": {"app": "a"}, "annotations": {"a": "b"}}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}


def spoilt(value: Any, chance: random.Random) -> Any:
    """The value with one thing in it that is something else, is missing, or is there twice."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(ODD)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        if chance.random() < 0.2:
            return [*value, *value]
        return [*value[:at], spoilt(value[at], chance), *value[at + 1 :]]
    key = chance.choice(sorted(value))
    if chance.random() < 0.2:
        return {name: one for name, one in value.items() if name != key}
    return {**value, key: spoilt(value[key], chance)}


def nonsense(count: int, chance: random.Random) -> Iterator[Body]:
    """So many objects; each has a name, as anything a server stores has."""
    for number in range(count):
        for example in examples():
            named = {key: example[key] for key in ("apiVersion", "kind")}
            parts = {
                key: one for key, one in example.items() if key not in {"apiVersion", "kind", "metadata"}
            }
            metadata = spoilt(example["metadata"], chance) if chance.random() < 0.2 else example["metadata"]
            if not isinstance(metadata, dict):
                metadata = {}
            name = str(3000 + number) if example["kind"] == "CiliumIdentity" else f"x{number}"
            own = {"name": name} | {
                key: one for key, one in example["metadata"].items() if key == "namespace"
            }
            spoilt_parts = spoilt(parts, chance)
            yield {
                **(spoilt_parts if isinstance(spoilt_parts, dict) else {}),
                **named,
                "metadata": {**metadata, **own},
            }


FAR_NODE: Body = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNode",
    "metadata": {"name": "far"},
    "spec": {
        "addresses": [{"type": "InternalIP", "ip": "192.0.2.9"}],
        "ipam": {"podCIDRs": ["10.9.0.0/16"]},
    },
}


def far(name: str, ip: str) -> Body:
    """A pod of another node that is as it should be."""
    networking = {"addressing": [{"ipv4": ip}], "node": "192.0.2.9"}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumEndpoint",
        "metadata": {"name": name, "namespace": "default"},
        "status": {"id": 1, "identity": {"id": 600}, "networking": networking},
    }


@pytest.mark.parametrize("seed", range(3))
async def test_valid_objects_are_used_among_invalid_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", OWN)
    chance = random.Random(seed)  # noqa: S311
    kernel = FakeKernel()
    async with cluster(*DEFINITIONS) as one:
        one.put(_object("v1", "Node") | {"metadata": {"name": OWN}})
        one.put(FAR_NODE)
        one.put(far("first", "10.9.9.1"))
        settings = {
            "ipv4-range": "10.0.1.0/24",
            "agent-health-port": free_port(),
            "write-cni-conf-when-ready": str(tmp_path / "net.d" / "05-cilium.conflist"),
            "k8s-kubeconfig-path": kubeconfig(tmp_path, one.url),
            "k8s-client-qps": "0",
            "routing-mode": "native",
        }
        async with started(agent, *fakes(tmp_path, kernel, without_links()), settings=settings) as hive:

            def identities() -> dict[str, int]:
                return kernel.prefixes.identities

            def failing() -> set[str]:
                statuses = hive.get(HealthTree).snapshot()
                return {f"{each.module}: {each.message}" for each in statuses if each.level == "degraded"}

            await eventually(lambda: identities().get("10.9.9.1/32") == 600, within=30)
            of_fakes = {"agent.node-ids", "agent.services", *(one.partition(":")[0] for one in failing())}
            for turn in range(2):
                for body in nonsense(30, chance):
                    one.put(body)
                good = f"10.9.9.{7 + turn}"
                one.put(far(f"then-{turn}", good))
                await eventually(partial(holds, identities, f"{good}/32"), within=30)
            assert identities()["10.9.9.1/32"] == 600
            wrong = {each for each in failing() if not each.startswith(tuple(of_fakes))}
            unread = {each for each in wrong if each.startswith("agent.kubernetes.")}
            assert all("cannot be read" in each for each in unread)
            refused = re.compile(": refused (?:claims of nodes|CiliumEndpoints): ")
            assert {each for each in wrong - unread if not refused.search(each)} == set()


def holds(identities: Callable[[], dict[str, int]], prefix: str) -> bool:
    return prefix in identities()
