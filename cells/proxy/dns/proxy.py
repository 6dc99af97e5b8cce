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
    Asking,
    Awaited,
    Counts,
    DNSAccessLog,
    Exchange,
    LearntAddresses,
    QueryPolicy,
    QueryVerdict,
)
from cells.proxy.dns.port import ProxyRoutes, QuerySource
from cells.proxy.dns.servers import PATIENCE, PodSockets, ServerConnection, Upstream, closed, message
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
    read_answer,
    read_query,
    refusal,
    rewritten,
    truncated,
    udp_size,
    without_rest,
    written_out,
)
from lifecycle import Jobs, Logger

AT_ONCE: Final = 32
"""Datagrams read per callback of the event loop: about 3 ms."""
LARGEST: Final = 65535
RULES_PATIENCE: Final = 5.0
"""Seconds that a query waits for the rules after a restart; its client then retries."""
CONNECTIONS: Final = 1024
"""Maximum number of TCP connections; further ones wait to be accepted."""
CONNECTIONS_OF_ONE: Final = 128
"""Maximum number of TCP connections of one pod; further ones are closed."""
QUERIES_OF_ONE: Final = 4096
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
        self._refused = REJECT_CODES[settings.tofqdns_dns_reject_response_code]
        limit = settings.dnsproxy_concurrency_limit
        self._slots = anyio.Semaphore(limit, fast_acquire=True) if limit else None
        """Limits the queries that wait for their servers; None: unlimited."""
        self._patience = float(settings.dnsproxy_concurrency_processing_grace_period)
        self._answers: dict[int, UDPAnswers] = {}
        self._connections = Counter[IPAddress]()
        """Number of open TCP connections by client."""
        self._waiting: dict[Exchange, None] = {}
        """UDP exchanges without an answer yet."""
        self._of_endpoint = Counter[int]()
        """Number of exchanges by endpoint that wait for their server or for a slot."""
        if routes.enabled:
            jobs.one_shot("serve", self._serve)

    async def _serve(self) -> None:
        """Serve until cancelled. Raises OSError; the job retries."""
        await self._routes.there()  # else the kernel would forward packets that are for the sockets
        loop = asyncio.get_running_loop()
        open_sockets: list[socket.socket] = []
        try:
            self._upstream, self._in_name = Upstream(loop), PodSockets(loop)
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._give_up)
                self._free = anyio.Semaphore(CONNECTIONS)
                self._connections.clear()
                for family in self._port.families:
                    self._answers[4 if family == socket.AF_INET else 6] = UDPAnswers(family)
                for family in self._port.families:
                    open_sockets.append(udp_listener(family, self._port.port))
                    loop.add_reader(open_sockets[-1], self._datagrams, open_sockets[-1])
                    open_sockets.append(tcp_listener(family, self._port.port))
                    self._tasks.start_soon(self._accept, open_sockets[-1])
                self._log.info("the DNS proxy is serving", port=self._port.port)
                await anyio.sleep_forever()
        finally:
            for one in open_sockets:
                loop.remove_reader(one)
                one.close()
            for exchange in list(self._waiting):
                self._end(exchange)
            self._upstream.close()
            self._in_name.close()
            for answers in self._answers.values():
                answers.close()
            self._answers.clear()

    # UDP: a query has no task unless it has to wait

    def _datagrams(self, listener: socket.socket) -> None:
        # With no exchange waiting there is mostly one datagram; a second recvmsg() costs more than a call.
        for _ in range(AT_ONCE if self._waiting else 1):
            try:
                data, ancillary, _, sender = listener.recvmsg(LARGEST, 256)
            except (BlockingIOError, InterruptedError):
                return
            server = original_destination(ancillary)
            if server is not None:
                self._counts.l7["received"] += 1
                asking = Asking(data, (_address(sender[0]), sender[1]), server, UDP)
                self._received(asking, time.perf_counter())

    def _received(self, asking: Asking, began: float) -> None:
        found = self._checked(asking, began)
        if found is None:
            return
        if isinstance(found, bytes):
            self._send(asking, found)
        elif found.verdict is QueryVerdict.REFUSE:
            self._send(asking, refusal(asking.data, found.query.end, self._refused))
            self._refuse(found)
        elif found.verdict is QueryVerdict.WAIT:
            self._tasks.start_soon(self._once_known, asking, began)
        elif self._of_endpoint[found.flow.endpoint.id] >= QUERIES_OF_ONE:
            self._send(asking, self._reject(found))
        elif self._has_slot():
            self._forward(found)
        elif self._patience:
            self._tasks.start_soon(self._later, found)
        else:
            self._send(asking, self._reject(found))

    def _checked(self, asking: Asking, began: float) -> Exchange | bytes | None:
        """Return a query with its verdict; bytes answer an invalid one, None leaves it unanswered."""
        try:
            query = read_query(asking.data)
            asked = rewritten(asking.data, query)
        except WireError as error:
            self._counts.l7["parse_errors"] += 1
            self._log.debug(
                "request of a pod is not a DNS query", pod=str(asking.client[0]), error=str(error)
            )
            return error_response(asking.data)
        try:
            flow = self._policy.flow(asking)
        except OSError as error:
            self._log.warning("a DNS query could not be checked", name=query.name, error=str(error))
            return None
        if flow is None:
            return None
        self._source.announce()
        return Exchange(asking, asked, query, flow, began)

    def _refuse(self, exchange: Exchange) -> None:
        """Count and log a query that policy denies."""
        self._counts.l7["denied"] += 1
        self._access_log.asked(exchange, "Denied", self._refused)

    def _let_through(self, exchange: Exchange) -> None:
        """Count and log a query that is forwarded to its server."""
        self._counts.l7["forwarded"] += 1
        self._access_log.asked(exchange, "Forwarded")

    def _reject(self, exchange: Exchange) -> bytes:
        """Count and log a query above the limit of pending queries; return its answer."""
        self._counts.rejected += 1
        exchange.admitted = time.perf_counter()
        exchange.count(self._counts, FAILED)
        self._access_log.asked(exchange, "Error", SERVFAIL)
        return refusal(exchange.asking.data, exchange.query.end, SERVFAIL)

    def _has_slot(self) -> bool:
        """Acquire a slot of dnsproxy-concurrency-limit without waiting; return whether one was free."""
        try:
            if self._slots is not None:
                self._slots.acquire_nowait()
        except anyio.WouldBlock:
            return False
        return True

    async def _slot_comes(self, exchange: Exchange) -> bool:
        """Wait for a slot during the grace period; return whether one was acquired."""
        if self._slots is not None:
            with anyio.move_on_after(self._patience):
                await self._slots.acquire()
                exchange.admitted = time.perf_counter()
                return True
        return False

    async def _later(self, exchange: Exchange) -> None:
        number = exchange.flow.endpoint.id
        self._of_endpoint[number] += 1
        try:
            found = await self._slot_comes(exchange)
        finally:
            self._of_endpoint[number] -= 1
        if found:
            self._forward(exchange)
        else:
            self._send(exchange.asking, self._reject(exchange))

    async def _once_known(self, asking: Asking, began: float) -> None:
        with anyio.move_on_after(RULES_PATIENCE):
            await self._policy.known()
            self._received(asking, began)

    def _forward(self, exchange: Exchange) -> None:
        self._waiting[exchange] = None
        self._of_endpoint[exchange.flow.endpoint.id] += 1
        failure: OSError | None = None
        try:
            exchange.awaited = self._ask(exchange)
        except OSError as error:
            failure = error
        self._let_through(exchange)  # while the server answers
        if failure is not None:
            self._fail(exchange, failure)

    def _ask(self, exchange: Exchange) -> Awaited:
        """Send the query to its server, from the pod's address if possible. Raises OSError."""
        _, client, server, _ = exchange.asking
        data, identity = exchange.asked, exchange.flow.endpoint.identity
        on_reply = partial(self._replied, exchange)
        if self._source.transparent:
            try:
                return self._in_name.ask(client, server, identity, data, on_reply)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        return self._upstream.ask(server, identity, data, on_reply)

    def _replied(self, exchange: Exchange, data: bytes | OSError) -> bool:
        """Handle a datagram or an error from the server's socket; return whether the exchange ended."""
        if isinstance(data, OSError):
            self._fail(exchange, data)
            return True
        if data[:2] != exchange.asking.data[:2]:
            return False  # a guess: the answer of an attacker must not end the query
        try:
            answer = read_answer(data)
        except WireError as error:
            self._fail(exchange, error)
            return True
        if not answer.is_to(exchange.query):
            return False  # another query's, or a guess: the server's own is still to come
        exchange.replied = time.perf_counter()
        exchange.awaited = None
        self._end(exchange)
        data = without_rest(data, answer)
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
            self._send(exchange.asking, self._written(exchange, data))
        except WireError as error:
            self._log.debug("an answer could not be written", error=str(error))
        exchange.count(self._counts)  # while the pod reads it
        self._access_log.answered(exchange, answer, data)

    def _written(self, exchange: Exchange, data: bytes) -> bytes:
        """Return the answer in the form that pods receive."""
        if self._settings.tofqdns_enable_dns_compression:
            return data
        whole = written_out(data)
        asking, end = exchange.asking, exchange.query.end
        too_long = asking.protocol == UDP and len(whole) > udp_size(asking.data, end)
        return truncated(whole, end) if too_long else whole

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        """Answer SERVFAIL: the server is unreachable, or its answer is malformed."""
        self._end(exchange)
        exchange.count(self._counts, FAILED)
        asking = exchange.asking
        self._access_log.asked(exchange, "Error", SERVFAIL)
        self._log.debug("a DNS server failed", server=str(asking.server[0]), error=str(error))
        self._send(asking, refusal(asking.data, exchange.query.end, SERVFAIL))

    def _end(self, exchange: Exchange) -> None:
        """Stop waiting for the server, and release the slot."""
        if exchange not in self._waiting:
            return
        del self._waiting[exchange]
        self._of_endpoint[exchange.flow.endpoint.id] -= 1
        if exchange.awaited is not None:
            exchange.awaited.give_up()
        self._release_slot()

    async def _give_up(self) -> None:
        """Periodically end exchanges without an answer within PATIENCE."""
        while True:
            await anyio.sleep(1.0)
            since = time.perf_counter() - PATIENCE
            for exchange in [one for one in self._waiting if one.admitted < since]:
                self._end(exchange)
                exchange.count(self._counts, TIMEOUT)

    def _release_slot(self) -> None:
        if self._slots is not None:
            self._slots.release()

    def _send(self, asking: Asking, data: bytes) -> None:
        answers = self._answers.get(asking.client[0].version)
        try:
            if answers is not None:
                answers.send(data, asking.server, asking.client)
        except OSError as error:  # a pod that no longer exists; or it asks again
            self._log.debug("an answer could not be sent", pod=str(asking.client[0]), error=str(error))

    # TCP: a task for each connection, one query after another

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except BaseException:
                self._free.release()
                raise
            self._tasks.start_soon(self._converse, connection)

    async def _converse(self, connection: socket.socket) -> None:
        try:
            client, server = connection.getpeername(), connection.getsockname()
            ends = (ip_address(client[0]), client[1]), (ip_address(server[0]), server[1])
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError:
            connection.close()
            self._free.release()
            return
        pod = ends[0][0]
        self._connections[pod] += 1
        try:
            try:
                if self._connections[pod] <= CONNECTIONS_OF_ONE:
                    await self._answer_all(ends, reader, writer)
            finally:
                await closed(writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self._log.debug("a connection to the DNS proxy ended", error=str(error))
        finally:
            self._connections[pod] -= 1
            if not self._connections[pod]:
                del self._connections[pod]
            self._free.release()

    async def _answer_all(
        self, ends: tuple[Address, Address], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Raises OSError, IncompleteReadError, TimeoutError."""
        to_server: ServerConnection | None = None
        try:
            while (data := await message(reader)) is not None:
                self._counts.l7["received"] += 1
                asking = Asking(data, *ends, TCP)
                if to_server is None:
                    to_server = self._to_server(asking)
                answer = await self._asked_by_tcp(asking, to_server) if to_server is not None else None
                if answer is None:
                    return
                writer.write(len(answer).to_bytes(2, "big") + answer)
                with anyio.fail_after(PATIENCE):
                    await writer.drain()
        finally:
            if to_server is not None:
                to_server.close()

    def _to_server(self, asking: Asking) -> ServerConnection | None:
        """Return a connection to the server; None if no endpoint has the client's address."""
        endpoint = self._policy.endpoint(asking)
        if endpoint is None:
            return None
        client = asking.client if self._source.transparent else None
        return ServerConnection(asking.server, endpoint.identity, client)

    async def _asked_by_tcp(self, asking: Asking, to_server: ServerConnection) -> bytes | None:
        began = time.perf_counter()
        found = self._checked(asking, began)
        if isinstance(found, Exchange) and found.verdict is QueryVerdict.WAIT:
            with anyio.move_on_after(RULES_PATIENCE):
                await self._policy.known()
            found = self._checked(asking, began)
        if not isinstance(found, Exchange):
            return found
        if found.verdict is QueryVerdict.FORWARD:
            return await self._forwarded_by_tcp(found, to_server)
        if found.verdict is QueryVerdict.REFUSE:
            self._refuse(found)
            return refusal(asking.data, found.query.end, self._refused)
        return None

    async def _forwarded_by_tcp(self, exchange: Exchange, to_server: ServerConnection) -> bytes:
        if not self._has_slot() and not await self._slot_comes(exchange):
            return self._reject(exchange)
        asking, query = exchange.asking, exchange.query
        try:
            self._let_through(exchange)
            with anyio.fail_after(PATIENCE):
                data = await to_server.ask(exchange.asked)
            answer = _answer_to(asking.data, query, data)
        except (OSError, EOFError, TimeoutError, WireError) as error:
            to_server.close()  # its own answer may follow, which would be taken for that to the next query
            exchange.count(self._counts, TIMEOUT if isinstance(error, TimeoutError) else FAILED)
            self._access_log.asked(exchange, "Error", SERVFAIL)
            self._log.debug("a DNS server failed", server=str(asking.server[0]), error=str(error))
            return refusal(asking.data, query.end, SERVFAIL)
        finally:
            self._release_slot()
        exchange.replied = time.perf_counter()
        data = without_rest(data, answer)
        if not self._learnt.learn(exchange.flow.endpoint, answer):
            await self._learnt.allowed(answer)
        exchange.count(self._counts)
        self._access_log.answered(exchange, answer, data)
        try:
            return self._written(exchange, data)
        except WireError:
            return refusal(asking.data, query.end, SERVFAIL)


@lru_cache(maxsize=4096)
def _address(text: str) -> IPAddress:
    return address_of(ip_address(text).packed)


def _answer_to(asked: bytes, query: DNSQuery, data: bytes) -> Answer:
    """Parse a server's answer to a query. Raises WireError, also for an answer to another question."""
    answer = read_answer(data)
    if data[:2] != asked[:2] or not answer.is_to(query):
        raise WireError("the answer is to another question")
    return answer
