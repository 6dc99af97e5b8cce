"""``cilium-dbg``, and ``cilium`` in the agent's image: Cilium's command line for this agent.

Source: Cilium 1.17's cilium-dbg; commands that ``cilium`` (cilium-cli), its sysdump and its tests run in
agents' pods. Commands are imported when they are called. All failures exit 1, as in Cilium.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
FAILURE: Final = 1
NAME: Final = "cilium-dbg"

COMMANDS: Final = {
    "bgp": ("hive.dbg.bgp", "Access to BGP control plane"),
    "bpf": ("hive.dbg.bpf.command", "Direct access to local BPF maps"),
    "cgroups": ("hive.dbg.node", "Cgroup metadata"),
    "config": ("hive.dbg.config", "Cilium configuration options"),
    "debuginfo": ("hive.dbg.debuginfo", "Request available debugging information from agent"),
    "encrypt": ("hive.dbg.node", "Manage transparent encryption"),
    "endpoint": ("hive.dbg.endpoint", "Manage endpoints"),
    "fqdn": ("hive.dbg.policy", "Manage fqdn proxy"),
    "identity": ("hive.dbg.policy", "Manage security identities"),
    "ip": ("hive.dbg.policy", "Manage IP addresses and associated information"),
    "kvstore": ("hive.dbg.node", "Direct access to the kvstore"),
    "lrp": ("hive.dbg.service", "Manage local redirect policies"),
    "map": ("hive.dbg.maps", "Access userspace cached content of BPF maps"),
    "metrics": ("hive.dbg.maps", "Access metric status"),
    "monitor": ("hive.dbg.monitor.command", "Display BPF program events"),
    "node": ("hive.dbg.node", "Manage cluster nodes"),
    "nodeid": ("hive.dbg.node", "List node IDs and associated information"),
    "policy": ("hive.dbg.policy", "Manage security policies"),
    "post-uninstall-cleanup": ("hive.dbg.node", "Remove system state installed by Cilium at runtime"),
    "prefilter": ("hive.dbg.monitor.recorder", "Manage XDP CIDR filters"),
    "recorder": ("hive.dbg.monitor.recorder", "Introspect or mangle pcap recorder"),
    "service": ("hive.dbg.service", "Manage services & loadbalancers"),
    "shell": ("hive.agent.shell", "Connect to the Cilium shell"),
    "statedb": ("hive.dbg.statedb", "Inspect StateDB"),
    "status": ("hive.dbg.status", "Display status of daemon"),
    "troubleshoot": ("hive.check.etcd", "Run troubleshooting utilities to check connectivity"),
    "version": ("hive.dbg.debuginfo", "Print version information"),
}
"""Name -> module, and the line of the overview. A module has several under COMMANDS, or one ``command``."""

NOT_BUILT: Final = {
    "envoy": "hive agent runs Envoy itself: cilium-dbg status and hive status show what it serves",
    "loadinfo": "read /proc/loadavg on the node",
    "preflight": "policies are checked by hive policy check",
    "sysdump": "run cilium sysdump outside of the pod, or hive debug inside",
}
"""Cilium's unsupported commands, and their replacements."""


class Group(click.Group):
    """A group that prints its help, and exits 0, without a subcommand; it resolves aliases."""

    def __init__(
        self,
        *args: Any,
        aliases: dict[str, str] | None = None,
        not_built: dict[str, str] | None = None,
        **given: Any,
    ) -> None:
        super().__init__(*args, **given | {"invoke_without_command": True, "no_args_is_help": False})
        self._aliases = {"ls": "list", **(aliases or {})}
        self._not_built = not_built or {}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name; `ls` is `list`.

        Raises click.ClickException for an unsupported one.
        """
        if cmd_name in self._not_built:
            raise click.ClickException(
                f"{ctx.command_path} {cmd_name} is not available with this agent: {self._not_built[cmd_name]}"
            )
        found = super().get_command(ctx, cmd_name)
        return found or super().get_command(ctx, self._aliases.get(cmd_name, ""))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand, or print the help."""
        if not ctx.args and not ctx._protected_args and self.callback is not None:  # noqa: SLF001
            click.echo(ctx.get_help())
            return None
        return super().invoke(ctx)


