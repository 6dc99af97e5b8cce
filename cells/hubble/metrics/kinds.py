"""What each name in ``hubble-metrics`` counts of flows.

Source: Cilium 1.17, pkg/hubble/metrics. Labels are right where Cilium's are not: dns has ``rcode`` with any
        number of context labels, icmp the family IPv6, kafka the error code as a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from cells.base.metrics import Family
from cells.hubble.enums import DropReason, FlowVerdict, IPVersion, L7FlowType, TrafficDirection
from cells.hubble.flow import Flow, Layer4, Layer7
from cells.hubble.metrics.series import DIRECTIONS, Contexts, FlowSeries, MetricOptionsError
from cells.hubble.parser.l7 import ACCESS_LOG, DNS_CODES
from cells.hubble.parser.packet import ICMPV4_CODES, ICMPV4_TYPES, ICMPV6_CODES, ICMPV6_TYPES, icmp_text
from cells.observe.events import MATCH_TYPES, OBSERVATION_POINTS

_DROP, _CAPTURE, _TRACE, _VERDICT = 1, 3, 4, 5
_HOST: Final = 1
_WORLD: Final = frozenset({"reserved:world", "reserved:world-ipv4", "reserved:world-ipv6"})
_RCODES: Final = DNS_CODES | {
    2: "Server Failure",
    9: "Not Authorized",
    11: "DSO-TYPE Not Implemented",
    23: "Bad/missing Server Cookie",
}
_PASSED: Final = frozenset({FlowVerdict.FORWARDED, FlowVerdict.REDIRECTED})


class FlowMetric:
    """One entry of ``hubble-metrics``: its options, and the metrics that it keeps."""

    def __init__(self, options: Mapping[str, str]) -> None:
        lowered = {key.lower(): value for key, value in options.items()}
        self.options = lowered
        self.contexts = Contexts(lowered)
        self._exemplars = options.get("exemplars") == "true"
        self.metrics: list[FlowSeries] = []
        self.prepare()

    def prepare(self) -> None:
        """Make the metrics."""
        raise NotImplementedError

    def process(self, flow: Flow) -> None:
        """Count a flow."""
        raise NotImplementedError

    def add(self, name: str, text: str, *labels: str, buckets: bool = False) -> FlowSeries:
        """One more metric of this entry."""
        metric = FlowSeries(name, text, self.contexts, *labels, buckets=buckets)
        self.metrics.append(metric)
        return metric

    def trace(self, flow: Flow) -> str:
        """The trace a flow belongs to, where exemplars are wanted."""
        context = flow.trace_context
        if not self._exemplars or context is None or context.parent is None:
            return ""
        return context.parent.trace_id


def protocol_of(flow: Flow) -> str:
    """The protocol as labels name it."""
    kind = flow.event_type.type if flow.event_type is not None else 0
    if kind == ACCESS_LOG:
        return _l7_name(flow.l7) or "Unknown L7"
    if kind in {_DROP, _CAPTURE, _TRACE, _VERDICT}:
        return _l4_name(flow.l4) or "Unknown L4"
    return "Unknown flow"


def _l7_name(l7: Layer7 | None) -> str:
    if l7 is None:
        return ""
    found = (("DNS", l7.dns), ("HTTP", l7.http), ("Kafka", l7.kafka))
    return next((name for name, record in found if record is not None), "")


def _l4_name(l4: Layer4 | None) -> str:
    if l4 is None:
        return ""
    names = ("TCP", "UDP", "ICMPv4", "ICMPv6", "SCTP")
    return next((name for name in names if getattr(l4, name) is not None), "")


def _port_of(l4: Layer4 | None) -> str:
    if l4 is None:
        return ""
    for record in (l4.TCP, l4.UDP, l4.SCTP):
        if record is not None:
            return str(record.destination_port)
    return "0" if l4.ICMPv4 is not None or l4.ICMPv6 is not None else ""


def _reporter(flow: Flow) -> str:
    return {"ingress": "server", "egress": "client"}.get(
        DIRECTIONS.get(flow.traffic_direction, ""), "unknown"
    )


def _verdict(flow: Flow) -> str:
    try:
        return FlowVerdict(flow.verdict).name
    except ValueError:
        return str(flow.verdict)


class DNSMetric(FlowMetric):
    """Queries and answers."""

    def prepare(self) -> None:
        query = ("query",) if "query" in self.options else ()
        text = "Number of DNS queries observed"
        labels = ("rcode", "qtypes", "ips_returned", *query)
        self._queries = self.add("hubble_dns_queries_total", text, *labels)
        self._responses = self.add("hubble_dns_responses_total", text, *labels)
        self._types = self.add("hubble_dns_response_types_total", text, "type", "qtypes", *query)

    def process(self, flow: Flow) -> None:
        dns = flow.l7.dns if flow.l7 is not None else None
        if flow.l7 is None or dns is None:
            return
        if "ignoreaaaa" in self.options and list(dns.qtypes) == ["AAAA"]:
            return
        labels = self.contexts.values(flow) | {
            "qtypes": ",".join(dns.qtypes),
            "ips_returned": str(len(dns.ips)),
            "query": dns.query,
            "rcode": "",
        }
        if flow.verdict == FlowVerdict.DROPPED:
            self._queries.count(labels | {"rcode": "Policy denied"})
        elif not flow.is_reply:
            self._queries.count(labels)
        else:
            self._responses.count(labels | {"rcode": _RCODES.get(dns.rcode, "")})
            for kind in dns.rrtypes:
                self._types.count(labels | {"type": kind})


class DropMetric(FlowMetric):
    """Drops by reason."""

    def prepare(self) -> None:
        self._drops = self.add("hubble_drop_total", "Number of drops", "reason", "protocol")

    def process(self, flow: Flow) -> None:
        if flow.verdict != FlowVerdict.DROPPED:
            return
        try:
            reason = DropReason(flow.drop_reason_desc).name
        except ValueError:
            reason = str(flow.drop_reason_desc)
        self._drops.count(self.contexts.values(flow) | {"reason": reason, "protocol": protocol_of(flow)})


class TCPMetric(FlowMetric):
    """Beginnings and ends of connections."""

    def prepare(self) -> None:
        self._flags = self.add("hubble_tcp_flags_total", "TCP flag occurrences", "flag", "family")

    def process(self, flow: Flow) -> None:
        tcp = flow.l4.TCP if flow.l4 is not None else None
        if flow.verdict not in _PASSED or tcp is None or tcp.flags is None or flow.IP is None:
            return
        flags = tcp.flags
        found = {"FIN": flags.FIN, "SYN": flags.SYN and not flags.ACK, "SYN-ACK": flags.SYN and flags.ACK}
        labels = self.contexts.values(flow) | {"family": IPVersion(flow.IP.ipVersion).name}
        for flag in (name for name, is_set in (found | {"RST": flags.RST}).items() if is_set):
            self._flags.count(labels | {"flag": flag})


class ProcessedMetric(FlowMetric):
    """All flows by kind and verdict."""

    def prepare(self) -> None:
        text = "Total number of flows processed"
        self._flows = self.add("hubble_flows_processed_total", text, "protocol", "type", "subtype", "verdict")

    def process(self, flow: Flow) -> None:
        event = flow.event_type
        number, sub = (0, 0) if event is None else (event.type, event.sub_type)
        known = {
            ACCESS_LOG: ("L7", _l7_name(flow.l7)),
            _DROP: ("Drop", ""),
            _CAPTURE: ("Capture", ""),
            _TRACE: ("Trace", OBSERVATION_POINTS.get(sub, "")),
            _VERDICT: ("PolicyVerdict", ""),
        }
        kind, subtype = known.get(number, ("Unknown", str(number)))
        labels = {"protocol": protocol_of(flow), "type": kind, "subtype": subtype, "verdict": _verdict(flow)}
        self._flows.count(self.contexts.values(flow) | labels)


class PortMetric(FlowMetric):
    """Ports that are sent to."""

    def prepare(self) -> None:
        text = "Numbers of packets distributed by destination port"
        self._ports = self.add("hubble_port_distribution_total", text, "protocol", "port")

    def process(self, flow: Flow) -> None:
        port = _port_of(flow.l4)
        if flow.verdict not in _PASSED or flow.is_reply is not False or not port:
            return
        labels = {"protocol": _l4_name(flow.l4), "port": port}
        self._ports.count(self.contexts.values(flow) | labels)


class ICMPMetric(FlowMetric):
    """ICMP messages by type."""

    def prepare(self) -> None:
        self._messages = self.add("hubble_icmp_total", "Number of ICMP messages", "family", "type")

    def process(self, flow: Flow) -> None:
        l4 = flow.l4
        if l4 is None:
            return
        if l4.ICMPv4 is not None:
            text = icmp_text(l4.ICMPv4.type, l4.ICMPv4.code, ICMPV4_TYPES, ICMPV4_CODES)
            labels = {"family": "IPv4", "type": text}
        elif l4.ICMPv6 is not None:
            text = icmp_text(l4.ICMPv6.type, l4.ICMPv6.code, ICMPV6_TYPES, ICMPV6_CODES)
            labels = {"family": "IPv6", "type": text}
        else:
            return
        self._messages.count(self.contexts.values(flow) | labels)


_DURATION: Final = "Quantiles of HTTP request duration in seconds"


class HTTPMetric(FlowMetric):
    """HTTP requests and responses apart."""

    def prepare(self) -> None:
        self._requests = self.add(
            "hubble_http_requests_total", "Count of HTTP requests", "method", "protocol", "reporter"
        )
        self._responses = self.add(
            "hubble_http_responses_total",
            "Count of HTTP responses",
            *("method", "protocol", "status", "reporter"),
        )
        self._durations = self.add(
            "hubble_http_request_duration_seconds", _DURATION, "method", "reporter", buckets=True
        )

    def process(self, flow: Flow) -> None:
        l7 = flow.l7
        if l7 is None or l7.http is None:
            return
        labels = self.contexts.values(flow) | {
            "method": l7.http.method,
            "protocol": l7.http.protocol,
            "status": str(l7.http.code),
            "reporter": _reporter(flow),
        }
        trace = self.trace(flow)
        if l7.type == L7FlowType.REQUEST:
            self._requests.count(labels, trace)
        elif l7.type == L7FlowType.RESPONSE:
            self._responses.count(labels, trace)
            self._durations.observe(labels, l7.latency_ns / 1e9, trace)


class HTTPv2Metric(FlowMetric):
    """HTTP requests with the status they were answered with; source and destination are the request's."""

    def prepare(self) -> None:
        self._requests = self.add(
            "hubble_http_requests_total",
            "Count of HTTP requests",
            *("method", "protocol", "status", "reporter"),
        )
        self._durations = self.add(
            "hubble_http_request_duration_seconds", _DURATION, "method", "reporter", buckets=True
        )

    def process(self, flow: Flow) -> None:
        l7 = flow.l7
        if l7 is None or l7.http is None or l7.type != L7FlowType.RESPONSE:
            return
        labels = self.contexts.values(flow, swapped=True) | {
            "method": l7.http.method,
            "protocol": l7.http.protocol,
            "status": str(l7.http.code),
            "reporter": _reporter(flow),
        }
        trace = self.trace(flow)
        self._requests.count(labels, trace)
        self._durations.observe(labels, l7.latency_ns / 1e9, trace)


