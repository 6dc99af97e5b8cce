"""API operations over a socket: the plugin's sequence, and the form of each error."""

from __future__ import annotations

from ipaddress import IPv4Address
from pathlib import Path

import anyio
import pytest

from cells.api.operations.config_mapping import SILENT, event_options
from cells.cluster.identity.numbers import HEALTH
from cells.endpoint import EndpointRequest
from tests.unit.api.node import running_node
from tests.unit.api.pods import added, request_body
from tests.unit.endpoint.fakes import create

pytestmark = pytest.mark.anyio


async def test_an_unmodified_plugin_makes_and_removes_a_pod(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        probe, config = [await node.ask("GET", "/v1/config") for _ in range(2)]
        assert probe.status == config.status == 200
        assert config.body["status"]["datapathMode"] == "veth"
        lease = await node.ask("POST", "/v1/ipam?owner=default%2Fweb-0", headers={"Expiration": "true"})
        assert lease.status == 201
        address, uuid = lease.body["address"]["ipv4"], lease.body["ipv4"]["expiration-uuid"]
        assert lease.body["host-addressing"] == config.body["status"]["addressing"]
        assert node.ipam.owner(IPv4Address(address)) == "default/web-0"

        made = await node.ask("PUT", "/v1/endpoint/cilium-local:0", request_body(address, uuid))
        assert made.status == 201
        networking = made.body["status"]["networking"]
        assert networking["mac"] == "02:00:00:00:00:02"
        assert networking["addressing"] == [{"ipv4": address, "ipv4-pool-name": "default"}]
        assert made.body["status"]["state"] == "ready"
        assert {kind for kind, _ in node.kernel.rows} == {"config", "lxc"}
        assert len(node.kernel.prefixes.rows) == 1
        assert node.kernel.attached == {12}

        removed = await node.ask("DELETE", "/v1/endpoint", {"container-id": "cid1"})
        assert (removed.status, removed.raw) == (200, b"")
        assert node.kernel.rows == {}
        assert node.given() == set()

        again = await node.ask("DELETE", "/v1/endpoint", {"container-id": "cid1"})
        assert (again.status, again.body) == (404, "endpoints not found")


async def test_the_address_of_an_endpoint_no_longer_expires(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        _, address = await added(node)
        again = await node.ask(
            "PUT", "/v1/endpoint/cilium-local:0", request_body(address, "stale", "cid2", {"mac": ""})
        )
        assert (again.status, again.body) == (400, f"IP ipv4:{address} is already in use")
        in_use = await node.ask("DELETE", f"/v1/ipam/{address}?pool=default")
        assert (in_use.status, in_use.body) == (500, "IP is in use by endpoint 1")


@pytest.mark.parametrize(
    "name",
    [
        "1",
        "cilium-local:1",
        "cilium-local:0x1",
        "cni-attachment-id:cid1:eth0",
        "cni-attachment-id%3Acid1%3Aeth0",
        "container-id:cid1",
        "cep-name:default%2Fweb-0",
        "pod-name:default:web-0",
        "pod-name:default%2Fweb-0",
    ],
)
async def test_an_endpoint_is_found_by_every_name_it_has(name: str, tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        got = await node.ask("GET", f"/v1/endpoint/{name}")
        assert (got.status, got.body["id"]) == (200, 1)
        assert got.body["status"]["external-identifiers"] == {
            "cni-attachment-id": "cid1:eth0",
            "container-id": "cid1",
            "pod-name": "default/web-0",
            "k8s-pod-name": "web-0",
            "k8s-namespace": "default",
        }


async def test_an_endpoint_is_found_by_its_address(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        _, address = await added(node)
        assert (await node.ask("GET", f"/v1/endpoint/ipv4:{address}")).status == 200


@pytest.mark.parametrize(
    ("name", "status", "body"),
    [
        ("foo:1", 400, 'unknown endpoint ID prefix "foo"'),
        ("9999999", 400, "endpoint id too large: 9999999"),
        ("-1", 400, "invalid numeric cilium id: -1 is negative"),
        ("7", 404, None),
        ("container-id:nope", 404, None),
    ],
)
async def test_a_name_that_is_none_is_refused_as_documented(
    name: str, status: int, body: str | None, tmp_path: Path
) -> None:
    async with running_node(tmp_path) as node:
        for method in ("GET", "DELETE"):
            got = await node.ask(method, f"/v1/endpoint/{name}")
            assert (got.status, got.body) == (status, body)
        for part in ("healthz", "log"):
            got = await node.ask("GET", f"/v1/endpoint/{name}/{part}")
            assert (got.status, got.raw, got.headers.get("Content-Type")) == (status, b"", None)
        for part in ("labels", "config"):
            got = await node.ask("GET", f"/v1/endpoint/{name}/{part}")
            assert (got.status, got.raw) == (404, b"")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mac": "zz:00"}, 'invalid MAC address "zz:00"'),
        ({"addressing": {"ipv4": "10.0.0.999"}}, 'invalid IPv4 address "10.0.0.999"'),
        ({"addressing": {"ipv4": "fd00::1"}}, 'invalid IPv4 address "fd00::1"'),
        ({"addressing": {"ipv6": "fd00::1"}}, "IPv6 address fd00::1: IPv6 is disabled on this node"),
        ({"labels": ["reserved:host"]}, "not allowed to add reserved labels: reserved:host"),
        ({"datapath-configuration": {"install-endpoint-route": True}}, "install-endpoint-route"),
        ({"properties": {"property-fake-endpoint": True}}, "property-fake-endpoint"),
    ],
)
async def test_an_invalid_endpoint_is_refused_and_leaves_nothing(
    changes: dict[str, object], text: str, tmp_path: Path
) -> None:
    async with running_node(tmp_path) as node:
        got = await node.ask("PUT", "/v1/endpoint/cilium-local:0", request_body("10.0.1.9", changes=changes))
        assert got.status == 400
        assert text in got.body
        assert node.kernel.rows == {}
        assert node.endpoints.all() == []


async def test_delegated_addresses_come_with_a_length_and_are_not_released(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        body = request_body("10.9.0.77", changes={"datapath-configuration": {"external-ipam": True}})
        body["addressing"] = {"ipv4": "10.9.0.77/24"}
        made = await node.ask("PUT", "/v1/endpoint/cilium-local:0", body)
        assert made.body["status"]["networking"]["addressing"] == [{"ipv4": "10.9.0.77"}]
        assert (await node.ask("DELETE", "/v1/endpoint/1")).status == 200


async def test_a_kernel_that_refuses_is_a_500_and_leaves_nothing(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        node.kernel.fault = OSError(19, "No such device")
        got = await node.ask("PUT", "/v1/endpoint/cilium-local:0", request_body("10.0.1.9"))
        assert got.status == 500
        assert "No such device" in got.body
        assert node.kernel.rows == {}


async def test_a_pod_waits_for_a_policy_map_when_none_is_prepared(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        node.kernel.empty_once = True
        await added(node)
        assert node.kernel.waited == 1


async def test_a_partly_failed_deletion_returns_the_number_of_errors(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        node.kernel.drop_fault = OSError(5, "Input/output error")
        got = await node.ask("DELETE", "/v1/endpoint", {"container-id": "cid1"})
        assert (got.status, got.body) == (206, 1)
        assert node.endpoints.all() == []


async def test_the_nodes_own_endpoints_are_not_deleted(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        health = EndpointRequest(
            container_id="cilium-health",
            ifname="lxc_health",
            ifindex=7,
            pod_mac=bytes(6),
            host_mac=bytes(6),
            ipv4=IPv4Address("10.0.1.9"),
            reserved=HEALTH,
        )
        number = create(node.endpoints, health).id
        for name in (f"{number}", f"cilium-local:{number}", "ipv4:10.0.1.9"):
            got = await node.ask("DELETE", f"/v1/endpoint/{name}")
            assert (got.status, got.body) == (400, "endpoint may not be associated reserved labels")
        assert [each.id for each in node.endpoints.all()] == [number]
        await added(node)  # in reserved:init, or with labels of its own
        assert (await node.ask("DELETE", "/v1/endpoint/pod-name:default:web-0")).status == 200


async def test_the_list_is_filtered_by_the_labels_in_the_body(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        namespace = "k8s:io.kubernetes.pod.namespace=default"
        for labels, found in (
            (None, 1),
            ([], 1),
            ([namespace], 1),
            (["any:io.kubernetes.pod.namespace=default"], 1),
            (["io.kubernetes.pod.namespace=default"], 1),
        ):
            got = await node.ask("GET", "/v1/endpoint", labels)
            assert (got.status, len(got.body)) == (200, found), labels
        for labels in ([namespace, "k8s:app=web"], ["container:io.kubernetes.pod.namespace=default"]):
            got = await node.ask("GET", "/v1/endpoint", labels)
            assert (got.status, got.raw) == (404, b"")


async def test_no_endpoints_is_an_empty_list(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        got = await node.ask("GET", "/v1/endpoint")
        assert (got.status, got.raw) == (200, b"[]\n")


async def test_sub_resources_of_an_endpoint_are_answered(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        health = await node.ask("GET", "/v1/endpoint/1/healthz")
        assert health.body == {"overallHealth": "OK", "bpf": "OK", "policy": "OK", "connected": True}
        log = await node.ask("GET", "/v1/endpoint/1/log")
        assert log.body[0]["state"] == "ready"
        assert log.body[0]["timestamp"].endswith("Z")
        labels = await node.ask("GET", "/v1/endpoint/1/labels")
        assert "k8s:io.kubernetes.pod.namespace=default" in labels.body["status"]["security-relevant"]
        assert labels.body["status"]["realized"] == {}
        config = await node.ask("GET", "/v1/endpoint/1/config")
        assert config.body == {
            "realized": {"options": {"SourceIPVerification": "Enabled"}, "label-configuration": {}},
            "immutable": event_options(SILENT),
        }


async def test_the_options_of_an_endpoint_can_be_changed_and_sent_back(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        path = "/v1/endpoint/1/config"
        for value, shown in (("0", "Disabled"), ("Disabled", "Disabled"), ("Enabled", "Enabled")):
            body = {"label-configuration": {}, "options": {"SourceIPVerification": value}}
            done = await node.ask("PATCH", path, body)
            assert (done.status, done.raw) == (200, b"")
            assert (await node.ask("GET", path)).body["realized"]["options"]["SourceIPVerification"] == shown
            assert node.kernel.any_source is (shown == "Disabled")
        for options in ({"Debug": "1"}, {"SourceIPVerification": "perhaps"}):
            refused = await node.ask("PATCH", path, {"options": options})
            assert (refused.status, refused.raw) == (400, b"")
        assert (await node.ask("PATCH", "/v1/endpoint/77/config", {"options": {}})).status == 404


async def test_the_labels_of_an_endpoint_can_be_changed(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        path = "/v1/endpoint/1/labels"
        before = (await node.ask("GET", "/v1/endpoint/1")).body["status"]["identity"]
        assert (await node.ask("PATCH", path, {"user": ["k8s:tier=front"]})).status == 200
        labels = (await node.ask("GET", path)).body
        assert labels["spec"] == labels["status"]["realized"] == {"user": ["k8s:tier=front"]}
        assert "k8s:tier=front" in labels["status"]["security-relevant"]
        after = (await node.ask("GET", "/v1/endpoint/1")).body["status"]
        assert (after["identity"]["id"] != before["id"], after["state"]) == (True, "ready")
        refused = await node.ask("PATCH", path, {"user": ["reserved:host"]})
        assert (refused.status, refused.body) == (500, "Not allowed to add reserved labels: reserved:host")
        assert (await node.ask("PATCH", path, {})).status == 200
        again = (await node.ask("GET", "/v1/endpoint/1")).body["status"]["identity"]
        assert again["labels"] == before["labels"]


async def test_an_endpoint_shows_the_controller_that_mends_it(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        node.kernel.fault = OSError(12, "no memory")
        asked = {"options": {"SourceIPVerification": "0"}}
        answer = await node.ask("PATCH", "/v1/endpoint/1/config", asked)
        assert answer.status == 500
        assert "retrying: [Errno 12] no memory" in answer.body

        async def failing() -> bool:
            shown = (await node.ask("GET", "/v1/endpoint/1")).body["status"]
            controllers = shown.get("controllers", [])
            return bool(controllers) and "consecutive-failure-count" in controllers[0]["status"]

        with anyio.fail_after(30):
            while not await failing():
                pass
        (listed,) = (await node.ask("GET", "/v1/endpoint")).body
        (controller,) = listed["status"]["controllers"]
        assert controller["name"] == "endpoint-1-regeneration-recovery"
        assert controller["configuration"]["error-retry-base"] == "2s"
        wrong = "regeneration recovery failed: [Errno 12] no memory"
        assert controller["status"]["last-failure-msg"] == wrong
        assert listed["status"]["state"] == "not-ready"
        everything = (await node.ask("GET", "/v1/healthz")).body
        assert controller["uuid"] in [each["uuid"] for each in everything["controllers"]]
        node.kernel.fault = None
        assert (await node.ask("DELETE", "/v1/endpoint/1")).status == 200
        left = (await node.ask("GET", "/v1/healthz")).body["controllers"]
        assert "endpoint-1-regeneration-recovery" not in [each["name"] for each in left]
