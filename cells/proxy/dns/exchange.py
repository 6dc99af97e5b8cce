"""One query: its client, server, name, policy verdict, timestamps, metrics and access log records.

Source: Cilium 1.17, cilium_proxy_upstream_reply_seconds with its scopes, and cilium_policy_l7_total.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from enum import Enum
from typing import Final, NamedTuple, Protocol

import anyio

from cells.base.addresses import IPAddress, text_of
from cells.base.metrics import Histogram
from cells.cluster.identity.identities import Identity
from cells.cluster.identity.numbers import WORLD
from cells.cluster.ipcache import Ipcache
from cells.endpoint import Endpoint
from cells.observe.events import Events, LookupRecord, Party, lookup_sample
from cells.policy.control import NamedAddresses, NameFilter, NameRules, RulePolicy
from cells.policy.maps import KnownRules
from cells.proxy import EndpointRedirect, RedirectCounters, Statistics
from cells.proxy.dns.port import ProxyPort
from cells.proxy.dns.settings import DNSProxySettings
from cells.proxy.dns.sockets import Address
from cells.proxy.dns.store import NameStore
from cells.proxy.dns.wire import NOERROR, Answer, DNSQuery, WireError, aliases_and_types
from lifecycle import Logger, Table

TCP, UDP = 6, 17


class ClientQuery(NamedTuple):
    """A query as received from a pod."""

    data: bytes
    client: Address
    server: Address
    protocol: int


class PendingQuery(Protocol):
    """A UDP query that waits for its answer."""

    def cancel(self) -> None:
        """Cancel the query."""
        ...


ANSWERED, FAILED, TIMEOUT = "allow", "proxyErr", "timeout"
"""Outcomes of an allowed query: values of the label ``error``."""
SCOPES: Final = (
    "totalTime",
    "upstreamTime",
    "processingTime",
    "semaphoreTime",
    "policyCheckTime",
    "dataplaneTime",
)


class Counts:
    """Counters of the proxies, for metrics."""

    def __init__(self) -> None:
        self.l7 = Counter({"received": 0, "forwarded": 0, "denied": 0, "parse_errors": 0})
        self.requests = Counter({"received": 0, "forwarded": 0, "denied": 0, "parse_errors": 0})
        """The same for HTTP, from Envoy's access log."""
        self.seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        """By label ``error`` and scope."""
        self._scopes: dict[str, list[Histogram]] = {}
        self.update_timeouts = 0
        """Number of answers released before their addresses were allowed."""
        self.rejected = 0
        """Number of queries rejected by the concurrency limits."""

    def scopes(self, error: str) -> list[Histogram]:
        """Return the histograms of one value of the label ``error``, in the order of SCOPES."""
        found = self._scopes.get(error)
        if found is None:
            found = self._scopes[error] = [self.seconds[error, scope] for scope in SCOPES]
        return found


class Exchange:
    """A valid query with its verdict."""

    __slots__ = (
        "admitted",
        "began",
        "checked",
        "flow",
        "forwarded",
        "pending",
        "query",
        "replied",
        "request",
        "verdict",
    )

    def __init__(
        self, request: ClientQuery, forwarded: bytes, query: DNSQuery, flow: QueryFlow, began: float
    ) -> None:
        self.request = request
        self.forwarded = forwarded
        """The query as forwarded to its server."""
        self.query = query
        self.flow = flow
        self.verdict = flow.verdict(query.name)
        self.began = began
        self.checked = self.admitted = time.perf_counter()
        """Time of the verdict, and time at which a slot of dnsproxy-concurrency-limit was acquired."""
        self.replied = 0.0
        self.pending: PendingQuery | None = None
        """The pending UDP query to the server."""

    def count(self, counts: Counts, error: str = ANSWERED) -> None:
        """Record the durations, when the answer was sent or the exchange has failed."""
        now, began, checked, admitted = time.perf_counter(), self.began, self.checked, self.admitted
        replied = self.replied or now
        total, upstream, processing, semaphore, check, dataplane = counts.scopes(error)
        total.observe(now - began)
        upstream.observe(replied - admitted)
        processing.observe(now - replied + checked - began)
        semaphore.observe(admitted - checked)
        check.observe(checked - began)
        dataplane.observe(now - replied)


