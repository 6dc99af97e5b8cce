"""What may be the name of a label, in Kubernetes' words where it may not.

Gives: wrong_name().
Source: k8s.io/apimachinery/pkg/util/validation, IsQualifiedName.
"""

from __future__ import annotations

import re
from typing import Final

_NAME_FORM: Final = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_NAME: Final = re.compile(_NAME_FORM)
_SUBDOMAIN_FORM: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_SUBDOMAIN: Final = re.compile(_SUBDOMAIN_FORM)
_CONSISTS: Final = (
    "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric"
    f" character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{_NAME_FORM}')"
)
_SUBDOMAIN_CONSISTS: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must"
    " start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is"
    f" '{_SUBDOMAIN_FORM}')"
)


def wrong_name(text: str) -> str | None:
    """Why this is no name of a label; None for one that is."""
    prefix, slash, name = text.rpartition("/")
    if "/" in prefix:
        return (
            f"a qualified name {_CONSISTS} with an optional DNS subdomain prefix and '/'"
            " (e.g. 'example.com/MyName')"
        )
    if slash and (wrong := _wrong_prefix(prefix)):
        return f"prefix part {wrong}"
    if not name:
        return "name part must be non-empty"
    if len(name) > 63:
        return "name part must be no more than 63 bytes"
    return None if _NAME.fullmatch(name) else f"name part {_CONSISTS}"


def _wrong_prefix(prefix: str) -> str | None:
    if not prefix:
        return "must be non-empty"
    if len(prefix) > 253:
        return "must be no more than 253 bytes"
    return None if _SUBDOMAIN.fullmatch(prefix) else _SUBDOMAIN_CONSISTS
