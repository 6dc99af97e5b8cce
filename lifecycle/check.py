"""Every fault of a graph at once, in words that help.

Needs:  a resolution.
Gives:  check(), the faults: what is wrong, whom it concerns (constructor, module, file:line), what to do.
"""

from collections.abc import Iterator

from lifecycle.constructors import Constructor, Parameter
from lifecycle.cycles import cycles
from lifecycle.errors import Fault
from lifecycle.fakes import unlike
from lifecycle.keys import type_name
from lifecycle.near import near
from lifecycle.resolve import Resolution
from lifecycle.settings import Option, options_of

__all__ = ["check"]

SHOWN = 5
"""How many of a kind a message lists before it only counts."""


def check(resolution: Resolution) -> list[Fault]:
    """Every fault, also of constructors that nothing invokes. Replaced constructors have none."""
    return [
        *resolution.assembly.faults,
        *_signatures(resolution),
        *_duplicates(resolution),
        *_missing(resolution),
        *_private(resolution),
        *_cycles(resolution),
        *_replaces(resolution),
    ]


def _signatures(resolution: Resolution) -> Iterator[Fault]:
    for node in resolution.nodes:
        if node.faults:
            kind = "invoke" if node.kind == "invoke" else "constructor"
            yield Fault(kind, f"{node} cannot be used", node.faults)


def _duplicates(resolution: Resolution) -> Iterator[Fault]:
    """Two that are visible from one place: public ones always, private ones when one is above the other."""
    for key, found in resolution.by_key.items():
        if key in resolution.injected:
            places = tuple(f"provided by {node}" for node in found)
            yield Fault("duplicate", f"{type_name(key)} comes from the hive itself", places)
            continue
        clashing = [node for node in found if any(_clash(node, other) for other in found)]
        if clashing:
            places = tuple(f"provided by {node}{' (private)' if node.private else ''}" for node in clashing)
            advice = "keep one, or give them types of their own (NewType)"
            yield Fault(
                "duplicate", f"{type_name(key)} is provided {_times(len(clashing))}", (*places, advice)
            )
    yield from _options(resolution)


def _clash(node: Constructor, other: Constructor) -> bool:
    if node is other or (node.kind == "replace") != (other.kind == "replace") or node.replaced:
        return False
    if not node.private or not other.private:
        return True
    return node.scope.is_inside(other.scope) or other.scope.is_inside(node.scope)


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _options(resolution: Resolution) -> Iterator[Fault]:
    """Two structs with one option: which of them would a flag set?"""
    seen: dict[str, tuple[Option, Constructor]] = {}
    structs = {node.key: node for node in resolution.active if node.kind == "config" and not node.faults}
    for node in structs.values():
        for option in options_of(node.call):
            for name in option.names:
                if name in seen:
                    places = (f"in {seen[name][1]}", f"in {node}")
                    yield Fault("duplicate", f"setting {name} is declared twice", places)
                else:
                    seen[name] = (option, node)


def _missing(resolution: Resolution) -> Iterator[Fault]:
    users = _users(resolution)
    for key, found in resolution.missing.items():
        details = [*_needed_by(found)]
        details += _chain(found[0][0], users)
        provided = (node for node in resolution.active if node.key is not None)
        details += (f"near: {line}" for line in near(key, provided))
        details.append(
            f"do: add a cell that provides it, or in a test supply() or replace({type_name(key)}, ...)"
        )
        yield Fault("missing", f"nothing provides {type_name(key)}", tuple(details))


def _private(resolution: Resolution) -> Iterator[Fault]:
    for key, found in resolution.hidden.items():
        owners = [node for node in resolution.by_key[key] if not node.replaced]
        modules = " and ".join(dict.fromkeys(node.scope.id for node in owners))
        details = [*_needed_by(found), *(f"provided privately by {node}" for node in owners)]
        details.append(f"do: provide() instead of provide_private(), or move who needs it into {modules}")
        yield Fault("private", f"{type_name(key)} is private to {modules}", tuple(details))


def _needed_by(found: list[tuple[Constructor, Parameter]]) -> Iterator[str]:
    for node, parameter in found[:SHOWN]:
        yield f"needed by {node}, as {parameter.name!r}"
    if len(found) > SHOWN:
        yield f"and by {len(found) - SHOWN} more"


def _users(resolution: Resolution) -> dict[Constructor, Constructor]:
    """For each constructor the first that needs it."""
    users: dict[Constructor, Constructor] = {}
    for node in (*resolution.assembly.invokes, *resolution.active):
        for need in node.needs.values():
            users.setdefault(need, node)
    return users


def _chain(node: Constructor, users: dict[Constructor, Constructor]) -> Iterator[str]:
    """Who needs that one, up to the function that is invoked."""
    seen = {node}
    while (user := users.get(node)) is not None and user not in seen:
        yield f"  which {'is invoked as' if user.kind == 'invoke' else 'is needed by'} {user}"
        seen.add(user)
        node = user
    if node.kind != "invoke":
        yield "  which nothing invokes"


def _cycles(resolution: Resolution) -> Iterator[Fault]:
    for cycle in cycles(resolution.active):
        edges = [
            f"{node} needs {type_name(need.key)}"
            for node, need in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        ]
        advice = "do: give what both need to a third, or hand one over in a hook (a Promise)"
        yield Fault(
            "cycle", " -> ".join(type_name(node.key) for node in (*cycle, cycle[0])), (*edges, advice)
        )


def _replaces(resolution: Resolution) -> Iterator[Fault]:
    for fake in resolution.assembly.replaces:
        where = (f"replaced at {fake.place}",)
        if fake.key in resolution.injected:
            yield Fault("replace", f"{fake.name} comes from the hive itself and cannot be replaced", where)
            continue
        if faults := tuple(unlike(fake.call, fake.key)):
            yield Fault("replace", f"the fake is not like {fake.name}", (*faults, *where))
        if not _wanted(fake, resolution):
            lines = (f"near: {line}" for line in near(fake.key, _replaceable(fake, resolution)))
            yield Fault("replace", f"nothing provides or needs {fake.name}", (*where, *lines))


def _wanted(fake: Constructor, resolution: Resolution) -> bool:
    if any(node.replaced for node in resolution.by_key[fake.key]):
        return True
    return any(fake in node.needs.values() for node in resolution.nodes)


def _replaceable(fake: Constructor, resolution: Resolution) -> list[Constructor]:
    return [node for node in resolution.active if node is not fake and node.key is not None]
