"""Lookups as events of the monitor: who asked which server for what, and what it said.

For:    DNSProxy. Needs: Table[Endpoint], Table[Identity], Ipcache, Events, ProxyPort, ProxyStatistics.
Gives:  LookupLog.
Source: Cilium 1.17, access log records of its DNS proxy.
Events are made only while somebody watches; all lookups are counted.
"""

from __future__ import annotations

from datetime import UTC, datetime

from cells.cluster.identity import WORLD, Identity
from cells.cluster.ipcache import Ipcache
from cells.endpoint import Endpoint
from cells.ipam import text_of
from cells.observe.events import Events, LookupRecord, Party, lookup_sample
from cells.proxy.dns.exchange import Asking, Exchange
from cells.proxy.dns.port import ProxyPort
from cells.proxy.dns.sockets import Address
from cells.proxy.dns.wire import Answer, Query, WireError, read_rest
from cells.proxy.statistics import ProxyStatistics, Redirect
from lifecycle import Logger, Table


class LookupLog:
    """Tells of lookups as they happen."""

    def __init__(
        self,
        endpoints: Table[Endpoint],
        identities: Table[Identity],
        ipcache: Ipcache,
        events: Events,
        port: ProxyPort,
        statistics: ProxyStatistics,
        log: Logger,
    ) -> None:
        self._by_name = endpoints.by("name")
        self._identities = identities
        self._ipcache = ipcache
        self._events = events
        self._port = port
        self._statistics = statistics
        self._log = log

    def asked(self, asking: Asking, endpoint: Endpoint, query: Query, verdict: str, code: int = 0) -> None:
        """A query was let through, refused with a code, or came to nothing: Forwarded, Denied or Error."""
        self._statistics.request(endpoint.id, self._redirect(asking), verdict)
        if self._events.watched:
            record = self._record(asking, endpoint, query, verdict)
            record.code = code
            self._tell(record)

    def answered(self, exchange: Exchange, answer: Answer, data: bytes) -> None:
        """The server's answer is on its way to the pod."""
        self._statistics.response(exchange.endpoint.id, self._redirect(exchange.asking), "Forwarded")
        if not self._events.watched:
            return
        record = self._record(exchange.asking, exchange.endpoint, exchange.query, "Forwarded")
        record.answer, record.code, record.ttl = True, answer.code, answer.ttl
        record.source, record.destination = record.destination, record.source
        record.addresses = tuple(map(str, answer.addresses))
        try:
            record.aliases, record.answer_types = read_rest(data, exchange.query.end)
        except WireError as error:
            self._log.debug("other records of an answer are not logged", error=str(error))
        self._tell(record)

    def _redirect(self, asking: Asking) -> Redirect:
        return Redirect("dns", ingress=False, port=asking.server[1], proxy_port=self._port.port)

    def _tell(self, record: LookupRecord) -> None:
        self._events.tell(lookup_sample(record))

    def _record(self, asking: Asking, endpoint: Endpoint, query: Query, verdict: str) -> LookupRecord:
        return LookupRecord(
            answer=False,
            time=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            source=self._party(asking.client, endpoint),
            destination=self._party(asking.server, None),
            protocol=asking.protocol,
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
