"""``hive policy try``: finds flows of this node that additional policies would have cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from hive.client import RefusedError, agent_options, ask
from hive.output import document

if TYPE_CHECKING:
    from cells.hubble.flow import Flow, FlowEndpoint, Layer4
    from cells.hubble.rpc.observer import GetFlowsRequest, GetFlowsResponse
    from cells.policy.explain.cluster import Located
    from cells.policy.explain.trial import TriedFlow

TRIED_KINDS: Final = (
    "NetworkPolicy",
    "CiliumNetworkPolicy",
    "CiliumClusterwideNetworkPolicy",
    "CiliumCIDRGroup",
)
CUT, UNKNOWN, UNANSWERED = 1, 3, 2
"""Exit codes."""
MAX_LISTED: Final = 3
FLOWS_PER_REQUEST: Final = 2000
"""Number of flows in one request to the agent."""
COLOURS: Final = {"cut": "red", "unknown": "yellow"}


class TrialError(click.ClickException):
    """Raised if nothing can be tried; one line."""

    exit_code = UNANSWERED


class TriedConnection(NamedTuple):
    """A connection of this node's endpoint, aggregated from its flows."""

    end: str
    """The endpoint of this node."""
    peer: str
    port: str
    flows: int
    last: int
    """Time of the last flow, in nanoseconds since 1970."""
    remote: bool
    """Whether the peer is a pod of another node, which enforces its own policies."""


@click.command("try")
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
)
@click.option("--since", metavar="TIME", help="Only flows since a time, or for a duration such as 5m.")
@click.option("--until", metavar="TIME", help="Only flows until a time, or until a duration ago.")
@click.option(
    "--input-file",
    metavar="FLOWS",
    help="Use this node's flows in a file of hive observe -o jsonpb or of an exporter; - is stdin.",
)
@click.option(
    "--hubble-socket",
    type=click.Path(path_type=Path),
    default=Path("/var/run/cilium/hubble.sock"),
    show_default=True,
    help="The agent's Hubble socket.",
)
@agent_options
def try_policies(
    files: tuple[Path, ...],
    since: str | None,
    until: str | None,
    input_file: str | None,
    hubble_socket: Path,
    agent_socket: Path,
    timeout: float,
    output: str,
) -> int:
    """Show the flows of this node that the policies in FILE... would have cut, before they are applied.

    A FILE, or a folder, has policies and CIDR groups. They are added to those in force, or replace those of
    the same name. The agent's policy engine decides every connection that passed according to stored flows.
    It decides for its own pods only; the other pod's node decides there. Replies pass with their connections.

    \b
    Exit codes:
      0  nothing that passed would have been cut
      1  some flows would have been cut
      2  nothing can be tried: a policy is refused, or there are no flows
      3  like 0, but the result for some flows is unknown
    """
    objects, notes = _objects(files)
    connections, more = _connections(_responses(since, until, input_file, hubble_socket, timeout))
    notes += more
    results, audited = _results(objects, list(connections), agent_socket, timeout)
    if audited:
        notes.append("policy-audit-mode: what would be cut here is only reported, and passes")
    found = _grouped(connections, results, objects)
    counts = {
        fate: sum(one.flows for flow, one in connections.items() if results[flow]["fate"] == fate)
        for fate in ("passes", "cut", "denied", "unknown")
    }
    elsewhere = sum(
        one.flows for flow, one in connections.items() if one.remote and results[flow]["fate"] == "passes"
    )
    if elsewhere:
        notes.append(
            f"{elsewhere} of the flows that pass have a pod of another node on the other side, where that"
            " node's policies decide: try it there, too"
        )
    shown = {"flows": counts, **found, "notes": notes}
    if (text := document(shown, output)) is not None:
        click.echo(text)
    else:
        _show(found, counts, notes)
    return CUT if counts["cut"] else UNKNOWN if counts["unknown"] else 0


# Policies to try.


