"""The rules between the rooms of the house: which may import which, and what a module states of itself."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cells.cluster.identity.identities import Identities, NodeAllocator, identity_table
from cells.cluster.identity.numbers import CLUSTER
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from docs.site import api_reference
from hive.inspect.source import hive_of
from lifecycle.graph import circles
from tests.support import recordings
from tests.support.fake_map import SPECS, FakeMap
from tests.unit.ipcache.fakes import FakeIpcacheMap, IpcacheOver

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"lifecycle": ROOT / "lifecycle", "cells": ROOT / "cells", "hive": ROOT / "cmd" / "hive"}
MODULES = [(room, path) for room, folder in ROOMS.items() for path in sorted(folder.rglob("*.py"))]
MAY_IMPORT = {"lifecycle": set(), "cells": {"lifecycle"}, "hive": {"cells", "lifecycle"}}
PACKAGES = {path.parent.name for path in (ROOT / "lifecycle").glob("*/__init__.py")}
FRAMEWORK_LIBRARIES = {"anyio", "dependency_injector", "msgspec", "structlog", "yaml"}


class Facts(NamedTuple):
    """What the rules ask of a module."""

    imported: frozenset[str]
    """Full names of what it imports, wherever in it."""
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
    """Private attributes of `self` that it stores and never loads; texts count, for getattr()."""
    classes: tuple[str, ...]
    """Names of its classes, at any depth."""
    functions: bool
    """Whether it defines functions at its top."""
    taken: frozenset[str]
    """Names that it imports at its top."""
    written: frozenset[str]
    """Every identifier that it writes down."""
    texts: frozenset[str]
    """Every text but docstrings: logs, errors, help."""
    prose: tuple[tuple[int, str], ...]
    """Docstrings and comments, by line."""
    writes: tuple[tuple[int, ast.Attribute], ...]
    """Lines and methods of calls that change a map, or void verdicts."""
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
    """Read once: many rules ask of each module, and its tree is larger than these facts."""
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
    """Methods, but constructors, that store a function they are given."""
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
    """What a value holds; what it calls is not held."""
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


def framework_imports() -> dict[str, set[str]]:
    """Which module imports which inside lifecycle: at the top, in functions, and for type checkers alike."""
    paths = {module_name(path): path for room, path in MODULES if room == "lifecycle"}
    found = {}
    for name, path in paths.items():
        pairs = [(f"{module}.{one}", module) for module, one in facts(path).names]
        meant = {whole if whole in paths else module for whole, module in pairs}
        found[name] = meant & paths.keys()
    return found


def against(rule: Callable[[str, Path], object], *rooms: str) -> dict[str, object]:
    """What a rule has against modules of these rooms, or of all: a test for each would take twice as long."""
    found = {
        str(path.relative_to(ROOT)): rule(room, path) for room, path in MODULES if room in (rooms or ROOMS)
    }
    return {path: what for path, what in found.items() if what}


def test_imports_go_one_way() -> None:
    def above(room: str, path: Path) -> set[str]:
        return {name.partition(".")[0] for name in facts(path).imported} & ROOMS.keys() - {room} - MAY_IMPORT[
            room
        ]

    assert against(above) == {}


@functools.cache
def cell_modules() -> set[str]:
    """Import names of the modules and packages that are a cell (they define ``cell``), and of each family."""
    families = {f"cells.{path.name}" for path in ROOMS["cells"].iterdir() if path.is_dir()}
    paths = [path for room, path in MODULES if room == "cells" and path.stem != "cell"]
    return families | {module_name(path) for path in paths if "cell" in facts(path).defined}


CELL_FILES = {module_name(path): path for room, path in MODULES if room == "cells"}


def cell_of(module: str) -> str:
    """The innermost cell that a module belongs to; empty for the composition beside the cells."""
    while module and module not in cell_modules():
        module = module.rpartition(".")[0]
    return module


def is_library(name: str) -> bool:
    """Whether it belongs to no cell but to its family alone: types and functions that are for everybody."""
    init = ROOT / Path(*cell_of(name).split("."), "__init__.py")
    return cell_of(name).count(".") == 1 and init.is_file() and "cell" not in facts(init).defined


# Numbers of docs/design/0002-few-full-files.md: what a reader has to hold in mind. They fall, and rise for a
# reason only.
MOST_FILES = 380
MOST_SHORT_FILES, SHORT = 30, 40
MOST_LINES = 600
MOST_REEXPORTS = 400
MOST_LEVELS = 2
FULL_CONSTRUCTORS, FULL = 0, 7
"""Constructors of the agent with more than seven dependencies."""
FOREIGN_SETTINGS = 0
"""Places of the agent, and of the operator, where settings of another module are injected."""


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def reexports(path: Path) -> list[str]:
    """Names that a package exports and does not define."""
    return sorted(facts(path).taken & (facts(path).exported or frozenset()))


def defines(path: Path) -> bool:
    found = facts(path)
    return bool(found.classes) or found.functions or "cell" in found.defined


def test_cells_are_few_full_files() -> None:
    lines = {str(path.relative_to(ROOT)): lines_of(path) for path in CELL_FILES.values()}
    assert len(lines) <= MOST_FILES
    assert len([path for path, count in lines.items() if count < SHORT]) <= MOST_SHORT_FILES
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}
    deep = [
        path for path in CELL_FILES.values() if len(path.relative_to(ROOMS["cells"]).parts) > MOST_LEVELS + 1
    ]
    assert deep == []


def test_a_package_of_cells_defines_what_it_exports() -> None:
    """An ``__init__`` that only re-exports would make each reader open two files."""
    packages = [path for path in CELL_FILES.values() if path.name == "__init__.py"]
    only = [path for path in packages if reexports(path) and not defines(path)]
    assert only == []
    assert sum(len(reexports(path)) for path in packages) <= MOST_REEXPORTS


def test_a_class_name_is_of_one_class_of_the_cells() -> None:
    """A search for it finds one definition; classes inside classes and functions count."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in CELL_FILES.values():
        for name in facts(path).classes:
            found[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_constructors_of_the_agent_have_at_most_seven_dependencies() -> None:
    edges = hive_of(None, ()).graph().edges
    needs = Counter(source for source, _ in {(one.source, one.parameter) for one in edges if not one.order})
    full = {source: count for source, count in needs.items() if count > FULL}
    assert len(full) <= FULL_CONSTRUCTORS, full


@pytest.mark.parametrize("hive", [None, "operator"], ids=["agent", "operator"])
def test_settings_are_injected_only_where_they_are_declared(hive: str | None) -> None:
    """A fact of the public type of the module that has the settings serves better."""
    graph = hive_of(hive, ()).graph()
    owners = {node.id: node.module for node in graph.constructors if node.kind == "config"}
    uses = {(one.source, one.target) for one in graph.edges if one.target in owners and not one.order}
    foreign = sorted(
        (constructor, settings)
        for constructor, settings in uses
        if not f"{constructor.partition('/')[0]}.".startswith(f"{owners[settings]}.")  # nor of its parts
    )
    assert len(foreign) <= FOREIGN_SETTINGS, foreign


FAMILIES = (
    "base",
    "unsupported",
    "config",
    "netlink",
    "maps",
    "observe",
    "kubernetes",
    "kvstore",
    "datapath",
    "node",
    "cluster",
    "policy",
    "endpoint",
    "remote",
    "tunnel",
    "health",
    "services",
    "proxy",
    "hubble",
    "cni",
    "api",
    "masquerade",
    "encryption",
    "bgp",
    "operator",
)
"""The families of ``cells/``, each above all that it may import: docs/design/0003-families-in-an-order.md."""
COMPOSITIONS = {"agent", "libraries"}


def test_families_import_only_families_below_them() -> None:
    folders = {path.relative_to(ROOMS["cells"]).parts[0].removesuffix(".py") for path in CELL_FILES.values()}
    assert folders - COMPOSITIONS == set(FAMILIES)

    def above(_: str, path: Path) -> list[str]:
        own = path.relative_to(ROOMS["cells"]).parts[0]
        if own not in FAMILIES:
            return []
        pairs = facts(path).names
        names = {f"{module}.{name}" if module == "cells" else module for module, name in pairs}
        found = {name.split(".")[1] for name in names if name.startswith("cells.")} - {own}
        return [name for name in found if name not in FAMILIES[: FAMILIES.index(own)]]

    assert against(above, "cells") == {}


def test_a_cell_uses_only_what_another_cell_exports() -> None:
    """A module's ``__all__`` is what other cells may take of it; what has none is for its own cell."""

    def inside(_: str, path: Path) -> list[str]:
        own = f"{cell_of(module_name(path))}."
        found = []
        for module, name in facts(path).names:
            whole = f"{module}.{name}"
            if whole in CELL_FILES:  # the module as a whole
                source, exported = (
                    whole,
                    whole in cell_modules() or facts(CELL_FILES[whole]).exported is not None,
                )
            elif module in CELL_FILES:
                source, exported = module, name in (facts(CELL_FILES[module]).exported or ())
            else:
                continue
            if not exported and not is_library(source) and not own.startswith(f"{cell_of(source)}."):
                found.append(whole)
        return found

    assert against(inside, "cells") == {}


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


@pytest.mark.parametrize("room", ["cells", "hive"])
def test_a_folder_of_families_can_be_held_in_mind(room: str) -> None:
    folders = {path.parent for each, path in MODULES if each == room} - {
        ROOMS[room]
    }  # that has families alone
    names = {
        str(each.relative_to(ROOT)): {
            path.name for path in each.iterdir() if path.is_file() or holds_files(path)
        }
        - {"__init__.py"}
        for each in folders
    }
    assert {folder: sorted(inside) for folder, inside in names.items() if len(inside) > 16} == {}


def holds_files(folder: Path) -> bool:
    """Whether there is anything but the bytecode of modules, which stays when they are removed."""
    return any(path.is_file() and path.parent.name != "__pycache__" for path in folder.rglob("*"))


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


def test_no_import_hooks_are_installed() -> None:
    assert against(lambda _, path: facts(path).words & {"meta_path", "path_hooks"}) == {}


def test_a_header_lists_no_needs_and_gives() -> None:
    """Imports and type hints have them."""
    assert against(lambda _, path: re.findall(r"\b(?:Needs|Gives):", facts(path).header)) == {}


def test_every_module_has_a_docstring() -> None:
    assert against(lambda _, path: not facts(path).header) == {}


def test_cmd_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "cmd" / "__init__.py").exists()


