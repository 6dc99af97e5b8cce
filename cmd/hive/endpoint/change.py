"""``hive endpoint labels|config``: changes labels and options of an endpoint.

Source: cilium-dbg's commands of the same names.
"""

from pathlib import Path

import click

from hive.client import agent_options, patch
from hive.endpoint.detail import ask_one, endpoint_argument, one_path
from hive.output import cell_text, fitted, shown_as_document, table_width


@click.command()
@endpoint_argument
@click.option("-a", "--add", "added", multiple=True, metavar="LABEL", help="Add [source:]key[=value].")
@click.option(
    "-d",
    "--delete",
    "removed",
    multiple=True,
    metavar="LABEL",
    help="Remove a label that was added with --add.",
)
@agent_options
def labels(
    endpoint: str,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    agent_socket: Path,
    timeout: float,
    output: str,
) -> None:
    """Show the labels of an endpoint (a number, pod or address), and which are used by policies.

    Or change user-defined labels.
    """
    found = ask_one(endpoint, "/labels", agent_socket, timeout)
    if added or removed:
        _relabel(endpoint, found, added, removed, agent_socket, timeout)
        return
    if shown_as_document(found, output):
        return
    status = found.get("status", {})
    kinds = {
        "for policy": status.get("security-relevant"),
        "of the user": status.get("realized", {}).get("user"),
        "derived": status.get("derived"),
        "switched off": status.get("disabled"),
    }
    rows = [{"label": label, "kind": kind} for kind, some in kinds.items() for label in some or ()]
    for line in fitted(rows, table_width(output), "-o wide", first=("label", "kind")):
        click.echo(line)


def _relabel(
    endpoint: str,
    found: dict[str, dict[str, list[str]]],
    added: tuple[str, ...],
    removed: tuple[str, ...],
    agent_socket: Path,
    timeout: float,
) -> None:
    user = list(found.get("spec", {}).get("user") or [])
    for label in removed:
        if (named := _named(label)) not in map(_named, user):
            has = ", ".join(user) or "none"
            raise click.ClickException(
                f"{label} is not a label that a user gave endpoint {endpoint}, which has: {has}"
            )
        user = [one for one in user if _named(one) != named]
    for label in added:
        if _named(label).endswith(":"):
            raise click.UsageError(f"{label!r}: expected [source:]key[=value], such as tier=front")
    replaced = {_named(label) for label in added}
    wanted = {"user": [*(label for label in user if _named(label) not in replaced), *added]}
    patch(one_path(endpoint, "/labels", agent_socket, timeout), wanted, agent_socket, timeout)


def _named(label: str) -> str:
    """Return source and key, which identify a label."""
    key, _, _ = label.partition("=")
    return key if ":" in key else f"unspec:{key}"


@click.command()
@endpoint_argument
@click.argument("options", nargs=-1, metavar="[OPTION=VALUE]...")
@agent_options
def config(endpoint: str, options: tuple[str, ...], agent_socket: Path, timeout: float, output: str) -> None:
    """Show the options of an endpoint (a number, pod or address), or change them.

    OPTION=VALUE, for example SourceIPVerification=Disabled, applies from the next packet on.
    """
    found = ask_one(endpoint, "/config", agent_socket, timeout)
    known = found.get("realized", {}).get("options") or {}
    if options:
        wanted = {"options": known | _wanted(options, known)}
        patch(one_path(endpoint, "/config", agent_socket, timeout), wanted, agent_socket, timeout)
        return
    if shown_as_document(found, output):
        return
    rows = [{"option": name, "value": cell_text(value)} for name, value in sorted(known.items())]
    for line in fitted(rows, None, ""):
        click.echo(line)


def _wanted(options: tuple[str, ...], known: dict[str, str]) -> dict[str, str]:
    """Return the changes by option. The API rejects a request without a reason, so this has one."""
    names = {name.lower(): name for name in known}
    wanted = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"{text}: expected OPTION=VALUE, such as SourceIPVerification=Disabled")
        if name.lower() not in names:
            raise click.ClickException(
                f"{name} cannot be changed for one endpoint: {', '.join(sorted(known))} can; "
                "see hive config set for the whole node"
            )
        if value.lower() not in SWITCH:
            raise click.ClickException(f"{text}: expected Enabled or Disabled")
        wanted[names[name.lower()]] = value
    return wanted


SWITCH = {"enabled", "enable", "true", "on", "1", "disabled", "disable", "false", "off", "0"}
"""Boolean values of the API."""

COMMANDS = (labels, config)
