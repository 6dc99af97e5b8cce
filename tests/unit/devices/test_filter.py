"""The socket filter that discards link messages of pods, run by a small interpreter."""

import struct

import pytest

from cells.node.devices import FILTER

NEWLINK, DELLINK, NEWADDR, DELADDR = 16, 17, 20, 21
LINK, GLOBAL = 253, 0


def passes(message: bytes) -> bool:
    """Whether the kernel would deliver the message; classic BPF, with its reads in network order."""
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, value = FILTER[position]
        position += 1
        if code in {0x28, 0x20}:
            size = 2 if code == 0x28 else 4
            if value + size > len(message):
                return False
            accumulator = int.from_bytes(message[value : value + size], "big")
        elif code == 0x15:
            position += if_true if accumulator == value else if_false
        elif code == 0x54:
            accumulator &= value
        else:
            assert code == 0x06
            return bool(value)


def news(kind: int, name: str, attribute: int = 3) -> bytes:
    data = name.encode() + b"\0"
    body = bytes(16) + struct.pack("=HH", 4 + len(data), attribute) + data + bytes(8)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


@pytest.mark.parametrize("kind", [NEWLINK, DELLINK])
def test_netlink_messages_of_pod_links_are_filtered_out(kind: int) -> None:
    assert not passes(news(kind, "lxc0123456789ab"))
    assert not passes(news(kind, "tmp01234"))


@pytest.mark.parametrize("name", ["eth0", "cilium_host", "lx", "lo", "l"])
def test_news_of_other_links_comes_through(name: str) -> None:
    assert passes(news(NEWLINK, name))
    assert passes(news(DELLINK, name))


def address(kind: int, family: int, scope: int, flags: int = 0x80) -> bytes:
    body = struct.pack("=BBBBI", family, 64, flags, scope, 7) + bytes(20)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


@pytest.mark.parametrize("kind", [NEWADDR, DELADDR])
def test_only_ipv6_link_local_address_messages_are_filtered_out(kind: int) -> None:
    assert not passes(address(kind, 10, LINK))
    assert not passes(address(kind, 10, LINK, flags=0xC0))
    assert passes(address(kind, 10, GLOBAL))
    assert passes(address(kind, 2, GLOBAL))
    assert passes(address(kind, 2, LINK))


def test_messages_of_other_types_pass_the_filter() -> None:
    assert passes(struct.pack("=IHHIIi", 20, 2, 0, 0, 0, -105))


def test_a_message_that_begins_otherwise_comes_through() -> None:
    assert passes(news(NEWLINK, "lxc0123456789ab", attribute=51))
