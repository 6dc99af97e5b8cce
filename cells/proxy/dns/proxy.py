"""The transparent DNS proxy: forwards allowed queries to their servers, and releases the answers.

A client gets an answer after its addresses are in the policy maps and the ipcache, so that the first packet
to a learnt address is allowed.

While no socket listens, the datapath sends queries directly to their servers, so DNS works without an agent.

Source: Cilium 1.17, pkg/fqdn/dnsproxy.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections import Counter
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Final

import anyio
import anyio.abc

from cells.base.addresses import IPAddress, address_of
from cells.proxy.dns.exchange import (
    FAILED,
    TCP,
    TIMEOUT,
    UDP,
    ClientQuery,
    Counts,
    DNSAccessLog,
    Exchange,
    LearntAddresses,
    PendingQuery,
    QueryPolicy,
    QueryVerdict,
)
from cells.proxy.dns.port import ProxyRoutes, QuerySource
from cells.proxy.dns.servers import (
    TIMEOUT_SECONDS,
    NodeSockets,
    PodSockets,
    ServerConnection,
    close_connection,
    read_message,
)
from cells.proxy.dns.settings import REJECT_CODES, DNSProxySettings
from cells.proxy.dns.sockets import (
    Address,
    UDPAnswers,
    original_destination,
    tcp_listener,
    udp_listener,
)
from cells.proxy.dns.wire import (
    SERVFAIL,
    Answer,
    DNSQuery,
    WireError,
    error_response,
    parsed_part,
    read_answer,
    read_query,
    refusal,
    sanitized_query,
    truncated,
    udp_size,
    uncompressed,
)
from lifecycle import Jobs, Logger

DATAGRAMS_PER_CALLBACK: Final = 32
"""Datagrams read per callback of the event loop: about 3 ms."""
LARGEST: Final = 65535
RULES_TIMEOUT: Final = 5.0
"""Seconds that a query waits for the rules after a restart; its client then retries."""
MAX_CONNECTIONS: Final = 1024
"""Maximum number of TCP connections; further ones wait to be accepted."""
MAX_CONNECTIONS_PER_POD: Final = 128
"""Maximum number of TCP connections of one pod; further ones are closed."""
MAX_QUERIES_PER_POD: Final = 4096
"""Maximum number of pending UDP queries of one pod; further ones get SERVFAIL. Each may use a socket."""


class DNSProxy:
    """Serves DNS queries of pods, from the start of its job until the agent stops."""

    def __init__(
        self,
        settings: DNSProxySettings,
        policy: QueryPolicy,
        learnt: LearntAddresses,
        source: QuerySource,
        routes: ProxyRoutes,
        counts: Counts,
        access_log: DNSAccessLog,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._port = routes.port
        self._policy = policy
        self._learnt = learnt
        self._source = source
        self._counts = counts
        self._routes = routes
        self._access_log = access_log
        self._log = log
        self._reject_code = REJECT_CODES[settings.tofqdns_dns_reject_response_code]
        limit = settings.dnsproxy_concurrency_limit
        self._slots = anyio.Semaphore(limit, fast_acquire=True) if limit else None
        """Limits the queries that wait for their servers; None: unlimited."""
        self._grace_period = float(settings.dnsproxy_concurrency_processing_grace_period)
        self._udp_answers: dict[int, UDPAnswers] = {}
        self._connections_by_client = Counter[IPAddress]()
        """Number of open TCP connections by client."""
        self._pending: dict[Exchange, None] = {}
        """UDP exchanges without an answer yet."""
        self._pending_by_endpoint = Counter[int]()
        """Number of exchanges by endpoint that wait for their server or for a slot."""
        if routes.enabled:
            jobs.one_shot("serve", self._serve)

    async def _serve(self) -> None:
        """Serve until cancelled. Raises OSError; the job retries."""
        await self._routes.installed()  # without the route the kernel forwards redirected packets
        loop = asyncio.get_running_loop()
        open_sockets: list[socket.socket] = []
        try:
            self._node_sockets, self._pod_sockets = NodeSockets(loop), PodSockets(loop)
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._expire_exchanges)
                self._connection_slots = anyio.Semaphore(MAX_CONNECTIONS)
                self._connections_by_client.clear()
                for family in self._port.families:
                    self._udp_answers[4 if family == socket.AF_INET else 6] = UDPAnswers(family)
                for family in self._port.families:
                    open_sockets.append(udp_listener(family, self._port.port))
                    loop.add_reader(open_sockets[-1], self._read_datagrams, open_sockets[-1])
                    open_sockets.append(tcp_listener(family, self._port.port))
                    self._tasks.start_soon(self._accept, open_sockets[-1])
                self._log.info("the DNS proxy is serving", port=self._port.port)
                await anyio.sleep_forever()
        finally:
            for one in open_sockets:
                loop.remove_reader(one)
                one.close()
            for exchange in list(self._pending):
                self._finish(exchange)
            self._node_sockets.close()
            self._pod_sockets.close()
            for answers in self._udp_answers.values():
                answers.close()
            self._udp_answers.clear()

    # UDP: queries are handled in callbacks; only those that wait for rules, slots or maps have a task

    def _read_datagrams(self, listener: socket.socket) -> None:
        # When idle there is usually one datagram; a second recvmsg() costs more than a callback.
        for _ in range(DATAGRAMS_PER_CALLBACK if self._pending else 1):
            try:
                data, ancillary, _, sender = listener.recvmsg(LARGEST, 256)
            except (BlockingIOError, InterruptedError):
                return
            server = original_destination(ancillary)
            if server is not None:
                self._counts.l7["received"] += 1
                request = ClientQuery(data, (_address(sender[0]), sender[1]), server, UDP)
                self._receive(request, time.perf_counter())

    def _receive(self, request: ClientQuery, began: float) -> None:
        found = self._check(request, began)
        if found is None:
            return
        if isinstance(found, bytes):
            self._send(request, found)
        elif found.verdict is QueryVerdict.REFUSE:
            self._send(request, refusal(request.data, found.query.end, self._reject_code))
            self._log_denied(found)
        elif found.verdict is QueryVerdict.WAIT:
            self._tasks.start_soon(self._receive_when_rules_known, request, began)
        elif self._pending_by_endpoint[found.flow.endpoint.id] >= MAX_QUERIES_PER_POD:
            self._send(request, self._reject(found))
        elif self._try_acquire_slot():
            self._forward(found)
        elif self._grace_period:
            self._tasks.start_soon(self._forward_when_slot_free, found)
        else:
            self._send(request, self._reject(found))

    def _check(self, request: ClientQuery, began: float) -> Exchange | bytes | None:
        """Return a query with its verdict; bytes answer an invalid one, None leaves it unanswered."""
        try:
            query = read_query(request.data)
            forwarded = sanitized_query(request.data, query)
        except WireError as error:
            self._counts.l7["parse_errors"] += 1
            self._log.debug(
                "request of a pod is not a DNS query", pod=str(request.client[0]), error=str(error)
            )
            return error_response(request.data)
        try:
            flow = self._policy.flow(request)
        except OSError as error:
            self._log.warning("a DNS query could not be checked", name=query.name, error=str(error))
            return None
        if flow is None:
            return None
        self._source.announce()
        return Exchange(request, forwarded, query, flow, began)

    def _log_denied(self, exchange: Exchange) -> None:
        """Count and log a query that policy denies."""
        self._counts.l7["denied"] += 1
        self._access_log.log_query(exchange, "Denied", self._reject_code)

    def _log_forwarded(self, exchange: Exchange) -> None:
        """Count and log a query that is forwarded to its server."""
        self._counts.l7["forwarded"] += 1
        self._access_log.log_query(exchange, "Forwarded")

    def _reject(self, exchange: Exchange) -> bytes:
        """Count and log a query above the limit of pending queries; return its answer."""
        self._counts.rejected += 1
        exchange.admitted = time.perf_counter()
        exchange.count(self._counts, FAILED)
        self._access_log.log_query(exchange, "Error", SERVFAIL)
        return refusal(exchange.request.data, exchange.query.end, SERVFAIL)

    def _try_acquire_slot(self) -> bool:
        """Acquire a slot of dnsproxy-concurrency-limit without waiting; return whether one was free."""
        try:
            if self._slots is not None:
                self._slots.acquire_nowait()
        except anyio.WouldBlock:
            return False
        return True

    async def _wait_for_slot(self, exchange: Exchange) -> bool:
        """Wait for a slot during the grace period; return whether one was acquired."""
        if self._slots is not None:
            with anyio.move_on_after(self._grace_period):
                await self._slots.acquire()
                exchange.admitted = time.perf_counter()
                return True
        return False

    async def _forward_when_slot_free(self, exchange: Exchange) -> None:
        number = exchange.flow.endpoint.id
        self._pending_by_endpoint[number] += 1
        try:
            found = await self._wait_for_slot(exchange)
        finally:
            self._pending_by_endpoint[number] -= 1
        if found:
            self._forward(exchange)
        else:
            self._send(exchange.request, self._reject(exchange))

    async def _receive_when_rules_known(self, request: ClientQuery, began: float) -> None:
        with anyio.move_on_after(RULES_TIMEOUT):
            await self._policy.known()
            self._receive(request, began)

    def _forward(self, exchange: Exchange) -> None:
        self._pending[exchange] = None
        self._pending_by_endpoint[exchange.flow.endpoint.id] += 1
        failure: OSError | None = None
        try:
            exchange.pending = self._send_query(exchange)
        except OSError as error:
            failure = error
        self._log_forwarded(exchange)  # not before: the server answers meanwhile
        if failure is not None:
            self._fail(exchange, failure)

    def _send_query(self, exchange: Exchange) -> PendingQuery:
        """Send the query to its server, from the pod's address if possible. Raises OSError."""
        _, client, server, _ = exchange.request
        data, identity = exchange.forwarded, exchange.flow.endpoint.identity
        on_reply = partial(self._handle_reply, exchange)
        if self._source.transparent:
            try:
                return self._pod_sockets.send(client, server, identity, data, on_reply)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        return self._node_sockets.send(server, identity, data, on_reply)

    def _handle_reply(self, exchange: Exchange, data: bytes | OSError) -> bool:
        """Handle a datagram or an error from the server's socket; return whether the exchange ended."""
        if isinstance(data, OSError):
            self._fail(exchange, data)
            return True
        if data[:2] != exchange.request.data[:2]:
            return False  # spoofed: an attacker's answer must not end the query
        try:
            answer = read_answer(data)
        except WireError as error:
            self._fail(exchange, error)
            return True
        if not answer.is_to(exchange.query):
            return False  # of another query, or spoofed: keep waiting
        exchange.replied = time.perf_counter()
        exchange.pending = None
        self._finish(exchange)
        data = parsed_part(data, answer)
        if self._learnt.learn(exchange.flow.endpoint, answer):
            self._release(exchange, answer, data)
        else:
            self._tasks.start_soon(self._release_when_ready, exchange, answer, data)
        return True

    async def _release_when_ready(self, exchange: Exchange, answer: Answer, data: bytes) -> None:
        await self._learnt.allowed(answer)
        self._release(exchange, answer, data)

    def _release(self, exchange: Exchange, answer: Answer, data: bytes) -> None:
        try:
            self._send(exchange.request, self._encoded_answer(exchange, data))
        except WireError as error:
            self._log.debug("an answer could not be written", error=str(error))
        exchange.count(self._counts)  # after the answer was sent, to add no latency
        self._access_log.log_response(exchange, answer, data)

    def _encoded_answer(self, exchange: Exchange, data: bytes) -> bytes:
        """Return the answer in the form that pods receive."""
        if self._settings.tofqdns_enable_dns_compression:
            return data
        whole = uncompressed(data)
        request, end = exchange.request, exchange.query.end
        too_long = request.protocol == UDP and len(whole) > udp_size(request.data, end)
        return truncated(whole, end) if too_long else whole

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        """Answer SERVFAIL: the server is unreachable, or its answer is malformed."""
        self._finish(exchange)
        exchange.count(self._counts, FAILED)
        request = exchange.request
        self._access_log.log_query(exchange, "Error", SERVFAIL)
        self._log.debug("a DNS server failed", server=str(request.server[0]), error=str(error))
        self._send(request, refusal(request.data, exchange.query.end, SERVFAIL))

    def _finish(self, exchange: Exchange) -> None:
        """Stop waiting for the server, and release the slot."""
        if exchange not in self._pending:
            return
        del self._pending[exchange]
        self._pending_by_endpoint[exchange.flow.endpoint.id] -= 1
        if exchange.pending is not None:
            exchange.pending.cancel()
        self._release_slot()

    async def _expire_exchanges(self) -> None:
        """Periodically end exchanges without an answer within PATIENCE."""
        while True:
            await anyio.sleep(1.0)
            since = time.perf_counter() - TIMEOUT_SECONDS
            for exchange in [one for one in self._pending if one.admitted < since]:
                self._finish(exchange)
                exchange.count(self._counts, TIMEOUT)

    def _release_slot(self) -> None:
        if self._slots is not None:
            self._slots.release()

    def _send(self, request: ClientQuery, data: bytes) -> None:
        answers = self._udp_answers.get(request.client[0].version)
        try:
            if answers is not None:
                answers.send(data, request.server, request.client)
        except OSError as error:  # the pod was deleted, or its resolver retries
            self._log.debug("an answer could not be sent", pod=str(request.client[0]), error=str(error))

    # TCP: a task for each connection, which handles its queries one after another

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._connection_slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except BaseException:
                self._connection_slots.release()
                raise
            self._tasks.start_soon(self._serve_connection, connection)

    async def _serve_connection(self, connection: socket.socket) -> None:
        try:
            client, server = connection.getpeername(), connection.getsockname()
            ends = (ip_address(client[0]), client[1]), (ip_address(server[0]), server[1])
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError:
            connection.close()
            self._connection_slots.release()
            return
        pod = ends[0][0]
        self._connections_by_client[pod] += 1
        try:
            try:
                if self._connections_by_client[pod] <= MAX_CONNECTIONS_PER_POD:
                    await self._answer_all(ends, reader, writer)
            finally:
                await close_connection(writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self._log.debug("a connection to the DNS proxy ended", error=str(error))
        finally:
            self._connections_by_client[pod] -= 1
            if not self._connections_by_client[pod]:
                del self._connections_by_client[pod]
            self._connection_slots.release()

    async def _answer_all(
        self, ends: tuple[Address, Address], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Raises OSError, IncompleteReadError, TimeoutError."""
        to_server: ServerConnection | None = None
        try:
            while (data := await read_message(reader)) is not None:
                self._counts.l7["received"] += 1
                request = ClientQuery(data, *ends, TCP)
                if to_server is None:
                    to_server = self._server_connection(request)
                answer = await self._answer_tcp(request, to_server) if to_server is not None else None
                if answer is None:
                    return
                writer.write(len(answer).to_bytes(2, "big") + answer)
                with anyio.fail_after(TIMEOUT_SECONDS):
                    await writer.drain()
        finally:
            if to_server is not None:
                to_server.close()

    def _server_connection(self, request: ClientQuery) -> ServerConnection | None:
        """Return a connection to the server; None if no endpoint has the client's address."""
        endpoint = self._policy.endpoint(request)
        if endpoint is None:
            return None
        client = request.client if self._source.transparent else None
        return ServerConnection(request.server, endpoint.identity, client)

    async def _answer_tcp(self, request: ClientQuery, to_server: ServerConnection) -> bytes | None:
        began = time.perf_counter()
        found = self._check(request, began)
        if isinstance(found, Exchange) and found.verdict is QueryVerdict.WAIT:
            with anyio.move_on_after(RULES_TIMEOUT):
                await self._policy.known()
            found = self._check(request, began)
        if not isinstance(found, Exchange):
            return found
        if found.verdict is QueryVerdict.FORWARD:
            return await self._forward_tcp(found, to_server)
        if found.verdict is QueryVerdict.REFUSE:
            self._log_denied(found)
            return refusal(request.data, found.query.end, self._reject_code)
        return None

    async def _forward_tcp(self, exchange: Exchange, to_server: ServerConnection) -> bytes:
        if not self._try_acquire_slot() and not await self._wait_for_slot(exchange):
            return self._reject(exchange)
        request, query = exchange.request, exchange.query
        try:
            self._log_forwarded(exchange)
            with anyio.fail_after(TIMEOUT_SECONDS):
                data = await to_server.exchange(exchange.forwarded)
            answer = _answer_to(request.data, query, data)
        except (OSError, EOFError, TimeoutError, WireError) as error:
            to_server.close()  # a late answer would be read as that to the next query
            exchange.count(self._counts, TIMEOUT if isinstance(error, TimeoutError) else FAILED)
            self._access_log.log_query(exchange, "Error", SERVFAIL)
            self._log.debug("a DNS server failed", server=str(request.server[0]), error=str(error))
            return refusal(request.data, query.end, SERVFAIL)
        finally:
            self._release_slot()
        exchange.replied = time.perf_counter()
        data = parsed_part(data, answer)
        if not self._learnt.learn(exchange.flow.endpoint, answer):
            await self._learnt.allowed(answer)
        exchange.count(self._counts)
        self._access_log.log_response(exchange, answer, data)
        try:
            return self._encoded_answer(exchange, data)
        except WireError:
            return refusal(request.data, query.end, SERVFAIL)


@lru_cache(maxsize=4096)
def _address(text: str) -> IPAddress:
    return address_of(ip_address(text).packed)


def _answer_to(asked: bytes, query: DNSQuery, data: bytes) -> Answer:
    """Parse a server's answer to a query. Raises WireError, also for an answer to another question."""
    answer = read_answer(data)
    if data[:2] != asked[:2] or not answer.is_to(query):
        raise WireError("the answer is to another question")
    return answer
