"""The interface between a reconciler and its target: operations, errors, statuses."""

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, Self, TypeVar

import msgspec

from lifecycle.errors import HiveError

__all__ = [
    "BatchError",
    "BatchFailures",
    "ObjectStatus",
    "PatchTarget",
    "ReconcileError",
    "Statistics",
    "Target",
    "WriteThrough",
]

Key = TypeVar("Key")
Row = TypeVar("Row")
Observed = TypeVar("Observed")
Wanted_contra = TypeVar("Wanted_contra", contravariant=True)


class Target(Protocol[Key, Wanted_contra, Observed]):
    """Something outside that holds objects by key: a BPF map, a routing table, files in a directory.

    Methods raise BatchError if they know which objects failed. After any other error, all objects of the
    batch count as failed, and are retried in smaller and smaller batches until the failing ones are alone. A
    batch may be repeated, in whole or in part, at any time.

    A class that inherits this one matches by equality: what it observes are rows.
    """

    async def observe(self) -> Mapping[Key, Observed]:
        """Return all our objects, as they exist outside, not as desired or remembered.

        Objects of others are left out.
        """
        ...

    def matches(self, row: Wanted_contra, observed: Observed) -> bool:
        """Whether an observed object corresponds to the row of its key."""
        return row == observed

    async def put(self, batch: Mapping[Key, Wanted_contra]) -> None:
        """Create objects, or replace those with their keys."""
        ...

    async def drop(self, batch: Collection[Key]) -> None:
        """Remove objects. A missing object is not an error."""
        ...


class WriteThrough(Protocol[Key, Wanted_contra]):
    """A target that also writes synchronously, for Reconciler.write_now()."""

    def write_now(self, rows: Mapping[Key, Wanted_contra | None]) -> None:
        """Put these objects, and remove those without a row. Raises BatchError."""
        ...


class PatchTarget(Target[Key, Row, Row]):
    """A target with rows that are pending changes: each leaves the table once its effect is visible.

    So nothing is compared or removed. Subclasses have put().
    """

    async def observe(self) -> Mapping[Key, Row]:
        """Return nothing: each row is still to be written."""
        return {}

    async def drop(self, batch: Collection[Key]) -> None:
        """A no-op: a row that left the table is written, or its object no longer exists."""


class BatchError(Exception):
    """Some objects of a batch failed; all others are done."""

    def __init__(self, failures: Mapping[Any, Exception]) -> None:
        super().__init__(f"{_objects(len(failures))} failed")
        self.failures = failures


class BatchFailures:
    """Tries every object of a batch: leaving it raises BatchError if any of them failed.

    ::

        with BatchFailures(OSError) as failures:
            for key, row in batch.items():
                with failures.of(key):
                    write(key, row)
    """

    def __init__(self, *expected: type[Exception]) -> None:
        """``expected``: errors of failing objects; any other error is raised at once."""
        self._expected = expected
        self._failures: dict[Hashable, Exception] = {}

    @contextmanager
    def of(self, key: Hashable) -> Iterator[None]:
        """A block that works on this object."""
        try:
            yield
        except self._expected as error:
            self._failures[key] = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Raise BatchError, unless another error is being raised."""
        if kind is None and self._failures:
            raise BatchError(self._failures)


class ReconcileError(HiveError):
    """A requested sweep did not complete. `failures` has the objects and errors."""

    def __init__(self, name: str, failures: Mapping[Any, Exception]) -> None:
        self.failures = failures
        key, error = next(iter(failures.items()))
        super().__init__(f"{name}: {_objects(len(failures))} failed, the first {key}: {error}")


class ObjectStatus(msgspec.Struct, frozen=True, gc=False):
    """The progress of one object."""

    key: Hashable
    action: Literal["put", "drop"]
    state: Literal["pending", "done", "failed"]
    """``failed`` until a retry succeeds. Dropped objects have no status."""
    since: float
    """When it entered this state, in seconds since the epoch."""
    failures: int = 0
    """Failed attempts in a row."""
    error: str | None = None


class Statistics(msgspec.Struct):
    """Counters of a reconciler since its creation."""

    sweeps: int = 0
    failed_sweeps: int = 0
    """Sweeps that could not observe the target."""
    last_sweep: float = 0.0
    """Duration of the last observation and comparison, in seconds."""
    puts: int = 0
    drops: int = 0
    """Objects put and dropped."""
    batches: int = 0
    """Calls of the target's put and drop."""
    held_up: float = 0.0
    """Seconds for which the rate limit delayed calls."""
    failures: int = 0
    """Failed objects; one may fail several times."""
    drift: int = 0
    """Objects that a sweep found changed by another program."""


def _objects(count: int) -> str:
    return "1 object" if count == 1 else f"{count} objects"
