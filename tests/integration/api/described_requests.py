"""Sends valid and invalid requests, generated from the API's OpenAPI document, to a node's socket."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import msgspec
import schemathesis
from requests import PreparedRequest, Request
from schemathesis.core import NotSet
from schemathesis.generation import derive_operation_seed
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema

from cells.api.openapi import DESCRIBED, Described, document
from cells.api.wire import JSON

ENOUGH = 1 << 16
"""Bytes that are read of an endless response."""
SILENT = 0.05
"""Seconds without data after which an endless response counts as complete."""

_CONFIG = {
    "base-url": "http://localhost",
    "generation": {"deterministic": True, "max-examples": 15, "database": "none"},
    "checks": {
        # 5xx are documented one by one, so status_code_conformance sees those that are not.
        "not_a_server_error": {"enabled": False},
        # No schema states whether an object exists or what it may be; such answers are accepted.
        "positive_data_acceptance": {"expected-statuses": ["2xx", "400", "403", "404", "500", "501", "502"]},
    },
}


def _loaded() -> OpenApiSchema:
    return schemathesis.openapi.from_dict(document(), config=schemathesis.Config.from_dict(_CONFIG))


SCHEMA = _loaded()
LINKED = _loaded().include(path_regex="^/v1/(endpoint|ipam)")
"""Operations with responses that contain the identifiers that other operations use."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Socket:
    """Sends cases to the API at ``path``, each over a new connection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, case: schemathesis.Case[Any]) -> schemathesis.Response:
        """Send a case and return the response; of an endless one, the part that arrives at once."""
        sent = Request(**case.as_transport_kwargs()).prepare()
        assert sent.method is not None
        connection, began = _Connection(self._path), time.monotonic()
        try:
            assert sent.body is None or isinstance(sent.body, str | bytes)
            connection.request(sent.method, sent.path_url, sent.body, dict(sent.headers))
            wire = connection.sock
            got = connection.getresponse()
            endless = got.getheader("Content-Length") is None and got.chunked
            if endless and wire is not None:
                wire.settimeout(SILENT)
            content = _read(got) if endless else got.read()
        finally:
            connection.close()
        headers: dict[str, list[str]] = {}
        for name, value in got.getheaders():
            headers.setdefault(name, []).append(value)
        return schemathesis.Response(
            got.status, headers, content, sent, time.monotonic() - began, verify=False, message=got.reason
        )


def _read(got: http.client.HTTPResponse) -> bytes:
    """Return a finite chunked body whole; of an endless one, the part that arrives at once."""
    content = b""
    try:
        while len(content) < ENOUGH:
            if not (part := got.read1(ENOUGH)):
                return content
            content += part
    except TimeoutError:
        pass
    return content[: content.rfind(b"\n") + 1]


def example(operation_id: str) -> schemathesis.Case[Any]:
    """Return the request that the document shows for an operation."""
    operation = SCHEMA.find_operation_by_id(operation_id)
    one = next(each for each in DESCRIBED if each.id == operation_id and not each.alias)
    given: dict[str, dict[str, str]] = {"path": {}, "query": {}}
    for each in one.parameters:
        if each.example is not None:
            given[each.place][each.name] = str(each.example)
    made = operation.Case(path_parameters=given["path"], query=given["query"])
    if one.body is not None:
        made.body, made.media_type = cast("dict[str, Any]", one.body.example), JSON
    return made


def requests_test(one: Described, answers: Callable[[schemathesis.Case[Any]], None]) -> Callable[[], None]:
    """Return the test of an operation: its example, edge cases, invalid requests and random ones.

    Schemathesis's plugin would create the same for each operation while tests are collected, which takes some
    seconds in every process.
    """
    operation = SCHEMA[one.path][one.method]
    config = SCHEMA.config
    made: Callable[[], None] = create_test(
        operation=operation,
        test_func=answers,
        config=HypothesisTestConfig(
            project=config,
            modes=list(HypothesisTestMode),
            settings=config.get_hypothesis_settings(operation=operation, phase="fuzzing"),
            explicit_setting_names=config.explicit_hypothesis_settings(operation=operation, phase="fuzzing"),
            seed=derive_operation_seed(config.seed, operation.label),
        ),
    )
    return made


def check(case: schemathesis.Case[Any], answer: schemathesis.Response) -> None:
    """Raise unless the document describes this response to the request."""
    one = next((one for one in DESCRIBED if (one.method, one.path) == (case.method, case.path)), None)
    answers = [] if one is None else one.all_answers()
    described = [each for each in answers if each.status == answer.status_code]
    without: list[schemathesis.CheckFunction] = []
    if one is not None and _is_read_as_valid(case, answer.request, one):
        without.append(negative_data_rejection)
    if not answer.content and any(each.kind is None for each in described):
        without += [content_type_conformance, response_schema_conformance]
    case.validate_response(answer, excluded_checks=without)
    for each in described:
        for line in answer.content.splitlines() if each.lines else ():
            if line:
                msgspec.json.decode(line, type=each.kind)


def _is_read_as_valid(case: schemathesis.Case[Any], sent: PreparedRequest, one: Described) -> bool:
    """Return whether the Go server accepts a request that the document does not allow."""
    query = parse_qsl(urlsplit(sent.path_url).query, keep_blank_values=True)
    carried: dict[str, Mapping[str, Any]] = {"query": dict(reversed(query)), "header": sent.headers}
    try:
        for each in one.parameters:
            given = carried.get(each.place, {}).get(each.name)  # the first of several
            if not given and each.required and each.place != "path":
                return False
            if given and each.kind not in {bool, str}:  # every text is one
                msgspec.convert(given, each.kind, strict=False)
        if one.body is None or isinstance(case.body, NotSet):
            return one.body is None or not one.body.required
        msgspec.convert(_absent(case.body), one.body.kind)
    except msgspec.ValidationError:
        return False
    return True


def _absent(value: object) -> object:
    """Remove what the server treats as absent from a body: null and empty strings, at any depth."""
    if isinstance(value, dict):
        return {key: _absent(item) for key, item in value.items() if item not in (None, "")}
    if isinstance(value, list):
        return [_absent(item) for item in value if item is not None]
    return value
