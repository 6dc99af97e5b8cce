"""Imports a library without its optional dependencies.

structlog imports rich to draw tracebacks, dependency-injector imports YAML, pydantic and web frameworks to
read from them: up to 200 ms of every start, for features that a hive never uses.
"""

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

__all__ = ["imports_blocked"]


@contextmanager
def imports_blocked(*modules: str) -> Iterator[None]:
    """A block in which importing these modules fails as if they were not installed; imported ones stay.

    For Python's import statement, None in sys.modules means "not there". Compiled code that uses a plain
    ``import`` would receive None: name what the package itself needs first. Source: the Python language
    reference, 5.3.1, the module cache.
    """
    module_cache: MutableMapping[str, object] = sys.modules  # type: ignore[assignment]  # typed without its None
    hidden = [name for name in modules if name not in module_cache]
    module_cache.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del module_cache[name]