class KafkaMetric(FlowMetric):
    """Kafka requests."""

    def prepare(self) -> None:
        self._requests = self.add(
            "hubble_kafka_requests_total",
            "Count of Kafka requests",
            *("topic", "api_key", "error_code", "reporter"),
        )
        self._durations = self.add(
            "hubble_kafka_request_duration_seconds", _DURATION, "topic", "api_key", "reporter", buckets=True
        )

    def process(self, flow: Flow) -> None:
        l7 = flow.l7
        if l7 is None or l7.kafka is None or l7.type != L7FlowType.REQUEST:
            return
        labels = self.contexts.values(flow) | {
            "topic": l7.kafka.topic,
            "api_key": l7.kafka.api_key,
            "error_code": str(l7.kafka.error_code),
            "reporter": _reporter(flow),
        }
        self._requests.count(labels)
        self._durations.observe(labels, l7.latency_ns / 1e9)


class ToWorldMetric(FlowMetric):
    """Flows that leave the cluster."""

    def prepare(self) -> None:
        port = ("port",) if "port" in self.options else ()
        text = "Total number of flows to reserved:world"
        self._flows = self.add("hubble_flows_to_world_total", text, "protocol", "verdict", *port)

    def process(self, flow: Flow) -> None:
        if flow.l4 is None or flow.destination is None or _WORLD.isdisjoint(flow.destination.labels):
            return
        dropped = flow.verdict == FlowVerdict.DROPPED
        if dropped and "any-drop" not in self.options and flow.drop_reason_desc != DropReason.POLICY_DENIED:
            return
        if not dropped and flow.is_reply is not False:
            return
        tcp = flow.l4.TCP
        if "syn-only" in self.options and (tcp is None or tcp.flags is None or not tcp.flags.SYN):
            return
        labels = {"protocol": protocol_of(flow), "verdict": _verdict(flow), "port": _port_of(flow.l4)}
        self._flows.count(self.contexts.values(flow) | labels)


