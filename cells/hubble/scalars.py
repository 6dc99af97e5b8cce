"""Types of protobuf fields: their encoding as bytes and JSON, and field masks.

Source: protobuf.dev, "Encoding" and "ProtoJSON Format".
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec


class DecodeError(ValueError):
    """The bytes or the JSON are not a valid message."""


class Wire(msgspec.Struct, frozen=True):
    """The encoding of a field, from its annotation."""

    number: int
    type: str | type[IntEnum] = ""
    """A scalar's protobuf type, a well-known type's name, or the enum; empty: from the Python type."""
    oneof: str = ""


NANOSECONDS = 1_000_000_000
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999, the range of google.protobuf.Timestamp."""
_INVALID_TIME = (_LAST_SECOND + 1) * NANOSECONDS
_MASK64 = (1 << 64) - 1
ONE_BYTE = [bytes((value,)) for value in range(0x80)]


def varint(value: int) -> bytes:
    """An integer in base 128, lowest group first; a negative one as 64-bit two's complement."""
    if 0 <= value < 0x80:
        return ONE_BYTE[value]
    if 0 <= value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if 0 <= value < 0x10000000:
        if value < 0x200000:
            return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21))
    value &= _MASK64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise DecodeError("truncated or overlong number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK64, at
        shift += 7


def read_fields(data: bytes) -> list[tuple[int, int, int | bytes]]:
    """Number, wire type and raw value of each field."""
    found: list[tuple[int, int, int | bytes]] = []
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == VARINT:
            value, at = read_varint(data, at)
        elif wire in {EIGHT, DELIMITED, FOUR}:
            size = {EIGHT: 8, FOUR: 4}.get(wire, 0)
            if wire == DELIMITED:
                size, at = read_varint(data, at)
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise DecodeError("truncated field")
        else:
            raise DecodeError(f"field {number} has wire type {wire}, which is not supported")
        if not 0 < number < 1 << 29:
            raise DecodeError(f"invalid field number {number}")
        found.append((number, wire, value))
    return found


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9})\d*)?(?:[Zz]|([+-])(\d\d):(\d\d))",
    re.ASCII,
)


