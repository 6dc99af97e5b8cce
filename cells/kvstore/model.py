"""The kvstore's keys, transactions and errors.

Source: Cilium 1.17, the keys of its kvstore. Our agents and Cilium's read each other's.
"""

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


HEARTBEAT: Final = "cilium/.heartbeat"
"""A timestamp that the operator writes every HEARTBEAT_INTERVAL seconds."""
HEARTBEAT_INTERVAL: Final = 60.0
INIT_LOCK: Final = "cilium/.initlock"
"""The lock that each client takes once after it connects, to check that the store accepts writes."""

IDENTITIES: Final = "cilium/state/identities/v1"
IDS: Final = f"{IDENTITIES}/id/"
"""Master keys of identities: number to labels, without a lease."""
VALUES: Final = f"{IDENTITIES}/value/"
"""Slave keys of identities: labels and a node's address to the number, under the node's lease.

While such a key exists the node uses the identity.
"""
LOCKS: Final = f"{IDENTITIES}/locks/"

IPS: Final = "cilium/state/ip/v1/default/"
"""Address or prefix to IPIdentityPair."""
NODES: Final = "cilium/state/nodes/v1/"
"""Cluster and node name to the node."""
SERVICES: Final = "cilium/state/services/v1/"
"""Cluster, namespace and name to a service for other clusters."""
CLUSTER_CONFIG: Final = "cilium/cluster-config/"
"""Cluster name to the id and capabilities of the cluster."""


MAX_OPERATIONS: Final = 100
"""Maximum number of operations in a transaction; etcd's limit is 128."""


class StoreError(HiveError):
    """Raised when the store rejects a request or does not answer."""


class StoreUnavailableError(StoreError):
    """Raised when no server answers in time, or there is no quorum. A retry may succeed."""


class OtherStoreError(StoreError):
    """Raised when an answer comes from a different etcd cluster than the first one."""


class CompactedError(StoreError):
    """Raised when the revision has been compacted: a relist is needed."""


class HeartbeatStaleError(StoreError):
    """Raised when the operator no longer writes its heartbeat key."""


class LeaseLostError(StoreError):
    """Raised when a lease has expired, and its keys are deleted."""


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A key with its value, revisions and lease."""

    key: str
    value: bytes
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class KeyEvent(msgspec.Struct, frozen=True, gc=False):
    """A put of a key, or its deletion (``kv`` is None)."""

    key: str
    kv: KeyValue | None
    revision: int

    @property
    def value(self) -> bytes | None:
        """The new value; None if the key was deleted."""
        return self.kv.value if self.kv is not None else None


class Compare(msgspec.Struct, frozen=True):
    """A condition of a transaction: create revision, mod revision, lease or value of a key equals this."""

    key: str
    what: Literal["create", "mod", "lease", "value"]
    equals: int | bytes


class Operation(msgspec.Struct, frozen=True):
    """An operation of a transaction: get, put or delete of one key."""

    key: str
    what: Literal["get", "put", "delete"]
    value: bytes = b""
    lease: int = 0


class TransactionOutcome(msgspec.Struct, frozen=True):
    """The result of a transaction: whether all comparisons succeeded, and the result of each ``get``."""

    succeeded: bool
    found: tuple[KeyValue | None, ...]


def get(key: str) -> Operation:
    """Read a key."""
    return Operation(key, "get")


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    """Write a key, attached to the lease if it is not 0."""
    return Operation(key, "put", value, lease)


def delete(key: str) -> Operation:
    """Delete a key if it exists."""
    return Operation(key, "delete")


def absent(key: str) -> Compare:
    """The condition that the key does not exist."""
    return Compare(key, "create", 0)


def raw_key(key: str) -> bytes:
    """Return the key's bytes; bytes that are not UTF-8 are surrogates in the text."""
    return key.encode(errors="surrogateescape")


def range_end(prefix: str) -> bytes:
    """Return the end of the range of all keys with the prefix."""
    raw = raw_key(prefix)
    return raw[:-1] + bytes([raw[-1] + 1])


def batches(operations: Iterable[Operation]) -> list[list[Operation]]:
    """Split operations into lists that each fit into one transaction."""
    rest = list(operations)
    return [rest[begin : begin + MAX_OPERATIONS] for begin in range(0, len(rest), MAX_OPERATIONS)]


class CallRateLimit:
    """A rate limit in calls per second, with a burst of one second."""

    def __init__(self, calls: float) -> None:
        self._interval = 1 / calls
        self._next = 0.0

    def pause(self) -> float:
        """Count a call, and return the seconds to wait before it."""
        now = time.monotonic()
        self._next = max(self._next, now - 1.0) + self._interval
        return max(0.0, self._next - now)
