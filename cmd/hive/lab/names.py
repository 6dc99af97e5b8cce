"""The option ``--name`` of lab commands: the name of a node, or of a cluster.

The nodes of the cluster NAME are NAME-1, NAME-2, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from hive.lab.cluster import Cluster
from hive.lab.cluster.manifests import Manifests
from hive.lab.node import Lab, LabError, labs

F = TypeVar("F", bound=Callable[..., object])


class _LabName(click.ParamType[Lab]):
    name = "name"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Lab:
        if isinstance(value, Lab):
            return value
        try:
            return Lab(str(value))
        except LabError as error:
            self.fail(error.message, param, ctx)


def name_option(default: str = "node") -> Callable[[F], F]:
    """Add ``--name`` to a command, as the parameter ``lab``; it may name a cluster."""
    return click.option(
        "--name",
        "lab",
        type=_LabName(),
        default=default,
        show_default=True,
        envvar="HIVE_LAB",
        help="A node, or a cluster of nodes NAME-1, NAME-2, ... (also: HIVE_LAB).",
    )


number_option = click.option(
    "--node", "number", type=click.IntRange(min=1), help="The node of this number of the cluster."
)


def node_named(lab: Lab, number: int | None = None) -> Lab:
    """Return the node of this name; of a cluster the node with a number, by default the first.

    Raises LabError if there is none.
    """
    if number is None and lab.exists:
        return lab
    cluster = _cluster(lab)
    found = cluster.node(number or 1)
    if not found.exists and number is not None and lab.exists:
        nodes = len(cluster.nodes())
        has = f"its cluster has {nodes} nodes" if nodes else "it is a node alone: leave out --node"
        raise LabError(f"{lab.name} has no node {number}: {has}")
    if not found.exists:
        known = ", ".join(one.name for one in labs()) or "none"
        wanted = found.name if cluster.nodes() else lab.name
        raise LabError(f"there is no lab node named {wanted} (there are: {known}): make it with hive lab up")
    return found


def nodes_named(lab: Lab) -> list[Lab]:
    """Return the node of this name, even if it does not exist, or all nodes of the cluster of this name."""
    return [lab] if lab.exists else Cluster(lab.name).nodes() or [lab]


def manifests_named(lab: Lab) -> Manifests:
    """Return the manifests of a node, or of all nodes of its cluster. Raises LabError."""
    nodes = _cluster(lab).nodes() or [node_named(lab)]
    if not nodes[0].manifests.is_dir():
        raise LabError(f"node {nodes[0].name} takes its objects from elsewhere, as its settings say")
    return Manifests(nodes)


def _cluster(lab: Lab) -> Cluster:
    """Return the cluster of this name, or the cluster that a node of this name belongs to."""
    named = Cluster(lab.name)
    return named if named.nodes() else Cluster.of(lab)
