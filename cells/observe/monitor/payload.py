"""What travels over the monitor socket: Go's gob encoding of one struct.

For:    Monitor, and clients.   Needs: nothing.   Gives: PREFACE, encode(), Payloads, GobError.
Source: Go's package encoding/gob; Cilium 1.17, version 1.2 of the monitor's protocol: the server sends the
type ``Payload{Data []byte; CPU int; Lost uint64; Type int}`` once, then a value for each event; the client
sends nothing.
"""

from collections.abc import Iterator
from typing import Final

from cells.observe.events import Lost, Sample

SAMPLE: Final = 9
LOST: Final = 2
_TYPE_ID: Final = 66
_LONGEST: Final = 1 << 20
"""Of a message; an event has less than 1 KiB."""


class GobError(ValueError):
    """What came is not what a monitor sends."""


def _uint(value: int) -> bytes:
    """An unsigned integer: as one byte below 128, else its bytes after the negated number of them."""
    if value < 128:
        return bytes((value,))
    size = (value.bit_length() + 7) // 8
    return bytes((256 - size,)) + value.to_bytes(size, "big")


def _int(value: int) -> bytes:
    """A signed integer: shifted left, its sign in the lowest bit."""
    return _uint(~value << 1 | 1 if value < 0 else value << 1)


def _message(content: bytes) -> bytes:
    return _uint(len(content)) + content


def _string(text: str) -> bytes:
    return _uint(len(text)) + text.encode()


_BYTES, _INT, _UINT = 5, 2, 3  # gob's ids of these types
_FIELDS: Final = (("Data", _BYTES), ("CPU", _INT), ("Lost", _UINT), ("Type", _INT))


def _definition() -> bytes:
    """The type definition: a wireType whose third field, a structType, names the fields and their types.

    Every number before a value is how many fields further it is; 0 ends a struct.
    """
    fields = b"".join(b"\1" + _string(name) + b"\1" + _int(kind) + b"\0" for name, kind in _FIELDS)
    common = b"\1" + _string("Payload") + b"\1" + _int(_TYPE_ID) + b"\0"
    return _int(-_TYPE_ID) + b"\3\1" + common + b"\1" + _uint(len(_FIELDS)) + fields + b"\0\0"


PREFACE: Final = _message(_definition())
"""What a connection begins with."""

_VALUE: Final = _int(_TYPE_ID)
_SAMPLE_END: Final = _int(SAMPLE) + b"\0"
_LOST_END: Final = b"\1" + _int(LOST) + b"\0"


def encode(event: Sample | Lost) -> bytes:
    """One event as a message; fields that are zero are left out, as gob has it."""
    if isinstance(event, Sample):
        cpu = b"\1" + _int(event.cpu) + b"\2" if event.cpu else b"\3"
        content = _VALUE + b"\1" + _uint(len(event.data)) + event.data + cpu + _SAMPLE_END
    else:
        cpu = b"\2" + _int(event.cpu) + b"\1" if event.cpu else b"\3"
        content = _VALUE + cpu + _uint(event.count) + _LOST_END
    return _uint(len(content)) + content


class Payloads:
    """Reads what a monitor sends, in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    def feed(self, data: bytes) -> Iterator[Sample | Lost]:
        """The events that are whole by now. Raises GobError; payloads of other types are passed over."""
        self._rest += data
        position = 0
        while (found := _length(self._rest, position)) is not None:
            start, size = found
            if len(self._rest) < start + size:
                break
            message = self._rest[start : start + size]
            position = start + size
            if not self._begun:
                if message != _definition():
                    raise GobError("the socket does not speak version 1.2 of the monitor's protocol")
                self._begun = True
            elif (event := _event(message)) is not None:
                yield event
        self._rest = self._rest[position:]


def _length(data: bytes, position: int) -> tuple[int, int] | None:
    """Where a message begins, and its length; None if that has not come yet."""
    try:
        size, start = _read_uint(data, position)
    except IndexError:
        return None
    if size > _LONGEST:
        raise GobError(f"a message of {size} bytes")
    return start, size


def _event(message: bytes) -> Sample | Lost | None:
    try:
        kind, position = _read_uint(message, 0)
        if kind != _TYPE_ID << 1:
            raise GobError(f"a value of an unknown type, number {kind}")
        data, numbers = _read_fields(message, position)
    except IndexError:
        raise GobError("a message that ends too early") from None
    cpu, lost, what = (numbers.get(field, 0) for field in (1, 2, 3))
    if what >> 1 == SAMPLE:
        return Sample(cpu >> 1, data)
    return Lost(lost, cpu >> 1) if what >> 1 == LOST else None


def _read_fields(message: bytes, position: int) -> tuple[bytes, dict[int, int]]:
    data = b""
    numbers: dict[int, int] = {}
    field = -1
    while True:
        step, position = _read_uint(message, position)
        if step == 0:
            return data, numbers
        field += step
        number, position = _read_uint(message, position)
        if field == 0:
            data = message[position : position + number]
            position += number
        elif field < len(_FIELDS):
            numbers[field] = number
        else:
            raise GobError(f"a value with a field number {field}")


def _read_uint(data: bytes, position: int) -> tuple[int, int]:
    """A number, and where it ends. IndexError: there is not all of it."""
    first = data[position]
    if first < 128:
        return first, position + 1
    end = position + 1 + 256 - first
    if end > len(data):
        raise IndexError
    return int.from_bytes(data[position + 1 : end], "big"), end
