"""Queries the running agent over its unix socket."""

import errno
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from hive.output import F, output_option

DEFAULT_SOCKET = Path("/var/run/cilium/cilium.sock")
TIMEOUT = 30.0


class RefusedError(click.ClickException):
    """Raised when the agent answers with an error; ``reason`` is the agent's message."""

    def __init__(self, message: str, reason: str, status: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status


class _BadRequestError(RefusedError):
    """The agent rejects the request as invalid."""

    exit_code = 2


class UnixConnection(http.client.HTTPConnection):
    """HTTP/1.1 over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except BaseException:
            self.sock.close()
            raise


def ask(
    path: str,
    agent_socket: Path = DEFAULT_SOCKET,
    headers: dict[str, str] | None = None,
    timeout: float = TIMEOUT,
    missing: str = "",
    body: object = None,
    method: str = "GET",
) -> Any:
    """GET `path` and return the decoded JSON, None for an empty answer; `timeout` in seconds.

    A `body` is sent as JSON, as Cilium's clients send filters.

    Raises click.ClickException with one line: agent down, permission denied, an error answer; `missing` is
    the message for a 404, if given.
    """
    connection = UnixConnection(agent_socket, timeout)
    try:
        if body is None:
            connection.request(method, path, headers=headers or {})
        else:
            kind = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body), kind | (headers or {}))
        answer = connection.getresponse()
        content = answer.read()
    except OSError as error:
        raise click.ClickException(_explain(error, agent_socket, timeout)) from error
    except http.client.HTTPException as error:
        raise click.ClickException(
            f"{agent_socket} does not speak HTTP ({error!r}): is it the agent's API socket?"
        ) from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise _refusal(method, path, answer, content, missing)
    try:
        return json.loads(content) if content else None
    except ValueError as error:
        raise click.ClickException(f"the agent's answer to {method} {path} is not JSON: {error}") from error


def module_health(socket: Callable[[str], Any]) -> dict[str, tuple[str, str]]:
    """Return level and message of each module that reports health, by an ask() with a path."""
    modules = socket("/v1/healthz").get("modules") or ()
    return {one["module-id"]: (one["level"].lower(), one.get("message", "")) for one in modules}


def follow(
    path: str,
    agent_socket: Path = DEFAULT_SOCKET,
    timeout: float = TIMEOUT,
    *,
    ends: bool = False,
    missing: str = "",
) -> Iterator[Any]:
    """GET `path` and yield each line of the answer, decoded, as it arrives; `timeout` is that of the first.

    Raises click.ClickException with one line like ask(), and when the agent ends an answer that `ends` does
    not expect to end.
    """
    connection = UnixConnection(agent_socket, timeout)
    try:
        connection.request("GET", path)
        wire = connection.sock  # an answer without keep-alive takes over the connection
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise _refusal("GET", path, answer, answer.read(), missing)
        wire.settimeout(None)
        while line := answer.readline():
            if line.strip():
                yield json.loads(line)
    except OSError as error:
        raise click.ClickException(_explain(error, agent_socket, timeout)) from error
    except (http.client.HTTPException, ValueError) as error:
        raise click.ClickException(f"the answer of {agent_socket} broke off ({error!r})") from error
    finally:
        connection.close()
    if not ends:
        raise click.ClickException(f"the agent at {agent_socket} has ended the answer: did it stop?")


def _refusal(
    method: str, path: str, answer: http.client.HTTPResponse, body: bytes, missing: str
) -> RefusedError:
    """Return the agent's error message; with ``hive --debug``, the request, too."""
    reason = _text(body, answer.reason)
    message = reason
    if answer.status == http.client.NOT_FOUND:
        message = missing or reason
    elif answer.status == http.client.SERVICE_UNAVAILABLE:
        message = f"the agent cannot answer now: {reason}"
    elif answer.status >= http.client.INTERNAL_SERVER_ERROR:
        message = f"the agent failed: {reason}; its log has more"
    message += _asked(method, path, answer.status)
    kind = _BadRequestError if answer.status == http.client.BAD_REQUEST else RefusedError
    return kind(message, reason, answer.status)


def _asked(method: str, path: str, status: int) -> str:
    """Return the request with ``hive --debug``; otherwise nothing."""
    context = click.get_current_context(silent=True)
    if context is None or not context.find_root().params.get("debug"):
        return ""
    return f" ({method} {path} was answered with {status})"


def patch(path: str, body: object, agent_socket: Path = DEFAULT_SOCKET, timeout: float = TIMEOUT) -> None:
    """Send a PATCH request. Raises click.ClickException with one line unless it succeeds, as ask() does."""
    try:
        ask(path, agent_socket, timeout=timeout, body=body, method="PATCH")
    except RefusedError as error:
        if error.status >= http.client.INTERNAL_SERVER_ERROR:
            raise
        raise click.ClickException(f"the agent refused: {error.message}") from error


@contextmanager
def connect(path: Path) -> Iterator[socket.socket]:
    """A stream socket connected to another of the agent's sockets. Raises click.ClickException."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        try:
            stream.connect(str(path))
            yield stream
        except OSError as error:
            raise click.ClickException(_explain(error, path, TIMEOUT)) from error


def _explain(error: OSError, agent_socket: Path, timeout: float) -> str:
    if error.errno in {errno.ENOENT, errno.ECONNREFUSED}:
        return f"no agent answers at {agent_socket}: start one (hive agent) or name its --socket"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"permission denied on {agent_socket}: run this as root, or as a member of the socket's group"
    if error.errno == errno.EPROTOTYPE:
        return f"{agent_socket} is another kind of socket: the API's is cilium.sock"
    if isinstance(error, TimeoutError):
        return f"the agent at {agent_socket} did not answer within {timeout:g} s: is it still starting?"
    return f"cannot talk to the agent at {agent_socket}: {error.strerror or error}"


def _text(body: bytes, reason: str) -> str:
    try:
        decoded = json.loads(body)
    except ValueError:
        decoded = body.decode(errors="replace").strip()
    if isinstance(decoded, dict):
        decoded = decoded.get("message") or decoded.get("err") or json.dumps(decoded)
    return str(decoded or reason)


class _SocketPath(click.ParamType[Path]):
    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        text = str(value).removeprefix("unix://")
        if not text.startswith("/"):
            self.fail(f"{value!r}: expected an absolute path, such as {DEFAULT_SOCKET}", param, ctx)
        return Path(text)


socket_option = click.option(
    "-H",
    "--socket",
    "agent_socket",
    type=_SocketPath(),
    default=DEFAULT_SOCKET,
    show_default=True,
    envvar="CILIUM_SOCK",
    help="The agent's API socket (also: CILIUM_SOCK).",
)

timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT,
    show_default=True,
    help="Seconds to wait.",
)


def agent_options(command: F) -> F:
    """Options of commands that query the agent: --socket, --timeout, --output."""
    return socket_option(timeout_option(output_option(command)))
