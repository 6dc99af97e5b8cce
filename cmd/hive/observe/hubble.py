"""``hive observe``, and the command ``hubble``: flows with names, of this node's agent or of a relay.

Source: the hubble CLI of Cilium 1.17: commands, output, exit codes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import click

from cells.hubble.codec import WireMessage, decode, encode, to_json
from cells.hubble.rpc.messages import (
    HEALTH_SERVICE,
    OBSERVER_NAME,
    HealthCheckRequest,
    HealthCheckResponse,
    RpcCode,
    RpcError,
    ServingStatus,
    code_name,
)
from cells.hubble.rpc.observer import (
    ChangeNotification,
    ChangeNotificationType,
    GetNamespacesRequest,
    GetNamespacesResponse,
    GetNodesRequest,
    GetNodesResponse,
    NodeState,
    NotifyRequest,
    ServerStatusRequest,
    ServerStatusResponse,
)
from hive.client import DEFAULT_SOCKET, ask
from hive.dbg.go_text import go_duration
from hive.observe.hubble_client import ConnectError, HubbleClient
from hive.observe.hubble_flags import CommandLineError, Flag, Flags
from hive.observe.hubble_observe import EVENTS, observe
from hive.observe.hubble_server import LOCAL, CommandError, connected, follow, parsed
from hive.observe.hubble_text import aligned, json_text, status_lines
from hive.output import terminal_text

FAILURE = 1
HALF_SECOND: Final = 500_000_000
"""In nanoseconds; a half is rounded up, as Go's Duration.Round does."""
_Message = TypeVar("_Message", bound=WireMessage)


def run(words: Sequence[str]) -> int:
    """Run ``hubble`` with a command line; return its exit code."""
    try:
        return _run(list(words))
    except (CommandLineError, CommandError, ConnectError) as error:
        print(terminal_text(str(error)), file=sys.stderr)
    except RpcError as error:
        if error.code == RpcCode.CANCELLED:
            return 0
        print(terminal_text(_rpc_text(error)), file=sys.stderr)
    except KeyboardInterrupt:
        return 0
    return FAILURE


def _rpc_text(error: RpcError) -> str:
    return f"rpc error: code = {code_name(error.code)} desc = {error.message}"


def _run(words: list[str], program: str = "hubble") -> int:
    names = [word for word in words if not word.startswith("-")]
    command = names[0] if names else ""
    if command == "observe":
        words.remove("observe")
        part = words[0] if words and words[0] in EVENTS else ""
        if part:
            return EVENTS[part](words[1:], f"{program} observe")
        return observe(words, f"{program} observe")
    for path, run_it in _COMMANDS.items():
        if tuple(names[: len(path)]) == path:
            for name in path:
                words.remove(name)
            return run_it(words)
    if command and command != "help":
        raise CommandLineError(f'unknown command "{command}" for "hubble"')
    print("Usage: hubble COMMAND [FLAGS]\n\nCommands:")
    for path in (("observe",), ("observe", "agent-events"), ("observe", "debug-events"), *_COMMANDS):
        print(f"  {' '.join(path)}")
    print("\nEach command explains its flags with --help.")
    return 0


_OUTPUT: Final = Flag("output", "compact, dict, json or table.", "o", default="compact")
_LIST_OUTPUT: Final = Flag("output", "json, table or wide.", "o", default="table")


def _status(words: Sequence[str]) -> int:
    flags = parsed(words, (_OUTPUT,), "hubble status", "Show how many flows a server holds, and its health.")
    if flags is None:
        return 0
    output = flags["output"]
    with connected(flags) as client:
        try:
            request = encode(HealthCheckRequest(service=OBSERVER_NAME))
            answer = client.call(f"{HEALTH_SERVICE}/Check", request, flags["request-timeout"])
        except RpcError as error:
            raise CommandError(f"failed getting status: {_rpc_text(error)}") from error
        health = decode(HealthCheckResponse, answer).status
        address = flags["server"].removeprefix("tls://")
        if health != ServingStatus.SERVING:
            print(f"Healthcheck (via {address}): Unavailable: {ServingStatus(health).name}")
            raise CommandError("not healthy")
        if output == "compact":
            print(f"Healthcheck (via {address}): Ok")
        status = _called(
            client,
            flags,
            "ServerStatus",
            ServerStatusRequest(),
            ServerStatusResponse,
            "get hubble server status",
        )
    try:
        lines = status_lines(status, output)
    except ValueError as error:
        raise CommandLineError(str(error)) from error
    for line in lines:
        print(terminal_text(line))
    return 0


def _called(
    client: HubbleClient,
    flags: Flags,
    method: str,
    request: WireMessage,
    kind: type[_Message],
    what: str = "",
) -> _Message:
    try:
        answer = client.call(f"observer.Observer/{method}", encode(request), flags["request-timeout"])
    except RpcError as error:
        if not what:
            raise
        raise CommandError(f"failed to {what}: {_rpc_text(error)}") from error
    return decode(kind, answer)


