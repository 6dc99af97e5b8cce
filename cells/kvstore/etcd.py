"""An etcd client: one gRPC connection that fails over to the next endpoint.

Source: etcd 3.4's API, https://etcd.io/docs/v3.4/learning/api/. Only aetcd's protobuf messages are used: its
       client has no TLS, one endpoint only, and does not resume a broken watch.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import anyio
from anyio import to_thread

from cells.base.metrics import Histogram, MetricFamily, counter, gauge, histogram
from cells.kvstore.model import (
    CallRateLimit,
    CompactedError,
    Compare,
    KeyEvent,
    KeyValue,
    LeaseLostError,
    Operation,
    OtherStoreError,
    StoreError,
    StoreUnavailableError,
    TransactionOutcome,
    range_end,
    raw_key,
)
from cells.kvstore.settings import (
    EtcdAccess,
    StoreConfigError,
    StoreOptions,
    read_access,
    target,
    tls_credentials,
)
from lifecycle import Reconciler

__all__ = ["EtcdClient", "StoreMetrics"]


# Metrics of requests.
#
# Source: Cilium 1.17, cilium_kvstore_*.


class StoreMetrics:
    """Durations of requests, quorum errors, and the state of initial lists."""

    def __init__(self) -> None:
        self._durations: dict[tuple[str, str, str, str], Histogram] = {}
        self._quorum_errors: Counter[str] = Counter()
        self._initial_syncs: dict[str, int] = {}
        self._written: dict[str, Reconciler[str, Any]] = {}

    def observe_request(self, kind: str, seconds: float, *, failed: bool) -> None:
        """Record the duration and outcome of a request."""
        key = ("store", kind, "request", "fail" if failed else "success")
        self._durations.setdefault(key, Histogram()).observe(seconds)

    def count_quorum_error(self, why: str) -> None:
        """Count a failed quorum check by its reason: timeout, lock timeout or no event received."""
        self._quorum_errors[why] += 1

    def set_initial_sync(self, scope: str, *, done: bool) -> None:
        """Set whether all keys of a scope have been listed once."""
        self._initial_syncs[scope] = int(done)

    def writes(self, scope: str, keys: Reconciler[str, Any]) -> None:
        """Register the reconciler that writes this node's keys of a scope."""
        self._written[scope] = keys

    def families(self, cluster: str) -> Iterator[MetricFamily]:
        """Yield metrics of requests and initial lists of this cluster; without a store, no series."""
        yield histogram(
            "cilium_kvstore_operations_duration_seconds",
            "Duration in seconds of kvstore operations",
            self._durations,
            "scope kind action outcome",
        )
        yield counter(
            "cilium_kvstore_quorum_errors_total",
            "Number of quorum errors",
            dict(self._quorum_errors),
            "error",
        )
        yield gauge(
            "cilium_kvstore_initial_sync_completed",
            "Whether the initial synchronization from/to the kvstore has completed",
            {(scope, cluster, "read"): done for scope, done in self._initial_syncs.items()},
            "scope source_cluster action",
        )

    def written_families(self, cluster: str) -> Iterator[MetricFamily]:
        """Metrics of this node's keys."""
        yield gauge(
            "cilium_kvstore_sync_queue_size",
            "Number of elements queued for synchronization in the kvstore",
            {
                (scope, cluster): sum(1 for row in keys.statuses.all() if row.state != "done")
                for scope, keys in self._written.items()
            },
            "scope source_cluster",
        )
        yield counter(
            "cilium_kvstore_sync_errors_total",
            "Number of times synchronization to the kvstore failed",
            {(scope, cluster): keys.statistics.failures for scope, keys in self._written.items()},
            "scope source_cluster",
        )


# Conversions between aetcd's messages and the types of this cell.


def load_messages() -> Any:
    """Import and return the module with etcd's protobuf messages."""
    from aetcd import rpc

    return rpc


def request_errors() -> Any:
    """Return the exceptions that a request raises.

    Closing the channel under a request raises CancelledError, as if its task were cancelled.
    """
    from grpc import aio

    return aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError


def end_of_stream() -> Any:
    """Return the marker that a stream's read() returns at its end."""
    from grpc import aio

    return aio.EOF


def key_value(found: Any) -> KeyValue:
    """Convert an ``mvccpb.KeyValue``."""
    return KeyValue(
        found.key.decode(errors="surrogateescape"),  # the inverse of raw_key()
        found.value,
        found.create_revision,
        found.mod_revision,
        found.lease,
    )


