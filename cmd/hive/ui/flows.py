"""Aggregates the flows in a node's Hubble ring by workload.

A flow is a line of ``hive observe``. Omitted are replies, packets to multicast and link-local addresses, and
verdicts that a drop or trace repeats.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final, NamedTuple

import msgspec

from cells.hubble.codec import decode, encode
from cells.hubble.enums import DropReason, FlowType, FlowVerdict, L7FlowType, TraceObservationPoint
from cells.hubble.flow import Flow, FlowEndpoint
from cells.hubble.rpc.observer import (
    GetFlowsExperimental,
    GetFlowsRequest,
    GetFlowsResponse,
    ServerStatusRequest,
    ServerStatusResponse,
)
from hive.observe.hubble_client import HubbleClient
from hive.observe.hubble_why import Question, question_of

SECOND: Final = 1_000_000_000
STEP: Final = 10
"""Length of a step in seconds."""
STEPS: Final = 30
"""Number of steps shown: five minutes."""
RATE_STEPS: Final = 6
"""Number of steps for the rate: one minute."""
MOST_EDGES: Final = 5000
SHOWN_EDGES: Final = 1500
SHOWN_PORTS: Final = 8
FRESH: Final = 1.0
"""Seconds for which an answer is cached for all pages."""
OUTSIDE: Final = ""
"""The group of ends outside the cluster."""
_ALL: Final = (1 << 64) - 1
_VERDICT_EVENT: Final = 5
"""Cilium's message type of policy verdict notifications."""
_MASK: Final = (
    "time",
    "uuid",
    "verdict",
    "IP",
    "l4",
    "source",
    "destination",
    "source_names",
    "destination_names",
    "Type",
    "l7.type",
    "event_type",
    "is_reply",
    "drop_reason_desc",
    "trace_observation_point",
)
_LEAVING: Final = frozenset(
    {TraceObservationPoint.TO_OVERLAY, TraceObservationPoint.TO_NETWORK, TraceObservationPoint.TO_STACK}
)
"""Observation points of packets to another node, which observes them, too, if they are for a pod there."""
_WORKLOAD_LABELS: Final = ("app.kubernetes.io/name", "app", "k8s-app", "name")
_NAMESPACE_LABEL: Final = "io.kubernetes.pod.namespace"


class Party(NamedTuple):
    """One end of flows: a workload in a namespace, or a peer outside the cluster."""

    group: str
    """The namespace."""
    name: str


class _Edge(msgspec.Struct):
    allowed: Counter[int]
    """Number of flows by step."""
    denied: Counter[int]
    ports: Counter[str]
    reasons: Counter[str]
    leaving: Counter[int]
    """Number of allowed flows that were observed while leaving the node."""
    question: Question | None = None
    """The agent's query about it: of the last denied flow, by default of the last flow."""
    last: int = 0


