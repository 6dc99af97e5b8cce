"""Conversions between aetcd's messages and the types of this cell.

For: etcd.py. The first call loads gRPC and the messages, which takes 0.1 s and 20 MB.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cells.cluster.kvstore.model import Compare, Event, KeyValue, Operation


def load_messages() -> Any:
    """The module with etcd's messages."""
    from aetcd import rpc

    return rpc


def request_errors() -> Any:
    """What a request fails with: closing the connection cancels it as if its task were cancelled."""
    from grpc import aio

    return aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError


def end_of_stream() -> Any:
    """What reading a stream that has ended returns."""
    from grpc import aio

    return aio.EOF


def key_value(found: Any) -> KeyValue:
    """From an ``mvccpb.KeyValue``."""
    return KeyValue(
        found.key.decode(errors="surrogateescape"),
        found.value,
        found.create_revision,
        found.mod_revision,
        found.lease,
    )


def change(event: Any) -> Event:
    """From an ``mvccpb.Event``."""
    found = key_value(event.kv)
    return Event(found.key, None if event.type == event.DELETE else found, found.mod_revision)


def comparison(each: Compare) -> Any:
    """To an ``etcdserverpb.Compare``."""
    kinds = load_messages().Compare
    key = each.key.encode(errors="surrogateescape")
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
    """To an ``etcdserverpb.RequestOp``."""
    rpc = load_messages()
    key = each.key.encode(errors="surrogateescape")
    match each.what:
        case "get":
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))
        case "put":
            return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=each.value, lease=each.lease))
        case "delete":
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
