"""One ADD, from its request to its answer: tried until it works, or taken back whole.

What meets nothing unusual is prepare() and attach(), both synchronous; what has to wait is finish().
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio
import msgspec

from cells.base.addresses import text_of
from cells.cni.attach import AddressesLeaving, Attacher, NameTaken, PodSide, Prepared
from cells.cni.attachment import AttachPolicyPool, PendingEndpoint, Undo
from cells.cni.protocol import TRY_AGAIN, CniError, encode_result
from cells.cni.request import PluginCall
from cells.cni.transport import PluginConnection
from cells.maps.policy_maps import PoolEmpty
from lifecycle import HiveError, Logger

INTERNAL: Final = "internal error in the agent: see its log"
DELETED: Final = "unable to create endpoint: its deletion was requested before it was made"
_TRIES = 5
_ADDRESS_SECONDS = 30.0
"""How long an ADD waits for the addresses of pods on their way out: as long as the plugin for an agent."""

T = TypeVar("T")


class AddTools(msgspec.Struct, frozen=True):
    """What all ADDs share."""

    attacher: Attacher
    pool: AttachPolicyPool
    log: Logger
    turn: Callable[[], Awaitable[None]]
    """Waits for a round of the loop that has time for a call."""
    settle: Callable[[], object]
    """Finishes the ADD that waits for its link."""


class AddRequest(msgspec.Struct, eq=False):
    """An ADD under way."""

    tools: AddTools
    connection: PluginConnection
    call: PluginCall
    side: PodSide
    undo: Undo = msgspec.field(default_factory=Undo)
    error: CniError | None = None
    before_retry: Callable[[], Awaitable[object]] | None = None
    """What to wait for before the next try."""
    full: CniError | None = None
    """What to say when no address is freed in time."""
    prepared: Prepared | None = None
    attachment: PendingEndpoint | None = None
    """What waits for an identity before it can be completed."""
    answered: bool = False
    abandoned: bool = False
    """Whether the runtime has asked for the pod's deletion meanwhile."""
    waiting: anyio.CancelScope | None = None
    """Of finish()."""

    def prepare(self) -> bool:
        """Choose what the pod gets; whether its link can be made now."""
        self.prepared = self._step(self._prepare)
        return self.prepared is not None and self.prepared.pair is not None

    def begin_link(self) -> bool:
        """Start to make the link, of one pod at a time; False when that does not work: see error."""
        return self._step(self._begin_link) is not None

    def await_link(self) -> None:
        """Wait until the link that was started is there; what went wrong is met by attach()."""
        assert self.prepared is not None  # noqa: S101  (its link was started)
        self.tools.attacher.await_link(self.prepared)

    def attach(self) -> None:
        """Do the rest, unless something is in the way; without prepare() having worked, nothing."""
        if self.prepared is not None:
            self._step(self._attach)

    def rest(self) -> Callable[[], Awaitable[object]] | None:
        """What is left to be waited for. Raises CniError when there is nothing to take back."""
        if self.error is not None and not self.undo:
            raise self.error
        return None if self.answered else self.finish

    def abandon(self) -> None:
        """Wait no longer: finish() rolls back and raises, unless it is through."""
        self.abandoned = True
        if self.waiting is not None:
            self.waiting.cancel()

    async def finish(self) -> None:
        """Complete what waits for its identity; else roll back, wait, try again; or raise why not."""
        with anyio.CancelScope() as self.waiting:
            if self.abandoned:
                self.waiting.cancel()
            await self._finish()
        if self.waiting.cancelled_caught:
            raise CniError(DELETED)

    async def _finish(self) -> None:
        await self._identify()
        tries, until = 0, anyio.current_time() + _ADDRESS_SECONDS
        while not self.answered:
            tries += self.full is None  # others may take what is freed: only time ends waiting for that
            await self._roll_back()
            if self.full is not None and anyio.current_time() >= until:
                self.error = self.full
            if self.error is not None:
                raise self.error
            if tries > _TRIES:
                raise self._made_again()
            if self.before_retry is None or self.connection.disconnected():
                self.connection.refused = True
                self.tools.log.warning(
                    "pod not added: the plugin disconnected", attachment=self.call.attachment_id
                )
                return
            self.tools.settle()  # what is being made for another must not be taken for a leftover
            try:
                with anyio.CancelScope(deadline=until if self.full is not None else math.inf):
                    await self.before_retry()
                await self.tools.turn()
            except HiveError as error:
                raise CniError(f"unable to create endpoint: {error}") from error
            if self.connection.disconnected():
                continue
            await self._try_again()

    async def _try_again(self) -> None:
        self.undo, self.before_retry, self.full = Undo(), None, None
        self.prepare()
        self.attach()
        await self._identify()

    def _made_again(self) -> CniError:
        what = f"another ADD is creating interface {self.call.ifname}"
        text = f"unable to set up veth on host side: {what}"
        return CniError(text, code=TRY_AGAIN)

    async def _roll_back(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.undo.roll_back(self.tools.log)

    def _prepare(self) -> Prepared:
        return self.tools.attacher.prepare(self.call, self.side, self.undo)

    def _begin_link(self) -> bool:
        assert self.prepared is not None  # noqa: S101  (as prepare() asserts)
        self.tools.attacher.begin_link(self.prepared)
        return True

    def _attach(self) -> None:
        assert self.prepared is not None  # noqa: S101  (as attach() sees to)
        attachment = self.tools.attacher.attach(self.prepared, self.undo)
        if attachment.identified:
            self._complete(attachment)
        else:
            self.attachment = attachment

    def _complete(self, attachment: PendingEndpoint) -> None:
        endpoint, stdout = self.tools.attacher.complete(attachment)
        assert self.prepared is not None  # noqa: S101  (the attachment follows from it)
        ports = self.tools.attacher.ports_to_reserve(self.prepared)
        self.answered = self.connection.send(encode_result(stdout, ports))
        if self.answered:
            self.undo.forget()
            ips = ", ".join(map(text_of, endpoint.addresses))
            self.tools.log.info("pod added", endpoint=endpoint.id, pod=endpoint.title, ips=ips)

    async def _identify(self) -> None:
        """Wait for the identity of a new endpoint, and complete it."""
        attachment, self.attachment = self.attachment, None
        if attachment is None:
            return
        try:
            await self.tools.attacher.identify(attachment)
            await self.tools.turn()
        except BaseException as error:
            if not isinstance(error, Exception):
                await self._roll_back()
                raise
            self._failed(error)
            return
        if not self.connection.disconnected():
            self._step(lambda: self._complete(attachment))

    def _step(self, step: Callable[[], T]) -> T | None:
        """Take a step; return None and record the error where it fails."""
        try:
            return step()
        except PoolEmpty:
            self.before_retry = self.tools.pool.ready
        except AddressesLeaving as leaving:
            self.before_retry, self.full = leaving.wait, leaving.error
        except NameTaken:
            self.before_retry = self._clear_the_way
        except Exception as error:  # noqa: BLE001  # whatever it is, the ADD must be undone
            self._failed(error)
        return None

    async def _clear_the_way(self) -> None:
        await self.tools.attacher.clear_the_way(self.call, self.side)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, CniError):
            self.error = error
            return
        self.tools.log.error("pod not added", attachment=self.call.attachment_id, exc_info=error)
        self.error = CniError(INTERNAL)
