"""What a reconciler works on, and what it tells.

Needs:  nothing.
Gives:  Target, what is to be made equal to a table; BatchError, how one says which objects failed, and
        BatchFailures; ObjectStatus, Statistics and ReconcileError, how a reconciler says what came of it.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, Self, TypeVar

import msgspec

from lifecycle.errors import HiveError

__all__ = ["BatchError", "BatchFailures", "ObjectStatus", "ReconcileError", "Statistics", "Target"]

Key = TypeVar("Key")
Row = TypeVar("Row")


class Target(Protocol[Key, Row]):
    """Something outside that holds objects by key: a BPF map, a routing table, files in a directory.

    Methods raise BatchError when they know which objects failed; after any other error all of the batch is
    taken to have failed, and tried again in smaller and smaller batches until the culprits stand alone.
    A batch may be repeated, in whole or in part, at any time.
    """

    async def dump(self) -> Mapping[Key, Row]:
        """Every object there is that is ours, as the row it would be put as. Others' are left out."""
        ...

    async def put(self, batch: Mapping[Key, Row]) -> None:
        """Create the objects, or put them in place of those with their keys."""
        ...

    async def drop(self, batch: Collection[Key]) -> None:
        """Remove the objects. Gone already is fine."""
        ...


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

    def __init__(self, name: str, failures: Mapping[Hashable, Exception]) -> None:
        self.failures = failures
        key, error = next(iter(failures.items()))
        super().__init__(f"{name}: {_objects(len(failures))} failed, the first {key}: {error}")


class ObjectStatus(msgspec.Struct, frozen=True, gc=False):
    """How far an object has got, kept beside its row."""

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
    """Sweeps whose dump failed."""
    last_sweep: float = 0.0
    """Seconds the last dump and comparison took."""
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
