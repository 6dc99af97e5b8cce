"""MAC addresses in settings."""

import re
from typing import Self

__all__ = ["MAC"]

_TEXT = r"[0-9a-f]{2}(?P<mark>[:-])(?:[0-9a-f]{2}(?P=mark)){4}[0-9a-f]{2}|(?:[0-9a-f]{4}\.){2}[0-9a-f]{4}"


class MAC(bytes):
    """A 48-bit MAC address: its six bytes, printed as lower-case pairs with colons."""

    __slots__ = ()

    def __new__(cls, six: bytes) -> Self:
        """Return the address of six bytes. Raises ValueError for another number of bytes."""
        if len(six) != 6:
            raise ValueError(f"expected 6 bytes, not {len(six)}")
        return super().__new__(cls, six)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``02:00:00:00:00:01``, ``02-00-00-00-00-01`` or ``0200.0000.0001``.

        Raises ValueError otherwise.
        """
        if re.fullmatch(_TEXT, text, re.ASCII | re.IGNORECASE) is None:
            raise ValueError("expected a MAC address such as 02:00:00:00:00:01")
        return cls(bytes.fromhex(re.sub("[:.-]", "", text)))

    def __str__(self) -> str:
        return self.hex(":")

    __repr__ = __str__
