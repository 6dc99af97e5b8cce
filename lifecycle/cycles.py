"""Order and cycles of a graph, without recursion: chains may be thousands deep.

Needs:  constructors whose needs are connected.
Gives:  order() and cycles().
"""

from collections.abc import Iterable, Iterator

from lifecycle.constructors import Constructor

__all__ = ["cycles", "order"]


def order(roots: Iterable[Constructor]) -> list[Constructor]:
    """Everything reachable from the roots, each after all it needs; the same every time."""
    done: dict[Constructor, None] = {}
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
    """One shortest cycle of every knot: each needs the next, the last needs the first."""
    for knot in _knots(nodes):
        yield min((_shortest(start, knot) for start in knot), key=len)


def _knots(nodes: Iterable[Constructor]) -> Iterator[list[Constructor]]:
    """Strongly connected components that hold a cycle (Tarjan, iterative), in order of appearance."""
    number: dict[Constructor, int] = {}
    low: dict[Constructor, int] = {}
    stack: dict[Constructor, None] = {}
    for root in nodes:
        if root in number:
            continue
        path = [(root, iter(root.needs.values()))]
        number[root] = low[root] = len(number)
        stack[root] = None
        while path:
            node, needs = path[-1]
            for need in needs:
                if need not in number:
                    number[need] = low[need] = len(number)
                    stack[need] = None
                    path.append((need, iter(need.needs.values())))
                    break
                if need in stack:
                    low[node] = min(low[node], number[need])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == number[node]:
                    knot = []
                    while not knot or knot[-1] is not node:
                        knot.append(stack.popitem()[0])
                    if len(knot) > 1 or node in node.needs.values():
                        yield sorted(knot, key=number.__getitem__)


def _shortest(start: Constructor, knot: list[Constructor]) -> list[Constructor]:
    """The shortest way from `start` back to it, within its knot: breadth first."""
    inside = set(knot)
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
                if need in inside and need not in came_from:
                    came_from[need] = node
                    following.append(need)
        frontier = following
    raise AssertionError("a knot without a cycle")  # pragma: no cover  # by definition of a knot
