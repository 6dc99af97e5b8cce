"""The index of a new link is read directly from a message of the known layout, else searched."""

from __future__ import annotations

import struct

import pytest

from cells.netlink import messages as m
from cells.netlink.rows import IndexReader
from cells.netlink.wire import Message, attribute, u32


def new_link(ifindex: int, peer: int | None, name: bytes = b"lxc0123\0", *more: bytes) -> Message:
    """An RTM_NEWLINK with its peer's index behind other attributes."""
    parts = [
        m.LINK.pack(0, 0, ifindex, 0, 0),
        attribute(m.IFLA_IFNAME, name),
        *more,
        attribute(m.IFLA_MTU, b"x" * 9),
    ]
    if peer is not None:
        parts.append(u32(m.IFLA_LINK, peer))
    return Message(16, 0, 1, b"".join(parts) + attribute(m.IFLA_GROUP, bytes(4)))


FAKED = attribute(m.IFLA_ADDRESS, struct.pack("=HHI", 8, m.IFLA_LINK, 77))
"""Data that looks like the attribute."""


@pytest.mark.parametrize(
    "second",
    [
        (new_link(12, 7), (12, 7)),
        (new_link(12, 7, b"a-longer-name\0"), (12, 7)),
        (new_link(12, 7, b"lxc0123\0", FAKED), (12, 7)),
        (new_link(12, None), (12, 0)),
        (Message(16, 0, 1, m.LINK.pack(0, 0, 12, 0, 0)), (12, 0)),
    ],
    ids=["alike", "another name", "data like a header", "no peer", "nothing"],
)
@pytest.mark.parametrize("first", [new_link(11, 5), new_link(11, 5, b"lxc0123\0", FAKED), new_link(11, None)])
def test_indexes_are_those_of_the_message_whatever_came_before(
    first: Message, second: tuple[Message, tuple[int, int]]
) -> None:
    reader = IndexReader()
    assert reader.read(first)[0] == 11
    message, expected = second
    assert reader.read(message) == expected
    assert reader.read(first)[0] == 11
