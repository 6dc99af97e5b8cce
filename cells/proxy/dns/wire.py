"""Parses and rewrites DNS messages, as far as a proxy needs them.

Pure. Source: RFC 1035, section 4; RFC 6891 (EDNS); RFC 9267 on faults of decoders.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

from cells.base.addresses import IPAddress, address_of

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
A, CNAME, AAAA, OPT = 1, 5, 28, 41
INTERNET: Final = 1

_HEADER = struct.Struct(">HHHHHH")
_HEADER_START = struct.Struct(">HHH")
_QUESTION = struct.Struct(">HH")
_RECORD = struct.Struct(">HHIH")
_RESPONSE, _RECURSION, _AVAILABLE, _OPCODE, _TRUNCATED = 0x8000, 0x0100, 0x0080, 0x7800, 0x0200
_NOTIFY: Final = 0x2000
"""The opcode NOTIFY (RFC 1996), served besides QUERY."""
_FORWARDED_FLAGS: Final = 0x0130 | _NOTIFY
"""The forwarded flags of a query: recursion desired, authentic data, checking disabled, and NOTIFY."""
_ECHOED_FLAGS: Final = 0x03B0
"""The flags that FORMERR and NOTIMP copy from the message: those of a query, TC and RA."""
_DNSSEC_OK: Final = 0x8000
_CLIENT_SUBNET, _COOKIE = 8, 10
_OPTION_SIZES: Final = {_CLIENT_SUBNET: range(4, 21), _COOKIE: range(8, 41)}
"""The forwarded EDNS options, with their valid lengths (RFC 7871, RFC 7873)."""
_POINTER: Final = 0xC0
_QUESTION_NAME: Final = b"\xc0\x0c"
"""A compressed name that points to the question's, as almost every record has."""
_MAX_NAME_LENGTH: Final = 255
_HOST_NAME_OCTETS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_*/")


class WireError(ValueError):
    """A malformed DNS message; the text is the reason."""


class DNSQuery(NamedTuple):
    """A question: its type, and its name in lower case with a final dot."""

    name: str
    type: int
    end: int
    """Offset of the end of the question."""


class Answer(NamedTuple):
    """A server's answer to a question."""

    name: str
    """Empty in an error without a question, as from servers that could not parse the query."""
    type: int
    code: int
    """RCODE."""
    addresses: tuple[IPAddress, ...]
    """The A and AAAA records of the name and of its CNAME chain."""
    ttl: int
    """The lowest TTL of these records and of the CNAMEs, in seconds; 0 without records."""
    size: int
    """Offset of the end of the last record; further bytes are dropped."""
    truncated: bool = False
    """Whether it is truncated within a record; then it ends with the question."""

    def is_to(self, query: DNSQuery) -> bool:
        """Whether it answers this query."""
        return not self.name or (self.name == query.name and self.type == query.type)


# Pods repeat queries for few names, and servers repeat answers, so results for short messages are cached by
# their bytes after the ID. Messages are parsed with ID 0, since a compressed name may point to the ID.

MAX_CACHED_SIZE: Final = 512
"""Maximum bytes of a message with a cached result."""
_NO_ID: Final = bytes(2)


def read_query(data: bytes) -> DNSQuery:
    """Parse the question of a query or NOTIFY. Raises WireError for any other message."""
    return _cached_query(data[2:]) if len(data) <= MAX_CACHED_SIZE else _read_query(data[2:])


def _read_query(after_id: bytes) -> DNSQuery:
    data = _NO_ID + after_id
    _, flags, questions = _header(data)
    if flags & _RESPONSE or flags & _OPCODE not in (0, _NOTIFY):
        raise WireError("not a query")
    if questions != 1:
        raise WireError(f"{questions} questions, expected 1")
    return _question(data)


_cached_query = lru_cache(maxsize=1024)(_read_query)


def read_answer(data: bytes) -> Answer:
    """Parse a server's answer. Raises WireError."""
    return _cached_answer(data[2:]) if len(data) <= MAX_CACHED_SIZE else _read_answer(data[2:])


