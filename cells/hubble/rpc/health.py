"""The health service that clients of gRPC ask before they ask anything else.

Source: grpc.health.v1, health.proto.
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar, Final, TypeVar

import anyio

from cells.hubble.codec import Wire, WireMessage, decode, encode
from cells.hubble.rpc.messages import Answers, RpcCode, RpcError, server_streaming, unary
from cells.hubble.scalars import DecodeError

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
OBSERVER_NAME: Final = "hubble.server.Observer"
"""The service of which health clients ask for."""

_Message = TypeVar("_Message", bound=WireMessage)


def decoded(kind: type[_Message], data: bytes) -> _Message:
    """A request. Raises RpcError for bytes that are none."""
    try:
        return decode(kind, data)
    except DecodeError as error:
        raise RpcError(RpcCode.INTERNAL, f"grpc: error unmarshalling request: {error}") from error


class ServingStatus(enum.IntEnum):
    """Whether a service answers."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class HealthCheckRequest(WireMessage):
    """Asks for the health of a service, or of the server."""

    protobuf: ClassVar[str] = "grpc.health.v1.HealthCheckRequest"
    service: Annotated[str, Wire(1)] = ""


class HealthCheckResponse(WireMessage):
    """The health of a service."""

    protobuf: ClassVar[str] = "grpc.health.v1.HealthCheckResponse"
    status: Annotated[int, Wire(1, ServingStatus)] = 0


async def _check(data: bytes) -> bytes:
    if not _healthy(data):
        raise RpcError(RpcCode.NOT_FOUND, "unknown service")
    return encode(HealthCheckResponse(status=ServingStatus.SERVING))


async def _watch(data: bytes) -> Answers:
    status = ServingStatus.SERVING if _healthy(data) else ServingStatus.SERVICE_UNKNOWN
    yield [encode(HealthCheckResponse(status=status))]
    await anyio.sleep_forever()  # its health does not change while it serves


def _healthy(data: bytes) -> bool:
    return decoded(HealthCheckRequest, data).service in {"", OBSERVER_NAME}


HEALTH_METHODS: Final = (
    unary(HEALTH_SERVICE, "Check", _check),
    server_streaming(HEALTH_SERVICE, "Watch", _watch),
)