UNREAD = {
    ("cells/datapath/libbpf.py", "_data"): "libbpf reads on in these bytes until the load",
    ("lifecycle/hive/inner.py", "_root"): "its base class reads it",
    ("lifecycle/testing/simulation.py", "_clock_resolution"): "asyncio reads it",
}


def test_private_attributes_are_read_somewhere() -> None:
    def unread(_: str, path: Path) -> set[str]:
        place = str(path.relative_to(ROOT))
        return {name for name in facts(path).unread if (place, name) not in UNREAD}

    assert against(unread) == {}


def test_no_constructor_of_the_agent_asks_for_what_it_does_not_use() -> None:
    from cells.agent import agent
    from lifecycle.testing import unused_parameters

    unused = unused_parameters(agent)
    assert unused == [], "for the order alone there is @after(X), and a type may be invoked: invoke(X)"


@pytest.mark.parametrize("hive", ["agent", "operator"])
def test_no_two_modules_need_each_other(hive: str) -> None:
    found = circles(hive_of(None if hive == "agent" else hive, ()).graph())
    assert [one.modules for one in found] == []


PRIVATE_WORDS = frozenset(
    [
        "told",
        "tell",
        "tells",
        "said",
        "says",
        "unsay",
        "judge",
        "judges",
        "judged",
        "former",
        "formerly",
        "wish",
        "wishes",
        "owe",
        "owes",
        "owed",
        "kept",
        "gone",
        "begun",
        "whose",
        "whom",
        "nobody",
        "nobodys",
        "somebody",
        "whoever",
    ]
)
PRIVATE_PHRASES = re.compile(
    rf"\b(?:{'|'.join(sorted(PRIVATE_WORDS))}|by hand|(?<!here )is no(?! longer\b))\b", re.IGNORECASE
)
PRIVATE_NAMES_LEFT, PRIVATE_TEXTS_LEFT = 0, 1
"""How many there still are: these only fall. The text is of cilium-dbg."""
NAMES_OF_PROTOCOLS = {"NODE_GONE"}
"""Names that others have given: an enum value of Hubble's API."""
WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def test_names_are_words_that_one_would_search_for() -> None:
    private = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*(path for _, path in MODULES), *sorted((ROOT / "tests").rglob("*.py"))]
        for name in sorted(facts(path).written - NAMES_OF_PROTOCOLS)
        if not PRIVATE_WORDS.isdisjoint(word.lower() for word in WORD_OF_NAME.findall(name))
    ]
    assert len(private) <= PRIVATE_NAMES_LEFT, "\n".join(private)


