"""What an API server answers when it refuses: Status objects.

Source: Kubernetes 1.36, k8s.io/apimachinery/pkg/api/errors and util/validation/field.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

Obj = dict[str, Any]
"""An object as JSON. Objects in the store are never changed in place."""

REASONS = {
    "required": ("FieldValueRequired", "Required value"),
    "invalid": ("FieldValueInvalid", "Invalid value"),
    "notsupported": ("FieldValueNotSupported", "Unsupported value"),
    "duplicate": ("FieldValueDuplicate", "Duplicate value"),
    "forbidden": ("FieldValueForbidden", "Forbidden"),
    "toolong": ("FieldValueTooLong", "Too long"),
    "toomany": ("FieldValueTooMany", "Too many"),
    "typeinvalid": ("FieldValueTypeInvalid", "Invalid value"),
    "notfound": ("FieldValueNotFound", "Not found"),
}


class FieldError(NamedTuple):
    """One thing wrong with one field."""

    kind: str
    field: str
    detail: str = ""
    value: object = ""

    @property
    def text(self) -> str:
        """The text with the field."""
        return f"{self.field}: {self.cause['message']}"

    @property
    def cause(self) -> Obj:
        """As it stands among the causes of a Status."""
        reason, word = REASONS[self.kind]
        shown = (
            [] if self.kind in {"required", "forbidden", "toolong", "toomany"} else [json.dumps(self.value)]
        )
        message = ": ".join([word, *shown, *([self.detail] if self.detail else [])])
        return {"reason": reason, "message": message, "field": self.field}


def invalid(field: str, value: object, detail: str) -> FieldError:
    """A value that cannot be."""
    return FieldError("invalid", field, detail, value)


def required(field: str, detail: str = "") -> FieldError:
    """A value that is missing."""
    return FieldError("required", field, detail)


def forbidden(field: str, detail: str) -> FieldError:
    """A field that may not be set."""
    return FieldError("forbidden", field, detail)


def unsupported(field: str, value: object, known: Sequence[str]) -> FieldError:
    """A value that is none of those known."""
    return FieldError("notsupported", field, "supported values: " + ", ".join(known), value)


def duplicate(field: str, value: object) -> FieldError:
    """A value that is there twice."""
    return FieldError("duplicate", field, "", value)


class StatusError(Exception):
    """A request is refused; the server answers with :attr:`body`."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Obj | None = None,
        *,
        headers: dict[str, str] | None = None,
        continues: str = "",
        text: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.headers = headers or {}
        self.text = text
        """What is answered instead of a Status, as text/plain."""
        self.body: Obj = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {"continue": continues} if continues else {},
            "status": "Failure",
            "message": message,
        }
        if reason:
            self.body["reason"] = reason
        if details is not None:
            self.body["details"] = details
        self.body["code"] = code


class Resource(NamedTuple):
    """The group and the plural of what a request is about."""

    group: str
    name: str

    @property
    def qualified(self) -> str:
        """``pods``, ``ciliumnodes.cilium.io``."""
        return f"{self.name}.{self.group}" if self.group else self.name

    def details(self, name: str = "") -> Obj:
        """The details of a Status."""
        found = {"name": name, "group": self.group, "kind": self.name}
        return {key: value for key, value in found.items() if value}


def bad_request(message: str) -> StatusError:
    """400."""
    return StatusError(400, "BadRequest", message)


def internal(message: str) -> StatusError:
    """500 as Go's bare errors become it."""
    return StatusError(500, "", message)


def not_found(resource: Resource, name: str) -> StatusError:
    """404 of an object."""
    message = f'{resource.qualified} "{name}" not found'
    return StatusError(404, "NotFound", message, resource.details(name))


def no_resource() -> StatusError:
    """404 of a resource in a group that is there."""
    return StatusError(404, "NotFound", "the server could not find the requested resource", {})


def no_page() -> StatusError:
    """404 of a path that is not served."""
    return StatusError(
        404, "NotFound", "404", text=b"404 page not found\n", headers={"X-Content-Type-Options": "nosniff"}
    )


def not_allowed() -> StatusError:
    """405."""
    message = "the server does not allow this method on the requested resource"
    return StatusError(405, "MethodNotAllowed", message, {})


def already_exists(resource: Resource, name: str, prefix: str = "") -> StatusError:
    """409 of a create."""
    message = f'{prefix}{resource.qualified} "{name}" already exists'
    return StatusError(409, "AlreadyExists", message, resource.details(name))


def conflict(resource: Resource, name: str, why: str = "") -> StatusError:
    """409 of a write that was overtaken."""
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return StatusError(409, "Conflict", message, resource.details(name))


def refused(resource: Resource, name: str, why: str, details: Obj | None = None) -> StatusError:
    """403 by an admission plugin."""
    who = f'{resource.qualified} "{name}"' if name else resource.qualified
    return StatusError(403, "Forbidden", f"{who} is forbidden: {why}", details or resource.details(name))


def unprocessable(group: str, kind: str, name: str, errors: Sequence[FieldError]) -> StatusError:
    """422 with its causes."""
    texts = list(dict.fromkeys(error.text for error in errors))
    inside = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    qualified = Resource(group, kind).qualified
    details = {**Resource(group, kind).details(name), "causes": [error.cause for error in errors]}
    return StatusError(422, "Invalid", f'{qualified} "{name}" is invalid: {inside}', details)


def expired(message: str, continues: str = "") -> StatusError:
    """410."""
    return StatusError(410, "Expired", message, continues=continues)


def future_version(asked: int, current: int) -> StatusError:
    """504 of a version that is yet to come."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return StatusError(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {asked}, current: {current}",
        {"causes": causes, "retryAfterSeconds": 1},
        headers={"Retry-After": "1"},
    )
