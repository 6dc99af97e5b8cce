"""Maps of recordings in the place of pinned ones, for commands of `cilium-dbg bpf`."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from pathlib import Path

import pytest

from cells.maps.bpf import BpfError
from hive.dbg.main import run
from tests.unit.conformance.bpf_recordings import entries, maps

CPUS = 2
Tables = dict[str, dict[bytes, bytes]]


def pinned(name: str) -> Tables:
    """The recorded maps; the value of a map in a map is its number, under which it stands here, too."""
    tables: Tables = {}
    for pin, table in maps(f"bpf/{name}").items():
        if "inner_map" not in table:
            tables |= {pin: dict(entries(table))} if "entries" in table else {}
            continue
        tables[pin] = {}
        for row in table["entries"]:
            number = len(tables)
            tables[str(number)] = dict(entries({"entries": row["inner_entries"]}))
            tables[pin][bytes.fromhex(row["key"])] = number.to_bytes(4, "little")
    if name == "metrics_list":  # a value for each CPU
        tables = {pin: {key: row * CPUS for key, row in rows.items()} for pin, rows in tables.items()}
    return tables


def pin_maps(monkeypatch: pytest.MonkeyPatch, tables: Tables) -> None:
    def opened(path: Path) -> nullcontext[dict[bytes, bytes]]:
        if path.name not in tables:
            raise BpfError(errno.ENOENT, "open", str(path))
        return nullcontext(tables[path.name])

    for module in ("hive.dbg.bpf.maps", "hive.services.lookup"):
        monkeypatch.setattr(f"{module}.open_map", opened)
    for module in ("hive.dbg.bpf.srv6_multicast", "hive.services.lookup"):
        monkeypatch.setattr(f"{module}.map_by_id", lambda number: nullcontext(Inner(tables[str(number)])))
    monkeypatch.setattr("hive.dbg.bpf.command.root_only", lambda _: None)


class Inner(dict[bytes, bytes]):
    """A map in a map."""

    def lookup(self, key: bytes) -> bytes | None:
        return self.get(key)


def listed(
    words: str, tables: Tables, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """What a successful command prints of these maps."""
    pin_maps(monkeypatch, tables)
    assert run(["bpf", *words.split()]) == 0
    return capfd.readouterr().out
