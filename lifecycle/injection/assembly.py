"""The flat form of cells: modules, constructors, roots."""

import re
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import msgspec

from lifecycle.errors import Fault
from lifecycle.hints.keys import Key, key_of, type_name
from lifecycle.hints.named import Named
from lifecycle.hints.places import Place, has_place
from lifecycle.injection.callables import as_function
from lifecycle.injection.cells import (
    Cell,
    ConfigCell,
    DecorateCell,
    GroupCell,
    InvokeCell,
    ModuleCell,
    ProvideCell,
    ReplaceCell,
    SupplyCell,
)
from lifecycle.injection.constructors import Constructor, Frame, Kind, Parameter, Part, Scope
from lifecycle.injection.fakes import type_mismatches, value_mismatches
from lifecycle.injection.signatures import Signature, describe, refused, signature_for_type
from lifecycle.settings.options import Settings, unreadable

__all__ = ["Assembly", "assemble", "construct_only"]

_MODULE_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_END = object()

Level = tuple[Iterator[Cell], Scope, Frame]
"""Cells that are not read yet, with their module and the decorations around them."""


class Assembly(msgspec.Struct):
    """All declarations of the cells, in order."""

    root: Scope
    frame: Frame
    """The frame of the hive itself."""
    scopes: list[Scope]
    constructors: list[Constructor] = msgspec.field(default_factory=list)
    """Provided (with the parts of their results), supplied and configured constructors."""
    decorators: list[Constructor] = msgspec.field(default_factory=list)
    """Decorators, with the parts of their results."""
    frames: list[Frame] = msgspec.field(default_factory=list)
    """Frames with decorations."""
    replaces: list[Constructor] = msgspec.field(default_factory=list)
    invokes: list[Constructor] = msgspec.field(default_factory=list)
    faults: list[Fault] = msgspec.field(default_factory=list)

    @property
    def providers(self) -> list[Constructor]:
        """All nodes that provide a value: constructors, decorators, fakes."""
        return [*self.constructors, *self.decorators, *self.replaces]


def assemble(root: Scope, cells: Iterable[Cell]) -> Assembly:
    """Read all cells, at any depth of nesting, and the hints of every function in them."""
    assembly = Assembly(root, Frame(), [root])
    levels: list[Level] = [(iter(cells), root, assembly.frame)]
    while levels:
        cell = next(levels[-1][0], _END)
        if cell is _END:
            levels.pop()
        elif (inner := _add(cell, *levels[-1][1:], assembly)) is not None:
            levels.append(inner)
    assembly.faults += _duplicate_scopes(assembly.scopes)
    return assembly


def _add(cell: object, scope: Scope, frame: Frame, assembly: Assembly) -> Level | None:
    """Read one cell; the caller reads the cells inside it."""
    match cell:
        case ModuleCell():
            return iter(cell.cells), _scope(cell, scope, assembly), Frame(frame)
        case GroupCell():
            return iter(cell.cells), scope, frame
        case DecorateCell():
            return iter(cell.cells), scope, _decorated(cell, scope, frame, assembly)
        case ProvideCell():
            for call in cell.constructors:
                assembly.constructors += _made("provide", call, scope, frame, cell)
        case ConfigCell():
            assembly.constructors += [_configured(struct, scope, cell) for struct in cell.structs]
        case InvokeCell():
            assembly.invokes += [_invoked(call, scope, frame, cell.place) for call in cell.functions]
        case SupplyCell():
            assembly.constructors.append(_supplied(cell, scope))
        case ReplaceCell():
            name = type_name(cell.key)
            fake = Constructor("replace", cell.fake, name, cell.key, scope, cell_place=cell.place)
            assembly.replaces.append(fake)
        case _:
            raise TypeError(
                f"{cell!r} in {scope.id} at {scope.place} is not a cell: "
                "use module(), provide(), invoke() and their like"
            )
    return None


def _decorated(cell: DecorateCell, scope: Scope, frame: Frame, assembly: Assembly) -> Frame:
    """Return the scope of a decoration; without cells, the enclosing one."""
    around = Frame(frame) if cell.cells else frame
    if not around.decorators:
        assembly.frames.append(around)
    for node in _made("decorate", cell.function, scope, around.parent, cell):
        assembly.decorators.append(node)
        if node.key is not None:
            around.decorators.setdefault(node.key, []).append(node)
    return around


def _scope(cell: ModuleCell, parent: Scope, assembly: Assembly) -> Scope:
    full_id = cell.id if parent.parent is None else f"{parent.id}.{cell.id}"
    scope = Scope(full_id, cell.title, parent, cell.place)
    if _MODULE_ID.fullmatch(cell.id) is None:
        text = f"module id {cell.id!r} at {cell.place}: expected kebab-case such as host-ip-sync"
        assembly.faults.append(Fault("module", text))
    if not isinstance(cell.title, str):
        text = (
            f"module {cell.id!r} at {cell.place}: its title is {type_name(type(cell.title))}, expected a text"
        )
        assembly.faults.append(Fault("module", text, ("do: module(id, title, *cells)",)))
    assembly.scopes.append(scope)
    return scope


