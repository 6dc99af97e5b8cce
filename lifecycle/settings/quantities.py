"""Quantities in settings: ``512Mi``, ``1k``, ``2e6``."""

import re
from typing import Self

__all__ = ["Quantity"]

_BINARY = {suffix: 1024**power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_DECIMAL = {suffix: 1000**power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)}
_PARTS = {"n": 10**9, "u": 10**6, "m": 10**3}
"""Suffixes that divide: thousandths (``m``) and smaller, as in Kubernetes' shares of a CPU."""

_TEXT = (
    r"(?P<sign>[+-]?)(?:(?P<whole>\d{1,30})(?:\.(?P<part>\d{0,30}))?|\.(?P<only>\d{1,30}))"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?\d{1,2}))?"
)
_HIGHEST = 2**63 - 1
"""The maximum of Kubernetes' quantities."""


class Quantity(int):
    """An integer, for example of bytes, printed in Kubernetes' syntax: ``512Mi``."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse Kubernetes' syntax: ``1.5Gi``, ``2k``, ``3e6``, ``5000m``.

        Raises ValueError for other texts and for amounts that are not integers (``1m``) or exceed 64 bits.
        """
        if (match := re.fullmatch(_TEXT, text, re.ASCII)) is None:
            raise ValueError("expected a quantity such as 512Mi, 1.5G or 1000")
        part = match["only"] or match["part"] or ""
        amount, divisor = int((match["whole"] or "") + part), 10 ** len(part)
        suffix, exponent = match["suffix"] or "", int(match["exponent"] or 0)
        amount *= _BINARY.get(suffix) or _DECIMAL.get(suffix) or 10 ** max(exponent, 0)
        divisor *= _PARTS.get(suffix) or 10 ** max(-exponent, 0)
        amount, rest = divmod(amount, divisor)
        if rest:
            raise ValueError("expected a whole quantity such as 512Mi, 1.5G or 1000")
        if amount > _HIGHEST:
            raise ValueError("expected a quantity below 8Ei")
        return cls(-amount if match["sign"] == "-" else amount)

    def __str__(self) -> str:
        """Return the shortest text; if two are equally short, the decimal one."""
        amount = int(self)
        texts = [int.__repr__(self)]
        for suffix, unit in (*_DECIMAL.items(), *_BINARY.items()):
            whole, rest = divmod(amount, unit)
            if amount and not rest:
                texts.append(f"{whole}{suffix}")
        return min(texts, key=len)

    __repr__ = __str__
