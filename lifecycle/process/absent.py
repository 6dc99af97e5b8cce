"""Importing a library without what it would only like to have.

Needs:  nothing.
Gives:  absent().

structlog imports rich to draw tracebacks, dependency-injector YAML, pydantic and web frameworks to read from
them: together up to 200 ms of every start, for things a hive never uses.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["absent"]


class _Hiding:
    """Finds that some modules are not there. (None in sys.modules is no error to what Cython compiles.)"""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for what is hidden; leave the rest to others."""
        del path, target
        if fullname in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextmanager
def absent(*modules: str) -> Iterator[None]:
    """Inside the block, importing these fails as if they were not installed; those imported before stay."""
    finder = _Hiding(set(modules))
    sys.meta_path.insert(0, finder)  # importlib.abc, for a base class, costs 5 ms
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
