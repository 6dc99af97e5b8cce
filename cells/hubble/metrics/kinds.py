"""Flow metrics by their names in ``hubble-metrics``, and their configuration.

Source: Cilium 1.17, pkg/hubble/metrics. Differences: dns has ``rcode`` with any number of context labels,
        icmp the family IPv6, kafka the error code as a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from cells.base.metrics import MetricFamily
from cells.hubble.codec import from_json
from cells.hubble.enums import DropReason, FlowVerdict, IPVersion, L7FlowType, TrafficDirection
from cells.hubble.filters import InvalidFilter, Predicate, compile_filters
from cells.hubble.flow import HTTP, Flow, FlowFilter, Layer4, Layer7
from cells.hubble.metrics.series import DIRECTIONS, Contexts, FlowSeries, MetricOptionsError
from cells.hubble.parser.l7 import ACCESS_LOG, DNS_CODES
from cells.hubble.parser.packet import ICMPV4_CODES, ICMPV4_TYPES, ICMPV6_CODES, ICMPV6_TYPES, icmp_text
from cells.hubble.scalars import DecodeError
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
    """Base of an entry of ``hubble-metrics``: its options and its Prometheus metrics."""

    def __init__(self, options: Mapping[str, str]) -> None:
        lowered = {key.lower(): value for key, value in options.items()}
        self.options = lowered
        self.contexts = Contexts(lowered)
        self._exemplars = options.get("exemplars") == "true"
        self.metrics: list[FlowSeries] = []
        self.prepare()

    def prepare(self) -> None:
        """Create the metrics; called once."""
        raise NotImplementedError

    def process(self, flow: Flow) -> None:
        """Update the metrics with a flow."""
        raise NotImplementedError

    def add(self, name: str, text: str, *labels: str, buckets: bool = False) -> FlowSeries:
        """Add a Prometheus metric to this entry."""
        metric = FlowSeries(name, text, self.contexts, *labels, buckets=buckets)
        self.metrics.append(metric)
        return metric

    def trace(self, flow: Flow) -> str:
        """Return the trace ID of a flow if exemplars are enabled, else an empty text."""
        context = flow.trace_context
        if not self._exemplars or context is None or context.parent is None:
            return ""
        return context.parent.trace_id


def protocol_of(flow: Flow) -> str:
    """Return the protocol of a flow for the label ``protocol``."""
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
    """Counts DNS queries and responses."""

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
    """Counts drops by reason."""

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
    """Counts TCP flags."""

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
    """Counts flows by type, subtype and verdict."""

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
    """Counts flows by destination port."""

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
    """Counts ICMP messages by type."""

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


def _http_labels(flow: Flow, http: HTTP) -> dict[str, str]:
    return {
        "method": http.method,
        "protocol": http.protocol,
        "status": str(http.code),
        "reporter": _reporter(flow),
    }


class HTTPMetric(FlowMetric):
    """Counts HTTP requests and responses separately, and durations."""

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
        labels = self.contexts.values(flow) | _http_labels(flow, l7.http)
        trace = self.trace(flow)
        if l7.type == L7FlowType.REQUEST:
            self._requests.count(labels, trace)
        elif l7.type == L7FlowType.RESPONSE:
            self._responses.count(labels, trace)
            self._durations.observe(labels, l7.latency_ns / 1e9, trace)


class HTTPv2Metric(FlowMetric):
    """Counts HTTP requests by the status of their response; source and destination are the request's."""

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
        labels = self.contexts.values(flow, swapped=True) | _http_labels(flow, l7.http)
        trace = self.trace(flow)
        self._requests.count(labels, trace)
        self._durations.observe(labels, l7.latency_ns / 1e9, trace)


class KafkaMetric(FlowMetric):
    """Counts Kafka requests, and their durations."""

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
    """Counts flows that leave the cluster."""

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
    """Counts policy verdicts."""

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


class MetricEntry(msgspec.Struct, frozen=True):
    """A configured metric: name, options, and filters of flows."""

    name: str
    options: Mapping[str, str]
    include: tuple[FlowFilter, ...] = ()
    """Only flows that match one of these are counted; empty: all."""
    exclude: tuple[FlowFilter, ...] = ()
    """Flows that match one of these are not counted."""


