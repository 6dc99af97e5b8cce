"""The ``hive`` command: finds the subcommand, and turns what goes wrong into one line and an exit code.

Needs: click.   Gives: main (the console script) and cli (the click group, for tests).
Subcommands are imported when they are called: ``hive status`` answers without loading the agent.
"""

import contextlib
import os
import sys
from importlib import import_module
from typing import NoReturn

import click

USAGE, FAILURE, INTERRUPTED = 2, 1, 130

COMMANDS = {
    "agent": ("hive.agent.command", "Run the agent on this node."),
    "api": ("hive.agent.api", "What can be asked of the agent's REST API."),
    "bpf": ("hive.maps.bpf", "Look at the maps in the kernel."),
    "build-config": (
        "hive.config.build_config.command",
        "Write the agent's configuration directory from several sources.",
    ),
    "cleanup": ("hive.init.cleanup", "Take the agent's traces off this node."),
    "cni": ("hive.init.cni", "Put the CNI plugin on a node, or take its configuration away."),
    "config": ("hive.config.command", "What can be set, and how."),
    "db": ("hive.agent.db", "Look at the tables of the running agent."),
    "completion": ("hive.completion", "Print what makes a shell complete this command."),
    "debug": ("hive.agent.debug", "Collect what a maintainer asks for."),
    "endpoint": ("hive.endpoint.command", "Look at the endpoints of the running agent."),
    "fqdn": ("hive.policy.fqdn", "Look at names that pods ask for, and at those that policies speak of."),
    "identity": ("hive.policy.identity", "Look at security identities."),
    "ip": ("hive.policy.ip", "Look at whose identity packets from an address have."),
    "inspect": ("hive.inspect.command", "Show what the agent is made of, without starting it."),
    "kubernetes": ("hive.agent.kubernetes", "Look at where the agent's objects come from."),
    "lab": ("hive.lab.commands", "Whole nodes on this machine, each in namespaces of its own."),
    "map": ("hive.maps.map", "Look at the maps as the agent writes them."),
    "monitor": ("hive.observe.monitor", "Show drops, traces and verdicts while they happen."),
    "mount-bpffs": ("hive.init.mount_bpffs", "Mount the BPF filesystem, if it is not."),
    "mount-cgroup": ("hive.init.mount_cgroup", "Mount cgroup v2, if it is not."),
    "node": ("hive.agent.node", "Look at the nodes of the cluster."),
    "service": ("hive.services.command", "Look at services and who serves them."),
    "shell": ("hive.agent.shell", "Run commands in the running agent, or any hive with an admin cell."),
    "operator": ("hive.operator.command", "Run the cluster's operator, or ask one how it is."),
    "policy": ("hive.policy.command", "See what network policies do, and what is wrong in them."),
    "status": ("hive.agent.status", "Ask the running agent how it is."),
    "sysctlfix": ("hive.init.sysctlfix", "Keep systemd from switching the reverse path filter on."),
}
"""Name -> module whose ``command`` it is, and the line the overview shows."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        del ctx
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names. Raises click.UsageError, with names that are near."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise click.exceptions.NoSuchCommand(name, possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The overview, without importing anything."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib import metadata  # 20 ms of imports nobody else needs

        click.echo(f"hive {metadata.version('hive-agent')}")
        ctx.exit()


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=False,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def cli() -> None:
    """A hive of cells that gives pods a network."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; exits 0, 1 (it went wrong), 2 (it was asked wrongly) or 130 (interrupted)."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        result = cli.main(arguments, prog_name="hive", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "hive"
        message = " ".join(error.format_message().split()).rstrip(".")
        return _say(f"{message} (see: {where} --help)", USAGE)
    except click.ClickException as error:
        return _say(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe has gone: it has seen enough. Keep Python from complaining at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _say(text: str, code: int) -> int:
    click.echo(f"hive: {text}", err=True)
    return code
