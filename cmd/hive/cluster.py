"""``hive cluster``: the whole cluster, by its API server.

Source: the counts of ``cilium status`` (cilium-cli).
"""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import click

from hive.client import TIMEOUT
from hive.cluster_bundle import bundle
from hive.kube import (
    AGENT,
    OPERATOR,
    Found,
    access_of,
    cluster_options,
    is_ready,
    key_of,
    list_objects,
    name_of,
    node_of,
    why_not_ready,
)
from hive.output import BAD, GOOD, document, fact_lines, output_option, page_options, terminal_width

if TYPE_CHECKING:
    from cells.kubernetes.client.access import Access
    from cells.kubernetes.client.client import Client

_PAUSE: Final = 2.0
"""Polling interval of --wait in seconds."""
_WIDEST: Final = 1000
"""Columns of an error if the output is not a terminal: one line per error."""
_MOST: Final = 10
"""Maximum number of errors shown; the others are counted."""
_AGENT_NOT_READY: Final = "node.cilium.io/agent-not-ready"
"""The taint of nodes without a ready agent."""


@click.group()
def command() -> None:
    """Show agents, operators and pods of all nodes, through your kubeconfig."""


command.add_command(bundle)


@command.command()
@cluster_options
@click.option("--wait", is_flag=True, help="Wait until there are no errors, for at most --timeout seconds.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT,
    show_default=True,
    help="Seconds to wait.",
)
@output_option
def status(
    kubeconfig: Path | None, context: str, namespace: str, wait: bool, timeout: float, output: str
) -> None:
    """Show how many agents, operators and pods are ready, their images, and errors.

    Exits 1 if there are errors. A pod is managed if it has a CiliumEndpoint; pods in the host network are not
    counted.
    """
    access = access_of(kubeconfig, context)
    until = time.monotonic() + timeout
    while True:
        found = _summary(_look(access, namespace, timeout), namespace)
        left = until - time.monotonic()
        if not found["errors"] or not wait or left <= 0:
            break
        time.sleep(min(_PAUSE, left))
    if (text := document(found, output)) is not None:
        click.echo(text)
    else:
        width = terminal_width()
        for line in (
            *fact_lines(list(_facts(found)), width),
            *_error_lines(found["errors"], width or _WIDEST),
        ):
            click.echo(line)
    if found["errors"]:
        raise click.exceptions.Exit(1)


@command.command()
@cluster_options
@page_options
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Timeout of each node's agent in seconds.",
)
def ui(
    kubeconfig: Path | None, context: str, namespace: str, port: int, no_browser: bool, timeout: float
) -> None:
    """Show the page of hive ui over all nodes: flows, policy verdicts, and the state of nodes.

    The page is served on 127.0.0.1 until ctrl-C. Agents are queried by exec in their pods: nothing is
    installed or left behind. The page names nodes that do not answer.
    """
    from hive.agents import Agents, ask_agents
    from hive.signals import signals_as_interrupts
    from hive.ui.cluster import ClusterAnswers
    from hive.ui.command import listening, serve_page

    async def serve(agents: Agents) -> None:
        await agents.pods()
        await serve_page(listener, ClusterAnswers(agents), True, no_browser)

    with signals_as_interrupts(), listening(port) as listener:
        try:
            ask_agents(kubeconfig, context, namespace, timeout, serve)
        except KeyboardInterrupt:
            return


def _look(access: Access, namespace: str, timeout: float) -> dict[str, Any]:
    """Return the cluster's objects and the URL of its server. Raises click.ClickException."""
    import anyio

    from cells.kubernetes.client import connect
    from cells.kubernetes.client.errors import KubernetesError

    async def ask() -> dict[str, Any]:
        client = connect(access, agent="hive-cluster", qps=0, timeout=timeout)
        try:
            with anyio.fail_after(timeout):
                return await _objects(client, namespace)
        finally:
            await client.reset()

    try:
        return anyio.run(ask)
    except TimeoutError as error:
        raise click.ClickException(
            f"{access.servers[0]} does not answer within {timeout:g} s: is the kubeconfig's server right?"
        ) from error
    except KubernetesError as error:
        raise click.ClickException(str(error)) from error


async def _objects(client: Client, namespace: str) -> dict[str, Any]:
    import msgspec

    from cells.kubernetes.client.errors import NotFoundError

    version = msgspec.json.decode(await client.raw("GET", "/version"), type=Found)
    here = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
    try:
        endpoints = await list_objects(client, "/apis/cilium.io/v2/ciliumendpoints")
    except NotFoundError:  # no CRD: disable-endpoint-crd, or Cilium is not installed
        endpoints = None
    return {
        "server": client.server,
        "version": version.get("gitVersion", ""),
        "nodes": await list_objects(client, "/api/v1/nodes"),
        "agents": await list_objects(client, here, AGENT),
        "operators": await list_objects(client, here, OPERATOR),
        "pods": await list_objects(client, "/api/v1/pods"),
        "endpoints": endpoints,
    }