class FlowMap:
    """Reads new flows on each call, from several threads; has no background work."""

    def __init__(self, server: str, timeout: float) -> None:
        self._server = server
        self._timeout = timeout
        self._lock = threading.Lock()
        self._edges: dict[tuple[Party, Party], _Edge] = {}
        self._since = 0
        self._known: set[str] = set()
        """UUIDs of the flows with the latest timestamp, since more flows of that time may follow."""
        self._seen = -1
        self._missed = 0
        self._answer: dict[str, Any] = {}
        self._answered = 0.0

    def summary(self) -> dict[str, Any]:
        """Return parties and edges. Raises ConnectError, RpcError."""
        with self._lock:
            if not self._answer or time.monotonic() - self._answered >= FRESH:
                self._read()
                self._forget()
                self._answer = self._summed()
                self._answered = time.monotonic()
            return self._answer

    def _read(self) -> None:
        since = self._since or time.time_ns() - STEP * STEPS * SECOND
        mask = GetFlowsExperimental(field_mask=_MASK)
        request = GetFlowsRequest(number=_ALL, since=since, experimental=mask)
        with HubbleClient(self._server, self._timeout) as client:
            for batch in client.stream("observer.Observer/GetFlows", encode(request), self._timeout):
                for message in batch:
                    flow = decode(GetFlowsResponse, message).flow
                    if flow is not None and flow.time is not None:
                        self._take(flow, flow.time)
        with HubbleClient(self._server, self._timeout) as client:
            asked = encode(ServerStatusRequest())
            status = decode(
                ServerStatusResponse, client.call("observer.Observer/ServerStatus", asked, self._timeout)
            )
        if 0 <= self._seen < status.seen_flows - status.max_flows:
            self._missed += status.seen_flows - status.max_flows - self._seen
        self._seen = status.seen_flows

    def _take(self, flow: Flow, moment: int) -> None:
        outcome = _outcome(flow)
        if self._is_known(flow, moment) or outcome is None or not (flow.source and flow.destination):
            return
        ends = _party(flow.source, flow.source_names), _party(flow.destination, flow.destination_names)
        if ends not in self._edges and len(self._edges) >= MOST_EDGES:
            self._missed += 1
            return
        edge = self._edges.setdefault(ends, _Edge(Counter(), Counter(), Counter(), Counter(), Counter()))
        step = moment // (STEP * SECOND)
        (edge.denied if outcome else edge.allowed)[step] += 1
        if not outcome and flow.trace_observation_point in _LEAVING:
            edge.leaving[step] += 1
        edge.last = max(edge.last, moment)
        if outcome:
            edge.reasons[outcome] += 1
        if (question := question_of(flow)) is not None:
            port = f"{question.port}/{question.protocol}" if question.port else question.protocol
            edge.ports[port or "other"] += 1
            if outcome or not edge.denied:
                edge.question = question

    def _is_known(self, flow: Flow, moment: int) -> bool:
        """Whether a flow was read before; records it."""
        if moment > self._since:
            self._since, self._known = moment, set()
        known = flow.uuid in self._known
        if moment == self._since:
            self._known.add(flow.uuid)
        return known

    def _forget(self) -> None:
        oldest = time.time_ns() // (STEP * SECOND) - STEPS
        for ends, edge in list(self._edges.items()):
            for steps in (edge.allowed, edge.denied, edge.leaving):
                for step in [one for one in steps if one <= oldest]:
                    del steps[step]
            if not edge.allowed and not edge.denied:
                del self._edges[ends]

    def _summed(self) -> dict[str, Any]:
        now = time.time_ns()
        newest = now // (STEP * SECOND)
        edges = sorted(self._edges.items(), key=lambda one: _weight(one[1]), reverse=True)
        shown = edges[:SHOWN_EDGES]
        parties = sorted({party for ends, _ in shown for party in ends})
        places = {party: at for at, party in enumerate(parties)}
        return {
            "now": now // 1_000_000,
            "step": STEP,
            "missed": self._missed,
            "more": len(edges) - len(shown),
            "parties": [one._asdict() for one in parties],
            "edges": [
                {
                    "from": places[source],
                    "to": places[destination],
                    "allowed": _series(edge.allowed, newest),
                    "denied": _series(edge.denied, newest),
                    "leaving": _series(edge.leaving, newest),
                    "rate": _rate(_series(edge.allowed, newest)),
                    "deniedRate": _rate(_series(edge.denied, newest)),
                    "ports": edge.ports.most_common(SHOWN_PORTS),
                    "morePorts": max(0, len(edge.ports) - SHOWN_PORTS),
                    "reasons": edge.reasons.most_common(),
                    "ask": None if edge.question is None else edge.question._asdict(),
                    "last": edge.last // 1_000_000,
                }
                for (source, destination), edge in shown
            ],
        }


def _weight(edge: _Edge) -> tuple[bool, int]:
    """Sort key of edges: those with denials last, then by rate."""
    return bool(edge.denied), edge.allowed.total() + edge.denied.total()


