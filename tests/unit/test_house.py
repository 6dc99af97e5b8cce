"""The rules between the rooms of the house: who may import whom, and what a module says of itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"lifecycle": ROOT / "lifecycle", "cells": ROOT / "cells", "hive": ROOT / "cmd" / "hive"}
MODULES = [(room, path) for room, folder in ROOMS.items() for path in sorted(folder.rglob("*.py"))]
MAY_IMPORT = {"lifecycle": set(), "cells": {"lifecycle"}, "hive": {"cells", "lifecycle"}}
FRAMEWORK_LIBRARIES = {"anyio", "dependency_injector", "msgspec", "structlog", "yaml"}


def imported(path: Path) -> Iterator[str]:
    """Full names of what a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def named(case: tuple[str, Path]) -> str:
    return str(case[1].relative_to(ROOT))


@pytest.mark.parametrize("case", MODULES, ids=named)
def test_imports_go_one_way(case: tuple[str, Path]) -> None:
    room, path = case
    above = {name.partition(".")[0] for name in imported(path)} & set(ROOMS) - {room}
    assert above <= MAY_IMPORT[room]


@pytest.mark.parametrize("case", [case for case in MODULES if case[0] == "cells"], ids=named)
def test_a_cell_uses_only_what_another_cell_exports(case: tuple[str, Path]) -> None:
    _, path = case
    cell = path.relative_to(ROOMS["cells"]).parts[0]
    inside = [
        name
        for name in imported(path)
        if name.startswith("cells.") and name.count(".") > 1 and name.split(".")[1] != cell
    ]
    assert inside == []


@pytest.mark.parametrize("case", [case for case in MODULES if case[0] == "lifecycle"], ids=named)
def test_the_framework_knows_nothing_of_networks(case: tuple[str, Path]) -> None:
    outside = {name.partition(".")[0] for name in imported(case[1])} - sys.stdlib_module_names
    assert outside <= FRAMEWORK_LIBRARIES | {"lifecycle"}


@pytest.mark.parametrize("case", MODULES, ids=named)
def test_a_module_says_what_it_is_for(case: tuple[str, Path]) -> None:
    assert ast.get_docstring(ast.parse(case[1].read_text(encoding="utf-8")))


def test_cmd_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "cmd" / "__init__.py").exists()
