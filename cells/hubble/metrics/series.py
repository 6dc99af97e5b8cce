"""The series of one flow metric, its context labels, and OpenMetrics exposition with exemplars.

Source: Cilium 1.17, pkg/hubble/metrics/api; OpenMetrics 1.0 as Prometheus's Go client writes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from cells.base.metrics import Histogram, MetricFamily, counter, histogram
from cells.hubble.enums import TrafficDirection
from cells.hubble.flow import Flow, FlowEndpoint

_APP_LABELS: Final = ("k8s:app.kubernetes.io/name", "k8s:k8s-app", "k8s:app")
DIRECTIONS: Final[dict[int, str]] = {
    TrafficDirection.INGRESS: "ingress",
    TrafficDirection.EGRESS: "egress",
}


class MetricOptionsError(ValueError):
    """Raised for an entry of ``hubble-metrics`` with an unknown name or an invalid option."""


class FlowEnd:
    """Context values of the source or destination of a flow."""

    def __init__(self, flow: Flow, *, source: bool) -> None:
        self.endpoint = (flow.source if source else flow.destination) or FlowEndpoint()
        self.names = flow.source_names if source else flow.destination_names
        addresses = flow.IP
        self.ip = "" if addresses is None else addresses.source if source else addresses.destination

    @property
    def pod(self) -> str:
        """``namespace/pod``."""
        namespace, pod = self.endpoint.namespace, self.endpoint.pod_name
        return f"{namespace}/{pod}" if namespace else pod

    @property
    def workload_name(self) -> str:
        """Name of the pod's workload."""
        return self.endpoint.workloads[0].name if self.endpoint.workloads else ""

    @property
    def workload_kind(self) -> str:
        """Kind of the pod's workload."""
        return self.endpoint.workloads[0].kind if self.endpoint.workloads else ""

    @property
    def workload(self) -> str:
        """``namespace/name`` of the pod's workload."""
        name, namespace = self.workload_name, self.endpoint.namespace
        return f"{namespace}/{name}" if name and namespace else name

    @property
    def app(self) -> str:
        """Value of its first label that names an application and is not empty."""
        for label in self.endpoint.labels:
            name, _, value = label.partition("=")
            if value and name in _APP_LABELS:
                return value
        return ""

    @property
    def reserved(self) -> str:
        """Its reserved label; reserved:kube-apiserver if it has several."""
        found = [label for label in self.endpoint.labels if label.startswith("reserved:")]
        if "reserved:kube-apiserver" in found:
            return "reserved:kube-apiserver"
        return found[0] if found else ""


_CONTEXTS: Final[dict[str, Callable[[FlowEnd], str]]] = {
    "identity": lambda end: ",".join(end.endpoint.labels),
    "namespace": lambda end: end.endpoint.namespace,
    "pod": lambda end: end.pod,
    "pod-name": lambda end: end.endpoint.pod_name,
    "dns": lambda end: ",".join(end.names),
    "ip": lambda end: end.ip,
    "reserved-identity": lambda end: end.reserved,
    "workload": lambda end: end.workload,
    "workload-name": lambda end: end.workload_name,
    "app": lambda end: end.app,
}
_END_LABELS: Final[dict[str, Callable[[FlowEnd], str]]] = {
    "ip": lambda end: end.ip,
    "pod": lambda end: end.endpoint.pod_name,
    "namespace": lambda end: end.endpoint.namespace,
    "workload": lambda end: end.workload_name,
    "workload_kind": lambda end: end.workload_kind,
    "app": lambda end: end.app,
}


