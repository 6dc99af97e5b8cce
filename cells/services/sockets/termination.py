"""Ends sockets whose backend serves no more: their owners connect again, and get another one.

Controller: the table ``services`` and what the programs remember of sockets in, ended sockets out.
Needs:  Table[ServedFrontend], SocketLB, SocketKernel.   Gives: SocketTermination.
Why:    a UDP socket that is connected to a backend would send there for ever, and no packet tells its owner.

What is looked for is not what has just changed, but every socket that was sent to a backend by a service that
has it no more: a restart in between misses none. A socket is ended only if it is connected to that backend,
and is, by the kernel's number of it, the very one that the service sent there: those that are not connected,
that were connected to the pod directly, or that another service sent there, stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial

from anyio import to_thread

from cells.maps import ReverseSk, ReverseSkKey
from cells.services.control import ServedFrontend
from cells.services.sockets.kernel import SocketKernel
from cells.services.sockets.loader import SocketLB
from cells.services.sockets.settings import SocketLBSettings
from lifecycle import Change, Jobs, Logger, Table

TCP, UDP, ANY = 6, 17, 0


class SocketTermination:
    """A job, if services are served at sockets."""

    def __init__(
        self,
        settings: SocketLBSettings,
        sockets: SocketLB,
        served: Table[ServedFrontend],
        kernel: SocketKernel,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.ended = 0
        """Sockets ended so far."""
        self._served = served
        self._kernel = kernel
        self._log = log
        self._protocols = (UDP, TCP) if settings.bpf_lb_sock_terminate_all_protos else (UDP,)
        self._pods = settings.bpf_lb_sock_terminate_pod_connections and not sockets.host_only
        self._looked_for: set[ReverseSkKey] = set()
        self._due = asyncio.Event()
        if sockets.enabled:
            jobs.one_shot("watch for removed backends", self._watch)
            jobs.observe("end sockets of removed backends", self._looks, self._look)

    async def _watch(self) -> None:
        """Have sockets looked at: at first, for what was removed while no agent ran, and after each removal.

        It never waits for a look. Changes of a row that wait are one change: a backend that was added and
        removed meanwhile would not be in it.
        """
        changes = self._served.changes()
        await self._served.wait_initialized()
        changes.take()
        self._due.set()
        async for batch in changes:
            if any(lost_backends(each, self._protocols) for each in batch):
                self._due.set()

    async def _looks(self) -> AsyncIterator[None]:
        """An item for each look that is due."""
        while True:
            await self._due.wait()
            self._due.clear()
            yield

    async def _look(self, _: None) -> None:
        remembered = await to_thread.run_sync(lambda: list(self._kernel.remembered()))
        frontends = {each.id: each for each in self._served.all()}  # no older than what is remembered
        gone = {key for key, asked in remembered if not still_serves(frontends, key, asked)}
        fresh = gone - self._looked_for
        if fresh:
            ended = await to_thread.run_sync(
                partial(self._kernel.end, fresh, self._protocols, pods=self._pods)
            )
            self.ended += ended
            if ended:
                self._log.info("ended sockets that were connected to removed backends", sockets=ended)
        self._looked_for = gone  # only now: after an error they are looked for again


def lost_backends(change: Change[ServedFrontend], protocols: Iterable[int]) -> bool:
    """Whether a frontend of these protocols has a backend no more."""
    old, new = change.old, change.row
    if old is None or old.key.address.protocol not in {ANY, *protocols}:
        return False
    left = {each.address for each in new.frontend.backends} if new is not None else set()
    return any(each.address not in left for each in old.frontend.backends)


def still_serves(frontends: Mapping[int, ServedFrontend], sent: ReverseSkKey, asked: ReverseSk) -> bool:
    """Whether the service that a socket asked for has the backend it was sent to."""
    served = frontends.get(asked.rev_nat_index)
    if served is None:
        return False
    address = served.key.address
    if address.port != asked.port or (int(address.ip) and address.ip != asked.ip):
        return False  # the number is another service's by now
    return any(
        (each.address.ip, each.address.port) == (sent.ip, sent.port) for each in served.frontend.backends
    )
