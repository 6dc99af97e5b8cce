"""Results, report and metrics of our prober compared with Cilium's recorded ones."""

from __future__ import annotations

import re
from ipaddress import ip_address

import msgspec
import pytest

from cells.api.health import connectivity
from cells.base.metrics import Histogram, MetricFamily
from cells.health.paths import ConnectivityMetrics, Outcome, ProbedNode, ProbeResults
from tests.unit.cluster_health.recorded import DATA, Json, recording

SERVER = sorted(path.stem for path in DATA.glob("server_*.json"))
BROKEN = {
    "server_empty_ip": "a host without an address is left out: Cilium's clients call it unreachable",
    "server_no_primary": "Cilium crashes",
    "server_null_family": "Cilium crashes",
}


def addresses(pair: Json) -> list[str]:
    found = [pair.get(family) or {} for family in ("ipv4", "ipv6")] if pair else []
    return [each["ip"] for each in found if each.get("enabled") and usable(each.get("ip", ""))]


def usable(ip: str) -> bool:
    try:
        return bool(ip_address(ip))
    except ValueError:
        return False


def node(element: Json) -> ProbedNode:
    others = [each for each in element.get("secondary-addresses") or () if each.get("enabled")]
    host = [*addresses(element.get("primary-address")), *(each["ip"] for each in others)]
    return ProbedNode(element["name"], tuple(host), tuple(addresses(element.get("health-endpoint-address"))))


def outcome(value: Json) -> Outcome | None:
    return None if value is None else Outcome(value.get("latency", 0), value.get("status", ""))


def apply(results: ProbeResults, step: Json) -> None:
    added = [node(each) for each in step.get("nodesAdded") or ()]
    names = {each.name for each in added}
    removed = [each["name"] for each in step.get("nodesRemoved") or () if each["name"] not in names]
    results.update(added, removed)
    for ip, (icmp, http) in (step.get("inject_results_icmp_http") or {}).items():
        results.record(ip, outcome(icmp), outcome(http))


def lines(families: list[MetricFamily]) -> set[str]:
    found = set()
    for family in families:
        for values, value in family.series.items():
            labels = "".join(
                f'{name}="{text}",' for name, text in sorted(zip(family.labels, values, strict=True))
            )
            text = f"count={value.count} sum={value.sum:g}" if isinstance(value, Histogram) else f"{value:g}"
            found.add(f"{family.name}{{{labels}}} {text}")
    return found


def rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):g}"


@pytest.mark.parametrize("name", [name for name in SERVER if name not in BROKEN])
def test_nodes_and_outcomes_become_the_report_and_the_metrics_that_were_recorded(name: str) -> None:
    recorded = recording(name)
    results = ProbeResults()
    report = results.report(0.0)
    for step in recorded["steps"]:
        apply(results, step)
        report = results.report(1.0)
        if (wanted := step.get("probed_ips_by_node")) is not None:
            assert set(results.addresses()) == {ip for ips in wanted.values() for ip in ips}
        if (nodes := step.get("status_nodes")) is not None:
            shown = msgspec.to_builtins(connectivity(recorded["self"], report))["nodes"]
            assert [{key: each[key] for key in each.keys() - {"since"}} for each in shown] == nodes
    metrics = ConnectivityMetrics(recorded["self"])
    metrics.publish(report)
    wanted = {re.sub(r"[0-9.e-]+$", rounded, line) for line in recorded["metrics_after_last_step"]}
    found = lines(metrics.families())
    if not all(each.endpoint for each in report.nodes or ()):
        # Cilium leaves nodes without a health endpoint out of its metrics; of ours they show the node itself.
        wanted, found = ({line for line in each if 'type="endpoint"' in line} for each in (wanted, found))
    assert found == wanted


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_node_without_an_address_stays_in_the_report(name: str) -> None:
    results = ProbeResults()
    steps = recording(name)["steps"]
    for step in steps:
        apply(results, step)
    added = {each["name"] for step in steps for each in step["nodesAdded"]}
    shown = msgspec.to_builtins(connectivity("kind/n1", results.report(1.0)))["nodes"]
    assert {each["name"] for each in shown} == added
