"""The seeds of a cluster's Maglev tables and hashes.

Gives: Seed.
"""

from __future__ import annotations

import base64
import struct
from typing import NamedTuple

DEFAULT_SEED = "JLfvgnHc2kaSUFaI"


class Seed(NamedTuple):
    """The seeds of a cluster: of names, and of packets of each family."""

    names: int
    ipv4: int
    ipv6: int

    @classmethod
    def parse(cls, text: str) -> Seed:
        """From base64 of exactly 12 bytes (``bpf-lb-maglev-hash-seed``). Raises ValueError."""
        try:
            raw = base64.b64decode(text, validate=True)
        except ValueError:  # of characters that are none of ASCII, too
            raise ValueError("expected base64 of 12 bytes, as of: head -c12 /dev/urandom | base64") from None
        if len(raw) != 12:
            raise ValueError(f"expected base64 of 12 bytes, this is of {len(raw)}")
        return cls(*struct.unpack(">III", raw))
