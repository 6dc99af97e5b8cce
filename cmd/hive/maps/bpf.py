"""``hive bpf``: the kernel's content of maps, with or without a running agent.

Source: ``cilium-dbg bpf``, with one command for all its lists.
"""

import errno
from pathlib import Path

import click

from cells.maps.bpf import BpfError
from cells.maps.map import Map, MapType, open_map
from hive.maps.bpf_rows import Row
from hive.maps.pinned import directory_of, refusal, root_option, rows_in
from hive.maps.policy import command as policy_command
from hive.output import fitted, output_option, shown_as_document, table_width
from hive.services.lookup import command as maglev_command
from hive.services.maps import command as lb_command

FIRST = (
    *("protocol", "direction", "source", "destination", "address", "prefix", "endpoint", "verdict"),
    *("identity", "port/protocol", "reason"),
)
"""The most important columns of maps."""
_NO_ROWS = {MapType.PERF_EVENT_ARRAY}


@click.group()
def command() -> None:
    """Show the BPF maps in the kernel; works without an agent."""


lb_command.add_command(maglev_command, "maglev")
command.add_command(lb_command, "lb")
command.add_command(policy_command, "policy")


@command.command("list")
@root_option
@output_option
def list_maps(bpf_root: Path, output: str) -> None:
    """List the maps: name, size and number of entries."""
    found = summaries(bpf_root)
    if shown_as_document(found, output):
        return
    for line in fitted(found, table_width(output), "-o wide", first=("name", "type", "rows", "max")):
        click.echo(line)


@command.command()
@click.argument("name", metavar="MAP")
@root_option
@output_option
@click.option("--raw", is_flag=True, help="Show raw bytes.")
@click.option("--wide", is_flag=True, help="Show all columns, in lines of any width.")
def dump(name: str, bpf_root: Path, output: str, raw: bool, wide: bool) -> None:
    """Show the entries of MAP: its name as listed, with or without cilium_, or policy/ENDPOINT.

    On a terminal, columns that do not fit are omitted and named at the end.
    """
    path = _path(name, directory_of(bpf_root))
    try:
        with open_map(path) as opened:
            if opened.spec.type in _NO_ROWS:
                raise click.ClickException(f"{path.name} is a {_kind(opened)}, which holds no rows")
            rows = rows_in(opened, path.name, raw=raw)
    except BpfError as error:
        raise refusal(path, error) from error
    if shown_as_document(rows, output):
        return
    for line in fitted(rows, None if wide else table_width(output), "--wide or -o json", first=FIRST):
        click.echo(line)


def summaries(bpf_root: Path) -> list[Row]:
    """Return the properties of each map. Raises click.ClickException."""
    found: list[Row] = []
    for path in sorted(directory_of(bpf_root).iterdir()):
        try:
            with open_map(path) as each:
                found.append(_summary(each, path.name))
        except BpfError as error:
            if error.errno not in {errno.ENOENT, errno.EINVAL}:  # removed meanwhile, or not a map
                raise refusal(path, error) from error
    return found


def _summary(each: Map, name: str) -> Row:
    countable = "ARRAY" not in each.spec.type.name  # arrays always have all slots
    return {
        "name": name,
        "type": _kind(each),
        "rows": sum(1 for _ in each.items()) if countable else None,
        "max": each.spec.max_entries,
        "key": each.spec.key_size,
        "value": each.spec.value_size,
        "id": each.id,
    }


def _kind(each: Map) -> str:
    return each.spec.type.name.lower()


def _path(name: str, directory: Path) -> Path:
    kind, _, endpoint = name.partition("/")
    if kind == "policy" and endpoint.isdigit():
        return directory / f"cilium_policy_{int(endpoint):05d}"
    present = {path.name for path in directory.iterdir()}
    for candidate in (name, f"cilium_{name}"):
        if candidate in present:
            return directory / candidate
    raise click.ClickException(f"there is no map {name} at {directory}; `hive bpf list` names them")
