"""Recorded bodies of all our operations survive a round trip through our wire types."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cells.api import models
from cells.api.models import node
from cells.api.models import status as status_models
from cells.api.wire import decode
from tests.unit.conformance.recordings import BROKEN, COPIED, EXCLUDED, exchanges, numbered
from tests.unit.conformance.shape import same_json

RESPONSES: list[tuple[str, str, int, Any]] = [
    ("GET", r"/v1/config", 200, models.DaemonConfiguration),
    ("GET", r"/v1/healthz", 200, status_models.StatusResponse),
    ("GET", r"/v1/endpoint", 200, list[models.EndpointModel]),
    ("GET", r"/v1/endpoint/[^/]+", 200, models.EndpointModel),
    ("PUT", r"/v1/endpoint/[^/]+", 201, models.EndpointModel),
    ("GET", r"/v1/endpoint/[^/]+/healthz", 200, models.EndpointHealth),
    ("GET", r"/v1/endpoint/[^/]+/log", 200, list[models.EndpointStatusChange]),
    ("GET", r"/v1/endpoint/[^/]+/labels", 200, models.LabelConfiguration),
    ("GET", r"/v1/endpoint/[^/]+/config", 200, models.EndpointConfigurationStatus),
    ("POST", r"/v1/ipam", 201, models.IPAMResponse),
    ("GET", r"/v1/metrics/", 200, list[models.Metric]),
    ("GET", r"/v1/service", 200, list[node.ServiceModel]),
    ("GET", r"/v1/service/[^/]+", 200, node.ServiceModel),
]
REQUESTS: list[tuple[str, str, Any]] = [
    ("PUT", r"/v1/endpoint/[^/]+", models.EndpointChangeRequest),
    ("DELETE", r"/v1/endpoint", models.EndpointBatchDeleteRequest),
    ("GET", r"/v1/endpoint", list[str]),
    ("PATCH", r"/v1/config", models.DaemonConfigurationSpec),
    ("PUT", r"/v1/service/[^/]+", node.ServiceRequest),
]


def _of_operation(rows: list[Any], method: str, path: str) -> Any | None:
    bare = path.partition("?")[0]
    return next((row for row in rows if row[0] == method and re.fullmatch(row[1], bare)), None)


def _responses() -> Iterator[Any]:
    for name in COPIED:
        for number, exchange in enumerate(exchanges(name)):
            request, response = exchange["request"], exchange["response"]
            row, body = _of_operation(RESPONSES, request["method"], request["path"]), response.get("body")
            if row is None or response.get("status") != row[2] or not isinstance(body, dict | list):
                continue
            if not broken_on_purpose(name, body):
                yield pytest.param(row[3], body, id=f"{name}-{number}-{request['method']}")


def broken_on_purpose(name: str, body: Any) -> bool:
    """Whether the recorded agent left required parts out, to see what the client does."""
    return EXCLUDED.get(name) == BROKEN or body == {}


def _requests() -> Iterator[Any]:
    for name in COPIED:
        for number, exchange in enumerate(exchanges(name)):
            request = exchange["request"]
            row = _of_operation(REQUESTS, request["method"], request["path"])
            if row is not None and "body" in request:
                yield pytest.param(row[2], request["body"], id=f"{name}-{number}-{request['method']}")


@pytest.mark.parametrize(("model", "body"), list(_responses()))
def test_a_recorded_answer_survives_our_types(model: Any, body: Any) -> None:
    read = decode(json.dumps(numbered(body)).encode(), model, "answer")
    again = json.loads(msgspec.json.encode(read))
    assert list(same_json(numbered(body), again)) == []


@pytest.mark.parametrize(("model", "body"), list(_requests()))
def test_a_recorded_request_is_understood(model: Any, body: Any) -> None:
    read = decode(json.dumps(numbered(body)).encode(), model, "request")
    if isinstance(body, dict):
        again = json.loads(msgspec.json.encode(read))
        assert list(same_json(numbered(body), again)) == []
        assert not {key for key in body if key not in again and body[key]}, "a key of the client is ignored"


def test_the_models_were_tried_on_many_recordings() -> None:
    tried = Counter(parameter.values[0] for parameter in _requests())
    assert tried[models.EndpointChangeRequest] >= 15
    assert tried[models.EndpointBatchDeleteRequest] >= 10
    assert len(list(_responses())) >= 150