def _summary(seen: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """Return the output: counts, images and errors."""
    nodes = sorted(name_of(one) for one in seen["nodes"])
    agents, operators = seen["agents"], seen["operators"]
    pods = [one for one in seen["pods"] if _has_network(one)]
    known = None if seen["endpoints"] is None else {key_of(one) for one in seen["endpoints"]}
    unmanaged = [] if known is None else sorted(key_of(one) for one in pods if key_of(one) not in known)
    errors = [*_wrong_agents(nodes, agents, namespace), *_wrong_operators(operators, namespace)]
    errors += [
        f"node {name_of(one)}: still has the taint {_AGENT_NOT_READY}" for one in seen["nodes"] if _held(one)
    ]
    errors += [f"pod {pod}: not managed: it has no CiliumEndpoint" for pod in unmanaged]
    ready_nodes = {node_of(one) for one in agents if is_ready(one)}
    return {
        "server": seen["server"],
        "version": seen["version"],
        "agents": {"ready": len(ready_nodes & set(nodes)), "nodes": len(nodes)},
        "operators": {"ready": sum(map(is_ready, operators)), "pods": len(operators)},
        "pods": {"managed": None if known is None else len(pods) - len(unmanaged), "all": len(pods)},
        "images": {"agents": _images(agents), "operators": _images(operators)},
        "errors": errors,
    }


def _wrong_agents(nodes: Sequence[str], agents: Sequence[Found], namespace: str) -> Iterator[str]:
    if not agents:
        yield f"no pods with {AGENT} in namespace {namespace}: is it installed there? (--namespace)"
        return
    with_agent = {node_of(one) for one in agents}
    yield from (f"node {node}: no agent runs there" for node in nodes if node not in with_agent)
    yield from (
        f"agent {key_of(one)} on {node_of(one)}: {why_not_ready(one)}" for one in agents if not is_ready(one)
    )


def _wrong_operators(operators: Sequence[Found], namespace: str) -> Iterator[str]:
    if not operators:
        yield f"no pods with {OPERATOR} in namespace {namespace}: pod ranges and identities need an operator"
    elif not any(map(is_ready, operators)):
        yield from (f"operator {key_of(one)}: {why_not_ready(one)}" for one in operators)


def _held(node: Found) -> bool:
    return any(one.get("key") == _AGENT_NOT_READY for one in node.get("spec", {}).get("taints") or ())


def _has_network(pod: Found) -> bool:
    """Whether an agent should have connected the pod: it runs, and is not in the host network."""
    return not pod["spec"].get("hostNetwork") and pod.get("status", {}).get("phase") == "Running"


def _images(pods: Sequence[Found]) -> dict[str, int]:
    """Return the images of the first containers, with the number of pods that run them."""
    return dict(Counter(pod["spec"]["containers"][0].get("image", "") for pod in pods))


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of every line."""
    yield "Cluster:", f"{found['server']}  {found['version']}".rstrip()
    agents, operators, pods = found["agents"], found["operators"], found["pods"]
    yield "Agents:", _share(agents["ready"], agents["nodes"], "nodes have a ready one")
    yield "Operator:", _share(operators["ready"], operators["pods"], "ready")
    if pods["managed"] is None:
        yield "Pods:", f"{pods['all']}; which are managed is not known: there are no CiliumEndpoints"
    else:
        yield "Pods:", _share(pods["managed"], pods["all"], "managed")
    for kind, images in found["images"].items():
        for image, count in sorted(images.items()):
            yield "Images:", f"{kind}: {image} ({count} {'pod' if count == 1 else 'pods'})"
    errors = found["errors"]
    yield "Errors:", click.style(str(len(errors)), fg=BAD) if errors else click.style("none", fg=GOOD)


def _error_lines(errors: Sequence[str], width: int) -> Iterator[str]:
    """Return the errors, one below the other, in lines of this width."""
    for text in errors[:_MOST]:
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    if len(errors) > _MOST:
        yield f"  and {len(errors) - _MOST} more (-o json shows all)"


def _share(part: int, whole: int, what: str) -> str:
    return click.style(f"{part} of {whole}", fg=GOOD if part == whole and whole else BAD) + f" {what}"
