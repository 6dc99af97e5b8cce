"""Formats text like Cilium's client: aligned columns, JSON, YAML and JSONPath of its models, times.

Source: Go's text/tabwriter, encoding/json and time; the models of Cilium 1.17's API (api/v1/openapi.yaml);
JSONPath of k8s.io/client-go.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any, Final

import click

from hive.output import terminal_text

Shape = Mapping[str, Any]
"""Lists that a model prints even when they are not there: ``{"nodes[]": {...}}``, and what is inside; keys
that it has not got: None."""

_MAPS: Final = frozenset({"allocations", "immutable", "options", "stale", "subsystem", "xfrm-errors"})
"""Objects with free keys: values are printed unchanged, and an empty object is omitted."""
_REQUIRED: Final = frozenset({"identity", "id", "service-exports-enabled", "value"})
"""Numbers and booleans that are printed even if they are zero."""

_RULES: Final[Shape] = {"derived-from-rules[]": {}}
_POLICY: Final[Shape] = {
    "allowed-egress-identities[]": {},
    "allowed-ingress-identities[]": {},
    "cidr-policy": {"egress[]": _RULES, "ingress[]": _RULES},
    "denied-egress-identities[]": {},
    "denied-ingress-identities[]": {},
    "l4": {"egress[]": _RULES, "ingress[]": _RULES},
}
ENDPOINT: Final[Shape] = {
    "status": {
        "networking": {"addressing[]": {}},
        "policy": {"proxy-statistics[]": {}, "realized": _POLICY, "spec": _POLICY},
    }
}
_BACKENDS: Final = {"backend-addresses[]": {"protocol": None}}
SERVICE: Final[Shape] = {"spec": _BACKENDS, "status": {"realized": _BACKENDS}}
ENCRYPTION: Final[Shape] = {
    "ipsec": {"decrypt-interfaces[]": {}},
    "wireguard": {"interfaces[]": {"peers[]": {"allowed-ips[]": {}}}},
}
NODES: Final[Shape] = {"secondary-addresses[]": {}}
STATUS: Final[Shape] = {
    "bandwidth-manager": {"devices[]": {}},
    "bpf-maps": {"maps[]": {}},
    "cluster": {"nodes[]": NODES},
    "cluster-mesh": {"clusters[]": {}},
    "encryption": ENCRYPTION,
    "host-firewall": {"devices[]": {}},
    "ipam": {"ipv4[]": {}, "ipv6[]": {}},
    "kube-proxy-replacement": {
        "deviceList[]": {"ip[]": {}},
        "devices[]": {},
        "features": {"annotations": None, "nat46X64": {"gateway": {"prefixes[]": {}}}},
    },
    "kubernetes": {"k8s-api-versions[]": {}},
    "proxy": {"redirects[]": {}},
}
DEBUGINFO: Final[Shape] = {
    "cilium-status": STATUS,
    "encryption": ENCRYPTION,
    "endpoint-list[]": ENDPOINT,
    "environment-variables[]": {},
    "service-list[]": SERVICE,
}
MAPS: Final[Shape] = {"maps[]": {"cache[]": {}}}
PLAIN: Final[Shape] = {}


def model(value: Any, shape: Shape = PLAIN) -> Any:
    """Return `value` as Cilium's client prints its model: sorted, without zero values."""
    if isinstance(value, list):
        return [model(one, shape) for one in value]
    if not isinstance(value, dict):
        return value
    lists = {name.removesuffix("[]"): inner for name, inner in shape.items() if name.endswith("[]")}
    unknown = {name for name, inner in shape.items() if inner is None}
    found: dict[str, Any] = {}
    for name in sorted((value.keys() | lists.keys()) - unknown):
        one = value.get(name)
        if name in lists:
            found[name] = None if one is None else model(one, lists[name])
        elif name in _MAPS and isinstance(one, dict):
            if one:
                found[name] = dict(sorted(one.items()))
        elif one not in (None, "", 0, False, []) or (name in _REQUIRED and one == 0):
            found[name] = model(one, shape.get(name, PLAIN))
    return found


NO_PRINTER: Final = "couldn't find output printer"


