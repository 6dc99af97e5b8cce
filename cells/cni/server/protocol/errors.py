"""The error a CNI plugin prints, and the codes it may carry.

Needs: nothing.   Gives: CniError, Wish, error_json.
Source: CNI spec 1.1, section 5 "Error"; 100 is Cilium 1.17's, 999 what the CNI
library makes of an error without a code.
"""

from __future__ import annotations

import os
from enum import IntEnum
from types import TracebackType
from typing import Final

import msgspec

INCOMPATIBLE_VERSION: Final = 1
UNHEALTHY: Final = 1
"""Of a CHECK; Cilium sends the number of another error here, and readers only look whether it is zero."""
INVALID_ENVIRONMENT: Final = 4
DECODING_FAILURE: Final = 6
INVALID_CONFIG: Final = 7
TRY_AGAIN: Final = 11
NOT_AVAILABLE: Final = 50
HEALTH_UNKNOWN: Final = 100
INTERNAL: Final = 999
FALLBACK_VERSION: Final = "1.0.0"
"""For errors before the caller's version is known."""


class Wish(IntEnum):
    """What the plugin is to do before it calls again; the numbers are those of the protocol on cni.sock."""

    NONE = 0
    IPV6 = 1
    """Switch IPv6 on in the pod's namespace."""
    ADDRESSES = 2
    """Ask the delegated IPAM plugin for the pod's addresses."""


class CniError(Exception):
    """What the plugin tells the runtime instead of a result; raised wherever a call cannot go on.

    With a ``wish`` the plugin tells it only if it cannot fulfil that.
    """

    def __init__(
        self, message: str, *, code: int = INTERNAL, details: str = "", wish: Wish = Wish.NONE
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.details = details
        self.wish = wish


class Explained:
    """A context in which errors of this kind reach the runtime as a sentence: ``what``, and what they say."""

    __slots__ = ("_kind", "_what")

    def __init__(self, kind: type[Exception], what: str) -> None:
        self._kind = kind
        self._what = what

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._kind):
            raise CniError(f"{self._what}: {error}") from error


def error_json(error: CniError, version: str) -> bytes:
    """The error object, in protocol ``version``."""
    told: dict[str, object] = {"cniVersion": version, "code": error.code, "msg": error.message}
    if error.details:
        told["details"] = error.details
    return msgspec.json.encode(told) + b"\n"


def kernel_reason(error: OSError) -> str:
    """``file exists``: the kernel's word, spelt as the Go plugin spells it."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
