"""The flags of ``hubble observe`` that select flows, as filters of a request.

Source: the hubble CLI of Cilium 1.17: its flags, which exclude each other, and its error texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, Final

from cells.hubble.enums import DropReason, FlowVerdict, IPVersion, TrafficDirection
from cells.hubble.flow import (
    EventTypeFilter,
    FlowFilter,
    FlowFilterExperimental,
    HTTPHeader,
    NetworkInterface,
    TCPFlags,
    Workload,
)
from cells.observe.events import OBSERVATION_POINTS
from hive.observe.hubble_printer import RESERVED


class FlagError(ValueError):
    """Raised for an invalid value of a flag, or flags that exclude each other."""


_EVENT_TYPES: Final = {
    "drop": 1,
    "debug": 2,
    "capture": 3,
    "trace": 4,
    "policy-verdict": 5,
    "recorder": 6,
    "trace-sock": 7,
    "l7": 129,
    "agent": 130,
}
_AGENT_EVENTS: Final = {
    "unspecified": 0,
    "message": 1,
    "agent-started": 2,
    "endpoint-regenerate-success": 3,
    "endpoint-regenerate-failure": 4,
    "policy-updated": 5,
    "policy-deleted": 6,
    "endpoint-created": 7,
    "endpoint-deleted": 8,
    "ipcache-upserted": 9,
    "ipcache-deleted": 10,
    "service-upserted": 11,
    "service-deleted": 12,
}
_EXCLUSIVE: Final = (
    (
        "from-fqdn",
        "from-ip",
        "ip",
        "fqdn",
        "from-namespace",
        "namespace",
        "from-all-namespaces",
        "all-namespaces",
    ),
    ("from-fqdn", "from-ip", "ip", "fqdn", "from-pod", "pod"),
    ("to-fqdn", "to-ip", "ip", "fqdn", "to-namespace", "namespace", "to-all-namespaces", "all-namespaces"),
    ("to-fqdn", "to-ip", "ip", "fqdn", "to-pod", "pod"),
    ("to-pod", "namespace", "all-namespaces"),
    ("from-pod", "namespace", "all-namespaces"),
    ("to-service", "namespace", "all-namespaces"),
    ("from-service", "namespace", "all-namespaces"),
    *(
        (word, f"{side}-{word}")
        for word in ("label", "service", "port", "identity", "workload")
        for side in ("from", "to")
    ),
)
_EITHER_END: Final = frozenset({"fqdn", "pod", "ip", "label", "service", "port", "workload", "identity"})
"""Flags for one end of a flow with the prefix ``from-`` or ``to-``, otherwise for either end."""
_PLAIN: Final = {
    "uuid": "uuid",
    "snat-ip": "source_ip_xlated",
    "trace-id": "trace_id",
    "http-status": "http_status_code",
    "http-method": "http_method",
    "http-path": "http_path",
    "http-url": "http_url",
    "protocol": "protocol",
    "node-name": "node_name",
    "node-label": "node_labels",
}


def _workload(text: str) -> Workload:
    kind, slash, name = text.partition("/")
    return Workload(kind=kind, name=name) if slash else Workload(name=kind)


def _identity(text: str) -> int:
    names = {name: number for number, name in RESERVED.items() if number}
    if text in names:
        return names[text]
    if text.isascii() and text.isdigit() and int(text) < 1 << 32:
        return int(text)
    raise FlagError(f"invalid security identity, expected one of [{' '.join(names)} 11] or a numeric value")


def _verdict(text: str) -> int:
    try:
        return FlowVerdict[text]
    except KeyError:
        raise FlagError(f"invalid --verdict value: {text}") from None


def _drop_reason(text: str) -> int:
    if not text:
        raise FlagError("empty --drop-reason-desc value")
    try:
        return DropReason[text]
    except KeyError:
        raise FlagError(f"invalid --drop-reason-desc value: {text}") from None


def _direction(text: str) -> int:
    if text.upper() not in {"INGRESS", "EGRESS"}:
        raise FlagError(f"{text.lower()}: invalid traffic direction, expected ingress or egress")
    return TrafficDirection[text.upper()]


def _ip_version(text: str) -> int:
    versions = {"4": IPVersion.IPv4, "6": IPVersion.IPv6}
    return versions.get(text.lower().removeprefix("ip").removeprefix("v"), IPVersion.IP_NOT_USED)


def _header(text: str) -> HTTPHeader:
    key, colon, value = text.partition(":")
    if not colon:
        raise FlagError(f'invalid http-header value "{text}", expected name:value')
    return HTTPHeader(key=key, value=value)


def _tcp_flags(text: str) -> TCPFlags:
    names = text.split(",")
    for name in names:
        if name.upper() not in TCPFlags.__struct_fields__:
            raise FlagError(f"unknown tcp flag: {name}")
    return TCPFlags(**{name.upper(): True for name in names})


def parse_number(text: str) -> int:
    """Parse an unsigned number. Raises FlagError, in Go's words."""
    if not text.isascii() or not text.isdigit():
        raise FlagError(f'strconv.ParseUint: parsing "{text}": invalid syntax')
    if int(text) >= 1 << 64:
        raise FlagError(f'strconv.ParseUint: parsing "{text}": value out of range')
    return int(text)