def _read_answer(after_id: bytes) -> Answer:
    data = _NO_ID + after_id
    _, flags, questions = _header(data)
    if not flags & _RESPONSE:
        raise WireError("not an answer")
    answers, authorities, additional = struct.unpack_from(">HHH", data, 6)
    if questions == answers == 0 and flags & 0xF:  # from servers that could not parse the question
        question = DNSQuery("", 0, _HEADER.size)
    elif questions == 1:
        question = _question(data)
    else:
        raise WireError(f"{questions} questions, expected 1")
    try:
        addresses, ttl, at = _records(data, question.end, answers, question.name)
        for _ in range(authorities + additional):
            at = _record(data, at)[2]
    except WireError:
        if not flags & _TRUNCATED:
            raise
        return Answer(question.name, question.type, flags & 0xF, (), 0, question.end, truncated=True)
    return Answer(question.name, question.type, flags & 0xF, addresses, ttl, at)


_cached_answer = lru_cache(maxsize=1024)(_read_answer)


def sanitized_query(data: bytes, query: DNSQuery) -> bytes:
    """Return the query to forward: its question, and the supported EDNS options. Raises WireError.

    Other records, other options and bytes after the last record are dropped.
    """
    rewrite = _cached_sanitize if len(data) <= MAX_CACHED_SIZE else _sanitize
    return data[:2] + rewrite(data[2:], query.end)


def _sanitize(after_id: bytes, end: int) -> bytes:
    data = _NO_ID + after_id
    _, flags, _ = _header(data)
    name, at = _uncompressed_name(data, _HEADER.size)
    options = _edns(data, end)
    header = _HEADER.pack(0, flags & _FORWARDED_FLAGS, 1, 0, 0, 1 if options else 0)[2:]
    return header + name + data[at:end] + options


_cached_sanitize = lru_cache(maxsize=1024)(_sanitize)


def _edns(data: bytes, at: int) -> bytes:
    """Return the query's OPT record, rewritten; empty without one. Raises WireError."""
    found = b""
    for _ in range(sum(struct.unpack_from(">HHH", data, 6))):
        root = data[at : at + 1] == b"\0"
        kind, start, at = _record(data, at)
        if kind != OPT:
            continue
        if found or not root:
            raise WireError("an OPT record that is not the root's, or not the only one")
        _, size, ttl, _ = _RECORD.unpack_from(data, start - _RECORD.size)
        # The TTL has the EDNS version and the flag DO. Other versions are forwarded: the server answers them.
        value = _options(data[start:at])
        found = b"\0" + _RECORD.pack(OPT, size, ttl & (0xFF << 16 | _DNSSEC_OK), len(value)) + value
    return found


def _options(value: bytes) -> bytes:
    parts, at = [], 0
    while at < len(value):
        code, size = int.from_bytes(value[at : at + 2], "big"), int.from_bytes(value[at + 2 : at + 4], "big")
        end = at + 4 + size
        if end > len(value):
            raise WireError("an option of EDNS is cut off")
        if size in _OPTION_SIZES.get(code, ()):
            parts.append(value[at:end])
        at = end
    return b"".join(parts)


