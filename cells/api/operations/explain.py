"""Operations that explain why connections are allowed or denied, for ``hive policy``."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from itertools import permutations, product
from typing import Final

from anyio.lowlevel import checkpoint

from cells.api.models.hive import (
    DecidingRule,
    Failure,
    MatrixCell,
    MatrixEnd,
    PolicyMatrix,
    Reached,
    VerdictRules,
)
from cells.api.operations import ApiPart, Route
from cells.api.operations.directory import AgentDirectory
from cells.api.operations.ends import PodsOfIdentity
from cells.api.wire import answer, read_body
from cells.base.addresses import IPAddress
from cells.base.labels import CIDR
from cells.policy.control import PolicyView
from cells.policy.explain import End, Explained, Target, UnanswerableError, explained
from cells.policy.explain.directory import RequestedPort, parse_port, source_of, targets_of
from cells.policy.explain.trial import TrialOutcome, TrialRequest, Tried
from cells.policy.rules import Direction
from lifecycle import Member
from lifecycle.http import Request, Response

MOST_ENDS: Final = 60
"""Maximum number of identities per side of a matrix, besides reserved ones."""

TURN: Final = 50
"""Number of flows after which a trial lets the event loop run other tasks."""


class ExplainOperations:
    """The operations that explain policies."""

    def __init__(self, view: PolicyView | None, directory: AgentDirectory) -> None:
        self._view = view
        self._directory = directory

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/hive/policy/explain", self.get_explanation),
            Route("GET", "/hive/policy/matrix", self.get_matrix),
            Route("GET", "/hive/policy/reachability", self.get_reachability),
            Route("POST", "/hive/policy/trial", self.post_trial),
            Route("GET", "/hive/policy/verdict", self.get_verdict),
        ]

    async def get_explanation(self, request: Request) -> Response:
        """GET /hive/policy/explain: both directions of a connection, as far as this node decides."""
        query = request.query
        name = query.get("destination", "")
        try:
            requested = _requested_port(query)
            source = source_of(self._directory, query.get("source", ""))
            targets = targets_of(self._directory, name, requested, source)
            found = self.explain(source, name, targets)
        except UnanswerableError as error:
            return answer(400, Failure(err=str(error)))
        return answer(200, found)

    async def get_reachability(self, request: Request) -> Response:
        """GET /hive/policy/reachability: which of a namespace's local pods reach which on a port."""
        namespace = request.query.get("namespace", "")
        try:
            requested = _requested_port(request.query)
            pods = self._directory.ends.local(namespace)
            found = [self._reached(*pair, requested) for pair in permutations(pods, 2)]
        except UnanswerableError as error:
            return answer(400, Failure(err=str(error)))
        return answer(200, found)

    async def get_matrix(self, request: Request) -> Response:
        """GET /hive/policy/matrix: verdicts between pods, by identity, and reserved identities."""
        query = request.query
        try:
            most = _most(query)
            known, reserved = self._directory.ends.known_pods(), self._directory.ends.reserved_ends()
            sources, more_sources = _chosen(known, reserved, query.get("from", ""), most)
            destinations, more_destinations = _chosen(known, reserved, query.get("to", ""), most)
            cells = []
            for (at, source), (to, destination) in product(enumerate(sources), enumerate(destinations)):
                if source.end.policy is None and destination.end.policy is None:
                    continue
                found = self.explain(source.end, destination.query, [Target(destination.end)])
                cells.append(
                    MatrixCell(source=at, destination=to, verdict=found.verdict, headline=found.headline)
                )
                await checkpoint()
        except UnanswerableError as error:
            return answer(400, Failure(err=str(error)))
        matrix = PolicyMatrix(
            sources=[_matrix_end(one) for one in sources],
            destinations=[_matrix_end(one) for one in destinations],
            more_sources=more_sources,
            more_destinations=more_destinations,
            namespaces=sorted({one.namespace for one in known} - {""}),
            cells=cells,
        )
        return answer(200, matrix)

    async def post_trial(self, request: Request) -> Response:
        """POST /hive/policy/trial: verdicts on recorded flows if additional policies were in force."""
        requested = read_body(request, TrialRequest, "policies")
        if self._view is None:
            return answer(400, Failure(err="this agent follows no policies: k8s objects are not read"))
        ends = self._directory.ends
        fates: dict[Tried, int] = {}
        found = []
        try:
            trial = self._view.trial(requested.objects, ends.node, ends.names_of)
            for number, flow in enumerate(requested.flows):
                found.append(fates.setdefault(trial.of(flow), len(fates)))
                if number % TURN == 0:
                    await checkpoint()
        except UnanswerableError as error:
            return answer(400, Failure(err=str(error)))
        return answer(200, TrialOutcome(audited=ends.audited, fates=list(fates), of=found))

    async def get_verdict(self, request: Request) -> Response:
        """GET /hive/policy/verdict: the rules behind the verdict of a datapath event."""
        try:
            endpoint, identity, protocol, port = (
                _number(request.query, name) for name in ("endpoint", "identity", "protocol", "port")
            )
            direction = _direction_of(request.query)
            address = _address(request.query)
        except UnanswerableError as error:
            return answer(400, Failure(err=str(error)))
        if self._view is None or not self._view.has_policy(endpoint):
            return answer(200, VerdictRules(verdict="unknown", rules=[]))
        match = self._view.decide(endpoint, direction, identity, protocol, port, address=address)
        origins = sorted(match.entry.origins) if match.entry is not None else []
        rules = [DecidingRule(rule=one.text, labels=one.labels) for one in origins]
        return answer(200, VerdictRules(verdict=match.verdict, rules=rules))

    def _reached(self, source: End, destination: End, requested: RequestedPort) -> Reached:
        targets = targets_of(self._directory, f"pod/{destination.title}", requested, source)
        found = self.explain(source, destination.title, targets)
        return Reached(
            source=source.title,
            destination=destination.title,
            port=found.ways[0].port if len(found.ways) == 1 else "",
            verdict=found.verdict,
            headline=found.headline,
            denied=" and ".join(found.denying),
        )

    @staticmethod
    def explain(source: End, name: str, targets: Sequence[Target]) -> Explained:
        """Return the verdict on a connection.

        Raises UnanswerableError if neither side is an endpoint of this node.
        """
        if source.policy is None and not any(one.end.policy or one.problem for one in targets):
            nodes = dict.fromkeys(one.end.elsewhere for one in targets if one.end.elsewhere)
            where = source.elsewhere or next(iter(nodes), "the node of one of them")
            raise UnanswerableError(f"neither end is an endpoint of this node: ask the agent of {where}")
        return explained(source, name, targets, lambda origin: origin.text)