def _objects(files: Sequence[Path]) -> tuple[list[Located], list[str]]:
    """Return the objects to try, and invalid ones of the files. Raises TrialError."""
    from cells.policy.explain.cluster import BadFile, read_file, read_folder

    found: list[Located] = []
    notes = []
    for path in files:
        try:
            objects = list(read_folder(path) if path.is_dir() else read_file(path, str(path)))
        except OSError as error:
            raise TrialError(f"{path} cannot be read: {error.strerror}") from None
        for one in objects:
            if isinstance(one, BadFile):
                raise TrialError(f"{one.file}:{one.line}: {one.reason}")
            if one.object["kind"] in TRIED_KINDS:
                found.append(one)
            else:
                notes.append(
                    f"{one.at('')}: {one.object['kind']} does not belong to policies: it is not tried"
                )
    if not found:
        raise TrialError(f"no policy in {', '.join(map(str, files))}: expected {', '.join(TRIED_KINDS)}")
    if any(_selects_nodes(one.object) for one in found):
        notes.append("rules for nodes are not tried: flows of pods are")
    return found, notes


def _selects_nodes(policy: Any) -> bool:
    specs = [policy.get("spec"), *(policy.get("specs") or ())]
    return any("nodeSelector" in spec for spec in specs if isinstance(spec, dict))


# Flows.


def _responses(
    since: str | None, until: str | None, input_file: str | None, hubble_socket: Path, timeout: float
) -> Iterator[GetFlowsResponse]:
    """Yield flows of packets that passed, and losses. Raises TrialError."""
    from cells.hubble.codec import decode, encode
    from cells.hubble.rpc.messages import RpcError
    from cells.hubble.rpc.observer import GetFlowsResponse
    from hive.observe.hubble_client import ConnectError, HubbleClient
    from hive.observe.hubble_observe import flows_of_file
    from hive.observe.hubble_server import CommandError

    request = _request(since, until)
    try:
        if input_file is not None:
            yield from flows_of_file(input_file, request)
            return
        with HubbleClient(f"unix://{hubble_socket}", timeout) as client:
            for batch in client.stream("observer.Observer/GetFlows", encode(request), timeout):
                yield from (decode(GetFlowsResponse, one) for one in batch)
    except CommandError as error:
        raise TrialError(str(error)) from None
    except (ConnectError, RpcError) as error:
        hint = "" if isinstance(error, RpcError) else "; does the agent run with enable-hubble?"
        raise TrialError(f"flows cannot be read: {error}{hint}") from None


def _request(since: str | None, until: str | None) -> GetFlowsRequest:
    from cells.hubble.enums import FlowVerdict
    from cells.hubble.flow import EventTypeFilter, FlowFilter
    from cells.hubble.rpc.observer import GetFlowsRequest

    passed = (FlowVerdict.FORWARDED, FlowVerdict.REDIRECTED, FlowVerdict.AUDIT)
    kinds = tuple(EventTypeFilter(type=kind) for kind in (TRACE, VERDICT))
    return GetFlowsRequest(
        number=(1 << 64) - 1,
        whitelist=[FlowFilter(event_type=kinds, verdict=passed)],
        since=_moment("since", since),
        until=_moment("until", until),
    )


def _moment(name: str, text: str | None) -> int | None:
    from hive.observe.hubble_flags import parse_time

    try:
        return parse_time(text) if text else None
    except ValueError:
        raise TrialError(
            f"--{name}: {text!r}: expected how long ago, such as 5m or 1h30m, or a time, such as"
            " 2026-11-28T08:00:00Z"
        ) from None


TRACE, VERDICT = 4, 5
"""Kinds of the datapath's events."""
PORT_PROTOCOLS: Final = {"TCP": 6, "UDP": 17, "SCTP": 132}
ICMP_PROTOCOLS: Final = {"ICMPv4": 1, "ICMPv6": 58}
PROTOCOL_NAMES: Final = {6: "TCP", 17: "UDP", 132: "SCTP", 1: "ICMP", 58: "ICMPV6"}
UNSELECTED_IDENTITIES: Final = frozenset(range(256)) - {5}
"""Identities of endpoints that pod policies do not select; 5 (init) is a pod without labels yet."""