def _event_type(text: str) -> EventTypeFilter:
    name, colon, sub = text.partition(":")
    try:
        number = _EVENT_TYPES[name] if name in _EVENT_TYPES else parse_number(name)
    except FlagError as error:
        raise FlagError(
            f"unable to parse type '{name}', not a known type name and unable to parse as numeric value:"
            f" {error}"
        ) from error
    if not colon:
        return EventTypeFilter(type=number)
    return EventTypeFilter(type=number, match_sub_type=True, sub_type=_sub_type(name, sub))


def _sub_type(name: str, sub: str) -> int:
    if name == "trace":
        for number, point in OBSERVATION_POINTS.items():
            if point == sub:
                return number
    if name == "agent" and sub in _AGENT_EVENTS:
        return _AGENT_EVENTS[sub]
    try:
        return parse_number(sub)
    except FlagError as error:
        raise FlagError(
            f"unable to parse event sub-type '{sub}', not a known sub-type name and unable to parse as"
            f" numeric value: {error}"
        ) from error


_PARSED: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "ipv4": ("ip_version", lambda _: IPVersion.IPv4),
    "ipv6": ("ip_version", lambda _: IPVersion.IPv6),
    "ip-version": ("ip_version", _ip_version),
    "verdict": ("verdict", _verdict),
    "drop-reason-desc": ("drop_reason_desc", _drop_reason),
    "http-header": ("http_header", _header),
    "type": ("event_type", _event_type),
    "tcp-flags": ("tcp_flags", _tcp_flags),
    "traffic-direction": ("traffic_direction", _direction),
    "interface": ("interface", lambda text: NetworkInterface(name=text)),
    "cluster": ("node_name", lambda text: f"{text}/"),
}
_END_VALUES: Final[dict[str, Callable[[str], Any]]] = {"workload": _workload, "identity": _identity}

