"""``python -m lifecycle``: commands for hives without a command of their own, and for CI."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from lifecycle.command.imported import hive_at
from lifecycle.command.main import run_command
from lifecycle.errors import HiveError, SettingsError, UsageError
from lifecycle.graph.diff import diff
from lifecycle.graph.parts import ConstructorInfo, InvokeInfo
from lifecycle.graph.value import Graph, read_graph
from lifecycle.graph.views import differences

__all__ = ["run"]

USAGE = """\
Usage: python -m lifecycle COMMAND ...

  check   HIVE [--graph] [--json] [--SETTING=VALUE]...  Could it run with these settings? Nothing is started.
  inspect HIVE [VIEW [NAME]] [--json] [--SETTING=VALUE]...  What is it made of?
  diff    BEFORE AFTER [--json] [--update]  What changed? Each is a HIVE, or a file written by inspect json.
  shell   HIVE [--socket=PATH] [COMMAND]...  Talk to one that runs.

HIVE is package.module:name: a Hive, a Cell, or a function that returns one.
  --graph   The wiring alone: no setting is read, nothing is built.
  --json    For programs; check prints its faults so.
  --update  Write what AFTER is into the file BEFORE: the golden graph that later runs compare with.

Exit codes: 0 sound, or no difference; 1 a fault, or a difference; 2 wrong usage or settings.
"""

_OK, _DIFFERENT, _USAGE = 0, 1, 2
_OF_A_HIVE = ("check", "inspect", "shell")


def run(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Execute a command line. Returns the exit code, as in USAGE."""
    try:
        return _run(list(argv), env)
    except HiveError as error:
        sys.stderr.write(f"lifecycle: {error}\n")
        return error.exit_code


def _run(words: list[str], env: Mapping[str, str]) -> int:
    if not words or words[0] in {"-h", "--help", "help"}:
        (sys.stdout if words else sys.stderr).write(USAGE)
        return _OK if words else _USAGE
    command, *rest = words
    if command == "diff":
        return _diff(rest)
    if command not in _OF_A_HIVE:
        raise UsageError(
            f"{command}: expected check, inspect, diff or shell (see: python -m lifecycle --help)"
        )
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"{command}: expected a hive first, as package.module:name")
    return run_command(hive_at(rest[0]), [command, *rest[1:]], env)


def _diff(words: list[str]) -> int:
    flags = {word for word in words if word.startswith("--")}
    sides = [word for word in words if not word.startswith("--")]
    if unknown := flags - {"--json", "--update"}:
        raise UsageError(f"diff: {min(unknown)}: expected --json or --update")
    if len(sides) != 2:
        raise UsageError("diff: expected two, each a file of inspect json or package.module:name")
    if "--update" in flags:
        return _update(*sides)
    changes = diff(_graph(sides[0]), _graph(sides[1]))
    sys.stdout.write(f"{differences(changes, as_json='--json' in flags)}\n")
    return _DIFFERENT if changes else _OK


def _update(file: str, source: str) -> int:
    """Write the golden graph, unless it exists and is equal: its date is that of the last change."""
    if not _is_file(file):
        raise UsageError(f"diff --update: {file}: expected a file such as graph.json before the hive")
    path, graph = Path(file), _graph(source)
    if path.exists() and not diff(_graph(file), graph):
        return _OK
    try:
        path.write_text(f"{_golden(graph).json()}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from error
    return _OK


def _golden(graph: Graph) -> Graph:
    """Return the graph for version control, without fields that change at every edit or between machines."""

    def placed(node: ConstructorInfo | InvokeInfo) -> msgspec.Struct:
        return msgspec.structs.replace(node, file=os.path.basename(node.file), line=0)  # noqa: PTH119  # any text

    return msgspec.structs.replace(
        graph, constructors=tuple(map(placed, graph.constructors)), invokes=tuple(map(placed, graph.invokes))
    )


def _is_file(source: str) -> bool:
    return source.endswith(".json") or Path(source).exists()


def _graph(source: str) -> Graph:
    """Return the graph in a file, or of a hive with its defaults, without variables and flags."""
    if not _is_file(source):
        hive = hive_at(source)
        try:
            return hive.graph()
        except SettingsError as error:
            raise UsageError("; ".join(fault.text for fault in error.faults)) from error
    try:
        return read_graph(Path(source).read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{source}: {why}") from error
