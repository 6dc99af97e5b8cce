"""What there is to say of one operation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from cells.api.models import Error, Problem
from cells.api.operations import operation_name
from cells.api.server import BEHIND
from cells.api.wire import JSON, READING

TEXT = "text/plain"


class Parameter(msgspec.Struct, frozen=True):
    """What a request carries beside its body."""

    name: str
    place: Literal["path", "query", "header"]
    kind: Any
    """Its type."""
    text: str
    required: bool = False
    example: object = None


class Body(msgspec.Struct, frozen=True):
    """What a request carries: JSON of this type."""

    kind: Any
    text: str
    required: bool = True
    example: object = None


class DescribedResponse(msgspec.Struct, frozen=True):
    """One way an operation may answer. Several of one status are alternatives."""

    status: int
    text: str
    kind: Any = None
    """The body's type; None without a body."""
    content: str = JSON
    lines: bool = False
    """The body is a line of ``kind`` for each thing there is to report; empty lines mean nothing."""
    links: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    """Operations that go on from here, and where in this answer their parameters are."""


class Described(msgspec.Struct, frozen=True):
    """One operation."""

    method: str
    path: str
    summary: str
    answers: tuple[DescribedResponse, ...]
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    alias: bool = False
    """The same operation is at another path, which has the name."""

    @property
    def id(self) -> str:
        """The operationId."""
        return operation_id(self.method, self.path)

    @property
    def tag(self) -> str:
        """What the operation is about."""
        parts = self.path.split("/")
        return parts[2] if parts[1] == "v1" else parts[1]

    @property
    def is_cilium(self) -> bool:
        """Whether Cilium has the operation."""
        return self.path.startswith("/v1/")

    def all_answers(self) -> list[DescribedResponse]:
        """Its own, and those that it shares with others like it."""
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
        if self.is_cilium and self.tag in BEHIND:
            found.append(error(503, "The agent stopped before it had started."))
        return sorted(found, key=lambda answer: answer.status)


def operation_id(method: str, path: str) -> str:
    """``PutEndpointID`` for PUT /v1/endpoint/{id}, as Cilium names its own; ours are named likewise."""
    if name := operation_name(method, path):
        return name
    return method.capitalize() + "".join(word.capitalize() for word in re.findall(r"[a-z]+", path))


def ok(text: str, kind: Any = None, *, status: int = 200, **more: Any) -> DescribedResponse:
    """It was done, or here it is."""
    return DescribedResponse(status, text, kind, **more)


def error(status: int, text: str) -> DescribedResponse:
    """An error with a text of details."""
    return DescribedResponse(status, text, Error)


def bare(status: int, text: str) -> DescribedResponse:
    """An error without a body."""
    return DescribedResponse(status, text)


def problem(status: int, text: str) -> DescribedResponse:
    """The framework's refusal of a request it cannot read."""
    return DescribedResponse(status, text, Problem)


def path(name: str, text: str, *, kind: Any = str, example: object = None) -> Parameter:
    """A part of the path."""
    return Parameter(name, "path", kind, text, required=True, example=example)


def query(
    name: str, text: str, *, kind: Any = str, required: bool = False, example: object = None
) -> Parameter:
    """A part of the query."""
    return Parameter(name, "query", kind, text, required=required, example=example)


def header(name: str, text: str, *, kind: Any = bool) -> Parameter:
    """A header."""
    return Parameter(name, "header", kind, text)
