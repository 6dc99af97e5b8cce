"""A hive by the name of its variable."""

import sys
from importlib import import_module
from pathlib import Path

from lifecycle.errors import UsageError
from lifecycle.hive.hive import Hive
from lifecycle.injection.cells import Cell

__all__ = ["hive_at"]

EXPECTED = "expected package.module:name, which names a Hive, a Cell, or a function that returns one"


def hive_at(source: str) -> Hive:
    """The hive that ``package.module:name`` names; of a Cell, a hive of that cell alone. It is not started.

    The module is looked for in the working directory, too. Raises UsageError, one line, when there is none,
    and what the module itself raises.
    """
    package, colon, name = source.partition(":")
    if not (package and colon and name):
        raise UsageError(f"{source}: {EXPECTED}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it: the hive may not be installed
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # what the module itself imports
        raise UsageError(f"{source}: {error}; {EXPECTED}") from error
    try:
        thing = getattr(module, name)
    except AttributeError:
        raise UsageError(f"{source}: {package} has no {name}; {EXPECTED}") from None
    if callable(thing) and not isinstance(thing, type | Cell | Hive):
        thing = thing()
    if isinstance(thing, Cell):
        return Hive(thing)
    if not isinstance(thing, Hive):
        raise UsageError(f"{source}: {EXPECTED}, not {type(thing).__name__}")
    return thing
