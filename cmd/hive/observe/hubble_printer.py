"""Prints flows, agent events and debug events like Cilium's ``hubble``.

Names, paths and messages come from packets and peers: control characters in them are escaped.

Source: the hubble CLI of Cilium 1.17.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from cells.hubble.codec import to_json
from cells.hubble.enums import (
    AgentEventType,
    AuthType,
    DebugCapturePoint,
    DebugEventType,
    FlowVerdict,
    L7FlowType,
    LostEventSource,
    TrafficDirection,
)
from cells.hubble.flow import (
    AgentEvent,
    EndpointRegenNotification,
    EndpointUpdateNotification,
    Flow,
    FlowEndpoint,
    FlowService,
    IPCacheNotification,
    Layer7,
    LostEvent,
    PolicyUpdateNotification,
    ServiceUpsertNotification,
    ServiceUpsertNotificationAddr,
    TimeNotification,
)
from cells.hubble.rpc.observer import (
    GetAgentEventsResponse,
    GetDebugEventsResponse,
    GetFlowsResponse,
    NodeState,
    NodeStatusEvent,
)
from cells.observe.events import DROP_REASONS, FORWARD_REASONS, MATCH_TYPES, OBSERVATION_POINTS, SOCKET_POINTS
from hive.observe.hubble_text import aligned, json_text, time_text
from hive.output import terminal_text

RESERVED: Final = {
    0: "unknown",
    1: "host",
    2: "world",
    3: "unmanaged",
    4: "health",
    5: "init",
    6: "remote-node",
    7: "kube-apiserver",
    8: "ingress",
    9: "world-ipv4",
    10: "world-ipv6",
}
"""Names of reserved identities."""
DROP, DEBUG, CAPTURE, TRACE, VERDICT, TRACE_SOCK = 1, 2, 3, 4, 5, 7
_DROPPED: Final = FORWARD_REASONS | DROP_REASONS
SEPARATOR: Final = "------------"
_CYAN, _YELLOW, _MAGENTA, _GREEN, _RED = 36, 33, 35, 32, 31
_NODE_NAMES: Final = 50
"""Maximum number of characters of node names in an event."""


def drop_reason(reason: int, extended: int = 0) -> str:
    """Return the text of a drop reason, with the kernel's error if there is one; numbers if it is unknown."""
    text = _DROPPED.get(reason)
    return f"{text or reason}, {extended}" if extended or text is None else text


def _name(kind: type[IntEnum], value: int) -> str:
    try:
        return kind(value).name
    except ValueError:
        return str(value)


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def flow_type(flow: Flow) -> str:
    """Return the event of a flow: ``to-endpoint``, ``Policy denied``, ``dns-request proxy``."""
    if flow.l7 is not None:
        return _l7_type(flow.l7)
    event = flow.event_type
    kind, sub = (event.type, event.sub_type) if event is not None else (0, 0)
    texts = {
        TRACE: OBSERVATION_POINTS.get(sub, str(sub)),
        DROP: drop_reason(sub),
        VERDICT: f"policy-verdict:{MATCH_TYPES.get(flow.policy_match_type, 'unknown')}"
        f" {_name(TrafficDirection, flow.traffic_direction)}",
        CAPTURE: _name(DebugCapturePoint, flow.debug_capture_point),
        TRACE_SOCK: SOCKET_POINTS.get(flow.sock_xlate_point, "UNKNOWN"),
    }
    return texts.get(kind, "UNKNOWN")


def _l7_type(l7: Layer7) -> str:
    kind = _name(L7FlowType, l7.type).lower()
    if l7.http is not None:
        return f"http-{kind}"
    if l7.kafka is not None:
        return f"kafka-{kind}"
    if l7.dns is not None:
        source = l7.dns.observation_source
        return f"dns-{kind} {source}" if source else f"dns-{kind}"
    return f"l7-{kind}"


