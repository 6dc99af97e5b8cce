"""Who wants to hear of packets, and what each has not read yet.

For:    what shows or forwards events. Needs: Maps, EventsSettings. Gives: Events, Subscription.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import anyio

from cells.maps import Maps
from cells.observe.events.reader import Reader
from cells.observe.events.records import Lost, Sample
from cells.observe.events.settings import EventsSettings
from lifecycle import Hook, Lifecycle


class Subscription:
    """The events of one subscriber: iterate over it, from one task; each time, all that has come since.

    The iteration ends when the agent stops. What does not fit into the queue is lost; a Lost stands where it
    was, and ``lost`` counts all of them, those that the kernel lost while this was subscribed included.
    """

    def __init__(self, room: int) -> None:
        self.lost = 0
        self._room = room
        self._waiting: list[Sample | Lost] = []
        self._missing = 0
        self._changed = anyio.Event()
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Sample | Lost]:
        while not self._waiting:
            if self._over:
                raise StopAsyncIteration
            self._changed = anyio.Event()
            await self._changed.wait()
        taken, self._waiting = self._waiting, []
        if self._missing:
            taken.append(Lost(self._missing))
            self._missing = 0
        return taken

    def tell(self, event: Sample | Lost) -> None:
        """Queue an event, or count it."""
        if isinstance(event, Lost):
            self.lost += event.count
        if len(self._waiting) >= self._room:
            self._miss(event)
            return
        self._waiting.append(event)
        self._changed.set()

    def _miss(self, event: Sample | Lost) -> None:
        if isinstance(event, Lost):
            self._missing += event.count
        else:
            self._missing += 1
            self.lost += 1

    def end(self) -> None:
        """Let the iteration end after what is queued."""
        self._over = True
        self._changed.set()


class Events:
    """The datapath's packet events, for any number of subscribers.

    The buffers are attached with the first subscriber and go with the last: else events cost nothing here,
    and the datapath one failing call each.
    """

    def __init__(self, settings: EventsSettings, maps: Maps, lifecycle: Lifecycle) -> None:
        self._settings = settings
        self._maps = maps
        self._reader: Reader | None = None
        self._subscriptions: list[Subscription] = []
        self._over = False
        lifecycle.append(Hook("offer events", self._start, self._stop))

    @contextmanager
    def subscribe(self, room: int | None = None) -> Iterator[Subscription]:
        """Hear of every event from now on, ``room`` of them waiting (unset: monitor-queue-size).

        Synchronous, from the event loop. Raises HiveError if the kernel gives no buffers. Another reader of
        cilium_events, such as ``bpftool map event_pipe``, and this one take the events from each other:
        the last to attach has them.
        """
        subscription = Subscription(room or self._settings.monitor_queue_size)
        if self._reader is None and not self._over:
            self._reader = Reader(self._maps.events, self._settings.monitor_num_pages, self._tell)
        if self._over:
            subscription.end()
        self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)
            if not self._subscriptions:
                self._close()

    @property
    def watched(self) -> bool:
        """Whether there are subscribers."""
        return bool(self._subscriptions)

    def tell(self, data: bytes) -> None:
        """An event that the agent itself has seen."""
        self._tell(Sample(0, data))

    def _tell(self, event: Sample | Lost) -> None:
        for subscription in self._subscriptions:
            subscription.tell(event)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    async def _start(self) -> None:
        self._over = False

    async def _stop(self) -> None:
        self._over = True
        self._close()
        for subscription in self._subscriptions:
            subscription.end()
