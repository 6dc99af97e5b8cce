"""The hive that ``hive inspect`` looks at: the node agent, the operator, or one to import.

Needs: the settings given as flags.   Gives: hive_of().
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import click

from hive.agent.command import build

if TYPE_CHECKING:
    from lifecycle import Hive


def hive_of(source: str | None, settings: Sequence[str]) -> "Hive":
    """The hive of the agent, the operator, or ``package.module:name`` (a Cell or a Hive). It is not started.

    Raises click.UsageError when there is none, in one line.
    """
    if source is None:
        return build(settings)
    if source == "operator":
        from hive.operator.command import build as build_operator

        return build_operator(settings)
    from lifecycle import Cell, Hive, Sources

    thing = _imported(source)
    if isinstance(thing, Hive):
        if settings:
            raise click.UsageError(f"{settings[0]}: {source} is a Hive and has its settings; name its cell")
        return thing
    if isinstance(thing, Cell):
        return Hive(thing, settings=Sources(argv=list(settings), env=os.environ))
    raise click.UsageError(f"--of {source}: expected a Cell or a Hive, not {type(thing).__name__}")


def _imported(source: str) -> object:
    package, colon, name = source.partition(":")
    if not (package and colon and name):
        raise click.UsageError(f"--of {source}: expected operator, or package.module:name")
    if (here := str(os.getcwd())) not in sys.path:  # noqa: PTH109  # sys.path holds texts
        sys.path.insert(0, here)  # as `python -m` has it: the hive may not be installed
    try:
        return getattr(import_module(package), name)
    except ImportError as error:
        raise click.UsageError(f"--of {source}: {error}") from error
    except AttributeError:
        raise click.UsageError(f"--of {source}: {package} has no {name}") from None
