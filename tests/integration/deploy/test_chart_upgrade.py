"""An upgrade from the first chart renames no object; nodes and services do not lose settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cells.agent import agent
from lifecycle import Sources
from lifecycle.graph import sections
from lifecycle.settings.sources import load as load_settings
from lifecycle.testing import eventually
from tests.integration.deploy.rendered import CONFIG, OF_INIT, OLDER
from tests.support import chart
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.support.ports import free_port

pytestmark = pytest.mark.anyio

NODES, SERVICES = Resource("cilium.io", "ciliumnodes"), Resource("", "services")
POOL = {
    "apiVersion": "cilium.io/v2alpha1",
    "kind": "CiliumLoadBalancerIPPool",
    "metadata": {"name": "p"},
    "spec": {"blocks": [{"cidr": "203.0.113.0/28"}]},
}


def newer() -> dict[str, dict[str, Any]]:
    """What the chart renders of the same values now."""
    return chart.objects(OLDER["values"])


def test_an_upgrade_renames_no_object_and_changes_no_immutable_field() -> None:
    now = newer()
    assert OLDER["objects"].keys() - now.keys() == set(), "Helm would delete these"
    for name, was in OLDER["objects"].items():
        if "roleRef" in was:
            assert now[name]["roleRef"] == was["roleRef"], name
        if "selector" in was:
            assert now[name]["spec"]["selector"] == was["selector"], name


def test_upgraded_agents_use_the_state_of_the_previous_release() -> None:
    """Maps, endpoints and the plugin's configuration are found again by the next agent."""
    before, now = OLDER["objects"][CONFIG]["data"], newer()[CONFIG]["data"]
    for key in ("bpf-root", "ipam", "identity-allocation-mode", "cluster-name", "write-cni-conf-when-ready"):
        assert now[key] == before[key], key
    assert {"cluster-pool-ipv4-cidr", "cluster-pool-ipv4-mask-size"} <= now.keys()


def test_agents_take_the_older_settings_too() -> None:
    """Between the ConfigMap's change and the roll-out, and after a roll-back."""
    data = OLDER["objects"][CONFIG]["data"]
    known = {option.name for section in sections(agent) for option in section.options}
    given = [f"--{key}={text}" for key, text in data.items() if key in known - OF_INIT]
    structs = [section.struct for section in sections(agent)]
    assert [fault.text for fault in load_settings(structs, Sources(given)).faults] == []


KEYS = (
    *("external-envoy-proxy", "dnsproxy-enable-transparent-mode", "enable-bpf-masquerade"),
    *("bpf-map-dynamic-size-ratio", "bpf-ct-global-tcp-max", "bpf-ct-global-any-max"),
    "operator-api-serve-addr",
)
OLDEST = ("false", "false", None, None, "524288", "262144", None)
NEWEST = ("true", "true", None, "0.0025", None, None, "127.0.0.1:9234")


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("1.7", OLDEST),
        ("1.16.0-rc.1", OLDEST),
        ("1.9.4+build", ("false", "false", "true", "0.0025", None, None, "127.0.0.1:9234")),
        ("v1.12", ("false", "true", None, "0.0025", None, None, "127.0.0.1:9234")),
        ("2", NEWEST),
    ],
)
def test_the_version_that_was_first_installed_chooses_defaults_as_in_cilium_s_chart(
    version: str, wanted: tuple[str | None, ...]
) -> None:
    """A pre-release is later than no version to Helm, so its defaults are the oldest."""
    given: dict[str, Any] = {"upgradeCompatibility": version, "kubeProxyReplacement": "true"}
    objects = chart.objects(given)
    assert tuple(objects[CONFIG]["data"].get(key) for key in KEYS) == wanted
    (agent,) = objects["DaemonSet/cilium"]["spec"]["template"]["spec"]["containers"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert ("exec" in agent[probe]) == (wanted == OLDEST)
    given["bpf"] = {"ctTcpMax": 70000, "ctAnyMax": 50000, "mapDynamicSizeRatio": 0.01}
    assert tuple(chart.objects(given)[CONFIG]["data"][key] for key in KEYS[3:6]) == ("0.01", "70000", "50000")


@pytest.mark.parametrize("replacement", [None, ""])
def test_a_cluster_of_1_8_to_1_13_must_choose_a_replacement(replacement: str | None) -> None:
    for version in ("1.8", "1.13.9"):
        with pytest.raises(chart.RenderError, match="kubeProxyReplacement must be explicitly set"):
            chart.objects({"upgradeCompatibility": version, "kubeProxyReplacement": replacement})
    for version in ("1.7", "1.14", "1.10.0-rc.1"):
        given = {"upgradeCompatibility": version, "kubeProxyReplacement": replacement}
        assert chart.objects(given)[CONFIG]["data"]["kube-proxy-replacement"] == "false"


def options(data: Mapping[str, str]) -> Mapping[str, object]:
    """An operator's settings, with ports that are free here."""
    ours = {
        "operator-api-serve-addr": f"127.0.0.1:{free_port()}",
        "operator-prometheus-serve-addr": f"127.0.0.1:{free_port()}",
    }
    return {key: text for key, text in data.items() if key not in OF_INIT} | ours


def node(name: str) -> dict[str, Any]:
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": "u"}
    meta = {"name": name, "ownerReferences": [owner]}
    return {"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": meta, "spec": {}}


def service(name: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": "default"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
    }


async def test_nodes_keep_their_ranges_and_services_their_addresses(tmp_path: Path) -> None:
    server = ApiServer()
    server.crd_delay = 0

    def given() -> dict[str, Any]:
        """Ranges by node, addresses by service."""
        nodes = {
            key[1]: one["spec"].get("ipam", {}).get("podCIDRs")
            for key, one in server.store.of(NODES).objects.items()
        }
        services = {
            key[1]: one["status"]["loadBalancer"].get("ingress")
            for key, one in server.store.of(SERVICES).objects.items()
            if one["spec"]["type"] == "LoadBalancer"
        }
        return nodes | services

    def settled(*names: str) -> bool:
        found = given()
        return all(found.get(name) for name in names)

    async with server.serving():
        operators = Operators(server, tmp_path)
        async with operators.running(options(OLDER["objects"][CONFIG]["data"])):
            for body in (POOL, node("b"), node("a"), service("web"), service("dns")):
                server.add(body)
            await eventually(lambda: settled("a", "b", "web", "dns"), 30)
        before = given()
        assert {text.partition("/")[2] for name in ("a", "b") for text in before[name]} == {"26"}
        async with operators.running(options(newer()[CONFIG]["data"])):
            for body in (node("0"), service("a-first")):
                server.add(body)
            await eventually(lambda: settled("0", "a-first"), 30)
            after = given()
    assert {name: after[name] for name in before} == before
    assert len({json.dumps(one) for one in after.values()}) == len(after), "nothing is given twice"
