"""The graph: who needs whom.

Needs:  an assembly.
Gives:  Resolution: each constructor's needs connected, what could not be, and the order to construct in.
"""

from collections import defaultdict
from collections.abc import Collection

from lifecycle.assembly import Assembly
from lifecycle.constructors import SELF, Constructor, Parameter, Scope
from lifecycle.cycles import order
from lifecycle.keys import Key, origin_class

__all__ = ["Resolution", "Unmet"]

Unmet = dict[Key, list[tuple[Constructor, Parameter]]]


class Resolution:
    """An assembly with its parameters connected. Nothing is called, nothing raised."""

    def __init__(self, assembly: Assembly, injected: Collection[Key]) -> None:
        self.assembly = assembly
        self.injected = frozenset(injected)
        """Keys that the hive itself fills, for each constructor anew."""
        self.by_key: dict[Key, list[Constructor]] = defaultdict(list)
        """Everything that provides a key, fakes and what they replace included."""
        self.missing: Unmet = defaultdict(list)
        self.hidden: Unmet = defaultdict(list)
        """Needed, but only provided privately elsewhere."""
        self._index()
        for node in self.nodes:
            self._connect(node)

    @property
    def active(self) -> list[Constructor]:
        """Every constructor that may be called, and every fake; not what is replaced."""
        assembly = self.assembly
        return [node for node in (*assembly.constructors, *assembly.replaces) if not node.replaced]

    @property
    def nodes(self) -> list[Constructor]:
        """The active constructors, then the invoked functions."""
        return [*self.active, *self.assembly.invokes]

    def order(self) -> list[Constructor]:
        """What the invoked functions need, and they themselves, each after what it needs."""
        return order(self.assembly.invokes)

    def find(self, key: Key, scope: Scope) -> Constructor | None:
        """What provides `key` to `scope`."""
        for node in self.by_key.get(key, ()):
            if not node.replaced and (not node.private or scope.is_inside(node.scope)):
                return node
        return None

    def _index(self) -> None:
        fakes = {node.key for node in self.assembly.replaces}
        for node in self.assembly.constructors:
            node.replaced = node.key in fakes
            if node.key is not None:
                self.by_key[node.key].append(node)
        for fake in self.assembly.replaces:
            self.by_key[fake.key].append(fake)

    def _connect(self, node: Constructor) -> None:
        for parameter in node.parameters:
            key = self._owner_of(node) if parameter.key == SELF else parameter.key
            if key in self.injected:
                node.injected[parameter.name] = key
            elif (found := self.find(key, node.scope)) is not None:
                node.needs[parameter.name] = found
            elif parameter.required:
                unmet = self.hidden if self.by_key.get(key) else self.missing
                unmet[key].append((node, parameter))

    def _owner_of(self, node: Constructor) -> Key:
        """The key whose class has this very method; the class's name when nothing provides one."""
        name: str = getattr(node.call, "__name__", "")
        owners = [key for key in self.by_key if getattr(origin_class(key), name, None) is node.call]
        written_in = getattr(node.call, "__qualname__", "").rpartition(".")[0]
        owners.sort(key=lambda key: getattr(origin_class(key), "__qualname__", "") != written_in)
        return owners[0] if owners else node.name.rpartition(".")[0]
