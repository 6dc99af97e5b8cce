"""Unused parameters of constructors."""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from lifecycle.hints.generics import class_of
from lifecycle.hints.places import caller
from lifecycle.injection.assembly import assemble, construct_only
from lifecycle.injection.cells import Cell
from lifecycle.injection.constructors import Constructor, Scope

__all__ = ["unused_parameters"]


def unused_parameters(*cells: Cell) -> list[str]:
    """Parameters that constructors and invoked functions never read, one line each, with place.

    Such a parameter misleads the reader: use after() for the order alone, and invoke a type as it is. In a
    test: ``assert unused_parameters(cell) == []``.
    """
    assembly = assemble(Scope("hive", "hive", None, caller()), cells)
    nodes = (*assembly.constructors, *assembly.decorators, *assembly.invokes)
    return [f"{name!r} of {node}" for node in nodes if node.part is None for name in _unread(node)]


def _unread(node: Constructor) -> Iterator[str]:
    function = _body(node.call)
    if function is None:
        return
    read = set(_read(function.__code__))
    yield from (
        parameter.name
        for parameter in node.parameters
        if not parameter.ordering and parameter.name != "self" and parameter.name not in read
    )


def _body(call: object) -> FunctionType | None:
    """Return the function with the parameters; None if it is not written in Python or has no source."""
    if call is construct_only or not callable(call):
        return None
    kind = class_of(call)
    function = inspect.unwrap(call) if kind is None else getattr(kind, "__init__", None)
    function = getattr(function, "__func__", function)
    return function if isinstance(function, FunctionType) else None


def _read(code: CodeType) -> Iterator[str]:
    """Names of local variables that are read, also by nested functions; `del` does not count."""
    yield from code.co_cellvars
    for step in dis.get_instructions(code):
        if "LOAD_FAST" in step.opname:  # from 3.13 on, some instructions load two
            yield from step.argval if isinstance(step.argval, tuple) else (step.argval,)
