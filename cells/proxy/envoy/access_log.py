"""Reads Envoy's access log: publishes requests as events, and counts them.

Envoy writes a line of JSON per request to a named pipe; lines are lost while no agent runs.

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
"""Capacity of the pipe in bytes, for lines that arrive while the agent is busy."""
READ_SIZE: Final = 1 << 16
MAX_LINE: Final = 1 << 18
"""Maximum bytes of a line; longer ones are dropped."""


class RequestParties:
    """Finds endpoints and identities of requests by the addresses in the log."""

    def __init__(
        self, endpoints: Table[int, Endpoint], identities: Table[int, Identity], ipcache: Ipcache
    ) -> None:
        self._by_name = endpoints.by("name")
        self._identities = identities
        self._ipcache = ipcache

    def endpoint(self, address: IPAddress) -> Endpoint | None:
        """Return the endpoint with the address."""
        return next(iter(self._by_name.get(f"ipv{address.version}:{text_of(address)}")), None)

    def party(self, text: str, identity: int) -> Party:
        """Return the party at ``ADDRESS:PORT``; identity 0 is looked up. Raises OSError, ValueError."""
        address, port = _address_port(text)
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
    """Reads the pipe from the first redirect on."""

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
        self._wanted, self._ready_event = anyio.Event(), anyio.Event()
        self._partial_line = b""
        self._decoder = msgspec.json.Decoder(AccessLogEntry)
        if ports.serves:
            jobs.one_shot("read Envoy's access log", self._run)

    async def wait_ready(self) -> None:
        """Wait until the pipe has a reader; without one Envoy would block when it opens the pipe."""
        self._wanted.set()
        await self._ready_event.wait()

    async def _run(self) -> None:
        """Read the pipe until cancelled. Raises OSError."""
        await self._wanted.wait()
        path = self._place.requests
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISFIFO(path.stat().st_mode):
            path.unlink()
        if not path.exists():
            os.mkfifo(path, 0o600)
        # our own write end keeps the pipe open while Envoy does not run
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        loop = asyncio.get_running_loop()
        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            loop.add_reader(pipe, self._ready, pipe)
            self._ready_event.set()
            await anyio.sleep_forever()
        finally:
            loop.remove_reader(pipe)
            os.close(pipe)

    def _ready(self, pipe: int) -> None:
        try:
            data = self._partial_line + os.read(pipe, READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        *lines, self._partial_line = data.split(b"\n")
        if len(self._partial_line) > MAX_LINE:
            self._partial_line = b""
        for line in lines:
            self._publish(line)

    def _publish(self, data: bytes) -> None:
        counted = self._counts.requests
        try:
            entry = self._decoder.decode(data)
        except ValueError as error:
            counted["parse_errors"] += 1
            self._log.debug("an entry of Envoy's access log cannot be decoded", error=str(error))
            return
        counted["received"] += 1
        counted["denied" if entry.denied else "forwarded"] += 1
        redirect = self._redirects.get(entry.redirect)
        if redirect is None:
            return
        try:
            self._count(entry, redirect)
            if not self._events.watched:
                return
            request = self._record(entry, redirect)
        except (OSError, ValueError) as error:
            self._log.debug("a request is not reported", error=str(error))
            return
        self._events.publish(request_sample(request))
        if not entry.denied:
            answer = msgspec.structs.replace(request, answer=True, time=entry.end, code=entry.code)
            self._events.publish(request_sample(answer))

    def _count(self, entry: AccessLogEntry, redirect: HTTPRedirect) -> None:
        """Count the request and its answer for the endpoint with the deciding policy. Raises ValueError."""
        ingress = redirect.direction == "ingress"
        endpoint = self._parties.endpoint(_address_port(entry.destination if ingress else entry.source)[0])
        if endpoint is None:
            return
        endpoint_redirect = EndpointRedirect(
            "http", ingress, _address_port(entry.destination)[1], redirect.port
        )
        self._statistics.request(endpoint.id, endpoint_redirect, "Denied" if entry.denied else "Forwarded")
        if not entry.denied:
            self._statistics.response(endpoint.id, endpoint_redirect, "Forwarded")

    def _record(self, entry: AccessLogEntry, redirect: HTTPRedirect) -> RequestRecord:
        """Return the request's event, with the status if it was denied. Raises OSError, ValueError."""
        ingress = redirect.direction == "ingress"
        return RequestRecord(
            answer=False,
            time=entry.time,
            ingress=ingress,
            source=self._parties.party(entry.source, 0 if ingress else redirect.identity),
            destination=self._parties.party(entry.destination, redirect.identity if ingress else 0),
            verdict="Denied" if entry.denied else "Forwarded",
            code=entry.code if entry.denied else 0,
            method=entry.method or "",
            url=f"{entry.scheme or 'http'}://{entry.host or ''}{entry.path or ''}",
            protocol=entry.protocol or "",
            headers={"X-Request-Id": [entry.id]} if entry.id else {},
        )


def _address_port(text: str) -> tuple[IPAddress, int]:
    """Parse ``ADDRESS:PORT``, as Envoy logs it. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return ip_address(host.strip("[]")), int(port)
