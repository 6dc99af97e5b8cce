"""The hive that ``hive inspect`` looks at: the node agent, the operator, or one to import."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hive.agent.process import build

if TYPE_CHECKING:
    from lifecycle import Hive


def hive_of(source: str | None, settings: Sequence[str]) -> "Hive":
    """The hive of the agent, the operator, or ``package.module:name`` (see hive_at()). It is not started.

    Raises click.UsageError when there is none, in one line.
    """
    if source is None:
        return build(settings)
    if source == "operator":
        from hive.operator.command import build as build_operator

        return build_operator(settings)
    from lifecycle import UsageError
    from lifecycle.command import hive_at

    try:
        hive = hive_at(source)
    except UsageError as error:
        raise click.UsageError(f"--of {error}") from error
    if hive.reads_settings:
        hive.read_settings(settings, os.environ)
    elif settings:
        raise click.UsageError(f"{settings[0]}: {source} has its settings already: no flags are read")
    return hive
