"""Imports a hive by the name of its variable."""

import inspect
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from lifecycle.errors import HiveError, UsageError
from lifecycle.hints.places import Place
from lifecycle.hive.hive import Hive
from lifecycle.injection.cells import Cell

__all__ = ["hive_at"]

EXPECTED = "expected package.module:name, which names a Hive, a Cell, or a function that returns one"


def hive_at(source: str) -> Hive:
    """Return the hive that ``package.module:name`` names; for a Cell, a hive of that cell alone.

    It is not started.

    The module may be in the working directory. Raises UsageError, one line, if there is none, and HiveError,
    one line, for errors of the module or the function.
    """
    package, colon, name = source.partition(":")
    if not (package and colon and name):
        raise UsageError(f"{source}: {EXPECTED}")
    if (cwd := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, cwd)  # like `python -m`: the hive may not be installed
    try:
        module = import_module(package)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{package}.".startswith(f"{missing}."):  # an import of the module itself
            why = f"its import failed: {_raised(error)}; python -c 'import {package}' shows how"
            raise HiveError(f"{source}: {why}") from error
        raise UsageError(f"{source}: {error}; {EXPECTED}") from error
    try:
        target = getattr(module, name)
    except AttributeError:
        raise UsageError(f"{source}: {package} has no {name}; {EXPECTED}") from None
    if callable(target) and not isinstance(target, type | Cell | Hive):
        target = _result(source, target)
    if isinstance(target, Cell):
        return Hive(target)
    if not isinstance(target, Hive):
        raise UsageError(f"{source}: {EXPECTED}, not {type(target).__name__}")
    return target


def _result(source: str, function: Callable[..., object]) -> object:
    """Return the result of a function without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsageError(f"{source}: {error}: expected a function without parameters") from None
    try:
        result = function()
    except HiveError:
        raise
    except Exception as error:
        raise HiveError(f"{source}: it raised {_raised(error)}") from error
    if inspect.iscoroutine(result):
        result.close()
    return result


def _raised(error: Exception) -> str:
    """Return the error in one line, with the innermost place in the source; a syntax error has its own."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")
    ]
    place = f" at {Place(frames[-1].filename, frames[-1].lineno or 0)}" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" + ("" if isinstance(error, SyntaxError) else place)
