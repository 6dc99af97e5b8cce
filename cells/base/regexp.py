r"""Regular expressions of policies and filters, in RE2's syntax as in Cilium and Envoy.

Why:    Python's ``re`` has constructs that RE2 lacks (lookaround, possessive quantifiers), lacks others
        (``\pL``, ``\z``, ``\Q..\E``), and differs in the meaning of ``$``.
Source: github.com/google/re2/wiki/Syntax; Go 1.23, regexp/syntax, for the error messages.

RE2 is imported with the first expression: most agents have none.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Protocol

__all__ = ["Regexp", "RegexpError", "compile_regexp"]


class RegexpError(ValueError):
    """Raised for an expression that RE2 rejects; the message is Go's."""


class Regexp(Protocol):
    """A compiled expression; matching takes linear time."""

    def search(self, text: str) -> object | None:
        """Return a match anywhere in the text, or None."""
        ...

    def fullmatch(self, text: str) -> object | None:
        """Return a match of the whole text, or None."""
        ...


_IN_GO: Final = {
    "missing )": "missing closing )",
    "missing ]": "missing closing ]",
    "bad repetition operator": "invalid nested repetition operator",
    "no argument for repetition operator": "missing argument to repetition operator",
    "invalid perl operator": "invalid or unsupported Perl syntax",
    "invalid repetition size": "invalid repeat count",
    "invalid named capture group": "invalid named capture",
    "pattern too large - compile failed": "expression too large",
}
"""RE2's errors that have another wording in Go."""
_ESCAPED: Final = re.compile(r"\\Q.*?(?:\\E|\Z)|\\.", re.DOTALL)
"""An escape sequence, or quoted text."""


@lru_cache(maxsize=256)
def compile_regexp(text: str) -> Regexp:
    """Compile an expression; cached. Raises RegexpError."""
    import re2

    if r"\C" in _ESCAPED.findall(text):  # a single byte, possibly a part of a character: Go rejects it
        raise RegexpError(r"error parsing regexp: invalid escape sequence: `\C`")
    options = re2.Options()
    options.log_errors = False
    try:
        compiled: Regexp = re2.compile(text, options)
    except re2.error as error:
        raise RegexpError(f"error parsing regexp: {_reason(error, text)}") from None
    return compiled


def _reason(error: Exception, text: str) -> str:
    reason = error.args[0] if error.args else ""
    what, _, where = (reason.decode() if isinstance(reason, bytes) else str(reason)).partition(": ")
    if where in ("(?<=", "(?<!"):  # Go parses it as the start of a named group
        rest = text[text.index(where) :]
        return f"invalid named capture: `{rest[: rest.find('>') + 1] or rest}`"
    if what.startswith("trailing \\"):
        return "trailing backslash at end of expression: ``"
    return f"{_IN_GO.get(what, what)}: `{where or text}`"
