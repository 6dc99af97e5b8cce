"""Order and cycles of a graph, without recursion: chains may be thousands deep.

Needs:  constructors whose needs are connected.
Gives:  order() and cycles().
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from lifecycle.constructors import Constructor

__all__ = ["cycles", "order"]

Left = dict[Constructor, None]  # a set that keeps its order


def order(roots: Iterable[Constructor]) -> list[Constructor]:
    """Everything reachable from the roots, each after all it needs; the same every time.

    In a graph with cycles some arrow of each is ignored.
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


def cycles(nodes: Iterable[Constructor]) -> Iterator[list[Constructor]]:
    """Cycles that share no constructor, short ones: each needs the next, the last needs the first.

    A cycle that shares a constructor with one given is not told: it may be gone when that one is mended.
    """
    left: Left = dict.fromkeys(nodes)
    needs = {node: list(node.needs.values()) for node in left}
    users: dict[Constructor, list[Constructor]] = defaultdict(list)
    for node, needed in needs.items():
        for need in needed:
            users[need].append(node)
    while left:
        _drop_ends(left, needs, users)
        _drop_ends(left, users, needs)
        for start in list(left):
            cycle = _shortest(start, left)
            for node in cycle or [start]:
                del left[node]
            if cycle:
                yield cycle
                break


def _drop_ends(
    left: Left,
    ahead: Mapping[Constructor, list[Constructor]],
    behind: Mapping[Constructor, list[Constructor]],
) -> None:
    """Take away, again and again, whatever has no arrow ahead: it is on no cycle."""
    counts = {node: sum(other in left for other in ahead.get(node, ())) for node in left}
    ends = [node for node, count in counts.items() if count == 0]
    while ends:
        node = ends.pop()
        del left[node]
        for other in behind.get(node, ()):
            if other in left:
                counts[other] -= 1
                if counts[other] == 0:
                    ends.append(other)


def _shortest(start: Constructor, left: Left) -> list[Constructor]:
    """The shortest way from `start` back to it, breadth first; empty when there is none."""
    came_from: dict[Constructor, Constructor] = {}
    frontier = [start]
    while frontier:
        following: list[Constructor] = []
        for node in frontier:
            for need in node.needs.values():
                if need is start:
                    way = [node]
                    while way[-1] is not start:
                        way.append(came_from[way[-1]])
                    return way[::-1]
                if need in left and need not in came_from:
                    came_from[need] = node
                    following.append(need)
        frontier = following
    return []
