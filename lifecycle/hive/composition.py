"""The cells and settings of a hive before anything is built, as a graph, and their faults."""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lifecycle.errors import Fault, GraphError, SettingsError
from lifecycle.hints.keys import Key, origin_class, plain, type_name
from lifecycle.hints.places import Place
from lifecycle.hive.nesting import Findings, Nesting, plan_of
from lifecycle.injection.assembly import assemble
from lifecycle.injection.cells import Cell
from lifecycle.injection.check import check, circle_faults
from lifecycle.injection.constructors import Constructor, Scope
from lifecycle.injection.resolve import Resolution
from lifecycle.settings.options import Group, Option
from lifecycle.settings.sources import Loaded, Setting, Sources, load
from lifecycle.tables.frozen import unfrozen_rows
from lifecycle.tables.read_table import ReadTable

__all__ = ["Composition"]


class Composition(ABC):
    """Cells and settings. Both are read on first use, and once."""

    def __init__(
        self,
        name: str,
        cells: Iterable[Cell],
        settings: Sources | Mapping[str, object] | None,
        env_prefix: str | None,
        place: Place,
        *,
        refuse_circles: bool = False,
    ) -> None:
        self.name = name
        self._refuses_circles = refuse_circles
        self.env_prefix = (
            f"{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}_" if env_prefix is None else env_prefix
        )
        """Prefix of environment variables, unless the Sources set another."""
        self._cells = tuple(cells)
        self._root = Scope(name, name, None, place)
        self._sources = settings

    def check(self) -> None:
        """Raise GraphError with every fault, or SettingsError if only settings have faults."""
        self._check()

    def _check(self, *, unset: bool = False) -> None:
        left_out = self._loaded.unset_faults if unset else ()
        faults = [*self._faults, *(fault for fault in self._loaded.faults if fault not in left_out)]
        if faults:
            kind = GraphError if self._faults else SettingsError
            raise kind(self.name, faults)

    def read_settings(self, argv: Sequence[str], env: Mapping[str, str], *, strict: bool = False) -> None:
        """Also read settings from flags and variables, in addition to the files of its own Sources.

        Used when a hive runs as a command; `strict` refuses unknown keys. Raises RuntimeError if the settings
        have been read already, TypeError if they were given as values in code.
        """
        if "_loaded" in self.__dict__:
            raise RuntimeError(f"the settings of {self.name} have been read already")
        if self._sources is not None and self.sources is None:
            raise TypeError(f"the settings of {self.name} are given in code: give Sources, or none")
        self._sources = (self.sources or Sources()).with_input(argv, env, "refuse" if strict else None)

    @property
    def sources(self) -> Sources | None:
        """The Sources of its settings; None if it has none or they were given as values in code."""
        return self._sources if isinstance(self._sources, Sources) else None

    @property
    def reads_settings(self) -> bool:
        """Whether read_settings() is possible: settings are not given in code and not read yet."""
        return (self._sources is None or self.sources is not None) and "_loaded" not in self.__dict__

    @property
    def needed(self) -> int:
        """Number of constructors that a start would run. Raises GraphError if the graph has faults."""
        self.options()
        return len({*self._resolution.order()} & {*self._resolution.assembly.providers})

    def option_groups(self) -> list[tuple[str, str, tuple[Option, ...]]]:
        """Return the options of every settings struct, with id and title of its module. Raises GraphError."""
        self.options()
        return [(scope.id, scope.title, group.options) for scope, group in self._located_groups]

    def options(self) -> list[Option]:
        """Return all settings in the order of the cells. Raises GraphError if the graph has faults."""
        if self._faults:
            raise GraphError(self.name, self._faults)
        return [option for group in self._groups for option in group.options]

    def settings(self) -> list[Setting]:
        """Return all settings with value and origin. Raises what check() raises."""
        self.check()
        return self._loaded.settings

    def warnings(self) -> list[str]:
        """Warnings about the settings, which a start logs."""
        return self._loaded.warnings

    @abstractmethod
    def _injectable(self) -> Collection[Key]:
        """Return the types that the hive itself provides."""

    @abstractmethod
    def _nesting(self, node: Constructor) -> Nesting:
        """Return the scope and settings of an inner hive that this constructor makes."""

    @functools.cached_property
    def _resolution(self) -> Resolution:
        return Resolution(assemble(self._root, self._cells), self._injectable())

    @functools.cached_property
    def _nested(self) -> list[Findings]:
        """Findings of hives that may run inside this one, to be checked with it."""
        nodes = [node for node in self._resolution.active if node.kind == "provide"]
        plans = [(node, plan) for node in nodes if (plan := plan_of(node.call)) is not None]
        return [plan.findings(self._nesting(node)) for node, plan in plans]

    @functools.cached_property
    def _faults(self) -> list[Fault]:
        inside = (fault for inner in self._nested for fault in inner.faults)
        faults = [*check(self._resolution), *_unfrozen(self._resolution.active), *inside]
        if self._refuses_circles and not faults:
            faults += circle_faults(self._resolution)
        return faults

    @property
    def _groups(self) -> list[Group]:
        return [group for _, group in self._located_groups]

    @property
    def _located_groups(self) -> list[tuple[Scope, Group]]:
        """Every settings struct with its module, including those of inner hives."""
        return [*self._own_groups, *(group for inner in self._nested for group in inner.groups)]

    @property
    def _own_groups(self) -> list[tuple[Scope, Group]]:
        nodes = (node for node in self._resolution.active if node.kind == "config" and not node.faults)
        return [(node.scope, Group(node.call, node.prefix)) for node in nodes]  # type: ignore[arg-type]  # its struct

    @functools.cached_property
    def _loaded(self) -> Loaded:
        return self._load()

    def _load(self, config_dirs: Sequence[Path] = ()) -> Loaded:
        return load(dict.fromkeys(self._groups), self._sources, config_dirs, self.env_prefix)

    def _without_settings(self) -> set[Constructor]:
        """Keys that cannot be built because a settings struct lacks values, and all that need them."""
        missing = {group for group in self._groups if group not in self._loaded.filled}
        without: set[Constructor] = set()
        for node in self._resolution.order() if missing else ():  # dependencies first
            empty = node.kind == "config" and Group(node.call, node.prefix) in missing  # type: ignore[arg-type]
            if empty or any(need in without for need in node.needs.values()):
                without.add(node)
        return without


def _unfrozen(nodes: Iterable[Constructor]) -> Iterator[Fault]:
    """Tables that declare that their rows may change in place."""
    for node in nodes:
        hint = plain(node.key)
        kind = origin_class(hint)
        is_table = kind is not None and ReadTable in kind.__mro__  # issubclass() of an ABC takes much longer
        if is_table and (why := unfrozen_rows(hint)) is not None:
            yield Fault("constructor", f"{node} gives {type_name(hint)}, but {why}", (), (node,))
