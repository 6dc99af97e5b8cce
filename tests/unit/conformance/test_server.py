"""Recorded requests of Cilium's clients, sent to the real API: same statuses, same shapes.

Each recording becomes one test that starts a node, creates the scenario's state, and sends the requests in
order. Addresses, MACs, indexes and uuids are this node's own.
"""

from __future__ import annotations

import json
import re
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells.api.rate_limits import NAMES
from cells.endpoint import EndpointRequest
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import LxcKey, LxcValue
from tests.support.counts import Count, not_replayed
from tests.support.recordings import INDEX, recorded
from tests.unit.api.node import Answer, Node, running_node
from tests.unit.conformance.recordings import EXCLUDED, REPLAYED, exchanges, numbered
from tests.unit.conformance.shape import differences
from tests.unit.endpoint.fakes import create

pytestmark = pytest.mark.anyio

POD_CIDR6 = "fd00:10:1::/112"
CONTAINER = "3f2a9c41d0b8e7765a1c0f4e2d9b8a7c6e5d4f3a2b1c0d9e8f7a6b5c4d3e2f10"
NO_SUCH_PART = {
    "config": {
        "status/nodeMonitor": "there is no monitor",
        "status/masqueradeProtocols/ipv6": "off",
        "status/enableRouteMTUForCNIChaining": "off",
        "status/ipLocalReservedPorts": "nothing is tunnelled",
        "status/GROIPv4MaxSize": "off",
        "status/GROMaxSize": "off",
        "status/GSOIPv4MaxSize": "off",
        "status/GSOMaxSize": "off",
        "status/masquerade": "nothing is masqueraded",
        "status/masqueradeProtocols/ipv4": "nothing is masqueraded",
        "status/k8s-configuration": "there is no Kubernetes",
        "status/k8s-endpoint": "there is no Kubernetes",
    },
    "endpoint": {
        "status/controllers": "an endpoint has one only after a build failed",
        "status/namedPorts": "ports have no names without Kubernetes",
        "status/policy/proxy-policy-revision": "there is no proxy",
        "status/policy/proxy-statistics": "nothing passes a proxy: tests/node/agent/test_recorded_policy.py",
        **{
            f"status/policy/{half}/{part}": "this node has no rules: tests/node/agent/test_recorded_policy.py"
            for half in ("spec", "realized")
            for part in ("build", "l4", "cidr-policy", "allowed-ingress-identities")
        },
    },
    "labels": {
        "status/disabled": "a pod's own labels cannot be taken from it here",
    },
    "healthz": {
        "bandwidth-manager/congestionControl": "off",
        "bandwidth-manager/devices": "off",
        "bandwidth-manager/enabled": "off",
        "cluster-mesh": "there are no other clusters",
        "cluster/nodes[]/primary-address/ipv6": "IPv4 only",
        "controllers[]/configuration/interval": "not every one runs by the clock",
        "controllers[]/status/success-count": "some have not run yet",
        "controllers[]/status/failure-count": "healthy",
        "controllers[]/status/consecutive-failure-count": "healthy",
        "controllers[]/status/last-failure-msg": "healthy",
        "encryption/wireguard": "off",
        "hubble": "there is no Hubble",
        "ipv6-big-tcp/enabled": "off",
        "ipv6-big-tcp/maxGRO": "off",
        "ipv6-big-tcp/maxGSO": "off",
        "kube-proxy-replacement/directRoutingDevice": "off",
        **{
            f"kube-proxy-replacement/features/{feature}": "off, but the object is there"
            for feature in (
                "annotations",
                "externalIPs/enabled",
                "gracefulTermination/enabled",
                "hostPort/enabled",
                "nat46X64/gateway",
                "nat46X64/service",
                "sessionAffinity/enabled",
                "socketLB/enabled",
                "socketLBTracing/enabled",
                "nodePort/acceleration",
                "nodePort/algorithm",
                "nodePort/enabled",
                "nodePort/mode",
                "nodePort/portMax",
                "nodePort/portMin",
            )
        },
        "kubernetes/k8s-api-versions": "there is no Kubernetes",
        "kubernetes/msg": "there is no Kubernetes",
        "masquerading/enabled": "off",
        "masquerading/enabledProtocols": "off",
        "masquerading/mode": "off",
        "masquerading/snat-exclusion-cidr": "off",
        "masquerading/snat-exclusion-cidr-v4": "off",
        "nodeMonitor": "there is no monitor",
        "proxy": "there is no proxy",
        "routing/tunnel-protocol": "there are no tunnels",
    },
    "metrics": {"[]/labels": "each metric has its own, or none"},
    "map": {"maps[]/cache": "of those that the datapath writes nobody keeps account"},
    "cluster": {
        "client-id": "a request without one is not remembered: tests/unit/nodes/test_list.py",
        "nodes-added[]/primary-address/ipv6": "IPv4 only",
        "nodes-added[]/health-endpoint-address": "nodes do not probe each other",
        "nodes-added[]/ingress-address": "there is no ingress",
        "nodes-added[]/secondary-addresses": "it has one address",
    },
    "debuginfo": {
        "encryption": "off",
        "service-list": "there are no services",
        "subsystem/kvstore": "there is none",
    },
}
"""Parts of recorded answers that this agent has not got, by operation, and why."""

