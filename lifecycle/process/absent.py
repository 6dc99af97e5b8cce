"""Importing a library without what it would only like to have.

structlog imports rich to draw tracebacks, dependency-injector YAML, pydantic and web frameworks to read from
them: together up to 200 ms of every start, for things a hive never uses.
"""

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

__all__ = ["absent"]


@contextmanager
def absent(*modules: str) -> Iterator[None]:
    """Inside the block, importing these fails as if they were not installed; those imported before stay.

    None in sys.modules is what Python's import statement takes for "not there". Where compiled code imports a
    package by a plain ``import``, it would get None: name what the package itself needs first.
    Source: the Python language reference, 5.3.1, the module cache.
    """
    known: MutableMapping[str, object] = sys.modules  # type: ignore[assignment]  # typed without its None
    hidden = [name for name in modules if name not in known]
    known.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del known[name]
