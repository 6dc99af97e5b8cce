"""Netlink framing (netlink(7), rtnetlink(7)): encode requests and attributes, decode messages and errors."""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

NLM_F_REQUEST = 0x001
NLM_F_ACK = 0x004
NLM_F_DUMP_INTR = 0x010
NLM_F_DUMP = 0x300
NLM_F_REPLACE = 0x100
NLM_F_EXCL = 0x200
NLM_F_CREATE = 0x400
NLM_F_CAPPED = 0x100
NLM_F_ACK_TLVS = 0x200

NLMSG_ERROR = 2
NLMSG_DONE = 3
NLMSGERR_ATTR_MSG = 1

NLA_TYPE_MASK = 0x3FFF

HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")
_U32 = struct.Struct("=I")
_I32 = struct.Struct("=i")
_ERROR = struct.Struct("=iIHHII")  # nlmsgerr: negative errno, then the header of the request
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


class Request(NamedTuple):
    """One message to the kernel.

    ``what`` describes it in error messages; errnos in ``tolerate`` count as success.
    """

    what: str
    type: int
    flags: int
    body: bytes
    tolerate: tuple[int, ...] = ()


class Message(msgspec.Struct, frozen=True):
    """One message from the kernel, without its header."""

    type: int
    flags: int
    sequence: int
    body: bytes


def encode(requests: Sequence[Request], sequence: int, *, acknowledge: bool = False) -> bytes:
    """Encode the requests as one datagram, numbered from ``sequence``; ``acknowledge`` sets NLM_F_ACK on the
    last.

    Bodies must be multiples of 4 bytes.
    """
    if len(requests) == 1:
        ((_, kind, flags, body, _),) = requests
        flags |= NLM_F_REQUEST | NLM_F_ACK if acknowledge else NLM_F_REQUEST
        return HEADER.pack(16 + len(body), kind, flags, sequence, 0) + body
    parts: list[bytes] = []
    last = len(requests) - 1 if acknowledge else -1
    for position, (_, kind, flags, body, _) in enumerate(requests):
        asked = flags | (NLM_F_REQUEST | NLM_F_ACK if position == last else NLM_F_REQUEST)
        parts += HEADER.pack(16 + len(body), kind, asked, sequence + position, 0), body
    return b"".join(parts)


def attribute(kind: int, data: bytes) -> bytes:
    """Encode one attribute: length, type, data, padding to 4 bytes."""
    size = len(data)
    return _ATTRIBUTE.pack(4 + size, kind) + data + _PADDING[size & 3]


def text(kind: int, value: str) -> bytes:
    """Encode a zero-terminated string attribute."""
    return attribute(kind, value.encode() + b"\0")


def u32(kind: int, value: int) -> bytes:
    """Encode a 32-bit attribute in host byte order."""
    return _ATTRIBUTE.pack(8, kind) + _U32.pack(value)


def messages(datagram: bytes) -> Iterator[Message]:
    """Yield the messages of one received datagram. Raises ValueError for malformed lengths."""
    offset, end = 0, len(datagram)
    while offset + 16 <= end:
        length, kind, flags, sequence, _ = HEADER.unpack_from(datagram, offset)
        if length < 16 or offset + length > end:
            raise ValueError(f"netlink message of {length} bytes at {offset} in a datagram of {end}")
        yield Message(kind, flags, sequence, datagram[offset + 16 : offset + length])
        offset += (length + 3) & ~3


def attributes(body: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield the (type, data) pairs from ``offset`` on; nested and byte-order flags are removed from the type.

    Raises ValueError for malformed lengths.
    """
    end = len(body)
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < 4 or offset + length > end:
            raise ValueError(f"netlink attribute of {length} bytes at {offset} in a message of {end}")
        yield kind & NLA_TYPE_MASK, body[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def select_attributes(body: bytes, offset: int, kinds: frozenset[int]) -> dict[int, bytes]:
    """Return the data of the attributes of these types; like :func:`attributes`, but copies no others."""
    found: dict[int, bytes] = {}
    end = len(body)
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < 4 or offset + length > end:
            raise ValueError(f"netlink attribute of {length} bytes at {offset} in a message of {end}")
        if kind & NLA_TYPE_MASK in kinds:
            found[kind & NLA_TYPE_MASK] = body[offset + 4 : offset + length]
        offset += (length + 3) & ~3
    return found


def error_of(message: Message) -> tuple[int, str]:
    """Return (errno, the kernel's extack text or "") of an NLMSG_ERROR or NLMSG_DONE; errno 0 is success."""
    if message.type == NLMSG_DONE:
        return (-_I32.unpack_from(message.body)[0] if len(message.body) >= 4 else 0), ""
    code, length, *_ = _ERROR.unpack_from(message.body)
    if not code or not message.flags & NLM_F_ACK_TLVS:
        return -code, ""
    echoed = 16 if message.flags & NLM_F_CAPPED else (length + 3) & ~3
    for kind, data in attributes(message.body, 4 + echoed):
        if kind == NLMSGERR_ATTR_MSG:
            return -code, data.rstrip(b"\0").decode(errors="replace")
    return -code, ""
