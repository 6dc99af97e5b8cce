"""Links on their way out, and the addresses that wait for them.

Needs: Links, Addresses, Flows, Lifecycle.   Gives: LinkTeardown.
A DEL is answered before its link is deleted, since that waits 14 to 20 ms for RCU. Until the link is gone a
packet may still leave it with the old address, and until its flows are forgotten another pod would be taken
for the old one, so the address is released only then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from cells.cni.server.attachment.edges import Addresses, Flows, Links
from cells.ipam import IPAddress, IpamError
from lifecycle import Health, Lifecycle, Logger

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 30.0


class PodAddress(NamedTuple):
    """A pod's address and the pool it is of; without one it is another plugin's to release."""

    ip: IPAddress
    pool: str


class LinkTeardown:
    """Deletes links and then releases addresses, until both are done; failures are retried and told."""

    def __init__(
        self,
        links: Links,
        addresses: Addresses,
        flows: Flows,
        *,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        self._links = links
        self._addresses = addresses
        self._flows = flows
        self._health = health.child("link-teardown")
        self._log = log
        self._tasks: TaskGroup | None = None
        self._leaving: set[anyio.Event] = set()
        self._freed = anyio.Event()
        self._stopping = anyio.Event()
        lifecycle.enter("links on their way out", self.running)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside, links may leave; on the way out those under way are finished, failing ones are left."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._stopping.set()
                self._tasks = None

    def start(self, ifindex: int, *addresses: PodAddress) -> None:
        """Let the link go, and give its addresses back once it is gone."""
        if self._tasks is None:
            raise RuntimeError("links cannot leave: the hook has not started, or has stopped")
        done = anyio.Event()
        self._leaving.add(done)
        self._tasks.start_soon(self._finish, done, ifindex, addresses)

    @property
    def under_way(self) -> bool:
        """Whether some link is on its way out, and its addresses will be free in a moment."""
        return bool(self._leaving)

    async def freed(self) -> None:
        """Wait until one of those under way now is done; return at once when there is none."""
        if self._leaving:
            await self._freed.wait()

    async def settled(self) -> bool:
        """Wait until everything under way now is done; whether there was anything."""
        pending = list(self._leaving)
        for one in pending:
            await one.wait()
        return bool(pending)

    async def finish(self, ifindex: int, *addresses: PodAddress) -> None:
        """Return once the link is gone and its addresses free; what fails goes on in the background."""
        done = anyio.Event()
        self._leaving.add(done)
        await self._finish(done, ifindex, addresses)

    async def _finish(self, done: anyio.Event, ifindex: int, addresses: tuple[PodAddress, ...]) -> None:
        try:
            if await self._delete(ifindex):
                await self._flows.forgotten([ip for ip, _ in addresses])
                self.release(*addresses)
            elif self._tasks is not None:
                self._tasks.start_soon(self._insist, ifindex, addresses)
        finally:
            self._leaving.discard(done)
            done.set()
            self._freed.set()
            self._freed = anyio.Event()

    async def _insist(self, ifindex: int, addresses: tuple[PodAddress, ...]) -> None:
        """Try again until the link is gone; at the stop it is left to the next start's clean-up."""
        delay = _FIRST_RETRY_SECONDS
        while not self._stopping.is_set():
            with anyio.move_on_after(delay):
                await self._stopping.wait()
            delay = min(delay * 2, _LAST_RETRY_SECONDS)
            if await self._delete(ifindex):
                self._health.ok("all links are deleted")
                await self._flows.forgotten([ip for ip, _ in addresses])
                self.release(*addresses)
                return

    async def _delete(self, ifindex: int) -> bool:
        try:
            await self._links.reap((ifindex,))
        except OSError as error:
            self._log.warning("link not deleted, will be tried again", ifindex=ifindex, error=str(error))
            self._health.degraded(f"link {ifindex} cannot be deleted", error)
            return False
        return True

    def release(self, *addresses: PodAddress) -> None:
        """Give addresses back; what is refused is logged and keeps none of the others."""
        for ip, pool in addresses:
            if not pool:
                continue
            try:
                self._addresses.release(ip, pool)
            except IpamError as error:
                self._log.error("address not released", address=str(ip), pool=pool, error=error.text)