def _record(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the type of the record at an offset, and the start and end of its value. Raises WireError."""
    at = skip_name(data, at)
    if at + _RECORD.size > len(data):
        raise WireError("a record is cut off")
    kind, _, _, size = _RECORD.unpack_from(data, at)
    at += _RECORD.size
    if at + size > len(data):
        raise WireError("a record is cut off")
    return kind, at, at + size


def refusal(query: bytes, end: int, code: int) -> bytes:
    """Return an answer with ``code`` and no records; the query's question ends at ``end``."""
    number, flags, _ = _header(query)
    answered = _RESPONSE | flags & (_OPCODE | _RECURSION) | _AVAILABLE | code
    return _HEADER.pack(number, answered, 1, 0, 0, 0) + query[12:end]


def error_response(message: bytes) -> bytes | None:
    """Return FORMERR or NOTIMP for a message that read_query refuses; None for no response.

    A response to a response could loop, and one to a message shorter than a header could be used for
    amplification. Source: the server of miekg/dns, which Cilium's proxy uses.
    """
    if len(message) < _HEADER.size:
        return None
    number, flags, questions = _header(message)
    if flags & _RESPONSE:
        return None
    flags_back = _RESPONSE | flags & _ECHOED_FLAGS
    if flags & _OPCODE not in (0, _NOTIFY):
        return _HEADER.pack(number, flags_back | flags & _OPCODE | NOTIMP, 0, 0, 0, 0)
    try:
        question = message[_HEADER.size : _question(message).end] if questions == 1 else b""
    except WireError:
        question = b""
    return _HEADER.pack(number, flags_back | FORMERR, 1 if question else 0, 0, 0, 0) + question


def uncompressed(data: bytes) -> bytes:
    """Return the message with all names uncompressed. Raises WireError."""
    _header(data)
    parts = [data[:12]]
    at = 12
    questions, *counts = struct.unpack_from(">HHHH", data, 4)
    for _ in range(questions):
        name, at = _uncompressed_name(data, at)
        parts += name, data[at : at + 4]
        at += 4
    for _ in range(sum(counts)):
        name, at = _uncompressed_name(data, at)
        if at + _RECORD.size > len(data):
            raise WireError("a record is cut off")
        kind, class_, ttl, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        value = _uncompressed_value(data, at, kind, size)
        parts += name, _RECORD.pack(kind, class_, ttl, len(value)), value
        at += size
    if at > len(data):
        raise WireError("a record is cut off")
    return b"".join(parts)


_NAMES_IN_VALUES: Final = {2: (0, 1), 5: (0, 1), 6: (0, 2), 12: (0, 1), 15: (2, 1), 33: (6, 1)}
"""Record types with names in their values: bytes before the names, and number of names."""


def _uncompressed_value(data: bytes, at: int, kind: int, size: int) -> bytes:
    if kind not in _NAMES_IN_VALUES:
        return data[at : at + size]
    before, names = _NAMES_IN_VALUES[kind]
    value, here = data[at : at + before], at + before
    for _ in range(names):
        name, here = _uncompressed_name(data, here)
        value += name
    return value + data[here : at + size]


def _uncompressed_name(data: bytes, at: int) -> tuple[bytes, int]:
    """Return an uncompressed name, and the offset of its end. Raises WireError."""
    end = skip_name(data, at)
    read_name(data, at)  # checks its length, and that it ends
    name = b""
    while size := data[at]:
        if size >= _POINTER:
            at = (size & 0x3F) << 8 | data[at + 1]
        else:
            name += data[at : at + 1 + size]
            at += size + 1
    return name + b"\0", end


def udp_size(query: bytes, end: int) -> int:
    """Return the maximum size of a UDP answer for the sender of a query: that of EDNS, or 512 (RFC 6891)."""
    if query[6:10] != bytes(4) or query[10:12] == bytes(2) or query[end : end + 3] != b"\0\0\x29":
        return 512
    return max(512, int.from_bytes(query[end + 3 : end + 5], "big"))


def parsed_part(data: bytes, answer: Answer) -> bytes:
    """Return an answer without the bytes that could not be parsed; a truncated one without records."""
    return truncated(data, answer.size) if answer.truncated else data[: answer.size]


def truncated(answer: bytes, end: int) -> bytes:
    """Return an answer without records and with TC set; its question ends at ``end``."""
    number, flags, _ = _header(answer)
    return _HEADER.pack(number, flags | _TRUNCATED, 1, 0, 0, 0) + answer[12:end]


def _header(data: bytes) -> tuple[int, int, int]:
    if len(data) < _HEADER.size:
        raise WireError("the header is cut off")
    return _HEADER_START.unpack_from(data)


def _question(data: bytes) -> DNSQuery:
    name, at = read_name(data, _HEADER.size)
    if at + _QUESTION.size > len(data):
        raise WireError("the question is cut off")
    kind, _ = _QUESTION.unpack_from(data, at)  # any class: version.bind has class CH
    return DNSQuery(name, kind, at + _QUESTION.size)


def read_name(data: bytes, at: int) -> tuple[str, int]:
    """Return the name at an offset in lower case with a final dot, and its end. Raises WireError.

    Compression pointers must point backwards, so names are finite.
    """
    labels: list[bytes] = []
    end, least, length = 0, at, 1
    try:
        while size := data[at]:
            if size >= _POINTER:
                end = end or at + 2
                at = (size & 0x3F) << 8 | data[at + 1]
                if at >= least:
                    raise WireError("a name points forward")
                least = at
            elif size > 63:
                raise WireError("a label of an unknown kind")
            else:
                label = data[at + 1 : at + 1 + size]
                length += size + 1
                if len(label) < size or length > _MAX_NAME_LENGTH:
                    raise WireError("a name is too long, or cut off")
                labels.append(label)
                at += size + 1
    except IndexError:
        raise WireError("a name is cut off") from None
    return _text(tuple(labels)), end or at + 1


@lru_cache(maxsize=8192)
def _text(labels: tuple[bytes, ...]) -> str:
    """Format labels as text; octets other than those of host names as ``\\DDD`` (RFC 1035, section 5.1)."""
    return ".".join(map(_label, labels)) + "."


def _label(label: bytes) -> str:
    lower = label.lower()
    if _HOST_NAME_OCTETS.issuperset(lower):
        return lower.decode()
    return "".join(chr(one) if one in _HOST_NAME_OCTETS else f"\\{one:03}" for one in lower)


def skip_name(data: bytes, at: int) -> int:
    """Return the offset of the end of a name. Raises WireError."""
    try:
        while size := data[at]:
            if size >= _POINTER:
                return at + 2
            at += size + 1
    except IndexError:
        raise WireError("a name is cut off") from None
    return at + 1


def _records(data: bytes, at: int, count: int, name: str) -> tuple[tuple[IPAddress, ...], int, int]:
    """Return addresses and lowest TTL of a name and its CNAME chain, and the end of the records.

    Records of other names are parsed but not returned.
    """
    found: list[tuple[str, int, IPAddress]] = []
    aliases: dict[str, tuple[str, int]] = {}
    for _ in range(count):
        if data[at : at + 2] == _QUESTION_NAME:
            owner, at = name, at + 2
        else:
            owner, at = read_name(data, at)
        if at + _RECORD.size > len(data):
            raise WireError("a record is cut off")
        kind, class_, ttl, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        value = data[at : at + size]
        at += size
        if at > len(data):
            raise WireError("a record is cut off")
        if class_ != INTERNET or kind not in (A, AAAA, CNAME):
            continue
        ttl = 0 if ttl >> 31 else ttl  # RFC 2181, section 8
        if kind == CNAME:
            aliases.setdefault(owner, (read_name(data, at - size)[0], ttl))
        elif size == (4 if kind == A else 16):
            found.append((owner, ttl, address_of(value)))
        else:
            raise WireError(f"an {'A' if kind == A else 'AAAA'} record of {size} bytes")
    names, ttls = {name}, []
    while (alias := aliases.pop(name, None)) is not None:
        name, ttl = alias
        names.add(name)
        ttls.append(ttl)
    known = [(ttl, address) for owner, ttl, address in found if owner in names]
    ttls += [ttl for ttl, _ in known]
    return tuple(dict.fromkeys([address for _, address in known])), min(ttls, default=0), at


def aliases_and_types(data: bytes, at: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the aliases of an answer, and the types of its records, from the end of its question.

    Raises WireError.
    """
    aliases: list[str] = []
    types: dict[int, None] = {}
    for _ in range(int.from_bytes(data[6:8], "big")):
        at = read_name(data, at)[1]
        if at + _RECORD.size > len(data):
            raise WireError("a record is cut off")
        kind, _, _, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        types[kind] = None
        if kind == CNAME:
            aliases.append(read_name(data, at)[0])
        at += size
    return tuple(aliases), tuple(types)
