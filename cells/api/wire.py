"""The wire rules of the REST API: bodies in, bodies out, and the errors of the framework itself.

Needs: nothing.   Gives: answer, json_answer, empty, read_body, FrameworkError, the middleware.
An error of an operation is a JSON string, or nothing where the operation's schema has no body; an error
of the framework is ``{"code":..,"message":..}`` as go-openapi writes it (github.com/go-openapi/errors).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from aiohttp import web

T = TypeVar("T")
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]

JSON = "application/json"
INTERNAL_ERROR = "Internal error occurred, check Cilium logs for details."
TRUE_TEXTS = frozenset({"true", "1", "yes", "ok", "y", "on", "selected", "checked", "t", "enabled"})
_UCRED = struct.Struct("iII")  # struct ucred of unix(7)


class FrameworkError(Exception):
    """A request the framework refuses before any operation sees it; has the HTTP status and its code."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def answer(status: int, body: object) -> web.Response:
    """A response with a JSON body, newline-terminated like the Go server's."""
    from aiohttp import web

    return web.Response(status=status, body=msgspec.json.encode(body) + b"\n", content_type=JSON)


def json_answer(text: str) -> web.Response:
    """A 200 whose body is JSON already."""
    from aiohttp import web

    return web.Response(text=text, content_type=JSON)


def empty(status: int) -> web.Response:
    """A response of an operation whose schema has no body for this status."""
    from aiohttp import web

    response = web.Response(status=status)
    response.headers.popall("Content-Type", None)
    return response


def plain(status: int, text: str) -> web.Response:
    """A response outside every schema, for a person to read."""
    from aiohttp import web

    return web.Response(status=status, text=text)


def parse_bool(text: str | None, *, default: bool) -> bool:
    """A header's boolean as go-openapi reads it: a few words are true, everything else is false."""
    return default if text is None else text.strip().lower() in TRUE_TEXTS


def decode(body: bytes, model: type[T], name: str) -> T:
    """Decode a request body; ``name`` is the parameter's name in the schema.

    Unknown keys are ignored and null means absent, as encoding/json has it. Raises FrameworkError:
    422 when the body or a required key is missing, 400 when it is no such JSON.
    """
    if not body.strip():
        raise FrameworkError(422, 602, f"{name} in body is required")
    try:
        return msgspec.convert(_without_nulls(msgspec.json.decode(body)), model)
    except msgspec.ValidationError as error:
        text = str(error)
        if text.startswith("Object missing required field `"):
            raise FrameworkError(422, 602, f"{text.split('`')[1]} in body is required") from None
        raise FrameworkError(400, 400, f'parsing {name} body from "" failed, because {text}') from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameworkError(400, 400, f'parsing {name} body from "" failed, because {error}') from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value


async def read_body(request: web.Request, model: type[T], name: str) -> T:
    """Read and decode the body of a request, also of a GET; see :func:`decode`."""
    body = await request.read()
    kind = request.headers.get("Content-Type", JSON).partition(";")[0].strip().lower()
    if body and kind != JSON:
        raise FrameworkError(415, 415, f'unsupported media type "{kind}", only [{JSON}] are allowed')
    return decode(body, model, name)


def peer_uid(request: web.Request) -> int:
    """The uid of the process at the other end of the unix socket (SO_PEERCRED, unix(7))."""
    if request.transport is None:
        raise ConnectionResetError("the peer has gone")
    peer: socket.socket = request.transport.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(credentials)[1]
    return uid


def framework_answer(status: int, code: int, message: str) -> web.Response:
    """The framework's own error form."""
    return answer(status, {"code": code, "message": message})


def refusal(request: web.Request, error: web.HTTPException) -> web.Response:
    """What an unknown path, a wrong method or an oversized body is answered with."""
    from aiohttp import web

    if isinstance(error, web.HTTPNotFound):
        return framework_answer(404, 404, f"path {request.rel_url.raw_path} was not found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ",".join(sorted(error.allowed_methods))
        message = f"method {request.method} is not allowed, but [{allowed}] are"
        response = framework_answer(405, 405, message)
        response.headers["Allow"] = allowed
        return response
    return framework_answer(error.status, error.status, error.reason)