def _list_nodes(words: Sequence[str]) -> int:
    flags = parsed(words, (_LIST_OUTPUT,), "hubble list nodes", "List the nodes of a relay.")
    if flags is None:
        return 0
    with connected(flags) as client:
        nodes = sorted(
            _called(client, flags, "GetNodes", GetNodesRequest(), GetNodesResponse).nodes,
            key=lambda one: one.name,
        )
    rows = [["NAME", "STATUS", "AGE", "FLOWS/S", "CURRENT/MAX-FLOWS"]]
    wide = [["VERSION", "ADDRESS", "TLS"]]
    for node in nodes:
        uptime = (node.uptime_ns + HALF_SECOND) // (2 * HALF_SECOND)
        state = NodeState(node.state).name if node.state in set(NodeState) else ""
        share = (
            f"{node.num_flows}/{node.max_flows} ({100 * node.num_flows / node.max_flows:6.2f}%)"
            if node.max_flows
            else "N/A"
        )
        rows.append(
            [
                node.name,
                state.removeprefix("NODE_").capitalize() if state.startswith("NODE_") else "Unknown",
                go_duration(uptime * 1_000_000_000) if uptime else "N/A",
                f"{node.seen_flows / uptime:.2f}" if uptime else "N/A",
                share,
            ]
        )
        tls = "N/A" if node.tls is None else "Enabled" if node.tls.enabled else "Disabled"
        wide.append([node.version or "N/A", node.address, tls])
    return _print_list(flags["output"], nodes, rows, wide)


def _list_namespaces(words: Sequence[str]) -> int:
    flags = parsed(
        words, (_LIST_OUTPUT,), "hubble list namespaces", "List namespaces that flows were seen of."
    )
    if flags is None:
        return 0
    with connected(flags) as client:
        request = GetNamespacesRequest()
        found = _called(client, flags, "GetNamespaces", request, GetNamespacesResponse).namespaces
    rows = [["NAMESPACE"], *([one.namespace] for one in found)]
    wide = [["CLUSTER"], *([one.cluster] if one.cluster else [] for one in found)]
    return _print_list(flags["output"], found, rows, wide)


def _print_list(
    output: str, messages: Sequence[WireMessage], rows: list[list[str]], wide: list[list[str]]
) -> int:
    if output == "json":
        print(json_text([to_json(one) for one in messages], indent=2) if messages else "null")
        return 0
    if output not in {"table", "wide"}:
        raise CommandLineError(f"unknown output format: {output}")
    if output == "wide":
        rows = [[*row, *more] for row, more in zip(rows, wide, strict=True)]
    for line in aligned([list(map(terminal_text, row)) for row in rows]):
        print(line)
    return 0


def _watch_peers(words: Sequence[str]) -> int:
    flags = parsed(words, (), "hubble watch peers", "Show the nodes that an agent announces to relays.")
    if flags is None:
        return 0

    def show(peer: ChangeNotification) -> None:
        known = peer.type in set(ChangeNotificationType)
        kind = ChangeNotificationType(peer.type).name if known else str(peer.type)
        tls = f" (TLS.ServerName: {peer.tls.server_name})" if peer.tls is not None else ""
        print(terminal_text(f"{kind:<12} {peer.address} {peer.name}{tls}"))

    with connected(flags) as client:
        follow(client, "peer.Peer/Notify", NotifyRequest(), ChangeNotification, show)
    return 0


def _version(_words: Sequence[str]) -> int:
    from importlib import metadata

    print(f"hubble of hive {metadata.version('hive-agent')}, as hubble 1.17")
    return 0


_COMMANDS: Final[dict[tuple[str, ...], Callable[[Sequence[str]], int]]] = {
    ("status",): _status,
    ("list", "nodes"): _list_nodes,
    ("list", "node"): _list_nodes,
    ("list", "namespaces"): _list_namespaces,
    ("list", "namespace"): _list_namespaces,
    ("watch", "peers"): _watch_peers,
    ("watch", "peer"): _watch_peers,
    ("version",): _version,
}


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> int:
    """Show flows with names of sources and destinations, verdicts and reasons."""
    try:
        return _run(["observe", *words], "hive")
    except CommandLineError as error:
        raise click.UsageError(error.plain) from error
    except CommandError as error:
        raise click.ClickException(terminal_text(str(error))) from error
    except ConnectError as error:
        raise click.ClickException(_without_flows(error)) from error
    except RpcError as error:
        if error.code == RpcCode.CANCELLED:
            return 0
        raise click.ClickException(terminal_text(error.message)) from error
    except KeyboardInterrupt:
        return 0


def _without_flows(error: ConnectError) -> str:
    """Return why there are none: for the local socket, whether the agent stores flows."""
    if error.server != LOCAL.removeprefix("unix://"):
        return str(error)
    health = ask("/v1/healthz", Path(os.environ.get("CILIUM_SOCK", DEFAULT_SOCKET)))
    if (health.get("hubble") or {}).get("state", "Disabled") != "Disabled":
        return f"flows are served elsewhere, not at {error.server}: name hubble-socket-path by --server"
    return "the agent keeps no flows: set enable-hubble=true (chart: hubble.enabled), and restart it"


def main() -> NoReturn:
    """Run the command ``hubble``."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe has closed it: it has seen enough. Keep Python from complaining at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
