"""``hive monitor``: events of the datapath and of the agent, live or stored.

Source: the options of ``cilium-dbg monitor``.
"""

import signal
import socket
from collections.abc import Iterator
from datetime import datetime
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Final

import click

from cells.observe.events import (
    AgentNotification,
    Drop,
    Event,
    EventNames,
    LookupRecord,
    Lost,
    Raw,
    RequestRecord,
    Sample,
    Trace,
    TraceSock,
    Verdict,
    decode,
    event_text,
)
from cells.observe.monitor import SOCKET, MonitorProtocolError, Payloads
from hive import completion
from hive.client import TIMEOUT, connect, socket_option
from hive.names import endpoint_number
from hive.observe.drop_reason import reason_text
from hive.observe.monitor_filter import VERDICTS, EventFilter
from hive.observe.monitor_history import LISTENING, HistoricNames, Moment, RecordedEvent, stored_and_live
from hive.observe.monitor_json import json_line
from hive.observe.monitor_rules import DecidingRules, rules_text
from hive.output import BAD, GOOD, QUIET, echo_fitted, terminal_text

KINDS: Final[dict[str, tuple[type, ...]]] = {
    "drop": (Drop,),
    "trace": (Trace,),
    "policy-verdict": (Verdict,),
    "l7": (RequestRecord, LookupRecord),
    "trace-sock": (TraceSock,),
    "agent": (AgentNotification,),
}
_COLOURS: Final = {
    Drop: BAD,
    Lost: BAD,
    Verdict: GOOD,
    Trace: None,
    TraceSock: None,
    RequestRecord: None,
    LookupRecord: None,
    AgentNotification: None,
    Raw: QUIET,
}


class _Network(click.ParamType[IPv4Network | IPv6Network]):
    name = "address"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> IPv4Network | IPv6Network:
        try:
            return ip_network(str(value), strict=False)
        except ValueError:
            self.fail(
                f"{value!r}: expected an address or a network, such as 10.0.1.5 or fd00::/64", param, ctx
            )


class _Endpoint(click.ParamType[str]):
    name = "endpoint"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        return str(click.IntRange(1, 65535).convert(int(text), param, ctx)) if text.isdigit() else text


_endpoint = _Endpoint()


