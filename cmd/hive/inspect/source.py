"""Resolves the hive that ``hive inspect`` shows: the agent, the operator, or an imported one."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hive.agent.process import build

if TYPE_CHECKING:
    from lifecycle import Hive


def hive_of(source: str | None, settings: Sequence[str]) -> "Hive":
    """Return the hive of the agent, the operator, or ``package.module:name`` (see hive_at()), not started.

    Raises click.UsageError, in one line, if there is none.
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