def key_event(event: Any) -> KeyEvent:
    """Convert an ``mvccpb.Event``."""
    found = key_value(event.kv)
    return KeyEvent(found.key, None if event.type == event.DELETE else found, found.mod_revision)


def comparison(each: Compare) -> Any:
    """Convert to an ``etcdserverpb.Compare``."""
    kinds = load_messages().Compare
    key = raw_key(each.key)
    match each.what:
        case "create":
            return kinds(key=key, target=kinds.CREATE, create_revision=each.equals)
        case "mod":
            return kinds(key=key, target=kinds.MOD, mod_revision=each.equals)
        case "lease":
            return kinds(key=key, target=kinds.LEASE, lease=each.equals)
        case "value":
            return kinds(key=key, target=kinds.VALUE, value=each.equals)


def request_op(each: Operation) -> Any:
    """Convert to an ``etcdserverpb.RequestOp``."""
    rpc = load_messages()
    key = raw_key(each.key)
    match each.what:
        case "get":
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))
        case "put":
            return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=each.value, lease=each.lease))
        case "delete":
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


TIMEOUT: Final = 10.0
"""Deadline of a request, in seconds."""
MAX_RECONNECT_BACKOFF: Final = 2000
"""Maximum backoff between connection attempts, in milliseconds."""
MAX_MESSAGE_SIZE: Final = 64 << 20
"""Maximum size of a response, in bytes: the events of a whole cluster may come in one."""

Result = TypeVar("Result")


