"""``hive service``: the services of the running agent."""

from pathlib import Path
from typing import Any

import click

from hive import completion
from hive.client import agent_options, ask
from hive.names import Names, service_of, services_of
from hive.output import detailed, shown_as_document, table_width

HEADER = ("ID", "FRONTEND", "TYPE", "SERVICE", "BACKENDS")


@click.group()
def command() -> None:
    """Show services: their addresses and backends."""


@command.command("list")
@click.argument("words", nargs=-1)
@agent_options
def list_services(words: tuple[str, ...], agent_socket: Path, timeout: float, output: str) -> None:
    """List services by number, or those with all WORDS in their name, address or type."""
    found = ask("/v1/service", agent_socket, timeout=timeout)
    found = [one for one in found if all(word in _line(one) for word in words)]
    found.sort(key=lambda one: one["spec"]["id"])
    if shown_as_document(found, output):
        return
    if not found:
        wanted = f" has {' and '.join(words)} in its name, address or type" if words else " is known here"
        click.echo(f"No services: none{wanted}.", err=True)
        return
    _show(found, output, agent_socket, timeout)


@command.command()
@click.argument("service", shell_complete=completion.services)
@agent_options
def get(service: str, agent_socket: Path, timeout: float, output: str) -> None:
    """Show SERVICE: a name, NAMESPACE/NAME, an address, ADDRESS:PORT, or a frontend's number from the list.

    A number selects one frontend, otherwise all frontends of the service are shown.
    """
    found: Any
    if service.isdigit():
        missing = f"there is no service {service}; `hive service list` numbers them"
        found = ask(f"/v1/service/{service}", agent_socket, timeout=timeout, missing=missing)
    else:
        found = services_of(service, agent_socket, timeout)
    if shown_as_document(found, output):
        return
    _show(found if isinstance(found, list) else [found], output, agent_socket, timeout)


def _show(found: list[dict[str, Any]], output: str, agent_socket: Path, timeout: float) -> None:
    names = Names(agent_socket, timeout)
    rows = []
    for one in found:
        spec = one["spec"]
        backends = [_backend(each, names) for each in spec.get("backend-addresses") or ()]
        cells = (str(spec["id"]), _frontend(spec), _type(spec), service_of(one))
        rows.append((cells, backends or ["no backend"]))
    for line in detailed(HEADER, rows, table_width(output)):
        click.echo(line)


def _line(one: dict[str, Any]) -> str:
    spec = one["spec"]
    return " ".join((_frontend(spec), _type(spec), service_of(one)))


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


def _backend(backend: dict[str, Any], names: Names) -> str:
    words = [backend.get("state", "active"), *(("preferred",) if backend.get("preferred") else ())]
    name = names.address(backend.get("ip", ""))
    return f"{_address(backend)}{f' {name}' if name else ''} ({', '.join(words)})"


def _address(one: dict[str, Any]) -> str:
    ip = one.get("ip", "")
    return f"[{ip}]:{one.get('port', 0)}" if ":" in ip else f"{ip}:{one.get('port', 0)}"