class _Counting(NamedTuple):
    entry: MetricEntry
    metric: FlowMetric
    counts: Predicate


class FlowMetrics:
    """All configured metrics. The constructor and follow() raise MetricOptionsError."""

    def __init__(self, entries: Iterable[MetricEntry]) -> None:
        self._counting: dict[str, _Counting] = {}
        self.follow(entries)

    def follow(self, entries: Iterable[MetricEntry]) -> None:
        """Replace the configuration; a metric with unchanged name and options keeps its series.

        Raises MetricOptionsError; the configuration is then unchanged.
        """
        wanted = {entry.name: entry for entry in entries}
        if {"http", "httpV2"} <= wanted.keys():
            raise MetricOptionsError("plugin http conflicts with plugin httpV2")
        self._counting = {name: self._made(entry) for name, entry in wanted.items()}

    def _made(self, entry: MetricEntry) -> _Counting:
        if entry.name not in _KINDS:
            raise MetricOptionsError(f"metric '{entry.name}' does not exist")
        known = self._counting.get(entry.name)
        try:
            counts = compile_filters(entry.include, entry.exclude)
            if known is not None and known.entry.options == entry.options:
                return _Counting(entry, known.metric, counts)
            return _Counting(entry, _KINDS[entry.name](entry.options), counts)
        except (MetricOptionsError, InvalidFilter) as error:
            raise MetricOptionsError(f"unable to initialize metric '{entry.name}': {error}") from error

    def process(self, flow: Flow) -> None:
        """Update all metrics with a flow."""
        for one in self._counting.values():
            if one.counts(flow):
                one.metric.process(flow)

    def remove_pod(self, namespace: str, pod: str) -> None:
        """Remove the series with labels of a deleted pod."""
        for _, one, _ in self._counting.values():
            for metric in one.metrics:
                metric.remove(lambda labels, of=one: of.contexts.names_pod(labels, namespace, pod))  # type: ignore[misc]

    def all(self) -> Iterator[FlowSeries]:
        """Return all Prometheus metrics."""
        for one in self._counting.values():
            yield from one.metric.metrics

    def families(self) -> list[MetricFamily]:
        """Return the metric families for the scrape."""
        return [metric.family() for metric in self.all()]


def metrics_of(texts: Iterable[str]) -> list[MetricEntry]:
    """Parse entries of ``hubble-metrics`` such as ``dns:query;sourceContext=pod``."""
    found = []
    for text in texts:
        name, _, rest = text.partition(":")
        pairs = (option.partition("=") for option in filter(None, rest.split(";")))
        found.append(MetricEntry(name, {key: value for key, _, value in pairs}))
    return found


def configured_metrics(text: str) -> list[MetricEntry]:
    """Parse a YAML file with a list ``metrics``. Raises MetricOptionsError (one line).

    Source: Cilium 1.17, pkg/hubble/metrics/api: name, contextOptions, includeFilters, excludeFilters.
    """
    import yaml

    try:
        found = msgspec.convert(yaml.safe_load(text) or {}, _MetricsFile).metrics or ()
        entries = [
            MetricEntry(
                one.name,
                {option.name: option.text for option in one.context_options or ()},
                tuple(from_json(FlowFilter, each) for each in one.include_filters or ()),
                tuple(from_json(FlowFilter, each) for each in one.exclude_filters or ()),
            )
            for one in found
        ]
    except (yaml.YAMLError, msgspec.ValidationError, DecodeError) as error:
        raise MetricOptionsError(" ".join(str(error).split())) from error
    for name, count in Counter(entry.name for entry in entries).items():
        if count > 1:
            raise MetricOptionsError(f"metrics: {name} has {count} entries")
    return entries


class _ContextOption(msgspec.Struct, frozen=True):
    name: str
    values: tuple[str, ...] | None = None

    @property
    def text(self) -> str:
        return ("," if self.name.lower() == "labelscontext" else "|").join(self.values or ())


class _MetricOfFile(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    name: str
    context_options: tuple[_ContextOption, ...] | None = None
    include_filters: tuple[dict[str, Any], ...] | None = None
    exclude_filters: tuple[dict[str, Any], ...] | None = None


class _MetricsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metrics: tuple[_MetricOfFile, ...] | None = None
