"""``hive lab``: create, list, enter, restart and remove nodes, and show the demo."""

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from hive.agent.command import pass_settings, settings_argument
from hive.lab import cgroups
from hive.lab.check import check
from hive.lab.cluster import MOST_NODES, TUNNEL, Cluster, add_pod
from hive.lab.cluster.commands import up_cluster
from hive.lab.cluster.manifests import Manifests, namespace_object
from hive.lab.cluster.network import MOST_SEGMENTS
from hive.lab.names import name_option, node_named, nodes_named, number_option
from hive.lab.node import NODE_ADDRESS, Lab, LabError, create, destroy, exclusive, labs, need_root
from hive.lab.objects import apply, delete, get
from hive.output import BAD, GOOD, json_text, output_option, shown_as_document, table
from hive.signals import signals_as_interrupts

CANNOT_EXECUTE, NOT_FOUND = 126, 127
SOURCES = ("--manifests-dir", "--k8s-api-server", "--k8s-kubeconfig-path", "--config-dir")
"""Settings that select another source of objects than the lab's manifests."""


@click.group()
def command() -> None:
    """Run whole nodes on this machine, each in network namespaces of its own."""


for _of_objects in (apply, delete, get, check):
    command.add_command(_of_objects)


@command.command(context_settings=pass_settings)
@settings_argument
@name_option()
@click.option(
    "--pods",
    "count",
    type=click.IntRange(0, 250),
    default=2,
    show_default=True,
    help="Least number of pods.",
)
@click.option("--nodes", type=click.IntRange(1, MOST_NODES), help="Make a cluster of this many nodes.")
@click.option(
    "--segments",
    type=click.IntRange(1, MOST_SEGMENTS),
    default=1,
    show_default=True,
    help="Spread the nodes over this many networks, with a router between them.",
)
@click.option("--tunnel", is_flag=True, help="Nodes reach each other's pods through VXLAN, not by routes.")
@click.option("--etcd", is_flag=True, help="Share nodes, identities and pods through etcd.")
@click.option("--bgp", is_flag=True, help="Put a router (FRR) beside the nodes, to which they announce pods.")
def up(
    lab: Lab,
    count: int,
    nodes: int | None,
    segments: int,
    tunnel: bool,
    etcd: bool,
    bgp: bool,
    settings: tuple[str, ...],
) -> int:
    """Make a node with a running agent and pods; what is there already stays.

    With --nodes it is several, joined by a bridge, that reach each other's pods: NAME-1, NAME-2, and so on.

    Settings are the agent's, as in --enable-policy=always. One that runs already keeps its own.
    """
    need_root()
    if settings and (wrong := _refused(settings)):
        return wrong
    if segments != 1 and nodes is None:
        raise LabError("--segments is of a cluster: say how many nodes it has with --nodes")
    if etcd and nodes is None:
        raise LabError("--etcd is of a cluster: say how many nodes it has with --nodes")
    if bgp and nodes is None:
        raise LabError("--bgp is of a cluster: say how many nodes it has with --nodes")
    if tunnel:
        settings = (TUNNEL, *settings)
    with signals_as_interrupts(), exclusive():
        if nodes is not None:
            up_cluster(Cluster.of(lab), nodes, segments, count, settings, etcd=etcd, bgp=bgp)
        else:
            _up(lab, count, settings)
    return 0


def _up(lab: Lab, count: int, settings: tuple[str, ...]) -> None:
    """Create a node without a cluster."""
    from hive.lab import agent_process, pods

    fresh = not lab.exists
    if fresh:
        destroy(lab)  # an incomplete one
        create(lab)
        if not any(one.startswith(SOURCES) for one in settings):
            Manifests([lab]).write("namespaces", [namespace_object()])
    try:
        pid = agent_process.running(lab)
        if pid is None:
            pid = agent_process.start(lab, *(settings or agent_process.last_settings(lab)))
            click.echo(f"{lab.name}  starting the agent, pid {pid}")
        elif settings:
            _too_late(lab, settings)
        agent_process.wait_ready(lab, pid)
        for pod in (f"pod-{number}" for number in range(1, count + 1)):
            if pod not in lab.pods():
                has_objects = lab.manifests.is_dir()
                attached = (
                    add_pod(Manifests([lab]), lab, NODE_ADDRESS, pod) if has_objects else pods.add(lab, pod)
                )
                click.echo(f"{lab.name}  {pod} attached, {attached.ipv4}")
    except BaseException:
        if fresh:
            destroy(lab)
        raise
    click.echo(f"{lab.name}  up at {NODE_ADDRESS} with pods {', '.join(lab.pods()) or 'none'}")
    click.echo(f"Look around:  hive lab exec --name {lab.name} -- hive endpoint list")


def _too_late(lab: Lab, settings: tuple[str, ...]) -> NoReturn:
    raise LabError(
        f"the agent of node {lab.name} runs already, and settings count at its start: "
        f"restart it with them (hive lab restart --name {lab.name} {' '.join(settings)})"
    )


def _refused(settings: tuple[str, ...]) -> int:
    """Report settings that the agent refuses; return the exit code, 0 if there are none."""
    from hive.agent.process import build, refuse
    from lifecycle import GraphError

    try:
        build(settings, {}).settings()
    except GraphError as error:
        return refuse(error)
    return 0