# Verdicts of policy on names, cached per flow.


class QueryVerdict(Enum):
    """The verdict of policy on a query."""

    FORWARD = "forward"
    REFUSE = "refuse"
    WAIT = "wait"
    """The rules are not computed yet."""


MOST_FLOWS: Final = 4096
MOST_NAMES: Final = 64
"""Maximum number of cached verdicts per flow."""


class QueryFlow:
    """The rules for queries of a client to a server, cached until endpoints, the ipcache or rules change."""

    __slots__ = ("_verdicts", "endpoint", "name_filter", "rules", "statistics")

    def __init__(self, endpoint: Endpoint, rules: object, name_filter: NameFilter | None) -> None:
        self.endpoint = endpoint
        self.rules = rules
        """The computed policy; None until it is computed after a restart."""
        self.name_filter = name_filter
        self.statistics: Statistics | None = None
        """Set by the first counted message."""
        self._verdicts: dict[str, QueryVerdict] = {}

    def verdict(self, name: str) -> QueryVerdict:
        """Return the verdict on a name."""
        found = self._verdicts.get(name)
        if found is None:
            if self.name_filter is None:
                return QueryVerdict.WAIT
            found = QueryVerdict.FORWARD if self.name_filter.allows(name) else QueryVerdict.REFUSE
            if len(self._verdicts) >= MOST_NAMES:
                self._verdicts.clear()
            self._verdicts[name] = found
        return found


class QueryPolicy:
    """Checks queries against policy; after a restart against saved rules, until policy is computed."""

    def __init__(
        self,
        endpoints: Table[int, Endpoint],
        ipcache: Ipcache,
        policy: RulePolicy,
        store: NameStore,
        rules: KnownRules,
    ) -> None:
        self._endpoints = endpoints
        self._by_name = endpoints.by("name")
        self._ipcache = ipcache
        self._policy = policy
        self._rules = NameRules(policy)
        self._store = store
        self._flows: dict[tuple[IPAddress, Address, int], QueryFlow] = {}
        self._flows_revisions = -1, -1
        """Revisions of endpoints and ipcache for which the cached flows are valid."""
        self.known = rules.known
        """Waits until the rules are computed."""

    def endpoint(self, request: ClientQuery) -> Endpoint | None:
        """Return the endpoint with the client's address."""
        address = request.client[0]
        return next(iter(self._by_name.get(f"ipv{address.version}:{text_of(address)}")), None)

    def flow(self, request: ClientQuery) -> QueryFlow | None:
        """Return the flow of a query; None if no endpoint has the client's address. Raises OSError."""
        revisions = self._endpoints.revision, self._ipcache.table.revision
        if self._flows_revisions != revisions or len(self._flows) >= MOST_FLOWS:
            self._flows.clear()
            self._flows_revisions = revisions
        key = request.client[0], request.server, request.protocol
        flow = self._flows.get(key)
        if flow is not None and flow.rules is self._policy.computed.direction(flow.endpoint.id, "egress"):
            return flow
        endpoint = self.endpoint(request)
        if endpoint is None:
            return None
        flow = self._flow(endpoint, request)
        if flow.rules is not None:
            self._flows[key] = flow
        return flow

    def _flow(self, endpoint: Endpoint, request: ClientQuery) -> QueryFlow:
        """Create the flow of a query. Raises OSError."""
        address, port = request.server
        server = text_of(address), request.protocol, port
        if self._rules.changed(endpoint.id):
            self._store.rules_changed(endpoint.id)
        identity = self._ipcache.identity_at(address) or WORLD
        name_filter = self._rules.of(endpoint.id, identity, request.protocol, port)
        if name_filter is None:
            return QueryFlow(endpoint, None, self._store.restored_filter(endpoint.id, server))
        self._store.set_server_filter(endpoint, server, name_filter)
        return QueryFlow(endpoint, self._policy.computed.direction(endpoint.id, "egress"), name_filter)


# Addresses of answers, which must be in the policy maps before the pod receives the answer.