def _connections(responses: Iterable[GetFlowsResponse]) -> tuple[dict[TriedFlow, TriedConnection], list[str]]:
    """Return the connections that this node's policies decide, and notes about skipped flows."""
    found: dict[TriedFlow, TriedConnection] = {}
    lost = fragments = 0
    for response in responses:
        if response.lost_events is not None:
            lost += response.lost_events.num_events_lost
        flow = response.flow
        if flow is None or flow.IP is None or flow.source is None or flow.destination is None:
            continue
        if (port := _protocol_port(flow.l4)) is None:
            fragments += 1
            continue
        for egress in _decided_directions(flow):
            tried = _tried_flow(flow, port, egress=egress)
            ends = flow.source, flow.destination
            local, remote_end = ends if egress else reversed(ends)
            known = found.get(tried)
            found[tried] = TriedConnection(
                _title(local, ""),
                _title(remote_end, tried.address),
                f"{port[1]}/{PROTOCOL_NAMES[port[0]]}",
                known.flows + 1 if known else 1,
                max(flow.time or 0, known.last if known else 0),
                not remote_end.ID and bool(remote_end.pod_name),
            )
    notes = [f"{lost} events were lost before they became flows"] if lost else []
    if fragments:
        notes.append(f"{fragments} flows without ports, such as fragments, are not tried")
    return found, notes


def _protocol_port(l4: Layer4 | None) -> tuple[int, int] | None:
    """Return protocol and destination port; for ICMP the type."""
    for name, protocol in PORT_PROTOCOLS.items():
        if (ports := getattr(l4, name, None)) is not None:
            return protocol, ports.destination_port
    for name, protocol in ICMP_PROTOCOLS.items():
        if (message := getattr(l4, name, None)) is not None:
            return protocol, message.type
    return None


def _decided_directions(flow: Flow) -> Iterator[bool]:
    """Yield the directions in which this node's policies allowed a connection; True is egress.

    A delivered packet has passed both directions, a policy verdict is for one, and replies have none.
    """
    from cells.hubble.enums import TraceObservationPoint, TraceReason, TrafficDirection

    if flow.event_type is None or flow.is_reply is not False:
        return
    source, destination = flow.source, flow.destination
    if source is None or destination is None or (source.ID and source.ID == destination.ID):
        return
    sides = {True: _is_pod(source), False: _is_pod(destination)}
    points = TraceObservationPoint
    if flow.event_type.type == VERDICT or flow.trace_observation_point == points.TO_PROXY:
        wanted = [flow.traffic_direction == TrafficDirection.EGRESS]
    elif flow.trace_reason not in (TraceReason.NEW, TraceReason.ESTABLISHED):
        return
    elif flow.trace_observation_point == points.TO_ENDPOINT:
        wanted = [True, False]
    elif flow.trace_observation_point in (
        points.TO_STACK,
        points.TO_OVERLAY,
        points.TO_NETWORK,
        points.TO_HOST,
    ):
        wanted = [True]
    else:
        return
    yield from (egress for egress in wanted if sides[egress])


def _is_pod(end: FlowEndpoint) -> bool:
    return bool(end.ID) and end.identity not in UNSELECTED_IDENTITIES


def _tried_flow(flow: Flow, port: tuple[int, int], *, egress: bool) -> TriedFlow:
    from cells.policy.explain.trial import TriedFlow

    ends = (flow.source, flow.destination)
    local, remote_end = ends if egress else (ends[1], ends[0])
    if local is None or remote_end is None or flow.IP is None:
        raise TypeError("expected a flow with both ends")
    return TriedFlow(
        node=flow.node_name.removeprefix("default/"),
        direction="egress" if egress else "ingress",
        endpoint=local.ID,
        identity=local.identity,
        labels=tuple(local.labels),
        peer=remote_end.identity,
        peer_labels=tuple(remote_end.labels),
        address=flow.IP.destination if egress else flow.IP.source,
        names=tuple(flow.destination_names if egress else flow.source_names),
        protocol=port[0],
        port=port[1],
    )


def _title(end: FlowEndpoint, address: str) -> str:
    if end.pod_name:
        return f"{end.namespace}/{end.pod_name}"
    reserved = next((one.removeprefix("reserved:") for one in end.labels if one.startswith("reserved:")), "")
    if not address:
        return reserved or f"endpoint {end.ID}"
    return address if reserved.startswith("world") or not reserved else f"{reserved} ({address})"


# Results.


def _results(
    objects: Sequence[Located], flows: Sequence[TriedFlow], agent_socket: Path, timeout: float
) -> tuple[dict[TriedFlow, Any], bool]:
    """Return the result for each flow, and whether policy-audit-mode is on. Raises TrialError."""
    import msgspec

    found: dict[TriedFlow, Any] = {}
    audited = False
    manifests = [one.object for one in objects]
    for start in range(0, max(len(flows), 1), FLOWS_PER_REQUEST):
        some = flows[start : start + FLOWS_PER_REQUEST]
        body = {"objects": manifests, "flows": msgspec.to_builtins(some)}
        try:
            answer = ask("/hive/policy/trial", agent_socket, timeout=timeout, body=body, method="POST")
        except RefusedError as refused:
            raise TrialError(refused.reason) from None
        audited = answer["audited"]
        found |= {flow: answer["fates"][of] for flow, of in zip(some, answer["of"], strict=True)}
    return found, audited


