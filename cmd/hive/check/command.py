"""``hive check``: tests the cluster's network."""

from __future__ import annotations

from pathlib import Path

import click

from hive.check import report
from hive.check.checks import outside_of
from hive.check.objects import HOST_PORT, NAMESPACE
from hive.check.run import Run
from hive.kube import access_of, cluster_options
from hive.signals import signals_as_interrupts


def _outside(_: click.Context, __: click.Parameter, text: str) -> str:
    if text:
        try:
            outside_of(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return text


@click.command()
@report.options
@click.option(
    "--outside",
    default="",
    metavar="ADDRESS[:PORT]",
    callback=_outside,
    help="An external address to connect to, too.",
)
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Test only this node; may be repeated.")
@click.option("--image", default="", help="Image of the pods.  [default: that of each node's agent]")
@click.option(
    "--check-namespace",
    default=NAMESPACE,
    show_default=True,
    help="Namespace that is created for the check and deleted after it; an existing one is not used.",
)
@click.option(
    "--host-port",
    type=click.IntRange(1, 65535),
    default=HOST_PORT,
    show_default=True,
    help="A port that is free on every node.",
)
@click.option(
    "--start-within",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Timeout of the pods' start in seconds.",
)
@click.option("--clean", is_flag=True, help="Only remove the namespace of a killed check.")
@cluster_options
def command(
    kubeconfig: Path | None,
    context: str,
    namespace: str,
    clean: bool,
    start_within: float,
    host_port: int,
    check_namespace: str,
    image: str,
    nodes: tuple[str, ...],
    outside: str,
    within: float,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    as_json: bool,
) -> None:
    """Test a cluster's network: pods, nodes, services, DNS, policies, packet sizes, external hosts.

    Creates three small pods on every node, in a namespace of its own, tests both families, and deletes the
    namespace, also after ctrl-C. Exits 0 when every check passed or was skipped, 1 when one failed, 2 when no
    check could run.
    """
    names = report.chosen(only, skip)
    access = access_of(kubeconfig, context)
    from hive.check.cluster import ClusterSite

    with (
        signals_as_interrupts(),
        ClusterSite(access, namespace, check_namespace, image, start_within) as site,
    ):
        site.host_port = host_port
        if clean:
            there = site.remove_namespace()
            click.echo(f"namespace {check_namespace} {'removed' if there else 'is not there'}")
            return
        run = Run(site, outside=outside, within=within)
        if unknown := [node for node in nodes if node not in run.facts.nodes]:
            raise click.UsageError(f"--node {unknown[0]}: expected one of {', '.join(run.facts.nodes)}")
        run.wanted = nodes or run.wanted
        report.perform(run, names, as_json=as_json)
