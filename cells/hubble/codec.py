"""Messages of Hubble's API as protobuf bytes and protojson, from one declaration of each.

A message is a `WireMessage`: a struct of keyword arguments with defaults, each field annotated with its
number and, where the Python type leaves it open, its protobuf type::

    class Workload(WireMessage):
        protobuf: ClassVar[str] = "flow.Workload"
        name: Annotated[str, Wire(1)] = ""

    data = encode(Workload(name="web"))
    message = decode(Workload, data)  # DecodeError when malformed; unknown fields are skipped
    tree = to_json(message)  # protojson: proto names, defaults omitted, 64-bit integers as text
    message = from_json(Workload, tree)  # proto or camelCase names; DecodeError for unknown ones
    mask = FieldMask.parse(["source.pod_name", "verdict"], Flow)
    flow = mask.apply(flow)

Sub-messages and members of a oneof are ``X | None``, repeated fields any sequence (decoded: a tuple), enums
plain numbers. Well-known types are Python values: a Timestamp is an int of nanoseconds since 1970, BoolValue,
Int32Value and UInt32Value are ``bool | None`` and ``int | None``, a FieldMask a tuple of paths.

Why: the protobuf package costs an agent 7 MiB and builds a flow no faster.

Source: protobuf.dev, "Encoding" and "ProtoJSON Format".
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import msgspec
from msgspec.structs import astuple

from cells.hubble.scalars import (
    DELIMITED,
    NAMED,
    ONE_BYTE,
    PLAIN,
    VARINT,
    DecodeError,
    EnumType,
    FieldType,
    IntegerType,
    MaskTree,
    Member,
    TextType,
    Wire,
    camel_case,
    read_fields,
    read_varint,
    varint,
)

__all__ = [
    "DecodeError",
    "FieldMask",
    "InvalidFieldMask",
    "SharedMessage",
    "Wire",
    "WireMessage",
    "decode",
    "encode",
    "field_packer",
    "from_json",
    "members_of",
    "share",
    "to_json",
]


class InvalidFieldMask(ValueError):  # noqa: N818 - the text clients see
    """A path of a field mask does not name a field of the message."""


class WireMessage(msgspec.Struct, kw_only=True, gc=False):
    """Base of every message."""

    protobuf: ClassVar[str] = ""
    """Full name of the message in its .proto."""


class SharedMessage(WireMessage, dict=True, gc=True):
    """Base of messages that many others contain: `share` encodes one once and caches the bytes."""


M = TypeVar("M", bound=WireMessage)
S = TypeVar("S", bound=SharedMessage)


def share(message: S) -> S:
    """Encode the message now, for all messages that will contain it; it must not be changed afterwards."""
    data = encode(message)
    message.__dict__["packed"] = varint(len(data)) + data
    return message


class MessageType(FieldType):
    presence = True

    def __init__(self, cls: type[WireMessage]) -> None:
        self._cls = cls
        self.message_name = cls.protobuf
        self._shared = issubclass(cls, SharedMessage)

    @functools.cached_property
    def members(self) -> Mapping[str, Member]:  # type: ignore[override]
        return _layout(self._cls).by_name

    def pack(self, value: WireMessage) -> bytes:
        if self._shared and (packed := value.__dict__.get("packed")) is not None:
            return packed  # type: ignore[no-any-return]
        data = encode(value)
        return varint(len(data)) + data

    def unpack(self, raw: bytes) -> WireMessage:
        return decode(self._cls, raw)

    def to_json(self, value: WireMessage) -> dict[str, Any]:
        return to_json(value)

    def from_json(self, value: object) -> WireMessage:
        return from_json(self._cls, value)

    def select(self, value: WireMessage | None, mask: MaskTree) -> WireMessage:
        """Return a message with the selected fields only; an empty one if `value` is None.

        Of a oneof only the member that the original has is set; without it, the first selected one.
        """
        oneofs, values = _layout(self._cls).oneofs, dict[str, Any]()
        for name, (member, below) in mask.items():
            current = None if value is None else getattr(value, name)
            others = oneofs.get(member.wire.number, ())
            if current is None and (not below or any(other in values for other in others)):
                continue
            for other in others:
                values.pop(other, None)
            values[name] = member.type.select(current, below) if below else current
        return self._cls(**values)


class _Layout(NamedTuple):
    members: tuple[Member, ...]
    by_name: dict[str, Member]
    by_number: dict[int, Member]
    by_json: dict[str, Member]
    oneofs: dict[int, tuple[str, ...]]
    """The other members of a field's oneof, by field."""
    packers: tuple[Callable[[Any], bytes], ...]
    presence: tuple[tuple[int, Callable[[Any], bytes]], ...]
    """Index and packer of fields with presence: a set zero is encoded, an absent value is not."""


