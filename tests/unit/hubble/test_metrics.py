"""Metrics of flows as recorded of Cilium: options, contexts, series, exemplars, pods that are no more."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from cells.hubble.codec import from_json
from cells.hubble.flow import Flow
from cells.hubble.metrics.kinds import FlowMetrics
from cells.hubble.metrics.series import MetricOptionsError, openmetrics
from lifecycle.process import exposition
from tests.support.recordings import recordings

RECORDED = json.loads((recordings("hubble") / "metrics.json").read_text())
CASES = [pytest.param(case, id=case["name"]) for case in RECORDED["cases"]]


def fed(case: dict[str, Any]) -> FlowMetrics:
    metrics = FlowMetrics(case["hubble_metrics"])
    for tree in RECORDED["flows"]:
        metrics.process(from_json(Flow, tree))
    deleted = case.get("deleted_endpoints", [])
    for namespace, pod in zip(deleted[::2], deleted[1::2], strict=True):
        metrics.remove_pod(namespace, pod)
    return metrics


def series(lines: list[str]) -> Counter[str]:
    """What each line counts, without what Cilium's labels have wrong: see ``corrected``."""
    found: Counter[str] = Counter()
    for line in filter(None, lines):
        if line.startswith("#"):
            found[line] += 1
        else:
            name, _, value = corrected(line).rpartition(" ")
            found[name] += float(value)  # type: ignore[assignment]
    return found


def corrected(line: str) -> str:
    """The labels in their order: ICMPv6 is no IPv4, and rcode is rcode, with any labels beside it."""
    if line.startswith("hubble_icmp_total"):
        return re.sub(r'family="[^"]*",', "", line)
    if line.startswith(("hubble_dns_queries_total", "hubble_dns_responses_total")):
        labels, _, value = line.partition("{")[2].rpartition("} ")
        pairs = re.findall(r'(\w+)="([^"]*)"', labels)
        renamed = sorted(("rcode" if name == "type" else name, text) for name, text in pairs)
        return line.partition("{")[0] + str(renamed) + f" {value}"
    return re.sub(r'error_code="[^0-9]"', 'error_code="0"', line)


@pytest.mark.parametrize("case", CASES)
def test_flows_are_counted_as_recorded(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(MetricOptionsError) as refused:
            fed(case)
        assert str(refused.value) == case["error"]
        return
    metrics = fed(case)
    if case.get("format") != "openmetrics":
        assert series(exposition(metrics.families()).split("\n")) == series(case["text"])
        return
    text = openmetrics(list(metrics.all()))
    text = re.sub(r"( # \{.*\} \S+) [\d.]+$", r"\1 <TIMESTAMP>", text, flags=re.MULTILINE)
    assert text.split("\n") == [*filter(None, case["text"]), ""]


def test_icmpv6_is_of_the_family_ipv6() -> None:
    metrics = fed({"hubble_metrics": ["icmp"]})
    lines = exposition(metrics.families()).split("\n")
    assert 'hubble_icmp_total{family="IPv6",type="NeighborSolicitation"} 1' in lines


def test_every_label_of_dns_is_called_what_it_is() -> None:
    labels = "source_pod,source_namespace,destination_pod,destination_namespace,traffic_direction"
    metrics = fed({"hubble_metrics": [f"dns:labelsContext={labels}"]})
    assert all("rcode" in metric.labels for metric in metrics.all() if "types" not in metric.name)