class EtcdClient:
    """Sends requests to etcd. Every method raises StoreError.

    Requests are not retried. After a request without an answer, the next one goes to the next endpoint.
    """

    def __init__(
        self,
        options: StoreOptions,
        metrics: StoreMetrics,
        resolve: Callable[[str], str] = str,
        *,
        pinned: bool = False,
    ) -> None:
        """``resolve`` maps a host name to an address. ``pinned`` rejects answers of a second etcd cluster."""
        self._options = options
        self._metrics = metrics
        self._resolve = resolve
        self._pinned = pinned
        self.cluster_id = 0
        """The id of the etcd cluster that answered first; 0 before the first answer."""
        self._access: EtcdAccess | None = None
        self._active = 0
        self._dialed = ""
        """The host of the connection."""
        self._channel: Any = None
        self._loaded = anyio.Event()
        self._slots = anyio.Semaphore(options.max_inflight)
        self._rate_limit = CallRateLimit(options.bootstrap_qps)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints, as URLs."""
        return self._access.endpoints if self._access is not None else ()

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self.endpoints[self._active]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep the connection open during the block. Raises StoreConfigError; etcd need not be reachable.

        gRPC is imported in a thread, and only requests wait for it.
        """
        self._access = read_access(self._options)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._load)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                channel, self._channel = self._channel, None
                if channel is not None:
                    with anyio.CancelScope(shield=True):
                        await channel.close()

    async def _load(self) -> None:
        await to_thread.run_sync(load_messages)
        self._connect()
        self._loaded.set()

    def end_bootstrap(self) -> None:
        """Lower the rate limit from ``etcd.bootstrapQps`` to ``etcd.qps``: the initial lists are complete."""
        self._rate_limit = CallRateLimit(self._options.qps)

    async def lookup(self, key: str) -> KeyValue | None:
        """Return a key by a linearizable read, or None."""
        rpc = await self._messages()
        answer = await self._unary("read", "KV/Range", rpc.RangeRequest(key=raw_key(key)), rpc.RangeResponse)
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def first(self, prefix: str) -> KeyValue | None:
        """Return the first key with the prefix, or None."""
        rpc = await self._messages()
        request = rpc.RangeRequest(key=raw_key(prefix), range_end=range_end(prefix), limit=1)
        answer = await self._unary("read", "KV/Range", request, rpc.RangeResponse)
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def predecessor(self, prefix: str, revision: int) -> KeyValue | None:
        """Return the latest created key of the prefix among those created before a revision, or None."""
        rpc = await self._messages()
        request = rpc.RangeRequest(
            key=raw_key(prefix),
            range_end=range_end(prefix),
            limit=1,
            sort_order=rpc.RangeRequest.DESCEND,
            sort_target=rpc.RangeRequest.CREATE,
            max_create_revision=revision - 1,
        )
        answer = await self._unary("read", "KV/Range", request, rpc.RangeResponse)
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def revision(self) -> int:
        """Return the store's current revision."""
        rpc = await self._messages()
        request = rpc.RangeRequest(key=b"\0", count_only=True)
        answer = await self._unary("read", "KV/Range", request, rpc.RangeResponse)
        return int(answer.header.revision)

    async def list_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Return all keys of the prefix at one revision, and that revision.

        Raises CompactedError if the revision is compacted before all pages are read.
        """
        rpc = await self._messages()
        found: list[KeyValue] = []
        begin, revision = raw_key(prefix), 0
        while True:
            request = rpc.RangeRequest(
                key=begin, range_end=range_end(prefix), limit=self._options.limit, revision=revision
            )
            answer = await self._unary("read", "KV/Range", request, rpc.RangeResponse)
            revision = revision or answer.header.revision
            found += map(key_value, answer.kvs)
            if not answer.more:
                return found, revision
            begin = answer.kvs[-1].key + b"\0"

    async def txn(self, *operations: Operation, when: Sequence[Compare] = ()) -> TransactionOutcome:
        """Run the operations in one transaction if all comparisons succeed.

        Raises LeaseLostError if a lease has expired.
        """
        rpc = await self._messages()
        request = rpc.TxnRequest(
            compare=[comparison(each) for each in when], success=[request_op(each) for each in operations]
        )
        answer = await self._unary("modify", "KV/Txn", request, rpc.TxnResponse)
        found = tuple(
            key_value(each.response_range.kvs[0]) if each.response_range.kvs else None
            for each in answer.responses
            if each.WhichOneof("response") == "response_range"
        )
        return TransactionOutcome(answer.succeeded, found)

    async def grant(self, ttl: float) -> int:
        """Create a lease with a TTL in seconds, and return its id."""
        rpc = await self._messages()
        request = rpc.LeaseGrantRequest(TTL=round(ttl))
        answer = await self._unary("lease", "Lease/LeaseGrant", request, rpc.LeaseGrantResponse)
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> None:
        """Renew the lease for its whole TTL. Raises LeaseLostError."""
        rpc = await self._messages()

        async def once(channel: Any) -> int:
            call = channel.stream_stream(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
            )(timeout=TIMEOUT)
            await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
            answer = await call.read()
            call.cancel()
            if answer is end_of_stream():  # the state of the lease is unknown
                raise StoreUnavailableError(f"{self.endpoint}: the renewal ended without an answer")
            return int(answer.TTL)

        if await self._call("keepalive", once) <= 0:
            raise LeaseLostError("requested lease not found")

    async def revoke(self, lease: int) -> None:
        """Revoke the lease, which deletes its keys. Raises LeaseLostError if it has expired."""
        rpc = await self._messages()
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._unary("lease", "Lease/LeaseRevoke", request, rpc.LeaseRevokeResponse)

    async def describe(self) -> str:
        """Return endpoint, version and leadership in the format of ``cilium-dbg status``."""
        rpc = await self._messages()
        answer = await self._unary("status", "Maintenance/Status", rpc.StatusRequest(), rpc.StatusResponse)
        leads = " (Leader)" if answer.leader and answer.leader == answer.header.member_id else ""
        return f"{self.endpoint} - {answer.version}{leads}"

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[list[KeyEvent], None]:
        """Yield the changes of keys with the prefix, starting at the revision.

        The first item is an empty list: the watch is established. Raises StoreUnavailableError when the watch
        breaks, and CompactedError when the revision has been compacted.
        """
        rpc = await self._messages()
        create = rpc.WatchCreateRequest(
            key=raw_key(prefix), range_end=range_end(prefix), start_revision=revision, fragment=True
        )
        channel = await self._open_channel()
        call = channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=rpc.WatchRequest.SerializeToString,
            response_deserializer=rpc.WatchResponse.FromString,
        )(metadata=(("hasleader", "true"),))
        parts: list[KeyEvent] = []
        try:
            await call.write(rpc.WatchRequest(create_request=create))
            while True:
                answer = await call.read()
                if answer is end_of_stream():
                    raise StoreUnavailableError("the watch was ended")
                if self._checked(answer).compact_revision:
                    raise CompactedError(f"revision {revision} has been compacted")
                if answer.canceled:
                    raise StoreUnavailableError(answer.cancel_reason or "the watch was cancelled")
                parts += map(key_event, answer.events)
                if (
                    answer.fragment
                ):  # the next response continues this one: events of a revision are yielded together
                    continue
                if parts or answer.created:
                    found, parts = parts, []
                    yield found
        except request_errors() as error:
            raise self._store_error(error, channel) from error
        finally:
            call.cancel()

    # Requests and the connection

    async def _messages(self) -> Any:
        await self._loaded.wait()
        return load_messages()

    def _connect(self) -> None:
        """Open a channel to the active endpoint."""
        from grpc import aio

        assert self._access is not None  # noqa: S101  # set by open()
        options: list[tuple[str, object]] = [
            ("grpc.keepalive_time_ms", int(self._options.keepalive_heartbeat * 1000)),
            ("grpc.keepalive_timeout_ms", int(self._options.keepalive_timeout * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF),
            ("grpc.max_receive_message_length", MAX_MESSAGE_SIZE),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),  # like etcd's Go client, which ignores proxies
        ]
        address = target(self.endpoint)
        host, _, port = address.rpartition(":")
        self._dialed = found = self._resolve(host)
        if found != host:  # the server's certificate is for the host name
            address = f"[{found}]:{port}" if ":" in found else f"{found}:{port}"
            options += [("grpc.ssl_target_name_override", host), ("grpc.default_authority", host)]
        if self._access.tls:
            self._channel = aio.secure_channel(address, tls_credentials(self._access), options=options)
        else:
            self._channel = aio.insecure_channel(address, options=options)

    async def _open_channel(self) -> Any:
        await self._loaded.wait()
        if self._channel is None:
            raise StoreUnavailableError("the agent is stopping")
        return self._channel

    async def _unary(self, kind: str, method: str, request: Any, answer: Any) -> Any:
        path = f"/etcdserverpb.{method}"

        async def once(channel: Any) -> Any:
            return await channel.unary_unary(
                path,
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )(request, timeout=TIMEOUT, metadata=(("hasleader", "true"),))

        return self._checked(await self._call(kind, once))

    def _checked(self, answer: Any) -> Any:
        """Return the answer after checking its etcd cluster id. Raises OtherStoreError."""
        found = answer.header.cluster_id
        self.cluster_id = self.cluster_id or found
        if self._pinned and found != self.cluster_id:
            raise OtherStoreError(
                f"{self.endpoint}: etcd cluster ID mismatch: expected {self.cluster_id:x}, got {found:x}"
            )
        return answer

    async def _call(self, kind: str, once: Callable[[Any], Any]) -> Any:
        async with self._slots:
            await anyio.sleep(self._rate_limit.pause())
            channel, began = await self._open_channel(), time.perf_counter()
            try:
                found = await once(channel)
            except request_errors() as error:
                self._metrics.observe_request(kind, time.perf_counter() - began, failed=True)
                raise self._store_error(error, channel) from error
            self._metrics.observe_request(kind, time.perf_counter() - began, failed=False)
            return found

    def _store_error(self, error: Any, channel: Any) -> StoreError:
        """Convert a gRPC error to a StoreError, and fail over if there was no answer."""
        import grpc

        if not isinstance(error, grpc.RpcError):  # the channel was closed under the request
            if isinstance(error, asyncio.CancelledError) and channel is self._channel:
                raise error
            return StoreUnavailableError(f"{self.endpoint}: the connection was closed")
        code, text = error.code(), error.details() or ""
        if "requested lease not found" in text:
            return LeaseLostError(text)
        if "has been compacted" in text:
            return CompactedError(text)
        transient = {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,
        }
        if code in transient:
            self._fail_over(channel)
            return StoreUnavailableError(f"{self.endpoint}: {_short_message(text) or code.name.lower()}")
        return StoreError(f"{self.endpoint}: {text or code.name.lower()}")

    def redial(self) -> None:
        """Reconnect if the host of the current endpoint resolves to another address now."""
        channel = self._channel
        if channel is None or self._resolve(target(self.endpoint).rpartition(":")[0]) == self._dialed:
            return
        self._connect()
        _close_in_background(channel)

    def _fail_over(self, failed: Any) -> None:
        """Connect to the next endpoint, with configuration and certificates read again."""
        if failed is not self._channel or self._access is None:
            return
        try:
            now = read_access(self._options)
        except StoreConfigError:  # keep the last valid configuration; the next start reports the error
            now = self._access
        if now == self._access and len(now.endpoints) == 1:
            return  # gRPC reconnects by itself
        self._access, self._active = now, (self._active + 1) % len(now.endpoints)
        self._connect()
        _close_in_background(failed)


def _close_in_background(channel: Any) -> None:
    """Close a channel in a background task."""
    task = asyncio.ensure_future(channel.close(grace=None))
    _CLOSING.add(task)
    task.add_done_callback(_CLOSING.discard)


_CLOSING: Final[set[Any]] = set()


def _short_message(text: str) -> str:
    """Return gRPC's message without the address, which it contains twice."""
    return re.sub(r"^UNKNOWN: \S+: ", "", text.rpartition("; last error: ")[2].strip())