def _chosen(
    known: Sequence[PodsOfIdentity], reserved: Sequence[PodsOfIdentity], namespace: str, most: int
) -> tuple[list[PodsOfIdentity], int]:
    """Return reserved ends, at most ``most`` ends of the namespace (empty: all), and the number omitted."""
    matching = [one for one in known if namespace in ("", one.namespace)]
    if namespace and not matching:
        raise UnanswerableError(f"no pods of namespace {namespace[:63]} are known")
    return [*reserved, *matching[:most]], max(0, len(matching) - most)


def _matrix_end(one: PodsOfIdentity) -> MatrixEnd:
    return MatrixEnd(
        ask=one.query,
        identity=one.end.identity,
        namespace=one.namespace,
        labels=one.labels,
        pods=one.pods,
        here=one.end.policy is not None,
        networks=[
            label.key.replace("-", ":")
            for near in one.end.around
            if near.identity
            for label in near.labels
            if label.source == CIDR
        ],
    )


def _most(query: dict[str, str]) -> int:
    most = _number(query, "most") if "most" in query else MOST_ENDS
    if not 1 <= most <= MOST_ENDS:
        raise UnanswerableError(f"most {most}: expected 1 to {MOST_ENDS}")
    return most


def _number(query: dict[str, str], name: str) -> int:
    text = query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise UnanswerableError(f"{name} {text[:20]!r}: expected a number")
    return int(text)


def _address(query: dict[str, str]) -> IPAddress | None:
    text = query.get("address", "")
    try:
        return ip_address(text) if text else None
    except ValueError:
        raise UnanswerableError(f"address {text[:40]!r}: expected an IP address") from None


def _direction_of(query: dict[str, str]) -> Direction:
    match query.get("direction", ""):
        case "ingress":
            return "ingress"
        case "egress":
            return "egress"
        case other:
            raise UnanswerableError(f"direction {other[:20]!r}: expected ingress or egress")


def _requested_port(query: dict[str, str]) -> RequestedPort:
    port, protocol = query.get("port", ""), query.get("protocol", "")
    return parse_port(f"{port}/{protocol}".rstrip("/")) if port else RequestedPort("", protocol)


def part(operations: ExplainOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("policy-explain", operations.routes())
