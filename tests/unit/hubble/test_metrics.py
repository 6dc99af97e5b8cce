"""Flow metrics as recorded of Cilium: options, contexts, series, exemplars, deleted pods."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from cells.hubble.codec import from_json
from cells.hubble.flow import Flow, FlowEndpoint, FlowFilter
from cells.hubble.metrics.kinds import FlowMetrics, MetricEntry, configured_metrics, metrics_of
from cells.hubble.metrics.series import MetricOptionsError, openmetrics
from lifecycle.process import exposition
from tests.support.recordings import recordings

RECORDED = json.loads((recordings("hubble") / "metrics.json").read_text())
CASES = [pytest.param(case, id=case["name"]) for case in RECORDED["cases"]]


def fed(case: dict[str, Any]) -> FlowMetrics:
    metrics = FlowMetrics(metrics_of(case["hubble_metrics"]))
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
    """The labels in their order: ICMPv6 is not IPv4, and rcode is rcode, with any labels beside it."""
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


def test_an_empty_label_names_no_application() -> None:
    labels = ["k8s:app=", "k8s:app.kubernetes.io/name=web=1", "k8s:k8s-app=dns"]
    metrics = FlowMetrics(metrics_of(["flow:sourceContext=app;labelsContext=destination_app"]))
    metrics.process(Flow(source=FlowEndpoint(labels=labels), destination=FlowEndpoint(labels=labels[:1])))
    (series,) = metrics.all()
    (values,) = series.series
    found = dict(zip(series.labels, values, strict=True))
    assert (found["source"], found["destination_app"]) == ("web=1", "")


CONFIGURED = """
metrics:
- name: drop
  contextOptions:
  - {name: labelsContext, values: [source_namespace, source_pod]}
  - {name: destinationContext, values: [pod, ip]}
  includeFilters:
  - source_pod: [default/]
  excludeFilters:
  - destination_port: ["53"]
- name: dns
  contextOptions: [{name: query}]
"""


def test_a_file_asks_for_what_texts_do_and_for_filters() -> None:
    drop, dns = configured_metrics(CONFIGURED)
    text = "drop:labelsContext=source_namespace,source_pod;destinationContext=pod|ip"
    assert [drop.options, dns] == [metrics_of([text])[0].options, *metrics_of(["dns:query"])]
    assert [list(one.source_pod) for one in drop.include] == [["default/"]]
    assert configured_metrics("") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("metrics: {", "while parsing a flow node"),
        ("metrics: [{contextOptions: []}]", "missing required field `name`"),
        ("metrics: [{name: drop, includeFilter: []}]", "unknown field `includeFilter`"),
        ("metrics: [{name: drop}, {name: drop}]", "metrics: drop has 2 entries"),
        ("metrics: [{name: drop, includeFilters: [{sourcepod: [a]}]}]", "sourcepod"),
        ("metrics: [{name: dropped}]", "metric 'dropped' does not exist"),
        (
            "metrics: [{name: drop, contextOptions: [{name: labelsContext, values: [x]}]}]",
            "labelsContext value",
        ),
        ("metrics: [{name: drop, includeFilters: [{source_ip: [x]}]}]", "unable to initialize metric 'drop'"),
    ],
)
def test_a_wrong_file_is_one_line_and_changes_nothing(text: str, reason: str) -> None:
    metrics = FlowMetrics(metrics_of(["flow"]))
    with pytest.raises(MetricOptionsError, match=reason) as refused:
        metrics.follow(configured_metrics(text))
    assert "\n" not in str(refused.value)
    assert [one.name for one in metrics.all()] == ["hubble_flows_processed_total"]


def test_metrics_that_stay_go_on_counting_and_filters_choose_flows() -> None:
    flows = [from_json(Flow, tree) for tree in RECORDED["flows"]]
    first = flows[0]

    def counted(metrics: FlowMetrics) -> dict[str, float]:
        return {one.name: sum(one.series.values()) for one in metrics.all() if one.name.endswith("_total")}

    every, port = metrics_of(["flow", "port-distribution"])
    metrics = FlowMetrics([every, port])
    metrics.process(first)
    metrics.follow([every])
    metrics.process(first)
    assert counted(metrics) == {"hubble_flows_processed_total": 2}
    of_a_pod = FlowFilter(source_pod=("default/",))
    metrics.follow([MetricEntry("flow", {}, (of_a_pod,)), port])
    for flow in flows:
        metrics.process(flow)
    wanted = [one for one in flows if one.source is not None and one.source.namespace == "default"]
    assert 0 < len(wanted) < len(flows)
    assert counted(metrics)["hubble_flows_processed_total"] == 2 + len(wanted)
    metrics.follow([MetricEntry("flow", {}, (), (of_a_pod,))])
    for flow in flows:
        metrics.process(flow)
    assert counted(metrics) == {"hubble_flows_processed_total": 2 + len(flows)}
    metrics.follow(metrics_of(["flow:sourceContext=pod"]))
    assert counted(metrics) == {"hubble_flows_processed_total": 0}, "other labels are other series"
