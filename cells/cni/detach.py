"""Detaches pods: the endpoint is deleted at once, its link and addresses afterwards in the background.

Source: Cilium 1.17, DEL: it names only the container, so all its interfaces are detached.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from cells.base.addresses import IPAddress
from cells.cni.attachment import AttachAllocator, AttachEndpoints, ConntrackCleanup, Links, PodNetlink
from cells.cni.request import PluginCall, chain_of
from cells.endpoint import Endpoint, EndpointError
from cells.netlink.connection import NetlinkError
from cells.node.ipam.ranges import IpamError
from lifecycle import Health, Lifecycle, Logger

# Deletion of links, and the release of their addresses afterwards.

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 30.0


class PodAddress(NamedTuple):
    """A pod's address and its pool; without a pool, another IPAM plugin releases it."""

    ip: IPAddress
    pool: str


_DeletedLinks = list[tuple[int, tuple[PodAddress, ...]]]
"""Links by index, and their addresses."""


class LinkTeardown:
    """Deletes links and then releases their addresses; failures are retried and reported."""

    def __init__(
        self,
        links: Links,
        addresses: AttachAllocator,
        flows: ConntrackCleanup,
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
        self._queued: _DeletedLinks = []
        """Links that wait while others are deleted."""
        self._queued_done = anyio.Event()
        self._reaping = False
        self._pending: set[anyio.Event] = set()
        self._any_done = anyio.Event()
        self._stopping = anyio.Event()
        lifecycle.enter("delete links", self.running)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Delete links in the context; on exit, finish deletions in progress but do not retry."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._stopping.set()
                self._tasks = None

    def start(self, ifindex: int, *addresses: PodAddress) -> None:
        """Delete the link in the background, then release its addresses.

        Links that are queued during a deletion are deleted in one batch: a task for each would add a tenth to
        its DEL.
        """
        if self._tasks is None:
            raise RuntimeError("links cannot be deleted: the hook has not started, or has stopped")
        if not self._queued:
            self._queued_done = anyio.Event()
            self._pending.add(self._queued_done)
        self._queued.append((ifindex, addresses))
        if not self._reaping:
            self._reaping = True
            self._tasks.start_soon(self._reap)

    @property
    def busy(self) -> bool:
        """Whether links are in deletion, so that addresses will be released."""
        return bool(self._pending)

    async def wait_any_deleted(self) -> None:
        """Wait until one of the current deletions is done; return at once if there is none."""
        if self._pending:
            await self._any_done.wait()

    async def wait_deleted(self) -> bool:
        """Wait until all current deletions are done; return whether there were any."""
        waiting = list(self._pending)
        for one in waiting:
            await one.wait()
        return bool(waiting)

    async def finish(self, ifindex: int, *addresses: PodAddress) -> None:
        """Delete the link and release its addresses. On failure, return and retry in the background."""
        done = anyio.Event()
        self._pending.add(done)
        await self._finish(done, ifindex, addresses)

    async def _reap(self) -> None:
        """Delete the queued links, in batches, until the queue is empty."""
        try:
            while self._queued:
                links, self._queued, done = self._queued, [], self._queued_done
                try:
                    await self._links.reap(ifindex for ifindex, _ in links)
                except OSError:  # one link failed: delete them one by one
                    rest = partial(self._finish_each, links, done)
                except BaseException:  # cancelled: release the waiters
                    self._set_done(done)
                    raise
                else:
                    rest = partial(self._release_all, links, done)
                if self._tasks is None:
                    await rest()
                else:
                    self._tasks.start_soon(rest)
        finally:
            self._reaping = False
            if self._queued:
                self._queued = []
                self._set_done(self._queued_done)

    async def _finish_each(self, links: _DeletedLinks, done: anyio.Event) -> None:
        try:
            for ifindex, addresses in links:
                await self.finish(ifindex, *addresses)
        finally:
            self._set_done(done)

    async def _release_all(self, links: _DeletedLinks, done: anyio.Event) -> None:
        try:
            await self._flows.wait_scrubbed([ip for _, addresses in links for ip, _ in addresses])
            for _, addresses in links:
                self.release(*addresses)
        finally:
            self._set_done(done)

    async def _finish(self, done: anyio.Event, ifindex: int, addresses: tuple[PodAddress, ...]) -> None:
        try:
            if await self._delete(ifindex):
                await self._flows.wait_scrubbed([ip for ip, _ in addresses])
                self.release(*addresses)
            elif self._tasks is not None:
                self._tasks.start_soon(self._retry, ifindex, addresses)
        finally:
            self._set_done(done)

    def _set_done(self, done: anyio.Event) -> None:
        """Mark a deletion as done."""
        self._pending.discard(done)
        done.set()
        self._any_done.set()
        self._any_done = anyio.Event()

    async def _retry(self, ifindex: int, addresses: tuple[PodAddress, ...]) -> None:
        """Retry until the link no longer exists. After a stop, the next start cleans it up."""
        delay = _FIRST_RETRY_SECONDS
        while not self._stopping.is_set():
            with anyio.move_on_after(delay):
                await self._stopping.wait()
            delay = min(delay * 2, _LAST_RETRY_SECONDS)
            if await self._delete(ifindex):
                self._health.ok("all links are deleted")
                await self._flows.wait_scrubbed([ip for ip, _ in addresses])
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
        """Release addresses. Errors are logged."""
        for ip, pool in addresses:
            if not pool:
                continue
            try:
                self._addresses.release(ip, pool)
            except IpamError as error:
                self._log.error("address not released", address=str(ip), pool=pool, error=error.text)


class Detacher:
    """Detaches pods. Unknown attachments are a success: runtimes repeat a DEL until it succeeds."""

    def __init__(self, endpoints: AttachEndpoints, teardown: LinkTeardown, log: Logger) -> None:
        self._endpoints = endpoints
        self._teardown = teardown
        self._log = log

    def detach_container(self, container_id: str) -> int:
        """Delete the container's endpoints and links; return the number of endpoints."""
        found = self._endpoints.by_container(container_id) if container_id else []
        for endpoint in found:
            self._detach(endpoint)
        return len(found)

    def detach_attachment(self, container_id: str, ifname: str) -> bool:
        """Delete the endpoint and link of one interface; return whether it existed."""
        endpoint = self._endpoints.by_attachment(container_id, ifname)
        if endpoint is None:
            return False
        self._detach(endpoint)
        return True

    async def wait_links_deleted(self) -> None:
        """Wait until the links in deletion no longer exist."""
        await self._teardown.wait_deleted()

    def detach_named(self, id_text: str) -> int:
        """Delete the endpoint of an id (``cni-attachment-id:<cid>:eth0``); return 1, or 0 if unknown."""
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
        """Delete the network's attachments that are not ``valid``; return their number.

        ``valid`` are pairs of container and interface. Attachments of other or unknown networks are never
        deleted, nor chained ones, nor those of containers in ``busy``, which have a call in progress.
        """
        stale = [
            endpoint
            for endpoint in self._endpoints.all()
            if endpoint.network
            and endpoint.network == network
            and not endpoint.datapath.is_chained
            and endpoint.container_id not in busy
            and (endpoint.container_id, endpoint.container_ifname) not in valid
        ]
        for endpoint in stale:
            self._detach(endpoint)
        return len(stale)

    def _detach(self, endpoint: Endpoint) -> None:
        problems = self._endpoints.delete(endpoint, release_address=False)
        if problems:
            self._log.warning("pod removed with errors", endpoint=endpoint.id, problems=list(problems))
        if not endpoint.datapath.is_chained:
            addresses = (PodAddress(ip, endpoint.pool_of(ip)) for ip in endpoint.addresses)
            self._teardown.start(endpoint.ifindex, *addresses)
        self._log.info("pod removed", endpoint=endpoint.id, pod=endpoint.title)

    def owns_interface(self, call: PluginCall) -> bool:
        """Whether the pod's interface is ours to delete; in a chain, it belongs to another plugin.

        Raises CniError for an unknown chaining mode.
        """
        return not chain_of(call.conf)

    async def delete_unknown_interface(self, ifname: str, pod: PodNetlink, cookie: int) -> None:
        """Delete an unknown interface, unless a live endpoint has it. Errors are logged."""
        for endpoint in self._endpoints.all():
            if cookie and endpoint.netns_cookie == cookie and endpoint.container_ifname == ifname:
                return
        try:
            if await anyio.to_thread.run_sync(pod.delete, ifname):
                self._log.info("stray pod interface deleted", interface=ifname)
        except NetlinkError as error:
            self._log.warning("stray pod interface not deleted", interface=ifname, error=str(error))
