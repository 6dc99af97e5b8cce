"""Requests of ``cilium-dbg`` to the agent's API, with the error messages of Cilium's client.

Source: Cilium 1.17's generated client (api/v1/client, pkg/client); names of responses are those of its
openapi.yaml.
"""

import http.client
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import click

from hive.client import DEFAULT_SOCKET, UnixConnection

TIMEOUT: Final = 90.0
"""Timeout of an answer in seconds."""
HINT: Final = "Is the agent running?"
ANSWERS: Final = "hive.dbg.answers"
"""Key of the click context for decoded answers, see misread()."""

_STATUSES: Final = {
    400: "BadRequest",
    403: "Forbidden",
    404: "NotFound",
    429: "TooManyRequests",
    500: "InternalServerError",
}
_NAMES: Final[Mapping[str, Mapping[int, str]]] = {
    "PATCH /config": {500: "Failure"},
    "DELETE /endpoint": {400: "Invalid"},
    "GET /endpoint": {},
    "GET /endpoint/{id}": {400: "Invalid"},
    "DELETE /endpoint/{id}": {400: "Invalid"},
    "GET /endpoint/{id}/config": {},
    "PATCH /endpoint/{id}/config": {400: "Invalid", 500: "RequestFailedError"},
    "PATCH /endpoint/{id}/labels": {500: "UpdateFailed"},
    "GET /endpoint/{id}/log": {400: "Invalid"},
    "GET /endpoint/{id}/healthz": {400: "Invalid"},
    "GET /identity": {520: "Unreachable", 521: "InvalidStorageFormat"},
    "GET /identity/{id}": {520: "Unreachable", 521: "InvalidStorageFormat"},
    "PUT /policy": {400: "InvalidPolicy", 460: "InvalidPath", 500: "Failure"},
    "DELETE /policy": {400: "Invalid", 500: "Failure"},
    "PUT /service/{id}": {
        460: "InvalidFrontend",
        461: "InvalidBackend",
        500: "Failure",
        501: "UpdateBackendFailure",
    },
    "DELETE /service/{id}": {500: "Failure"},
    "GET /prefilter": {500: "Failure"},
    "PATCH /prefilter": {461: "InvalidCIdR", 500: "Failure"},
    "DELETE /prefilter": {461: "InvalidCIdR", 500: "Failure"},
    "PUT /recorder/{id}": {500: "Failure"},
    "DELETE /recorder/{id}": {500: "Failure"},
    "GET /debuginfo": {500: "Failure"},
    "GET /cgroup-dump-metadata": {500: "Failure"},
    "GET /ip": {400: "Invalid"},
    "GET /bgp/peers": {501: "Disabled"},
    "GET /bgp/routes": {501: "Disabled"},
    "GET /bgp/route-policies": {501: "Disabled"},
}
"""Responses with names that differ from those of their statuses."""
_ANSWERS: Final[Mapping[str, frozenset[int]]] = {
    "GET /healthz": frozenset(),
    "GET /config": frozenset(),
    "PATCH /config": frozenset({400, 403, 500}),
    "GET /endpoint": frozenset({404, 429}),
    "GET /endpoint/{id}": frozenset({400, 404, 429}),
    "DELETE /endpoint/{id}": frozenset({400, 403, 404, 429}),
    "GET /endpoint/{id}/config": frozenset({404, 429}),
    "PATCH /endpoint/{id}/config": frozenset({400, 403, 404, 429, 500}),
    "GET /endpoint/{id}/labels": frozenset({404, 429}),
    "PATCH /endpoint/{id}/labels": frozenset({403, 404, 429, 500}),
    "GET /endpoint/{id}/log": frozenset({400, 404, 429}),
    "GET /endpoint/{id}/healthz": frozenset({400, 404, 429}),
    "GET /identity": frozenset({404, 520, 521}),
    "GET /identity/{id}": frozenset({400, 404, 520, 521}),
    "GET /identity/endpoints": frozenset({404}),
    "GET /policy": frozenset({404}),
    "PUT /policy": frozenset({400, 403, 460, 500}),
    "DELETE /policy": frozenset({400, 403, 404, 500}),
    "GET /policy/selectors": frozenset(),
    "GET /service/{id}": frozenset({404}),
    "PUT /service/{id}": frozenset({403, 460, 461, 500, 501}),
    "DELETE /service/{id}": frozenset({403, 404, 500}),
    "GET /prefilter": frozenset({500}),
    "PATCH /prefilter": frozenset({403, 461, 500}),
    "DELETE /prefilter": frozenset({403, 461, 500}),
    "GET /recorder/{id}": frozenset({404}),
    "PUT /recorder/{id}": frozenset({403, 500}),
    "DELETE /recorder/{id}": frozenset({403, 404, 500}),
    "GET /debuginfo": frozenset({500}),
    "GET /cgroup-dump-metadata": frozenset({500}),
    "GET /map/{name}": frozenset({404}),
    "GET /map/{name}/events": frozenset({404}),
    "GET /fqdn/cache": frozenset({400, 404}),
    "GET /fqdn/cache/{id}": frozenset({400, 404}),
    "DELETE /fqdn/cache": frozenset({400, 403}),
    "GET /fqdn/names": frozenset({400}),
    "GET /ip": frozenset({400, 404}),
    "GET /bgp/peers": frozenset({500, 501}),
    "GET /bgp/routes": frozenset({500, 501}),
    "GET /bgp/route-policies": frozenset({500, 501}),
}
"""Statuses that the client decodes for each operation; for others it reports no body."""
_LISTS: Final = frozenset(
    f"GET /{path}"
    for path in (
        *("bgp/peers", "bgp/route-policies", "bgp/routes", "endpoint", "endpoint/{id}/log", "fqdn/cache"),
        *("fqdn/cache/{id}", "identity", "identity/endpoints", "ip", "lrp", "metrics/", "node/ids"),
        *("policy/selectors", "recorder", "recorder/masks", "service"),
    )
)
"""Operations that return a list; others return an object."""
_WITHOUT_TEXT: Final = frozenset({403, 404, 429})
"""Statuses of responses without a body in the schema."""
_TEXTLESS: Final = frozenset(
    {
        *((f"GET /endpoint/{{id}}/{part}", 400) for part in ("log", "healthz")),
        ("PATCH /endpoint/{id}/config", 400),
        ("PUT /policy", 400),
        ("GET /fqdn/names", 400),
        ("GET /identity/{id}", 400),
    }
)
_INITIALISMS: Final = {"Id": "ID", "Ip": "IP", "Ids": "Ids", "Fqdn": "Fqdn", "Lrp": "Lrp"}


