"""Reads how many instructions the verifier processed for a program."""

from __future__ import annotations

import struct

from cells.maps.bpf import buffer, object_info

_PROCESSED = 216  # verified_insns in struct bpf_prog_info


def processed(descriptor: int) -> int:
    """Return the number of instructions that the verifier processed for a program."""
    info = buffer(bytes(_PROCESSED + 4))
    object_info(descriptor, info, "program")
    (count,) = struct.unpack_from("<I", info.raw, _PROCESSED)
    return int(count)
