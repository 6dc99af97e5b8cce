"""Cells laid out flat: modules, constructors, roots.

Needs:  cells.
Gives:  Assembly, the list of everything a hive is made of, before anything is resolved.
"""

import re
from collections.abc import Callable, Iterable
from typing import NewType, get_origin

import msgspec

from lifecycle.cells import (
    Cell,
    ConfigCell,
    GroupCell,
    InvokeCell,
    ModuleCell,
    ProvideCell,
    ReplaceCell,
    SupplyCell,
)
from lifecycle.constructors import Constructor, Parameter, Scope, describe
from lifecycle.errors import Fault
from lifecycle.keys import type_name
from lifecycle.places import has_place
from lifecycle.settings import Settings, unreadable

__all__ = ["Assembly", "assemble"]

_MODULE_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)


class Assembly(msgspec.Struct):
    """Everything the cells say, in the order they say it."""

    root: Scope
    scopes: list[Scope] = msgspec.field(default_factory=list)
    constructors: list[Constructor] = msgspec.field(default_factory=list)
    """Those provided, supplied and configured."""
    invokes: list[Constructor] = msgspec.field(default_factory=list)
    replaces: list[Constructor] = msgspec.field(default_factory=list)
    faults: list[Fault] = msgspec.field(default_factory=list)


def assemble(root: Scope, cells: Iterable[Cell]) -> Assembly:
    """Walk the cells and read the hints of every function in them."""
    assembly = Assembly(root, [root])
    for cell in cells:
        _add(cell, root, assembly)
    return assembly


def _add(cell: Cell, scope: Scope, assembly: Assembly) -> None:
    match cell:
        case ModuleCell():
            inner = _scope(cell, scope, assembly)
            for part in cell.cells:
                _add(part, inner, assembly)
        case GroupCell():
            for part in cell.cells:
                _add(part, scope, assembly)
        case ProvideCell():
            assembly.constructors.extend(_provided(call, scope, cell) for call in cell.constructors)
        case ConfigCell():
            assembly.constructors.extend(_configured(struct, scope) for struct in cell.structs)
        case InvokeCell():
            assembly.invokes.extend(_invoked(call, scope, cell) for call in cell.functions)
        case SupplyCell():
            assembly.constructors.append(_supplied(cell, scope))
        case ReplaceCell():
            name = type_name(cell.key)
            fake = Constructor("replace", cell.fake, name, cell.key, scope, cell_place=cell.place)
            assembly.replaces.append(fake)
        case _:
            raise TypeError(f"{cell!r} is not a cell: use module(), provide(), invoke() and their like")


def _scope(cell: ModuleCell, parent: Scope, assembly: Assembly) -> Scope:
    full_id = cell.id if parent.parent is None else f"{parent.id}.{cell.id}"
    scope = Scope(full_id, cell.title, parent, cell.place)
    if _MODULE_ID.fullmatch(cell.id) is None:
        text = f"module id {cell.id!r} at {cell.place}: expected kebab-case such as host-ip-sync"
        assembly.faults.append(Fault("module", text))
    same = [other for other in assembly.scopes if other.id == full_id]
    if same:
        places = tuple(f"at {one.place}" for one in (*same, scope))
        assembly.faults.append(Fault("module", f"two modules have the id {full_id}", places))
    assembly.scopes.append(scope)
    return scope


def _provided(call: Callable[..., object], scope: Scope, cell: ProvideCell) -> Constructor:
    signature = describe(call)
    return Constructor(
        "provide",
        call,
        type_name(call),
        signature.result,
        scope,
        cell.private,
        parameters=signature.parameters,
        faults=signature.faults,
        cell_place=None if has_place(call) else cell.place,
    )


def _configured(struct: type[Settings], scope: Scope) -> Constructor:
    faults = tuple(unreadable(struct))
    return Constructor("config", struct, type_name(struct), struct, scope, faults=faults)


def _supplied(cell: SupplyCell, scope: Scope) -> Constructor:
    faults: tuple[str, ...] = ()
    if hasattr(cell.value, "__await__"):
        faults = ("it is awaitable: supply what awaiting it gives",)
    return Constructor(
        "supply", cell.value, type_name(cell.key), cell.key, scope, cell_place=cell.place, faults=faults
    )


def _invoked(call: Callable[..., object], scope: Scope, cell: InvokeCell) -> Constructor:
    if (
        isinstance(call, type | NewType) or get_origin(call) is not None
    ):  # stands for its instance in the graph
        return Constructor(
            "invoke",
            _instance,
            type_name(call),
            None,
            scope,
            private=True,
            parameters=(Parameter("instance", call),),
            cell_place=cell.place,
        )
    signature = describe(call, invoked=True)
    return Constructor(
        "invoke",
        call,
        type_name(call),
        None,
        scope,
        private=True,
        parameters=signature.parameters,
        faults=signature.faults,
        cell_place=None if has_place(call) else cell.place,
    )


def _instance(instance: object) -> None:
    """Invoked for a class: building the instance is all there is to do."""
