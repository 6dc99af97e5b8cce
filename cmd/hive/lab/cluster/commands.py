"""``hive lab up`` for a cluster of nodes."""

from __future__ import annotations

import click

from hive.lab import agent_process
from hive.lab.cluster.cluster import Cluster
from hive.lab.node import Lab

IPV6 = frozenset({"--enable-ipv6", "--enable-ipv6=true"})
"""Settings that give pods IPv6 addresses."""


def up_cluster(
    cluster: Cluster,
    count: int,
    segments: int,
    pods: int,
    settings: tuple[str, ...],
    *,
    etcd: bool = False,
    bgp: bool = False,
) -> None:
    """Create nodes 1 to ``count`` with agents and pods; existing ones stay."""
    made: list[Lab] = []
    try:
        ipv6 = not IPV6.isdisjoint(settings)
        made += cluster.make(count, segments, etcd=etcd, bgp=bgp, ipv6=ipv6)
        if cluster.store.exists:
            cluster.store.start()
            click.echo(f"{cluster.name}    etcd at {cluster.store.address}, pid {cluster.store.pid}")
        if cluster.router.exists:
            cluster.router.start()
            address = cluster.place(cluster.nodes()[0]).routers[0]
            click.echo(f"{cluster.name}    BGP router at {address}, pid {cluster.router.pid()}")
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
    """Start all agents that do not run, and wait until they are ready."""
    started = {}
    for lab in cluster.nodes():
        if agent_process.running(lab) is None:
            as_before = [] if settings else agent_process.last_settings(lab)
            started[lab] = agent_process.start(lab, *(as_before or cluster.settings(settings)))
            click.echo(f"{lab.name}  starting the agent, pid {started[lab]}")
    for lab, pid in started.items():
        agent_process.wait_ready(lab, pid)


def _add_pods(cluster: Cluster, count: int) -> None:
    for lab in cluster.nodes():
        for name in (f"pod-{cluster.number(lab)}-{number}" for number in range(1, count + 1)):
            if name not in lab.pods():
                attached = cluster.add_pod(lab, name)
                click.echo(f"{lab.name}  {name} attached, {attached.ipv4 or attached.ipv6}")