def merged_flows(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the summaries of several nodes; edges have the names of the nodes that observed them.

    A packet from a node to a pod of another is observed by both, while leaving and when delivered, and counts
    once: an edge has the larger of both numbers. Both are sums over all nodes, so a flow is counted if one of
    the two does not answer. Steps are aligned by the clocks of the nodes.
    """
    newest = max((int(one["now"]) // (STEP * 1000) for one in answers.values()), default=0)
    edges: dict[tuple[Party, Party], _Merged] = {}
    for node, answer in answers.items():
        late = newest - int(answer["now"]) // (STEP * 1000)
        parties = [Party(**one) for one in answer["parties"]]
        for edge in answer["edges"]:
            ends = parties[edge["from"]], parties[edge["to"]]
            edges.setdefault(ends, _Merged()).add(node, edge, late)
    ranked = sorted(edges.items(), key=lambda one: one[1].weight, reverse=True)
    shown = ranked[:SHOWN_EDGES]
    parties = sorted({party for ends, _ in shown for party in ends})
    places = {party: at for at, party in enumerate(parties)}
    return {
        "now": max((one["now"] for one in answers.values()), default=0),
        "step": STEP,
        "missed": sum(one["missed"] for one in answers.values()),
        "more": len(ranked) - len(shown) + sum(one["more"] for one in answers.values()),
        "parties": [one._asdict() for one in parties],
        "edges": [
            {"from": places[source], "to": places[destination], **edge.shown()}
            for (source, destination), edge in shown
        ],
    }


class _Merged:
    """An edge that several nodes observed."""

    def __init__(self) -> None:
        self._delivered, self._leaving, self._denied = ([0] * STEPS for _ in range(3))
        self._ports: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._more_ports = 0
        self._ask: tuple[bool, int, Any] = (False, 0, None)
        self._last = 0
        self._nodes: list[str] = []

    def add(self, node: str, edge: Mapping[str, Any], late: int) -> None:
        """Add a node's numbers; its clock or answer is `late` steps behind."""
        self._nodes.append(node)
        for at in range(late, STEPS):
            self._delivered[at - late] += edge["allowed"][at] - edge["leaving"][at]
            self._leaving[at - late] += edge["leaving"][at]
            self._denied[at - late] += edge["denied"][at]
        self._ports.update(dict(edge["ports"]))
        self._reasons.update(dict(edge["reasons"]))
        self._more_ports = max(self._more_ports, edge["morePorts"])
        self._last = max(self._last, edge["last"])
        if edge["ask"] is not None:
            candidate = any(edge["denied"]), edge["last"], edge["ask"]
            self._ask = max(self._ask, candidate, key=lambda one: one[:2])

    @property
    def _allowed(self) -> list[int]:
        return [max(pair) for pair in zip(self._delivered, self._leaving, strict=True)]

    @property
    def weight(self) -> tuple[bool, int]:
        """Sort key, as _weight()."""
        return any(self._denied), sum(self._allowed) + sum(self._denied)

    def shown(self) -> dict[str, Any]:
        """Return the form of the page."""
        return {
            "allowed": self._allowed,
            "denied": self._denied,
            "rate": _rate(self._allowed),
            "deniedRate": _rate(self._denied),
            "ports": self._ports.most_common(SHOWN_PORTS),
            "morePorts": self._more_ports + max(0, len(self._ports) - SHOWN_PORTS),
            "reasons": self._reasons.most_common(),
            "ask": self._ask[2],
            "last": self._last,
            "nodes": sorted(self._nodes),
        }


def _series(steps: Counter[int], newest: int) -> list[int]:
    return [steps[step] for step in range(newest - STEPS + 1, newest + 1)]


def _rate(series: Sequence[int]) -> float:
    """Return flows per second over the last minute, including the unfinished step."""
    return round(sum(series[-RATE_STEPS:]) / (RATE_STEPS * STEP), 3)


def _outcome(flow: Flow) -> str | None:
    """Return why a flow was denied; empty if it was not, None if it does not count."""
    if flow.is_reply or flow.IP is None or _is_local_noise(flow.IP.destination):
        return None
    if flow.Type == FlowType.L7 and flow.l7 is not None and flow.l7.type == L7FlowType.RESPONSE:
        return None
    if flow.verdict == FlowVerdict.AUDIT:
        return ""
    if flow.event_type is not None and flow.event_type.type == _VERDICT_EVENT:
        return None
    if flow.verdict in {FlowVerdict.FORWARDED, FlowVerdict.REDIRECTED}:
        return ""
    return _denial(flow) if flow.verdict in {FlowVerdict.DROPPED, FlowVerdict.ERROR} else None


def _denial(flow: Flow) -> str:
    if flow.Type == FlowType.L7:
        return "request refused by a proxy"
    known = flow.drop_reason_desc in set(DropReason)
    return DropReason(flow.drop_reason_desc).name if known else f"reason {flow.drop_reason_desc}"


def _is_local_noise(address: str) -> bool:
    try:
        destination = ip_address(address)
    except ValueError:
        return True
    return destination.is_multicast or destination.is_link_local or str(destination) == "255.255.255.255"


def _party(end: FlowEndpoint, names: Sequence[str]) -> Party:
    values = dict(_key_and_value(one) for one in end.labels)
    namespace = end.namespace or values.get(f"k8s:{_NAMESPACE_LABEL}", "")
    if namespace:
        return Party(namespace, _workload(end, values))
    if names:
        return Party(OUTSIDE, names[0])
    for source in ("fqdn:", "cidr:", "reserved:"):
        if texts := [key.removeprefix(source) for key in values if key.startswith(source)]:
            return Party(OUTSIDE, max(texts, key=len))
    return Party(OUTSIDE, f"identity {end.identity}")


def _key_and_value(label: str) -> tuple[str, str]:
    key, _, value = label.partition("=")
    return key, value


def _workload(end: FlowEndpoint, values: Mapping[str, str]) -> str:
    for key in _WORKLOAD_LABELS:
        if value := values.get(f"k8s:{key}"):
            return value
    return end.workloads[0].name if end.workloads else end.pod_name or f"identity {end.identity}"
