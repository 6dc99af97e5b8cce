"""One ADD, from its request to its reply: retried until it succeeds, or rolled back completely.

prepare() and attach() are synchronous and suffice in the usual case. finish() waits where needed: for an
identity, an address, a policy map, or the deletion of stale links.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio
import msgspec

from cells.base.addresses import text_of
from cells.cni.attach import AddressesPending, Attacher, LinkExists, PodNetns, Prepared
from cells.cni.attachment import AttachPolicyPool, PendingEndpoint, Undo
from cells.cni.protocol import TRY_AGAIN, CniError, encode_result
from cells.cni.request import PluginCall
from cells.cni.transport import PluginConnection
from cells.maps.policy_maps import PoolEmpty
from lifecycle import HiveError, Logger

INTERNAL: Final = "internal error in the agent: see its log"
DELETED: Final = "unable to create endpoint: its deletion was requested before it was made"
_ATTEMPTS = 5
_ADDRESS_SECONDS = 30.0
"""Seconds that an ADD waits for the addresses of pods in deletion; as long as the plugin waits for an agent.
"""

T = TypeVar("T")


class AddTools(msgspec.Struct, frozen=True):
    """What all ADDs share."""

    attacher: Attacher
    pool: AttachPolicyPool
    log: Logger
    wait_for_turn: Callable[[], Awaitable[None]]
    """Waits for an iteration of the event loop with time for a call."""
    finish_creating: Callable[[], object]
    """Finishes the ADD that waits for its link."""


class AddRequest(msgspec.Struct, eq=False):
    """An ADD in progress."""

    tools: AddTools
    connection: PluginConnection
    call: PluginCall
    pod_netns: PodNetns
    undo: Undo = msgspec.field(default_factory=Undo)
    error: CniError | None = None
    before_retry: Callable[[], Awaitable[object]] | None = None
    """What to wait for before the next attempt."""
    exhausted: CniError | None = None
    """The error to report if no address is released in time."""
    prepared: Prepared | None = None
    attachment: PendingEndpoint | None = None
    """The attachment that waits for an identity."""
    answered: bool = False
    abandoned: bool = False
    """Whether the runtime has since requested the pod's deletion."""
    waiting: anyio.CancelScope | None = None
    """The cancel scope of finish()."""

    def prepare(self) -> bool:
        """Choose addresses and link parameters; return whether the link can be created now."""
        self.prepared = self._step(self._prepare)
        return self.prepared is not None and self.prepared.pair is not None

    def start_link(self) -> bool:
        """Start to create the link, one at a time; return False and set ``error`` if that fails."""
        return self._step(self._start_link) is not None

    def await_link(self) -> None:
        """Wait until the started link exists; attach() raises its errors."""
        assert self.prepared is not None  # noqa: S101  (start_link() succeeded)
        self.tools.attacher.await_link(self.prepared)

    def attach(self) -> None:
        """Attach the pod; a no-op if prepare() has failed."""
        if self.prepared is not None:
            self._step(self._attach)

    def remaining(self) -> Callable[[], Awaitable[object]] | None:
        """Return finish() if the ADD must wait, else None. Raises CniError if nothing must be rolled back."""
        if self.error is not None and not self.undo:
            raise self.error
        return None if self.answered else self.finish

    def abandon(self) -> None:
        """Stop waiting: finish() rolls back and raises, unless it has replied."""
        self.abandoned = True
        if self.waiting is not None:
            self.waiting.cancel()

    async def finish(self) -> None:
        """Wait for the identity and complete the ADD; else roll back, wait and retry. Raises CniError."""
        with anyio.CancelScope() as self.waiting:
            if self.abandoned:
                self.waiting.cancel()
            await self._finish()
        if self.waiting.cancelled_caught:
            raise CniError(DELETED)

    async def _finish(self) -> None:
        await self._identify()
        attempts, until = 0, anyio.current_time() + _ADDRESS_SECONDS
        while not self.answered:
            attempts += self.exhausted is None  # waiting for addresses ends with the deadline only
            await self._roll_back()
            if self.exhausted is not None and anyio.current_time() >= until:
                self.error = self.exhausted
            if self.error is not None:
                raise self.error
            if attempts > _ATTEMPTS:
                raise self._concurrent_add()
            if self.before_retry is None or self.connection.disconnected():
                self.connection.refused = True
                self.tools.log.warning(
                    "pod not added: the plugin disconnected", attachment=self.call.attachment_id
                )
                return
            self.tools.finish_creating()  # another ADD's link in creation must not look stale
            try:
                with anyio.CancelScope(deadline=until if self.exhausted is not None else math.inf):
                    await self.before_retry()
                await self.tools.wait_for_turn()
            except HiveError as error:
                raise CniError(f"unable to create endpoint: {error}") from error
            if self.connection.disconnected():
                continue
            await self._try_again()

    async def _try_again(self) -> None:
        self.undo, self.before_retry, self.exhausted = Undo(), None, None
        self.prepare()
        self.attach()
        await self._identify()

    def _concurrent_add(self) -> CniError:
        what = f"another ADD is creating interface {self.call.ifname}"
        text = f"unable to set up veth on host side: {what}"
        return CniError(text, code=TRY_AGAIN)

    async def _roll_back(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.undo.roll_back(self.tools.log)

    def _prepare(self) -> Prepared:
        return self.tools.attacher.prepare(self.call, self.pod_netns, self.undo)

    def _start_link(self) -> bool:
        assert self.prepared is not None  # noqa: S101  (prepare() succeeded)
        self.tools.attacher.start_link(self.prepared)
        return True

    def _attach(self) -> None:
        assert self.prepared is not None  # noqa: S101  (checked by attach())
        attachment = self.tools.attacher.attach(self.prepared, self.undo)
        if attachment.identified:
            self._complete(attachment)
        else:
            self.attachment = attachment

    def _complete(self, attachment: PendingEndpoint) -> None:
        endpoint, stdout = self.tools.attacher.complete(attachment)
        assert self.prepared is not None  # noqa: S101  (the attachment is made from it)
        ports = self.tools.attacher.ports_to_reserve(self.prepared)
        self.answered = self.connection.send(encode_result(stdout, ports))
        if self.answered:
            self.undo.forget()
            ips = ", ".join(map(text_of, endpoint.addresses))
            self.tools.log.info("pod added", endpoint=endpoint.id, pod=endpoint.title, ips=ips)

    async def _identify(self) -> None:
        """Wait for the identity of a new endpoint, and complete the ADD."""
        attachment, self.attachment = self.attachment, None
        if attachment is None:
            return
        try:
            await self.tools.attacher.identify(attachment)
            await self.tools.wait_for_turn()
        except BaseException as error:
            if not isinstance(error, Exception):
                await self._roll_back()
                raise
            self._record_failure(error)
            return
        if not self.connection.disconnected():
            self._step(lambda: self._complete(attachment))

    def _step(self, step: Callable[[], T]) -> T | None:
        """Run a step; on failure, record the error or what to wait for, and return None."""
        try:
            return step()
        except PoolEmpty:
            self.before_retry = self.tools.pool.ready
        except AddressesPending as pending:
            self.before_retry, self.exhausted = pending.wait, pending.error
        except LinkExists:
            self.before_retry = self._remove_stale_links
        except Exception as error:  # noqa: BLE001  # any error must roll back the ADD
            self._record_failure(error)
        return None

    async def _remove_stale_links(self) -> None:
        await self.tools.attacher.remove_stale_links(self.call, self.pod_netns)

    def _record_failure(self, error: Exception) -> None:
        if isinstance(error, CniError):
            self.error = error
            return
        self.tools.log.error("pod not added", attachment=self.call.attachment_id, exc_info=error)
        self.error = CniError(INTERNAL)