class RequestFailedError(Exception):
    """Raised if a request fails; the text is the client's, ``status`` is 0 without an answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def socket_path() -> Path:
    """Return the agent's socket: ``-H``, CILIUM_SOCK or the default."""
    context = click.get_current_context(silent=True)
    given = context.find_root().obj if context is not None else None
    host = str(given or os.environ.get("CILIUM_SOCK") or DEFAULT_SOCKET)
    if host.startswith(("tcp://", "http://")):
        raise click.ClickException(f"Error while creating client: {host}: only unix sockets are supported")
    return Path(host.removeprefix("unix://"))


def ask(
    operation: str,
    *,
    body: object = None,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    **named: str,
) -> Any:
    """Call an operation such as ``GET /endpoint/{id}``; return the decoded answer.

    Values of `named` replace the path's parameters. Raises RequestFailedError.
    """
    method, _, template = operation.partition(" ")
    status, content = send(method, path_of(template, named, query), body, headers, timeout)
    if status >= http.client.MULTIPLE_CHOICES:
        raise RequestFailedError(explain(operation, status, content), status)
    read = method == "GET" or template == "/policy"  # answers to other changes are not read
    found = decoded(content if read else b"", list if operation in _LISTS else dict)
    if (context := click.get_current_context(silent=True)) is not None:
        context.meta.setdefault(ANSWERS, []).append((operation, found))
    return found


def ask_status(operation: str, *, body: object, **named: str) -> int:
    """Call an operation that changes something; return the status. Raises RequestFailedError."""
    method, _, template = operation.partition(" ")
    status, content = send(method, path_of(template, named), body)
    if status >= http.client.MULTIPLE_CHOICES:
        raise RequestFailedError(explain(operation, status, content), status)
    return status