FILTER_FLAGS: Final = {
    "not": ("", "true", "Reverse the next filter: --not --from-ip 2.2.2.2."),
    "uuid": ("", "", "The flow of this identifier."),
    "node-name": ("", "", 'Flows of these nodes, such as "k8s*" or "cluster/*.company.com".'),
    "node-label": ("", "", "Flows of nodes with this label."),
    "cluster": ("", "", "Flows of nodes of this cluster."),
    "protocol": ("", "", "Flows of this protocol of layer 4 or 7, such as udp or http."),
    "tcp-flags": ("", "", "Flows with all these TCP flags, such as SYN,ACK."),
    "type": (
        "t",
        "",
        "Events of TYPE[:SUBTYPE]: drop, trace:to-endpoint, l7, policy-verdict, trace-sock, capture.",
    ),
    "verdict": (
        "",
        "",
        "Flows with this verdict: FORWARDED, DROPPED, AUDIT, REDIRECTED, ERROR, TRACED, TRANSLATED.",
    ),
    "drop-reason-desc": ("", "", "Flows dropped for this reason, such as POLICY_DENIED."),
    "http-status": ("", "", "Flows with this HTTP status or its beginning, such as 404 or 5+."),
    "http-method": ("", "", "Flows with this HTTP method."),
    "http-path": ("", "", "Flows with a match of this regular expression in the HTTP path."),
    "http-url": ("", "", "Flows with a match of this regular expression in the HTTP URL."),
    "http-header": ("", "", "Flows with this HTTP header, as name:value."),
    "trace-id": ("", "", "Flows of this trace."),
    "from-fqdn": ("", "", 'Flows from this domain name, such as "*.cilium.io".'),
    "fqdn": ("", "", "Flows from or to this domain name."),
    "to-fqdn": ("", "", "Flows to this domain name."),
    "from-ip": ("", "", "Flows from this address, or range of addresses."),
    "snat-ip": ("", "", "Flows with a source translated to this address, or range."),
    "ip": ("", "", "Flows from or to this address, or range."),
    "to-ip": ("", "", "Flows to this address, or range."),
    "ipv4": ("4", "v4", "IPv4 flows."),
    "ipv6": ("6", "v6", "IPv6 flows."),
    "ip-version": ("", "", "Flows of this version: none, v4, v6."),
    "from-pod": ("", "", "Flows from pods of this name or its beginning, as [namespace/]pod."),
    "pod": ("", "", "Flows from or to such pods; without a namespace, in default."),
    "to-pod": ("", "", "Flows to such pods."),
    "from-namespace": ("", "", "Flows from this namespace."),
    "namespace": ("n", "", "Flows from or to this namespace."),
    "to-namespace": ("", "", "Flows to this namespace."),
    "from-all-namespaces": ("", "true", "Flows from any namespace."),
    "all-namespaces": ("A", "true", "Flows from or to any namespace."),
    "to-all-namespaces": ("", "true", "Flows to any namespace."),
    "from-label": ("", "", 'Flows from endpoints with these labels, such as "app=web" or "reserved:world".'),
    "label": ("l", "", "Flows from or to such endpoints."),
    "to-label": ("", "", "Flows to such endpoints."),
    "from-service": ("", "", "Flows from the ClusterIP of services of this name or its beginning."),
    "service": ("", "", "Flows from or to such services."),
    "to-service": ("", "", "Flows to such services."),
    "from-port": ("", "", "Flows from this port."),
    "port": ("", "", "Flows from or to this port."),
    "to-port": ("", "", "Flows to this port."),
    "from-workload": ("", "", "Flows from this workload, as [kind/]name."),
    "workload": ("", "", "Flows from or to this workload."),
    "to-workload": ("", "", "Flows to this workload."),
    "from-identity": ("", "", "Flows from this identity: a number, or a name such as host or world."),
    "identity": ("", "", "Flows from or to this identity."),
    "to-identity": ("", "", "Flows to this identity."),
    "traffic-direction": ("", "", "Flows in this direction: ingress or egress."),
    "cel-expression": ("", "", "Flows that this CEL expression is true for."),
    "interface": ("", "", "Flows seen at this network interface."),
}
"""Name -> one-letter name, value if none is given, help."""

EXPECTED: Final = {
    "type": f"{', '.join(_EVENT_TYPES)} or a number, with :SUBTYPE for one kind of them",
    "verdict": f"one of {', '.join(each.name for each in FlowVerdict)}",
    "drop-reason-desc": "a reason of the page on drop reasons, such as POLICY_DENIED",
    "traffic-direction": "ingress or egress",
    "tcp-flags": f"flags with commas between, of {', '.join(TCPFlags.__struct_fields__)}",
    "http-header": "name:value",
}
"""Descriptions of valid values, for errors."""


