"""Keys of the store, what a transaction is made of, and how requests fail."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from lifecycle import HiveError

__all__ = [
    "CLUSTER_CONFIG",
    "HEARTBEAT",
    "HEARTBEAT_INTERVAL",
    "IDS",
    "INIT_LOCK",
    "IPS",
    "LOCKS",
    "NODES",
    "SERVICES",
    "VALUES",
    "CompactedError",
    "Compare",
    "KeyValue",
    "LeaseLostError",
    "OtherStoreError",
    "StoreError",
    "StoreUnavailableError",
    "absent",
    "delete",
    "get",
    "put",
]


# Where what is in the store.
#
# Source: Cilium 1.17, the keys of its kvstore; each reads what the other's agents write.

HEARTBEAT: Final = "cilium/.heartbeat"
"""A time, written by the operator every HEARTBEAT_INTERVAL."""
HEARTBEAT_INTERVAL: Final = 60.0
INIT_LOCK: Final = "cilium/.initlock"
"""Taken once by who connects: so the store is known to take writes, too."""

IDENTITIES: Final = "cilium/state/identities/v1"
IDS: Final = f"{IDENTITIES}/id/"
"""Number to labels: the master key of an identity, without a lease."""
VALUES: Final = f"{IDENTITIES}/value/"
"""Labels and a node's address to the number: leased, it means that the node uses the identity."""
LOCKS: Final = f"{IDENTITIES}/locks/"

IPS: Final = "cilium/state/ip/v1/default/"
"""Address, or prefix, to its owner."""
NODES: Final = "cilium/state/nodes/v1/"
"""Cluster and name to the node."""
SERVICES: Final = "cilium/state/services/v1/"
"""Cluster, namespace and name to a service that other clusters may use."""
CLUSTER_CONFIG: Final = "cilium/cluster-config/"
"""By name of a cluster: what its stores hold."""


MOST_OPERATIONS: Final = 100
"""In one transaction; etcd allows 128."""


class StoreError(HiveError):
    """Raised when the store refuses a request, or does not answer."""


class StoreUnavailableError(StoreError):
    """Raised when no server answers in time, or there is no quorum. A retry may succeed."""


class OtherStoreError(StoreError):
    """Raised when an answer comes from another etcd cluster than the answers before."""


class CompactedError(StoreError):
    """Raised when the requested revision has been compacted away: list everything again."""


class LeaseLostError(StoreError):
    """Raised when a lease has ended, and the keys attached to it are deleted."""


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A key as the store has it."""

    key: str
    value: bytes
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class KeyEvent(msgspec.Struct, frozen=True, gc=False):
    """A key that was written, or deleted (``kv`` is None)."""

    key: str
    kv: KeyValue | None
    revision: int

    @property
    def value(self) -> bytes | None:
        """What was written; None: the key was deleted."""
        return self.kv.value if self.kv is not None else None


class Compare(msgspec.Struct, frozen=True):
    """A condition of a transaction: a key's create or mod revision, lease or value equals this."""

    key: str
    what: Literal["create", "mod", "lease", "value"]
    equals: int | bytes


class Operation(msgspec.Struct, frozen=True):
    """A step of a transaction: read a key, put it, delete it."""

    key: str
    what: Literal["get", "put", "delete"]
    value: bytes = b""
    lease: int = 0


class TransactionOutcome(msgspec.Struct, frozen=True):
    """Result of a transaction: whether its comparisons held, and what each ``get`` found."""

    succeeded: bool
    found: tuple[KeyValue | None, ...]


def get(key: str) -> Operation:
    """Read a key."""
    return Operation(key, "get")


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    """Write a key, attached to the lease if there is one."""
    return Operation(key, "put", value, lease)


def delete(key: str) -> Operation:
    """Delete a key; a missing one is fine."""
    return Operation(key, "delete")


def absent(key: str) -> Compare:
    """There is no such key."""
    return Compare(key, "create", 0)


def raw_key(key: str) -> bytes:
    """The key as etcd has it; bytes that are no UTF-8 are surrogates of the text."""
    return key.encode(errors="surrogateescape")


def range_end(prefix: str) -> bytes:
    """The first key after all keys with the prefix."""
    raw = raw_key(prefix)
    return raw[:-1] + bytes([raw[-1] + 1])


def batches(operations: Iterable[Operation]) -> list[list[Operation]]:
    """The operations in lists that each fit into one transaction."""
    rest = list(operations)
    return [rest[begin : begin + MOST_OPERATIONS] for begin in range(0, len(rest), MOST_OPERATIONS)]


class Pace:
    """Limits calls per second, after a burst of that many."""

    def __init__(self, calls: float) -> None:
        self._interval = 1 / calls
        self._next = 0.0

    def pause(self) -> float:
        """Seconds to wait before the next call, which is counted now."""
        now = time.monotonic()
        self._next = max(self._next, now - 1.0) + self._interval
        return max(0.0, self._next - now)
