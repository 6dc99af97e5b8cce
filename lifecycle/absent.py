"""Importing a library without what it would only like to have.

Needs:  nothing.
Gives:  absent().

structlog imports rich to draw tracebacks, dependency-injector YAML, pydantic-settings and web frameworks to
read from them: together up to 200 ms of every start, for things a hive never asks of them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["absent"]


@contextmanager
def absent(*modules: str) -> Iterator[None]:
    """Inside the block, importing these fails as if they were not installed; those imported before stay."""
    hidden = [name for name in modules if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
