"""Suggestions for a type that nothing provides."""

import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator

from lifecycle.hints.keys import Key, full_name, hint_text, is_member, origin_class, plain, type_name
from lifecycle.injection.constructors import Constructor
from lifecycle.injection.fakes import members

__all__ = ["SimilarTypes"]

SHOWN = 5
"""Maximum number of lines for a type."""
SEARCHED = 20
"""Number of types for which protocols and similar names are searched, as that compares each with all."""


class SimilarTypes:
    """All provided types, by the types for which they may be mistaken."""

    def __init__(self, provided: Iterable[Constructor]) -> None:
        self._provided = provided
        self._is_indexed = False
        self._by_plain: dict[Key, list[Constructor]] = defaultdict(list)
        self._by_name: dict[str, list[Constructor]] = defaultdict(list)
        self._by_class: dict[type, list[Constructor]] = defaultdict(list)
        self._by_base: dict[type, list[Constructor]] = defaultdict(list)
        """By the bases of the class."""
        self._searches = 0

    def lines(self, key: Key, *, without: Constructor | None = None) -> Iterator[str]:
        """Return one line for each of the nearest: by type, then by name. `without` is left out."""
        if not self._is_indexed:
            self._index()
        seen: set[Constructor | None] = {without}
        shown: set[str] = set()
        for node, line in self._candidates(key):
            if node not in seen and len(shown) == SHOWN:
                yield "... and more"
                return
            if node not in seen and line not in shown:
                yield line
                shown.add(line)
            seen.add(node)

    def _index(self) -> None:
        """Built on first use: most graphs lack nothing."""
        self._is_indexed = True
        for node in self._provided:
            if node.key is None:
                continue
            self._by_plain[plain(node.key)].append(node)
            self._by_name[type_name(node.key)].append(node)
            if (kind := origin_class(node.key)) is not None:
                self._by_class[kind].append(node)
                for base in _bases(kind):
                    self._by_base[base].append(node)

    def _candidates(self, key: Key) -> Iterator[tuple[Constructor, str]]:
        self._searches += 1
        name, kind = type_name(key), origin_class(key)
        for node in self._by_name.get(name, ()):
            yield node, f"{full_name(node.key)}, not {full_name(key)}, is provided by {node}"
        for node in self._by_plain.get(plain(_item(key)), ()):
            yield node, _marked(node)
        if kind is None:
            yield from self._similar(name)
            return
        for node in self._by_class.get(kind, ()):
            yield node, _given(node)
        for node in self._by_base.get(kind, ()):
            yield node, f"{_given(node)}, a subclass: provide it with `-> {hint_text(key)}`"
        for base in _bases(kind):
            for node in self._by_class.get(base, ()):
                yield node, f"{_given(node)}, a base class of it"
        if getattr(kind, "_is_protocol", False) and self._searches <= SEARCHED:
            yield from self._having(key, kind)
        yield from self._similar(name)

    def _having(self, key: Key, protocol: type) -> Iterator[tuple[Constructor, str]]:
        required = members(protocol)
        for kind, nodes in self._by_class.items() if required else ():
            if all(hasattr(kind, member) for member in required):
                for node in nodes:
                    yield node, f"{_given(node)} and has its methods: provide it with `-> {hint_text(key)}`"

    def _similar(self, name: str) -> Iterator[tuple[Constructor, str]]:
        if self._searches > SEARCHED:
            return
        import difflib  # imported only for errors

        for match in difflib.get_close_matches(name, self._by_name, 2, 0.8):
            if match != name:
                node = self._by_name[match][0]
                yield node, f"a similar name, {match}, is provided by {node}"


def _given(node: Constructor) -> str:
    return f"{type_name(node.key)} is provided {'privately ' if node.private else ''}by {node}"


def _bases(kind: type) -> tuple[type, ...]:
    """Return the bases of a class; none for a Protocol: a class that derives from one is only similar."""
    return () if getattr(kind, "_is_protocol", False) else kind.__mro__[1:-1]


def _item(key: Key) -> Key:
    """Return Route for ``list[Route]``, since its members may have been intended; other keys unchanged."""
    args = typing.get_args(key)
    return args[0] if origin_class(key) in {list, tuple} and args else key


def _marked(node: Constructor) -> str:
    """Whether it is provided under another name, or as a member."""
    if is_member(node.key):
        return f"{type_name(node.key)} is contributed by {node}: ask for list[{hint_text(node.key)}]"
    return f"{_given(node)}: ask for {hint_text(node.key)}"
