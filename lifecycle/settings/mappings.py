"""Maps in settings: ``key=value,key1=value1``, or a JSON object."""

import re
from collections.abc import Mapping

import msgspec

__all__ = ["join", "split"]

_KEY = r"[\w\-:;./@]+="
_DIVIDER = rf",(?=\s*{_KEY})"


def split(text: str) -> dict[str, object]:
    """Return the pairs in a text; values are texts or JSON values. Raises ValueError for other texts."""
    text = text.strip()
    if text.startswith(("{", "[")):
        try:
            return msgspec.json.decode(text, type=dict[str, object])
        except (msgspec.MsgspecError, RecursionError):
            raise ValueError("no JSON object") from None
    if not text:
        return {}
    pairs: dict[str, object] = {}
    for pair in re.split(_DIVIDER, text, flags=re.ASCII):
        if re.match(_KEY, stripped := pair.strip(), re.ASCII) is None:
            raise ValueError("no key=value")
        key, _, value = stripped.partition("=")
        pairs[key] = value
    return pairs


def join(pairs: Mapping[str, str]) -> str:
    """Return the text for split(): plain if possible, otherwise JSON."""
    plain = ",".join(f"{key}={value}" for key, value in pairs.items())
    try:
        if split(plain) == pairs:
            return plain
    except ValueError:
        pass
    return msgspec.json.encode(pairs).decode()