class Printer:
    """Prints answers of a server in one format; ``close`` prints a pending table."""

    def __init__(
        self,
        output: str,
        *,
        time_format: str = "StampMilli",
        node_name: bool = False,
        translate: bool = True,
        colour: bool = False,
        debug: bool = False,
        silent: bool = False,
        losses: bool = False,
        below: Callable[[Flow], Iterable[str]] | None = None,
    ) -> None:
        self._output = output
        self._time_format = time_format
        self._node_name = node_name
        self._translate = translate
        self._colour = colour and output in {"compact", "dict"}
        self._debug = debug
        self._silent = silent
        self._losses = losses
        """Whether lost events are printed; Cilium's hubble only names them as unknown with --debug."""
        self._below = below
        self._rows: list[list[str]] = []
        self._printed = 0

    def close(self) -> None:
        """Print the pending table."""
        for line in aligned(self._rows):
            self._print(line)
        self._rows = []

    def flow(self, response: GetFlowsResponse) -> None:
        """Print a flow; node status of a relay and reports of lost events go to stderr."""
        if response.flow is not None:
            self._flow(response, response.flow)
        elif response.node_status is not None:
            self._node_status(response, response.node_status)
        elif response.lost_events is not None:
            self._loss(response, response.lost_events)

    def agent_event(self, response: GetAgentEventsResponse) -> None:
        """Print an agent event."""
        event = response.agent_event
        if event is None:
            raise ValueError("not an agent event")
        kind, details = _name(AgentEventType, event.type), self._details(event)
        fields = {"TYPE": kind, "DETAILS": details}
        self._event(response, fields, f"{kind} ({details})")

    def debug_event(self, response: GetDebugEventsResponse) -> None:
        """Print a debug event of the datapath."""
        event = response.debug_event
        if event is None:
            raise ValueError("not a debug event")
        kind, source = _name(DebugEventType, event.type), _endpoint(event.source)
        mark = "N/A" if event.hash is None else f"{event.hash:#x}"
        cpu = "N/A" if event.cpu is None else f"{event.cpu:02d}"
        fields = {"TYPE": kind, "FROM": source, "MARK": mark, "CPU": cpu, "MESSAGE": event.message}
        table = {"FROM": source, "": "", "TYPE": kind, "CPU/MARK": f"{cpu} {mark}", "MESSAGE": event.message}
        compact = f"{source} {kind} MARK: {mark} CPU: {cpu} ({event.message})"
        self._event(response, fields, compact, table)

    def _event(
        self,
        response: GetAgentEventsResponse | GetDebugEventsResponse,
        fields: Mapping[str, str],
        compact: str,
        table: Mapping[str, str] | None = None,
    ) -> None:
        when = self._time(response.time)
        node = {"NODE": response.node_name} if self._node_name else {}
        if self._output == "json":
            print(json_text(to_json(response)))
        elif self._output == "table":
            self._row({"TIMESTAMP": when} | node | dict(table or fields))
        elif self._output == "dict":
            # Cilium's client ends the separator with no newline.
            self._pairs({"TIMESTAMP": when} | node | dict(fields), separator=SEPARATOR)
        else:
            self._print(f"{when}{self._node(response.node_name)}: {compact}")
        self._printed += 1

    def _flow(self, response: GetFlowsResponse, flow: Flow) -> None:
        if self._output == "json":
            print(json_text(to_json(response)))
            return
        when, kind, verdict, summary = (
            self._time(flow.time),
            flow_type(flow),
            self._verdict(flow),
            self._summary(flow),
        )
        source, destination = self._hosts(flow)
        fields = {"TIMESTAMP": when}
        if self._node_name:
            fields["NODE"] = flow.node_name
        fields |= {"SOURCE": source, "DESTINATION": destination, "TYPE": kind}
        fields |= {"VERDICT": verdict, "SUMMARY": summary}
        if self._output == "table":
            self._row(fields)
        elif self._output == "dict":
            self._pairs(fields, separator=f"{SEPARATOR}\n")
        else:
            ends = [
                f"{source} {self._identity(flow.source)}",
                f"{destination} {self._identity(flow.destination)}",
            ]
            arrow = "<>" if flow.is_reply is None else "->"
            if flow.is_reply:
                ends.reverse()
                arrow = "<-"
            node = self._node(flow.node_name)
            self._print(f"{when}{node}: {ends[0]} {arrow} {ends[1]} {kind} {verdict} ({summary})")
            for line in self._below(flow) if self._below is not None else ():
                self._print(line)
        self._printed += 1

    def _row(self, fields: Mapping[str, str]) -> None:
        if not self._rows:
            self._rows.append(list(fields))
        self._rows.append(list(map(terminal_text, fields.values())))

    def _pairs(self, fields: Mapping[str, str], *, separator: str) -> None:
        if self._printed:
            print(separator, end="")
        for name, text in fields.items():
            self._print(f"{name:>11}: {text}")

    def _loss(self, response: GetFlowsResponse, lost: LostEvent) -> None:
        source = _name(LostEventSource, lost.source)
        if not self._losses:
            if self._debug:
                cpu = f" cpu:{{value:{lost.cpu}}}" if lost.cpu is not None else ""
                message = f"source:{source} num_events_lost:{lost.num_events_lost}{cpu}"
                self._warn(f"unknown response type: &{{LostEvents:{message}}}")
        elif self._output == "json":
            self._warn(json_text(to_json(response)))
        else:
            cpu = f" CPU({lost.cpu})" if lost.cpu is not None else ""
            self._warn(f"{self._time(response.time)} EVENTS LOST: {source}{cpu} {lost.num_events_lost}")

    def _summary(self, flow: Flow) -> str:
        if flow.auth_type == AuthType.DISABLED or self._output == "dict":
            return flow.Summary
        colour = _RED if flow.auth_type == AuthType.TEST_ALWAYS_FAIL else _GREEN
        return f"{flow.Summary}; Auth: {self._paint(colour, _name(AuthType, flow.auth_type))}"

    def _node(self, name: str) -> str:
        return f" [{name}]" if self._node_name else ""

    def _time(self, nanoseconds: int | None) -> str:
        return time_text(nanoseconds, self._time_format)

    def _paint(self, colour: int, text: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour and text else text

    def _hosts(self, flow: Flow) -> tuple[str, str]:
        if flow.IP is None:
            ethernet = flow.ethernet
            ends = ("", "") if ethernet is None else (ethernet.source, ethernet.destination)
            return self._paint(_CYAN, ends[0]), self._paint(_CYAN, ends[1])
        l4 = flow.l4
        ports: Any = None if l4 is None else l4.TCP or l4.UDP or l4.SCTP
        source, destination = (0, 0) if ports is None else (ports.source_port, ports.destination_port)
        return (
            self._host(flow.IP.source, source, flow.source, flow.source_service, flow.source_names),
            self._host(
                flow.IP.destination,
                destination,
                flow.destination,
                flow.destination_service,
                flow.destination_names,
            ),
        )

    def _host(
        self,
        address: str,
        port: int,
        endpoint: FlowEndpoint | None,
        service: FlowService | None,
        names: Sequence[str],
    ) -> str:
        host = address
        if self._translate:
            namespace = endpoint.namespace if endpoint is not None else ""
            if service is not None:
                namespace = service.namespace
            if endpoint is not None and endpoint.pod_name:
                host = _joined(namespace, endpoint.pod_name)
            elif service is not None and service.name:
                host = _joined(namespace, service.name)
            elif names:
                host = ",".join(names)
        return self._paint(_CYAN, _address(host, self._paint(_YELLOW, str(port))) if port else host)

    def _identity(self, endpoint: FlowEndpoint | None) -> str:
        number = 0 if endpoint is None else endpoint.identity
        return self._paint(_MAGENTA, f"({RESERVED.get(number) or f'ID:{number}'})")

    def _verdict(self, flow: Flow) -> str:
        decided = flow.event_type is not None and flow.event_type.type == VERDICT
        text = _name(FlowVerdict, flow.verdict)
        match flow.verdict:
            case FlowVerdict.FORWARDED | FlowVerdict.REDIRECTED:
                return self._paint(_GREEN, "ALLOWED" if decided else text)
            case FlowVerdict.DROPPED | FlowVerdict.ERROR:
                return self._paint(_RED, "DENIED" if decided else text)
            case FlowVerdict.AUDIT:
                return self._paint(_YELLOW, "AUDITED" if decided else text)
            case FlowVerdict.TRACED | FlowVerdict.TRANSLATED:
                return self._paint(_YELLOW, text)
        return text

    def _node_status(self, response: GetFlowsResponse, status: NodeStatusEvent) -> None:
        failed = status.state_change in {NodeState.NODE_ERROR, NodeState.NODE_UNAVAILABLE}
        if not self._debug and not failed:
            return
        names = _cut_off(status.node_names)
        when = self._time(response.time)
        if self._output == "json":
            self._warn(json_text(to_json(response)))
            return
        if self._output == "dict":
            if self._printed:
                print(SEPARATOR)
            else:
                self._printed += 1
            state = _name(NodeState, status.state_change)
            message = json.dumps(status.message, ensure_ascii=False) if status.message else "N/A"
            fields = {"TIMESTAMP": when, "STATE": state, "NODES": names, "MESSAGE": message}
            self._warn("\n".join(f"{name:>11}: {text}" for name, text in fields.items()))
            return
        count = len(status.node_names)
        message = json.dumps(status.message, ensure_ascii=False)
        texts: dict[int, str] = {
            NodeState.NODE_CONNECTED: f"Receiving flows from {count} nodes: {names}",
            NodeState.NODE_UNAVAILABLE: f"{count} nodes are unavailable: {names}",
            NodeState.NODE_GONE: f"{count} nodes removed from cluster: {names}",
            NodeState.NODE_ERROR: f"Error {message} on {count} nodes: {names}",
        }
        text = texts.get(status.state_change, f"unknown node status event: {json_text(to_json(status))}")
        self._warn(f"{when} [{response.node_name}]: {text}")

    def _warn(self, text: str) -> None:
        if not self._silent:
            print(terminal_text(text), file=sys.stderr)

    def _print(self, text: str) -> None:
        print(terminal_text(text, coloured=self._colour))

    def _details(self, event: AgentEvent) -> str:
        for body in (
            event.unknown,
            event.agent_start,
            event.policy_update,
            event.endpoint_regenerate,
            event.endpoint_update,
            event.ipcache_update,
            event.service_upsert,
            event.service_delete,
        ):
            if body is not None:
                return self._body(body)
        return "UNKNOWN"

    def _body(self, body: Any) -> str:
        match body:
            case TimeNotification():
                return f"start time: {self._time(body.time)}"
            case PolicyUpdateNotification():
                labels = ",".join(body.labels)
                return f"labels: [{labels}], revision: {body.revision}, count: {body.rule_count}"
            case EndpointRegenNotification():
                error = f", error: {body.error}" if body.error else ""
                return f"id: {body.id}, labels: [{','.join(body.labels)}]{error}"
        return _listed(_fields(body))


def _fields(body: Any) -> dict[str, object]:
    """Return the printed fields of an event's body, by name."""
    match body:
        case EndpointUpdateNotification():
            return {"id": body.id, "namespace": body.namespace, "pod name": body.pod_name}
        case IPCacheNotification():
            old = body.old_identity
            return {
                "cidr": body.cidr,
                "identity": str(body.identity),
                "old identity": "" if old is None else str(old),
                "host ip": body.host_ip,
                "old host ip": body.old_host_ip,
                "encrypt key": str(body.encrypt_key),
            }
        case ServiceUpsertNotification():
            backends = ",".join(map(_service_address, body.backend_addresses))
            return {
                "id": body.id,
                "frontend": _service_address(body.frontend_address),
                "backends": f"[{backends}]" if backends else "",
                "type": body.type,
                "traffic policy": body.traffic_policy,
                "namespace": body.namespace,
                "name": body.name,
            }
    return {name: getattr(body, name) for name in body.__struct_fields__}


def _listed(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {text}" for name, text in fields.items() if text or name == "id")


def _service_address(address: ServiceUpsertNotificationAddr | None) -> str:
    return "" if address is None else _address(address.ip, str(address.port))


def _endpoint(endpoint: FlowEndpoint | None) -> str:
    if endpoint is None:
        return "N/A"
    text = f"ID: {endpoint.ID}"
    if endpoint.namespace and endpoint.pod_name:
        return f"{endpoint.namespace}/{endpoint.pod_name} ({text})"
    if len(endpoint.labels) == 1 and endpoint.labels[0].startswith("reserved:"):
        return f"{endpoint.labels[0]} ({text})"
    return text


def _cut_off(names: Sequence[str]) -> str:
    """Return as many names as fit, and the number of the others."""
    length = 0
    for count, name in enumerate(names):
        length += len(name) + 2
        if length > _NODE_NAMES and count:
            return f"{', '.join(names[:count])} (and {len(names) - count} more)"
    return ", ".join(names)
