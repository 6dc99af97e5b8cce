"""Order and cycles of a graph, and circles of modules. Without recursion: chains may be thousands long."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Generic, NamedTuple, TypeVar

from lifecycle.injection.constructors import Constructor

__all__ = ["Circle", "circles_of", "cycles", "order"]

T = TypeVar("T")
Pair = tuple[str, str]

Left = dict[Constructor, None]  # an ordered set


def order(roots: Iterable[Constructor]) -> list[Constructor]:
    """Return the nodes that are reachable from the roots, dependencies first; deterministic.

    In a graph with cycles, some edge of each is ignored.
    """
    done: Left = {}
    for root in roots:
        if root in done:
            continue
        path = {root: iter(root.needs.values())}
        while path:
            node, needs = next(reversed(path.items()))
            for need in needs:
                if need not in done and need not in path:
                    path[need] = iter(need.needs.values())
                    break
            else:
                del path[node]
                done[node] = None
    return list(done)


def cycles(nodes: Iterable[Constructor]) -> Iterator[Iterator[list[Constructor]]]:
    """Return short cycles of each strongly connected component.

    They cover every edge; a constructor may be in several. Each constructor depends on the next one and the
    last on the first; a cycle starts with the one that comes first in `nodes`.
    """
    rank = {node: number for number, node in enumerate(nodes)}
    if _is_acyclic(order(rank)):
        return
    for knot in sorted(_components(rank), key=lambda knot: min(map(rank.__getitem__, knot))):
        yield _cycles(knot, rank)


def _cycles(knot: Collection[Constructor], rank: Mapping[Constructor, int]) -> Iterator[list[Constructor]]:
    reported: set[tuple[Constructor, Constructor]] = set()
    for node in sorted(knot, key=rank.__getitem__):
        for need in node.needs.values():
            if need not in knot or (node, need) in reported:
                continue
            cycle = [node, *_shortest_path(need, node, knot)]
            first = cycle.index(min(cycle, key=rank.__getitem__))
            cycle = cycle[first:] + cycle[:first]
            reported |= set(zip(cycle, cycle[1:] + cycle[:1], strict=True))
            yield cycle


def _is_acyclic(ordered: Iterable[Constructor]) -> bool:
    """Whether dependencies come first; false if edges had to be ignored."""
    before: set[Constructor] = set()
    for node in ordered:
        if not before.issuperset(node.needs.values()):
            return False
        before.add(node)
    return True


def _components(nodes: Mapping[Constructor, int]) -> Iterator[set[Constructor]]:
    """Return the strongly connected components (Kosaraju)."""
    users: dict[Constructor, list[Constructor]] = defaultdict(list)
    for node in nodes:
        for need in node.needs.values():
            users[need].append(node)
    left: Left = dict.fromkeys(node for node in reversed(order(nodes)) if node in nodes)
    while left:
        first = next(iter(left))
        del left[first]
        knot, frontier = {first}, [first]
        while frontier:
            for user in users.get(frontier.pop(), ()):
                if user in left:
                    del left[user]
                    knot.add(user)
                    frontier.append(user)
        if len(knot) > 1 or first in first.needs.values():
            yield knot


def _shortest_path(start: Constructor, end: Constructor, knot: Collection[Constructor]) -> list[Constructor]:
    """Return the shortest path from `start` to `end`, without `end`; a component always has one."""
    came_from: dict[Constructor, Constructor] = {}
    frontier = deque([start])
    while frontier[0] is not end:
        node = frontier.popleft()
        for need in node.needs.values():
            if need in knot and need not in came_from:
                came_from[need] = node
                frontier.append(need)
    way: list[Constructor] = []
    node = end
    while node is not start:
        node = came_from[node]
        way.append(node)
    return way[::-1]


# Sets of modules that all depend on each other.


class Circle(NamedTuple, Generic[T]):
    """A strongly connected component of modules."""

    modules: tuple[str, ...]
    ties: tuple[T, ...]
    """The edges between a few pairs of modules; without them there would be no circle."""


def circles_of(arrows: Iterable[tuple[str, str, T]]) -> list[Circle[T]]:
    """Return the circles of (dependent module, module, edge), largest first.

    Edges between a module and its submodules do not count.
    """
    between: dict[Pair, list[T]] = defaultdict(list)
    for user, used, arrow in arrows:
        if not _is_within(user, used) and not _is_within(used, user):
            between[user, used].append(arrow)
    circles = []
    for modules in sorted(_circles_between(between), key=lambda modules: (-len(modules), min(modules))):
        within = {pair for pair in between if modules.issuperset(pair)}
        ties = tuple(arrow for pair in _pairs_to_separate(within) for arrow in between[pair])
        circles.append(Circle(tuple(sorted(modules)), ties))
    return circles


def _is_within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(f"{parent}.")


def _pairs_to_separate(pairs: Set[Pair]) -> Iterator[Pair]:
    """Return pairs of modules to separate until no circle is left, at each step the most effective pair."""
    left = set(pairs)
    while knots := _circles_between(left):
        largest = max(knots, key=len)
        inside = sorted(pair for pair in left if largest.issuperset(pair))
        parted = min(inside, key=lambda pair: _circle_sizes(left - {pair}, largest))
        left.discard(parted)
        yield parted


def _circle_sizes(pairs: Iterable[Pair], modules: set[str]) -> tuple[int, int]:
    """Return the size of the largest circle of these modules, and the number of modules in circles."""
    sizes = [len(knot) for knot in _circles_between(pair for pair in pairs if modules.issuperset(pair))]
    return max(sizes, default=0), sum(sizes)


def _circles_between(pairs: Iterable[Pair]) -> list[set[str]]:
    """Return the strongly connected components of two or more modules (Kosaraju), without recursion."""
    used: dict[str, list[str]] = defaultdict(list)
    users: dict[str, list[str]] = defaultdict(list)
    for user, need in pairs:
        used[user].append(need)
        users[need].append(user)
    left = dict.fromkeys(reversed(_postorder(used)))
    components = []
    while left:
        first = next(iter(left))
        del left[first]
        component, frontier = {first}, [first]
        while frontier:
            for user in users[frontier.pop()]:
                if user in left:
                    del left[user]
                    component.add(user)
                    frontier.append(user)
        if len(component) > 1:
            components.append(component)
    return components


def _postorder(used: Mapping[str, list[str]]) -> list[str]:
    """Return the modules in the order in which a depth-first search leaves them."""
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
