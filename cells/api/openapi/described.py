"""Types that describe an operation of the API: parameters, body and responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from cells.api.models import Error, Problem
from cells.api.operations import operation_name
from cells.api.server import GATED
from cells.api.wire import JSON, READING

TEXT = "text/plain"


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of a request, in its path, query or headers."""

    name: str
    place: Literal["path", "query", "header"]
    kind: Any
    text: str
    required: bool = False
    example: object = None


class Body(msgspec.Struct, frozen=True):
    """The JSON body of a request of type ``kind``."""

    kind: Any
    text: str
    required: bool = True
    example: object = None


class DescribedResponse(msgspec.Struct, frozen=True):
    """A possible response of an operation; several for one status are alternatives."""

    status: int
    text: str
    kind: Any = None
    """Type of the body; None without a body."""
    content: str = JSON
    lines: bool = False
    """Whether the body is a stream of lines of ``kind``; clients must skip empty lines."""
    links: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    """Subsequent operations, and where this response contains their parameters."""


class Described(msgspec.Struct, frozen=True):
    """An operation."""

    method: str
    path: str
    summary: str
    answers: tuple[DescribedResponse, ...]
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    alias: bool = False
    """Whether another path has the same operation with the same ID."""

    @property
    def id(self) -> str:
        """The operationId."""
        return operation_id(self.method, self.path)

    @property
    def tag(self) -> str:
        """The tag: an element of its path."""
        parts = self.path.split("/")
        return parts[2] if parts[1] == "v1" else parts[1]

    @property
    def is_cilium(self) -> bool:
        """Whether Cilium's API has the operation."""
        return self.path.startswith("/v1/")

    def all_answers(self) -> list[DescribedResponse]:
        """The operation's responses, and those common to similar operations."""
        found = list(self.answers)
        if self.is_cilium:
            found.append(
                DescribedResponse(403, "Switched off by enable-cilium-api-server-access.", str, TEXT)
            )
        if self.method not in READING:
            found.append(DescribedResponse(403, "The caller is not root.", str, TEXT))
        if self.body is not None:
            found += [
                problem(400, "The body is not JSON of this form."),
                problem(413, "The body is larger than 1 MiB."),
                problem(415, f"The body's Content-Type is not {JSON}."),
                problem(422, "The body lacks a required field, or has an unknown value."),
            ]
        if self.is_cilium and self.tag == "endpoint":
            found.append(error(429, "Too many requests in the given time."))
        if self.is_cilium and self.tag in GATED:
            found.append(error(503, "The agent stopped before it had started."))
        return sorted(found, key=lambda answer: answer.status)


def operation_id(method: str, path: str) -> str:
    """Return e.g. ``PutEndpointID`` for PUT /v1/endpoint/{id}; in Cilium's style also outside /v1."""
    if name := operation_name(method, path):
        return name
    return method.capitalize() + "".join(word.capitalize() for word in re.findall(r"[a-z]+", path))


def ok(text: str, kind: Any = None, *, status: int = 200, **more: Any) -> DescribedResponse:
    """Describe a successful response."""
    return DescribedResponse(status, text, kind, **more)


def error(status: int, text: str) -> DescribedResponse:
    """Describe an error with a text as body."""
    return DescribedResponse(status, text, Error)


def bare(status: int, text: str) -> DescribedResponse:
    """Describe an error without a body."""
    return DescribedResponse(status, text)


def problem(status: int, text: str) -> DescribedResponse:
    """Describe go-openapi's refusal of a request that cannot be decoded."""
    return DescribedResponse(status, text, Problem)


def path(name: str, text: str, *, kind: Any = str, example: object = None) -> Parameter:
    """Describe a path parameter."""
    return Parameter(name, "path", kind, text, required=True, example=example)


def query(
    name: str, text: str, *, kind: Any = str, required: bool = False, example: object = None
) -> Parameter:
    """Describe a query parameter."""
    return Parameter(name, "query", kind, text, required=required, example=example)


def header(name: str, text: str, *, kind: Any = bool) -> Parameter:
    """Describe a header parameter."""
    return Parameter(name, "header", kind, text)
