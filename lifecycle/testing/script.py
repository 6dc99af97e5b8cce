"""Script tests: pages of text with commands over the tables of a hive, and their expected output.

Example::

    @pytest.mark.parametrize("page", scripts("tests/scripts"), ids=str)
    async def test_script(page: Path) -> None:
        await run_script(page, controller_cell)
"""

import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.admin.cell import commands_cell
from lifecycle.admin.script import (
    Arguments,
    Command,
    CommandError,
    Commands,
    Engine,
    ScriptError,
    State,
    builtin,
    help_command,
    parse,
)
from lifecycle.admin.write_commands import write_commands
from lifecycle.errors import HiveError
from lifecycle.hints import Member
from lifecycle.hive.hive import Hive
from lifecycle.injection import Cell, invoke, module, provide_private
from lifecycle.settings import Sources
from lifecycle.testing.clock import VirtualClock
from lifecycle.testing.leaks import no_leaks
from lifecycle.testing.observed import LIMITS

__all__ = ["ScriptError", "run_script", "scripts"]

UPDATE = "SCRIPT_UPDATE"
"""The environment variable that, if set, updates the files of pages instead of comparing with them."""

_FLAGS = "#!"


class _Contributed:
    """The commands of the hive's cells, and those of every hive."""

    def __init__(self, commands: list[Member[Commands]]) -> None:
        self.commands = [command for contributed in commands for command in contributed]


def scripts(folder: Path | str) -> list[Path]:
    """Return the pages in a folder and below, by name. Raises FileNotFoundError if there are none."""
    pages = sorted(Path(folder).rglob("*.txtar"))
    if not pages:
        raise FileNotFoundError(f"{folder}: no page is called *.txtar")
    return pages


async def run_script(
    page: Path | str,
    *cells: Cell,
    settings: Mapping[str, object] | None = None,
    virtual_time: bool = False,
    update: bool | None = None,
    **options: Any,
) -> None:
    """Run a page against a hive of the cells; `options` are those of Hive.

    The hive is built before the first command and started by ``hive/start``. A first line ``#! --name=value``
    adds settings. With `virtual_time`, the loop's time passes only in ``sleep`` and in waits: a page of an
    hour takes no time. With `update`, or SCRIPT_UPDATE in the environment, differences that comparisons find
    are written into the page. Raises ScriptError, with page and line, at the first command with an unexpected
    result, LeakError if something is left behind, and the error of a hive that cannot be built.
    """
    path = Path(page)
    archive = parse(path.read_text(encoding="utf-8"))  # noqa: ASYNC240  # a test may block
    sources = _settings(archive.script, settings)
    inside = module("script", "Script", commands_cell, provide_private(_Contributed), invoke(_Contributed))
    async with no_leaks():
        hive = Hive(*cells, inside, settings=sources, **(LIMITS | options))
        hive.build()
        with tempfile.TemporaryDirectory(prefix="script-") as folder:
            for name, content in archive.files.items():
                file = Path(folder) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content, encoding="utf-8")
            async with _state(Path(folder), virtual_time=virtual_time) as state:
                state.updates = bool(os.environ.get(UPDATE)) if update is None else update
                engine = _engine(hive)
                try:
                    await engine.script(state, archive.script, path.name)
                finally:
                    await hive.stop()
    if state.goldens:
        files = archive.files | {name: new for name, new in state.goldens.items() if name in archive.files}
        whole = msgspec.structs.replace(archive, files=files).text()
        path.write_text(whole, encoding="utf-8")  # noqa: ASYNC240


def _settings(script: str, settings: Mapping[str, object] | None) -> Sources | Mapping[str, object] | None:
    first = script.partition("\n")[0]
    if not first.startswith(_FLAGS):
        return settings
    if settings is not None:
        raise ValueError("the page has flags in its first line: give settings there only")
    return Sources(first.removeprefix(_FLAGS).split())


@asynccontextmanager
async def _state(directory: Path, *, virtual_time: bool) -> AsyncIterator[State]:
    if not virtual_time:
        yield State(directory)
        return
    with VirtualClock() as clock:
        yield State(directory, now=lambda: clock.now, pause=clock.advance)


def _engine(hive: Hive) -> Engine:
    async def start(_state: State, _arguments: Arguments) -> None:
        try:
            await hive.start()
        except (HiveError, RuntimeError) as error:
            raise CommandError(str(error)) from error

    async def stop(_state: State, _arguments: Arguments) -> None:
        await hive.stop()

    commands = [
        *builtin(),
        *hive.get(_Contributed).commands,
        *write_commands(hive),
        Command("hive/start", "Start the hive", start),
        Command("hive/stop", "Stop the hive", stop),
    ]
    engine = Engine([*commands, help_command(lambda: engine.commands)])
    return engine