class PolicyMetric(FlowMetric):
    """Verdicts of network policies."""

    def prepare(self) -> None:
        text = "Total number of Cilium network policy verdicts"
        self._verdicts = self.add("hubble_policy_verdicts_total", text, "direction", "match", "action")

    def process(self, flow: Flow) -> None:
        kind = flow.event_type.type if flow.event_type is not None else 0
        if kind == ACCESS_LOG:
            match = f"l7/{_l7_name(flow.l7).lower()}"
        elif kind == _VERDICT and (flow.source is None or flow.source.identity != _HOST):
            match = MATCH_TYPES.get(flow.policy_match_type, "unknown").lower()
        else:
            return
        labels = {
            "direction": TrafficDirection(flow.traffic_direction).name.lower(),
            "match": match,
            "action": _verdict(flow).lower(),
        }
        self._verdicts.count(self.contexts.values(flow) | labels)


_KINDS: Final[dict[str, type[FlowMetric]]] = {
    "dns": DNSMetric,
    "drop": DropMetric,
    "tcp": TCPMetric,
    "flow": ProcessedMetric,
    "port-distribution": PortMetric,
    "icmp": ICMPMetric,
    "http": HTTPMetric,
    "httpV2": HTTPv2Metric,
    "kafka": KafkaMetric,
    "flows-to-world": ToWorldMetric,
    "policy": PolicyMetric,
}


