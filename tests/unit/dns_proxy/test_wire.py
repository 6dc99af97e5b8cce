"""DNS messages: what a proxy reads in them, and what it makes of hostile ones."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.dns import DNS, DNSQR, DNSRR, DNSRRMX, DNSRROPT, dns_compress

from cells.proxy.dns.wire import (
    WireError,
    read_answer,
    read_query,
    refusal,
    truncated,
    udp_size,
    written_out,
)
from tests.support.dns import query

WEB = "web.example.org"


def answer(*records: DNSRR, code: int = 0, name: str = WEB) -> bytes:
    message = DNS(id=7, qr=1, rd=1, ra=1, rcode=code, qd=DNSQR(qname=name), an=list(records))
    return bytes(dns_compress(message))


def test_a_query_is_its_name_in_lower_case_and_its_type() -> None:
    asked = query("WEB.Example.org")
    found = read_query(asked)
    assert (found.id, found.name, found.type, found.end) == (7, f"{WEB}.", 1, len(asked))


def test_octets_that_no_host_name_has_are_written_as_numbers() -> None:
    asked = query("x").replace(b"\1x", b"\3a.\xff")
    assert read_query(asked).name == "a\\046\\255."


def test_an_answer_has_the_addresses_at_the_end_of_a_chain_and_the_least_ttl() -> None:
    data = answer(
        DNSRR(rrname=WEB, type="CNAME", ttl=30, rdata="edge.example.net"),
        DNSRR(rrname="edge.example.net", type="A", ttl=60, rdata="192.0.2.1"),
        DNSRR(rrname="edge.example.net", type="AAAA", ttl=60, rdata="2001:db8::1"),
        DNSRR(rrname="edge.example.net", type="A", ttl=60, rdata="192.0.2.1"),
    )
    found = read_answer(data)
    assert found.addresses == (IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1"))
    assert (found.name, found.code, found.ttl) == (f"{WEB}.", 0, 30)


def test_a_refusal_repeats_the_question_and_says_why() -> None:
    asked = query(WEB)
    told = DNS(refusal(asked + b"more", len(asked), 5))
    assert (told.id, told.qr, told.rd, told.rcode, told.ancount) == (7, 1, 1, 5, 0)
    assert told.qd[0].qname == f"{WEB}.".encode()


def test_names_are_written_out_where_nothing_may_be_compressed() -> None:
    data = answer(
        DNSRR(rrname=WEB, type="CNAME", ttl=30, rdata=f"edge.{WEB}"),
        DNSRRMX(rrname=f"edge.{WEB}", ttl=5, preference=10, exchange=f"mail.{WEB}"),
    )
    whole = written_out(data)
    assert len(whole) > len(data)
    assert b"\xc0" not in whole
    read = DNS(whole)
    assert [record.rrname for record in read.an] == [f"{WEB}.".encode(), f"edge.{WEB}.".encode()]
    assert (read.an[0].rdata, read.an[1].exchange) == (f"edge.{WEB}.".encode(), f"mail.{WEB}.".encode())
    cut = DNS(truncated(whole, read_query(query(WEB)).end))
    assert (cut.tc, cut.ancount) == (1, 0)


def test_edns_says_how_long_an_answer_may_be() -> None:
    plain = query(WEB)
    edns = bytes(DNS(id=7, rd=1, qd=DNSQR(qname=WEB), ar=DNSRROPT(rclass=1232)))
    assert udp_size(plain, len(plain)) == 512
    assert udp_size(edns, len(plain)) == 1232


HEADER = struct.pack(">HHHHHH", 7, 0x8000, 1, 1, 0, 0)
RECORD = b"\0\1\0\1\0\0\0\5\0\4\xc0\0\2\1"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEADER[:11],
        HEADER + b"\xc0\x0c\0\1\0\1",  # a name that points at itself
        HEADER + b"\xc0\x20\0\1\0\1" + bytes(40),  # forward
        HEADER + b"\x3f" + b"a" * 10,
        HEADER + b"\x80a\0\0\1\0\1",
        HEADER + (b"\x3f" + b"a" * 63) * 5 + b"\0\0\1\0\1",
        HEADER + b"\1a\0\0\1\0\3",  # of another class
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\x13" + RECORD,  # a record's name that points at itself
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\x15" + RECORD + b"\1b\0",  # forward
        HEADER + b"\1a\0\0\1\0\1" + b"\1b\xc0\x13" + RECORD,  # a loop by way of a label
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\xff" + RECORD,  # behind the end
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\x0c\0\1\0\1\0\0\0\5\0\5abcde",  # an A record of five bytes
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\x0c\0\1\0\1\0\0\0\5\0\4abc",
        struct.pack(">HHHHHH", 7, 0x8000, 2, 0, 0, 0) + b"\1a\0\0\1\0\1" * 2,
    ],
)
def test_what_is_no_answer_is_told_so(data: bytes) -> None:
    with pytest.raises(WireError):
        read_answer(data)


@settings(max_examples=60)
@given(st.binary(max_size=200), st.integers(0, 0xFFFF))
def test_bytes_of_any_kind_are_read_or_refused(data: bytes, flags: int) -> None:
    for message in (data, HEADER + b"\1a\0\0\1\0\1" + data, HEADER[:2] + struct.pack(">H", flags) + data):
        for read in (read_query, read_answer, written_out):
            try:
                read(message)
            except WireError:
                continue
