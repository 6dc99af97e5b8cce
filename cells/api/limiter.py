"""Rate limits of the API: who waits, for how long, and who is refused."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec

from cells.base.metrics import Histogram
from lifecycle import Duration, Logger

# A rate with a burst: so many at once, and then one after the other.
#
# Source: golang.org/x/time/rate, which Cilium's limiter stands on: a bucket that is full at first, holds
#         ``burst`` tokens at most, and gets ``rate`` more each second.


class RateBucket:
    """Tokens that come back by and by."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate = rate
        """Tokens a second; 0: they never run out."""
        self.burst = burst
        self.tokens = float(burst)
        """As of ``_at``."""
        self._at = -math.inf

    def wait(self, now: float, ahead: int = 0) -> float:
        """Seconds until there is a token for a request with this many others ahead of it; 0: now."""
        if not self.rate:
            return 0.0
        self._fill(now)
        return max(0.0, (ahead + 1 - self.tokens) / self.rate)

    def take(self, now: float) -> None:
        """Take one, which there must be."""
        self._fill(now)
        self.tokens -= 1

    def adjust(self, rate: float, burst: int, now: float) -> None:
        """Go on with another rate and burst. What is there stays there, as far as the burst allows."""
        self._fill(now)
        self.rate, self.burst = rate, burst

    def _fill(self, now: float) -> None:
        if self.rate:
            self.tokens = min(self.burst, self.tokens + max(0.0, now - self._at) * self.rate)
        self._at = now


# Lets requests through in their order: so many at once, so many a second, by how long they take.
#
# Source: Cilium 1.17, APILimiter. With ``auto_adjust``, rate, burst and parallel requests grow as long as
#         requests take less than estimated, and shrink when they take more. Different here: waiting requests
#         follow each change of the rate, and one that leaves frees its slot.

TICK: Final = 1e-6
"""Shorter waits, in seconds, are skipped: clocks are not more exact."""
NO_PLACE: Final = "fail-parallel-wait"
TOO_FAST: Final = "fail-limit-wait"
LEFT: Final = "request-cancelled"
CANCELLED: Final = "request cancelled while waiting for rate limiting slot"


class Parameters(msgspec.Struct, frozen=True):
    """Parameters of a limiter; zero requests or seconds means no bound."""

    rate_limit: float = 0.0
    """Requests a second."""
    rate_burst: int = 1
    """Requests at once after a while without any."""
    min_wait_duration: float = 0.0
    """Seconds that each waits."""
    max_wait_duration: float = 0.0
    """Seconds after which a request is refused."""
    estimated_processing_duration: float = 0.0
    """Seconds; the adjustment aims at it."""
    auto_adjust: bool = False
    parallel_requests: int = 0
    min_parallel_requests: int = 1
    """Of the adjustment; for the burst too."""
    max_parallel_requests: int = 0
    mean_over: int = 10
    """Requests that the mean covers."""
    delayed_adjustment_factor: float = 0.5
    """Share of an adjustment that reaches burst and parallel requests."""
    max_adjustment_factor: float = 100.0
    """Times that a value may grow or shrink from what it was set to."""
    skip_initial: int = 0
    """First requests that are let through whatever there is."""
    log: bool = False
    """Whether each request is logged."""


class LimitExceeded(Exception):  # noqa: N818  # its text is the reason
    """The request is refused: it would wait too long, or its client has disconnected."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class Turn:
    """A request that was let through. done() must be called once, whatever becomes of it."""

    __slots__ = ("_limiter", "began", "initial", "waited")

    def __init__(self, limiter: Limiter, began: float, waited: float, *, initial: bool) -> None:
        self._limiter = limiter
        self.began = began
        self.waited = waited
        """Seconds."""
        self.initial = initial
        """One of the first requests, which are not limited."""

    def done(self, status: int) -> None:
        """It is answered; ``status`` is HTTP's."""
        self._limiter.finish(self, status)


