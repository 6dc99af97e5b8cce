"""Faults of decorators."""

from collections.abc import Iterator

from lifecycle.errors import Fault
from lifecycle.hints.keys import Key, type_name
from lifecycle.injection.constructors import Constructor
from lifecycle.injection.resolve import Resolution
from lifecycle.injection.similar_types import SimilarTypes

__all__ = ["decorations", "times"]


def decorations(resolution: Resolution, similar: SimilarTypes) -> Iterator[Fault]:
    """Return faults of types that are decorated twice in one scope, or that have no provider."""
    for frame in resolution.assembly.frames:
        for key, nodes in frame.decorators.items():
            name = type_name(key)
            places = tuple(f"decorated by {node}" for node in nodes)
            if key in resolution.injected:
                yield Fault("decorate", f"{name} comes from the hive itself and cannot be decorated", places)
            elif len(nodes) > 1:
                advice = "do: put one inside the other: decorate(outer, decorate(inner, ...))"
                yield Fault(
                    "duplicate", f"{name} is decorated {times(len(nodes))} in one place", (*places, advice)
                )
            elif not nodes[0].replaced and not _is_there(key, nodes[0], resolution):
                near = (f"near: {line}" for line in similar.lines(key))
                yield Fault(
                    "decorate", f"nothing provides {name}, so there is nothing to decorate", (*places, *near)
                )


def times(count: int) -> str:
    """Return the number as text: twice, 3 times."""
    return "twice" if count == 2 else f"{count} times"


def _is_there(key: Key, node: Constructor, resolution: Resolution) -> bool:
    """Whether the key has a provider; if not, its decorator is reported as missing it."""
    requested = any(parameter.key == key for parameter in (node.whole or node).parameters)
    return requested or any(resolution.bare(key, node.scope))
