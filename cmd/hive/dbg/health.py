"""``cilium-health``: connectivity between the nodes of the cluster, in Cilium's words and order.

Source: Cilium 1.17, cilium-health/cmd and pkg/health/client.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from hive.client import DEFAULT_SOCKET
from hive.dbg.go_text import NO_PRINTER, STATUS, Shape, aligned, go_duration, model, output_option, printed
from hive.dbg.main import run_client
from hive.dbg.requests import ANSWERS, RequestFailedError, decoded, send
from hive.dbg.status import Details, status_text

Json = dict[str, Any]

NAME: Final = "cilium-health"
SOCKET: Final = DEFAULT_SOCKET.with_name("health.sock")
ALIASES: Final = {"connectivity": "status", "inspect": "get", "show": "get"}
_ADDRESSES: Final[Shape] = {"secondary-addresses[]": {}}
CONNECTIVITY: Final[Shape] = {"nodes[]": {"host": _ADDRESSES, "health-endpoint": _ADDRESSES, "since": None}}
_ANSWERS: Final = {
    ("GET", "/healthz"): {500: "getHealthzFailed"},
    ("GET", "/status"): {},
    ("PUT", "/status/probe"): {403: "putStatusProbeForbidden", 500: "putStatusProbeFailed"},
}
"""Errors of each operation that the client decodes."""
_OPERATIONS: Final = {"/healthz": "GetHealthz", "/status": "GetStatus", "/status/probe": "PutStatusProbe"}


class _Commands(click.Group):
    """A group with aliases and Cilium's message for unknown commands."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name or alias."""
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. Raises click.ClickException for an answer with fields of other types."""
        try:
            return super().invoke(ctx)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            import msgspec

            from cells.api.health import HealthResponse, HealthStatusResponse

            what, path, answer = ctx.meta.get(ANSWERS, ("", "", {}))
            try:
                msgspec.convert(answer, HealthResponse if path == "/healthz" else HealthStatusResponse)
            except msgspec.ValidationError as reason:
                raise _failed(f"{what}: json: cannot unmarshal the answer: {reason}") from error
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the first word. Raises click.ClickException for an unknown one."""
        if self.get_command(ctx, args[0]) is None:
            text = f'unknown command "{args[0]}" for "{NAME}"'
            click.echo(text)
            raise click.ClickException(f"{text}\nRun '{NAME} --help' for usage.")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-D", "--debug", is_flag=True, help="Enable debug messages")
@click.option("-H", "--host", default="", help="URI to cilium-health server API")
@click.pass_context
def cli(context: click.Context, debug: bool, host: str) -> None:
    """Client for querying the Cilium health status API"""
    del debug
    if host and "://" not in host:
        raise _failed(f"Error while creating client: invalid host format '{host}'")
    host = host or os.environ.get("CILIUM_HEALTH_SOCK", "")
    if host.startswith(("tcp://", "http://")):
        raise _failed(f"Error while creating client: {host}: only unix sockets are supported")
    context.obj = Path(host.removeprefix("unix://")) if host else SOCKET


def _failed(text: str) -> click.ClickException:
    return click.ClickException(f"{text}\n")


def _ask(socket: Path, method: str, path: str, what: str) -> Any:
    """Return the decoded answer. Raises click.ClickException in the client's words."""
    try:
        status, content = send(method, f"/v1beta{path}", socket=socket)
    except RequestFailedError as error:
        raise _failed(f"{what}: {error}") from error
    if status != 200:
        if (name := _ANSWERS[method, path].get(status)) is None:
            raise _failed(f"{what}: [{method} {path}] {_OPERATIONS[path]} (status {status}): {{}}")
        text = " ".join(filter(None, (name, content.decode(errors="replace").strip())))
        raise _failed(f"{what}: [{method} {path}][{status}] {text}")
    try:
        found = decoded(content)
    except RequestFailedError as error:
        raise _failed(f"{what}: {error}") from error
    click.get_current_context().meta[ANSWERS] = what, path, found
    return found


@cli.command("status")
@click.option("--probe", is_flag=True, hidden=True, help="Ask for the status by PUT /status/probe")
@click.option("--succinct", is_flag=True, help="Print the result succinctly (one node per line)")
@click.option("--verbose", is_flag=True, help="Print more information in results")
@output_option
@click.pass_obj
def status_command(socket: Path, probe: bool, succinct: bool, verbose: bool, output: str) -> int:
    """Display cilium connectivity to other nodes"""
    del succinct  # the form without --verbose
    method, path = ("PUT", "/status/probe") if probe else ("GET", "/status")
    found = _ask(socket, method, path, f"Cannot get {path.removeprefix('/')}")
    if output:
        return _print(model(found, CONNECTIVITY), output, "cells.api.health:HealthStatusResponse")
    click.echo(aligned("".join(connectivity_text(found, verbose=verbose)), least=2), nl=False)
    return 0


