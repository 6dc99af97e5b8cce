"""Errors of requests to an API server."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from cells.kubernetes.objects.kind import decode

__all__ = [
    "ApiError",
    "ConflictError",
    "CredentialsError",
    "DroppedError",
    "ExpiredError",
    "KubernetesError",
    "MalformedError",
    "NotFoundError",
    "ServerStatus",
    "UnreachableError",
    "status_error",
]


class KubernetesError(Exception):
    """A request failed; the base of all errors of this client."""


class UnreachableError(KubernetesError):
    """No server answered: connection refused, timeout, connection lost, or a TLS failure."""


class DroppedError(UnreachableError):
    """The connection ended before any byte of the answer arrived."""


class CredentialsError(KubernetesError):
    """No credentials: a file cannot be read, or a plugin failed."""


class MalformedError(KubernetesError):
    """The response is not valid for the Kubernetes API."""


class Cause(msgspec.Struct, frozen=True, gc=False):
    """One cause of a Status."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Details of a Status."""

    name: str = ""
    kind: str = ""
    causes: tuple[Cause, ...] | None = None
    retry_after_seconds: int = 0


class StatusMeta(msgspec.Struct, frozen=True, gc=False, rename={"continue_": "continue"}):
    """Metadata of a Status: the token to continue an expired list."""

    continue_: str = ""


class ServerStatus(msgspec.Struct, frozen=True, gc=False):
    """A server's description of a failure (metav1.Status)."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: StatusDetails | None = None
    metadata: StatusMeta = StatusMeta()


class ApiError(KubernetesError):
    """The server refused a request: HTTP status, reason and message of its Status."""

    def __init__(self, status: ServerStatus, retry_after: float | None = None) -> None:
        super().__init__(f"{status.code} {status.reason or 'Error'}: {status.message}")
        self.status = status
        self.code = status.code
        self.reason = status.reason
        self.retry_after = retry_after
        """Seconds to wait before the next attempt, if the server sets them."""

    @property
    def resource_version_too_large(self) -> bool:
        """Whether the requested resourceVersion is newer than the server's store."""
        causes = (self.status.details and self.status.details.causes) or ()
        return any(cause.reason == "ResourceVersionTooLarge" for cause in causes)


class NotFoundError(ApiError):
    """404: the object does not exist, or the resource is not served."""


class ConflictError(ApiError):
    """409: the object was changed in between, another manager owns the field, or the name exists."""

    @property
    def exists(self) -> bool:
        """Whether an object of this name already exists."""
        return self.reason == "AlreadyExists"


class ExpiredError(ApiError):
    """410: the resourceVersion is too old, so the client must list again."""


_KINDS: dict[int, type[ApiError]] = {404: NotFoundError, 409: ConflictError, 410: ExpiredError}
_DECODER = msgspec.json.Decoder(ServerStatus)


def api_error(code: int, body: bytes, retry_after: str = "", location: str = "") -> ApiError:
    """Return the error of an HTTP answer; a body that is not a Status becomes its message.

    Redirects are errors.
    """
    if code < 400:
        to = location or "another address"
        return status_error(ServerStatus(code, "Redirect", f"to {to}; set the URL of an API server"))
    try:
        status = decode(body, _DECODER)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:200].decode("utf-8", "replace").strip()
        status = ServerStatus(code=code, message=text or "no reason given")
    if not status.code:
        status = msgspec.structs.replace(status, code=code)
    return status_error(status, seconds(retry_after))


def status_error(status: ServerStatus, retry_after: float | None = None) -> ApiError:
    """Return the error of a Status, such as the last event of a watch."""
    return _KINDS.get(status.code, ApiError)(status, retry_after)


def seconds(text: Any) -> float | None:
    """Parse a Retry-After header; None without one, or if it is a date."""
    try:
        found = float(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, found) if math.isfinite(found) else None
