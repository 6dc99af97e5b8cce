"""Places in source files, for messages."""

import contextlib
import functools
import inspect
import linecache
import re
import sys
import types
from pathlib import Path

import msgspec

from lifecycle.hints.generics import class_of

__all__ = ["Place", "caller", "has_place", "place_of"]


class Place(msgspec.Struct, frozen=True):
    """A file and a line; the text is relative to the working directory if that is shorter."""

    file: str
    line: int

    def __str__(self) -> str:
        path = Path(self.file)
        with contextlib.suppress(FileNotFoundError, ValueError):  # the source is missing, or not a file
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"


def caller() -> Place:
    """Return the place that called the function that calls this."""
    frame = sys._getframe(2)  # noqa: SLF001  # the documented way that costs no traceback
    return Place(frame.f_code.co_filename, frame.f_lineno)


def has_place(obj: object) -> bool:
    """Whether it is a function or class (or ``Box[int]``), for which place_of() finds the definition."""
    if isinstance(obj, types.FunctionType | type):
        return True
    return inspect.isroutine(obj) or class_of(obj) is not None


def place_of(obj: object) -> Place:
    """Where a function or class is defined; a class at its own line, not that of a method."""
    obj = class_of(obj) or obj
    function = inspect.unwrap(obj) if callable(obj) else obj
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if type(code) is types.CodeType:  # a mock imitates having one
        return Place(code.co_filename, code.co_firstlineno)
    return _place_of_class(function if isinstance(function, type) else type(function))


@functools.cache
def _place_of_class(kind: type) -> Place:
    """Find the class statement in the text: inspect parses the whole module, which takes 10 ms."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None:
        return Place(f"<{kind.__module__}>", 0)
    members = [getattr(member, "__code__", None) for member in vars(kind).values()]
    codes = [code for code in members if isinstance(code, types.CodeType)]
    first = min((code.co_firstlineno for code in codes if code.co_filename == file), default=None)
    statement = re.compile(rf"\s*class {re.escape(kind.__name__)}\b")
    starts = [number for number, line in enumerate(linecache.getlines(file), 1) if statement.match(line)]
    if len(starts) > 1 and first is None:  # classes of the same name, without code to locate one
        with contextlib.suppress(OSError, TypeError):
            starts = [inspect.getsourcelines(kind)[1]]
    before = [number for number in starts if first is None or number < first]
    if not before:
        return Place(file, first or 1)
    return Place(file, before[0] if first is None else before[-1])