class _Needed(click.Argument):
    """An argument with a message of its own for its absence."""

    def __init__(self, names: Sequence[str], reason: str, **given: Any) -> None:
        super().__init__(names, **given)
        self._reason = reason

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value. Raises click.ClickException without one."""
        if (self.value_is_missing(value) or not value) and not ctx.resilient_parsing:
            raise click.ClickException(self._reason)
        return super().process_value(ctx, value)


def needed(name: str, reason: str) -> Callable[[Function], Function]:
    """Add an argument to a command, with the message for its absence."""
    return click.argument(name, cls=_Needed, reason=reason)


class _Root(click.Group):
    """The root command; its subcommands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, without importing anything."""
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command. Raises click.ClickException for an unknown one."""
        del ctx
        if cmd_name in NOT_BUILT:
            raise click.ClickException(
                f"{NAME} {cmd_name} is not available with this agent: {NOT_BUILT[cmd_name]}"
            )
        if cmd_name not in COMMANDS:
            raise click.ClickException(f'unknown command "{cmd_name}" for "{NAME}"')
        module = import_module(COMMANDS[cmd_name][0])
        found: click.Command = vars(module).get("COMMANDS", {}).get(cmd_name) or module.command
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. Raises click.ClickException for an answer with unexpected types."""
        try:
            return super().invoke(ctx)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            from hive.dbg.requests import misread

            if not (reason := misread(ctx)):
                raise
            raise click.ClickException(reason) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview, without importing anything."""
        del ctx
        with formatter.section("Available Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(COMMANDS.items())])


@click.command(cls=_Root, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """CLI for interacting with the local Cilium Agent"""


def main() -> NoReturn:
    """Run the command line; exits 0, or 1 for every failure."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; return the exit code. Errors are printed to stderr."""
    try:
        arguments, host = _without_global_options(arguments)
    except click.UsageError as error:
        return _refuse(error.format_message())
    return run_client(cli, NAME, arguments, host)


def run_client(command: click.Command, name: str, arguments: list[str], host: str | None = None) -> int:
    """Run one of Cilium's clients; return its exit code. Errors are printed to stderr."""
    stdout = sys.stdout
    try:
        result = command.main(arguments or ["--help"], prog_name=name, standalone_mode=False, obj=host)
        sys.stdout.flush()
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        usage = context.get_usage() if context is not None else ""
        return _refuse("\n".join(filter(None, (error.format_message(), usage))))
    except (click.Abort, KeyboardInterrupt):
        return FAILURE
    except (BrokenPipeError, SystemExit) as error:
        # The reader of a pipe needs no more: click replaces stdout then, and exits 1.
        if isinstance(error, SystemExit) and sys.stdout is stdout:
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _without_global_options(arguments: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without ``-H``, ``-D`` and ``--config``, which may be anywhere, and the host.

    Raises click.UsageError for an option without its value.
    """
    rest: list[str] = []
    host = None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in {"-H", "--host", "--config"}:
            given = value if equals else next(words, None)
            if given is None:
                raise click.UsageError(f"flag needs an argument: {name}")
            host = given if name != "--config" else host
        elif word.startswith("-H") and not word.startswith("--"):
            host = word[2:]
        elif name not in {"-D", "--debug"}:
            rest.append(word)
            if word == "--":
                rest.extend(words)
    return rest, host


def _refuse(text: str) -> int:
    click.echo(f"Error: {text}", err=True)
    return FAILURE


def root_only(what: str) -> None:
    """Raise click.ClickException unless the user is root."""
    if os.geteuid() != 0:
        raise click.ClickException(f'Please run "{what}" command(s) with root privileges.')
