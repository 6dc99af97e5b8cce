"""Settings that must not be shown: passwords, tokens, keys."""

from typing import NoReturn

__all__ = ["HIDDEN", "Secret"]

HIDDEN = "(hidden)"
"""The replacement of secrets in output."""


class Secret:
    """A text that prints as ``(hidden)`` in logs, errors and graphs, and cannot become JSON or a pickle.

    Only reveal() returns it. A setting ``token`` may also be read from a file: ``--token-file=PATH``.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself: pass it only to code that needs it."""
        return self._text

    def __str__(self) -> str:
        return HIDDEN

    __repr__ = __str__

    def __bool__(self) -> bool:
        """Whether the text is not empty."""
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        import hmac  # compares in constant time; imported here because secrets are rarely compared

        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled: it would be readable")
