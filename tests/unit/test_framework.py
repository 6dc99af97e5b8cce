"""Rules of the framework's source: imports, exports, and the number of files per folder."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

from docs.site import api_reference
from tests.support.house import MODULES, ROOMS, ROOT, against, facts, holds_files, module_name

PACKAGES = {path.parent.name for path in (ROOT / "lifecycle").glob("*/__init__.py")}
FRAMEWORK_LIBRARIES = {"anyio", "dependency_injector", "msgspec", "structlog", "yaml"}


def framework_imports() -> dict[str, set[str]]:
    """Which module imports which inside lifecycle: at the top, in functions, and for type checkers alike."""
    paths = {module_name(path): path for room, path in MODULES if room == "lifecycle"}
    found = {}
    for name, path in paths.items():
        pairs = [(f"{module}.{one}", module) for module, one in facts(path).names]
        meant = {whole if whole in paths else module for whole, module in pairs}
        found[name] = meant & paths.keys()
    return found


def test_only_what_the_framework_exports_is_used() -> None:
    def inside(_: str, path: Path) -> list[str]:
        found = []
        for module, name in facts(path).names:
            if module.partition(".")[0] != "lifecycle":
                continue
            exported = importlib.import_module(module).__all__ if module.count(".") < 2 else []
            if name not in exported and not (module == "lifecycle" and name in PACKAGES):
                found.append(f"{module}.{name}")
        return found

    assert against(inside, "cells", "hive") == {}


def exports() -> dict[tuple[str, str], object]:
    """What the packages of the framework that are for everybody export, by package and name."""
    modules = {package: importlib.import_module(package) for package in api_reference.PACKAGES}
    return {(package, name): getattr(one, name) for package, one in modules.items() for name in one.__all__}


def annotated(thing: object) -> set[str]:
    """The words in the hints and bases of a function or class of the framework: what it takes and gives."""
    if not (inspect.isclass(thing) or inspect.isfunction(thing)) or "lifecycle" not in thing.__module__:
        return set()
    hints: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(thing)))):
        if isinstance(node, ast.arg | ast.AnnAssign):
            hints.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hints.append(node.returns)
        elif isinstance(node, ast.ClassDef):
            hints += node.bases
    return {word for hint in hints if hint for word in re.findall(r"\w+", ast.unparse(hint))}


def test_every_export_of_the_framework_has_a_user() -> None:
    """A cell, a command or a page of the documentation names it, or what they name takes or gives it."""
    named = (pair for room, path in MODULES if room != "lifecycle" for pair in facts(path).names)
    words = {name for module, name in named if module.partition(".")[0] == "lifecycle"}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        words |= set(re.findall(r"\w+", page.read_text(encoding="utf-8")))
    left = exports()
    while fresh := {key: thing for key, thing in left.items() if key[1] in words}:
        left = {key: thing for key, thing in left.items() if key not in fresh}
        words = set[str]().union(*map(annotated, fresh.values()))
    assert list(left) == []


def test_no_module_of_the_framework_imports_itself_by_way_of_others() -> None:
    """CycleError shows the circle."""
    graphlib.TopologicalSorter(framework_imports()).prepare()


def test_no_package_of_the_framework_imports_itself_by_way_of_others() -> None:
    packages: dict[str, set[str]] = {}
    for name, needs in framework_imports().items():
        package = ".".join(name.split(".")[:2])
        packages.setdefault(package, set()).update(".".join(need.split(".")[:2]) for need in needs)
        packages[package].discard(package)
    graphlib.TopologicalSorter(packages).prepare()


@pytest.mark.parametrize("folder", sorted({path.parent for room, path in MODULES if room == "lifecycle"}))
def test_a_folder_of_the_framework_can_be_held_in_mind(folder: Path) -> None:
    # of the framework as a distribution of its own
    packaging = {"CHANGELOG.md", "LICENSE", "README.md", "__main__.py", "pyproject.toml"}
    marks = {"__pycache__", "__init__.py", "py.typed", *packaging}
    names = [path.name for path in folder.iterdir() if path.name not in marks]
    assert len(names) <= 15


def test_the_frameworks_tests_are_in_the_families_of_its_sources() -> None:
    tests = ROOT / "tests" / "unit" / "lifecycle"
    families = {path.name for path in tests.iterdir() if holds_files(path)}
    assert families <= {path.name for path in ROOMS["lifecycle"].iterdir()}
    assert [path.name for path in tests.iterdir() if path.is_file()] == []
    crowded = {each: len(list((tests / each).glob("*.py"))) for each in families}
    assert {each: count for each, count in crowded.items() if count > 15} == {}


def test_the_framework_knows_nothing_of_networks() -> None:
    def strange(_: str, path: Path) -> set[str]:
        outside = {name.partition(".")[0] for name in facts(path).imported} - sys.stdlib_module_names
        http = {"h11"} if path.is_relative_to(ROOMS["lifecycle"] / "http") else set()
        plugin = {"pytest"} if path.name == "pytest_plugin.py" else set()
        plugin |= {"opentelemetry"} if path.name == "traces.py" else set()
        return outside - FRAMEWORK_LIBRARIES - {"lifecycle"} - http - plugin

    assert against(strange, "lifecycle") == {}


def test_one_module_knows_the_library_that_builds() -> None:
    """It is an adapter: what reads graphs, cells and commands knows constructors only."""

    def knows(_: str, path: Path) -> set[str]:
        own = path == ROOMS["lifecycle"] / "injection" / "build.py"
        typing_only = path == ROOMS["lifecycle"] / "hive" / "hive.py"  # what Hive.provider() returns
        named = {name for name in facts(path).imported if name.partition(".")[0] == "dependency_injector"}
        return named if not own and not typing_only else set()

    assert against(knows) == {}
