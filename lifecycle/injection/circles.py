"""Modules that need each other in a circle, and the arrows that tie them.

Why:    modules in a circle can be read, tested and changed only together.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Generic, NamedTuple, TypeVar

from lifecycle.errors import Fault
from lifecycle.hints.keys import type_name
from lifecycle.injection.resolve import Resolution

__all__ = ["Circle", "circle_faults", "circles_of"]

T = TypeVar("T")
Pair = tuple[str, str]


class Circle(NamedTuple, Generic[T]):
    """A largest set of modules each of which needs every other, if only through others."""

    modules: tuple[str, ...]
    ties: tuple[T, ...]
    """The arrows between a few pairs of modules: without them there would be no circle."""


def circle_faults(resolution: Resolution) -> Iterator[Fault]:
    """A fault for each circle."""
    needs = (
        (node.scope.id, need.scope.id, (node, need))
        for node in resolution.order()
        for need in node.needs.values()
    )
    for circle in circles_of(needs):
        lines = [
            f"{node} {'needs' if node.uses(need) else 'comes after'} {type_name(need.key)} of {need.scope.id}"
            for node, need in circle.ties
        ]
        text = f"{len(circle.modules)} modules need each other: {', '.join(circle.modules)}"
        advice = "do: move what several need into a module of its own, or contribute it as a Member"
        concerned = tuple(dict.fromkeys(node for node, _ in circle.ties))
        yield Fault("circle", text, (*lines, advice), concerned)


def circles_of(arrows: Iterable[tuple[str, str, T]]) -> list[Circle[T]]:
    """The circles of (module that needs, module needed, arrow); largest first.

    A module and the modules inside it are no circle: they belong together.
    """
    between: dict[Pair, list[T]] = defaultdict(list)
    for user, used, arrow in arrows:
        if not _inside(user, used) and not _inside(used, user):
            between[user, used].append(arrow)
    found = []
    for knot in sorted(_knots(between), key=lambda one: (-len(one), min(one))):
        within = {pair for pair in between if knot.issuperset(pair)}
        ties = tuple(arrow for pair in _ties(within) for arrow in between[pair])
        found.append(Circle(tuple(sorted(knot)), ties))
    return found


def _inside(module: str, other: str) -> bool:
    return module == other or module.startswith(f"{other}.")


def _ties(pairs: Set[Pair]) -> Iterator[Pair]:
    """Pairs of modules that have to be parted until no circle is left, each the one that parts most."""
    left = set(pairs)
    while knots := _knots(left):
        largest = max(knots, key=len)
        inside = sorted(pair for pair in left if largest.issuperset(pair))
        parted = min(inside, key=lambda pair: _tied(left - {pair}, largest))
        left.discard(parted)
        yield parted


def _tied(pairs: Iterable[Pair], modules: set[str]) -> tuple[int, int]:
    """Of these modules: how large their largest circle is, and how many are in one."""
    sizes = [len(knot) for knot in _knots(pair for pair in pairs if modules.issuperset(pair))]
    return max(sizes, default=0), sum(sizes)


def _knots(pairs: Iterable[Pair]) -> list[set[str]]:
    """Sets of modules that all need each other, of two or more (after Kosaraju), without recursion."""
    used: dict[str, list[str]] = defaultdict(list)
    users: dict[str, list[str]] = defaultdict(list)
    for user, need in pairs:
        used[user].append(need)
        users[need].append(user)
    left = dict.fromkeys(reversed(_finished(used)))
    found = []
    while left:
        first = next(iter(left))
        del left[first]
        knot, frontier = {first}, [first]
        while frontier:
            for user in users[frontier.pop()]:
                if user in left:
                    del left[user]
                    knot.add(user)
                    frontier.append(user)
        if len(knot) > 1:
            found.append(knot)
    return found


def _finished(used: Mapping[str, list[str]]) -> list[str]:
    """Modules in the order in which a search in depth leaves them."""
    done: dict[str, None] = {}
    seen: set[str] = set()
    for root in sorted(used):
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(used.get(root, ())))]
        while path:
            module, needs = path[-1]
            for need in needs:
                if need not in seen:
                    seen.add(need)
                    path.append((need, iter(used.get(need, ()))))
                    break
            else:
                path.pop()
                done[module] = None
    return list(done)
