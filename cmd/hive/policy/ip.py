"""``hive ip``: the identity of addresses in the datapath."""

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from hive.client import agent_options, ask
from hive.names import labels_text, prefix_pod
from hive.output import fitted, shown_as_document, table_width

NONE = "there are no prefixes yet"


@click.group()
def command() -> None:
    """Show the identity of an address or prefix in the datapath."""


@command.command("list")
@click.option("-n", "--numeric", is_flag=True, help="Show numbers instead of labels.")
@agent_options
def list_prefixes(numeric: bool, agent_socket: Path, timeout: float, output: str) -> None:
    """List every prefix with its identity."""
    found = ask("/v1/ip", agent_socket, timeout=timeout, missing=NONE)
    _show(found, numeric, agent_socket, timeout, output)


@command.command()
@click.argument("prefix")
@click.option("-n", "--numeric", is_flag=True, help="Show numbers instead of labels.")
@agent_options
def get(prefix: str, numeric: bool, agent_socket: Path, timeout: float, output: str) -> None:
    """Show the prefixes inside PREFIX, such as 10.0.1.0/24; for an address, the prefix that matches it."""
    try:
        network = ip_network(prefix)
    except ValueError:
        raise click.UsageError(f"{prefix}: expected an address or a network, such as 10.0.1.0/24") from None
    if "/" in prefix:
        path = f"/v1/ip?cidr={quote(str(network), safe='')}"
        found = ask(path, agent_socket, timeout=timeout, missing=f"there is no prefix inside {network}")
    else:
        found = _longest(ask("/v1/ip", agent_socket, timeout=timeout, missing=NONE), prefix)
    _show(found, numeric, agent_socket, timeout, output)


def _longest(entries: list[dict[str, Any]], address: str) -> list[dict[str, Any]]:
    """Return the entry with the longest prefix that contains the address, or None."""
    wanted = ip_address(address)
    covering = [one for one in entries if wanted in ip_network(one["cidr"])]
    if not covering:
        raise click.ClickException(f"no prefix covers {address}")
    return [max(covering, key=lambda one: ip_network(one["cidr"]).prefixlen)]


def _show(
    entries: list[dict[str, Any]], numeric: bool, agent_socket: Path, timeout: float, output: str
) -> None:
    if shown_as_document(entries, output):
        return
    labels = {}
    if not numeric:
        known = ask("/v1/identity", agent_socket, timeout=timeout)
        shown = ", ".join if table_width(output) is None else labels_text
        labels = {one["id"]: shown(one.get("labels", ())) for one in known}
    rows = []
    for one in entries:
        number = one["identity"]
        rows.append({"ip": one["cidr"], "pod": prefix_pod(one), "identity": labels.get(number, str(number))})
    for line in fitted(rows, table_width(output), "-o wide", first=("ip", "pod", "identity")):
        click.echo(line)
