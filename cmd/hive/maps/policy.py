"""``hive bpf policy``: whom endpoints may talk with, as their maps have it.

Needs: root; the pins below the bpffs.   Gives: command.
Source: the order is that of ``cilium-dbg bpf policy get``: denies first, then ingress, then by identity.
"""

from pathlib import Path
from typing import Any

import click

from hive.maps.bpf_rows import Row, family_of
from hive.maps.pinned import directory_of, root_option, rows_of
from hive.output import document, fitted, output_option, terminal_width

_LARGEST = 0xFFFF


@click.command()
@click.argument("endpoint", type=click.IntRange(1, _LARGEST), metavar="[ENDPOINT]", required=False)
@root_option
@output_option
@click.option("--wide", is_flag=True, help="Show every column, however wide the lines get.")
def command(endpoint: int | None, bpf_root: Path, output: str, wide: bool) -> None:
    """Show the policy map of ENDPOINT, or of every endpoint.

    Denies come first. Identity 0 is any peer, ANY any protocol; `hive identity get` shows the labels of one.
    """
    directory = directory_of(bpf_root)
    pins = {int(path.name.rpartition("_")[2]): path for path in directory.iterdir() if _is_policy(path)}
    if endpoint is not None and endpoint not in pins:
        raise click.ClickException(
            f"endpoint {endpoint} has no policy map at {directory}; `hive bpf policy` shows all that have one"
        )
    chosen = sorted(pins) if endpoint is None else [endpoint]
    rows = [{"endpoint": one, **row} for one in chosen for row in sorted(rows_of(pins[one]), key=_place)]
    if (text := document(rows, output)) is not None:
        click.echo(text)
        return
    for line in fitted(rows, None if wide else terminal_width(), "--wide or -o json"):
        click.echo(line)


def _is_policy(path: Path) -> bool:
    return family_of(path.name) == "cilium_policy"


def _place(row: Row) -> tuple[Any, ...]:
    return row["verdict"] != "deny", row["direction"] != "ingress", row["identity"], row["port/protocol"]
