"""``hive policy``: what policies do, asked of the agent or of a folder before anything is applied.

Needs: the folder.   Gives: command.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

import click

from hive.client import ask, socket_option, timeout_option
from hive.output import document, output_option, table
from hive.policy import agent

if TYPE_CHECKING:
    from cells.policy.compute.selector_policy import RuleOrigin
    from cells.policy.explain import Cluster, KnownPod, Reason

DENIED, WRONG = 1, 1
COLOURS = {"error": "red", "warning": "yellow", "note": "bright_black"}


@click.group()
def command() -> None:
    """Explain why a connection is allowed or not, check a folder of policies, show those in force."""


for _of_agent in agent.COMMANDS:
    command.add_command(_of_agent)


@command.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@output_option
def check(folder: Path, output: str) -> int:
    """Check the policies in FOLDER: refused objects, misspelt fields and labels, rules without effect.

    Exits 1 when anything is an error.
    """
    from cells.policy.explain import check as findings_of

    findings = findings_of(_read(folder))
    shown = [{"where": one.where, "severity": one.severity, "text": one.text} for one in findings]
    if (text := document(shown, output)) is not None:
        click.echo(text)
    else:
        for one in findings:
            click.echo(f"{one.where}: {click.style(one.severity, fg=COLOURS[one.severity])}: {one.text}")
        if not findings:
            click.echo("nothing to say: every policy is valid, selects pods, and has an effect")
    return WRONG if any(one.severity == "error" for one in findings) else 0


@command.command()
@click.argument("source", metavar="SRC", required=False)
@click.argument("destination", metavar="DST[:PORT[/PROTO]]", required=False)
@click.option(
    "--manifests",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Use a folder of manifests, not the agent: pods, namespaces, policies, CIDR groups, services.",
)
@click.option(
    "--all", "namespace", metavar="NAMESPACE", help="A table instead: who reaches whom in NAMESPACE."
)
@click.option("--port", "table_port", metavar="PORT[/PROTO]", help="With --all: on this port only.")
@socket_option
@timeout_option
@output_option
def explain(
    source: str | None,
    destination: str | None,
    folder: Path | None,
    namespace: str | None,
    table_port: str | None,
    agent_socket: Path,
    timeout: float,
    output: str,
) -> int:
    """Say whether SRC may reach DST, which rule decides, and what would change it.

    SRC and DST are pods (NAMESPACE/NAME), addresses, names, or identities, reserved (host, world, ...) or by
    number; of a folder also networks. The agent knows the names that its pods have asked DNS for. Exits 1
    when the connection is denied.
    """
    cluster = _read(folder) if folder is not None else None

    def ask_agent(what: str, port: Port, **query: str) -> Any:
        asked = urlencode({**query, "port": port.port, "protocol": port.name})
        return ask(f"/hive/policy/{what}?{asked}", agent_socket, timeout=timeout)

    if namespace is not None:
        port = _port(table_port or "80/TCP")
        if cluster is None:
            return _show_reachability(ask_agent("reachability", port, namespace=namespace), output)
        return _show_reachability(_reachability(cluster, namespace, port), output)
    if source is None or destination is None:
        raise click.UsageError("expected SRC and DST, or --all NAMESPACE")
    name, port = _split(destination)
    if cluster is None:
        told = ask_agent("explain", port, source=source, destination=name)
    else:
        directions = _decide(
            cluster, _peer(cluster, source.removeprefix("reserved:")), _peer(cluster, name), port
        )
        told = _as_object(cluster, directions, all(one.allowed for _, one in directions))
    if (text := document(told, output)) is not None:
        click.echo(text)
    else:
        _tell(source, name, port, told)
    return 0 if told["allowed"] else DENIED


class Port(NamedTuple):
    """A port and its protocol's number; for ICMP the port is the type."""

    port: int
    protocol: int
    name: str

    def __str__(self) -> str:
        return f"{self.port}/{self.name}"


class Peer(NamedTuple):
    """One end: an identity, and the pod that has it if it is one."""

    identity: int
    pod: KnownPod | None


def _read(folder: Path) -> Cluster:
    from cells.policy.explain import Cluster, read_folder
    from cells.policy.rules import PolicyOptions

    try:
        return Cluster(read_folder(folder), PolicyOptions())
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be read: {error.strerror}") from None


def _split(text: str) -> tuple[str, Port]:
    text = text.removeprefix("reserved:")
    if text.startswith("["):
        name, _, port = text[1:].partition("]")
        return name, _port(port.removeprefix(":") or "80/TCP")
    if text.count(":") > 1:
        return text, _port("80/TCP")
    name, _, port = text.partition(":")
    return name, _port(port or "80/TCP")


def _port(text: str) -> Port:
    from cells.policy.rules.rule import PROTOCOLS

    number, _, protocol = text.partition("/")
    protocol = (protocol or "TCP").upper()
    known = [name for name in PROTOCOLS if name != "ANY"]
    if not number.isdecimal() or int(number) > 65535 or protocol not in known:
        raise click.UsageError(
            f"port {text!r}: expected PORT/PROTO with a port up to 65535 and one of {', '.join(known)}"
        )
    return Port(int(number), PROTOCOLS[protocol], protocol)


