"""``hive policy``: the effect of policies, by the agent or by a folder before anything is applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click
from click.core import ParameterSource

from hive import completion
from hive.client import RefusedError, agent_options, ask
from hive.kube import NAMESPACE, has_kubeconfig, kubeconfig_options
from hive.output import document, echo_fitted, output_option, table
from hive.policy import agent
from hive.policy.trial import try_policies

if TYPE_CHECKING:
    from cells.policy.compute import RuleOrigin
    from cells.policy.explain import End, Explained, Target
    from cells.policy.explain.cluster import BadFile, Cluster, Located

WRONG = 1
CODES = {"allowed": 0, "denied": 1, "elsewhere": 3, "mixed": 4}
"""Exit codes by verdict."""
VERDICT_COLOURS = {"allowed": "green", "denied": "red", "elsewhere": "yellow", "mixed": "red"}
COLOURS = {"error": "red", "warning": "yellow", "note": "bright_black"}


class UnansweredError(click.ClickException):
    """Raised for an invalid query, or one that cannot be answered here."""

    exit_code = 2


@click.group()
def command() -> None:
    """Explain why a connection is allowed or denied, check a folder of policies, show policies in force."""


for _of_agent in (*agent.COMMANDS, try_policies):
    command.add_command(_of_agent)


@command.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@output_option
def check(folder: Path, output: str) -> int:
    """Check the policies in FOLDER: refused objects, misspelt fields and labels, rules without effect.

    Also Services, EndpointSlices and local redirect policies: which parts are refused, or not served. Exits 1
    if there are errors.
    """
    from cells.policy.explain.check import check as findings_of
    from hive.policy.services import service_findings

    cluster = _read(folder)
    findings = sorted([*findings_of(cluster), *service_findings(cluster)])
    shown = [{"where": one.where, "severity": one.severity, "text": one.text} for one in findings]
    if (text := document(shown, output)) is not None:
        click.echo(text)
    else:
        for one in findings:
            click.echo(f"{one.where}: {click.style(one.severity, fg=COLOURS[one.severity])}: {one.text}")
        if not findings:
            click.echo("no findings: policies are valid, select pods and have an effect; services are served")
    return WRONG if any(one.severity == "error" for one in findings) else 0


@command.command()
@click.argument("source", metavar="SRC", required=False, shell_complete=completion.pods)
@click.argument("destination", metavar="DST[:PORT[/PROTO]]", required=False, shell_complete=completion.pods)
@click.option(
    "--manifests",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Explain by a folder of manifests: pods, namespaces, nodes, services, policies, CIDR groups.",
)
@click.option(
    "--policy-cidr-match-mode",
    "match_mode",
    type=click.Choice(["pods"]),
    help="With --manifests: networks select pods, too.  [default: that of the ConfigMap cilium-config in it]",
)
@click.option(
    "--all",
    "namespace",
    metavar="NAMESPACE",
    help="Show a table of which pods of NAMESPACE reach each other.",
)
@click.option("--port", "table_port", metavar="PORT[/PROTO]", help="With --all: only for this port.")
@agent_options
@kubeconfig_options
@click.option(
    "--agents-namespace",
    default=NAMESPACE,
    show_default=True,
    help="Namespace of the agents, if they are queried through an API server.",
)
@click.pass_context
def explain(
    ctx: click.Context,
    source: str | None,
    destination: str | None,
    folder: Path | None,
    match_mode: str | None,
    namespace: str | None,
    table_port: str | None,
    agent_socket: Path,
    timeout: float,
    output: str,
    kubeconfig: Path | None,
    context: str,
    agents_namespace: str,
) -> int:
    """Explain whether SRC may reach DST, which rule decides, and what would change it.

    The answer comes from the agent of this node; if none runs, or with --kubeconfig or --context, from the
    agents of both pods' nodes, through the API server; with --manifests, from a folder.

    SRC and DST are pods or services (NAMESPACE/NAME), addresses, DNS names that pods have looked up, or
    identities, reserved (host, world, ...) or by number; with --manifests also networks. A service stands for
    each of its backends. PORT is a number or a name; without it, all ports that policies distinguish are
    explained.

    \b
    Exit codes:
      0  allowed
      1  denied
      2  unknown: the query is invalid or cannot be answered
      3  one direction is allowed; another node decides the other one
      4  some backends or ports are denied, others are allowed
    """
    from cells.policy.explain import UnanswerableError

    if namespace is not None and source is not None:
        raise click.UsageError("--all NAMESPACE shows all its pods: expected no SRC and DST beside it")
    if namespace is None and table_port is not None:
        where = f"{destination or 'DST'}:{table_port}"
        raise click.UsageError(f"--port goes with --all NAMESPACE: write the port behind DST, as in {where}")
    if match_mode and folder is None:
        raise click.UsageError("--policy-cidr-match-mode goes with --manifests: the agent has its own")
    asked: _Folder | _Agent | _Cluster
    if folder is not None:
        asked = _Folder(_read(folder, match_mode))
    elif _asks_cluster(ctx, agent_socket, kubeconfig):
        asked = _Cluster(kubeconfig, context, agents_namespace, timeout)
    else:
        asked = _Agent(agent_socket, timeout)
    try:
        if namespace is not None:
            return _show_reachability(asked.reachability(namespace, table_port or ""), output)
        if source is None or destination is None:
            raise click.UsageError("expected SRC and DST, or --all NAMESPACE")
        found = asked.explain(source, destination)
    except UnanswerableError as error:
        raise UnansweredError(str(error)) from None
    if (text := document(found, output)) is not None:
        click.echo(text)
    else:
        _show(destination.removeprefix("reserved:"), found)
    return CODES[found["verdict"]]


def _asks_cluster(ctx: click.Context, agent_socket: Path, kubeconfig: Path | None) -> bool:
    """Whether agents are queried through an API server: if requested, or if no agent runs here."""
    given = [
        name
        for name in ("kubeconfig", "context", "agents_namespace")
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    by_default = ctx.get_parameter_source("agent_socket") is ParameterSource.DEFAULT
    if given and not by_default:
        raise click.UsageError(f"--socket and --{given[0].replace('_', '-')}: expected one of them")
    return bool(given) or (by_default and not agent_socket.exists() and has_kubeconfig(kubeconfig))


# The sources of answers. All raise UnanswerableError, or UnansweredError with an agent's message.


class _Agent:
    """Answers by the agent of this node."""

    def __init__(self, agent_socket: Path, timeout: float) -> None:
        self._socket = agent_socket
        self._timeout = timeout

    def explain(self, source: str, destination: str) -> Any:
        return self._ask("explain", _query(source, destination))

    def reachability(self, namespace: str, port: str) -> Any:
        from cells.policy.explain.directory import RequestedPort, parse_port

        asked = parse_port(port) if port else RequestedPort()
        query = {"namespace": namespace, "port": asked.port, "protocol": asked.protocol}
        return self._ask("reachability", query)

    def _ask(self, what: str, query: Mapping[str, str]) -> Any:
        asked = urlencode({name: value for name, value in query.items() if value})
        try:
            return ask(f"/hive/policy/{what}?{asked}", self._socket, timeout=self._timeout)
        except RefusedError as refused:
            raise UnansweredError(refused.reason) from None


class _Cluster:
    """Answers by the agents of both ends' nodes, through the API server."""

    def __init__(self, kubeconfig: Path | None, context: str, namespace: str, timeout: float) -> None:
        self._ask = partial(_ask_cluster, kubeconfig, context, namespace, timeout)

    def explain(self, source: str, destination: str) -> Any:
        return self._ask(_query(source, destination))

    def reachability(self, namespace: str, port: str) -> Any:
        del namespace, port
        raise click.UsageError("--all asks one node's agent, or a folder: run it on a node, or --manifests")


