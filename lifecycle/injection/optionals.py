"""Optional dependencies with a provider that cannot be built.

``T | None`` and a default apply if nothing provides T. If a provider exists but cannot be built, using the
default silently would hide the fault.
"""

from collections import defaultdict, deque
from collections.abc import Iterator

from lifecycle.errors import Fault
from lifecycle.hints.keys import type_name
from lifecycle.injection.constructors import Constructor
from lifecycle.injection.resolve import Resolution

__all__ = ["optionals"]

SHOWN = 5
"""Maximum number of similar items that a message lists; the others are counted."""


def optionals(resolution: Resolution) -> Iterator[Fault]:
    """Yield a fault for each broken provider of an optional dependency.

    In a chain of optional dependencies, the one nearest to the fault is reported.
    """
    broken = _broken(resolution)
    if not broken:
        return
    towards = _towards(resolution, broken)
    dependents: dict[Constructor, list[str]] = defaultdict(list)
    behind: set[Constructor] = set()  # nodes that depend on the broken one through an optional dependency
    for node in towards:  # starting at the broken one
        nearer = towards[node]
        if nearer is None:  # the broken one
            continue
        needed = [parameter for parameter in node.parameters if node.needs.get(parameter.name) is nearer]
        if nearer in behind or (needed and not any(parameter.required for parameter in needed)):
            behind.add(node)
    for node in resolution.nodes:
        for parameter in node.parameters:
            need = node.needs.get(parameter.name)
            if need in towards and need not in behind and not parameter.required and not parameter.collect:
                dependents[need].append(f"asked for by {node}, {parameter.role}")
    for need, lines in dependents.items():
        if len(lines) > SHOWN:
            lines[SHOWN:] = [f"and by {len(lines) - SHOWN} more"]
        name = type_name(need.key)
        yield Fault(
            "optional",
            f"{name} is optional, but what provides it is broken",
            (
                *lines,
                f"provided by {need}",
                *_reasons(need, towards, broken),
                f"do: mend it, or leave its cell out: only when nothing provides {name} is there none",
            ),
            (need,),
        )


def _broken(resolution: Resolution) -> dict[Constructor, str]:
    """Return the providers with a fault of their own, with the fault."""
    broken = {node: "which cannot be used" for node in resolution.nodes if node.faults}
    for unmet, why in (
        (resolution.missing, "which nothing provides"),
        (resolution.hidden, "which is private"),
    ):
        for key, dependents in unmet.items():
            for node, _ in dependents:
                broken.setdefault(node, f"which needs {type_name(key)}, {why}")
    return broken


def _towards(resolution: Resolution, broken: dict[Constructor, str]) -> dict[Constructor, Constructor | None]:
    """Return every node that cannot be built, with its dependency nearest to the cause (None: it is the
    cause).
    """
    users: dict[Constructor, list[Constructor]] = defaultdict(list)
    for node in resolution.nodes:
        for need in node.needs.values():
            users[need].append(node)
    towards: dict[Constructor, Constructor | None] = dict.fromkeys(broken)
    frontier = deque(broken)
    while frontier:
        node = frontier.popleft()
        for user in users.get(node, ()):
            if user not in towards:
                towards[user] = node
                frontier.append(user)
    return towards


def _reasons(
    need: Constructor, towards: dict[Constructor, Constructor | None], broken: dict[Constructor, str]
) -> Iterator[str]:
    way, node = 0, need
    while (following := towards[node]) is not None:
        if node.kind != "part" and way < SHOWN:
            yield f"  which needs {type_name(following.key)} from {following}"
        node, way = following, way + (node.kind != "part")
    if way > SHOWN:
        yield f"  ... and {way - SHOWN} more ..."
    yield f"  {broken[node]}"