class Contexts:
    """Labels that the context options add to each series, e.g. sourceContext and labelsContext."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._labels: tuple[str, ...] = ()
        self._ends: dict[tuple[str, str], tuple[str, ...]] = {}
        """Context names by source or destination and traffic direction; direction None applies to both."""
        for key, value in options.items():
            if key == "labelscontext":
                self._labels = _labels(value)
            for end in ("source", "destination"):
                if key.startswith(end) and key.endswith("context"):
                    direction = key.removeprefix(end).removesuffix("context")
                    if direction in {"", "egress", "ingress"}:
                        self._ends[end, direction] = _contexts(value)
        self._used = tuple(
            end for end in ("source", "destination") if any(end == one for one, _ in self._ends)
        )
        self.names = (*self._labels, *self._used)

    def values(self, flow: Flow, *, swapped: bool = False) -> dict[str, str]:
        """Return the context label values of a flow; ``swapped`` exchanges source and destination."""
        ends = {"source": FlowEnd(flow, source=True), "destination": FlowEnd(flow, source=False)}
        if swapped:
            called = {"source": "destination", "destination": "source"}
        else:
            called = {"source": "source", "destination": "destination"}
        direction = DIRECTIONS.get(flow.traffic_direction, "")
        found = {}
        for name in self._labels:
            end, _, what = name.partition("_")
            if end in ends:
                found[name] = _END_LABELS[what](ends[called[end]])
            else:
                found[name] = direction or "unknown"
        for end in self._used:
            chosen = self._ends.get((called[end], direction)) or self._ends.get((called[end], ""), ())
            found[end] = next(filter(None, (_CONTEXTS[one](ends[called[end]]) for one in chosen)), "")
        return found

    def names_pod(self, labels: Mapping[str, str], namespace: str, pod: str) -> bool:
        """Whether the labels of a series are those of a pod."""
        for end in ("source", "destination"):
            if {f"{end}_pod", f"{end}_namespace"} <= set(self._labels) and (
                labels[f"{end}_namespace"],
                labels[f"{end}_pod"],
            ) == (namespace, pod):
                return True
            by_pod = any("pod" in contexts for (one, _), contexts in self._ends.items() if one == end)
            if by_pod and labels[end] == f"{namespace}/{pod}":
                return True
        return False


def _labels(text: str) -> tuple[str, ...]:
    known = [f"{end}_{name}" for end in ("source", "destination") for name in _END_LABELS]
    wanted = text.split(",")
    for name in wanted:
        if name not in {*known, "traffic_direction"}:
            raise MetricOptionsError(f"invalid labelsContext value: {name}")
    return tuple(name for name in (*known, "traffic_direction") if name in wanted)


def _contexts(text: str) -> tuple[str, ...]:
    wanted = tuple(text.lower().split("|"))
    for name in wanted:
        if name not in _CONTEXTS:
            raise MetricOptionsError(f"unknown context '{name}'")
    return wanted


class FlowSeries:
    """The series of one metric, by label values in alphabetical order of the labels."""

    def __init__(self, name: str, text: str, contexts: Contexts, *labels: str, buckets: bool = False) -> None:
        self.name = name
        self.text = text
        self.labels = tuple(sorted((*contexts.names, *labels)))
        self.series: dict[tuple[str, ...], Any] = {}
        self.exemplars: dict[tuple[str, ...], dict[int, tuple[str, float, float]]] = {}
        """By series and bucket: trace ID, value and time."""
        self._buckets = buckets

    def count(self, labels: Mapping[str, str], trace: str = "") -> None:
        """Increment the counter of a flow's series."""
        key = tuple(labels[name] for name in self.labels)
        self.series[key] = self.series.get(key, 0) + 1
        if trace:
            self.exemplars.setdefault(key, {})[0] = (trace, 1.0, time.time())

    def observe(self, labels: Mapping[str, str], value: float, trace: str = "") -> None:
        """Observe a value in the histogram of a flow's series."""
        key = tuple(labels[name] for name in self.labels)
        found = self.series.get(key)
        if found is None:
            found = self.series[key] = Histogram()
        before = list(found.counts)
        found.observe(value)
        if trace:
            bucket = next(place for place, one in enumerate(found.counts) if one != before[place])
            self.exemplars.setdefault(key, {})[bucket] = (trace, value, time.time())

    def remove(self, wanted: Callable[[Mapping[str, str]], bool]) -> None:
        """Remove the series with these labels."""
        for key in [one for one in self.series if wanted(dict(zip(self.labels, one, strict=True)))]:
            del self.series[key]
            self.exemplars.pop(key, None)

    def family(self) -> MetricFamily:
        """Return the metric family with the current values."""
        make = histogram if self._buckets else counter
        return make(self.name, self.text, dict(self.series), " ".join(self.labels))


def openmetrics(metrics: Sequence[FlowSeries], others: Sequence[MetricFamily] = ()) -> str:
    """Format metric families as OpenMetrics text, with exemplars for flow metrics."""
    exemplars = {metric.name: metric.exemplars for metric in metrics}
    families = [*(metric.family() for metric in metrics), *others]
    lines: list[str] = []
    for family in sorted((one for one in families if one.series), key=lambda one: one.name):
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for key, value in sorted(family.series.items()):
            pairs = [f'{label}="{_escaped(text)}"' for label, text in zip(family.labels, key, strict=True)]
            examples = exemplars.get(family.name, {}).get(key, {})
            if isinstance(value, Histogram):
                lines += _histogram_lines(name, pairs, value, examples)
            else:
                labels = f"{{{','.join(pairs)}}}" if pairs else ""
                lines.append(f"{family.name}{labels} {float(value)}{_exemplar(examples.get(0))}")
    return "\n".join([*lines, "# EOF", ""])


def _histogram_lines(
    name: str, pairs: list[str], value: Histogram, exemplars: Mapping[int, tuple[str, float, float]]
) -> Iterator[str]:
    total = 0
    for place, count in enumerate(value.counts):
        total += count
        bound = str(float(value.bounds[place])) if place < len(value.bounds) else "+Inf"
        within = ",".join([*pairs, f'le="{bound}"'])
        yield f"{name}_bucket{{{within}}} {total}{_exemplar(exemplars.get(place))}"
    labels = f"{{{','.join(pairs)}}}" if pairs else ""
    yield f"{name}_sum{labels} {value.sum}"
    yield f"{name}_count{labels} {value.count}"


def _exemplar(found: tuple[str, float, float] | None) -> str:
    if found is None:
        return ""
    trace, value, when = found
    return f' # {{traceID="{_escaped(trace)}"}} {value} {when}'


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
