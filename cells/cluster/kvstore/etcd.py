"""Requests to etcd: one connection, the next address where one does not answer.

For:    the cells of the store. Needs: StoreOptions. Gives: EtcdClient, KeyValue, Compare, Operation, errors.
Source: etcd 3.4's API, https://etcd.io/docs/v3.4/learning/api/. The messages are aetcd's: its client knows
        neither TLS nor several addresses, nor how a broken watch is taken up again.

gRPC and its messages take 0.1 s and 20 MB to load: who has no store does not load them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeVar

import anyio
import msgspec
from anyio import to_thread

from cells.cluster.kvstore.access import EtcdAccess, read_access, target, tls_credentials
from cells.cluster.kvstore.metrics import StoreMetrics
from cells.cluster.kvstore.settings import StoreOptions
from lifecycle import HiveError

TIMEOUT: Final = 10.0
"""Seconds that an answer may take."""
MOST_OPERATIONS: Final = 100
"""Of one transaction; etcd takes 128."""
RECONNECT: Final = 2000
"""Milliseconds between attempts to connect, at most."""
LARGEST: Final = 64 << 20
"""Bytes of an answer: events of a whole cluster may come at once."""

Result = TypeVar("Result")


class StoreError(HiveError):
    """Raised when the store refuses a request, or does not answer."""


class StoreUnavailableError(StoreError):
    """Raised when nobody answers, or too late, or there is no quorum: the same may succeed later."""


class CompactedError(StoreError):
    """Raised when the store has forgotten the revision that was asked for: everything is to be read anew."""


class LeaseLostError(StoreError):
    """Raised when a lease has ended: what was written under it is gone."""


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A key as the store has it."""

    key: str
    value: bytes
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class Event(msgspec.Struct, frozen=True, gc=False):
    """A key that was written, or deleted: then it has no value."""

    key: str
    kv: KeyValue | None
    revision: int


class Compare(msgspec.Struct, frozen=True):
    """What must hold for a transaction: that a key's creation, change, lease or value equals this."""

    key: str
    what: Literal["create", "mod", "lease", "value"]
    equals: int | bytes


class Operation(msgspec.Struct, frozen=True):
    """A step of a transaction: read a key, put it, delete it."""

    key: str
    what: Literal["get", "put", "delete"]
    value: bytes = b""
    lease: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What became of a transaction: whether its comparisons held, and what each ``get`` found."""

    succeeded: bool
    found: tuple[KeyValue | None, ...]


def get(key: str) -> Operation:
    """Read a key."""
    return Operation(key, "get")


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    """Write a key, which goes with the lease if there is one."""
    return Operation(key, "put", value, lease)


def delete(key: str) -> Operation:
    """Delete a key; gone already is fine."""
    return Operation(key, "delete")


def absent(key: str) -> Compare:
    """There is no such key."""
    return Compare(key, "create", 0)


def range_end(prefix: str) -> bytes:
    """The first key behind all those of the prefix."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