def _member(name: str, hint: Any) -> Member:
    python, wire = typing.get_args(hint)
    if (repeated := typing.get_origin(python) is Sequence) or isinstance(python, types.UnionType):
        python = typing.get_args(python)[0]
    if isinstance(wire.type, str):
        kind = NAMED.get(wire.type) or PLAIN.get(python) or MessageType(python)
    else:
        kind = EnumType(wire.type)
    return Member(name, wire, kind, repeated)


def _packer(member: Member) -> Callable[[Any], bytes]:
    kind, number = member.type, member.wire.number
    tag, pack = varint(number << 3 | kind.wire), kind.pack
    if isinstance(kind, IntegerType) and not member.repeated:
        small = [tag + varint(value) for value in range(0x80)]
        return lambda value: small[value] if 0 <= value < 0x80 else tag + varint(value)
    if isinstance(kind, TextType) and not member.repeated:
        return functools.partial(_pack_text, tag)
    if not member.repeated:
        return lambda value: tag + pack(value)
    if kind.wire == DELIMITED:
        return lambda values: b"".join([tag + pack(value) for value in values])
    tag = varint(number << 3 | DELIMITED)

    def packed(values: Sequence[Any]) -> bytes:
        data = b"".join([pack(value) for value in values])
        return tag + varint(len(data)) + data

    return packed


def _pack_text(tag: bytes, value: str) -> bytes:
    data = value.encode()
    return tag + (ONE_BYTE[len(data)] if len(data) < 0x80 else varint(len(data))) + data


@functools.cache
def _layout(cls: type[WireMessage]) -> _Layout:
    hints = typing.get_type_hints(cls, include_extras=True)
    members = tuple(_member(name, hints[name]) for name in cls.__struct_fields__)
    packers = tuple(_packer(member) for member in members)
    oneofs = {
        one.wire.number: tuple(
            other.name for other in members if other.wire.oneof == one.wire.oneof and other is not one
        )
        for one in members
        if one.wire.oneof
    }
    return _Layout(
        members,
        {member.name: member for member in members},
        {member.wire.number: member for member in members},
        {alias: member for member in members for alias in (member.name, camel_case(member.name))},
        oneofs,
        packers,
        tuple(
            (place, packers[place])
            for place, member in enumerate(members)
            if member.type.presence and not member.repeated
        ),
    )


def members_of(cls: type[WireMessage]) -> tuple[Member, ...]:
    """Return the fields of a message in order of declaration."""
    return _layout(cls).members


def field_packer(cls: type[WireMessage], name: str) -> Callable[[Any], bytes]:
    """Return the encoder of one field with its tag, for messages assembled from encoded parts."""
    layout = _layout(cls)
    return layout.packers[layout.members.index(layout.by_name[name])]


def encode(message: WireMessage) -> bytes:
    """Encode a message as protobuf bytes."""
    layout = _layout(type(message))
    values = astuple(message)
    parts = [pack(value) for pack, value in zip(layout.packers, values, strict=True) if value]
    for place, pack in layout.presence:
        value = values[place]
        if value is not None and not value:
            parts.append(pack(value))
    return b"".join(parts)


