"""The rules between the rooms of the house: which may import which, and what a module states of itself."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from hive.inspect.source import hive_of
from lifecycle.graph import circles
from tests.support import recordings
from tests.support.house import CELL_FILES, MODULES, ROOMS, ROOT, against, facts, holds_files, module_name

MAY_IMPORT = {"lifecycle": set(), "cells": {"lifecycle"}, "hive": {"cells", "lifecycle"}}


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
MOST_LONG_FILES, LONG = 19, 500
"""Files of the product and of its tests with more than 500 lines."""
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


def test_few_files_are_long() -> None:
    paths = [*(path for _, path in MODULES), *texts_of_tests()]
    long = {str(path.relative_to(ROOT)): count for path in paths if (count := lines_of(path)) > LONG}
    assert len(long) <= MOST_LONG_FILES, long


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
    "clustermesh",
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
COMPOSITIONS = {"agent"}


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


_WORDS = (
    "told tell tells said says unsay judge judges judged former formerly wish wishes owe owes owed "
    "kept gone begun whose whom nobody nobodys somebody whoever"
)
PRIVATE_WORDS = frozenset(re.findall(r"\w+", _WORDS))
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


_RIDDLES = (
    "ask_the_cells awaits_rules be_built beats belongings bury came clear_away crowded date_back disturbable "
    "either everywhere from_the_future furnish go_on grafted heal held_up_by lasting_maps misfit "
    "nothing_left poke put_in remove_stray short_ago stand_for stand_in stands_for stranger strays take_out "
    "thrown_away towards_nodes trouble trouble_logged undisturbed unfit unhold unlearn unlike "
    "until_it_fails worlds "
    "Belongings Contested Nearby Shortage Story Stretches Suspects Talk Turns Wave"
)
RIDDLES = frozenset(_RIDDLES.split())
"""Whole identifiers that a reader of a call cannot understand without their definition."""


def test_names_are_no_riddles() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}" for _, path in MODULES for name in facts(path).written & RIDDLES
    }
    assert found == set()


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


OPPOSITES = ["cells/cni/attachment.py:Undo.push"]
"""A stack of what takes an ADD back is called by its owner alone."""


def test_no_callback_of_another_object_is_set() -> None:
    """A dependency comes with the constructor, news by a table or an iteration: the graph shows both."""
    found = [
        f"{path.relative_to(ROOT)}:{each}" for path in CELL_FILES.values() for each in facts(path).callbacks
    ]
    assert found == OPPOSITES
