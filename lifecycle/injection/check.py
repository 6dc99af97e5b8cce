"""All faults of a graph at once, with suggestions."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from lifecycle.errors import Fault
from lifecycle.hints.keys import hint_text, is_member, type_name
from lifecycle.injection.constructors import Constructor, Parameter, Scope
from lifecycle.injection.cycles import circles_of, cycles
from lifecycle.injection.decorated import decorations, times
from lifecycle.injection.fakes import fake_mismatches
from lifecycle.injection.optionals import optionals
from lifecycle.injection.resolve import Resolution
from lifecycle.injection.similar_types import SimilarTypes
from lifecycle.settings.options import Option, options_of

__all__ = ["check", "circle_faults"]

SHOWN = 5
"""Maximum number of similar items that a message lists; the others are counted."""
CYCLES = 20
"""Maximum number of constructors of a cycle that a message lists."""


def check(resolution: Resolution) -> list[Fault]:
    """Return all faults, including those of unused constructors, but not of replaced ones."""
    similar = SimilarTypes(node for node in resolution.active if (node.whole or node).kind != "decorate")
    return [
        *resolution.assembly.faults,
        *_signatures(resolution),
        *_duplicates(resolution),
        *_missing(resolution, similar),
        *_private(resolution),
        *optionals(resolution),
        *_cycles(resolution),
        *decorations(resolution, similar),
        *_replaces(resolution, similar),
    ]


def _signatures(resolution: Resolution) -> Iterator[Fault]:
    for node in resolution.nodes:
        if node.faults:
            kind = "invoke" if node.kind == "invoke" else "constructor"
            yield Fault(kind, f"{node} cannot be used", node.faults, (node,))


def _duplicates(resolution: Resolution) -> Iterator[Fault]:
    """Two providers visible in one scope: public ones, or private ones of a scope and one inside it."""
    for key, nodes in resolution.by_key.items():
        if key in resolution.injected:
            places = tuple(f"provided by {node}" for node in nodes if node.kind != "replace")
            if places:
                text = f"{type_name(key)} comes from the hive itself"
                yield Fault("duplicate", text, places, tuple(nodes))
            continue
        if len(nodes) == 1 or is_member(key):
            continue
        active = [node for node in nodes if not node.replaced and node.kind != "replace"]
        if clashing := _clashing(active):
            text = f"{type_name(key)} is provided {times(len(clashing))}"
            yield Fault("duplicate", text, tuple(_places(clashing)), tuple(clashing))
        fakes = [node for node in nodes if node.kind == "replace"]
        if len(fakes) > 1:
            places = tuple(f"replaced at {fake.place}" for fake in fakes)
            text = f"{type_name(key)} is replaced {times(len(fakes))}"
            yield Fault("duplicate", text, places, tuple(fakes))
    yield from _options(resolution)


def _places(clashing: Sequence[Constructor]) -> Iterator[str]:
    """Both places; those of the cells if one function is provided twice."""
    is_one = len({node.place for node in clashing}) == 1
    for node in clashing:
        cell = f", in the cell at {node.stands_at}" if is_one and node.stands_at else ""
        yield f"provided by {node}{' (private)' if node.private else ''}{cell}"
    if len({node.prefix for node in clashing if node.kind == "config"}) > 1:
        yield "do: give each module settings of its own: config_private(..., prefix=...)"
    elif is_one and len({node.stands_at for node in clashing}) == 1:
        yield "do: have that cell only once in the hive"
    else:
        yield "do: keep one, or distinguish them: a type of its own (NewType), or Annotated with Named"


def _clashing(nodes: Sequence[Constructor]) -> Sequence[Constructor]:
    if len(nodes) < 2:
        return ()
    if not all(node.private for node in nodes):
        return nodes
    by_scope: dict[Scope, list[Constructor]] = {}
    for node in nodes:
        by_scope.setdefault(node.scope, []).append(node)
    clashing: set[Constructor] = set()
    for node in nodes:
        scope: Scope | None = node.scope
        while scope is not None:
            above = [candidate for candidate in by_scope.get(scope, ()) if candidate is not node]
            clashing.update((node, *above) if above else ())
            scope = scope.parent
    return [node for node in nodes if node in clashing]


def _options(resolution: Resolution) -> Iterator[Fault]:
    """Two structs with the same option: a flag could not set one of them."""
    seen: dict[str, tuple[Option, Constructor]] = {}
    nodes = [node for node in resolution.active if node.kind == "config" and not node.faults]
    structs = {(node.key, node.scope if node.private else None): node for node in nodes}
    for node in structs.values():
        for option in options_of(node.call, node.prefix):
            for name in option.names:
                if name in seen:
                    places = [f"in {seen[name][1]}", f"in {node}"]
                    if seen[name][0].struct is option.struct:
                        places.append(
                            "do: give each a prefix of its own, as in config_private(S, prefix=...)"
                        )
                    text, both = f"setting {name} is declared twice", (seen[name][1], node)
                    yield Fault("duplicate", text, tuple(places), both)
                else:
                    seen[name] = (option, node)


def _missing(resolution: Resolution, similar: SimilarTypes) -> Iterator[Fault]:
    users = _users(resolution)
    for key, dependents in resolution.missing.items():
        details = _needed_by(dependents, users)
        details += (f"near: {line}" for line in similar.lines(key))
        details.append(
            f"do: add a cell that provides it, or in a test supply() or replace({hint_text(key)}, ...)"
        )
        lacks = type_name(key)
        yield Fault("missing", f"nothing provides {lacks}", tuple(details), _concerned(dependents), lacks)


def _private(resolution: Resolution) -> Iterator[Fault]:
    users = _users(resolution)
    for key, dependents in resolution.hidden.items():
        owners = [node for node in resolution.by_key[key] if not node.replaced]
        modules = " and ".join(_shortened(dict.fromkeys(node.scope.id for node in owners)))
        details = _needed_by(dependents, users)
        details += _shortened(f"provided privately by {node}" for node in owners)
        details.append(f"do: provide() instead of provide_private(), or move who needs it into {modules}")
        lacks = type_name(key)
        text = f"{lacks} is private to {modules}"
        yield Fault("private", text, tuple(details), _concerned(dependents), lacks)


def _concerned(dependents: list[tuple[Constructor, Parameter]]) -> tuple[Constructor, ...]:
    return tuple(dict.fromkeys(node for node, _ in dependents))


def _needed_by(
    dependents: list[tuple[Constructor, Parameter]], users: dict[Constructor, Constructor]
) -> list[str]:
    """Return the dependents of a node, and those of the first one."""
    lines = [f"needed by {node}, {parameter.role}" for node, parameter in dependents[:SHOWN]]
    lines[1:1] = _chain(dependents[0][0], users)
    if len(dependents) > SHOWN:
        lines.append(f"and by {len(dependents) - SHOWN} more")
    return lines


def _users(resolution: Resolution) -> dict[Constructor, Constructor]:
    """Return for each constructor its first dependent."""
    users: dict[Constructor, Constructor] = {}
    for node in (*resolution.assembly.invokes, *resolution.active):
        for need in node.needs.values():
            users.setdefault(need, node)
    return users


def _chain(node: Constructor, users: dict[Constructor, Constructor]) -> list[str]:
    """Return the chain of dependents of a node, up to an invoked function."""
    chain = {node: None}
    while (user := users.get(node)) is not None and user not in chain:
        chain[user] = None
        node = user
    above = [user for user in list(chain)[1:] if user.kind != "part"]  # reported with its whole
    lines = _shortened(
        f"  which {'is invoked as' if user.kind == 'invoke' else 'is needed by'} {user}" for user in above
    )
    return lines if node.kind == "invoke" else [*lines, "  which nothing invokes"]


def _shortened(lines: Iterable[str]) -> list[str]:
    """Return the first and the last lines of a long list."""
    every = list(lines)
    left_out = len(every) - 2 * SHOWN
    if left_out <= 1:
        return every
    return [*every[:SHOWN], f"  ... and {left_out} more ...", *every[-SHOWN:]]


def _cycles(resolution: Resolution) -> Iterator[Fault]:
    for knot in cycles(resolution.active):
        for cycle in itertools.islice(knot, CYCLES):
            yield _cycle(cycle)
        if (more := next(knot, None)) is not None:
            yield Fault("cycle", f"there are more through {type_name(more[0].key)}: mend these first")


def _cycle(cycle: list[Constructor]) -> Fault:
    steps = [  # a part of a result represents the whole
        (node, "needs" if node.uses(need) else "comes after", type_name(need.key))
        for node, need in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        if node.kind != "part"
    ]
    names = [steps[-1][2], *(name for _, _, name in steps)]
    edges = (f"{node} {verb} {name}" for node, verb, name in steps)
    advice = "do: give what both need to a third, or hand one over in a hook (a Promise)"
    if any(verb == "comes after" for _, verb, _ in steps):
        advice = "do: leave out the after() that is not needed, or give what both need to a third"
    text = " -> ".join(line.strip() for line in _shortened(names))
    return Fault("cycle", text, (*edges, advice), tuple(cycle))


def _replaces(resolution: Resolution, similar: SimilarTypes) -> Iterator[Fault]:
    needed = {need for node in resolution.nodes for need in node.needs.values() if need.kind == "replace"}
    stood_in = {node.key for node in resolution.assembly.providers if node.replaced}
    for fake in resolution.assembly.replaces:
        places = (f"replaced at {fake.place}",)
        if fake.key in resolution.injected:
            text = f"{fake.name} comes from the hive itself and cannot be replaced"
            yield Fault("replace", text, places, (fake,))
            continue
        if faults := tuple(fake_mismatches(fake.call, fake.key)):
            yield Fault("replace", f"the fake is not like {fake.name}", (*faults, *places), (fake,))
        if fake not in needed and fake.key not in stood_in:
            lines = (f"near: {line}" for line in similar.lines(fake.key, without=fake))
            text = f"nothing provides or needs {fake.name}"
            yield Fault("replace", text, (*places, *lines), (fake,))


def circle_faults(resolution: Resolution) -> Iterator[Fault]:
    """Yield a fault for each circle."""
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
