"""Configuration, health and prefixes of the node over a socket."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest

from cells.api.operations.config_mapping import SILENT, event_options
from cells.api.operations.node import numbered
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.cluster.node_ids import NodeAddressID
from cells.health import ProbeResponder
from cells.policy.maps import ALLOW_ALL, ALLOW_LOCALHOST
from lifecycle import replace
from lifecycle.testing import fake
from tests.unit.api.node import running_node
from tests.unit.api.pods import added, request_body

pytestmark = pytest.mark.anyio


async def test_policy_enforcement_is_changed_for_every_endpoint(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings={"allow-localhost": "always"}) as node:
        await added(node)
        spec = (await node.ask("GET", "/v1/config")).body["spec"]
        changed = await node.ask("PATCH", "/v1/config", spec | {"policy-enforcement": "always"})
        assert (changed.status, changed.raw) == (200, b"")
        assert node.kernel.policies == {1: ALLOW_LOCALHOST}
        config = (await node.ask("GET", "/v1/config")).body
        assert config["spec"]["policy-enforcement"] == "always"
        assert config["status"]["realized"] == config["spec"]
        policy = (await node.ask("GET", "/v1/endpoint/1")).body["status"]["policy"]["realized"]
        assert (policy["policy-enabled"], policy["policy-revision"]) == ("both", 2)
        again = await node.ask("PATCH", "/v1/config", config["spec"])
        assert again.status == 200
        assert (await node.ask("PATCH", "/v1/config", {"policy-enforcement": "default"})).status == 200
        assert node.kernel.policies == {1: ALLOW_ALL}


async def test_source_addresses_are_verified_or_not(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        options = {"SourceIPVerification": "Disabled"}
        assert (await node.ask("PATCH", "/v1/config", {"options": options})).status == 200
        assert node.kernel.any_source
        shown = (await node.ask("GET", "/v1/config")).body["spec"]["options"]
        assert shown == event_options(SILENT) | {"Debug": "Disabled"} | options


async def test_packet_notifications_are_changed_or_refused(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        options = {"DropNotification": "Enabled", "MonitorAggregationLevel": "Max"}
        assert (await node.ask("PATCH", "/v1/config", {"options": options})).status == 200
        shown = (await node.ask("GET", "/v1/config")).body["spec"]["options"]
        assert options.items() <= shown.items()
        refused = await node.ask("PATCH", "/v1/config", {"options": {"MonitorAggregationLevel": "9"}})
        assert (refused.status, refused.body[:24]) == (400, 'invalid option value "9"')


async def test_debug_is_switched_and_shown(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        for value in ("Enabled", "Disabled"):
            assert (await node.ask("PATCH", "/v1/config", {"options": {"Debug": value}})).status == 200
            assert (await node.ask("GET", "/v1/config")).body["spec"]["options"]["Debug"] == value


async def test_a_change_endpoints_cannot_follow_is_a_500(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        node.kernel.policy_fault = OSError(12, "Cannot allocate memory")
        got = await node.ask("PATCH", "/v1/config", {"policy-enforcement": "always"})
        assert (got.status, got.body) == (500, "endpoints [1] have failed to regenerate, retrying")


async def test_the_configuration_can_be_sent_back(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        spec = (await node.ask("GET", "/v1/config")).body["spec"]
        same = await node.ask("PATCH", "/v1/config", spec)
        assert (same.status, same.raw) == (200, b"")
        other = await node.ask("PATCH", "/v1/config", {"policy-enforcement": "x"})
        assert (other.status, other.body) == (400, "invalid option for PolicyEnforcement x")


async def test_status_is_always_200_and_brief_when_asked(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        brief = await node.ask("GET", "/v1/healthz", headers={"Brief": "true"})
        assert brief.body == {
            "cilium": {"state": "Ok", "msg": "1.17.0 (v1.17.0-abcdef)"},
            "cluster": {"ciliumHealth": {"state": "Disabled"}},
            "stale": {},
            "controllers": [],
        }
        node.health.report("agent.cni-config", "degraded", "disk full")
        node.health.report("agent.other", "degraded", "also bad")
        failed = await node.ask("GET", "/v1/healthz", headers={"Brief": "true"})
        assert failed.status == 200
        assert failed.body["cilium"]["state"] == "Failure"
        assert failed.body["cilium"]["msg"].endswith("    Could not write CNI config file: disk full")
        assert len(failed.body["controllers"]) == 1
        whole = await node.ask("GET", "/v1/healthz", headers={"Brief": "false"})
        assert whole.body["cni-file"]["state"] == "Failure"
        assert whole.body["kube-proxy-replacement"]["mode"] == "False"


@pytest.mark.parametrize(
    ("failure", "state"), [("", {"state": "Ok"}), ("port taken", {"state": "Warning", "msg": "port taken"})]
)
async def test_the_brief_status_has_that_of_cilium_health(
    tmp_path: Path, failure: str, state: dict[str, str]
) -> None:
    responder = replace(ProbeResponder, fake(ProbeResponder, enabled=True, failure=failure))
    async with running_node(tmp_path, more=[responder]) as node:
        brief = await node.ask("GET", "/v1/healthz", headers={"Brief": "true"})
        assert brief.body["cluster"] == {"ciliumHealth": state}


async def test_prefixes_are_listed_from_the_ipcache_claims(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await node.ask("PUT", "/v1/endpoint/cilium-local:0", request_body("10.0.1.77"))
        prefix, other = "10.0.7.0/24", IPv4Address("192.0.2.7")
        claim = IpcacheEntry(
            prefix=prefix,
            identity=2,
            source=Source.CUSTOM_RESOURCE,
            resource="node//b",
            tunnel_endpoint=other,
        )
        node.prefixes.upsert(claim)
        entries = {one["cidr"]: one for one in (await node.ask("GET", "/v1/ip")).body}
        assert entries["10.0.1.77/32"]["metadata"] == {
            "source": "k8s",
            "namespace": "default",
            "name": "web-0",
        }
        assert entries["10.0.7.0/24"] == {
            "cidr": "10.0.7.0/24",
            "identity": 2,
            "encryptKey": 0,
            "hostIP": "192.0.2.7",
            "metadata": {"source": "custom-resource"},
        }
        for kind in ("cep", "pod"):
            node.prefixes.upsert(
                IpcacheEntry(
                    prefix=f"10.1.7.{ord(kind[0])}/32",
                    identity=300,
                    source=Source.CUSTOM_RESOURCE,
                    resource=f"{kind}/shop/{kind}-0",
                    tunnel_endpoint=other,
                )
            )
        remote = (await node.ask("GET", "/v1/ip?cidr=10.1.7.0%2F24")).body
        assert {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in remote} == {
            *(("shop", "cep-0"), ("shop", "pod-0"))
        }
        for inside in ("10.0.0.0%2F16", "10.0.7.9%2F16"):
            found = (await node.ask("GET", f"/v1/ip?cidr={inside}")).body
            assert {one["cidr"] for one in found} == {"10.0.1.77/32", "10.0.7.0/24"}
        for wrong in ("zzz", "10.0.0.0", "10.0.0.0%2F255.255.0.0", "10.0.0.0%2F33"):
            assert (await node.ask("GET", f"/v1/ip?cidr={wrong}")).status == 400


async def test_prefixes_are_found_by_the_labels_of_their_identities(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await node.ask("PUT", "/v1/endpoint/cilium-local:0", request_body("10.0.1.77"))
        node.prefixes.upsert(
            IpcacheEntry(prefix="10.0.7.0/24", identity=2, source=Source.KUBERNETES, resource="node//b")
        )
        for label in ("reserved:world", "world"):
            found = (await node.ask("GET", "/v1/ip", [label])).body
            assert [one["cidr"] for one in found] == ["10.0.7.0/24"]
        for labels in (["reserved:health"], ["reserved:world", "k8s:app=web"]):
            assert (await node.ask("GET", "/v1/ip", labels)).status == 404


def test_numbers_of_nodes_come_with_their_addresses_this_one_first() -> None:
    rows = [
        NodeAddressID(ip_address(ip), number, f"default/n{number}")
        for ip, number in (("fd00::2", 2), ("192.0.2.2", 2), ("192.0.2.3", 1))
    ]
    found = [(one.id, one.ips) for one in numbered(["192.0.2.1"], rows)]
    assert found == [(0, ["192.0.2.1"]), (1, ["192.0.2.3"]), (2, ["192.0.2.2", "fd00::2"])]
