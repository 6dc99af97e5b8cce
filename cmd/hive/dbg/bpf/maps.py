"""Pinned maps, and how ``cilium-dbg bpf`` lists what is in them."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from cells.maps.bpf import BpfError
from cells.maps.map import open_map
from hive.dbg.go_text import aligned, output_option, printed
from hive.dbg.main import Group

GLOBALS: Final = Path("/sys/fs/bpf/tc/globals")
PROTOCOLS: Final = {0: "ANY", 1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6", 132: "SCTP"}
AUTH: Final = {0: "disabled", 1: "spire", 2: "test-always-fail"}
NO_ENTRIES: Final = "No entries found."

Entries = list[tuple[bytes, bytes]]
Table = dict[str, list[str]]


def entries_of(name: str) -> Entries:
    """All entries of a pinned map. Raises BpfError."""
    with open_map(GLOBALS / name) as opened:
        return list(opened.items())


def missing(name: str, error: BpfError) -> str:
    """Why a pinned map could not be opened, in the words of the client."""
    reason = (error.strerror or str(error)).lower()
    return f"loading pinned map {GLOBALS / name}: {reason}"


def show(table: Table, header: tuple[str, str], output: str) -> None:
    """Rows by their key, each key in the first of its lines."""
    if output:
        click.echo(printed(dict(sorted(table.items())), output))
        return
    lines = ["\t".join(header) + "\t\n"]
    for key, values in sorted(table.items()):
        lines.extend(f"{key if not number else ''}\t{value}\t\n" for number, value in enumerate(values))
    click.echo(aligned("".join(lines)), nl=False)


def listed(
    name: str,
    pin: str,
    help_text: str,
    header: tuple[str, ...],
    row: Callable[[bytes, bytes], tuple[object, ...]],
) -> Group:
    """A group with ``bpf NAME list`` for a map of a feature; one that is not there has nothing to list."""

    @output_option
    def list_all(output: str) -> None:
        try:
            rows = [row(key, value) for key, value in entries_of(pin)]
        except BpfError as error:
            if error.errno == errno.ENOENT:
                click.echo(f"Cannot find map {GLOBALS / pin}: its feature is off, or not built", err=True)
                return
            raise click.ClickException(f"Unable to open {GLOBALS / pin}: {missing(pin, error)}\n") from error
        if output:
            click.echo(printed([dict(zip(header, map(str, cells), strict=True)) for cells in rows], output))
        elif not rows:
            click.echo(NO_ENTRIES)
        else:
            click.echo(aligned("\n".join("\t".join(map(str, cells)) for cells in (header, *rows))))

    group = Group(name, callback=lambda: None, help=help_text)
    group.add_command(click.command("list", help=f"List {help_text}")(list_all))
    return group
