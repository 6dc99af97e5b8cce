"""Decoding of request bodies, encoding of responses, and go-openapi's errors.

An operation's error is a JSON string, or an empty body if its schema has none; an error of the framework is
``{"code":..,"message":..}`` as go-openapi writes it (github.com/go-openapi/errors).
"""

from __future__ import annotations

import re
import socket
import struct
from typing import TypeVar

import msgspec

from cells.api.models import Problem
from cells.base.addresses import IPNetwork
from cells.policy.labels import parse_prefix
from lifecycle.http import Refusal, Request, Response

__all__ = [
    "INTERNAL_ERROR",
    "JSON",
    "READING",
    "TRUE_TEXTS",
    "FrameworkError",
    "answer",
    "decode",
    "empty",
    "framework_response",
    "json_answer",
    "not_found_response",
    "parse_bool",
    "parse_cidr",
    "parse_int",
    "peer_of",
    "plain",
    "read_body",
]

T = TypeVar("T")

JSON = "application/json"
READING = frozenset({"GET", "HEAD"})
"""HTTP methods that change nothing."""
INTERNAL_ERROR = "Internal error occurred, check Cilium logs for details."
TRUE_TEXTS = frozenset({"true", "1", "yes", "ok", "y", "on", "selected", "checked", "t", "enabled"})
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_UCRED = struct.Struct("iII")  # struct ucred of unix(7)


class FrameworkError(Exception):
    """Raised for a request that go-openapi would refuse before its operation runs.

    It has an HTTP status and an error code.
    """

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def answer(status: int, body: object) -> Response:
    """Return a response with a JSON body and a trailing newline, as Go's server writes it."""
    return Response(status, msgspec.json.encode(body) + b"\n", JSON)


def json_answer(text: str) -> Response:
    """Return a response 200 with an encoded JSON body."""
    return Response(200, text.encode(), JSON)


def empty(status: int) -> Response:
    """Return a response without a body, for statuses without a schema."""
    return Response(status)


def plain(status: int, text: str) -> Response:
    """Return a text response outside the schema."""
    return Response(status, text.encode(), "text/plain; charset=utf-8")


def parse_bool(text: str | None, *, default: bool) -> bool:
    """Parse a boolean header as go-openapi does: a few words are true, all others are false."""
    return default if text is None else text.strip().lower() in TRUE_TEXTS


def parse_int(text: str | None, name: str) -> int:
    """Parse an integer as go-openapi does; 0 for an empty text. Raises FrameworkError 422 for other text."""
    if not text:
        return 0
    if not _INTEGER.fullmatch(text) or not -(1 << 63) <= int(text) < 1 << 63:
        raise FrameworkError(422, 601, f'{name} must be of type int64: "{text}"')
    return int(text)


def parse_cidr(text: str) -> IPNetwork | None:
    """Parse ``address/length`` as Go does; None for an empty text. Raises Refusal 400."""
    if not text:
        return None
    try:
        return parse_prefix(text)
    except ValueError as error:
        raise Refusal(400, f"invalid CIDR address: {text}") from error


def decode(body: bytes, model: type[T], name: str) -> T:
    """Decode a request body; ``name`` is the parameter's name in the schema.

    Unknown keys are ignored and null means absent, as in encoding/json. Raises FrameworkError 422 if the body
    or a required key is missing or an enum value is invalid, 400 for invalid JSON.
    """
    if not body.strip():
        raise FrameworkError(422, 602, f"{name} in body is required")
    try:
        return msgspec.convert(_without_nulls(msgspec.json.decode(body)), model)
    except msgspec.ValidationError as error:
        text = str(error)
        if text.startswith("Object missing required field `"):
            raise FrameworkError(422, 602, f"{text.split('`')[1]} in body is required") from None
        if text.startswith("Invalid enum value "):
            raise FrameworkError(422, 606, f"{name} in body: {text}") from None
        raise FrameworkError(400, 400, f'parsing {name} body from "" failed, because {text}') from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameworkError(400, 400, f'parsing {name} body from "" failed, because {error}') from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value


def read_body(request: Request, model: type[T], name: str) -> T:
    """Decode the body of a request, also of a GET request; see :func:`decode`."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if request.body and kind != JSON:
        raise FrameworkError(415, 415, f'unsupported media type "{kind}", only [{JSON}] are allowed')
    return decode(request.body, model, name)


def peer_of(request: Request) -> tuple[int, int]:
    """Return pid and uid of the peer of a unix socket (SO_PEERCRED, unix(7))."""
    credentials = request.peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    return pid, uid


def framework_response(status: int, code: int, message: str) -> Response:
    """Return a FrameworkError as a response."""
    return answer(status, Problem(code=code, message=message))


def not_found_response(request: Request, allowed: frozenset[str]) -> Response:
    """Return 404 for an unknown path, or 405 with the ``allowed`` methods of a known path."""
    if not allowed:
        return framework_response(404, 404, f"path {request.path} was not found")
    methods = ",".join(sorted(allowed))
    message = f"method {request.method} is not allowed, but [{methods}] are"
    response = framework_response(405, 405, message)
    response.headers["Allow"] = methods
    return response
