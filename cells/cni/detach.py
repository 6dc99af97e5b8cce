"""The DEL of a pod: maps and state go at once, the link and its address in a moment.

Source: Cilium 1.17, DEL: it names only the container, so all interfaces of a container go.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from cells.base.addresses import IPAddress
from cells.cni.attachment import AttachAllocator, AttachEndpoints, Flows, Links, PodEnd
from cells.cni.request import PluginCall, chain_of
from cells.endpoint import Endpoint, EndpointError
from cells.netlink.connection import NetlinkError
from cells.node.ipam.ranges import IpamError
from lifecycle import Health, Lifecycle, Logger

# Links on their way out, and the addresses that wait for them.

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 30.0


class PodAddress(NamedTuple):
    """A pod's address and the pool it is of; without one it is another plugin's to release."""

    ip: IPAddress
    pool: str


_LeavingLinks = list[tuple[int, tuple[PodAddress, ...]]]
"""Links by number, and their addresses."""


class LinkTeardown:
    """Deletes links and then releases addresses, until both are done; failures are retried and reported."""

    def __init__(
        self,
        links: Links,
        addresses: AttachAllocator,
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
        self._next: _LeavingLinks = []
        """Those that wait while others are deleted."""
        self._next_done = anyio.Event()
        self._reaping = False
        self._leaving: set[anyio.Event] = set()
        self._freed = anyio.Event()
        self._stopping = anyio.Event()
        lifecycle.enter("delete links", self.running)

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
        """Delete the link, and release its addresses afterwards.

        Links that come while others are deleted go together: a task for each would cost a tenth of its DEL.
        """
        if self._tasks is None:
            raise RuntimeError("links cannot be deleted: the hook has not started, or has stopped")
        if not self._next:
            self._next_done = anyio.Event()
            self._leaving.add(self._next_done)
        self._next.append((ifindex, addresses))
        if not self._reaping:
            self._reaping = True
            self._tasks.start_soon(self._reap)

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
        """Return once link and addresses are free; what fails is retried in the background."""
        done = anyio.Event()
        self._leaving.add(done)
        await self._finish(done, ifindex, addresses)

    async def _reap(self) -> None:
        """Delete the links that wait, as long as there are any."""
        try:
            while self._next:
                links, self._next, done = self._next, [], self._next_done
                try:
                    await self._links.reap(ifindex for ifindex, _ in links)
                except OSError:  # of one of them: each by itself
                    rest = partial(self._finish_each, links, done)
                except BaseException:  # cancelled: no waiter may wait for ever
                    self._end(done)
                    raise
                else:
                    rest = partial(self._release_all, links, done)
                if self._tasks is None:
                    await rest()
                else:
                    self._tasks.start_soon(rest)
        finally:
            self._reaping = False
            if self._next:
                self._next = []
                self._end(self._next_done)

    async def _finish_each(self, links: _LeavingLinks, done: anyio.Event) -> None:
        try:
            for ifindex, addresses in links:
                await self.finish(ifindex, *addresses)
        finally:
            self._end(done)

    async def _release_all(self, links: _LeavingLinks, done: anyio.Event) -> None:
        try:
            await self._flows.forgotten([ip for _, addresses in links for ip, _ in addresses])
            for _, addresses in links:
                self.release(*addresses)
        finally:
            self._end(done)

    async def _finish(self, done: anyio.Event, ifindex: int, addresses: tuple[PodAddress, ...]) -> None:
        try:
            if await self._delete(ifindex):
                await self._flows.forgotten([ip for ip, _ in addresses])
                self.release(*addresses)
            elif self._tasks is not None:
                self._tasks.start_soon(self._insist, ifindex, addresses)
        finally:
            self._end(done)

    def _end(self, done: anyio.Event) -> None:
        """What this is of is not under way any more."""
        self._leaving.discard(done)
        done.set()
        self._freed.set()
        self._freed = anyio.Event()

    async def _insist(self, ifindex: int, addresses: tuple[PodAddress, ...]) -> None:
        """Try again until the link no longer exists; at the stop it is left to the next start's clean-up."""
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


class Detacher:
    """Detaches pods. Deleting what is not there is success: the runtime asks again until it hears that."""

    def __init__(self, endpoints: AttachEndpoints, teardown: LinkTeardown, log: Logger) -> None:
        self._endpoints = endpoints
        self._teardown = teardown
        self._log = log

    def detach_container(self, container_id: str) -> int:
        """Remove the container's endpoints and let their links go; returns how many there were."""
        found = self._endpoints.by_container(container_id) if container_id else []
        for endpoint in found:
            self._detach(endpoint)
        return len(found)

    def detach_attachment(self, container_id: str, ifname: str) -> bool:
        """Remove the endpoint of one interface of a container; whether there was one."""
        endpoint = self._endpoints.by_attachment(container_id, ifname)
        if endpoint is None:
            return False
        self._detach(endpoint)
        return True

    async def settled(self) -> None:
        """Return once the links now being deleted no longer exist."""
        await self._teardown.settled()

    def detach_named(self, id_text: str) -> int:
        """Remove the endpoint of an id such as ``cni-attachment-id:<cid>:eth0``; 0 when there is none."""
        try:
            endpoint = self._endpoints.lookup(id_text)
        except EndpointError as error:
            self._log.warning("delete request not understood", id=id_text, error=error.text)
            return 0
        if endpoint is None:
            return 0
        self._detach(endpoint)
        return 1

    def collect(self, network: str, valid: Collection[tuple[str, str]], busy: Collection[str]) -> int:
        """Remove the network's attachments that are not ``valid`` (container, interface); returns how many.

        Never one of another network or of an unknown one, never one with a link of another plugin, nor of
        a container in ``busy``, which has a call under way.
        """
        stale = [
            endpoint
            for endpoint in self._endpoints.all()
            if endpoint.network
            and endpoint.network == network
            and not endpoint.datapath.on_anothers_link
            and endpoint.container_id not in busy
            and (endpoint.container_id, endpoint.container_ifname) not in valid
        ]
        for endpoint in stale:
            self._detach(endpoint)
        return len(stale)

    def _detach(self, endpoint: Endpoint) -> None:
        problems = self._endpoints.delete(endpoint, release_address=False)
        if problems:
            self._log.warning("pod removed with problems", endpoint=endpoint.id, problems=list(problems))
        if not endpoint.datapath.on_anothers_link:
            leaving = (PodAddress(ip, endpoint.pool_of(ip)) for ip in endpoint.addresses)
            self._teardown.start(endpoint.ifindex, *leaving)
        self._log.info("pod removed", endpoint=endpoint.id, pod=endpoint.title)

    def owns_interface(self, call: PluginCall) -> bool:
        """Whether the pod's interface is ours to delete; in a chain it is another plugin's.

        Raises CniError for an unknown chaining mode.
        """
        return not chain_of(call.conf)

    async def remove_stray(self, ifname: str, pod: PodEnd, cookie: int) -> None:
        """Delete an unknown interface, unless a live endpoint has it; failures are logged."""
        for endpoint in self._endpoints.all():
            if cookie and endpoint.netns_cookie == cookie and endpoint.container_ifname == ifname:
                return
        try:
            if await anyio.to_thread.run_sync(pod.delete, ifname):
                self._log.info("stray pod interface deleted", interface=ifname)
        except NetlinkError as error:
            self._log.warning("stray pod interface not deleted", interface=ifname, error=str(error))
