"""Whose names tell series of flows apart: the contexts and labels that options of ``hubble-metrics`` choose.

Needs:  the messages of flows.
Gives:  Contexts, MetricOptionsError.
Source: Cilium 1.17, pkg/hubble/metrics/api.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cells.hubble.enums import TrafficDirection
from cells.hubble.flow import Flow, FlowEndpoint

_APP_LABELS: Final = ("k8s:app.kubernetes.io/name=", "k8s:k8s-app=", "k8s:app=")
DIRECTIONS: Final[dict[int, str]] = {
    TrafficDirection.INGRESS: "ingress",
    TrafficDirection.EGRESS: "egress",
}


class MetricOptionsError(ValueError):
    """Raised for a ``hubble-metrics`` that names no metric, or an option's value that is none."""


class FlowEnd:
    """One end of a flow."""

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
        """The name of what made the pod."""
        return self.endpoint.workloads[0].name if self.endpoint.workloads else ""

    @property
    def workload_kind(self) -> str:
        """What kind of thing made the pod."""
        return self.endpoint.workloads[0].kind if self.endpoint.workloads else ""

    @property
    def workload(self) -> str:
        """``namespace/name`` of what made the pod."""
        name, namespace = self.workload_name, self.endpoint.namespace
        return f"{namespace}/{name}" if name and namespace else name

    @property
    def app(self) -> str:
        """The value of its first label that names an application."""
        for label in self.endpoint.labels:
            for prefix in _APP_LABELS:
                if label.startswith(prefix):
                    return label.removeprefix(prefix)
        return ""

    @property
    def reserved(self) -> str:
        """Its reserved label; of several, that of the API server."""
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
    """Labels that each series of a metric has besides its own, as its options want them."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._labels: tuple[str, ...] = ()
        self._ends: dict[tuple[str, str], tuple[str, ...]] = {}
        """Contexts by end and direction; of no direction, those for both."""
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
        """The labels of a flow; ``swapped``: its source is called the destination, and vice versa."""
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
        """Whether a series is that of a pod."""
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
