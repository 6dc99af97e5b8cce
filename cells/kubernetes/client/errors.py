"""What a request to an API server can come back with."""

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
    """No server answered: refused, timed out, broken off, or not TLS as expected."""


class DroppedError(UnreachableError):
    """The connection ended before anything of an answer came."""


class CredentialsError(KubernetesError):
    """The credentials cannot be had: a file that cannot be read, a plugin that failed."""


class MalformedError(KubernetesError):
    """A server's response is not one of an API server."""


class Cause(msgspec.Struct, frozen=True, gc=False):
    """One reason of a refusal."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Of a Status."""

    name: str = ""
    kind: str = ""
    causes: tuple[Cause, ...] | None = None
    retry_after_seconds: int = 0


class StatusMeta(msgspec.Struct, frozen=True, gc=False, rename={"continue_": "continue"}):
    """Of a Status: where an expired list may go on."""

    continue_: str = ""


class ServerStatus(msgspec.Struct, frozen=True, gc=False):
    """A server's description of a failure (metav1.Status)."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: StatusDetails | None = None
    metadata: StatusMeta = StatusMeta()


class ApiError(KubernetesError):
    """A server refused: the HTTP status, the reason and the text of its Status."""

    def __init__(self, status: ServerStatus, retry_after: float | None = None) -> None:
        super().__init__(f"{status.code} {status.reason or 'Error'}: {status.message}")
        self.status = status
        self.code = status.code
        self.reason = status.reason
        self.retry_after = retry_after
        """Seconds to wait before the next try, when the server has set them."""

    @property
    def from_the_future(self) -> bool:
        """Whether the version asked for is one that the server's store has not had yet."""
        causes = (self.status.details and self.status.details.causes) or ()
        return any(cause.reason == "ResourceVersionTooLarge" for cause in causes)


class NotFoundError(ApiError):
    """404: no such object, or the resource is not served."""


class ConflictError(ApiError):
    """409: another writer was faster, or owns the field, or the name is taken."""

    @property
    def exists(self) -> bool:
        """Whether an object of this name is there already."""
        return self.reason == "AlreadyExists"


class ExpiredError(ApiError):
    """410: the version is too old; list again."""


_KINDS: dict[int, type[ApiError]] = {404: NotFoundError, 409: ConflictError, 410: ExpiredError}
_DECODER = msgspec.json.Decoder(ServerStatus)


def api_error(code: int, body: bytes, retry_after: str = "", location: str = "") -> ApiError:
    """The error of an answer. A body that is not a Status is quoted as text. Redirects are not followed."""
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
    """The error of a Status, such as a watch ends with."""
    return _KINDS.get(status.code, ApiError)(status, retry_after)


def seconds(text: Any) -> float | None:
    """Of a Retry-After header; None without one, and for dates, which are not understood."""
    try:
        found = float(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, found) if math.isfinite(found) else None
