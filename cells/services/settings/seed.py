"""The seeds of a cluster's Maglev tables and hashes.

Gives: Seed.
"""

from __future__ import annotations

import base64
import binascii
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
        except binascii.Error as error:
            raise ValueError(f"{text!r} is not base64: {error}") from None
        if len(raw) != 12:
            raise ValueError(f"{text!r} decodes to {len(raw)} bytes: expected 12")
        return cls(*struct.unpack(">III", raw))