def test_texts_for_users_are_plain() -> None:
    private = [
        f"{path.relative_to(ROOT)}: {text[:80]!r}"
        for _, path in MODULES
        for text in sorted(facts(path).texts)
        if PRIVATE_PHRASES.search(text)
    ]
    assert len(private) <= PRIVATE_TEXTS_LEFT, "\n".join(private)


NAME_OF_TEST = re.compile(r"^ *(?:async )?def test_(\w+)|\bid=\"([^\"]*)\"|\bids=\[([^\]]*)\]", re.MULTILINE)


def test_tests_are_named_by_condition_and_result_without_private_words() -> None:
    """Functions, and ids of parameters."""
    private = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts_of_tests().items()
        for name in ("".join(found).replace("_", " ") for found in NAME_OF_TEST.findall(text))
        if PRIVATE_PHRASES.search(name)
    ]
    assert private == []


C_FILES = [path for folder in ("cells", "cmd") for path in sorted((ROOT / folder).rglob("*.[ch]"))]


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of every comment, by a count of the quotes before it."""
    for number, line in enumerate(text.splitlines(), 1):
        mark = line.find("#")
        if mark >= 0 and line[:mark].count('"') % 2 == 0 and line[:mark].count("'") % 2 == 0:
            yield number, line[mark:]


def test_docstrings_and_comments_use_no_private_words() -> None:
    private = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]}"
        for path in [*(path for _, path in MODULES), *texts_of_tests()]
        for number, text in facts(path).prose
        for found in PRIVATE_PHRASES.finditer(text)
    ]
    assert private == []


def test_c_has_names_and_comments_that_one_would_search_for() -> None:
    private = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in C_FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PRIVATE_PHRASES.search(line)
        or not PRIVATE_WORDS.isdisjoint(word.lower() for word in WORD_OF_NAME.findall(line))
    ]
    assert private == []


def test_recordings_are_packed() -> None:
    """A file for each case is half of all lines: python -m tests.support.recordings pack AREA FOLDER."""
    loose = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.json")}
    known = ("tests/integration/deploy/older_chart.json", "tests/support/apiserver/resources.json")
    assert loose - {Path(each) for each in known} == {recordings.INDEX.relative_to(ROOT)}


IMPORT_OF_TESTS = re.compile(
    r"^ *from (tests[\w.]*) import (\([^)]*\)|.*)$|^ *import (tests[\w.]*)", re.MULTILINE
)


@functools.cache
def texts_of_tests() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))}


def test_no_module_imports_a_module_of_tests() -> None:
    """What tests share is in tests/support, or in a module beside them that has no tests."""
    modules = {
        name for path in texts_of_tests() if (name := module_name(path)).split(".")[-1].startswith("test_")
    }
    pairs = {
        (str(path.relative_to(ROOT)), module)
        for path, text in texts_of_tests().items()
        for package, names, whole in IMPORT_OF_TESTS.findall(text)
        for module in (package, whole, *(f"{package}.{name}" for name in re.findall(r"\w+", names)))
        if module in modules
    }
    assert pairs == set(), "\n".join(map(" imports ".join, sorted(pairs)))


def test_tests_wait_by_one_function() -> None:
    """Async code by that of the framework, the rest by that of the kit."""
    own = [
        str(path.relative_to(ROOT))
        for path, text in texts_of_tests().items()
        if re.search(r"^ *(async )?def eventually\(", text, re.MULTILINE)
    ]
    assert own == ["tests/support/waiting.py"]


POLLED = 5
"""Loops that ask again by an await, which no condition of eventually() can: these only fall."""


def test_tests_poll_by_eventually() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path, text in texts_of_tests().items()
        for line in text.splitlines()
        if "noqa: ASYNC110" in line and path != Path(__file__)
    ]
    assert len(found) <= POLLED, "\n".join(found)


def test_verdicts_are_voided_by_the_maps_alone() -> None:
    """Who changes a map need not remember it: docs/design/0005-one-way-to-write-a-map.md."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in CELL_FILES.values()
        for line, call in facts(path).writes
        if call.attr == "advance" and "epochs" in ast.unparse(call) and path.parts[-2] != "maps"
    ]
    assert found == []