class LearntAddresses:
    """Stores addresses of answers, and waits until policy maps and ipcache contain them."""

    def __init__(
        self, settings: DNSProxySettings, store: NameStore, names: NamedAddresses, counts: Counts, log: Logger
    ) -> None:
        self._most_delay = float(settings.tofqdns_proxy_response_max_delay)
        self._store = store
        self._names = names
        self._counts = counts
        self._log = log

    def learn(self, endpoint: Endpoint, answer: Answer) -> bool:
        """Store the addresses; return whether the answer can be released at once."""
        if answer.code != NOERROR or not answer.addresses:
            return True
        try:
            return self._store.learn(endpoint, answer)
        except OSError as error:
            self._log.warning("a name is not saved for the next agent", name=answer.name, error=str(error))
            return not self._names.stale(answer.addresses)

    async def allowed(self, answer: Answer) -> None:
        """Wait until the addresses are allowed, at most for tofqdns-proxy-response-max-delay."""
        with anyio.move_on_after(self._most_delay) as waiting:
            await self._names.wait_written(answer.addresses)
        if waiting.cancelled_caught:
            self._counts.update_timeouts += 1
            self._log.warning("an answer is released before its addresses are allowed", name=answer.name)


# Access log records of queries and answers, as events of the monitor.
#
# Source: Cilium 1.17, access log records of its DNS proxy. Records are created only while the monitor has
#         clients; statistics count every message.


class DNSAccessLog:
    """Counts queries and answers, and publishes them as events for watchers."""

    def __init__(
        self,
        endpoints: Table[int, Endpoint],
        identities: Table[int, Identity],
        ipcache: Ipcache,
        events: Events,
        port: ProxyPort,
        statistics: RedirectCounters,
        log: Logger,
    ) -> None:
        self._by_name = endpoints.by("name")
        self._identities = identities
        self._ipcache = ipcache
        self._events = events
        self._port = port
        self._statistics = statistics
        self._log = log

    def log_query(self, exchange: Exchange, verdict: str, code: int = 0) -> None:
        """Log a query with its verdict: Forwarded, Denied or Error; the last two with an RCODE."""
        statistics = exchange.flow.statistics or self._redirect_statistics(exchange)
        if statistics is not None:
            statistics.requests.count(verdict)
        if self._events.watched:
            record = self._record(exchange, verdict)
            record.code = code
            self._publish(record)

    def log_response(self, exchange: Exchange, answer: Answer, data: bytes) -> None:
        """Log the server's answer."""
        statistics = exchange.flow.statistics or self._redirect_statistics(exchange)
        if statistics is not None:
            statistics.responses.count("Forwarded")
        if not self._events.watched:
            return
        record = self._record(exchange, "Forwarded")
        record.answer, record.code, record.ttl = True, answer.code, answer.ttl
        record.source, record.destination = record.destination, record.source
        record.addresses = tuple(map(str, answer.addresses))
        try:
            record.aliases, record.answer_types = aliases_and_types(data, exchange.query.end)
        except WireError as error:
            self._log.debug("other records of an answer are not logged", error=str(error))
        self._publish(record)

    def _redirect_statistics(self, exchange: Exchange) -> Statistics | None:
        port, flow = exchange.request.server[1], exchange.flow
        redirect = EndpointRedirect("dns", ingress=False, port=port, proxy_port=self._port.port)
        flow.statistics = self._statistics.redirect(flow.endpoint.id, redirect)
        return flow.statistics

    def _publish(self, record: LookupRecord) -> None:
        self._events.publish(lookup_sample(record))

    def _record(self, exchange: Exchange, verdict: str) -> LookupRecord:
        request, query = exchange.request, exchange.query
        return LookupRecord(
            answer=False,
            time=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            source=self._party(request.client, exchange.flow.endpoint),
            destination=self._party(request.server, None),
            protocol=request.protocol,
            verdict=verdict,
            query=query.name,
            type=query.type,
        )

    def _party(self, end: Address, endpoint: Endpoint | None) -> Party:
        address, port = end
        if endpoint is None:
            endpoint = next(iter(self._by_name.get(f"ipv{address.version}:{text_of(address)}")), None)
        number = endpoint.identity if endpoint is not None else self._ipcache.identity_at(address) or WORLD
        identity = self._identities.get(number)
        labels = identity.labels if identity is not None else ()
        return Party(str(address), port, number, endpoint.id if endpoint is not None else 0, labels)
