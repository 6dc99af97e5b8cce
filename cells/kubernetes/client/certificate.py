"""When a certificate expires.

Needs: nothing.   Gives: not_after.
Source: RFC 5280, section 4.1 (Certificate, Validity); X.690 (DER).
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final

_BLOCK: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
"""The tag of what may come before the serial number."""
_UTC_TIME: Final = 0x17


def not_after(pem: bytes) -> datetime | None:
    """The end of the first certificate's validity; None where there is none to be read."""
    found = _BLOCK.search(pem)
    if found is None:
        return None
    try:
        der = ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))
        _, whole, _ = _element(der)
        _, rest, _ = _element(whole)
        tag, _, after = _element(rest)
        rest = after if tag == _VERSION else rest
        for _ in range(3):  # serial number, algorithm, issuer
            _, _, rest = _element(rest)
        _, validity, _ = _element(rest)
        _, _, rest = _element(validity)
        tag, text, _ = _element(rest)
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC)
    except (ValueError, IndexError):
        return None


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """The tag and the content of the first element, and what comes after it."""
    length, begin = der[1], 2
    if length >= 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin], "big")
    return der[0], der[begin : begin + length], der[begin + length :]
