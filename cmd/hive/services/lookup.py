"""``hive bpf lb maglev``: the Maglev lookup tables in the kernel's maps.

Source: cilium-dbg bpf lb maglev; maps of Cilium 1.17.
"""

import errno
import struct
from pathlib import Path

import click

from cells.maps.bpf import BpfError
from cells.maps.map import map_by_id, open_map
from hive.output import output_option, shown_as_document
from hive.services.maps import GLOBALS, Rows, bpf_root_option, show

_NUMBER = struct.Struct("<I")


@click.group()
def command() -> None:
    """Show Maglev's lookup tables."""


@command.command("list")
@bpf_root_option
@output_option
def list_tables(bpf_root: Path, output: str) -> None:
    """List the tables of all services: backend ids in the order of hashes."""
    _print(tables(bpf_root), output)


@command.command("get")
@click.argument("number", type=click.IntRange(1, 65535), metavar="ID")
@bpf_root_option
@output_option
def get_table(number: int, bpf_root: Path, output: str) -> None:
    """Show the tables of one service; ID is its number in hive bpf lb list."""
    found = {key: numbers for key, numbers in tables(bpf_root).items() if key[0] == number}
    if not found:
        raise click.ClickException(f"service {number} has no lookup table; hive bpf lb maglev list has all")
    _print(found, output)


def _print(tables: dict[tuple[int, int], list[int]], output: str) -> None:
    rows: Rows = [
        {"SVC ID": f"[{number}]/v{version}", "LOOKUP TABLE": f"[{' '.join(map(str, numbers))}]"}
        for (number, version), numbers in sorted(tables.items())
    ]
    if shown_as_document(rows, output):
        return
    show(rows, output)


def tables(bpf_root: Path = Path("/sys/fs/bpf")) -> dict[tuple[int, int], list[int]]:
    """Return the backend ids by service and family. Raises click.ClickException."""
    found: dict[tuple[int, int], list[int]] = {}
    for version in (4, 6):
        try:
            with open_map(bpf_root / GLOBALS / f"cilium_lb{version}_maglev") as outer:
                for key, value in outer.items():
                    numbers = _numbers(*_NUMBER.unpack(value))
                    if numbers is not None:
                        found[int.from_bytes(key, "big"), version] = numbers
        except BpfError as error:
            if error.errno != errno.ENOENT:
                raise click.ClickException(f"{error}; is this run as root?") from error
    return found


def _numbers(inner: int) -> list[int] | None:
    """Return the content of the map with a kernel id, or None if it was replaced. Raises BpfError."""
    try:
        with map_by_id(inner) as table:
            value = table.lookup(bytes(4)) or b""
    except BpfError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    return [number for (number,) in _NUMBER.iter_unpack(value)]