def rfc3339(nanoseconds: int) -> str:
    """The time in UTC with 0, 3, 6 or 9 digits after the point, as protojson prints it."""
    seconds, fraction = divmod(nanoseconds, NANOSECONDS)
    text = (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0")
    if not fraction:
        return text + "Z"
    digits = f"{fraction:09d}"
    while digits.endswith("000"):
        digits = digits[:-3]
    return f"{text}.{digits}Z"


def is_valid_time(nanoseconds: int) -> bool:
    """Whether a google.protobuf.Timestamp can have this time: from year 1 to 9999."""
    return _FIRST_SECOND <= nanoseconds // NANOSECONDS <= _LAST_SECOND


def parse_rfc3339(text: str) -> int:
    """Nanoseconds since 1970; DecodeError for anything but an RFC 3339 time."""
    if (match := _RFC3339.fullmatch(text)) is None:
        raise DecodeError(f"invalid time {text!r}: not RFC 3339")
    try:
        moment = datetime(*(int(part) for part in match.groups()[:6]), tzinfo=UTC)  # type: ignore[misc,arg-type]
    except ValueError as error:
        raise DecodeError(f"invalid time {text!r}: {error}") from None
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    if match[8]:
        offset = int(match[9]) * 3600 + int(match[10]) * 60
        seconds += -offset if match[8] == "+" else offset
    return seconds * NANOSECONDS + int((match[7] or "").ljust(9, "0"))


VARINT, EIGHT, DELIMITED, FOUR = 0, 1, 2, 5


def camel_case(name: str) -> str:
    return re.sub("_([a-z0-9])", lambda found: found[1].upper(), name)


class Member(NamedTuple):
    """A field of a message."""

    name: str
    wire: Wire
    type: FieldType
    repeated: bool


MaskTree = dict[str, "tuple[Member, MaskTree | None]"]


class FieldType:
    """The encoding of one protobuf type: `pack` returns everything after the tag."""

    wire = DELIMITED
    name = ""
    """The name of a scalar type in a .proto."""
    message_name = ""
    """The full name of a message type."""
    presence = False
    """Whether a set zero differs from an absent value."""
    zero: object = None
    members: Mapping[str, Member] = {}
    """Fields that a path of a mask may enter."""

    def pack(self, value: Any) -> bytes:
        raise NotImplementedError

    def unpack(self, raw: Any) -> Any:
        raise NotImplementedError

    def to_json(self, value: Any) -> Any:
        return value

    def from_json(self, value: Any) -> Any:
        raise NotImplementedError

    def select(self, value: Any, mask: MaskTree) -> Any:
        raise NotImplementedError


class IntegerType(FieldType):
    wire = VARINT
    zero = 0
    pack = staticmethod(varint)

    def __init__(self, bits: int, *, signed: bool) -> None:
        self.name = f"{'' if signed else 'u'}int{bits}"
        self._bits = bits
        self._low = -(1 << bits - 1) if signed else 0
        self._high = (1 << bits - 1 if signed else 1 << bits) - 1

    def unpack(self, raw: int) -> int:
        value = raw & (1 << self._bits) - 1
        return value - (1 << self._bits) if value > self._high else value

    def to_json(self, value: int) -> int | str:
        return str(value) if self._bits == 64 else int(value)

    def from_json(self, value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?\d+", value, re.ASCII):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not self._low <= value <= self._high:
            raise DecodeError(f"invalid number {value!r}")
        return value


class OptionalInteger(IntegerType):
    """An integer that is encoded even if it is zero, but not if it is None."""

    presence = True


class EnumType(IntegerType):
    def __init__(self, names: type[IntEnum]) -> None:
        super().__init__(32, signed=True)
        self.enum = names
        self._names = {int(member): name for name, member in names.__members__.items()}
        self._numbers = {name: int(member) for name, member in names.__members__.items()}

    def to_json(self, value: int) -> int | str:
        return self._names.get(value) or int(value)

    def from_json(self, value: object) -> int:
        if isinstance(value, str):
            if value not in self._numbers:
                raise DecodeError(f"invalid value {value!r} of an enum")
            return self._numbers[value]
        return super().from_json(value)


class BoolType(FieldType):
    name = "bool"
    wire = VARINT
    zero = False

    def pack(self, value: bool) -> bytes:
        return b"\1" if value else b"\0"

    def unpack(self, raw: int) -> bool:
        return raw != 0

    def from_json(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise DecodeError(f"invalid value {value!r}: expected true or false")
        return value


class DoubleType(FieldType):
    name = "double"
    wire = EIGHT
    zero = 0.0

    def pack(self, value: float) -> bytes:
        return struct.pack("<d", value)

    def unpack(self, raw: bytes) -> float:
        number: float = struct.unpack("<d", raw)[0]
        return number

    def from_json(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DecodeError(f"invalid number {value!r}")
        return float(value)


class TextType(FieldType):
    name = "string"
    zero = ""

    def pack(self, value: str) -> bytes:
        data = value.encode()
        return varint(len(data)) + data

    def unpack(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise DecodeError(f"a text is not UTF-8: {error}") from None

    def from_json(self, value: object) -> str:
        if not isinstance(value, str):
            raise DecodeError(f"invalid value {value!r}: expected a text")
        return value


class BytesType(FieldType):
    name = "bytes"
    zero = b""

    def pack(self, value: bytes) -> bytes:
        return varint(len(value)) + value

    def unpack(self, raw: bytes) -> bytes:
        return raw

    def to_json(self, value: bytes) -> str:
        return msgspec.to_builtins(value)  # type: ignore[no-any-return]

    def from_json(self, value: object) -> bytes:
        try:
            return msgspec.convert(value, bytes)
        except msgspec.ValidationError as error:
            raise DecodeError(f"invalid bytes: {error}") from None


@functools.lru_cache(maxsize=256)
def _packed_time(nanoseconds: int) -> bytes:
    """Cached, as events of one batch share a time."""
    seconds, nanos = divmod(nanoseconds, NANOSECONDS)
    data = (b"\x08" + varint(seconds) if seconds else b"") + (b"\x10" + varint(nanos) if nanos else b"")
    return ONE_BYTE[len(data)] + data


class TimestampType(FieldType):
    message_name = "google.protobuf.Timestamp"
    presence = True
    zero = 0

    @functools.cached_property
    def members(self) -> Mapping[str, Member]:  # type: ignore[override]
        seconds = Member("seconds", Wire(1), IntegerType(64, signed=True), repeated=False)
        return {
            "seconds": seconds,
            "nanos": seconds._replace(name="nanos", wire=Wire(2), type=IntegerType(32, signed=True)),
        }

    pack = staticmethod(_packed_time)

    def unpack(self, raw: bytes) -> int:
        """Return the nanoseconds since 1970; an invalid time if the message has too many nanoseconds."""
        parts = {1: 0, 2: 0}
        for number, wire, value in read_fields(raw):
            if wire == VARINT and number in parts:
                parts[number] = value - (1 << 64) if value >> 63 else value  # type: ignore[operator,assignment]
        if not 0 <= parts[2] < NANOSECONDS:
            return _INVALID_TIME
        return parts[1] * NANOSECONDS + parts[2]

    def to_json(self, value: int) -> str:
        return rfc3339(value)

    def from_json(self, value: object) -> int:
        if not isinstance(value, str):
            raise DecodeError(f"invalid time {value!r}")
        return parse_rfc3339(value)

    def select(self, value: int | None, mask: MaskTree) -> int:
        seconds, nanos = divmod(value or 0, NANOSECONDS)
        return ("seconds" in mask) * seconds * NANOSECONDS + ("nanos" in mask) * nanos


class WrapperType(FieldType):
    """BoolValue and similar types: a message around one scalar."""

    presence = True

    def __init__(self, message_name: str, inner: FieldType) -> None:
        self.message_name = message_name
        self._inner = inner
        self._zero_packed = inner.pack(inner.zero)
        self.members = {"value": Member("value", Wire(1), inner, repeated=False)}

    def pack(self, value: Any) -> bytes:
        data = self._inner.pack(value)
        if data == self._zero_packed:
            return b"\0"
        return varint(len(data) + 1) + b"\x08" + data

    def unpack(self, raw: bytes) -> Any:
        value = self._inner.zero
        for number, wire, each in read_fields(raw):
            if number == 1 and wire == VARINT:
                value = self._inner.unpack(each)
        return value

    def to_json(self, value: Any) -> Any:
        return self._inner.to_json(value)

    def from_json(self, value: object) -> Any:
        return self._inner.from_json(value)

    def select(self, value: Any, mask: MaskTree) -> Any:  # noqa: ARG002 - has one member
        return self._inner.zero if value is None else value


class PathsType(FieldType):
    """A google.protobuf.FieldMask as a field of a request."""

    message_name = "google.protobuf.FieldMask"
    presence = True

    def pack(self, value: Sequence[str]) -> bytes:
        data = b"".join(b"\x0a" + varint(len(path.encode())) + path.encode() for path in value)
        return varint(len(data)) + data

    def unpack(self, raw: bytes) -> tuple[str, ...]:
        text = TextType()
        found = (each for number, wire, each in read_fields(raw) if (number, wire) == (1, DELIMITED))
        return tuple(text.unpack(each) for each in found)  # type: ignore[arg-type]

    def to_json(self, value: Sequence[str]) -> str:
        return ",".join(camel_case(path) for path in value)

    def from_json(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, str):
            raise DecodeError(f"invalid field mask {value!r}: expected paths joined by commas")
        return tuple(
            re.sub("[A-Z]", lambda one: "_" + one[0].lower(), path) for path in value.split(",") if path
        )


NAMED: dict[str, FieldType] = {
    "uint32": IntegerType(32, signed=False),
    "uint64": IntegerType(64, signed=False),
    "int32": IntegerType(32, signed=True),
    "int64": IntegerType(64, signed=True),
    "optional int32": OptionalInteger(32, signed=True),
    "Timestamp": TimestampType(),
    "BoolValue": WrapperType("google.protobuf.BoolValue", BoolType()),
    "UInt32Value": WrapperType("google.protobuf.UInt32Value", IntegerType(32, signed=False)),
    "Int32Value": WrapperType("google.protobuf.Int32Value", IntegerType(32, signed=True)),
    "FieldMask": PathsType(),
}
PLAIN: dict[object, FieldType] = {str: TextType(), bool: BoolType(), float: DoubleType(), bytes: BytesType()}
