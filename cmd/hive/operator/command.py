"""``hive operator``: the cluster's operator, from its settings to its exit code."""

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
"""As Cilium's operator takes it, and installers ask it."""


class RunUnlessAsked(click.Group):
    """A group that runs the operator when its first word is a setting, or there is none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Its words, with the command they mean."""
        if not args or (args[0].startswith("-") and args[0] not in HELP):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=RunUnlessAsked)
def command() -> None:
    """Run the cluster's operator, or show the status of a running one.

    Without a command it runs: hive operator --config-dir=/etc/cilium is hive operator run with that setting.
    """


@command.command(context_settings=pass_settings, add_help_option=False)
@settings_argument
@click.pass_context
def run(ctx: click.Context, settings: tuple[str, ...]) -> int:
    """Run the operator until SIGTERM, SIGINT or SIGHUP, or until it loses its lease.

    Settings are given as those of hive agent, from the same directory: keys of others are left alone.
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
    """The hive of the operator with these flags, the environment and the config-dir. Nothing is started."""
    from cells.operator import operator
    from lifecycle import Hive, Sources

    argv = [word for word in settings if word not in HELP]
    sources = Sources(
        argv, environment, prefix=ENV_PREFIX, yaml_name=YAML_NAME, file_flag=FILE_FLAG, unknown="ignore"
    )
    return Hive(operator, settings=sources, name="hive", refuse_circles=True)
