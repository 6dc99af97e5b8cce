"""Rate limiters of the API, which delay or refuse requests.

``rate_limits`` creates a Limiter for each limited operation.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec

from cells.base.metrics import Histogram
from lifecycle import Duration, Logger

# Token bucket. Source: golang.org/x/time/rate, on which Cilium's limiter is based.


class RateBucket:
    """A token bucket: initially full, with at most ``burst`` tokens, refilled at ``rate``."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate = rate
        """Tokens per second; 0: unlimited."""
        self.burst = burst
        self.tokens = float(burst)
        """Number of tokens at the time ``_filled_at``."""
        self._filled_at = -math.inf

    def wait(self, now: float, ahead: int = 0) -> float:
        """Return the seconds until a token is available after ``ahead`` earlier requests."""
        if not self.rate:
            return 0.0
        self._fill(now)
        return max(0.0, (ahead + 1 - self.tokens) / self.rate)

    def take(self, now: float) -> None:
        """Take a token; the caller has checked that one is available."""
        self._fill(now)
        self.tokens -= 1

    def adjust(self, rate: float, burst: int, now: float) -> None:
        """Change rate and burst; existing tokens remain, up to the new burst."""
        self._fill(now)
        self.rate, self.burst = rate, burst

    def _fill(self, now: float) -> None:
        if self.rate:
            self.tokens = min(self.burst, self.tokens + max(0.0, now - self._filled_at) * self.rate)
        self._filled_at = now


# Limiter of rate and of parallel requests, which admits requests in order of arrival.
#
# Source: Cilium 1.17, APILimiter. With ``auto_adjust``, rate, burst and parallel requests grow while requests
#         take less time than estimated, and shrink when they take more. Unlike in Cilium, a changed rate also
#         applies to requests that wait already, and a cancelled request frees its slot.

TICK: Final = 1e-6
"""Shorter waits, in seconds, are skipped: timers are not more precise."""
NO_SLOT: Final = "fail-parallel-wait"
TOO_FAST: Final = "fail-limit-wait"
LEFT: Final = "request-cancelled"
CANCELLED: Final = "request cancelled while waiting for rate limiting slot"


class Parameters(msgspec.Struct, frozen=True):
    """Parameters of a limiter; 0 requests or seconds means unlimited."""

    rate_limit: float = 0.0
    """Requests per second."""
    rate_burst: int = 1
    """Number of requests admitted at once after an idle period."""
    min_wait_duration: float = 0.0
    """Minimum wait of each request in seconds."""
    max_wait_duration: float = 0.0
    """Maximum wait in seconds; a request that would wait longer is refused."""
    estimated_processing_duration: float = 0.0
    """Target processing time in seconds, to which auto-adjustment adapts."""
    auto_adjust: bool = False
    parallel_requests: int = 0
    min_parallel_requests: int = 1
    """Lower bound for adjusted parallel requests and burst."""
    max_parallel_requests: int = 0
    mean_over: int = 10
    """Number of requests over which means are computed."""
    delayed_adjustment_factor: float = 0.5
    """Share of an adjustment that is applied to burst and parallel requests."""
    max_adjustment_factor: float = 100.0
    """Maximum factor between an adjusted and the configured value."""
    skip_initial: int = 0
    """Number of initial requests that are not limited."""
    log: bool = False
    """Whether each request is logged."""


