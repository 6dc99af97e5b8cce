"""The graph of dependencies between constructors."""

import functools
from collections import defaultdict
from collections.abc import Collection, Sequence

from lifecycle.hints.keys import Key, member_of, origin_class
from lifecycle.injection.assembly import Assembly
from lifecycle.injection.constructors import SELF, Constructor, Frame, Parameter, Scope
from lifecycle.injection.cycles import order

__all__ = ["Resolution", "Unmet"]

Unmet = dict[Key, list[tuple[Constructor, Parameter]]]


class Resolution:
    """An assembly with connected parameters. Calls and raises nothing."""

    def __init__(self, assembly: Assembly, injected: Collection[Key]) -> None:
        self.assembly = assembly
        self.injected = frozenset(injected)
        """Keys that the hive itself provides, separately for each constructor."""
        self.by_key: dict[Key, list[Constructor]] = defaultdict(list)
        """All providers of a key, including fakes and what they replace."""
        self.missing: Unmet = defaultdict(list)
        self.hidden: Unmet = defaultdict(list)
        """Keys that are needed, but only provided privately elsewhere."""
        self._public: dict[Key, Constructor] = {}
        self._private: dict[Key, dict[Scope, Constructor]] = {}
        self._index()
        for node in self.nodes:
            self._connect(node)

    @property
    def active(self) -> list[Constructor]:
        """All constructors that may be called, and all fakes; not what is replaced."""
        return [node for node in self.assembly.providers if not node.replaced]

    @property
    def nodes(self) -> list[Constructor]:
        """The active constructors, then the invoked functions."""
        return [*self.active, *self.assembly.invokes]

    def order(self) -> Sequence[Constructor]:
        """Return the invoked functions and all they need, each after its dependencies."""
        return self._order

    @functools.cached_property
    def _order(self) -> list[Constructor]:
        return order(self.assembly.invokes)

    def find(self, key: Key, scope: Scope) -> Constructor | None:
        """Return the undecorated provider of `key` for `scope`: the nearest private or the public one."""
        if (private := self._private.get(key)) is not None:
            around: Scope | None = scope
            while around is not None:
                if around in private:
                    return private[around]
                around = around.parent
        return self._public.get(key)

    def members(self, key: Key, scope: Scope) -> list[Constructor]:
        """Return the members of the group ``list[Member[T]]`` that are visible in `scope`."""
        return [
            node
            for node in self.by_key.get(member_of(key), ())
            if not node.replaced and (not node.private or scope.is_inside(node.scope))
        ]

    def decorator(self, key: Key, scope: Scope, frame: Frame | None) -> Constructor | None:
        """Return the innermost decorator of `key` around `frame`, for the provider that `scope` sees.

        A decorator further out decorates another value if this one is private.
        """
        while frame is not None:
            for node in frame.decorators.get(key, ())[:1]:
                if not node.replaced and self.bare(key, scope) == self.bare(key, node.scope):
                    return node
            frame = frame.parent
        return None

    def held(self, key: Key, scope: Scope | None = None) -> list[Constructor]:
        """Return the providers of `key` in the whole hive; decorated if the decoration holds for all of it.

        There are several for a group and for a key with several private providers. With a `scope`, only the
        one that this module sees.
        """
        if scope is not None:
            return [node for node in self.bare(key, scope) if node is not None]
        decorator = self.decorator(key, self.assembly.root, self.assembly.frame)
        if decorator is not None:
            return [decorator]
        keys = key if key in self.by_key else member_of(key)
        return [node for node in self.by_key.get(keys, ()) if not node.replaced]

    def bare(self, key: Key, scope: Scope) -> list[Constructor | None]:
        """Return the undecorated providers of `key` for `scope`: one or none, or the members of a group."""
        provider = self.find(key, scope)
        return [provider] if provider is not None or member_of(key) is None else [*self.members(key, scope)]

    def _index(self) -> None:
        fakes = {node.key for node in self.assembly.replaces}
        self._decorated = {node.key for node in self.assembly.decorators}
        for node in self.assembly.providers:
            node.replaced = node.key in fakes and node.kind != "replace"
        if fakes:
            self._drop_wholes()
        for node in (*self.assembly.constructors, *self.assembly.replaces):
            if node.key is None:
                continue
            self.by_key[node.key].append(node)
            if node.private and not node.replaced:
                self._private.setdefault(node.key, {}).setdefault(node.scope, node)
            elif not node.replaced:
                self._public.setdefault(node.key, node)

    def _drop_wholes(self) -> None:
        """Mark a constructor with several results as replaced if each of them is."""
        in_use = {node.whole for node in self.assembly.providers if node.whole and not node.replaced}
        for node in self.assembly.providers:
            if node.parts:
                node.replaced = node not in in_use

    def _connect(self, node: Constructor) -> None:
        for parameter in node.parameters:
            key = self._owner_of(node) if parameter.key == SELF else parameter.key
            if key in self.injected:
                node.injected[parameter.name] = key
                continue
            provider = self.decorator(key, node.scope, node.frame) if key in self._decorated else None
            provider = provider or self.find(key, node.scope)
            before = len(node.needs)
            if provider is not None:
                node.needs[parameter.name] = provider
            elif parameter.collect is not None:
                members = self.members(key, node.scope)
                node.groups[parameter.name] = members
                node.needs |= {f"{parameter.name}[{index}]": member for index, member in enumerate(members)}
            elif parameter.required:
                unmet = self.hidden if self.by_key.get(key) else self.missing
                unmet[key].append((node, parameter))
            if parameter.ordering:
                node.orders.update(list(node.needs)[before:])

    def _owner_of(self, node: Constructor) -> Key:
        """Return the key of the class that defines this method; the class's name if nothing provides one."""
        name: str = getattr(node.call, "__name__", "")
        written_in = getattr(node.call, "__qualname__", "").rpartition(".")[0]
        for keys in (self._by_class.get(written_in, ()), self.by_key):  # first the defining class
            for key in keys:
                if getattr(origin_class(key), name, None) is node.call:
                    return key
        return node.name.rpartition(".")[0]

    @functools.cached_property
    def _by_class(self) -> dict[str, list[Key]]:
        """Keys by the name of their class."""
        by_class: dict[str, list[Key]] = defaultdict(list)
        for key in self.by_key:
            by_class[getattr(origin_class(key), "__qualname__", "")].append(key)
        return by_class