def test_a_caller_that_forgets_to_void_verdicts_does_not_exist() -> None:
    """Each map that verdicts follow from, written in each way there is: the epoch goes on."""
    for name, spec in SPECS.items():
        if spec.voids is None:
            continue
        for how in ("update", "update_changed", "delete", "update_batch", "delete_batch", "clear"):
            table: FakeMap[bytes, bytes] = FakeMap(spec)
            key, value = bytes(spec.key_size), bytes(spec.value_size)
            table.raw[key] = value
            other = b"\xff" * spec.value_size
            rows = {
                "update": (key, value),
                "update_changed": (key, other),
                "delete": (key,),
                "update_batch": ([(key, value)],),
            }
            getattr(table, how)(*rows.get(how, ([key],) if how == "delete_batch" else ()))
            assert table.voided, f"{name}: {how}"
        unwired: FakeMap[bytes, bytes] = FakeMap(spec)
        unwired.epochs = None
        with pytest.raises(RuntimeError, match="open for reading only"):
            unwired.update(bytes(spec.key_size), bytes(spec.value_size))


def test_a_caller_that_forgets_to_introduce_an_identity_does_not_exist() -> None:
    """A claim reaches cilium_ipcache only after every follower knows its identity, from any caller."""
    seen: list[tuple[int, bool]] = []
    kernel = FakeIpcacheMap()

    class Follower:
        def ensure_identity(self, identity: int, labels: object) -> None:
            del labels
            seen.append((identity, identity in kernel.identities.values()))

    identities = Identities(identity_table(), NodeAllocator(CLUSTER))
    identity = identities.acquire_now(("k8s:app=web",))
    assert identity is not None
    forgetful = IpcacheOver(kernel, identities, [Follower()])
    claim = IpcacheEntry(prefix="10.0.1.7/32", identity=identity.id, source=Source.LOCAL, resource="ep//7")
    forgetful.upsert(claim)
    assert seen == [(identity.id, False)]
    assert kernel.identities == {"10.0.1.7/32": identity.id}


