"""``hive service``: the services that the running agent serves.

Needs: the agent's /v1/service.   Gives: command.   Source of the columns: cilium-dbg service list.
"""

from pathlib import Path
from typing import Any

import click

from hive.client import ask, socket_option, timeout_option
from hive.output import document, output_option, table


@click.group()
def command() -> None:
    """Show services: their addresses and their backends."""


@command.command("list")
@click.argument("words", nargs=-1)
@socket_option
@timeout_option
@output_option
def list_services(words: tuple[str, ...], agent_socket: Path, timeout: float, output: str) -> None:
    """List services by number, or those whose name, address or type has all WORDS in it."""
    found = ask("/v1/service", agent_socket, timeout=timeout)
    found = [one for one in found if all(word in _line(one) for word in words)]
    found.sort(key=lambda one: one["spec"]["id"])
    if (text := document(found, output)) is not None:
        click.echo(text)
        return
    _show(found)


@command.command()
@click.argument("number", type=click.IntRange(min=1))
@socket_option
@timeout_option
@output_option
def get(number: int, agent_socket: Path, timeout: float, output: str) -> None:
    """Show the service NUMBER: its address, its backends, how it is served."""
    missing = f"there is no service {number}; `hive service list` numbers them"
    found = ask(f"/v1/service/{number}", agent_socket, timeout=timeout, missing=missing)
    if (text := document(found, output)) is not None:
        click.echo(text)
        return
    _show([found])


def _show(found: list[dict[str, Any]]) -> None:
    rows = [("ID", "FRONTEND", "TYPE", "SERVICE", "BACKENDS")]
    for one in found:
        spec = one["spec"]
        backends = [_backend(each) for each in spec.get("backend-addresses") or ()]
        first, *more = backends or [""]
        rows.append((str(spec["id"]), _frontend(spec), _type(spec), _name(spec), first))
        rows.extend(("", "", "", "", each) for each in more)
    for line in table(rows):
        click.echo(line)


def _line(one: dict[str, Any]) -> str:
    spec = one["spec"]
    return " ".join((_frontend(spec), _type(spec), _name(spec)))


def _frontend(spec: dict[str, Any]) -> str:
    frontend = spec["frontend-address"]
    inside = "/i" if frontend.get("scope") == "internal" else ""
    return f"{_address(frontend)}/{frontend.get('protocol', 'ANY')}{inside}"


def _type(spec: dict[str, Any]) -> str:
    flags = spec.get("flags") or {}
    local = [
        name
        for name, key in (("ext", "extTrafficPolicy"), ("int", "intTrafficPolicy"))
        if flags.get(key) == "Local"
    ]
    suffix = f" ({', '.join(local)} Local)" if local else ""
    return f"{flags.get('type', '')}{suffix}"


def _name(spec: dict[str, Any]) -> str:
    flags = spec.get("flags") or {}
    return f"{flags.get('namespace', '')}/{flags.get('name', '')}".strip("/")


def _backend(backend: dict[str, Any]) -> str:
    words = [backend.get("state", "active"), *(("preferred",) if backend.get("preferred") else ())]
    return f"{_address(backend)} ({', '.join(words)})"


def _address(one: dict[str, Any]) -> str:
    ip = one.get("ip", "")
    return f"[{ip}]:{one.get('port', 0)}" if ":" in ip else f"{ip}:{one.get('port', 0)}"
