"""``hive completion``: a completion script for the shell, with names from the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

from hive.client import DEFAULT_SOCKET, ask
from hive.names import pod_of, service_of

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_HIVE_COMPLETE"
PATIENCE: Final = 1.0
"""Timeout of the agent in seconds, while a user waits after pressing tab."""

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a completion script for SHELL; for bash: source <(hive completion bash).

    It completes commands, options, and names from the running agent: tables, maps, settings, endpoints, pods,
    services.
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"click knows no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, "hive", VARIABLE).source())


def _completer(path: str, names: Callable[[Any], Iterable[str]]) -> Completer:
    """Complete names from an answer of the agent; none without an agent, since a shell shows no errors."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        socket: Path = ctx.params.get("agent_socket") or DEFAULT_SOCKET
        try:
            answer = ask(path, socket, timeout=PATIENCE)
        except click.ClickException:
            return []
        return sorted({name for name in names(answer) if name.startswith(incomplete)})

    return complete


def _map_names(answer: Any) -> Iterable[str]:
    return (Path(one["path"]).name for one in answer["maps"])


def _endpoint_names(answer: Any) -> Iterable[str]:
    for one in answer:
        yield str(one["id"])
        yield from filter(None, (pod_of(one),))


tables = _completer("/statedb/tables", lambda answer: (one["name"] for one in answer))
maps = _completer("/v1/map", _map_names)
settings = _completer("/hive/config", lambda answer: (one["name"] for one in answer["settings"]))
options = _completer(
    "/v1/config", lambda answer: (f"{name}=" for name in ("PolicyEnforcement", *answer["spec"]["options"]))
)
endpoints = _completer("/v1/endpoint", _endpoint_names)
pods = _completer("/v1/endpoint", lambda answer: (name for one in answer if "/" in (name := pod_of(one))))
services = _completer("/v1/service", lambda answer: filter(None, map(service_of, answer)))
