"""The older form of saved state: JSON in a comment of the C header an endpoint's programs were compiled with.

For:   StateFiles, where there is no JSON file.   Needs: nothing.   Gives: json_in_header.
Source: Cilium before 1.16, ep_config.h: a line `` * CILIUM_BASE64_<base64 version>:<base64 JSON>``.
"""

import binascii
from typing import Final

from cells.endpoint.state.saved import UnreadableError

_MARK: Final = b"CILIUM_BASE64_"


def json_in_header(header: bytes) -> bytes:
    """The JSON, to be decoded as that of the other form; raises UnreadableError."""
    line = next((line for line in header.splitlines() if _MARK in line), None)
    if line is None:
        raise UnreadableError(f"no line with {_MARK.decode()}")
    parts = line.split(b":")
    if len(parts) != 2:
        raise UnreadableError(
            f"the line with {_MARK.decode()} should have a single ':', it has {len(parts) - 1}"
        )
    try:
        return binascii.a2b_base64(parts[1].strip(), strict_mode=True)
    except binascii.Error as error:
        raise UnreadableError(f"the line with {_MARK.decode()} is not base64: {error}") from error