def _query(source: str, destination: str) -> dict[str, str]:
    from cells.policy.explain.directory import parse_destination

    name, asked = parse_destination(destination)
    return {"source": source, "destination": name, "port": asked.port, "protocol": asked.protocol}


def _ask_cluster(
    kubeconfig: Path | None, context: str, namespace: str, timeout: float, query: Mapping[str, str]
) -> Any:
    from hive.agents import AgentError, Agents, ask_agents
    from hive.policy.all_nodes import explain_on_all_nodes

    async def explained(agents: Agents) -> Any:
        return _as_object(await explain_on_all_nodes(agents, query))

    try:
        return ask_agents(kubeconfig, context, namespace, timeout, explained)
    except AgentError as error:
        if error.status == HTTPStatus.BAD_REQUEST:
            raise UnansweredError(str(error)) from None
        raise click.ClickException(str(error)) from None


class _Folder:
    """Answers by a folder of manifests."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def explain(self, source: str, destination: str) -> Any:
        return _as_object(_explained(self._cluster, source, destination))

    def reachability(self, namespace: str, port: str) -> Any:
        return _reachability(self._cluster, namespace, port)


def _read(folder: Path, match_mode: str | None = None) -> Cluster:
    """Read a folder; whether networks select pods is set by the mode, or by the agents' ConfigMap in it."""
    from msgspec.structs import replace

    from cells.policy.explain.cluster import Cluster, read_folder
    from cells.policy.rules import SUPPORTED

    try:
        objects = list(read_folder(folder))
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be read: {error.strerror}") from None
    by_pods = match_mode == "pods" or "pods" in _configured_modes(objects)
    return Cluster(objects, replace(SUPPORTED, cidr_matches_pods=by_pods))