NO_SUCH_PART["debuginfo"] |= {
    f"{place}/{part}": reason
    for place, operation in (("cilium-status", "healthz"), ("endpoint-list[]", "endpoint"))
    for part, reason in NO_SUCH_PART[operation].items()
}

STUB_STATUSES = {
    409: "never sent",
    503: "tests/unit/api/test_gate.py has it; GET /config is answered as soon as there is a socket",
}
STUB_FAULTS = {
    ("cni/check_failures", 7): "the recorded agent refuses a good id",
    ("cni/del_api_errors", 3): "the recorded agent refuses a good container id",
    ("cni/status_client1.19", 3): "the recorded agent fails at its own health",
    **{("dbg/ip_list", number): "the recorded agent knows other reserved identities" for number in (1, 2)},
}
ANY_TEXT = {
    429: "what is recorded are the words of the recorded agent, which clients never show",
    500: "what went wrong is this agent's own",
    501: "what is recorded are the words of a stand-in for the agent, which clients never show",
}
"""Exchanges, by recording and position, with an answer that no state of our agent produces."""


STRICT = ",".join(
    f"{name}=skip-initial:0,auto-adjust:false,rate-limit:1/s,rate-burst:100,max-wait-duration:1s"
    for name in NAMES
)
"""Limits that are far away unless a test uses them up."""


@pytest.mark.parametrize("name", REPLAYED)
async def test_recorded_requests_are_answered_as_recorded(name: str, tmp_path: Path) -> None:
    settings = {"api-rate-limit": STRICT}
    if any(each["response"].get("status") == 403 for each in exchanges(name)):
        settings["enable-cilium-api-server-access"] = "GetConfig"
    cidr6 = POD_CIDR6 if has_ipv6(name) else ""
    async with running_node(tmp_path, cidr6=cidr6, settings=settings) as node:
        replay = Replay(node)
        for number, exchange in enumerate(exchanges(name)):
            if (name, number) in STUB_FAULTS or exchange["response"].get("status") in STUB_STATUSES:
                continue
            await replay.exchange(exchange["request"], exchange["response"])


