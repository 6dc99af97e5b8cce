"""The ``hive`` command: resolves the subcommand, and turns errors into one line and an exit code.

Subcommands are imported when they are called: ``hive status`` answers without loading the agent.
"""

import contextlib
import os
import sys
from importlib import import_module
from typing import NoReturn

import click

from hive.examples import add_examples

USAGE, FAILURE, INTERRUPTED = 2, 1, 130

COMMANDS = {
    "agent": ("hive.agent.command", "Run the agent on this node."),
    "api": ("hive.agent.api", "List the operations of the agent's REST API."),
    "bgp": ("hive.bgp", "Show BGP sessions and announcements of this node."),
    "bpf": ("hive.maps.bpf", "Show the BPF maps in the kernel."),
    "build-config": (
        "hive.config.build_config.command",
        "Write the agent's configuration directory from several sources.",
    ),
    "check": ("hive.check.command", "Test a cluster's network, through a kubeconfig."),
    "cleanup": ("hive.init.cleanup", "Remove the agent's state from this node."),
    "cni": ("hive.init.cni", "Install the CNI plugin on a node, or remove its configuration."),
    "cluster": ("hive.cluster", "Show agents, operators and pods of all nodes, through a kubeconfig."),
    "config": ("hive.config.command", "Show, compare and change settings."),
    "db": ("hive.agent.db", "Show the tables of the running agent."),
    "completion": ("hive.completion", "Print a shell completion script."),
    "debug": ("hive.agent.debug", "Collect the data for a bug report."),
    "drop-reason": ("hive.observe.drop_reason", "Show the meaning of drop reasons, and what to do."),
    "encryption": ("hive.agent.encryption", "Rotate this node's WireGuard key."),
    "endpoint": ("hive.endpoint.command", "Show the endpoints of the running agent."),
    "fqdn": ("hive.policy.fqdn", "Show DNS names that pods look up, and names that policies select."),
    "health": ("hive.agent.health", "Show which nodes this node reaches, the worst first."),
    "identity": ("hive.policy.identity", "Show security identities."),
    "ip": ("hive.policy.ip", "Show the identity of an address."),
    "inspect": ("hive.inspect.command", "Show the agent's dependency graph, without starting it."),
    "kubernetes": ("hive.agent.kubernetes", "Show where the agent's Kubernetes objects come from."),
    "lab": ("hive.lab.commands", "Run whole nodes on this machine, each in its own network namespaces."),
    "map": ("hive.maps.map", "Show the maps that the agent writes, and its latest writes."),
    "monitor": ("hive.observe.monitor", "Show drops, traces and policy verdicts as they happen."),
    "mount-bpffs": ("hive.init.mount_bpffs", "Mount the BPF filesystem if it is not mounted."),
    "mount-cgroup": ("hive.init.mount_cgroup", "Mount cgroup v2 if it is not mounted."),
    "node": ("hive.agent.node", "Show the nodes of the cluster."),
    "observe": (
        "hive.observe.hubble",
        "Show flows with names of sources and destinations, verdicts and reasons.",
    ),
    "service": ("hive.services.command", "Show services and their backends."),
    "shell": ("hive.agent.shell", "Run commands in the running agent, or any hive with an admin cell."),
    "probe": ("hive.check.probe", "Run the server or the client of hive check, in its pods."),
    "operator": ("hive.operator.command", "Run the cluster's operator, or show the status of a running one."),
    "policy": ("hive.policy.command", "Explain and check network policies."),
    "status": ("hive.agent.status", "Show the status of the running agent."),
    "sysctlfix": ("hive.init.sysctlfix", "Keep systemd from turning on the reverse path filter."),
    "ui": ("hive.ui.command", "Show flows, policy verdicts and nodes on a page in the browser."),
    "version": ("hive.agent.version", "Show the versions of this command and of the agent."),
}
"""Name -> module with a ``command``, and the line of the overview."""

GROUPS = {
    "The cluster": "check cluster",
    "Pods, policies and services": "status endpoint policy service identity ip fqdn bgp node health",
    "Packets and flows": "monitor observe drop-reason ui",
    "Inside the agent": "config db encryption bpf map inspect shell api kubernetes probe debug version",
    "Run it": "agent operator lab",
    "Prepare a node, clean it up": "build-config cni mount-bpffs mount-cgroup sysctlfix cleanup completion",
}
"""The sections of the overview."""


class LazyGroup(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, without importing anything."""
        del ctx
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the first word. Raises click.UsageError, with similar names."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise click.exceptions.NoSuchCommand(name, possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        add_examples(command, (cmd_name,))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview, without importing anything."""
        del ctx
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names.split()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib import metadata  # 20 ms of imports that other commands do not need

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
@click.option("--debug", is_flag=True, help="When the agent refuses a request, show the request.")
def cli(debug: bool) -> None:
    """A Kubernetes network plugin (CNI) on eBPF: its agent, its operator, and tools to inspect them."""
    del debug  # read by the client from the context


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; exits 0, 1 (failure), 2 (usage or configuration) or 130 (interrupted)."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    stdout = sys.stdout
    try:
        result = cli.main(arguments, prog_name="hive", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else _command_of(arguments)
        message = " ".join(error.format_message().split()).rstrip(".")
        if message[1:2].islower():  # click's begin in upper case
            message = f"{message[0].lower()}{message[1:]}"
        return _report(f"{message} (see: {where} --help)", USAGE)
    except click.ClickException as error:
        return _report(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _report("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:
        # The reader of a pipe has closed it: it has seen enough. click replaces stdout then, and exits 1.
        if isinstance(error, SystemExit) and sys.stdout is stdout:
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _command_of(arguments: list[str] | None) -> str:
    """Return the command that the first words name; click's parser reports some errors without it."""
    command: click.Command | None = cli
    found = ["hive"]
    for word in sys.argv[1:] if arguments is None else arguments:
        if not isinstance(command, click.Group):
            break
        if (command := command.get_command(click.Context(command), word)) is not None:
            found.append(word)
    return " ".join(found)


def _report(text: str, code: int) -> int:
    click.echo(f"hive: {text}", err=True)
    return code