class LimitExceeded(Exception):  # noqa: N818  # its text is the reason
    """Raised if a request would wait too long, or its client has disconnected."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class Admission:
    """An admitted request. done() must be called exactly once, also after a failure."""

    __slots__ = ("_limiter", "began", "initial", "waited")

    def __init__(self, limiter: Limiter, began: float, waited: float, *, initial: bool) -> None:
        self._limiter = limiter
        self.began = began
        self.waited = waited
        """Seconds that the request waited."""
        self.initial = initial
        """Whether it is one of the initial requests, which are not limited."""

    def done(self, status: int) -> None:
        """Report that the response with this HTTP status is complete."""
        self._limiter.finish(self, status)


class Limiter:
    """A FIFO queue of requests of one kind; only its head can be admitted."""

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
        self._queue: deque[anyio.Event] = deque()
        self._waiting: set[anyio.CancelScope] = set()
        self._arrived = 0
        self._closed = False
        self._slots = 0
        self.bucket = RateBucket(parameters.rate_limit, parameters.rate_burst)
        """Token bucket with the current rate and burst."""
        self.parallel = parameters.parallel_requests
        """Current maximum number of parallel requests; 0: unlimited."""
        self.factor = 1.0
        """Ratio of estimated to mean processing time, within bounds."""
        self.in_flight = 0
        self.processing = Mean(parameters.mean_over)
        """Mean processing time of successful requests in seconds."""
        self.wait = Mean(parameters.mean_over)
        """Mean wait of successful requests in seconds."""
        self.waits = Histogram()
        """Waits of all admitted requests in seconds."""
        self.processed: Counter[tuple[str, int]] = Counter()
        """Number of requests by outcome and HTTP status."""

    async def enter(self, disconnected: Callable[[], Awaitable[None]] = anyio.sleep_forever) -> Admission:
        """Wait until the request is admitted; ``disconnected`` returns when the client disconnects.

        Raises LimitExceeded. A cancelled request leaves the queue.
        """
        arrived = self._clock()
        self._arrived += 1
        if self._arrived <= self.parameters.skip_initial:
            return self._admit(arrived, initial=True)
        if (
            not self._queue
            and not self.parameters.min_wait_duration
            and not self._wait_of_head(arrived, arrived)
        ):
            return self._admit(arrived)
        found: Admission | LimitExceeded | None = None
        try:
            if not self._closed:
                async with anyio.create_task_group() as group:
                    self._waiting.add(group.cancel_scope)
                    try:
                        group.start_soon(_cancel_when, disconnected, group.cancel_scope)
                        found = await self._wait_for_admission(arrived)
                        group.cancel_scope.cancel()
                    finally:
                        self._waiting.discard(group.cancel_scope)
        except BaseException:
            if isinstance(found, Admission):
                found.done(500)
            raise
        if isinstance(found, Admission):
            return found
        raise self._refused(found or LimitExceeded(LEFT, CANCELLED))

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    def open(self) -> None:
        """Admit requests to the queue again, after close()."""
        self._closed = False

    def close(self) -> None:
        """Refuse the queued requests, and until open() all requests that would have to wait."""
        self._closed = True
        for scope in self._waiting:
            scope.cancel()

    def finish(self, admission: Admission, status: int) -> None:
        """Count a completed request, adjust the limits if it succeeded, and wake the head of the queue."""
        now = self._clock()
        self.in_flight -= 1
        self._slots -= not admission.initial
        self.waits.observe(admission.waited)
        if status < 400:
            self.processed["success", 200] += 1
            self.processing.add(now - admission.began)
            self.wait.add(admission.waited)
            self._adjust(now)
        else:
            self.processed["fail", status] += 1
        if self.parameters.log:
            self._log.info(
                "API call has been processed",
                name=self.name,
                status=status,
                processing=str(Duration(now - admission.began)),
                waited=str(Duration(admission.waited)),
            )
        self._wake_head()

    def _admit(self, arrived: float, *, initial: bool = False) -> Admission:
        now = self._clock()
        self.in_flight += 1
        if not initial:
            self._slots += 1
            self.bucket.take(now)
        return Admission(self, now, 0.0 if initial else now - arrived, initial=initial)

    def _refused(self, refused: LimitExceeded) -> LimitExceeded:
        self.processed[refused.outcome, 429] += 1
        if self.parameters.log:
            self._log.warning("API call refused", name=self.name, outcome=refused.outcome, reason=refused)
        return refused

    async def _wait_for_admission(self, arrived: float) -> Admission | LimitExceeded:
        """Wait in the queue until the request is admitted, or would exceed its maximum wait."""
        longest = self.parameters.max_wait_duration or math.inf
        earliest = arrived + self.parameters.min_wait_duration
        free = math.inf if not self.parallel else self.parallel - self._slots
        if len(self._queue) < free:  # no wait for a slot: the total wait is known
            wait = max(self.bucket.wait(arrived, len(self._queue)), earliest - arrived)
            if wait > longest:
                await anyio.sleep(self.processing.value)  # as in Cilium: slows down immediate retries
                return _too_fast(wait, longest)
        wake = anyio.Event()
        self._queue.append(wake)
        try:
            with anyio.move_on_after(longest):
                while True:
                    wait = math.inf
                    if self._queue[0] is wake and (wait := self._wait_of_head(self._clock(), earliest)) == 0:
                        return self._admit(arrived)
                    with anyio.move_on_after(wait):
                        await wake.wait()
                    if wake.is_set():
                        self._queue[self._queue.index(wake)] = wake = anyio.Event()
            if self._has_free_slot():
                return _too_fast(self.bucket.wait(self._clock(), self._queue.index(wake)), 0)
            text = f"timed out while waiting to be served with {self.parallel} parallel requests"
            return LimitExceeded(NO_SLOT, text)
        finally:
            self._queue.remove(wake)
            self._wake_head()

    def _has_free_slot(self) -> bool:
        return not self.parallel or self._slots < self.parallel

    def _wait_of_head(self, now: float, earliest: float) -> float:
        """Return the seconds until the head can be admitted; inf: when a running request ends."""
        if not self._has_free_slot():
            return math.inf
        wait = max(self.bucket.wait(now), earliest - now)
        return wait if wait > TICK else 0.0

    def _wake_head(self) -> None:
        """Wake the head of the queue."""
        if self._queue:
            self._queue[0].set()

    def _adjust(self, now: float) -> None:
        """Adjust the rate by the factor, and burst and parallel requests by a share of it."""
        base, mean = self.parameters, self.processing.value
        if not (base.auto_adjust and base.estimated_processing_duration):
            return
        most = base.max_adjustment_factor
        wanted = base.estimated_processing_duration / mean if mean else most
        self.factor = min(max(wanted, 1 / most), most)
        burst = self._adjusted(base.rate_burst)
        self.bucket.adjust(base.rate_limit * self.factor, math.floor(burst + 0.5), now)
        self.parallel = int(self._adjusted(base.parallel_requests, base.max_parallel_requests))

    def _adjusted(self, base: int, highest: int = 0) -> float:
        """Multiply a limit by a share of the factor, within its bounds."""
        parameters = self.parameters
        value = base + base * (self.factor - 1) * parameters.delayed_adjustment_factor
        value = max(value, parameters.min_parallel_requests)
        value = min(value, highest or math.inf)
        most = parameters.max_adjustment_factor
        return min(max(value, base / most), base * most)


class Mean:
    """The mean of the last values of a window; 0 without values."""

    def __init__(self, over: int) -> None:
        self._latest: deque[float] = deque(maxlen=over)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Add a value; a full window drops the oldest one."""
        if len(self._latest) == self._latest.maxlen:
            self._sum -= self._latest[0]
        self._latest.append(value)
        self._sum += value

    @property
    def value(self) -> float:
        """0 without values."""
        return max(0.0, self._sum) / len(self._latest) if self._latest else 0.0


def _too_fast(wait: float, longest: float) -> LimitExceeded:
    bound = f"(maximum wait duration: {Duration(longest)})"
    return LimitExceeded(TOO_FAST, f"request would have to wait {Duration(wait)} to be served {bound}")


async def _cancel_when(disconnected: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
    await disconnected()
    scope.cancel()