class EtcdClient:
    """Talks to etcd. Every method raises StoreError; nothing is tried twice, the next call asks the next
    address."""

    def __init__(self, options: StoreOptions, metrics: StoreMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._access: EtcdAccess | None = None
        self._active = 0
        self._channel: Any = None
        self._loaded = anyio.Event()
        self._slots = anyio.Semaphore(options.max_inflight)
        self._pace = _Pace(options.bootstrap_qps)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All addresses."""
        return self._access.endpoints if self._access is not None else ()

    @property
    def endpoint(self) -> str:
        """The address in use."""
        return self.endpoints[self._active]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The connection, as long as it lasts. Raises StoreConfigError; etcd need not be there.

        Requests wait until gRPC is loaded, which happens in a thread: nobody else waits for it.
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
        await to_thread.run_sync(_rpc)
        self._connect()
        self._loaded.set()

    def settle(self) -> None:
        """All is known: from here on the rate is that of ``etcd.qps``."""
        self._pace = _Pace(self._options.qps)

    async def lookup(self, key: str) -> KeyValue | None:
        """The key as all of etcd agrees it is."""
        rpc = await self._messages()
        answer = await self._ask("read", "KV/Range", rpc.RangeRequest(key=key.encode()), rpc.RangeResponse)
        return _key_value(answer.kvs[0]) if answer.kvs else None

    async def first(self, prefix: str) -> KeyValue | None:
        """The first key of the prefix."""
        rpc = await self._messages()
        request = rpc.RangeRequest(key=prefix.encode(), range_end=range_end(prefix), limit=1)
        answer = await self._ask("read", "KV/Range", request, rpc.RangeResponse)
        return _key_value(answer.kvs[0]) if answer.kvs else None

    async def oldest(self, prefix: str) -> KeyValue | None:
        """The key of the prefix that was created first."""
        rpc = await self._messages()
        request = rpc.RangeRequest(
            key=prefix.encode(),
            range_end=range_end(prefix),
            limit=1,
            sort_order=rpc.RangeRequest.ASCEND,
            sort_target=rpc.RangeRequest.CREATE,
        )
        answer = await self._ask("read", "KV/Range", request, rpc.RangeResponse)
        return _key_value(answer.kvs[0]) if answer.kvs else None

    async def revision(self) -> int:
        """How many changes the store has seen."""
        rpc = await self._messages()
        request = rpc.RangeRequest(key=b"\0", count_only=True)
        answer = await self._ask("read", "KV/Range", request, rpc.RangeResponse)
        return int(answer.header.revision)

    async def list_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """All keys of the prefix at one revision, and which. Raises CompactedError when it took too long."""
        rpc = await self._messages()
        found: list[KeyValue] = []
        begin, revision = prefix.encode(), 0
        while True:
            request = rpc.RangeRequest(
                key=begin, range_end=range_end(prefix), limit=self._options.limit, revision=revision
            )
            answer = await self._ask("read", "KV/Range", request, rpc.RangeResponse)
            revision = revision or answer.header.revision
            found += map(_key_value, answer.kvs)
            if not answer.more:
                return found, revision
            begin = answer.kvs[-1].key + b"\0"

    async def txn(self, *operations: Operation, when: Sequence[Compare] = ()) -> Outcome:
        """Do all of it at once, if what is compared holds. Raises LeaseLostError for a lease that ended."""
        rpc = await self._messages()
        request = rpc.TxnRequest(
            compare=[_compare(each) for each in when], success=[_operation(each) for each in operations]
        )
        answer = await self._ask("modify", "KV/Txn", request, rpc.TxnResponse)
        found = tuple(
            _key_value(each.response_range.kvs[0]) if each.response_range.kvs else None
            for each in answer.responses
            if each.WhichOneof("response") == "response_range"
        )
        return Outcome(answer.succeeded, found)

    async def grant(self, ttl: float) -> int:
        """A new lease, which ends unless it is kept within `ttl` seconds."""
        rpc = await self._messages()
        request = rpc.LeaseGrantRequest(TTL=round(ttl))
        answer = await self._ask("lease", "Lease/LeaseGrant", request, rpc.LeaseGrantResponse)
        return int(answer.ID)

    async def keep(self, lease: int) -> None:
        """Have the lease go on for its time from now. Raises LeaseLostError."""
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
            return int(getattr(answer, "TTL", 0))

        if await self._call("keepalive", once) <= 0:
            raise LeaseLostError("requested lease not found")

    async def revoke(self, lease: int) -> None:
        """End the lease, and what was written under it. Raises LeaseLostError when it has ended."""
        rpc = await self._messages()
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._ask("lease", "Lease/LeaseRevoke", request, rpc.LeaseRevokeResponse)

    async def describe(self) -> str:
        """The address in use with its version, and whether it leads: as ``cilium-dbg status`` shows it."""
        rpc = await self._messages()
        answer = await self._ask("status", "Maintenance/Status", rpc.StatusRequest(), rpc.StatusResponse)
        leads = " (Leader)" if answer.leader and answer.leader == answer.header.member_id else ""
        return f"{self.endpoint} - {answer.version}{leads}"

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[list[Event], None]:
        """What happens to keys of the prefix from the revision on; first an empty list, once it watches.

        Ends in StoreUnavailableError when the connection does, in CompactedError when so much is forgotten.
        """
        rpc = await self._messages()
        create = rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=range_end(prefix), start_revision=revision, fragment=True
        )
        channel = await self._open_channel()
        call = channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=rpc.WatchRequest.SerializeToString,
            response_deserializer=rpc.WatchResponse.FromString,
        )(metadata=(("hasleader", "true"),))
        try:
            await call.write(rpc.WatchRequest(create_request=create))
            while True:
                answer = await call.read()
                if answer is _end_of_stream():
                    raise StoreUnavailableError("the watch was ended")  # as any other end
                if answer.compact_revision:
                    raise CompactedError(f"revision {revision} has been compacted")
                if answer.canceled:
                    raise StoreUnavailableError(answer.cancel_reason or "the watch was cancelled")
                if answer.events or answer.created:
                    yield [_event(each) for each in answer.events]
        except _broken() as error:
            raise self._told(error, channel) from error
        finally:
            call.cancel()

    # How a request is made

    async def _messages(self) -> Any:
        await self._loaded.wait()
        return _rpc()

    def _connect(self) -> None:
        """A new connection to the active address."""
        from grpc import aio

        assert self._access is not None  # noqa: S101  # open() has read it
        options = [
            ("grpc.keepalive_time_ms", int(self._options.keepalive_heartbeat * 1000)),
            ("grpc.keepalive_timeout_ms", int(self._options.keepalive_timeout * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", RECONNECT),
            ("grpc.max_receive_message_length", LARGEST),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        address = target(self.endpoint)
        if self._access.tls:
            self._channel = aio.secure_channel(address, tls_credentials(self._access), options=options)
        else:
            self._channel = aio.insecure_channel(address, options=options)

    async def _open_channel(self) -> Any:
        await self._loaded.wait()
        if self._channel is None:
            raise StoreUnavailableError("the agent is ending")
        return self._channel

    async def _ask(self, kind: str, method: str, request: Any, answer: Any) -> Any:
        path = f"/etcdserverpb.{method}"

        async def once(channel: Any) -> Any:
            return await channel.unary_unary(
                path,
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )(request, timeout=TIMEOUT, metadata=(("hasleader", "true"),))

        return await self._call(kind, once)

    async def _call(self, kind: str, once: Callable[[Any], Any]) -> Any:
        async with self._slots:
            await anyio.sleep(self._pace.pause())
            channel, began = await self._open_channel(), time.perf_counter()
            try:
                found = await once(channel)
            except _broken() as error:
                self._metrics.asked(kind, time.perf_counter() - began, failed=True)
                raise self._told(error, channel) from error
            self._metrics.asked(kind, time.perf_counter() - began, failed=False)
            return found

    def _told(self, error: Any, channel: Any) -> StoreError:
        """The error in words of this cell; where nobody answered the next address is tried next."""
        import grpc

        if not isinstance(error, grpc.RpcError):  # the connection was given up under the request
            if isinstance(error, asyncio.CancelledError) and channel is self._channel:
                raise error
            return StoreUnavailableError(f"{self.endpoint}: the connection was closed")
        code, text = error.code(), error.details() or ""
        if "requested lease not found" in text:
            return LeaseLostError(text)
        if "has been compacted" in text:
            return CompactedError(text)
        gone = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
        if code in gone:
            self._next(channel)
            return StoreUnavailableError(f"{self.endpoint}: {_brief(text) or code.name.lower()}")
        return StoreError(f"{self.endpoint}: {text or code.name.lower()}")

    def _next(self, failed: Any) -> None:
        """Turn to the next address, with certificates as they are by now."""
        if failed is not self._channel or self._access is None:
            return
        try:
            now = read_access(self._options)
        except Exception:  # noqa: BLE001  # what was read before still counts; a restart tells what is wrong
            now = self._access
        if now == self._access and len(now.endpoints) == 1:
            return  # gRPC connects again by itself
        self._access, self._active = now, (self._active + 1) % len(now.endpoints)
        self._connect()
        _closing(failed)


def _closing(channel: Any) -> None:
    """Close it when nobody waits for it any more."""
    task = asyncio.ensure_future(channel.close(grace=None))
    _CLOSING.add(task)
    task.add_done_callback(_CLOSING.discard)


_CLOSING: Final[set[Any]] = set()


def _brief(text: str) -> str:
    """What gRPC says of a connection, without its addresses twice."""
    return re.sub(r"^UNKNOWN: \S+: ", "", text.rpartition("; last error: ")[2].strip())


class _Pace:
    """So many calls a second, after a burst of as many."""

    def __init__(self, calls: float) -> None:
        self._interval = 1 / calls
        self._next = 0.0

    def pause(self) -> float:
        """Seconds until the call may be made, which counts from here on."""
        now = time.monotonic()
        self._next = max(self._next, now - 1.0) + self._interval
        return max(0.0, self._next - now)


def _rpc() -> Any:
    """The messages; loaded with gRPC."""
    from aetcd import rpc

    return rpc


def _broken() -> Any:
    """What a request ends in: a closed connection cancels it, as if somebody had cancelled its task."""
    from grpc import aio

    return aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError


def _end_of_stream() -> Any:
    from grpc import aio

    return aio.EOF


def _key_value(found: Any) -> KeyValue:
    return KeyValue(
        found.key.decode(errors="surrogateescape"),
        found.value,
        found.create_revision,
        found.mod_revision,
        found.lease,
    )


def _event(event: Any) -> Event:
    found = _key_value(event.kv)
    return Event(found.key, None if event.type == event.DELETE else found, found.mod_revision)


def _compare(each: Compare) -> Any:
    rpc = _rpc()
    key = each.key.encode(errors="surrogateescape")
    kinds = rpc.Compare
    match each.what:
        case "create":
            return kinds(key=key, target=kinds.CREATE, create_revision=each.equals)
        case "mod":
            return kinds(key=key, target=kinds.MOD, mod_revision=each.equals)
        case "lease":
            return kinds(key=key, target=kinds.LEASE, lease=each.equals)
        case "value":
            return kinds(key=key, target=kinds.VALUE, value=each.equals)


def _operation(each: Operation) -> Any:
    rpc = _rpc()
    key = each.key.encode(errors="surrogateescape")
    match each.what:
        case "get":
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))
        case "put":
            return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=each.value, lease=each.lease))
        case "delete":
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


def batches(operations: Iterable[Operation]) -> list[list[Operation]]:
    """As many at a time as a transaction takes."""
    rest = list(operations)
    return [rest[begin : begin + MOST_OPERATIONS] for begin in range(0, len(rest), MOST_OPERATIONS)]
