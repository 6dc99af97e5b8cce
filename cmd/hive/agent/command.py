"""``hive agent``: the node agent, from its settings to its exit code."""

import ctypes
import gc
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from hive.output import QUIET

if TYPE_CHECKING:
    from lifecycle import GraphError, Hive
    from lifecycle.settings import Option

HELP = {"--help", "-h"}
USAGE, BROKEN = 2, 2

YAML_NAME = "cilium-config.yaml"
"""A file of the config-dir that may hold several settings, an extension of ours."""

ENV_PREFIX = "CILIUM_"
"""Of environment variables, as Cilium's agent has it."""

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h

FILE_FLAG = "config"
"""The flag that may name a YAML file of settings."""

pass_settings = {"ignore_unknown_options": True}
"""Context settings of a command that takes the agent's settings."""

settings_argument = click.argument(
    "settings", nargs=-1, type=click.UNPROCESSED, metavar="[--config-dir=DIR] [--SETTING=VALUE]..."
)


@click.command(context_settings=pass_settings, add_help_option=False)
@settings_argument
@click.pass_context
def command(ctx: click.Context, settings: tuple[str, ...]) -> int:
    """Run the agent on this node until SIGTERM, SIGINT or SIGHUP.

    A setting is a flag, else a variable (CILIUM_MTU for --mtu), else a line of the YAML file given as
    --config, else a file named like the setting in the --config-dir, else its default.
    """
    gc.disable()  # importing makes next to no garbage: looking for it takes 10 ms of the start
    share_heap()
    from lifecycle import configure_logging

    configure_logging()
    hive = build(settings)
    gc.freeze()  # what is imported stays: no collection has to look through it again
    gc.enable()
    return run_or_help(ctx, hive, settings)


def share_heap() -> None:
    """Have all threads take memory from one heap of glibc's, before there is a thread; elsewhere nothing.

    Else each gets one of its own, and keeps what libbpf takes and frees: some 4 MB after a start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def run_or_help(ctx: click.Context, hive: "Hive", settings: Sequence[str]) -> int:
    """Run a hive to its end, or print its settings if --help is among the words; the exit code."""
    from lifecycle import GraphError, configure_logging

    try:
        if HELP & set(settings):
            click.echo(ctx.get_help())
            click.echo(f"\n{settings_help(hive)}")
            return 0
        debug = any(one.option.name == "debug" and one.value for one in hive.settings())
    except GraphError as error:
        return refuse(error)
    if debug:
        configure_logging("debug")
    import anyio

    from lifecycle.process import measured_loop

    return anyio.run(hive.run_to_the_end, backend_options={"loop_factory": measured_loop})


def build(settings: Sequence[str], environment: Mapping[str, str] = os.environ) -> "Hive":
    """The hive of the agent with these flags, the environment and the config-dir. Nothing is started.

    Its config-dir is that of the whole of Cilium: keys that other programs read are passed over, and any
    other that is unknown is a warning.
    """
    from cells.agent import agent
    from cells.unsupported import OTHERS
    from lifecycle import Hive, Sources

    argv = [word for word in settings if word not in HELP]
    sources = Sources(
        argv, environment, prefix=ENV_PREFIX, yaml_name=YAML_NAME, file_flag=FILE_FLAG, others=OTHERS
    )
    return Hive(agent, settings=sources, name="hive", refuse_circles=True)


def refuse(error: "GraphError", broken: int = BROKEN) -> int:
    """Say why the hive cannot be: a line per wrong setting, or all faults of the graph; the exit code."""
    from lifecycle import SettingsError

    if not isinstance(error, SettingsError):
        click.echo(f"hive: {error}", err=True)
        return broken
    for fault in error.faults:
        click.echo(f"hive: {fault.text}", err=True)
    return USAGE


def settings_help(hive: "Hive") -> str:
    """Every setting with its type, default and help, for the eye. Raises GraphError."""
    formatter = click.HelpFormatter(width=80)
    with formatter.section("Settings"):
        formatter.write_dl(
            [
                (f"--{option.name} {option.type_text}", f"{option.help} {_default(option)}".strip())
                for option in sorted(hive.options(), key=lambda option: option.name)
            ],
            col_max=26,
        )
    return formatter.getvalue().rstrip("\n")


def _default(option: "Option") -> str:
    text = "required" if option.required else option.default_text or "none"
    return click.style(f"[{text}]", fg=QUIET)
