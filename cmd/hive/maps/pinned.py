"""Pinned maps below the bpffs, and their entries as text."""

import errno
from pathlib import Path

import click

from cells.maps.bpf import BpfError
from cells.maps.map import Map, open_map
from hive.maps.bpf_rows import Row, describe

GLOBALS = Path("tc", "globals")

root_option = click.option(
    "--bpf-root",
    type=click.Path(path_type=Path, file_okay=False, readable=False),
    default=Path("/sys/fs/bpf"),
    show_default=True,
    help="Mount point of bpffs.",
)


def directory_of(bpf_root: Path) -> Path:
    """Return the directory of pinned maps. Raises click.ClickException."""
    directory = bpf_root / GLOBALS
    try:
        if directory.is_dir():
            return directory
    except PermissionError:
        raise click.ClickException(f"permission denied on {bpf_root}: run this as root") from None
    raise click.ClickException(
        f"there are no maps at {directory}: has an agent run here, with this --bpf-root?"
    )


def rows_of(path: Path) -> list[Row]:
    """Return the entries of a pinned map as text. Raises click.ClickException."""
    try:
        with open_map(path) as opened:
            return rows_in(opened, path.name, raw=False)
    except BpfError as error:
        raise refusal(path, error) from error


def rows_in(opened: Map, name: str, *, raw: bool) -> list[Row]:
    """Return the entries of a map of this name as text or bytes. Raises BpfError."""
    found = (describe("" if raw else name, key, value) for key, value in opened.items())
    return sorted((row for row in found if row is not None), key=_place)


def _place(row: Row) -> list[tuple[bool, int, str]]:
    """Sort key: numbers before texts."""
    return [(False, value, "") if isinstance(value, int) else (True, 0, str(value)) for value in row.values()]


def refusal(path: Path, error: BpfError) -> click.ClickException:
    """Return in one line why a pinned map cannot be read."""
    if error.errno in {errno.EPERM, errno.EACCES}:
        return click.ClickException(f"permission denied on {path}: run this as root")
    if error.errno == errno.ENOENT:
        return click.ClickException(f"there is no map {path}; `hive bpf list` names them")
    return click.ClickException(str(error))