def _peer(cluster: Cluster, text: str) -> Peer:
    from ipaddress import ip_network

    from cells.policy.explain import PodName
    from cells.policy.explain.cluster import RESERVED
    from cells.policy.rules import PolicyError

    if text in RESERVED:
        return Peer(RESERVED[text], None)
    if text.isdecimal():
        if int(text) not in cluster.cache.identities:
            raise click.UsageError(f"there is no identity {text} in the manifests")
        return Peer(int(text), None)
    try:
        return Peer(cluster.identity_of(ip_network(text, strict=False)), None)
    except PolicyError as error:
        raise click.UsageError(str(error)) from None
    except ValueError:
        pass
    namespace, slash, name = text.rpartition("/")
    pod = cluster.pods.get(PodName(namespace if slash else "default", name))
    if pod is None and "." in text and not slash:
        return Peer(cluster.identity_named(text), None)
    if pod is None:
        from difflib import get_close_matches

        near = get_close_matches(text, map(str, cluster.pods), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise click.UsageError(f"there is no pod {text} in the manifests{hint}")
    return Peer(pod.identity, pod)


def _decide(cluster: Cluster, source: Peer, destination: Peer, port: Port) -> list[tuple[str, Reason]]:
    from cells.policy.compute import PolicyConflictError
    from cells.policy.explain import decide

    found = []
    for of, other, direction in ((source, destination, "egress"), (destination, source, "ingress")):
        if of.pod is None:
            continue
        try:
            policy = cluster.policy(of.pod, "egress" if direction == "egress" else "ingress")
        except PolicyConflictError as error:
            raise click.ClickException(f"the policies for {of.pod.name} cannot all hold: {error}") from None
        labels = cluster.cache.identities[other.identity]
        found.append((str(of.pod.name), decide(policy, other.identity, labels, port.protocol, port.port)))
    return found


def _as_object(cluster: Cluster, directions: list[tuple[str, Reason]], allowed: bool) -> dict[str, Any]:
    return {
        "allowed": allowed,
        "directions": [
            {
                "direction": one.direction,
                "of": name,
                "verdict": one.match.verdict,
                "allowed": one.allowed,
                "enforced": one.enforced,
                "entry": one.entry_text,
                "rules": [_rule_text(cluster, origin) for origin in one.origins],
                "near": [
                    {"rule": _rule_text(cluster, near.origin), "missing": near.missing} for near in one.near
                ],
                "requests": list(one.requests),
            }
            for name, one in directions
        ],
        "elsewhere": [],
    }


def _rule_text(cluster: Cluster, origin: RuleOrigin) -> str:
    for source, located in cluster.policies.items():
        if str(source) == origin.source:
            return f"{located.at(origin.path)}: {origin.text}"
    return origin.text


def _tell(source: str, destination: str, port: Port, told: dict[str, Any]) -> None:
    word = click.style("allowed", fg="green") if told["allowed"] else click.style("denied", fg="red")
    click.echo(f"{source} -> {destination}:{port}: {word}")
    for one in told["directions"]:
        click.echo(f"  {one['direction']} of {one['of']}: {one['verdict']}")
        if not one["enforced"]:
            click.echo("    no policy speaks of this direction: it is open")
            continue
        for rule in one["rules"]:
            click.echo(f"    by {rule}")
        if one["verdict"] == "drop":
            click.echo("    policies select it for this direction, and none allows this")
        for request in one["requests"]:
            click.echo(f"    requests: {request}")
        for near in one["near"][:5]:
            click.echo(f"    near: {near['rule']}: {near['missing']}")
        click.echo(f"    entry: {one['entry']}")
    for text in told["elsewhere"]:
        click.echo(f"  {text}")


def _reachability(cluster: Cluster, namespace: str, port: Port) -> list[dict[str, str]]:
    pods = [pod for pod in cluster.pods.values() if pod.name.namespace == namespace]
    if not pods:
        raise click.UsageError(f"there are no pods of namespace {namespace} in the manifests")
    rows = []
    for source, destination in permutations(pods, 2):
        ends = Peer(source.identity, source), Peer(destination.identity, destination)
        denied = [one.direction for _, one in _decide(cluster, *ends, port) if not one.allowed]
        ways = {"from": str(source.name), "to": str(destination.name), "port": str(port)}
        rows.append({**ways, "denied": " and ".join(denied)})
    return rows


def _show_reachability(rows: list[dict[str, str]], output: str) -> int:
    if (text := document(rows, output)) is not None:
        click.echo(text)
        return 0
    lines = [("FROM", "TO", "PORT", "")]
    lines += [
        (row["from"], row["to"], row["port"], f"denied by {row['denied']}" if row["denied"] else "allowed")
        for row in rows
    ]
    for line, row in zip(table(lines), ({}, *rows), strict=True):
        click.echo(click.style(line, fg="red") if row.get("denied") else line)
    return 0
