"""``hive operator``: runs the cluster's operator, from its settings to its exit code."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from hive.agent.command import pass_settings, run_or_help, settings_argument
from hive.agent.process import ENV_PREFIX, FILE_FLAG, HELP, YAML_NAME
from hive.operator.status import status

if TYPE_CHECKING:
    from lifecycle import Hive


VERSION = "--version"
"""The flag of Cilium's operator that installers use."""


class RunByDefault(click.Group):
    """A group that runs the operator if its first word is a setting, or missing."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the implied command."""
        if not args or (args[0].startswith("-") and args[0] not in HELP):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=RunByDefault)
def command() -> None:
    """Run the cluster's operator, or show the status of a running one.

    The default command is run: hive operator --config-dir=/etc/cilium runs with this setting.
    """


@command.command(context_settings=pass_settings, add_help_option=False)
@settings_argument
@click.pass_context
def run(ctx: click.Context, settings: tuple[str, ...]) -> int:
    """Run the operator until SIGTERM, SIGINT or SIGHUP, or until it loses its lease.

    Settings are given as those of hive agent, from the same directory; keys of other programs are ignored.
    """
    if VERSION in settings:
        from importlib import metadata

        click.echo(f"hive {metadata.version('hive-agent')}")
        return 0
    from lifecycle import configure_logging

    configure_logging()
    return run_or_help(ctx, build(settings), settings)


command.add_command(status)


def build(settings: Sequence[str], environment: Mapping[str, str] = os.environ) -> "Hive":
    """Return the operator's hive with these flags, the environment and the config-dir; nothing is started."""
    from cells.operator import operator
    from lifecycle import Hive, Sources

    argv = [word for word in settings if word not in HELP]
    sources = Sources(
        argv, environment, prefix=ENV_PREFIX, yaml_name=YAML_NAME, file_flag=FILE_FLAG, unknown="ignore"
    )
    return Hive(operator, settings=sources, name="hive", refuse_circles=True)
