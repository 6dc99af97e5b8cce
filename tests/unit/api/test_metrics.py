"""The API's own metrics, and its list of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.endpoint.changes import PodLabelsWatch
from cells.tunnel.settings import PodTunnel, tunnel_features
from lifecycle import invoke, provide, supply
from lifecycle.testing import eventually
from tests.unit.api.node import running_node
from tests.unit.api.pods import added
from tests.unit.api.series import series

pytestmark = pytest.mark.anyio


async def test_requests_are_counted_by_what_they_are_about(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await node.ask("GET", "/v1/endpoint")
        await node.ask("GET", "/v1/endpoint/77/log")
        await node.ask("GET", "/v1/endpoint/78")
        await node.ask("GET", "/no/such/path/1")
        await node.ask("BREW", "/no/such/path/2")
        await node.ask("PATCH", "/v1/endpoint/78")
        times = await series(node, "cilium_agent_api_process_time_seconds")
        events = await series(node, "cilium_event_ts")
    assert sorted(tuple(metric["labels"].values()) for metric in times) == [
        ("/v1/endpoint", "GET", "200"),
        ("/v1/endpoint", "GET", "404"),
        ("unknown", "GET", "404"),
        ("unknown", "OTHER", "404"),
        ("unknown", "PATCH", "405"),
    ]
    assert all(list(metric["labels"]) == ["path", "method", "return_code"] for metric in times)
    assert all(0 < metric["value"] < 60 for metric in times)
    assert {"source": "api", "scope": "/v1/endpoint", "action": "GET"} in [one["labels"] for one in events]


@pytest.mark.parametrize("path", ["/v1/metrics", "/v1/metrics/"])
async def test_metrics_are_listed_where_no_port_serves_them(tmp_path: Path, path: str) -> None:
    async with running_node(tmp_path) as node:
        await node.ask("POST", "/v1/ipam?family=ipv4")
        (version,) = await series(node, "cilium_version", path)
        (addresses,) = await series(node, "cilium_ip_addresses", path)
        (zero, *_) = await series(node, "cilium_endpoint", path)
    assert (version["value"], version["labels"]["revision"]) == (1, "0123456789ab")
    assert addresses == {"name": "cilium_ip_addresses", "value": 2, "labels": {"family": "ipv4"}}
    assert zero == {"name": "cilium_endpoint", "value": 0}


async def test_the_setting_counts_for_the_list_too(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings={"metrics": "-cilium_version"}) as node:
        assert await series(node, "cilium_version") == []


@pytest.mark.parametrize(("cidr6", "family"), [("", "ipv4-only"), ("fd00:1::/112", "ipv4-ipv6-dual-stack")])
async def test_feature_metrics_show_the_enabled_address_families(
    tmp_path: Path, cidr6: str, family: str
) -> None:
    async with running_node(tmp_path, cidr6=cidr6) as node:
        protocols = await series(node, "cilium_feature_datapath_internet_protocol")
    assert len(protocols) == 3
    assert [one["labels"]["address_family"] for one in protocols if one.get("value")] == [family]


@pytest.mark.parametrize("tunnel", ["", "vxlan", "geneve"])
async def test_feature_metrics_show_how_pods_are_connected(tmp_path: Path, tunnel: str) -> None:
    more = [supply(PodTunnel(used=bool(tunnel), protocol=tunnel)), provide(tunnel_features)]
    async with running_node(tmp_path, settings={"ipam": "kubernetes"}, more=more) as node:
        networks = await series(node, "cilium_feature_datapath_network")
        modes = await series(node, "cilium_feature_controlplane_ipam")
    found = [one["labels"]["mode"] for one in (*networks, *modes) if one.get("value")]
    assert found == [f"overlay-{tunnel}" if tunnel else "direct-routing", "kubernetes"]


POD = """
apiVersion: v1
kind: Pod
metadata: {name: NAME, namespace: default, uid: 6f0d7a3e-1111-4222-8333-944455556666}
spec: {containers: [{name: main}]}
"""


async def test_links_and_lags_are_shown_when_they_are_added(tmp_path: Path) -> None:
    """The lag is from an endpoint to its pod's object, and 0 where that came first."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    words = "+cilium_endpoint_max_ifindex +cilium_k8s_event_lag_seconds"
    watches: list[PodLabelsWatch] = []

    def capture(watch: PodLabelsWatch) -> None:
        watches.append(watch)

    settings = {"metrics": words, "manifests-dir": str(folder)}
    async with running_node(tmp_path, settings=settings, more=[invoke(capture)]) as node:
        (watch,) = watches
        assert await series(node, "cilium_k8s_event_lag_seconds") == []
        (nothing,) = await series(node, "cilium_endpoint_max_ifindex")
        (folder / "other.yaml").write_text(POD.replace("NAME", "other"))
        await eventually(lambda: watch.lag == 0)
        await added(node)
        (folder / "web.yaml").write_text(POD.replace("NAME", "web-0"))
        await eventually(lambda: watch.lag)
        (lag,) = await series(node, "cilium_k8s_event_lag_seconds")
        (highest,) = await series(node, "cilium_endpoint_max_ifindex")
    assert (nothing.get("value", 0), highest["value"]) == (0, 12)
    assert lag["labels"] == {"source": "k8s"}
    assert 0 < lag["value"] < 60


async def test_links_and_lags_are_not_shown_by_default(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        assert await series(node, "cilium_endpoint_max_ifindex") == []
        assert await series(node, "cilium_k8s_event_lag_seconds") == []