async def test_policy_rules_by_api_are_refused_with_a_reason(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        for method, path, body in (("PUT", "/v1/policy?replace=false", "[]"), ("DELETE", "/v1/policy", [])):
            got = await node.ask(method, path, body)
            assert got.status == 500
            assert "rules come from objects of the cluster" in got.body


def has_ipv6(name: str) -> bool:
    """Whether anything in the recorded answers is of IPv6."""
    return re.search(r'"ipv6": ["{]', json.dumps([each["response"] for each in exchanges(name)])) is not None


class Replay:
    """Sends recorded requests to a node, with this node's values for the recorded ones."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ours: dict[str, str] = {}

    async def exchange(self, request: Any, response: Any) -> None:
        """Send the request in the state that its answer implies, and compare the answer."""
        node = self.node
        self.know_identity(request["path"])
        path, body = self.translated(request["path"]), self.translated(numbered(request.get("body")))
        self.prepare(request["method"], path, body, response)
        skipped = {"Host", "User-Agent", "Content-Length"}
        headers = {key: value for key, value in request["headers"].items() if key not in skipped}
        self.use_limits_up(used_up=response["status"] == 429)
        if path.endswith("/labels") and (user := (response.get("body") or {}).get("spec", {}).get("user")):
            assert (await node.ask("PATCH", path, {"user": user})).status == 200
        got = await node.ask(request["method"], path, body, headers=headers)
        node.kernel.fault = node.kernel.drop_fault = None
        assert got.status == response["status"], (request["method"], path, got.raw)
        if got.status == 403:
            assert got.raw.decode() == response["body_text"]
            return
        if "body_text" in response:
            recorded = json.loads(response["body_text"].partition("\n")[0])
            answers = [json.loads(line) for line in got.raw.splitlines()]
            assert answers
            assert [each for one in answers for each in differences(recorded, one, set())] == []
            return
        compare(request["method"], path, numbered(response.get("body")), got)
        if request["method"] == "POST" and got.status == 201:
            recorded = response["body"]
            for family in recorded["address"].keys() & {"ipv4", "ipv6"}:
                self.ours[recorded["address"][family]] = got.body["address"][family]
                uuid = recorded[family]["expiration-uuid"]
                self.ours[uuid] = got.body[family]["expiration-uuid"]

    def use_limits_up(self, *, used_up: bool) -> None:
        """Have nothing left of the rates, as after many requests, or all of them."""
        for limiter in self.node.limits.limiters.values():
            limiter.bucket.wait(anyio.current_time())
            limiter.bucket.tokens = -limiter.bucket.burst if used_up else limiter.bucket.burst

    def know_identity(self, path: str) -> None:
        """Have the endpoint of the requested identity, and take our number for the recorded one."""
        if path.startswith("/v1/identity"):
            present(self.node, "abc", number=1234)
            (endpoint,) = self.node.endpoints.by_container("abc")
            self.ours["/24583"] = f"/{endpoint.identity}"

    def translated(self, value: Any) -> Any:
        """The request's path or body, with our address and uuid for the recorded ones."""
        text = json.dumps(value)
        for theirs, ours in self.ours.items():
            text = text.replace(theirs, ours)
        return json.loads(text)

    def prepare_maps(self, operation: str) -> None:
        """Have rows in the maps that the operation lists."""
        node = self.node
        if operation == "ip":
            present(node, "abc", number=1234)
            for endpoint in node.endpoints.all():
                for ip in endpoint.addresses:
                    node.maps.ipcache.rows[IpcacheKey.host(ip).pack()] = IpcacheValue(
                        endpoint.identity
                    ).pack()
        elif operation == "map":
            key, value = LxcKey(IPv4Address("10.0.1.77")).pack(), LxcValue(12, 1234, identity=256).pack()
            node.maps.lxc.rows[key] = value
            if node.maps.lxc.log is not None:
                node.maps.lxc.log.note(key, value)

    def prepare(self, method: str, path: str, body: Any, response: Any) -> None:
        """Bring about what the recorded answer implies: an endpoint that is there or not, a fault."""
        node, status = self.node, response["status"]
        if status == 200:
            self.prepare_maps(path.split("/")[2].partition("?")[0])
        match method, path.partition("?")[0].split("/")[2:]:
            case "PUT", ["endpoint", _]:
                present(node, CONTAINER) if status == 400 else vanished(node, CONTAINER)
                node.kernel.fault = OSError(28, "build failed") if status == 500 else None
            case "DELETE", ["endpoint"]:
                present(node, CONTAINER) if status in {200, 206} else vanished(node, CONTAINER)
                node.kernel.drop_fault = OSError(5, "map is gone") if status == 206 else None
            case "DELETE", ["endpoint", _]:
                present(node, "abc", number=1234)
                node.kernel.drop_fault = OSError(5, "map is gone") if status == 206 else None
            case "GET", ["endpoint", name, *_] if CONTAINER in name:
                vanished(node, CONTAINER) if status == 404 else present(node, CONTAINER)
            case "GET", ["endpoint", *_] | ["fqdn", "cache", _] if response.get("body") != []:
                present(node, "abc", number=1234)
            case "GET", ["healthz" | "debuginfo"]:
                present(node, "abc", number=1234)
                node.health.report(
                    "agent.cni-config", "ok", "wrote CNI configuration file 05-cilium.conflist"
                )
            case "POST", ["ipam"] if status == 502:
                for _ in range(254 - len(node.ipam.dump())):
                    node.ipam.allocate_next("default/other")


def present(node: Node, container: str, number: int | None = None) -> None:
    """See that the container has an endpoint."""
    if node.endpoints.by_container(container):
        return
    if number is not None:
        node.kernel.numbers.insert(0, number)
    addresses = {each.ip.version: each.ip for each in node.ipam.allocate_next("default/web-0")}
    create(
        node.endpoints,
        EndpointRequest(
            container_id=container,
            container_ifname="eth0",
            ifname="lxcaaaaaaaaaaaa",
            ifindex=12,
            pod_mac=bytes.fromhex("5e0000000002"),
            host_mac=bytes.fromhex("5e0000000001"),
            ipv4=IPv4Address(int(addresses[4])),
            pool="default",
            ipv6=IPv6Address(int(addresses[6])) if 6 in addresses else None,
            ipv6_pool="default",
            pod_name="web-0",
            pod_namespace="default",
            labels=("k8s:app=web", "k8s:pod-template-hash=1"),
        ),
    )


def vanished(node: Node, container: str) -> None:
    """See that the container has no endpoint."""
    for endpoint in node.endpoints.by_container(container):
        node.endpoints.delete(endpoint)


def compare(method: str, path: str, recorded: Any, got: Answer) -> None:
    """Check body and Content-Type: the text of a refusal is the same, of an answer the shape."""
    if got.status == 429:
        assert isinstance(got.body, str)  # a text where the schema has none, too
        recorded = got.body
    if recorded is None:
        assert (got.raw, got.headers.get("Content-Type")) == (b"", None)
        return
    assert got.headers["Content-Type"] == "application/json"
    if isinstance(recorded, str):
        assert isinstance(got.body, str)
        assert got.status in ANY_TEXT or got.body == recorded
        return
    assert list(differences(recorded, got.body, absent_parts(method, path))) == []


def absent_parts(method: str, path: str) -> set[str]:
    """Paths of the parts that our answer to this request need not have."""
    parts = path.partition("?")[0].split("/")[2:]
    if len(parts) == 3:
        return set(NO_SUCH_PART.get(parts[2], ())) if parts[2] != "healthz" else {"connected"}
    within = "[]/" if (method, parts) == ("GET", ["endpoint"]) else ""
    return {within + part for part in NO_SUCH_PART.get(parts[0], ())}


def test_every_recording_is_replayed_or_has_a_reason_not_to_be(count: Count) -> None:
    index = json.loads(INDEX.read_text())
    names = {row["file"].removesuffix(".json") for row in index["cni"] + index["dbg"]}
    assert set(REPLAYED) | set(EXCLUDED) == names
    assert all(recorded(name).exists() for name in REPLAYED)
    count("recordings of cni and dbg", {"replayed": len(REPLAYED), **not_replayed(EXCLUDED.values())})


TRAPS = [
    trap
    for trap in json.loads(recorded("dbg/_crash_traps").read_text())
    if re.fullmatch(r"GET /v1/(healthz|config|metrics/\?|endpoint(/.*)?)", trap["route"])
    and "wireguard" not in trap["field"]
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: f"{trap['command']}-{trap['field']}")
async def test_nothing_is_missing_that_makes_a_client_crash(trap: Any, tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        present(node, "abc", number=1234)
        path = trap["route"].removeprefix("GET ").removesuffix("?").replace("[^/]+", "1234")
        got = await node.ask("GET", path)
    reached = [got.body]
    for step in trap["field"].split("/"):
        if step == "[]":
            reached = [item for one in reached for item in one]
        elif "key absent" in trap["crashes_when"]:
            reached = [one[step] for one in reached]
        else:
            reached = [one[step] for one in reached if step in one]
    assert None not in reached