def decoded(content: bytes, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
    """Decode an answer like Cilium's client: null fields are absent, and no answer is an empty one.

    Raises RequestFailedError if it is not JSON, or of another kind.
    """
    try:
        answer = json.loads(content, object_pairs_hook=_without_nulls) if content.strip() else None
    except ValueError as error:
        raise RequestFailedError(str(error)) from error
    if answer is not None and not isinstance(answer, kind):
        names: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "bool"}
        found = names.get(type(answer), "number")
        raise RequestFailedError(f"json: cannot unmarshal {found} where an {names[kind]} is expected")
    return kind() if answer is None else answer


def _without_nulls(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}


def misread(context: click.Context) -> str:
    """Return which fields of an answer have unexpected types; empty if none has."""
    import msgspec

    from cells.api.openapi import DESCRIBED

    for operation, answer in context.meta.get(ANSWERS, ()):
        method, _, path = operation.partition(" ")
        for one in DESCRIBED:
            if (one.method, one.path) != (method, f"/v1{path}"):
                continue
            kinds = [each.kind for each in one.answers if each.status < http.client.MULTIPLE_CHOICES]
            try:
                msgspec.convert(answer, kinds[0])
            except msgspec.ValidationError as error:
                return f"[{method} {path}] json: cannot unmarshal the answer: {error}"
    return ""


def ask_or_fail(failure: str, operation: str, *, end: str = "\n", **request: Any) -> Any:
    """Call an operation; on failure, exit with a line that starts with ``failure``.

    ``end`` follows it: most of Cilium's commands print an empty line, too.
    """
    try:
        return ask(operation, **request)
    except RequestFailedError as error:
        raise click.ClickException(f"{failure}: {error}{end}") from error


def path_of(template: str, named: Mapping[str, str], query: Mapping[str, str] | None = None) -> str:
    """Return a path below /v1; slashes in values are escaped."""
    path = template
    for name, value in named.items():
        path = path.replace(f"{{{name}}}", _escaped(value))
    return f"/v1{path}" + (f"?{urlencode(sorted(query.items()))}" if query else "")


def _escaped(value: str) -> str:
    return re.sub(
        r"[^A-Za-z0-9\-._~:$&+,;=@]", lambda one: "".join(f"%{b:02X}" for b in one[0].encode()), value
    )


def send(
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    socket: Path | None = None,
) -> tuple[int, bytes]:
    """Send a request to a socket, by default the agent's; return status and body.

    Raises RequestFailedError.
    """
    where = socket or socket_path()
    connection = UnixConnection(where, timeout)
    step = f"dial unix {where}: connect"
    try:
        connection.connect()
        step = f"read unix @->{where}: read"
        sent = dict(headers or {})
        data = None
        if body is not None:
            sent["Content-Type"] = "application/json"
            data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        connection.request(method, path, data, sent | {"Accept": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except TimeoutError as error:
        raise RequestFailedError("Cilium API client timeout exceeded") from error
    except http.client.RemoteDisconnected as error:
        raise RequestFailedError(f'{method.capitalize()} "http://localhost{path}": EOF') from error
    except http.client.IncompleteRead as error:
        raise RequestFailedError("unexpected EOF") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = f"\n{HINT}" if str(DEFAULT_SOCKET) in step else ""
        text = f'{method.capitalize()} "http://localhost{path}": {step}: {reason}{hint}'
        raise RequestFailedError(text) from error
    except http.client.HTTPException as error:
        raise RequestFailedError(f"{where} does not speak HTTP: {error!r}") from error
    finally:
        connection.close()


def explain(operation: str, status: int, content: bytes) -> str:
    """Return why an operation failed, in the words of Cilium's generated client."""
    method, _, path = operation.partition(" ")
    words = [word.capitalize() for word in re.split(r"[^a-z0-9]+", path) if word]
    if status not in _ANSWERS.get(operation, ()):
        name = method.capitalize() + "".join(_INITIALISMS.get(word, word) for word in words)
        return f"[{method} {path}] {name} (status {status}): {{}}"
    response = _NAMES.get(operation, {}).get(status) or _STATUSES.get(status, str(status))
    name = method.lower() + "".join(words) + response
    if status in _WITHOUT_TEXT or (operation, status) in _TEXTLESS:
        return f"[{method} {path}][{status}] {name} "
    try:
        reason = json.loads(content) if content.strip() else ""
    except ValueError:
        reason = content.decode(errors="replace").strip()
    if isinstance(reason, dict):
        return "json: cannot unmarshal object into Go value of type models.Error"
    return f"[{method} {path}][{status}] {name}  {reason}"
