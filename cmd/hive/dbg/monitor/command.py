"""``cilium-dbg monitor``: the events of the node, in the lines of Cilium's monitor.

``hive monitor`` shows the same events with the names of pods, and those of the past.

Source: Cilium 1.17, cilium-dbg/cmd/monitor.go.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Final

import click

from cells.observe.monitor import SOCKET, MonitorProtocolError, Payloads
from hive.dbg.go_text import Unsigned
from hive.dbg.monitor.printer import TYPES, Printer, log_line
from hive.dbg.requests import RequestFailedError, ask, socket_path
from hive.output import terminal_text

RETRY_AFTER: Final = 12.0
"""Seconds until the monitor connects again after the agent closed the connection."""


class _Kind(click.ParamType[int]):
    name = "type"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        del param
        if value in TYPES:
            return TYPES[str(value)]
        known = " ".join(f"{name}:{number}" for name, number in sorted(TYPES.items()))
        reason = f"Unknown type ({value}). Please use one of the following ones map[{known}]"
        raise click.UsageError(f'invalid argument "{value}" for "-t, --type" flag: {reason}', ctx)


_ENDPOINT: Final = Unsigned(0xFFFF)


@click.command("monitor")
@click.option("--hex", "as_hex", is_flag=True, help="Do not dissect, print payload in HEX")
@click.option(
    "-t", "--type", "types", multiple=True, type=_Kind(), help=f"Filter by event types [{' '.join(TYPES)}]"
)
@click.option("--from", multiple=True, type=_ENDPOINT, help="Filter by source endpoint id")
@click.option("--to", multiple=True, type=_ENDPOINT, help="Filter by destination endpoint id")
@click.option(
    "--related-to",
    multiple=True,
    type=_ENDPOINT,
    help="Filter by either source or destination endpoint id",
)
@click.option("-v", "--verbose", count=True, help="Enable verbose output (-v, -vv)")
@click.option("-j", "--json", "as_json", is_flag=True, help="Enable json output. Shadows -v flag")
@click.option("-n", "--numeric", is_flag=True, help="Display all security identities as numeric values")
@click.option("--monitor-socket", default="", help="Configure monitor socket path")
def command(
    as_hex: bool,
    types: tuple[int, ...],
    related_to: tuple[int, ...],
    verbose: int,
    as_json: bool,
    numeric: bool,
    monitor_socket: str,
    **ends: tuple[int, ...],
) -> int:
    """Display BPF program events

    The monitor displays notifications and events emitted by the BPF programs attached to endpoints and
    devices: dropped packet notifications, captured packet traces, policy verdict notifications and debugging
    information.
    """
    printer = Printer(
        types=types,
        sources=ends["from"],
        destinations=ends["to"],
        related=related_to,
        verbosity=verbose if verbose < 3 else 0,
        as_json=as_json,
        as_hex=as_hex,
        numeric=numeric,
    )
    try:
        buffers = ask("GET /healthz").get("nodeMonitor")
    except RequestFailedError:
        buffers = None
    if buffers is not None:
        size = f"{buffers.get('npages', 0)}x{buffers.get('pagesize', 0)}"
        click.echo(
            f"Listening for events on {buffers.get('cpus', 0)} CPUs with {size} of shared memory", err=True
        )
    click.echo("Press Ctrl-C to quit", err=True)
    given = monitor_socket or os.environ.get("CILIUM_MONITOR_SOCK", "")
    try:
        while (stream := _connected(given)) is not None:
            with stream:
                _print_events(stream, printer)
            log_line("warning", "connection closed", "cilium-dbg", error="EOF")
            time.sleep(RETRY_AFTER)
    except KeyboardInterrupt:
        click.echo("\nReceived an interrupt, disconnecting from monitor...\n", err=True)
    except MonitorProtocolError as error:
        log_line("fatal", "decoding error", "cilium-dbg", error=json.dumps(str(error)))
        return 1
    return 0


def _connected(given: str) -> socket.socket | None:
    """The monitor socket, the given one or else the agent's; None, and why, where neither answers."""
    faults = []
    for path in (
        (Path(given), socket_path().with_name(SOCKET)) if given else (socket_path().with_name(SOCKET),)
    ):
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(str(path))
        except OSError as error:
            stream.close()
            reason = (error.strerror or str(error)).lower()
            faults.append(f"{path}: dial unix {path}: connect: {reason}")
        else:
            return stream
    text = f"Cannot find or open a supported node-monitor socket. {','.join(faults)}"
    log_line("error", "Cannot open monitor socket", "cilium-dbg", error=json.dumps(text))
    return None


def _print_events(stream: socket.socket, printer: Printer) -> None:
    payloads = Payloads()
    while data := stream.recv(1 << 18):
        for event in payloads.feed(data):
            for line in printer.event(event):
                click.echo(terminal_text(line))
