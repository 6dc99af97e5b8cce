"""Envoy's access log, as events and counts.

Edge:   a named pipe into which Envoy writes a line of JSON for each request; lost while no agent runs.
Source: envoyproxy.io, access logging; fifo(7).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from ipaddress import ip_address
from typing import Final

import anyio
import msgspec

from cells.base.addresses import IPAddress, text_of
from cells.cluster.identity.identities import Identity
from cells.cluster.identity.numbers import WORLD
from cells.cluster.ipcache import Ipcache
from cells.endpoint import Endpoint
from cells.observe.events import Events, Party, RequestRecord, request_sample
from cells.policy.control import HTTPRedirect
from cells.proxy import EndpointRedirect, RedirectCounters
from cells.proxy.dns import Counts
from cells.proxy.envoy.ports import RedirectPorts
from cells.proxy.envoy.resources import AccessLogEntry, EnvoyFiles
from lifecycle import Jobs, Logger, Table

PIPE_SIZE: Final = 1 << 20
"""Bytes that wait while the agent is busy."""
AT_ONCE: Final = 1 << 16
LONGEST: Final = 1 << 18
"""Bytes of a line; longer ones are dropped."""


class RequestParties:
    """Endpoints and identities of requests, by the addresses that Envoy logs."""

    def __init__(
        self, endpoints: Table[int, Endpoint], identities: Table[int, Identity], ipcache: Ipcache
    ) -> None:
        self._by_name = endpoints.by("name")
        self._identities = identities
        self._ipcache = ipcache

    def endpoint(self, address: IPAddress) -> Endpoint | None:
        """The endpoint with the address."""
        return next(iter(self._by_name.get(f"ipv{address.version}:{text_of(address)}")), None)

    def party(self, text: str, identity: int) -> Party:
        """The end at ``ADDRESS:PORT``, with this identity unless it is 0. Raises OSError, ValueError."""
        address, port = _end(text)
        endpoint = self.endpoint(address)
        known = identity or self._ipcache.identity_at(address) or WORLD
        identity_row = self._identities.get(known)
        return Party(
            str(address),
            port,
            known,
            endpoint.id if endpoint is not None else 0,
            identity_row.labels if identity_row is not None else (),
        )


class AccessLog:
    """Reads the pipe once Envoy is needed."""

    def __init__(
        self,
        place: EnvoyFiles,
        ports: RedirectPorts,
        redirects: Table[str, HTTPRedirect],
        parties: RequestParties,
        events: Events,
        counts: Counts,
        statistics: RedirectCounters,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._place = place
        self._redirects = redirects
        self._parties = parties
        self._events = events
        self._counts = counts
        self._statistics = statistics
        self._log = log
        self._wanted, self._there = anyio.Event(), anyio.Event()
        self._rest = b""
        self._line = msgspec.json.Decoder(AccessLogEntry)
        if ports.serves:
            jobs.one_shot("read Envoy's access log", self._run)

    async def there(self) -> None:
        """Return once the pipe has a reader: opening a pipe without one would block Envoy."""
        self._wanted.set()
        await self._there.wait()

    async def _run(self) -> None:
        """Until it is cancelled. Raises OSError."""
        await self._wanted.wait()
        path = self._place.requests
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISFIFO(path.stat().st_mode):
            path.unlink()
        if not path.exists():
            os.mkfifo(path, 0o600)
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # our own end keeps it open
        loop = asyncio.get_running_loop()
        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            loop.add_reader(pipe, self._ready, pipe)
            self._there.set()
            await anyio.sleep_forever()
        finally:
            loop.remove_reader(pipe)
            os.close(pipe)

    def _ready(self, pipe: int) -> None:
        try:
            data = self._rest + os.read(pipe, AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > LONGEST:
            self._rest = b""
        for line in lines:
            self._publish(line)

    def _publish(self, data: bytes) -> None:
        counted = self._counts.requests
        try:
            line = self._line.decode(data)
        except ValueError as error:
            counted["parse_errors"] += 1
            self._log.debug("an entry of Envoy's access log cannot be decoded", error=str(error))
            return
        counted["received"] += 1
        counted["denied" if line.denied else "forwarded"] += 1
        redirect = self._redirects.get(line.redirect)
        if redirect is None:
            return
        try:
            self._count(line, redirect)
            if not self._events.watched:
                return
            request = self._record(line, redirect)
        except (OSError, ValueError) as error:
            self._log.debug("a request is not reported", error=str(error))
            return
        self._events.publish(request_sample(request))
        if not line.denied:
            answer = msgspec.structs.replace(request, answer=True, time=line.end, code=line.code)
            self._events.publish(request_sample(answer))

    def _count(self, line: AccessLogEntry, redirect: HTTPRedirect) -> None:
        """The request and its answer, for the endpoint with the policy that decided. Raises ValueError."""
        ingress = redirect.direction == "ingress"
        endpoint = self._parties.endpoint(_end(line.destination if ingress else line.source)[0])
        if endpoint is None:
            return
        through = EndpointRedirect("http", ingress, _end(line.destination)[1], redirect.port)
        self._statistics.request(endpoint.id, through, "Denied" if line.denied else "Forwarded")
        if not line.denied:
            self._statistics.response(endpoint.id, through, "Forwarded")

    def _record(self, line: AccessLogEntry, redirect: HTTPRedirect) -> RequestRecord:
        """The request, as it came; with its answer where it was refused. Raises OSError, ValueError."""
        ingress = redirect.direction == "ingress"
        return RequestRecord(
            answer=False,
            time=line.time,
            ingress=ingress,
            source=self._parties.party(line.source, 0 if ingress else redirect.identity),
            destination=self._parties.party(line.destination, redirect.identity if ingress else 0),
            verdict="Denied" if line.denied else "Forwarded",
            code=line.code if line.denied else 0,
            method=line.method or "",
            url=f"{line.scheme or 'http'}://{line.host or ''}{line.path or ''}",
            protocol=line.protocol or "",
            headers={"X-Request-Id": [line.id]} if line.id else {},
        )


def _end(text: str) -> tuple[IPAddress, int]:
    """The address and port of one end of a connection, as Envoy writes them. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return ip_address(host.strip("[]")), int(port)
