"""Filters of events, compiled once per request.

An event matches a FlowFilter if it matches all set fields; it matches a field if it matches one of its
values. Events other than flows match only empty filters and filters by event type.

Source: Cilium 1.17, pkg/hubble/filters. Regular expressions are those of RE2, which take linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final
from urllib.parse import unquote

from cells.base.regexp import Regexp, RegexpError, compile_regexp
from cells.hubble.enums import FlowVerdict, L7FlowType
from cells.hubble.filters.label_selectors import LabelSelectorError, index_labels, parse_selector
from cells.hubble.flow import (
    AgentEvent,
    DebugEvent,
    EventTypeFilter,
    Flow,
    FlowEndpoint,
    FlowFilter,
    FlowService,
    HubbleEvent,
    LostEvent,
)

Predicate = Callable[[HubbleEvent], bool]
FlowPredicate = Callable[[Flow], bool]

ACCESS_LOG, AGENT, DEBUG = 129, 130, 2
DEFAULT_CLUSTER: Final = "default"


class InvalidFilter(ValueError):  # noqa: N818 - clients see its text
    """Raised if a field of a filter has an invalid value."""


def compile_filters(allow: Sequence[FlowFilter], deny: Sequence[FlowFilter]) -> Predicate:
    """Return a predicate: one of `allow` matches, or `allow` is empty, and none of `deny` matches.

    Raises InvalidFilter.
    """
    allowed = [_compile(one) for one in allow]
    denied = [_compile(one) for one in deny]
    if not allowed and not denied:
        return _everything
    if len(allowed) == 1 and not denied:
        return allowed[0]

    def passes(event: HubbleEvent) -> bool:
        if allowed and not any(matches(event) for matches in allowed):
            return False
        return not any(matches(event) for matches in denied)

    return passes


def _everything(_: HubbleEvent) -> bool:
    return True


def _compile(message: FlowFilter) -> Predicate:
    checks: list[Predicate] = []
    for build in _BUILDERS:
        checks += build(message)
    if not checks:
        return _everything
    if len(checks) == 1:
        return checks[0]
    return lambda event: all(check(event) for check in checks)


def _flows(check: FlowPredicate) -> Predicate:
    return lambda event: isinstance(event, Flow) and check(event)


def _equal(values: Iterable[Any], read: Callable[[Flow], Any]) -> list[Predicate]:
    """Return a predicate that compares with these values; no predicate without values."""
    wanted = frozenset(values)
    return [_flows(lambda flow: read(flow) in wanted)] if wanted else []


def _any_of(values: Sequence[Any], build: Callable[[Any], FlowPredicate]) -> list[Predicate]:
    checks = [build(value) for value in values]
    return [_flows(lambda flow: any(check(flow) for check in checks))] if checks else []


# Numbers and enums


def _numbers(message: FlowFilter) -> list[Predicate]:
    drop_reasons = frozenset(message.drop_reason_desc)
    found = [
        *_equal(message.uuid, lambda flow: flow.uuid),
        *_equal(message.verdict, lambda flow: flow.verdict),
        *_equal(message.traffic_direction, lambda flow: flow.traffic_direction),
        *_equal(message.ip_version, lambda flow: flow.IP.ipVersion if flow.IP else 0),
        *_equal(message.reply, _is_reply),
        *_equal(message.source_identity, lambda flow: flow.source.identity if flow.source else None),
        *_equal(
            message.destination_identity, lambda flow: flow.destination.identity if flow.destination else None
        ),
        *_equal(message.source_cluster_name, lambda flow: flow.source and flow.source.cluster_name),
        *_equal(
            message.destination_cluster_name, lambda flow: flow.destination and flow.destination.cluster_name
        ),
        *_equal(message.ip_trace_id, lambda flow: flow.ip_trace_id.trace_id if flow.ip_trace_id else None),
    ]
    if drop_reasons:
        found.append(
            _flows(lambda flow: flow.verdict == FlowVerdict.DROPPED and flow.drop_reason_desc in drop_reasons)
        )
    return found


def _is_reply(flow: Flow) -> bool | None:
    """Whether the flow is a reply; None if unknown. A drop without the flag is not a reply."""
    if flow.is_reply is None:
        return False if flow.verdict == FlowVerdict.DROPPED else None
    return flow.is_reply


def _trace_ids(message: FlowFilter) -> list[Predicate]:
    wanted = frozenset(message.trace_id)

    def check(event: HubbleEvent) -> bool:
        context = event.trace_context if isinstance(event, Flow) else None
        return (context.parent.trace_id if context and context.parent else "") in wanted

    return [check] if wanted else []


def _event_types(message: FlowFilter) -> list[Predicate]:
    wanted = message.event_type

    def check(event: HubbleEvent) -> bool:
        match event:
            case LostEvent():
                return True
            case AgentEvent():
                kind, sub = AGENT, event.type
            case DebugEvent():
                kind, sub = DEBUG, event.type
            case _:
                if event.event_type is None:
                    return False
                kind, sub = event.event_type.type, event.event_type.sub_type
        return any(_is_of(kind, sub, one) for one in wanted)

    return [check] if wanted else []


def _is_of(kind: int, sub: int, wanted: EventTypeFilter) -> bool:
    return wanted.type in {0, kind} and not (wanted.match_sub_type and wanted.sub_type != sub)


def _interfaces(message: FlowFilter) -> list[Predicate]:
    def build(wanted: Any) -> FlowPredicate:
        def check(flow: Flow) -> bool:
            link = flow.interface
            return link is not None and wanted.index in {0, link.index} and wanted.name in {"", link.name}

        return check

    return _any_of(message.interface, build)


def _tcp_flags(message: FlowFilter) -> list[Predicate]:
    def build(wanted: Any) -> FlowPredicate:
        names = [name for name in wanted.__struct_fields__ if getattr(wanted, name)]

        def check(flow: Flow) -> bool:
            flags = flow.l4.TCP.flags if flow.l4 and flow.l4.TCP else None
            return flags is not None and all(getattr(flags, name) for name in names)

        return check

    return _any_of(message.tcp_flags, build)


# Addresses and ports


def _addresses(message: FlowFilter) -> list[Predicate]:
    return [
        *_addresses_of(message.source_ip, lambda flow: flow.IP.source if flow.IP else ""),
        *_addresses_of(message.destination_ip, lambda flow: flow.IP.destination if flow.IP else ""),
        *_addresses_of(message.source_ip_xlated, lambda flow: flow.IP.source_xlated if flow.IP else ""),
    ]


def _addresses_of(texts: Sequence[str], read: Callable[[Flow], str]) -> list[Predicate]:
    exact = frozenset(text for text in texts if "/" not in text)
    for text in exact:
        try:
            ip_address(text)
        except ValueError:
            raise InvalidFilter(f'invalid IP address in filter: "{text}"') from None
    prefixes = [_prefix(text) for text in texts if "/" in text]

    def check(flow: Flow) -> bool:
        text = read(flow)
        if not text or not prefixes:
            return text in exact
        return text in exact or _in_any(text, prefixes)

    return [_flows(check)] if texts else []


def _prefix(text: str) -> IPv4Network | IPv6Network:
    length = text.partition("/")[2]
    try:
        prefix = ip_network(text, strict=False)
    except ValueError:
        raise InvalidFilter(f'invalid CIDR in filter: "{text}"') from None
    if str(prefix.prefixlen) != length:  # a netmask, or leading zeros
        raise InvalidFilter(f'invalid CIDR in filter: "{text}"')
    mapped = prefix.network_address.ipv4_mapped if isinstance(prefix, IPv6Network) else None
    if mapped is not None and prefix.prefixlen >= 96:
        return IPv4Network((mapped, prefix.prefixlen - 96))
    return prefix


@lru_cache(maxsize=4096)
def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _in_any(text: str, prefixes: Sequence[IPv4Network | IPv6Network]) -> bool:
    address = _address(text)
    return address is not None and any(address in prefix for prefix in prefixes)


def _ports(message: FlowFilter) -> list[Predicate]:
    return [
        *_equal(_port_numbers("source", message.source_port), lambda flow: _port(flow, "source_port")),
        *_equal(
            _port_numbers("destination", message.destination_port),
            lambda flow: _port(flow, "destination_port"),
        ),
    ]


def _port_numbers(side: str, texts: Sequence[str]) -> list[int]:
    for text in texts:
        reason = "" if re.fullmatch(r"\d+", text, re.ASCII) else "invalid syntax"
        if not reason and int(text) > 0xFFFF:
            reason = "value out of range"
        if reason:
            fault = f'strconv.ParseUint: parsing "{text}": {reason}'
            raise InvalidFilter(f'invalid {side} port filter: invalid port "{text}": {fault}')
    return [int(text) for text in texts]


def _port(flow: Flow, name: str) -> int | None:
    l4 = flow.l4
    header = (l4.TCP or l4.UDP or l4.SCTP) if l4 is not None else None
    port: int | None = getattr(header, name, None)
    return port


_PROTOCOLS: Final[dict[str, FlowPredicate]] = {
    "tcp": lambda flow: bool(flow.l4 and flow.l4.TCP),
    "udp": lambda flow: bool(flow.l4 and flow.l4.UDP),
    "sctp": lambda flow: bool(flow.l4 and flow.l4.SCTP),
    "icmp": lambda flow: bool(flow.l4 and (flow.l4.ICMPv4 or flow.l4.ICMPv6)),
    "icmpv4": lambda flow: bool(flow.l4 and flow.l4.ICMPv4),
    "icmpv6": lambda flow: bool(flow.l4 and flow.l4.ICMPv6),
    "dns": lambda flow: bool(flow.l7 and flow.l7.dns),
    "http": lambda flow: bool(flow.l7 and flow.l7.http),
    "kafka": lambda flow: bool(flow.l7 and flow.l7.kafka),
}


def _protocols(message: FlowFilter) -> list[Predicate]:
    def build(name: str) -> FlowPredicate:
        if name.lower() not in _PROTOCOLS:
            raise InvalidFilter(f'invalid protocol filter: unknown protocol: "{name}"')
        return _PROTOCOLS[name.lower()]

    return _any_of(message.protocol, build)


# Names and labels


def _named(message: FlowFilter) -> list[Predicate]:
    return [
        *_any_of(message.source_pod, lambda text: _pod(text, lambda flow: flow.source)),
        *_any_of(message.destination_pod, lambda text: _pod(text, lambda flow: flow.destination)),
        *_any_of(message.source_service, lambda text: _service(text, "source")),
        *_any_of(message.destination_service, lambda text: _service(text, "destination")),
        *_any_of(message.source_workload, lambda wanted: _workload(wanted, lambda flow: flow.source)),
        *_any_of(
            message.destination_workload, lambda wanted: _workload(wanted, lambda flow: flow.destination)
        ),
    ]


def _namespaced(text: str) -> tuple[str, str]:
    """Split ``namespace/prefix``; without a slash, the namespace is ``default``."""
    if not text:
        raise InvalidFilter("invalid filter, name must not be empty")
    if "/" not in text:
        return "default", text
    namespace, prefix = text.split("/")[:2]
    return namespace, prefix


def _has_name(wanted: tuple[str, str], namespace: str, name: str) -> bool:
    if not namespace and not name:
        return False
    return wanted[0] in {"", namespace} and name.startswith(wanted[1])


def _pod(text: str, read: Callable[[Flow], FlowEndpoint | None]) -> FlowPredicate:
    wanted = _namespaced(text)

    def check(flow: Flow) -> bool:
        endpoint = read(flow)
        return endpoint is not None and _has_name(wanted, endpoint.namespace, endpoint.pod_name)

    return check


def _service(text: str, side: str) -> FlowPredicate:
    try:
        wanted = _namespaced(text)
    except InvalidFilter as error:
        raise InvalidFilter(f"invalid {side} service filter: {error}") from None

    def check(flow: Flow) -> bool:
        service: FlowService | None = getattr(flow, f"{side}_service")
        return service is not None and _has_name(wanted, service.namespace, service.name)

    return check


def _workload(wanted: Any, read: Callable[[Flow], FlowEndpoint | None]) -> FlowPredicate:
    def check(flow: Flow) -> bool:
        endpoint = read(flow)
        return endpoint is not None and any(
            wanted.name in {"", one.name} and wanted.kind in {"", one.kind} for one in endpoint.workloads
        )

    return check


def _labels(message: FlowFilter) -> list[Predicate]:
    return [
        *_selectors("source label", message.source_label, lambda flow: _labels_of(flow.source)),
        *_selectors(
            "destination label", message.destination_label, lambda flow: _labels_of(flow.destination)
        ),
        *_selectors("node label", message.node_labels, lambda flow: flow.node_labels),
    ]


def _labels_of(endpoint: FlowEndpoint | None) -> Sequence[str]:
    return endpoint.labels if endpoint is not None else ()


@lru_cache(maxsize=4096)
def _indexed(labels: tuple[str, ...]) -> Any:
    return index_labels(labels)


def _selectors(what: str, texts: Sequence[str], read: Callable[[Flow], Sequence[str]]) -> list[Predicate]:
    try:
        selectors = [parse_selector(text) for text in texts]
    except LabelSelectorError as error:
        raise InvalidFilter(f"invalid {what} filter: {error}") from None

    def check(event: HubbleEvent) -> bool:
        labels = _indexed(tuple(read(event)) if isinstance(event, Flow) else ())
        return any(all(holds(labels) for holds in selector) for selector in selectors)

    return [check] if selectors else []


def _names(message: FlowFilter) -> list[Predicate]:
    return [
        *_any_of(message.source_fqdn, lambda text: _fqdn(text, lambda flow: flow.source_names)),
        *_any_of(message.destination_fqdn, lambda text: _fqdn(text, lambda flow: flow.destination_names)),
        *_any_of(message.node_name, _node_name),
    ]


_NAME_RUNES: Final = re.compile(r"[-.0-9a-z_*]*")


def _name_pattern(text: str) -> Callable[[str], bool]:
    """Return a predicate for whole names with wildcards. Raises InvalidFilter."""
    pattern = text.strip().removesuffix(".").lower()
    if not pattern:
        raise InvalidFilter("empty pattern")
    if pattern.endswith("."):
        raise InvalidFilter("multiple trailing dots in pattern")
    valid = _NAME_RUNES.match(pattern)
    if valid is not None and valid.end() < len(pattern):
        raise InvalidFilter(f"'{pattern[valid.end()]}': invalid rune in pattern")
    if "*" not in pattern:
        return lambda name: name == pattern
    compiled = _regexp(re.escape(pattern).replace(r"\*", "[-.0-9a-z]*").replace(r"\-", "-"))
    return lambda name: compiled.fullmatch(name) is not None


def _fqdn(text: str, read: Callable[[Flow], Sequence[str]]) -> FlowPredicate:
    matches = _name_pattern(text)
    return lambda flow: any(matches(name) for name in read(flow))


def _node_name(text: str) -> FlowPredicate:
    cluster, slash, node = text.rpartition("/")
    in_cluster = _name_pattern(cluster) if slash and cluster else lambda _: True
    is_node = _name_pattern(node) if node or not slash else lambda _: True

    def check(flow: Flow) -> bool:
        if not flow.node_name:
            return False
        cluster_name, slash, name = flow.node_name.partition("/")
        if not slash:
            cluster_name, name = DEFAULT_CLUSTER, flow.node_name
        return in_cluster(cluster_name) and is_node(name)

    return check


# Layer 7


def _regexp(pattern: str) -> Regexp:
    """Compile a regular expression. Raises InvalidFilter."""
    try:
        return compile_regexp(pattern)
    except RegexpError as error:
        raise InvalidFilter(str(error)) from None


def _patterns(texts: Sequence[str], prefix: str, read: Callable[[Flow], str | None]) -> list[Predicate]:
    def build(text: str) -> FlowPredicate:
        try:
            compiled = _regexp(text)
        except InvalidFilter as error:
            raise InvalidFilter(f"{prefix.format(text)}: {error}") from None

        def check(flow: Flow) -> bool:
            value = read(flow)
            return value is not None and compiled.search(value) is not None

        return check

    return _any_of(texts, build)


def _dns(message: FlowFilter) -> list[Predicate]:
    def query(flow: Flow) -> str | None:
        return flow.l7.dns.query if flow.l7 and flow.l7.dns else None

    return _patterns(message.dns_query, "invalid DNS query filter: failed to compile regexp", query)


def _http(message: FlowFilter) -> list[Predicate]:
    fields = {
        "status code": message.http_status_code,
        "method": message.http_method,
        "path": message.http_path,
        "url": message.http_url,
        "headers": message.http_header,
    }
    if message.event_type and not any(one.type == ACCESS_LOG for one in message.event_type):
        for name, values in fields.items():
            if values:
                raise InvalidFilter(
                    f"filtering by http {name} requires the event type filter to only match 'l7' events"
                )
    methods = frozenset(method.lower() for method in message.http_method)
    headers = frozenset((header.key, header.value) for header in message.http_header)
    found = [
        *_any_of(message.http_status_code, _status_code),
        *_equal(methods, lambda flow: flow.l7.http.method.lower() if flow.l7 and flow.l7.http else None),
        *_patterns(message.http_path, "invalid http path filter: {}", _path),
        *_patterns(message.http_url, "invalid http url filter: {}", _url),
    ]
    if headers:

        def has_header(flow: Flow) -> bool:
            http = flow.l7.http if flow.l7 else None
            return http is not None and any((one.key, one.value) in headers for one in http.headers)

        found.append(_flows(has_header))
    return found


def _status_code(text: str) -> FlowPredicate:
    if not re.fullmatch(r"[1-5]\d{2}|[1-5]\d?\+", text, re.ASCII):
        raise InvalidFilter(f'invalid http status code filter: invalid status code prefix: "{text}"')
    prefix, exact = text.removesuffix("+"), not text.endswith("+")

    def check(flow: Flow) -> bool:
        if flow.l7 is None or flow.l7.http is None or flow.l7.type != L7FlowType.RESPONSE:
            return False
        code = str(flow.l7.http.code)
        return code == prefix if exact else code.startswith(prefix)

    return check


def _url(flow: Flow) -> str | None:
    return flow.l7.http.url if flow.l7 and flow.l7.http else None


_REQUEST_URI: Final = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:(?://[^/?]*)?)?(/[^?]*|)(?:\?.*)?", re.DOTALL)


_INVALID_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})|[\x00-\x1f\x7f]")


def _path(flow: Flow) -> str | None:
    """Return the decoded path of an HTTP URL; None if the URL is invalid."""
    url = _url(flow)
    if not url or (match := _REQUEST_URI.fullmatch(url)) is None:
        return "*" if url == "*" else None
    return None if _INVALID_ESCAPE.search(match[1]) else unquote(match[1])


def _expressions(message: FlowFilter) -> list[Predicate]:
    if message.experimental is None or not message.experimental.cel_expression:
        return []
    from cells.hubble.filters.descriptors import compile_expressions

    return [compile_expressions(message.experimental.cel_expression)]


_BUILDERS: Final[tuple[Callable[[FlowFilter], list[Predicate]], ...]] = (
    _numbers,
    _addresses,
    _named,
    _names,
    _labels,
    _event_types,
    _http,
    _protocols,
    _ports,
    _dns,
    _trace_ids,
    _interfaces,
    _tcp_flags,
    _expressions,
)