def _grouped(
    connections: dict[TriedFlow, TriedConnection], results: dict[TriedFlow, Any], objects: Sequence[Located]
) -> dict[str, list[dict[str, Any]]]:
    """Group flows with equal results and identities, the most frequent first; by result."""
    groups: dict[tuple[object, ...], list[TriedFlow]] = {}
    for flow in connections:
        fate = results[flow]
        if fate["fate"] != "passes":
            key = (
                fate["fate"],
                repr(fate),
                flow.direction,
                flow.identity,
                flow.peer,
                flow.protocol,
                flow.port,
            )
            groups.setdefault(key, []).append(flow)
    found: dict[str, list[dict[str, Any]]] = {"cut": [], "unknown": [], "denied": []}
    for flows in groups.values():
        some = [connections[flow] for flow in flows]
        fate = results[flows[0]]
        found[fate["fate"]].append(
            {
                "direction": flows[0].direction,
                "of": sorted({one.end for one in some}),
                "peers": sorted({one.peer for one in some}),
                "port": some[0].port,
                "flows": sum(one.flows for one in some),
                "last": _time(max(one.last for one in some)),
                "verdict": fate["verdict"],
                "why": fate["why"],
                "rules": [_rule_text(one, objects) for one in fate["rules"]],
                "near": [
                    {"rule": _rule_text(rule, objects), "missing": missing} for rule, missing in fate["near"]
                ],
            }
        )
    for several in found.values():
        several.sort(key=lambda one: (-one["flows"], one["of"], one["peers"]))
    return found


def _time(nanoseconds: int) -> str:
    from hive.observe.hubble_text import time_text

    return time_text(nanoseconds, "RFC3339Milli")


def _rule_text(rule: Any, objects: Sequence[Located]) -> str:
    """Return the rule, with file and line if it is one of those that are tried."""
    for one in objects:
        metadata, kind = one.object["metadata"], one.object["kind"]
        namespace = "" if "Clusterwide" in kind else metadata.get("namespace") or "default"
        where = f"{namespace}/" if namespace else ""
        if rule["source"] == f"{kind} {where}{metadata['name']}":
            return f"{one.at(rule['path'])}: {rule['text']}"
    return str(rule["text"])


def _show(found: dict[str, list[dict[str, Any]]], counts: dict[str, int], notes: Sequence[str]) -> None:
    for fate, what in (("cut", "would be cut by"), ("unknown", "not known for")):
        for one in found[fate]:
            for line in _lines(one, click.style(what, fg=COLOURS[fate])):
                click.echo(line)
    total = sum(counts.values())
    parts = [f"{counts['cut']} of {total} flows would be cut", f"{counts['passes']} pass"]
    if counts["unknown"]:
        parts.append(f"{counts['unknown']} are not known")
    if counts["denied"]:
        parts.append(f"{counts['denied']} are denied by rules that are in force already")
    click.echo("; ".join(parts) if total else "no flow shows a new connection: nothing is tried")
    for note in notes:
        click.echo(f"note: {note}")


def _lines(one: dict[str, Any], what: str) -> Iterator[str]:
    of, peers = _abbreviated(one["of"]), _abbreviated(one["peers"])
    source, destination = (of, peers) if one["direction"] == "egress" else (peers, of)
    yield f"{source} -> {destination}, {one['port']}: {what} {one['direction']} of {of}"
    yield f"  {one['flows']} flow{'s' * (one['flows'] != 1)}, the last at {one['last']}"
    if one["why"]:
        yield f"  {one['why']}"
    if one["verdict"] == "drop":
        yield "  no rule allows it, and the direction is denied by default by"
    indent = "    " if one["verdict"] == "drop" else "  by "
    yield from (f"{indent}{rule}" for rule in one["rules"])
    yield from (f"  near: {near['rule']}: {near['missing']}" for near in one["near"][:MAX_LISTED])


def _abbreviated(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"