WRITTEN_BY_TARGETS = {"ipcache", "lxc", "tunnels", "nodes", "ipmasq4", "ipmasq6"}
WRITTEN_TWICE = {"endpoints"}
"""hive_endpoints: rows of endpoints that an earlier agent left are removed by their restore."""


def test_each_map_has_one_writer() -> None:
    """The attribute of Maps is named where its target is made, and nowhere else is it written."""
    found: dict[str, set[str]] = {}
    for path in CELL_FILES.values():
        for _, call in facts(path).writes:
            owner = call.value
            if (
                call.attr != "advance"
                and isinstance(owner, ast.Attribute)
                and "maps" in ast.unparse(owner.value)
            ):
                found.setdefault(owner.attr, set()).add(str(path.relative_to(ROOT)))
    assert {name for name, paths in found.items() if len(paths) > 1} <= WRITTEN_TWICE
    assert not found.keys() & WRITTEN_BY_TARGETS, "by their MapTarget alone"


OPPOSITES = ["cells/cni/attachment.py:Undo.push"]
"""A stack of what takes an ADD back is called by its owner alone."""


def test_no_callback_of_another_object_is_set() -> None:
    """A dependency comes with the constructor, news by a table or an iteration: the graph shows both."""
    found = [
        f"{path.relative_to(ROOT)}:{each}" for path in CELL_FILES.values() for each in facts(path).callbacks
    ]
    assert found == OPPOSITES
