"""``hive agent``: runs the agent, and prints the help of its settings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hive.agent.process import HELP, build, refuse, run, run_agent
from hive.output import QUIET

if TYPE_CHECKING:
    from lifecycle import Hive
    from lifecycle.settings import Option

WIDTH = 80
"""Columns of the help of settings."""

pass_settings = {"ignore_unknown_options": True}
"""Context settings of a command with the agent's settings as options."""

settings_argument = click.argument(
    "settings", nargs=-1, type=click.UNPROCESSED, metavar="[--config-dir=DIR] [--SETTING=VALUE]..."
)


@click.command(context_settings=pass_settings, add_help_option=False)
@settings_argument
@click.pass_context
def command(ctx: click.Context, settings: tuple[str, ...]) -> int:
    """Run the agent on this node until SIGTERM, SIGINT or SIGHUP.

    A setting is read from, in this order: a flag, an environment variable (CILIUM_MTU for --mtu), the YAML
    file given as --config, a file of its name in the --config-dir, its default.
    """
    if not HELP & set(settings):
        return run_agent(settings)
    return run_or_help(ctx, build(settings), settings)


def run_or_help(ctx: click.Context, hive: "Hive", settings: Sequence[str]) -> int:
    """Run a hive to its end, or print its settings if --help is among the words; return the exit code."""
    from lifecycle import GraphError

    if not HELP & set(settings):
        return run(hive)
    try:
        click.echo(ctx.get_help())
        click.echo(f"\n{settings_help(hive)}")
    except GraphError as error:
        return refuse(error)
    return 0


def settings_help(hive: "Hive") -> str:
    """Return all settings with type, default and help, formatted. Raises GraphError."""
    formatter = click.HelpFormatter(width=WIDTH)
    with formatter.section("Settings"):
        formatter.write_dl(
            [
                (_term(option), f"{option.help} {_default(option)}".strip())
                for option in sorted(hive.options(), key=lambda option: option.name)
            ],
            col_max=26,
        )
    return formatter.getvalue().rstrip("\n")


def _term(option: "Option") -> str:
    """Return the flag and its type, in several lines if its choices need them."""
    first, *others = f"--{option.name} {option.type_text}".split("|")
    lines = [first]
    for one in others:
        lines[-1] += "|"
        if len(lines[-1]) + len(one) > WIDTH - 4:
            lines.append("    ")
        lines[-1] += one
    return "\n".join(lines)


def _default(option: "Option") -> str:
    text = "required" if option.required else option.default_text or "none"
    return click.style(f"[{text}]", fg=QUIET)