@cli.command("get")
@output_option
@click.pass_obj
def get_command(socket: Path, output: str) -> int:
    """Display local cilium agent status"""
    found = _ask(socket, "GET", "/healthz", "Cannot get health for local instance")
    if output:
        return _print(model(found, {"cilium": STATUS}), output, "cells.api.health:HealthResponse")
    load = found.get("system-load") or {}
    loads = " ".join(load.get(key, "") for key in ("last1min", "last5min", "last15min"))
    head = f"Daemon uptime:\t{found.get('uptime', '')}\nNode load:\t{loads}\n"
    click.echo(aligned(head + status_text(found.get("cilium") or {}, Details()), least=2), nl=False)
    return 0


def _print(value: Any, form: str, kind: str) -> int:
    """Print in the form of ``-o``; the exit code: an unknown form is 1 without a word, as Cilium's."""
    try:
        click.echo(printed(value, form, kind))
    except click.ClickException as error:
        if error.message != NO_PRINTER:
            raise
        return 1
    return 0


@cli.command("ping")
@click.pass_obj
def ping_command(socket: Path) -> None:
    """Check whether the cilium-health API is up"""
    _ask(socket, "GET", "/healthz", "Cannot ping")
    click.echo("OK")


# The report as text.


def connectivity_text(found: Json, *, verbose: bool) -> Iterator[str]:
    """Return lines with tab-separated cells: this node first, then the others by name."""
    nodes = found.get("nodes") or []
    own = (found.get("local") or {}).get("name", "")
    healthy = sum(_is_healthy(node) for node in nodes)
    yield f"Cluster health:\t{healthy}/{len(nodes)} reachable\t({found.get('timestamp', '')})\n"
    yield "Name\tIP\tNode\tEndpoints\n"
    if not any(node["name"] == own for node in nodes):  # as Cilium's client
        return
    for node in sorted(nodes, key=lambda node: (node["name"] != own, node["name"])):
        name = node["name"] + (" (localhost)" if node["name"] == own else "")
        if verbose:
            yield f"  {name}:\n"
            yield from _path_lines(node.get("host"), "Host")
            yield from _path_lines(node.get("health-endpoint"), "Endpoint")
        else:
            counts = "\t".join(_counted(node.get(part)) for part in ("host", "health-endpoint"))
            yield f"  {name}\t{_ips(node.get('host'))}\t{counts}\n"


def paths_of(addresses: Json | None) -> list[Json | None]:
    """Return the primary path, or None, and the secondary ones."""
    if addresses is None:
        return []
    return [addresses.get("primary-address"), *(addresses.get("secondary-addresses") or ())]


def reach(path: Json | None) -> str:
    """Return ``reachable``, ``unreachable`` or ``unknown``."""
    if path is None or any((path.get(kind) or {}).get("status") for kind in ("icmp", "http")):
        return "unreachable"
    return "unknown" if None in (path.get("icmp"), path.get("http")) else "reachable"


def _is_healthy(node: Json) -> bool:
    paths = [path for part in ("host", "health-endpoint") for path in paths_of(node.get(part))]
    return all(reach(path) != "unreachable" for path in paths)


def _counted(addresses: Json | None) -> str:
    found = [reach(path) for path in paths_of(addresses)]
    unknown = found.count("unknown")
    return f"{found.count('reachable')}/{len(found)}" + (f" ({unknown} unknown)" if unknown else "")


def _ips(addresses: Json | None) -> str:
    primary, *secondary = paths_of(addresses) or [None]
    first = primary.get("ip", "") if primary is not None else "Unavailable"
    return ",".join((first, *(path.get("ip", "") for path in secondary if path is not None)))


def _path_lines(addresses: Json | None, what: str) -> Iterator[str]:
    for number, path in enumerate(paths_of(addresses) or [None]):
        title = f"    {'Secondary ' if number else ''}{what} connectivity"
        if path is None:
            yield f"{title}:\tnil\n"
            continue
        yield f"{title} to {path.get('ip', '')}:\n"
        for kind, text in (("icmp", "ICMP to stack"), ("http", "HTTP to agent")):
            if (outcome := path.get(kind)) is not None:
                yield f"      {text}:\t{outcome_text(outcome)}\n"


def outcome_text(outcome: Json) -> str:
    """Return ``OK, RTT=1.5ms``, or the error."""
    return outcome.get("status") or f"OK, RTT={go_duration(outcome.get('latency', 0))}"


def main() -> NoReturn:
    """Run the command line; exits 0, or 1 for every failure."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; return the exit code. Errors are printed to stderr."""
    return run_client(cli, NAME, arguments)