def _configured_modes(objects: Iterable[Located | BadFile]) -> set[str]:
    """Return ``policy-cidr-match-mode`` of the agents' ConfigMap in the folder, if there is one."""
    from cells.policy.explain.cluster import Located

    for one in objects:
        if not isinstance(one, Located) or one.object["kind"] != "ConfigMap":
            continue
        if (one.object.get("metadata") or {}).get("name") == "cilium-config":
            text = str((one.object.get("data") or {}).get("policy-cidr-match-mode") or "")
            return set(text.replace(",", " ").split())
    return set()


def _explained(cluster: Cluster, source: str, destination: str) -> Explained:
    """Return the answer of a folder. Raises UnanswerableError."""
    from cells.policy.explain.directory import parse_destination, source_of, targets_of
    from hive.policy.folder import FolderDirectory

    directory = FolderDirectory(cluster)
    name, asked = parse_destination(destination)
    client = source_of(directory, source)
    targets = targets_of(directory, name, asked, client)
    notes = _notes(cluster)
    if cluster.options.cidr_matches_pods and (unplaced := directory.without_address()):
        asked_of = [one for one in unplaced if one in {client.key, *(each.end.key for each in targets)}]
        notes += [f"{one} has no address in the manifests: no network selects it" for one in asked_of]
    return _of_targets(cluster, client, name, targets, notes)


def _of_targets(
    cluster: Cluster, client: End, name: str, targets: Sequence[Target], notes: Sequence[str] = ()
) -> Explained:
    from cells.policy.explain import UnanswerableError, explained

    if client.policy is None and not any(one.end.policy or one.problem for one in targets):
        raise UnanswerableError("neither end is a pod of the manifests: no policy applies")
    return explained(client, name, targets, lambda origin: _rule_text(cluster, origin), notes)


def _notes(cluster: Cluster) -> list[str]:
    """Yield which parts of the folder are not in force."""
    notes = [f"{one.file}:{one.line}: {one.reason}: not read" for one in cluster.bad_files]
    for one in cluster.refused:
        place = one.located.at(one.error.path)
        name = one.located.object["metadata"].get("name", "")
        notes.append(f"{place}: policy {name} is refused, and not in force: {one.error}")
    if any(rule.selects_nodes for rule in cluster.repository.rules):
        notes.append("policies of nodes are not evaluated: they apply where enable-host-firewall is set")
    if cluster.options.cidr_matches_pods:
        notes.append("networks of rules select pods, too (policy-cidr-match-mode: pods)")
    return notes


