"""Operations that the administrator has switched off.

Needs: nothing.   Gives: AccessSettings, operation_name(), denied().
Source: Cilium 1.17, enable-cilium-api-server-access; the names are those of its generated server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from lifecycle import Settings, UsageError

ALL: Final = "*"
DISABLED: Final = "This API is administratively disabled. Contact your administrator for more details."
_BASE: Final = "/v1/"
_INITIALISMS: Final = {"id": "ID", "ip": "IP", "ipam": "IPAM"}


class AccessSettings(Settings, frozen=True):
    """Settings of the API's access."""

    enable_cilium_api_server_access: list[str] = msgspec.field(default_factory=lambda: [ALL])
    """Operations that are enabled, such as GetHealthz or PutEndpointID; a name may end in ``*``."""


def operation_name(method: str, path: str) -> str:
    """``PutEndpointID`` for PUT /v1/endpoint/{id}; empty for what is not Cilium's."""
    if not path.startswith(_BASE):
        return ""
    words = re.findall(r"[a-z]+", path.removeprefix(_BASE))
    return method.capitalize() + "".join(_INITIALISMS.get(word, word.capitalize()) for word in words)


def denied(settings: AccessSettings, names: Iterable[str]) -> frozenset[str]:
    """Those of the operations that are off. Raises UsageError for a setting that names none."""
    known = frozenset(filter(None, names))
    allowed: set[str] = set()
    for wanted in settings.enable_cilium_api_server_access:
        start = wanted.removesuffix(ALL)
        found = {name for name in known if name == wanted or (start != wanted and name.startswith(start))}
        if not found:
            raise UsageError(
                f"enable-cilium-api-server-access={wanted}: no such operation; expected * or names such as"
                f" {', '.join(sorted(known)[:3])}"
            )
        allowed |= found
    return known - allowed
