"""The facts about each module that the rules of the house need, read once: they are smaller than its syntax
tree.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"lifecycle": ROOT / "lifecycle", "cells": ROOT / "cells", "hive": ROOT / "cmd" / "hive"}
MODULES = [(room, path) for room, folder in ROOMS.items() for path in sorted(folder.rglob("*.py"))]


class Facts(NamedTuple):
    """The facts about a module."""

    imported: frozenset[str]
    """Full names of all imported modules."""
    names: frozenset[tuple[str, str]]
    """Module and name of every ``from module import name``; no name of ``import module``."""
    header: str
    """Its docstring."""
    words: frozenset[str]
    """Every word of its code, after the header."""
    defined: frozenset[str]
    exported: frozenset[str] | None
    """Its ``__all__``, if it has one."""
    unread: frozenset[str]
    """Private attributes of `self` that it stores and never reads; text counts as a read, for getattr()."""
    classes: tuple[str, ...]
    """Names of its classes, at any depth."""
    functions: bool
    """Whether it defines module-level functions."""
    taken: frozenset[str]
    """Names that it imports at module level."""
    written: frozenset[str]
    """Every identifier in its code."""
    texts: frozenset[str]
    """Every string except docstrings: logs, errors, help."""
    prose: tuple[tuple[int, str], ...]
    """Docstrings and comments, by line."""
    writes: tuple[tuple[int, ast.Attribute], ...]
    """Lines and methods of calls that change a map, or invalidate verdicts."""
    callbacks: tuple[str, ...]
    """Assignments of a function to an attribute of another object, and methods that store a function."""


STORING = {"append", "add", "insert", "setdefault"}
WRITES = {
    "update",
    "update_changed",
    "delete",
    "update_batch",
    "update_all",
    "delete_batch",
    "clear",
    "advance",
}


@functools.cache
def facts(path: Path) -> Facts:
    """Read the facts about the module at a path."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    begin = tree.body[0].end_lineno if ast.get_docstring(tree) else 0
    nodes: dict[type[ast.AST], list[Any]] = defaultdict(list)
    written: set[str] = set()
    for node in ast.walk(tree):
        nodes[type(node)].append(node)
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            written |= set(value.split(".")) if isinstance(value, str) else set()
    assert all(node.level == 0 for node in nodes[ast.ImportFrom]), f"{path}: relative import"
    pairs = {(alias.name, "") for node in nodes[ast.Import] for alias in node.names}
    pairs |= {(node.module or "", alias.name) for node in nodes[ast.ImportFrom] for alias in node.names}
    found: list[ast.Attribute] = nodes[ast.Attribute]
    documented = {node.value for node in nodes[ast.Expr]}
    texts = {node: node.value for node in nodes[ast.Constant] if isinstance(node.value, str)}
    methods = {node.name for node in nodes[ast.FunctionDef] + nodes[ast.AsyncFunctionDef]}
    calls = [node for node in nodes[ast.Call] if isinstance(node.func, ast.Attribute)]
    own = [node for node in found if isinstance(node.value, ast.Name) and node.value.id == "self"]
    stored = {node.attr for node in own if isinstance(node.ctx, ast.Store) and node.attr.startswith("_")}
    loaded = {node.attr for node in found if isinstance(node.ctx, ast.Load)}
    return Facts(
        frozenset(module for module, _ in pairs),
        frozenset(pairs),
        ast.get_docstring(tree) or "",
        frozenset(re.findall(r"\w+", "\n".join(text.splitlines()[begin:]))),
        frozenset(_defined(tree)),
        _exported(tree),
        frozenset(stored - loaded - set(texts.values())),
        tuple(node.name for node in nodes[ast.ClassDef]),
        any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in tree.body),
        frozenset(
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ),
        frozenset(written),
        frozenset(text for node, text in texts.items() if node not in documented),
        (*((node.lineno, text) for node, text in texts.items() if node in documented), *comments(text)),
        tuple((node.lineno, node.func) for node in calls if node.func.attr in WRITES),
        (
            *(f"{one.lineno}: {ast.unparse(one)}" for one in nodes[ast.Assign] if _is_callback(one, methods)),
            *(found for one in nodes[ast.ClassDef] for found in _registrations(one)),
        ),
    )


def _is_callback(node: ast.Assign, methods: set[str]) -> bool:
    foreign = any(
        isinstance(target, ast.Attribute)
        and not (isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"})
        for target in node.targets
    )
    value = node.value
    method = (
        isinstance(value, ast.Attribute)
        and isinstance(value.value, ast.Name)
        and value.value.id == "self"
        and value.attr in methods
    )
    return foreign and (isinstance(value, ast.Lambda) or method)


def _registrations(owner: ast.ClassDef) -> Iterator[str]:
    """Return the methods, except constructors, that store a function argument."""
    for method in owner.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or method.name == "__init__":
            continue
        given = [*method.args.args, *method.args.kwonlyargs]
        functions = {one.arg for one in given if one.annotation and "Callable" in ast.unparse(one.annotation)}
        for node in ast.walk(method) if functions else ():
            if isinstance(node, ast.Assign):
                stores, values = (
                    any(ast.unparse(one).startswith("self.") for one in node.targets),
                    [node.value],
                )
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                stores = ast.unparse(node.func).startswith("self.") and node.func.attr in STORING
                values = node.args
            else:
                continue
            leaves = [one for value in values for one in _parts(value)]
            if stores and any(isinstance(one, ast.Name) and one.id in functions for one in leaves):
                yield f"{owner.name}.{method.name}"


def _parts(value: ast.AST) -> list[ast.AST]:
    """Return the parts of a stored value; the arguments of a call are not stored."""
    parts = [value] if isinstance(value, ast.Name) else []
    inner = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    return [*parts, *(part for one in inner for part in _parts(one))]


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _exported(tree: ast.Module) -> frozenset[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return None


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Return line number and text of every comment, by a count of the quotes before it."""
    for number, line in enumerate(text.splitlines(), 1):
        mark = line.find("#")
        if mark >= 0 and line[:mark].count('"') % 2 == 0 and line[:mark].count("'") % 2 == 0:
            yield number, line[mark:]


CELL_FILES = {module_name(path): path for room, path in MODULES if room == "cells"}


def against(rule: Callable[[str, Path], object], *rooms: str) -> dict[str, object]:
    """Return what a rule reports about all modules, or those of these rooms: a test for each module takes
    twice as long.
    """
    found = {
        str(path.relative_to(ROOT)): rule(room, path) for room, path in MODULES if room in (rooms or ROOMS)
    }
    return {path: what for path, what in found.items() if what}


def holds_files(folder: Path) -> bool:
    """Return whether a folder has anything but the bytecode of removed modules."""
    return any(path.is_file() and path.parent.name != "__pycache__" for path in folder.rglob("*"))