class FlowMetrics:
    """The metrics of all entries such as ``dns:query;sourceContext=pod``. Raises MetricOptionsError."""

    def __init__(self, entries: Iterable[str]) -> None:
        options = dict(map(_options, entries))
        if {"http", "httpV2"} <= options.keys():
            raise MetricOptionsError("plugin http conflicts with plugin httpV2")
        self._metrics: list[FlowMetric] = []
        for name, one in options.items():
            if name not in _KINDS:
                raise MetricOptionsError(f"metric '{name}' does not exist")
            try:
                self._metrics.append(_KINDS[name](one))
            except MetricOptionsError as error:
                raise MetricOptionsError(f"unable to initialize metric '{name}': {error}") from error

    def process(self, flow: Flow) -> None:
        """Count a flow in all of them."""
        for one in self._metrics:
            one.process(flow)

    def remove_pod(self, namespace: str, pod: str) -> None:
        """Remove the series of a pod that was deleted."""
        for one in self._metrics:
            for metric in one.metrics:
                metric.remove(lambda labels, of=one: of.contexts.names_pod(labels, namespace, pod))  # type: ignore[misc]

    def all(self) -> Iterator[FlowSeries]:
        """Each metric that has been counted."""
        for one in self._metrics:
            yield from one.metrics

    def families(self) -> list[Family]:
        """Everything that has been counted."""
        return [metric.family() for metric in self.all()]


def _options(entry: str) -> tuple[str, dict[str, str]]:
    name, _, rest = entry.partition(":")
    options = {}
    for option in filter(None, rest.split(";")):
        key, _, value = option.partition("=")
        options[key] = value
    return name, options
