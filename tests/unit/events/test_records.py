"""Events decoded from their documented bytes, and as text."""

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Ether
from scapy.layers.sctp import SCTP

from cells.observe.events import (
    DROP_REASONS,
    Drop,
    Lost,
    Raw,
    Trace,
    Verdict,
    decode,
    event_text,
    reason_name,
)

SYN = bytes(Ether() / IP(src="10.0.0.1", dst="10.0.0.2") / TCP(sport=40000, dport=80, flags="S"))

u8, u16, u32 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32))
packets = st.binary(max_size=128)


def raw(kind: int, subtype: int, source: int, hash_: int, length: int, body: bytes, packet: bytes) -> bytes:
    head = struct.pack("<BBHIIHH", kind, subtype, source, hash_, length, len(packet), 1)
    data = head + body + packet
    return data + bytes(-(len(data) + 4) % 8)  # as perf pads


@given(u16, u32, u8, u32, st.tuples(u32, u32, u32, u16, u8, st.integers(-128, 127), u32), packets)
def test_a_drop_notification_is_decoded(
    source: int, hash_: int, reason: int, length: int, rest: tuple[int, ...], packet: bytes
) -> None:
    body = struct.pack("<IIIHBbI", *rest)
    assert len(body) == 36 - 16
    drop = decode(raw(1, reason, source, hash_, length, body, packet))
    assert isinstance(drop, Drop)
    assert (drop.source, drop.hash, drop.reason, drop.length) == (source, hash_, reason, length)
    identities = drop.source_identity, drop.destination_identity
    assert (*identities, drop.destination, drop.line, drop.file, drop.ext_error, drop.ifindex) == rest
    assert drop.packet == packet
    assert "\n" not in event_text(drop)


@given(u32, u32, u16, u8, st.booleans(), u32, st.binary(min_size=16, max_size=16), packets)
def test_a_trace_notification_is_decoded(
    from_: int, to: int, destination: int, reason: int, ipv6: bool, ifindex: int, ip: bytes, packet: bytes
) -> None:
    body = struct.pack("<IIHBBI16s", from_, to, destination, reason, ipv6, ifindex, ip)
    assert len(body) == 48 - 16
    trace = decode(raw(4, 3, 77, 5, 1500, body, packet))
    assert isinstance(trace, Trace)
    assert (trace.point, trace.source, trace.destination, trace.ifindex) == (3, 77, destination, ifindex)
    assert (trace.source_identity, trace.destination_identity) == (from_, to)
    assert (trace.reason, trace.encrypted) == (reason & 0x7F, reason >= 0x80)
    assert trace.original_ip == (IPv6Address(ip) if ipv6 else IPv4Address(ip[:4]))
    assert trace.packet == packet
    assert "\n" not in event_text(trace)


@given(
    u32,
    st.integers(-255, 65535),
    u16,
    u8,
    st.sampled_from([1, 2]),
    st.booleans(),
    st.integers(0, 7),
    st.booleans(),
    u8,
    packets,
)
def test_a_verdict_notification_is_decoded(
    remote: int,
    verdict: int,
    port: int,
    protocol: int,
    direction: int,
    ipv6: bool,
    match: int,
    audited: bool,
    auth: int,
    packet: bytes,
) -> None:
    bits = direction | ipv6 << 2 | match << 3 | audited << 6
    body = struct.pack("<IiHBBB3x", remote, verdict, port, protocol, bits, auth)
    assert len(body) == 32 - 16
    event = decode(raw(5, 0, 77, 5, 1500, body, packet))
    assert isinstance(event, Verdict)
    assert (event.source, event.remote_identity, event.verdict) == (77, remote, verdict)
    assert (event.port, event.protocol, event.egress, event.ipv6) == (port, protocol, direction == 2, ipv6)
    assert (event.match, event.audited, event.auth, event.packet) == (match, audited, auth, packet)
    assert "\n" not in event_text(event)


@given(st.binary(max_size=200))
def test_no_bytes_are_refused(data: bytes) -> None:
    event = decode(data)
    assert not isinstance(event, Raw) or event.data == data
    assert "\n" not in event_text(event)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x81agent",
        raw(2, 0, 0, 0, 0, bytes(40), b""),
        raw(1, 133, 1, 2, 3, bytes(20), SYN)[:35],
        struct.pack("<BBHIIHH", 1, 133, 1, 2, 60, 100, 1) + bytes(20) + bytes(50),
        struct.pack("<BBHIIHH", 1, 133, 1, 2, 60, 0, 2) + bytes(24),
    ],
    ids=["nothing", "an agent's", "debug", "cut off", "more captured than there is", "a later version"],
)
def test_an_unknown_record_is_returned_raw(data: bytes) -> None:
    assert decode(data) == Raw(data)


