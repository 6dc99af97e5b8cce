"""Access to a cluster by the user's kubeconfig: options, objects, and the state of pods."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from cells.kubernetes.client.access import Access
    from cells.kubernetes.client.client import Client

F = TypeVar("F", bound=Callable[..., object])
AGENT: Final = "k8s-app=cilium"
OPERATOR: Final = "io.cilium/app=operator"
"""Labels of the chart's operator pods, as cilium-cli selects them."""
CONTAINER: Final = "cilium-agent"
"""The agent's container in its pod."""
NAMESPACE: Final = "kube-system"
_HOME: Final = Path("~/.kube/config")
_PAGE: Final = "500"

Found = dict[str, Any]


def cluster_options(command: F) -> F:
    """Options of commands that query an API server: server, credentials, namespace of the agents."""
    namespace = click.option(
        "-n",
        "--namespace",
        default=NAMESPACE,
        show_default=True,
        help="Namespace of the agents.",
    )
    return namespace(kubeconfig_options(command))


def kubeconfig_options(command: F) -> F:
    """Options for the API server and its credentials."""
    for option in (
        click.option(
            "--context", default="", help="Context of the kubeconfig.  [default: its current context]"
        ),
        click.option(
            "--kubeconfig",
            type=click.Path(dir_okay=False, path_type=Path),
            envvar="KUBECONFIG",
            help="Path of a kubeconfig (also: KUBECONFIG).  [default: ~/.kube/config, or that of the pod]",
        ),
    ):
        command = option(command)
    return command


def has_kubeconfig(kubeconfig: Path | None) -> bool:
    """Whether there is a kubeconfig, given or in its default place."""
    return kubeconfig is not None or _HOME.expanduser().exists()


def access_of(kubeconfig: Path | None, context: str) -> Access:
    """Return how to reach the API server. Raises click.ClickException."""
    from cells.kubernetes.client.access import from_kubeconfig, in_cluster
    from cells.kubernetes.settings import AccessError

    home = _HOME.expanduser()
    if kubeconfig is not None and os.pathsep in str(kubeconfig) and not kubeconfig.exists():
        raise click.UsageError(f"KUBECONFIG={kubeconfig}: names several files: choose one with --kubeconfig")
    try:
        if kubeconfig is None and not home.exists():
            if (given := in_cluster(os.environ)) is None:
                raise click.UsageError(f"no cluster: {home} does not exist: give --kubeconfig FILE")
            return given
        return from_kubeconfig(kubeconfig or home, context)
    except AccessError as error:
        raise click.UsageError(str(error)) from error


async def list_objects(client: Client, path: str, labels: str = "") -> list[Found]:
    """Return all objects of a list, page by page. Raises KubernetesError."""
    import msgspec

    query = {"limit": _PAGE} | ({"labelSelector": labels} if labels else {})
    found: list[Found] = []
    while True:
        page = msgspec.json.decode(await client.raw("GET", path, query), type=Found)
        found += page.get("items") or ()
        following = (page.get("metadata") or {}).get("continue")
        if not following:
            return found
        query = query | {"continue": following}


def name_of(one: Found) -> str:
    """Return an object's name."""
    return str(one["metadata"]["name"])


def key_of(one: Found) -> str:
    """Return an object's namespace and name."""
    return f"{one['metadata'].get('namespace', '')}/{name_of(one)}"


def node_of(pod: Found) -> str:
    """Return the node of a pod."""
    return str(pod.get("spec", {}).get("nodeName", "")) or "no node yet"


def is_ready(pod: Found) -> bool:
    """Whether a pod's Ready condition is true."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def why_not_ready(pod: Found) -> str:
    """Return why a pod is not ready, in the kubelet's words."""
    state = pod.get("status", {})
    containers = [*(state.get("initContainerStatuses") or ()), *(state.get("containerStatuses") or ())]
    for one in containers:
        waiting = (one.get("state") or {}).get("waiting")
        if waiting:
            restarts = one.get("restartCount", 0)
            return f"{waiting.get('reason', 'waiting')}" + (
                f", restarted {restarts} times" if restarts else ""
            )
    return f"not ready ({state.get('phase') or 'no phase'}); see kubectl describe pod"