class Limiter:
    """The line of one kind of request. All but the first wait; the first one may go when it can."""

    def __init__(
        self,
        name: str,
        parameters: Parameters,
        log: Logger,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.name = name
        self.parameters = parameters
        self._log = log
        self._clock = clock
        self._line: deque[anyio.Event] = deque()
        self._waiting: set[anyio.CancelScope] = set()
        self._came = 0
        self._closed = False
        self._places = 0
        self.bucket = RateBucket(parameters.rate_limit, parameters.rate_burst)
        """The rate as it is now."""
        self.parallel = parameters.parallel_requests
        """Requests at once, as it is now; 0: any number."""
        self.factor = 1.0
        """Estimated by mean processing time, within bounds."""
        self.in_flight = 0
        self.processing = Mean(parameters.mean_over)
        """Of requests that succeeded, in seconds."""
        self.wait = Mean(parameters.mean_over)
        """The same, of their waiting."""
        self.waits = Histogram()
        """Of all that were let through, in seconds."""
        self.processed: Counter[tuple[str, int]] = Counter()
        """Requests by outcome and status."""

    async def enter(self, disconnected: Callable[[], Awaitable[None]] = anyio.sleep_forever) -> Turn:
        """Wait for the request's turn; ``disconnected`` returns when the client has disconnected.

        Raises Refused. A cancelled request leaves the line.
        """
        came = self._clock()
        self._came += 1
        if self._came <= self.parameters.skip_initial:
            return self._let_through(came, initial=True)
        if not self._line and not self.parameters.min_wait_duration and self._wait_of_first(came, came) == 0:
            return self._let_through(came)
        found: Turn | LimitExceeded | None = None
        try:
            if not self._closed:
                async with anyio.create_task_group() as group:
                    self._waiting.add(group.cancel_scope)
                    try:
                        group.start_soon(_cancel_when, disconnected, group.cancel_scope)
                        found = await self._wait(came)
                        group.cancel_scope.cancel()
                    finally:
                        self._waiting.discard(group.cancel_scope)
        except BaseException:
            if isinstance(found, Turn):
                found.done(500)
            raise
        if isinstance(found, Turn):
            return found
        raise self._refused(found or LimitExceeded(LEFT, CANCELLED))

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._line)

    def open(self) -> None:
        """Let requests wait, as at first: the server starts, perhaps again."""
        self._closed = False

    def close(self) -> None:
        """Refuse all waiting requests, and those that would have to wait, until open()."""
        self._closed = True
        for scope in self._waiting:
            scope.cancel()

    def finish(self, turn: Turn, status: int) -> None:
        """Count an answered request, learn from it if it succeeded, and let the next one look."""
        now = self._clock()
        self.in_flight -= 1
        self._places -= not turn.initial
        self.waits.observe(turn.waited)
        if status < 400:
            self.processed["success", 200] += 1
            self.processing.add(now - turn.began)
            self.wait.add(turn.waited)
            self._adjust(now)
        else:
            self.processed["fail", status] += 1
        if self.parameters.log:
            self._log.info(
                "API call has been processed",
                name=self.name,
                status=status,
                processing=str(Duration(now - turn.began)),
                waited=str(Duration(turn.waited)),
            )
        self._call_first()

    def _let_through(self, came: float, *, initial: bool = False) -> Turn:
        now = self._clock()
        self.in_flight += 1
        if not initial:
            self._places += 1
            self.bucket.take(now)
        return Turn(self, now, 0.0 if initial else now - came, initial=initial)

    def _refused(self, refused: LimitExceeded) -> LimitExceeded:
        self.processed[refused.outcome, 429] += 1
        if self.parameters.log:
            self._log.warning("API call refused", name=self.name, outcome=refused.outcome, reason=refused)
        return refused

    async def _wait(self, came: float) -> Turn | LimitExceeded:
        """Stand in line until it is our turn, or too late for it."""
        longest = self.parameters.max_wait_duration or math.inf
        earliest = came + self.parameters.min_wait_duration
        free = math.inf if not self.parallel else self.parallel - self._places
        if len(self._line) < free:  # we have a place, and know what is left to wait for
            wait = max(self.bucket.wait(came, len(self._line)), earliest - came)
            if wait > longest:
                await anyio.sleep(self.processing.value)  # as upstream: slows down clients that retry at once
                return _too_fast(wait, longest)
        call = anyio.Event()
        self._line.append(call)
        try:
            with anyio.move_on_after(longest):
                while True:
                    wait = math.inf
                    if self._line[0] is call and (wait := self._wait_of_first(self._clock(), earliest)) == 0:
                        return self._let_through(came)
                    with anyio.move_on_after(wait):
                        await call.wait()
                    if call.is_set():
                        self._line[self._line.index(call)] = call = anyio.Event()
            if self._places_left():
                return _too_fast(self.bucket.wait(self._clock(), self._line.index(call)), 0)
            text = f"timed out while waiting to be served with {self.parallel} parallel requests"
            return LimitExceeded(NO_PLACE, text)
        finally:
            self._line.remove(call)
            self._call_first()

    def _places_left(self) -> bool:
        return not self.parallel or self._places < self.parallel

    def _wait_of_first(self, now: float, earliest: float) -> float:
        """Seconds until the first in line, or who comes while there is none, can go on; inf: it is called."""
        if not self._places_left():
            return math.inf
        wait = max(self.bucket.wait(now), earliest - now)
        return wait if wait > TICK else 0.0

    def _call_first(self) -> None:
        """Wake the first in line."""
        if self._line:
            self._line[0].set()

    def _adjust(self, now: float) -> None:
        """Follow the processing time: rate by the factor, the others by part of it."""
        base, mean = self.parameters, self.processing.value
        if not (base.auto_adjust and base.estimated_processing_duration):
            return
        most = base.max_adjustment_factor
        wanted = base.estimated_processing_duration / mean if mean else most
        self.factor = min(max(wanted, 1 / most), most)
        burst = self._delayed(base.rate_burst)
        self.bucket.adjust(base.rate_limit * self.factor, math.floor(burst + 0.5), now)
        self.parallel = int(self._delayed(base.parallel_requests, base.max_parallel_requests))

    def _delayed(self, base: int, highest: int = 0) -> float:
        """A value by part of the factor, not below the fewest parallel requests."""
        parameters = self.parameters
        value = base + base * (self.factor - 1) * parameters.delayed_adjustment_factor
        value = max(value, parameters.min_parallel_requests)
        value = min(value, highest or math.inf)
        most = parameters.max_adjustment_factor
        return min(max(value, base / most), base * most)


class Mean:
    """The mean of the latest values; 0 before there are any."""

    def __init__(self, over: int) -> None:
        self._latest: deque[float] = deque(maxlen=over)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Another one; of all there may be, the oldest goes."""
        if len(self._latest) == self._latest.maxlen:
            self._sum -= self._latest[0]
        self._latest.append(value)
        self._sum += value

    @property
    def value(self) -> float:
        """0 before there are any."""
        return max(0.0, self._sum) / len(self._latest) if self._latest else 0.0


def _too_fast(wait: float, longest: float) -> LimitExceeded:
    bound = f"(maximum wait duration: {Duration(longest)})"
    return LimitExceeded(TOO_FAST, f"request would have to wait {Duration(wait)} to be served {bound}")


async def _cancel_when(disconnected: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
    await disconnected()
    scope.cancel()