def test_a_drop_notification_is_printed() -> None:
    body = struct.pack("<IIIHBbI", 1000, 1001, 12, 0, 0, 0, 5)
    assert event_text(decode(raw(1, 133, 11, 0xAB, 54, body, SYN))) == (
        "drop, Policy denied: from endpoint 11 10.0.0.1:40000 (identity 1000)"
        " to endpoint 12 10.0.0.2:80 (identity 1001) tcp SYN, at endpoint 11, ifindex 5, flow 0xab"
    )


def test_a_trace_notification_is_printed() -> None:
    body = struct.pack("<IIHBBI16s", 1000, 1001, 12, 1, 0, 5, bytes(16))
    assert event_text(decode(raw(4, 0, 11, 0xAB, 54, body, SYN))) == (
        "trace, to-endpoint: from endpoint 11 10.0.0.1:40000 (identity 1000)"
        " to endpoint 12 10.0.0.2:80 (identity 1001) tcp SYN, established, ifindex 5, flow 0xab"
    )


class Known:
    """Names of an endpoint, an identity and two addresses."""

    def endpoint(self, number: int) -> str:
        return {12: "shop/web"}.get(number, "")

    def identity(self, number: int) -> str:
        return {1000: "app=client"}.get(number, "")

    def address(self, address: str) -> str:
        return {"10.0.0.1": "shop/client", "10.96.0.10": "shop/web"}.get(address, "")


def test_what_a_receiver_drops_is_to_it_and_not_from_it() -> None:
    body = struct.pack("<IIIHBbI", 1000, 1001, 12, 0, 0, 0, 5)
    assert event_text(decode(raw(1, 133, 12, 0xAB, 54, body, SYN)), Known()) == (
        "drop, Policy denied: from shop/client 10.0.0.1:40000 (identity 1000 app=client)"
        " to shop/web 10.0.0.2:80 (identity 1001) tcp SYN, at shop/web, ifindex 5, flow 0xab"
    )


def test_a_source_that_was_translated_is_shown() -> None:
    body = struct.pack("<IIHBBI16s", 1000, 2, 0, 0, 0, 0, bytes((10, 0, 0, 9)) + bytes(12))
    assert event_text(decode(raw(4, 11, 12, 0xAB, 54, body, SYN))).endswith(
        "tcp SYN, new, source was 10.0.0.9, flow 0xab"
    )


@pytest.mark.parametrize(
    ("verdict", "audited", "action"),
    [
        (0, 0, "allowed"),
        (10001, 0, "redirected to the proxy at port 10001"),
        (-133, 0, "denied (Policy denied)"),
        (-181, 1, "allowed by audit mode, else denied (Policy denied by denylist)"),
    ],
)
def test_a_verdict_notification_is_printed(verdict: int, audited: int, action: str) -> None:
    body = struct.pack("<IiHBBB3x", 1000, verdict, 80, 6, 1 | 2 << 3 | audited << 6, 0)
    assert event_text(decode(raw(5, 0, 11, 0xAB, 54, body, SYN))) == (
        f"verdict, ingress of endpoint 11 {action}: from 10.0.0.1:40000 (identity 1000)"
        " to endpoint 11 10.0.0.2:80 tcp SYN, match L3-L4"
    )


def test_lost_events_are_printed() -> None:
    assert event_text(Lost(7, 1)) == "lost 7 events on CPU 1"
    assert event_text(Lost(7)) == "lost 7 events: the client reads too slowly"


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (
            Ether() / IPv6(src="fd00::1", dst="fd00::2") / UDP(sport=1, dport=53),
            "from [fd00::1]:1 to [fd00::2]:53 udp",
        ),
        (
            Ether() / IP(src="10.0.0.1", dst="10.0.0.2") / SCTP(sport=1, dport=3868),
            "from 10.0.0.1:1 to 10.0.0.2:3868 sctp",
        ),
        (
            Ether() / IP(src="10.0.0.1", dst="10.0.0.2") / ICMP(),
            "from 10.0.0.1 to 10.0.0.2 icmp type 8 code 0",
        ),
        (Ether() / IP(src="10.0.0.1", dst="10.0.0.2", frag=3, proto=17), "from 10.0.0.1 to 10.0.0.2 udp"),
        (Ether() / IP(src="10.0.0.1", dst="10.0.0.2", proto=47), "from 10.0.0.1 to 10.0.0.2 protocol 47"),
        (Ether() / ARP(), "from an unknown address to an unknown address arp"),
        (Ether(type=0x88CC), "from an unknown address to an unknown address ethertype 0x88cc"),
    ],
)
def test_a_packet_is_printed(packet: Ether, words: str) -> None:
    body = struct.pack("<IIIHBbI", 0, 0, 0, 0, 0, 0, 5)
    line = event_text(decode(raw(1, 133, 0, 0xAB, 54, body, bytes(packet))))
    assert line == f"drop, Policy denied: {words}, ifindex 5, flow 0xab"


def test_every_reason_has_a_name() -> None:
    assert reason_name(0) == "Success"
    assert reason_name(133) == "Policy denied"
    assert reason_name(250) == "250, 0"
    assert len(set(DROP_REASONS.values())) == len(DROP_REASONS)