def _as_object(found: Explained) -> dict[str, Any]:
    import msgspec

    made: dict[str, Any] = msgspec.to_builtins(found)
    return made


def _rule_text(cluster: Cluster, origin: RuleOrigin) -> str:
    for source, located in cluster.policies.items():
        if str(source) == origin.source:
            return f"{located.at(origin.path)}: {origin.text}"
    return origin.text


def _show(destination: str, found: Mapping[str, Any]) -> None:
    ways = found["ways"]
    alone = ways[0] if len(ways) == 1 and not ways[0]["via"] else None
    port = alone["port"] if alone else ""
    target = f"{found['destination']}:{port}" if port[:1].isdigit() else destination
    headline = click.style(found["headline"], fg=VERDICT_COLOURS[found["verdict"]])
    echo_fitted(f"{found['source']} -> {target}: {headline}")
    for way in ways:
        indent = "  "
        if alone is None:
            via = f" (by {way['via']})" if way["via"] else ""
            word = click.style(way["verdict"], fg=VERDICT_COLOURS[way["verdict"]])
            echo_fitted(f"  {way['destination']}, {way['port']}{via}: {word}")
            indent = "    "
        _show_way(way, indent)
    for note in found["notes"]:
        echo_fitted(f"  note: {note}")


def _show_way(way: Mapping[str, Any], indent: str) -> None:
    for one in way["directions"]:
        for line in direction_lines(one):
            echo_fitted(indent + line)
    for text in (*way["elsewhere"], way["problem"], way["note"]):
        if text:
            echo_fitted(f"{indent}{text}")


def direction_lines(one: Mapping[str, Any]) -> Iterator[str]:
    """Return the decision on one direction of an answer of ``explain``, in lines."""
    verdict = f"{one['verdict']}, which is only reported" if one["audited"] else one["verdict"]
    yield f"{one['direction']} of {one['of']}: {verdict}"
    if not one["enforced"]:
        yield "  no policy applies in this direction: it is open"
        return
    yield from (f"  by {rule}" for rule in one["rules"])
    if one["verdict"] == "drop":
        yield "  policies select it for this direction, and none allows this"
    yield from (f"  requests: {request}" for request in one["requests"])
    yield from (f"  near: {near['rule']}: {near['missing']}" for near in one["near"][:5])
    yield f"  entry: {one['entry']}"


def _reachability(cluster: Cluster, namespace: str, port: str) -> list[dict[str, str]]:
    """Return the table of a folder. Raises UnanswerableError."""
    from cells.policy.explain import UnanswerableError
    from cells.policy.explain.directory import RequestedPort, parse_port, source_of, targets_of
    from hive.policy.folder import FolderDirectory

    directory = FolderDirectory(cluster)
    pods = [name for name in directory.pods() if name.startswith(f"{namespace}/")]
    if not pods:
        raise UnanswerableError(f"there are no pods of namespace {namespace} in the manifests")
    asked = parse_port(port) if port else RequestedPort()
    rows = []
    for source, destination in permutations(pods, 2):
        client = source_of(directory, f"pod/{source}")
        targets = targets_of(directory, f"pod/{destination}", asked, client)
        found = _of_targets(cluster, client, destination, targets)
        rows.append(
            {
                "from": source,
                "to": destination,
                "port": found.ways[0].port if len(found.ways) == 1 else "",
                "verdict": found.verdict,
                "headline": found.headline,
                "denied": " and ".join(found.denying),
            }
        )
    return rows


def _show_reachability(rows: list[dict[str, str]], output: str) -> int:
    if (text := document(rows, output)) is not None:
        click.echo(text)
        return 0
    lines = [("FROM", "TO", "PORT", "")]
    lines += [
        (
            row["from"],
            row["to"],
            row["port"],
            f"denied by {row['denied']}" if row["verdict"] == "denied" else row["headline"],
        )
        for row in rows
    ]
    for line, row in zip(table(lines), ({}, *rows), strict=True):
        click.echo(click.style(line, fg="red") if row.get("denied") else line)
    return 0
