"""``hive lab`` for several nodes: up, and the objects they know.

Needs: root.   Gives: up_cluster, apply, get.
"""

from __future__ import annotations

from pathlib import Path

import click

from hive.lab import agent_process
from hive.lab.cluster import Cluster
from hive.lab.cluster.manifests import Object, read_objects
from hive.lab.node import Lab, LabError, exclusive, need_root
from hive.output import document, output_option, table


def up_cluster(
    cluster: Cluster, count: int, segments: int, pods: int, settings: tuple[str, ...], *, etcd: bool = False
) -> None:
    """Make nodes 1 to `count` with running agents and pods; what is there already stays."""
    made: list[Lab] = []
    try:
        made += cluster.make(count, segments, etcd=etcd)
        if cluster.store.exists:
            cluster.store.start()
            click.echo(f"{cluster.name}    etcd at {cluster.store.address}, pid {cluster.store.pid}")
        _start_agents(cluster, settings)
        _add_pods(cluster, pods)
    except BaseException:
        cluster.remove(made)
        raise
    for lab in cluster.nodes():
        place = cluster.place(lab)
        click.echo(f"{lab.name}  up at {place.ipv4} with pods {', '.join(lab.pods()) or 'none'}")
    first = cluster.nodes()[0].name
    click.echo(f"Look around:  hive lab exec --name {first} -- hive node list")


def _start_agents(cluster: Cluster, settings: tuple[str, ...]) -> None:
    """Start those that do not run, all at once, and wait until they serve."""
    started = {}
    for lab in cluster.nodes():
        if agent_process.running(lab) is None:
            started[lab] = agent_process.start(lab, *cluster.settings(settings))
            click.echo(f"{lab.name}  starting the agent, pid {started[lab]}")
    for lab, pid in started.items():
        agent_process.wait_ready(lab, pid)


def _add_pods(cluster: Cluster, count: int) -> None:
    for lab in cluster.nodes():
        for name in (f"pod-{cluster.number(lab)}-{number}" for number in range(1, count + 1)):
            if name not in lab.pods():
                attached = cluster.add_pod(lab, name)
                click.echo(f"{lab.name}  {name} attached, {attached.ipv4 or attached.ipv6}")


def chosen(name: str) -> Cluster:
    """The cluster of that name, or that a node of that name is of. Raises LabError when it has no node."""
    for cluster in (Cluster(name), Cluster.of(Lab(name))):
        if cluster.nodes():
            return cluster
    raise LabError(f"there is no cluster of lab nodes named {name}: make one with hive lab up --nodes 2")


cluster_option = click.option(
    "--name", default="node", show_default=True, envvar="HIVE_LAB", help="Which cluster, or a node of it."
)


@click.command()
@cluster_option
@click.option(
    "-f",
    "--filename",
    "files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    help="A manifest, YAML or JSON; may be given more than once.",
)
def apply(name: str, files: tuple[Path, ...]) -> None:
    """Tell all nodes of a cluster of objects; those of the same file are replaced."""
    need_root()
    with exclusive():
        manifests = chosen(name).manifests
        for file in files:
            objects = read_objects(file)
            manifests.copy(f"applied-{file.stem}.yaml", file.read_text(encoding="utf-8"))
            for one in objects:
                click.echo(f"{one['kind'].lower()}/{one['metadata']['name']} applied")


@click.command()
@cluster_option
@click.argument("kind", default="")
@click.argument("object_name", default="", metavar="[NAME]")
@output_option
def get(name: str, kind: str, object_name: str, output: str) -> None:
    """Show the objects that the nodes of a cluster know: all, those of a KIND, one."""
    need_root()
    found = [
        (one, file)
        for one, file in chosen(name).manifests.objects()
        if _is(one, kind) and object_name in {"", one["metadata"]["name"]}
    ]
    if object_name and not found:
        raise LabError(f"there is no {kind} {object_name}")
    if output == "yaml":
        import yaml

        click.echo(yaml.safe_dump_all([one for one, _ in found], sort_keys=False), nl=False)
        return
    if (text := document([one for one, _ in found], output)) is not None:
        click.echo(text)
        return
    lines = [("KIND", "NAMESPACE", "NAME", "FILE")]
    lines += [
        (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"], file)
        for one, file in found
    ]
    for line in table(lines):
        click.echo(line)


def _is(one: Object, kind: str) -> bool:
    own = str(one["kind"]).lower()
    return kind.lower() in {"", own, f"{own}s", f"{own[:-1]}ies" if own.endswith("y") else own}
