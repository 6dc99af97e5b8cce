"""What happened in production, once more in a test: tables as a running hive had them, at the same pace.

    # python -m lifecycle shell daemon:hive db/trace > incident.jsonl

    def scenario(world: Simulation) -> None:
        async def main() -> None:
            trace, hive = Trace.read("incident.jsonl"), Hive(controller)
            trace.fill(hive)
            async with hive.started():
                await trace.replay(hive)
                assert ...

        world.run(main)

Why:    a hive's controllers follow from its tables alone. So a test of these needs neither the sources of the
        tables nor hours: in a simulation time is virtual, and each seed is another order of tasks.
"""

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.admin.plain import plain, text
from lifecycle.admin.script import CommandError
from lifecycle.admin.trace import TraceLine
from lifecycle.admin.write_commands import decoded, row_type, writable
from lifecycle.hive.hive import Hive
from lifecycle.tables import Table, transaction

__all__ = ["Trace"]


class Trace:
    """Changes of tables, moment by moment, as the shell's ``db/trace`` prints them."""

    def __init__(self, lines: Iterable[TraceLine]) -> None:
        self._moments = [list(same) for _, same in itertools.groupby(lines, key=lambda line: line.at)]

    @classmethod
    def read(cls, path: Path | str) -> "Trace":
        """Read a trace from a file.

        Raises OSError, and ValueError with file and line if the file is invalid.
        """
        lines: list[TraceLine] = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            try:
                lines.append(msgspec.json.decode(line, type=TraceLine))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}: expected a line of db/trace") from None
            if len(lines) > 1 and lines[-1].at < lines[-2].at:
                raise ValueError(
                    f"{path}:{number}: earlier than the line before: expected the lines in order"
                )
        if not lines:
            raise ValueError(f"{path}: empty: expected the lines of db/trace")
        return cls(lines)

    @property
    def tables(self) -> list[str]:
        """The names of the tables in it."""
        return sorted({line.table for moment in self._moments for line in moment})

    @property
    def seconds(self) -> float:
        """Seconds from the first moment to the last."""
        return self._moments[-1][0].at - self._moments[0][0].at if self._moments else 0.0

    def fill(self, hive: Hive) -> None:
        """Build the hive, and write the rows of the first moment to its tables before it starts.

        Tables that the hive does not have are ignored; tables that the trace does not have stay empty. Raises
        LookupError if the hive has none of the tables, ValueError for rows of another type.
        """
        hive.build()
        self._apply(hive, self._moments[:1])

    async def replay(self, hive: Hive) -> None:
        """Write the changes after the first moment, each at its time. Raises what fill() raises."""
        for before, moment in itertools.pairwise(self._moments):
            await asyncio.sleep(moment[0].at - before[0].at)
            self._apply(hive, [moment])

    def _apply(self, hive: Hive, moments: Sequence[Sequence[TraceLine]]) -> None:
        tables = self._matching_tables(hive)
        with transaction(*tables.values()) as rows:
            for line in itertools.chain.from_iterable(moments):
                if (table := tables.get(line.table)) is None:
                    continue
                kind, keys = row_type(hive, table), {}
                if line.delete:
                    keys = {text(plain(key)): key for key in table.keys()}  # noqa: SIM118  # of a table, no dict
                try:
                    for row in line.put:
                        rows[table].put(decoded(row, kind))
                except ValueError as error:
                    raise ValueError(f"table {line.table}: a row of the trace: {error}") from None
                for key in line.delete:
                    if (row_key := keys.get(text(key))) is not None:
                        rows[table].delete(row_key)

    def _matching_tables(self, hive: Hive) -> Mapping[str, Table[Any, Any]]:
        """Return the tables of the trace that the hive has."""
        names = {table.name for table in hive.tables.all()}
        try:
            tables = {name: writable(hive, name) for name in self.tables if name in names}
            for table in tables.values():
                row_type(hive, table)
        except CommandError as error:
            raise LookupError(str(error)) from None
        if not tables:
            raise LookupError(f"{hive.name} has none of the tables of the trace: {', '.join(self.tables)}")
        return tables
