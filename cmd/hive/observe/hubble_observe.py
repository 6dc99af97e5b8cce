"""``hubble observe``: flows, agent events and debug events, from a server or a file.

Source: the hubble CLI of Cilium 1.17: its flags, their requests, and which exclude each other.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from cells.hubble.codec import FieldMask, InvalidFieldMask, WireMessage, from_json, to_json
from cells.hubble.flow import Flow, FlowFilter
from cells.hubble.rpc.messages import RpcCode, RpcError
from cells.hubble.rpc.observer import (
    GetAgentEventsRequest,
    GetAgentEventsResponse,
    GetDebugEventsRequest,
    GetDebugEventsResponse,
    GetFlowsExperimental,
    GetFlowsRequest,
    GetFlowsResponse,
)
from cells.hubble.scalars import DecodeError
from hive.observe.hubble_filters import EXPECTED, FILTER_FLAGS, FlowSelection, parse_number
from hive.observe.hubble_flags import CommandLineError, Flag, Flags, parse_list, parse_time, switch
from hive.observe.hubble_printer import Printer
from hive.observe.hubble_server import CommandError, connected, follow, parsed
from hive.observe.hubble_text import json_text
from hive.output import terminal_text

if TYPE_CHECKING:
    from hive.observe.hubble_why import DropReasons

LAST: Final = 20
"""Default number of flows."""
ALL: Final = (1 << 64) - 1
_DEFAULT_MASK: Final = (
    "time",
    "source.identity",
    "source.namespace",
    "source.pod_name",
    "destination.identity",
    "destination.namespace",
    "destination.pod_name",
    "source_service",
    "destination_service",
    "l4",
    "IP",
    "ethernet",
    "l7",
    "Type",
    "node_name",
    "is_reply",
    "event_type",
    "verdict",
    "Summary",
)
"""Fields of flows for formats other than JSON."""
WHOLE_NUMBER: Final = "a whole number of at least 0"
_FORMATS: Final = {"compact": "compact", "dict": "dict", "json": "json", "JSON": "json", "jsonpb": "json"}
_TABLES: Final = {"table": "table", "tab": "table"}
_Message = TypeVar("_Message", bound=WireMessage)

_SELECTORS: Final = (
    switch("all", "All flows that the server stores."),
    Flag(
        "last", f"The last N flows.  [default: {LAST}]", parse=parse_number, default=0, expected=WHOLE_NUMBER
    ),
    Flag("first", "The first N flows.", parse=parse_number, default=0, expected=WHOLE_NUMBER),
    switch("follow", "Continue with new flows.", "f"),
    Flag("since", "Flows since a time, or for a duration such as 5m."),
    Flag("until", "Flows until a time, or until a duration ago."),
)
_FORMATTING: Final = (
    Flag("output", "compact, dict, json, jsonpb or table.", "o", default="compact"),
    switch("print-node-name", "Print the node of each flow."),
    Flag("time-format", "StampMilli, RFC3339, RFC3339Nano, RFC1123Z, ... in UTC.", default="StampMilli"),
    switch("silent-errors", "Print no reports on nodes and losses.", "s"),
)
_FLOW_FLAGS: Final = (
    switch("numeric", "Print addresses and numbers, without names."),
    switch("ip-translation", "Print names in place of addresses.", default=True),
    Flag("color", "auto, always or never.", default="auto"),
    switch("print-raw-filters", "Print the filters, and ask nothing."),
    switch(
        "why", "Below each drop, the policy that decides it now and what is missing, by this node's agent."
    ),
    Flag("input-file", "Read flows from a file of -o jsonpb; - is stdin."),
    Flag("experimental-field-mask", "Fields that the server sends.", parse=parse_list, default=()),
    switch("experimental-use-default-field-masks", "Let the server send only what is printed."),
    Flag("allowlist", "Filters to allow, as JSON.", many=True),
    Flag("denylist", "Filters to deny, as JSON.", many=True),
)


def observe(words: Sequence[str], command: str) -> int:
    """Show flows. ``command`` is its name in help and errors."""
    selection = FlowSelection()

    def filter_flag(name: str) -> Flag:
        short, alone, about = FILTER_FLAGS[name]
        return Flag(
            name, about, short, lambda text: selection.add(name, text), None, alone, EXPECTED.get(name, "")
        )

    own = [word for number, word in enumerate(words) if number or word != "flows"]
    flags = parsed(
        own,
        (*_SELECTORS, *map(filter_flag, FILTER_FLAGS), *_FORMATTING, *_FLOW_FLAGS),
        command,
        "Show flows: source, destination and verdict of packets and requests.",
    )
    if flags is None:
        return 0
    allowed, denied = _lists(selection)
    printer = _flow_printer(flags, losses=command.startswith("hive "))
    request = _flows_request(flags, allowed, denied)
    if flags["print-raw-filters"]:
        _print_filters(request)
        return 0
    if flags["debug"]:
        print(f"asking for {json_text(to_json(request))}", file=sys.stderr)
    try:
        if flags["input-file"]:
            for response in flows_of_file(flags["input-file"], request):
                printer.flow(response)
        else:
            with connected(flags) as client:
                follow(client, "observer.Observer/GetFlows", request, GetFlowsResponse, printer.flow)
    except RpcError as error:
        if error.code != RpcCode.UNKNOWN:
            raise
        raise CommandError(error.message) from error
    finally:
        printer.close()
    return 0


def _lists(selection: FlowSelection) -> tuple[list[FlowFilter], list[FlowFilter]]:
    try:
        return selection.lists()
    except ValueError as error:
        raise CommandLineError(str(error)) from error


def _flow_printer(flags: Flags, *, losses: bool) -> Printer:
    output = flags["output"]
    if output in _TABLES and flags["follow"]:
        raise CommandLineError("table output format is not compatible with follow mode")
    if output not in _FORMATS | _TABLES:
        raise CommandLineError(
            f"invalid output format: {output}",
            f"--output: {output!r}: expected one of {', '.join(_FORMATS | _TABLES)}",
        )
    if _FORMATS.get(output) != "json" and flags["experimental-field-mask"]:
        raise CommandLineError(f"{output} output format is not compatible with custom field mask")
    if flags["why"] and _FORMATS.get(output) != "compact":
        raise CommandLineError(f"--why has no place in {output} output: leave out --output")
    colour = flags["color"] == "always" or (flags["color"] == "auto" and sys.stdout.isatty())
    reasons = None
    if flags["why"]:
        from hive.observe.hubble_why import DropReasons

        reasons = DropReasons()
    translate = flags["ip-translation"] and not flags["numeric"]
    return _printer(flags, translate=translate, colour=colour, losses=losses, reasons=reasons)


def _printer(
    flags: Flags,
    *,
    translate: bool = True,
    colour: bool = False,
    losses: bool = False,
    reasons: DropReasons | None = None,
) -> Printer:
    return Printer(
        (_FORMATS | _TABLES)[flags["output"]],
        time_format=flags["time-format"],
        node_name=flags["print-node-name"],
        translate=translate,
        colour=colour,
        debug=flags["debug"],
        silent=flags["silent-errors"],
        losses=losses,
        below=None if reasons is None else reasons.lines,
    )


def _times(flags: Flags) -> tuple[int | None, int | None]:
    """Return since and until; the latter is ignored with --follow."""
    found: list[int | None] = []
    for name in ("since", "until"):
        try:
            wanted = flags[name] and not (name == "until" and flags["follow"])
            found.append(parse_time(flags[name]) if wanted else None)
        except ValueError as error:
            raise CommandLineError(
                f"failed to parse the {name} time: {error}",
                f"--{name}: {flags[name]!r}: expected how long ago, such as 5m or 1h30m, or a time, such as"
                " 2026-11-28T08:00:00Z",
            ) from error
    return found[0], found[1]


def _flows_request(flags: Flags, allowed: list[FlowFilter], denied: list[FlowFilter]) -> GetFlowsRequest:
    first, last = flags["first"], flags["last"]
    for wanted, flag in ((last, "last"), (flags["all"], "all"), (flags["follow"], "follow")):
        if first and wanted:
            raise CommandLineError(f"cannot set both --first and --{flag}")
    if last and flags["all"]:
        raise CommandLineError("cannot set both --last and --all")
    since, until = _times(flags)
    if since is None and until is None and not first:
        if flags["all"]:
            last = ALL
        elif not last and not flags["follow"] and not flags["input-file"]:
            last = LAST
    mask = flags["experimental-field-mask"]
    if flags["experimental-use-default-field-masks"] and _FORMATS.get(flags["output"]) != "json":
        mask = _DEFAULT_MASK
    return GetFlowsRequest(
        number=first or last,
        first=bool(first),
        follow=flags["follow"],
        whitelist=[*allowed, *_raw_filters("allowlist", flags["allowlist"])],
        blacklist=[*denied, *_raw_filters("denylist", flags["denylist"])],
        since=since,
        until=until,
        experimental=GetFlowsExperimental(field_mask=_checked(mask)) if mask else None,
    )


def _checked(paths: Sequence[str]) -> Sequence[str]:
    for path in paths:
        try:
            FieldMask.parse([path], Flow)
        except InvalidFieldMask as error:
            raise CommandLineError(
                f'failed to construct field mask: proto: invalid path "{path}" for message "flow.Flow"'
            ) from error
    return paths


def _raw_filters(name: str, texts: Sequence[str]) -> Iterator[FlowFilter]:
    """Parse filters from texts with one or several JSON objects."""
    decoder = json.JSONDecoder()
    for text in texts:
        rest = text.strip()
        while rest:
            try:
                tree, end = decoder.raw_decode(rest)
                yield from_json(FlowFilter, tree)
            except (DecodeError, json.JSONDecodeError) as error:
                raise CommandLineError(
                    f"invalid --{name} flag: failed to decode '{text}': {error}"
                ) from error
            rest = rest[end:].lstrip()


def _print_filters(request: GetFlowsRequest) -> None:
    for name, filters in (("allowlist", request.whitelist), ("denylist", request.blacklist)):
        if filters:
            print(f"{name}:")
        for one in filters:
            text = _plain_json(to_json(one)).replace("'", "''")
            print(f"    - '{text}'")


def _plain_json(tree: object) -> str:
    """Return JSON without HTML escapes."""
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def flows_of_file(name: str, request: GetFlowsRequest) -> Iterator[GetFlowsResponse]:
    """Yield the flows in the output of an earlier ``-o jsonpb`` that match the request."""
    from cells.hubble.filters import InvalidFilter, compile_filters

    try:
        matches = compile_filters(request.whitelist, request.blacklist)
    except InvalidFilter as error:
        raise CommandError(str(error)) from error

    def wanted(response: GetFlowsResponse) -> bool:
        when = response.time or 0
        after = request.since is None or when >= request.since
        before = request.until is None or when <= request.until
        return after and before and response.flow is not None and matches(response.flow)

    with contextlib.ExitStack() as opened:
        try:
            lines = sys.stdin if name == "-" else opened.enter_context(Path(name).open(encoding="utf-8"))
        except OSError as error:
            raise CommandError(f"open {name}: {error.strerror}") from error
        found = filter(wanted, _responses(lines))
        if request.first or not 0 < request.number < ALL:
            for count, response in enumerate(found, 1):
                yield response
                if request.first and count == request.number:
                    return
        else:
            yield from deque(found, request.number)


def _responses(lines: Iterable[str]) -> Iterator[GetFlowsResponse]:
    for line in lines:
        if not line.strip():
            continue
        try:
            tree = json.loads(line)
            tree = {name: value for name, value in tree.items() if name in GetFlowsResponse.__struct_fields__}
            response = from_json(GetFlowsResponse, tree)
        except (ValueError, AttributeError) as error:
            print(terminal_text(f"not a flow: {line.strip()} ({error})"), file=sys.stderr)
            continue
        if response.flow is not None:
            yield response


def _events(
    name: str,
    request: type[GetAgentEventsRequest] | type[GetDebugEventsRequest],
    response: type[_Message],
    show: Callable[[Printer], Callable[[_Message], None]],
) -> Callable[[Sequence[str], str], int]:
    """Return the command for one kind of event other than flows."""

    def run_it(words: Sequence[str], above: str) -> int:
        command = f"{above} {name.lower()}-events"
        about = f"Show events of the {'agent' if name == 'Agent' else 'datapath, for debugging'}."
        flags = parsed(words, (*_SELECTORS, *_FORMATTING), command, about)
        if flags is None:
            return 0
        if flags["output"] in _TABLES and flags["follow"]:
            raise CommandLineError("table output format is not compatible with follow mode")
        if flags["output"] not in _FORMATS | _TABLES:
            raise CommandLineError(f"invalid output format: {flags['output']}")
        since, until = _times(flags)
        number = flags["last"]
        if since is None and until is None:
            number = ALL if flags["all"] else number or LAST
        asked = request(number=number, follow=flags["follow"], since=since, until=until)
        printer = _printer(flags)
        with connected(flags) as client:
            try:
                follow(client, f"observer.Observer/Get{name}Events", asked, response, show(printer))
            finally:
                printer.close()
        return 0

    return run_it


EVENTS: Final[dict[str, Callable[[Sequence[str], str], int]]] = {
    "agent-events": _events(
        "Agent", GetAgentEventsRequest, GetAgentEventsResponse, lambda printer: printer.agent_event
    ),
    "debug-events": _events(
        "Debug", GetDebugEventsRequest, GetDebugEventsResponse, lambda printer: printer.debug_event
    ),
}