@click.command()
@socket_option
@click.option(
    "--monitor-socket",
    type=click.Path(path_type=Path),
    help=f"The monitor socket.  [default: {SOCKET} beside the API socket]",
)
@click.option(
    "-t", "--type", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Only events of this type."
)
@click.option(
    "--from",
    "source",
    multiple=True,
    type=_endpoint,
    metavar="ENDPOINT",
    help="Only packets from this endpoint.",
)
@click.option(
    "--to",
    "destination",
    multiple=True,
    type=_endpoint,
    metavar="ENDPOINT",
    help="Only packets to this endpoint.",
)
@click.option(
    "--related-to",
    "related",
    multiple=True,
    type=_endpoint,
    metavar="ENDPOINT",
    help="Only packets from or to this endpoint.",
)
@click.option(
    "--address",
    "networks",
    multiple=True,
    type=_Network(),
    help="Only packets from or to this address or network.",
)
@click.option(
    "--pod",
    "pods",
    multiple=True,
    metavar="POD",
    shell_complete=completion.pods,
    help="Only packets from or to this pod, on any node.",
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    help="Only packets from or to pods of this namespace, on any node.",
)
@click.option(
    "--verdict", "verdicts", multiple=True, type=click.Choice(VERDICTS), help="Only events with this verdict."
)
@click.option(
    "--since",
    type=Moment(),
    metavar="TIME",
    help="Start with stored events since a time, such as 2026-11-28T08:00:00Z, or a duration, such as 5m.",
)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Start with the last N stored events.")
@click.option("-j", "--json", "as_json", is_flag=True, help="Same as -o json: one line of JSON per event.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Output format.",
)
@click.option("-n", "--numeric", is_flag=True, help="Show numbers and addresses without names.")
@click.option("-c", "--count", type=click.IntRange(min=1), help="Exit after this number of events.")
@click.option("--rules/--no-rules", default=True, help="Show the rules that decided each verdict.")
@click.option("-x", "--hex", "as_hex", is_flag=True, help="Show the packets' bytes, too.")
def command(
    agent_socket: Path,
    monitor_socket: Path | None,
    kinds: tuple[str, ...],
    source: tuple[str, ...],
    destination: tuple[str, ...],
    related: tuple[str, ...],
    networks: tuple[IPv4Network | IPv6Network, ...],
    pods: tuple[str, ...],
    namespaces: tuple[str, ...],
    verdicts: tuple[str, ...],
    since: int | None,
    last: int | None,
    as_json: bool,
    output: str,
    numeric: bool,
    count: int | None,
    rules: bool,
    as_hex: bool,
) -> int:
    """Show drops, traces, policy verdicts and changes in the agent as they happen, until ctrl-C.

    With --since or --last, start with stored events, with the names of their time. This requires Hubble
    (enable-hubble); its settings determine which events are stored.

    A line has the local time, event and reason, source and destination. ENDPOINT is a pod of this node, its
    number or its address; POD is a name, with or without its namespace. Several options of one kind are
    alternatives. The agent's setting monitor-aggregation determines which packets are traced. Events that
    arrive faster than they are read are lost, and counted. Before the first drop of each reason, a line on
    standard error explains it.
    """
    past = since is not None or last is not None
    if past and monitor_socket is not None:
        raise click.UsageError(
            "--monitor-socket has only events that come: leave it out with --since and --last (see --socket)"
        )
    names = HistoricNames(agent_socket, numeric=numeric)
    event_filter = EventFilter(
        tuple(one for kind in kinds for one in KINDS[kind]),
        _numbers(source, agent_socket),
        _numbers(destination, agent_socket),
        _numbers(related, agent_socket),
        networks,
        frozenset(verdicts),
        frozenset(pods),
        frozenset(namespaces),
        names if pods or namespaces else None,
    )

    def selects(recorded: RecordedEvent) -> bool:
        names.resolve_as_of(recorded)
        return event_filter.matches(recorded.event)

    as_json = as_json or output == "json"
    shown = lost = 0
    explained: set[int] = set()
    deciding_rules = DecidingRules(agent_socket) if rules else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like ctrl-C, with a summary
    try:
        if past:
            found = stored_and_live(
                agent_socket, since, last, selects, named=not numeric or bool(pods or namespaces)
            )
        else:
            found = filter(selects, live_events(monitor_socket or agent_socket.with_name(SOCKET)))
        for recorded in found:
            names.resolve_as_of(recorded)
            event = recorded.event
            shown += not isinstance(event, Lost)
            lost += event.count if isinstance(event, Lost) else 0
            if isinstance(event, Drop) and not as_json and event.reason not in explained:
                explained.add(event.reason)
                echo_fitted(f"{reason_text(event.reason)} (hive drop-reason)", err=True)
            by = (
                deciding_rules.deciding(event)
                if deciding_rules is not None and isinstance(event, Verdict)
                else None
            )
            click.echo(
                json_line(event, recorded.cpu, recorded.time, names.shown, by)
                if as_json
                else _line(event, recorded.time, names.shown, by)
            )
            if as_hex and not as_json and isinstance(event, Drop | Trace | Verdict):
                click.echo(hex_dump(event.packet))
            if shown == count:
                return 0
    except KeyboardInterrupt:
        click.echo(f"\n{shown} events shown, {lost} lost", err=True)
        return 0
    raise click.ClickException(
        f"the agent has closed the connection after {shown} events ({lost} lost): did it stop?"
    )


def live_events(path: Path) -> Iterator[RecordedEvent]:
    """Yield events until the agent closes the connection. Raises click.ClickException."""
    with connect(path) as stream:
        click.echo(LISTENING, err=True)
        for each in events(stream):
            event = each if isinstance(each, Lost) else decode(each.data)
            yield RecordedEvent(event, datetime.now().astimezone(), each.cpu)


def events(stream: socket.socket) -> Iterator[Sample | Lost]:
    """Yield the events of a monitor socket. Raises click.ClickException if it is not one."""
    payloads = Payloads()
    while data := stream.recv(1 << 18):
        try:
            yield from payloads.feed(data)
        except MonitorProtocolError as error:
            raise click.ClickException(f"this is not a monitor socket: {error}") from error


def _numbers(texts: tuple[str, ...], agent_socket: Path) -> frozenset[int]:
    """Return the numbers of endpoints. Raises click.ClickException for an unknown one."""
    found = [endpoint_number(text, agent_socket, TIMEOUT) for text in texts]
    for text in found:
        if not text.isdigit():
            raise click.UsageError(f"{text}: expected an endpoint's number, its pod or its address")
    return frozenset(map(int, found))


def _line(event: Event, now: datetime, names: EventNames, rules: list[dict[str, Any]] | None) -> str:
    text = event_text(event, names)
    if rules is not None and isinstance(event, Verdict):
        text += rules_text(event, rules)
    denied = isinstance(event, Verdict) and event.verdict < 0
    time = now.strftime("%H:%M:%S.") + f"{now.microsecond // 1000:03}"
    return click.style(f"{time} {terminal_text(text)}", fg=BAD if denied else _COLOURS[type(event)])


def hex_dump(data: bytes) -> str:
    """Return lines of sixteen bytes, with offset and ASCII."""
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row[:8].hex(' '):23}  {row[8:].hex(' '):23}  |{shown}|")
    return "\n".join(lines)