@command.command("list")
@output_option
def list_nodes(output: str) -> None:
    """List the nodes of this machine, their agents and pods."""
    from hive.lab import agent_process

    nodes = [(lab, lab.exists, agent_process.running(lab), lab.pods()) for lab in labs()]
    keys = ("name", "complete", "agent_pid", "pods")
    rows = [dict(zip(keys, (lab.name, *rest), strict=True)) for lab, *rest in nodes]
    if shown_as_document(rows, output):
        return
    if not nodes:
        click.echo("No lab node on this machine. Make one: hive lab up")
        return
    lines = [("NODE", "AGENT", "PODS")]
    for lab, complete, pid, pods in nodes:
        state = f"pid {pid}" if pid else "not running" if complete else "half made"
        lines.append((lab.name, click.style(state, fg=GOOD if pid else BAD), " ".join(pods) or "none"))
    for line in table(lines):
        click.echo(line)


@command.command("exec", context_settings={"ignore_unknown_options": True})
@name_option()
@number_option
@click.option("--pod", help="In this pod instead of the node.")
@click.option(
    "--outside", is_flag=True, help="As a client outside: in the network that the node's link leads to."
)
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def execute(lab: Lab, number: int | None, pod: str | None, outside: bool, arguments: tuple[str, ...]) -> None:
    """Run a command inside a node, one of its pods, or outside; exits with the command's code."""
    need_root()
    if pod and outside:
        raise click.UsageError("--pod and --outside are two places: choose one")
    node = node_named(lab, number)
    if outside:
        namespaces = Cluster(node.cluster).network.open() if node.cluster else node.open_outside()
    else:
        namespaces = node.open_pod(pod) if pod else node.open()
    if not pod and not outside:  # as a process of the node, which services at sockets are served to
        cgroups.join(node.name)
    directory = Path.cwd()
    namespaces.enter()
    if directory.is_dir():
        os.chdir(directory)
    # The hive that is running is found in there, too, if only in its virtual environment.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((path, str(Path(sys.executable).parent)))
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - the command the person typed, word by word
    except FileNotFoundError:
        click.echo(f"hive: {arguments[0]}: no such command", err=True)
        raise click.exceptions.Exit(NOT_FOUND) from None
    except OSError as error:
        click.echo(f"hive: {arguments[0]}: {error.strerror}", err=True)
        raise click.exceptions.Exit(CANNOT_EXECUTE) from None


@command.command()
@name_option()
@click.option("--all", "everything", is_flag=True, help="All nodes of this machine.")
def down(lab: Lab, everything: bool) -> None:
    """Remove a node and everything in it, or all nodes of a cluster. A missing node is not an error."""
    need_root()
    from hive.lab import agent_process

    with signals_as_interrupts(), exclusive():
        for one in labs() if everything else nodes_named(lab):
            there = one.directory.exists()
            if one.cluster:
                Cluster.of(one).remove([one])
            else:
                agent_process.terminate(one)
                destroy(one)
            click.echo(f"{one.name}  {'removed' if there else 'is not there'}")


@command.command(context_settings=pass_settings)
@settings_argument
@name_option()
def restart(lab: Lab, settings: tuple[str, ...]) -> int:
    """Restart the agent of a node, or those of all nodes of a cluster, with the settings it had.

    Settings that are given here are added, as in --enable-policy=always, and stay.
    """
    need_root()
    if settings and (wrong := _refused(settings)):
        return wrong
    from hive.lab import agent_process

    with signals_as_interrupts(), exclusive():
        for one in nodes_named(lab):
            node = node_named(one)
            if not agent_process.terminate(node):
                raise LabError(f"the agent of node {node.name} does not end: see {node.agent_log}")
            pid = agent_process.start(node, *agent_process.last_settings(node), *settings)
            agent_process.wait_ready(node, pid)
            click.echo(f"{node.name}  the agent is restarted, pid {pid}")
    return 0


@command.command()
@name_option()
@number_option
@click.option("--etcd", is_flag=True, help="The etcd of the cluster instead.")
def crash(lab: Lab, number: int | None, etcd: bool) -> None:
    """Kill the agent of a node with -9, as a machine that is out of memory would; pods stay."""
    need_root()
    from hive.lab import agent_process

    node = node_named(lab, number)
    if etcd:
        Cluster(node.cluster).store.crash()
    else:
        agent_process.crash(node)
    click.echo(f"{node.cluster if etcd else node.name}  {'etcd' if etcd else 'the agent'} is killed")


@command.command()
@name_option()
@number_option
def path(lab: Lab, number: int | None) -> None:
    """Print the directory of a node: agent.log, cni/ (its network configuration), manifests/."""
    click.echo(node_named(lab, number).directory)


@command.command()
@name_option("demo")
@click.option("--json", "as_json", is_flag=True, help="Print only the result, as JSON.")
@click.option(
    "--part",
    type=click.Choice(["1", "2", "3", "4", "5"]),
    help="Only this part: 1, one node; 2, two nodes; 3, services; 4, policies; 5, a BGP router (needs FRR).",
)
def demo(lab: Lab, as_json: bool, part: str | None) -> None:
    """Show nodes, services and policies under traffic, in a minute. Exits 0 only if every check held."""
    need_root()
    from hive.lab.demo import node, pair, policies, routers, services
    from hive.lab.demo.transcript import Transcript

    transcript = Transcript(quiet=as_json)
    with signals_as_interrupts(), exclusive():
        if part in {None, "1"}:
            node.remove_leftovers(lab)
            node.run(lab, transcript)
        if part in {None, "2"} and transcript.error is None:
            pair.run(Cluster(f"{lab.name}-pair"), transcript)
        if part in {None, "3"} and transcript.error is None:
            services.run(Cluster(f"{lab.name}-services"), transcript)
        if part in {None, "4"} and transcript.error is None:
            policies.run(Cluster(f"{lab.name}-policies"), transcript)
        if part == "5":
            routers.run(Cluster(f"{lab.name}-routers"), transcript)
    transcript.end("It works:", "Something does not work:")
    if as_json:
        click.echo(json_text(transcript.record()))
    if not transcript.ok:
        raise click.exceptions.Exit(1)
