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

    Methods raise BatchError when they know which objects failed; after any other error all of the batch is
    taken to have failed, and tried again in smaller and smaller batches until the culprits stand alone.
    A batch may be repeated, in whole or in part, at any time.

    A class that inherits this one matches by equality: what it observes are rows.
    """

    async def observe(self) -> Mapping[Key, Observed]:
        """Every object there is that is ours, as it is found outside, not as it is wanted or remembered.

        Others' are left out.
        """
        ...

    def matches(self, row: Wanted_contra, observed: Observed) -> bool:
        """Whether an object is as the row of its key has it."""
        return row == observed

    async def put(self, batch: Mapping[Key, Wanted_contra]) -> None:
        """Create the objects, or put them in place of those with their keys."""
        ...

    async def drop(self, batch: Collection[Key]) -> None:
        """Remove the objects. A missing object is not an error."""
        ...


class WriteThrough(Protocol[Key, Wanted_contra]):
    """A target that also writes without waiting: by Reconciler.write_now()."""

    def write_now(self, rows: Mapping[Key, Wanted_contra | None]) -> None:
        """Put these objects, and remove those that have no row. Raises BatchError."""
        ...


class PatchTarget(Target[Key, Row, Row]):
    """A target of rows that are changes to be made: each leaves the table once what it changes shows it.

    So there is nothing to compare or to remove. Subclasses have put().
    """

    async def observe(self) -> Mapping[Key, Row]:
        """Nothing: each row is still to be written."""
        return {}

    async def drop(self, batch: Collection[Key]) -> None:
        """Nothing: what left the table is written, or has no object any more."""


class BatchError(Exception):
    """Some objects of a batch failed; all the others are done."""

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
        """``expected``: what a failing object raises; anything else is raised at once."""
        self._expected = expected
        self._failures: dict[Hashable, Exception] = {}

    @contextmanager
    def of(self, key: Hashable) -> Iterator[None]:
        """What is done inside is done to this object."""
        try:
            yield
        except self._expected as error:
            self._failures[key] = error

    def __enter__(self) -> Self:
        """Nothing has failed yet."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Raise BatchError, unless something else is on its way already."""
        if kind is None and self._failures:
            raise BatchError(self._failures)


class ReconcileError(HiveError):
    """A sweep was asked for and did not get through. What failed, and why, is in `failures`."""

    def __init__(self, name: str, failures: Mapping[Any, Exception]) -> None:
        self.failures = failures
        key, error = next(iter(failures.items()))
        super().__init__(f"{name}: {_objects(len(failures))} failed, the first {key}: {error}")


class ObjectStatus(msgspec.Struct, frozen=True, gc=False):
    """The progress of one object, stored beside its row."""

    key: Hashable
    action: Literal["put", "drop"]
    state: Literal["pending", "done", "failed"]
    """``failed`` until it is tried again and works. What was dropped has no status any more."""
    since: float
    """When it came to this state, in seconds since the epoch."""
    failures: int = 0
    """Failed tries in a row."""
    error: str | None = None


class Statistics(msgspec.Struct):
    """What a reconciler has done since it was made."""

    sweeps: int = 0
    failed_sweeps: int = 0
    """Sweeps that could not observe."""
    last_sweep: float = 0.0
    """Seconds the last observation and comparison took."""
    puts: int = 0
    drops: int = 0
    """Objects put and dropped."""
    batches: int = 0
    """Calls of the target's put and drop."""
    held_up: float = 0.0
    """Seconds that calls were held up by the rate limit."""
    failures: int = 0
    """Objects that failed; one may fail many times."""
    drift: int = 0
    """Objects that a sweep found changed by someone else."""


def _objects(count: int) -> str:
    return "1 object" if count == 1 else f"{count} objects"
