"""The packets on cni.sock.

Needs: nothing.   Gives: decode_request, encode_reply, the protocol's version.
Source: cmd/cilium-cni/agent.h, which is the other side. Little endian:

request: ``HCNI`` | u16 version | u16 flags | u32 env_len | u32 stdin_len | env | stdin | addresses
reply:   ``HCNI`` | u16 version | u16 wish | u32 exit_code | u32 stdout_len | stdout

``env`` is every CNI_* variable as ``NAME=value\\0``. With a pod namespace the request carries two
descriptors (SCM_RIGHTS): the namespace, and an rtnetlink socket opened inside it. The plugin fulfils a wish
(see Wish), if it can, and sends the request again. Flag 1 says that an agent died over this very request:
what it left of the attachment is to be replaced. Flag 2: the rest of the packet is the result of the plugin
that gives the addresses.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from cells.cni.server.protocol.errors import CniError, Wish

VERSION: Final = 1
ACCEPTED: Final = (VERSION,)
"""The present version and the one before, once there is one: the plugin outlives an agent's upgrade."""

MAX_PACKET: Final = 256 << 10
REPEATED: Final = 1
ADDRESSED: Final = 2
_MAGIC: Final = b"HCNI"
_HEADER: Final = struct.Struct("<4sHHII")


class Packet(msgspec.Struct, frozen=True):
    """A request as it came: the plugin's environment and stdin."""

    environment: dict[str, str]
    stdin: bytes
    repeated: bool = False
    """An agent died over this very request."""
    addresses: bytes = b""
    """The result of the delegated IPAM plugin; empty while it has not been called."""


def decode_request(packet: bytes | memoryview) -> Packet:
    """The request in ``packet``; raises CniError when it is none, or of a version not spoken here.

    Bytes of the environment that are no UTF-8 are read as U+FFFD: results and state are JSON.
    """
    if len(packet) < _HEADER.size:
        raise CniError("malformed request on cni.sock: it is shorter than its header")
    magic, version, flags, env_length, stdin_length = _HEADER.unpack_from(packet)
    if magic != _MAGIC:
        raise CniError("malformed request on cni.sock: it does not start with HCNI")
    if version not in ACCEPTED:
        spoken = " and ".join(map(str, ACCEPTED))
        raise CniError(
            f"the plugin speaks version {version} of the cni.sock protocol, this agent {spoken}:"
            " install the plugin that came with the agent"
        )
    end = _HEADER.size + env_length + stdin_length
    if end > len(packet) or (end < len(packet) and not flags & ADDRESSED):
        raise CniError("malformed request on cni.sock: its lengths do not add up")
    start = _HEADER.size
    text = bytes(packet[start : start + env_length]).decode(errors="replace")
    variables = (entry.partition("=") for entry in text.split("\0") if entry)
    return Packet(
        {name: value for name, _, value in variables},
        bytes(packet[start + env_length : end]),
        repeated=bool(flags & REPEATED),
        addresses=bytes(packet[end:]),
    )


def encode_reply(exit_code: int, stdout: bytes, wish: Wish = Wish.NONE) -> bytes:
    """A reply that makes the plugin print ``stdout`` and exit, if it does not fulfil the wish."""
    return _HEADER.pack(_MAGIC, VERSION, wish, exit_code, len(stdout)) + stdout