def _unpacked(member: Member, wire: int, raw: Any) -> list[Any]:
    """Decode one occurrence of a repeated field, packed or not; no values for an unexpected wire type."""
    kind = member.type
    if wire == kind.wire:
        return [kind.unpack(raw)]
    if wire != DELIMITED or kind.wire != VARINT:
        return []
    found, at = [], 0
    while at < len(raw):
        value, at = read_varint(raw, at)
        found.append(kind.unpack(value))
    return found


def decode(cls: type[M], data: bytes) -> M:
    """Decode a message. Raises DecodeError if the bytes are malformed."""
    layout = _layout(cls)
    values: dict[str, Any] = {}
    for number, wire, raw in read_fields(data):
        if (member := layout.by_number.get(number)) is None:
            continue
        if member.repeated:
            values.setdefault(member.name, []).extend(_unpacked(member, wire, raw))
        elif wire == member.type.wire:
            for other in layout.oneofs.get(number, ()):
                values.pop(other, None)
            if isinstance(member.type, MessageType) and member.name in values:
                raw = encode(values[member.name]) + raw  # type: ignore[operator]  # noqa: PLW2901 - merged
            values[member.name] = member.type.unpack(raw)
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def to_json(message: WireMessage) -> dict[str, Any]:
    """Convert a message to protojson for a JSON encoder: proto names, defaults omitted."""
    tree: dict[str, Any] = {}
    for member, value in zip(_layout(type(message)).members, astuple(message), strict=True):
        if not value and (value is None or member.repeated or not member.type.presence):
            continue
        convert = member.type.to_json
        tree[member.name] = [convert(each) for each in value] if member.repeated else convert(value)
    return tree


def from_json(cls: type[M], tree: object) -> M:
    """Convert a protojson tree to a message. Raises DecodeError for unknown fields and invalid values."""
    if not isinstance(tree, dict):
        raise DecodeError(f"invalid {cls.protobuf}: expected an object, got {tree!r}")
    layout = _layout(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if (member := layout.by_json.get(key)) is None:
            raise DecodeError(f"unknown field {key!r} of {cls.protobuf}")
        if value is None:
            continue
        if member.name in values or any(
            other in values for other in layout.oneofs.get(member.wire.number, ())
        ):
            raise DecodeError(f"field {key!r} of {cls.protobuf} is set twice")
        convert = member.type.from_json
        if member.repeated:
            if not isinstance(value, list):
                raise DecodeError(f"field {key!r} of {cls.protobuf}: expected a list, got {value!r}")
            values[member.name] = tuple([convert(each) for each in value])
        else:
            values[member.name] = convert(value)
    return cls(**values)


class FieldMask:
    """The fields of a message that a client selects; an empty mask is false and selects all fields."""

    def __init__(self, whole: MessageType, tree: MaskTree) -> None:
        self._whole = whole
        self._tree = tree

    @classmethod
    def parse(cls, paths: Iterable[str], of: type[WireMessage]) -> Self:
        """Parse paths.

        Raises InvalidFieldMask if a path does not name a field, or enters a repeated field or a scalar.
        """
        whole, tree = MessageType(of), MaskTree()
        for path in sorted(paths):
            _add_path(tree, whole, path.split("."))
        return cls(whole, tree)

    def __bool__(self) -> bool:
        return bool(self._tree)

    def apply(self, message: M) -> M:
        """Return a message with the selected fields.

        Messages on a selected path are set even if the original lacks them.
        """
        return self._whole.select(message, self._tree) if self._tree else message  # type: ignore[return-value]


def _add_path(tree: MaskTree, kind: FieldType, names: Sequence[str]) -> None:
    name, *rest = names
    member = kind.members.get(name)
    if member is None or (rest and (member.repeated or not member.type.members)):
        raise InvalidFieldMask("invalid fieldmask")
    below = tree.get(name)
    if below is not None and below[1] is None:  # the path selects the whole field
        _add_path(MaskTree(), member.type, rest) if rest else None
        return
    if not rest:
        tree[name] = member, None
        return
    inner = below[1] if below is not None and below[1] is not None else MaskTree()
    tree[name] = member, inner
    _add_path(inner, member.type, rest)