class _Output(click.ParamType[str]):
    """``json``, ``yaml`` or ``jsonpath=TEMPLATE``."""

    name = "form"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        del param, ctx
        return str(value).removeprefix("=")


output_option = click.option(
    "-o", "--output", type=_Output(), default="", metavar="FORM", help="json| yaml| jsonpath='{}'"
)


def printed(value: Any, form: str, kind: str = "") -> str:
    """A model in the form that ``-o`` asks for, ``kind`` for YAML: see yaml_text().

    Raises click.ClickException for a wrong JSONPath or form.
    """
    if form == "yaml":
        from hive.go_yaml import yaml_text  # other forms do not need it

        return yaml_text(value, kind)
    if form.startswith("jsonpath="):
        return "".join(_rendered(_pieces(form.removeprefix("jsonpath=")), value))
    if form != "json":
        raise click.ClickException(NO_PRINTER)
    return json_text(value) + "\n"


def json_text(value: Any) -> str:
    """Return indented JSON like Go, with HTML's special characters escaped."""
    return _escaped(json.dumps(value, indent=2, ensure_ascii=False))


def json_line(value: Any) -> str:
    """Return JSON in one line, like Go."""
    return _escaped(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def numbered(text: str) -> dict[int, str]:
    """Parse names by number, from a text such as ``1 ICMPv4 6 TCP``."""
    words = text.split()
    return dict(zip(map(int, words[::2]), words[1::2], strict=True))


def _escaped(text: str) -> str:
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


_Piece = Callable[[Any], Iterator[str]]


def _pieces(template: str) -> list[_Piece]:
    """Yield the output of a template, piece by piece; ``{range .x[*]}...{end}`` is one.

    Raises click.ClickException.
    """
    stack: list[tuple[Any, list[_Piece]]] = [(None, [])]
    place = 0
    for match in re.finditer(r"\{([^{}]*)\}", template):
        stack[-1][1].append(partial(_literal, template[place : match.start()]))
        place = match.end()
        query = match[1].strip()
        if query.startswith("range "):
            stack.append((_path(query.removeprefix("range ").strip()), []))
        elif query == "end":
            if len(stack) == 1:
                raise click.ClickException("Couldn't parse jsonpath expression: not in range, nothing to end")
            path, inner = stack.pop()
            stack[-1][1].append(partial(_each, path, inner))
        elif query[:1] in {'"', "'"} and query[-1:] == query[:1]:
            text = query[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape")
            stack[-1][1].append(partial(_literal, text))
        else:
            stack[-1][1].append(partial(_found, _path(query)))
    if len(stack) > 1:
        raise click.ClickException("Couldn't parse jsonpath expression: unterminated range")
    stack[-1][1].append(partial(_literal, template[place:]))
    return stack[0][1]


def _path(query: str) -> Any:
    import jsonpath  # 60 ms that other forms do not need

    start = "$" + query.removeprefix("@").removeprefix("$") if query != "." else "$"
    try:
        return jsonpath.compile(start)
    except jsonpath.JSONPathError as error:
        reason = str(error).splitlines()[0]
        raise click.ClickException(f"Couldn't parse jsonpath expression: {query}: {reason}") from None


def _rendered(pieces: Sequence[_Piece], value: Any) -> Iterator[str]:
    for piece in pieces:
        yield from piece(value)


def _literal(text: str, _: Any) -> Iterator[str]:
    yield text


def _found(path: Any, value: Any) -> Iterator[str]:
    yield " ".join(one if isinstance(one, str) else json_line(one) for one in path.findall(value))


def _each(path: Any, inner: Sequence[_Piece], value: Any) -> Iterator[str]:
    for one in path.findall(value):
        yield from _rendered(inner, one)


def aligned(text: str, least: int = 5, gap: int = 3) -> str:
    """Pad every tab-terminated cell of `text` to its column, like text/tabwriter.

    A column consists of consecutive lines with a cell in it, and is at least ``least`` wide, with ``gap``
    blanks after its longest cell; text after a line's last tab belongs to no column. Control characters are
    escaped: names and errors come from other nodes.
    """
    lines = [line.split("\t") for line in terminal_text(text).split("\n")]
    widths: list[list[int]] = [[] for _ in lines]
    _measure(lines, widths, (0, len(lines)), 0, least, gap)
    rows = (
        "".join(cell.ljust(width) for cell, width in zip(line, measured, strict=False)) + line[-1]
        for line, measured in zip(lines, widths, strict=True)
    )
    return "\n".join(rows)


def _measure(
    lines: list[list[str]], widths: list[list[int]], of: tuple[int, int], column: int, least: int, gap: int
) -> None:
    number, end = of
    while number < end:
        last = number
        while last < end and column < len(lines[last]) - 1:
            last += 1
        if last > number:
            width = max(least, *(len(line[column]) + gap for line in lines[number:last]))
            for each in widths[number:last]:
                each.append(width)
            _measure(lines, widths, (number, last), column + 1, least, gap)
        number = last + 1


def table(header: Sequence[str], rows: Sequence[Sequence[object]], end: str = "") -> str:
    """Return a header and rows in aligned columns; with ``end`` a tab, the last cells are padded, too."""
    return aligned("\n".join("\t".join(map(str, row)) + end for row in (header, *rows)))


def time_of(text: str) -> datetime | None:
    """Parse an RFC 3339 time; None for Go's zero time and invalid texts."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if moment.year == 1 else moment.astimezone(UTC)


def ago(text: str | None) -> str:
    """Return the age of a time, ``3h2m5s ago``, or ``never``."""
    moment = time_of(text or "")
    return "never" if moment is None else f"{go_duration(_seconds_since(moment) * 10**9)} ago"


def short_age(text: str | None) -> str:
    """Return the age of a time in its largest unit, like Kubernetes; ``n/a`` without a time."""
    moment = time_of(text or "")
    if moment is None:
        return "n/a"
    seconds = _seconds_since(moment)
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 3 * 3600:
        minutes, rest = divmod(seconds, 60)
        return f"{minutes}m{rest}s" if minutes < 10 and rest else f"{minutes}m"
    hours, rest = divmod(seconds // 60, 60)
    if hours < 48:
        return f"{hours}h{rest}m" if hours < 8 and rest else f"{hours}h"
    days, rest = divmod(hours, 24)
    if days < 8:
        return f"{days}d{rest}h" if rest else f"{days}d"
    return f"{days}d" if days < 730 else f"{days // 365}y"


def _seconds_since(moment: datetime) -> int:
    return max(0, int((datetime.now(UTC) - moment).total_seconds()))


def go_duration(nanoseconds: int) -> str:
    """``1h0m0s``, ``1.5s``, ``400ms``, ``5ns``, as Go prints a duration."""
    if nanoseconds < 1_000_000_000:
        for unit, size in (("ms", 1_000_000), ("µs", 1_000)):
            if nanoseconds >= size:
                return f"{_decimal(nanoseconds, size)}{unit}"
        return f"{nanoseconds}ns" if nanoseconds else "0s"
    minutes, rest = divmod(nanoseconds, 60_000_000_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(rest, 1_000_000_000)}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    digits = f"{rest:0{len(str(unit)) - 1}d}".rstrip("0")
    return f"{whole}.{digits}" if digits else str(whole)


_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``1m0s``; 0 for other texts."""
    return sum(
        float(amount) * _UNITS[unit] for amount, unit in re.findall(r"([0-9.]+)(ms|us|µs|ns|h|m|s)", text)
    )


def parse_unsigned(text: str, most: int) -> int:
    """Return the number of a text. Raises ValueError in the words of Go's strconv.ParseUint."""
    reason = "invalid syntax"
    if text.isascii() and text.isdigit():
        digits = text.lstrip("0") or "0"
        if len(digits) <= len(str(most)) and int(digits) <= most:
            return int(digits)
        reason = "value out of range"
    raise ValueError(f"strconv.ParseUint: parsing {json.dumps(text)}: {reason}")


class Unsigned(click.ParamType[int]):
    """A flag's number, refused in the words of Cilium's client."""

    name = "number"

    def __init__(self, most: int) -> None:
        self._most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raises click.UsageError."""
        text = str(value)
        try:
            return parse_unsigned(text, self._most)
        except ValueError as error:
            flag = param.opts[-1] if param is not None else ""
            raise click.UsageError(f'invalid argument "{text}" for "{flag}" flag: {error}', ctx) from error


def tcp_address(text: str) -> tuple[str, int]:
    """Return IP and port of a text, ``<nil>`` and 0 of an empty one.

    Raises ValueError in the words of Go's net.ResolveTCPAddr; names of hosts and ports are not looked up.
    """
    if not text:
        return "<nil>", 0
    host, port = _host_and_port(text)
    if not (port.isascii() and port.isdigit()):
        raise ValueError(f"lookup tcp/{port}: unknown port")
    if len(port.lstrip("0")) > _PORT_DIGITS or int(port) > 0xFFFF:
        raise ValueError(f"address {port}: invalid port")
    try:
        return str(ip_address(host)) if host else "<nil>", int(port)
    except ValueError:
        raise ValueError(f"lookup {host}: no such host") from None


_PORT_DIGITS: Final = 5


def _host_and_port(text: str) -> tuple[str, str]:
    """Split an address as Go's net.SplitHostPort. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    fault = ""
    if not colon:
        fault = "missing port in address"
    elif text.startswith("["):
        inner, bracket, after = text[1:].partition("]")
        if not bracket:
            fault = "missing ']' in address"
        elif after != f":{port}":
            fault = "too many colons in address" if after.startswith(":") else "missing port in address"
        host = inner
    elif ":" in host:
        fault = "too many colons in address"
    if fault:
        raise ValueError(f"address {text}: {fault}")
    return host, port


def socket_text(address: str, port: object) -> str:
    """``10.0.1.5:80`` or ``[fd00::5]:80``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def printable_labels(labels: Sequence[str]) -> list[str]:
    """Labels as identities are printed with them: sorted, and of ``cidr:`` labels the longest prefix alone.

    Source: Cilium 1.17, pkg/labels, GetPrintableModel().
    """
    prefixes = [one.replace("-", ":") for one in labels if one.startswith("cidr:")]
    longest = max(prefixes, key=_prefix_length, default="")
    prefix = [longest] if longest and _prefix_length(longest) else []
    return sorted([*(one for one in labels if not one.startswith("cidr:")), *prefix])


def _prefix_length(label: str) -> int:
    length = label.partition("=")[0].rpartition("/")[2]
    return int(length) if length.isdecimal() else 0


def with_source(text: str) -> str:
    """Return a label ``[source:]key[=value]`` with its source, ``unspec`` by default."""
    source, colon, _ = text.partition(":")
    return text if colon and source and "=" not in source else f"unspec:{text.removeprefix(':')}"


def is_prefix(text: str) -> bool:
    """Whether a text is an address and a prefix length, as for Go's net.ParseCIDR."""
    address, _, bits = text.partition("/")
    try:
        return (
            bits.isdecimal() and "%" not in address and bool(ip_network((address, int(bits)), strict=False))
        )
    except ValueError:
        return False


def address_fault(text: str) -> str:
    """Return what is wrong with an address, in the words of Go's net/netip; empty for texts with colons."""
    if next((sign for sign in text if sign in ".:%"), None) != ".":
        return "" if ":" in text else "unable to parse IP"
    wrong = ""
    fields = 0
    field = ""
    for place, sign in enumerate(text):
        at = f" (at {json.dumps(text[place:])})"
        if sign == ".":
            if not field or place == len(text) - 1:
                wrong = f"IPv4 field must have at least one digit{at}"
            elif fields == 3:
                wrong = "IPv4 address too long"
            fields, field = fields + 1, ""
        elif sign not in "0123456789":
            wrong = f"unexpected character{at}"
        elif field == "0":
            wrong = "IPv4 field has octet with leading zero"
        else:
            field += sign
            wrong = "IPv4 field has value >255" if int(field) > 255 else ""
        if wrong:
            return wrong
    return "IPv4 address too short"


def listed_words(given: Iterable[str]) -> list[str]:
    """Return the values of a flag that takes a list, and may be repeated."""
    return [word for text in given for word in text.split(",")]