class _Alternatives:
    """A list of filters: two alternatives, which differ after a flag for either end of a flow."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._left = FlowFilter()
        self._right = FlowFilter()
        self._namespaces: dict[str, list[str]] = {"": [], "from": [], "to": []}

    def add(self, name: str, text: str) -> None:
        """Apply one flag's value. Raises FlagError."""
        if name not in self._names:
            self._names.append(name)
        self._refuse_exclusive()
        where, word = name.split("-", 1) if name.startswith(("from-", "to-")) else ("", name)
        if word in {"namespace", "all-namespaces"}:
            self._namespaces[where].append(text if word == "namespace" else "")
        elif word in _EITHER_END:
            value = _END_VALUES.get(word, str)(text)
            if where in {"", "from"}:
                self._append(f"source_{word}", value, right=bool(where))
            if where in {"", "to"}:
                self._append(f"destination_{word}", value, left=bool(where))
        elif name == "cel-expression":
            for one in (self._left, self._right):
                known = one.experimental.cel_expression if one.experimental is not None else ()
                one.experimental = FlowFilterExperimental(cel_expression=(*known, text))
        else:
            field, parse = _PARSED.get(name) or (_PLAIN[name], str)
            self._append(field, parse(text))
        self._refuse_namespaces()

    def _append(self, field: str, value: object, *, left: bool = True, right: bool = True) -> None:
        for one, wanted in ((self._left, left), (self._right, right)):
            if wanted:
                setattr(one, field, (*getattr(one, field), value))

    def _refuse_exclusive(self) -> None:
        for group in _EXCLUSIVE:
            used = [name for name in group if name in self._names]
            if len(used) > 1:
                raise FlagError(f"filters --{used[0]} and --{used[1]} cannot be combined")

    def _refuse_namespaces(self) -> None:
        faults = []
        for one in (self._left, self._right):
            source, destination = (
                (one.source_pod, one.source_service),
                (
                    one.destination_pod,
                    one.destination_service,
                ),
            )
            for namespaces, lists in (
                (self._namespaces[""], (*source, *destination)),
                (self._namespaces["from"], source),
                (self._namespaces["to"], destination),
            ):
                faults += [fault for names in lists for fault in _conflicts(namespaces, names)]
            for pods, services in (source, destination):
                faults += _inconsistent(pods, services)
            if faults:
                raise FlagError("\n".join(faults))

    def filters(self) -> list[FlowFilter]:
        """Return the alternatives; one if they are equal, none without flags."""
        if not self._names:
            return []
        left, right = copy(self._left), copy(self._right)
        for one in (left, right):
            _apply(one, "destination", self._namespaces["to"])
            _apply(one, "source", self._namespaces["from"])
        _apply(left, "source", self._namespaces[""])
        _apply(right, "destination", self._namespaces[""])
        return [left] if left == right else [left, right]


def _namespace(name: str) -> str:
    return name.split("/", 1)[0] if "/" in name else ""


def _conflicts(namespaces: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    for namespace in namespaces:
        for name in names:
            if _namespace(name) not in {"", namespace}:
                yield f'namespace conflict: "{namespace}" does not contain "{name}"'
                return


def _inconsistent(pods: Sequence[str], services: Sequence[str]) -> Iterator[str]:
    for namespace in filter(None, map(_namespace, pods)):
        for service in services:
            if _namespace(service) != namespace:
                yield f'namespace of service "{service}" conflict with pod "{namespace}"'
                return


def _apply(one: FlowFilter, end: str, namespaces: Sequence[str]) -> None:
    """Restrict pods and services of an end to these namespaces, or select any pod in them."""
    if not namespaces:
        return
    pod, service = f"{end}_pod", f"{end}_service"
    if not getattr(one, pod) and not getattr(one, service):
        setattr(one, pod, ("",))
    for field in (pod, service):
        found: list[str] = []
        for name in getattr(one, field):
            found += [name] if "/" in name else [f"{namespace}/{name}" for namespace in namespaces]
        setattr(one, field, tuple(found))


class FlowSelection:
    """The allow list and the deny list, from flags in the given order."""

    def __init__(self) -> None:
        self._allowed = _Alternatives()
        self._denied = _Alternatives()
        self.negated = False
        """Whether the next filter belongs to the deny list."""

    def add(self, name: str, text: str) -> None:
        """Apply one flag with its value. Raises FlagError."""
        if name == "not":
            if self.negated:
                raise FlagError("consecutive --not statements")
            self.negated = True
            return
        chosen = self._denied if self.negated else self._allowed
        self.negated = False
        chosen.add(name, text)

    def lists(self) -> tuple[list[FlowFilter], list[FlowFilter]]:
        """Return the allow and deny lists. Raises FlagError for a ``--not`` without a filter."""
        if self.negated:
            raise FlagError("trailing --not found in the arguments")
        return self._allowed.filters(), self._denied.filters()