def _duplicate_scopes(scopes: list[Scope]) -> Iterator[Fault]:
    by_id: dict[str, list[Scope]] = {}
    for scope in scopes:
        by_id.setdefault(scope.id, []).append(scope)
    for full_id, same in by_id.items():
        if len(same) > 1 and same[0].parent is None:
            places = tuple(f"at {scope.place}" for scope in same[1:])
            do = "do: rename the module, or the hive: Hive(..., name=...)"
            yield Fault("module", f"a module has the id of the hive itself, {full_id}", (*places, do))
        elif len(same) > 1:
            count = "two" if len(same) == 2 else len(same)
            places = tuple(f"at {scope.place}" for scope in same)
            yield Fault("module", f"{count} modules have the id {full_id}", places)


def _made(
    kind: Kind,
    call: Callable[..., object],
    scope: Scope,
    frame: Frame | None,
    cell: ProvideCell | DecorateCell,
) -> Iterator[Constructor]:
    """Return the node of a constructor, and one for each of its results if there are several."""
    call = as_function(call)
    signature = describe(call, decorates=kind == "decorate")
    name, private, named = type_name(call), False, ""
    also: tuple[Key, ...] = ()
    faults = signature.faults
    if isinstance(cell, ProvideCell):
        private, named = cell.private, cell.name
        if not isinstance(cell.as_, tuple):
            faults += (f"as_ is {type_name(cell.as_)}: expected a tuple of types",)
        elif cell.as_:
            also = tuple(map(key_of, cell.as_))
            faults += tuple(_conversion_faults(signature, also, alone=len(cell.constructors) == 1))
    whole = Constructor(
        kind,
        call,
        name,
        _named(signature.result, named),
        scope,
        private,
        parameters=signature.parameters,
        faults=faults,
        cell_place=None if has_place(call) else cell.place,
        stands_at=cell.place,
        parts=signature.parts,
        also=also,
        frame=frame,
    )
    yield whole
    if whole.key is not None:
        for key in also:
            yield Constructor(
                "part",
                call,
                f"{name} as {type_name(key)}",
                _named(key, named),
                scope,
                private,
                parameters=(Parameter("result", whole.key),),
                stands_at=cell.place,
                whole=whole,
                part=Part(None, key),
                frame=frame,
            )
    for part in signature.parts:
        shown = f"{name}[{part.at}]" if isinstance(part.at, int) else f"{name}.{part.at}"
        yield Constructor(
            "part",
            call,
            shown,
            _named(part.key, named),
            scope,
            private,
            needs={"result": whole},
            stands_at=cell.place,
            whole=whole,
            part=part,
        )


def _conversion_faults(signature: Signature, also: tuple[Key, ...], *, alone: bool) -> Iterator[str]:
    """Return why the result of a constructor cannot also be provided under these types."""
    if not alone:
        yield "as_ is for one constructor: give each a provide() of its own"
    if signature.parts:
        yield "as_ is for one result, and it has several"
    for key in also:
        if (refusal := refused(key)) is not None:
            yield f"it is provided as {type_name(key)}{refusal}"
        elif signature.result is not None:
            yield from (
                f"it is provided as {type_name(key)}, which it is not: {why}"
                for why in type_mismatches(signature.result, key)
            )


def _named(key: Key | None, name: str) -> Key | None:
    """Return the key with the name that its cell sets."""
    return key_of(Annotated[key, Named(name)]) if name and key is not None else key


def _configured(struct: type[Settings], scope: Scope, cell: ConfigCell) -> Constructor:
    faults = tuple(unreadable(struct, cell.prefix))
    return Constructor(
        "config",
        struct,
        type_name(struct),
        struct,
        scope,
        cell.private,
        cell.prefix,
        faults=faults,
        stands_at=cell.place,
    )


def _supplied(cell: SupplyCell, scope: Scope) -> Constructor:
    key: Key | None = cell.key
    name = type_name(key)
    faults: tuple[str, ...] = ()
    if hasattr(cell.value, "__await__"):
        faults = ("it is awaitable: supply what awaiting it gives",)
    elif (refusal := refused(key)) is not None:
        key, faults = None, (f"it is supplied as {name}{refusal}",)
    elif cell.checked and (why := tuple(value_mismatches(cell.value, key))):
        faults = (f"it is supplied as {name}, which it is not", *why)
    return Constructor("supply", cell.value, name, key, scope, cell_place=cell.place, faults=faults)


def _invoked(call: Callable[..., object], scope: Scope, frame: Frame, place: Place) -> Constructor:
    function: object = call
    if _is_type(call):  # represents its instance in the graph
        function, signature = construct_only, signature_for_type(call)
    else:
        call = function = as_function(call)
        signature = describe(call, invoked=True)
    return Constructor(
        "invoke",
        function,
        type_name(call),
        None,
        scope,
        private=True,
        parameters=signature.parameters,
        faults=signature.faults,
        cell_place=None if function is call and has_place(call) else place,
        frame=frame,
    )


def _is_type(call: object) -> bool:
    return isinstance(call, type | typing.NewType) or typing.get_origin(call) is not None


def construct_only(instance: object) -> None:
    """Do nothing: an invoked type is only built."""
