"""Every metric of an agent with a kernel: documented, well-formed, parsed by Prometheus's parser."""

from __future__ import annotations

import os

import aiohttp
import anyio
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from cells.agent import agent
from cells.base.metrics import MetricFamily
from cells.maps.node_maps import Maps
from cells.observe.metrics import Metrics
from lifecycle import Hive
from lifecycle.process.loop_lag import measured_loop
from tests.kernel.endpoint.nodes import SETTINGS as SMALL
from tests.kernel.endpoint.nodes import add_pod
from tests.support.metrics_table import PAGE, page
from tests.support.namespaces import in_node, new_netns

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

SETTINGS = {
    **SMALL,
    "state-dir": "/run/cilium",
    "write-cni-conf-when-ready": "/run/cilium/net.d/05-cilium.conflist",
    "prometheus-serve-addr": ":9962",
}
COUNTERS_WITHOUT_TOTAL = {"cilium_reconciler_count", "cilium_reconciler_prune_count"}


async def every_family() -> list[MetricFamily]:
    """All metrics of an agent that has just started, exposed or not."""
    async with Hive(agent, settings=SETTINGS).started() as hive:
        with structlog.testing.capture_logs() as logged:
            families = await hive.get(Metrics).all_families()
    assert [line for line in logged if line["log_level"] != "info"] == []
    return families


def test_the_page_shows_every_metric(in_node: None) -> None:
    """When not: GOLDEN=write pytest tests/kernel/metrics."""
    families = anyio.run(every_family, backend_options={"loop_factory": measured_loop})
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(page(families), encoding="utf-8")
    assert page(families) == PAGE.read_text(encoding="utf-8")


async def test_names_end_as_their_kinds_do(in_node: None) -> None:
    for family in await every_family():
        ends = family.name.endswith("_total")
        assert family.name.startswith(("cilium_", "hive_"))
        assert ends == (family.kind == "counter" and family.name not in COUNTERS_WITHOUT_TOTAL), family.name
        assert family.help[0].isupper(), family.name


async def test_counters_only_grow_and_a_pod_shows(in_node: None) -> None:
    with new_netns() as pod:
        async with Hive(agent, settings=SETTINGS).started() as hive:
            before = await scrape()
            add_pod(hive, 1, pod)
            after = await scrape()
    assert {what for what in before if what[0].endswith("_total")} <= after.keys()
    assert all(
        after[what] >= value
        for what, value in before.items()
        if what[0].endswith(("_total", "_count", "_sum"))
    )
    pod_has = {
        ("cilium_endpoint", ()): 1,
        ("cilium_endpoint_state", (("endpoint_state", "ready"),)): 1,
        ("cilium_bpf_map_ops_total", operation("policy", "update")): 2,
        ("cilium_bpf_map_ops_total", operation("hive_endpoints", "update")): 1,
    }
    assert {what: after[what] - before.get(what, 0) for what in pod_has} == pod_has


def operation(name: str, what: str) -> tuple[tuple[str, str], ...]:
    """Labels of successful operations on a map."""
    return (("map_name", name), ("operation", what), ("outcome", "success"))


async def scrape() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the port."""
    async with aiohttp.ClientSession() as session, session.get("http://127.0.0.1:9962/metrics") as got:
        assert got.status == 200
        text = await got.text()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_system_calls_are_measured_when_their_metric_is_added(in_node: None) -> None:
    name = "cilium_bpf_syscall_duration_seconds"
    async with Hive(agent, settings=SETTINGS | {"metrics": f"+{name}"}).started() as hive:
        maps = hive.get(Maps)
        before = await scrape()
        maps.lxc.lookup(bytes(maps.lxc.spec.key_size))
        maps.encryption.update(bytes(4), bytes(maps.encryption.spec.value_size))
        after = await scrape()
    assert [before["cilium_bpf_maps", ()] > 0, calls(before, name, "create", "success") > 20] == [True, True]
    assert calls(before, name, "objPin", "success") > 20
    changed = [("lookup", "fail"), ("update", "success")]
    assert all(calls(after, name, *what) > calls(before, name, *what) for what in changed)


async def test_system_calls_are_not_measured_by_default(in_node: None) -> None:
    async with Hive(agent, settings=SETTINGS).started() as hive:
        assert hive.get(Maps).syscalls is None
        assert all("bpf_syscall" not in name for name, _ in await scrape())


def calls(
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, operation: str, outcome: str
) -> float:
    """How many calls are measured."""
    return samples.get((f"{name}_count", (("operation", operation), ("outcome", outcome))), 0.0)
