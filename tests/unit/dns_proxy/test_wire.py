"""Parsing DNS messages, hostile ones too."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.dns import DNS, DNSQR, DNSRR, DNSRRMX, DNSRROPT, dns_compress

from cells.proxy.dns.wire import (
    WireError,
    error_response,
    parsed_part,
    read_answer,
    read_query,
    refusal,
    sanitized_query,
    truncated,
    udp_size,
    uncompressed,
)
from tests.support.dns import query
from tests.support.examples import scaled

WEB = "web.example.org"


def answer(*records: DNSRR, code: int = 0, name: str = WEB) -> bytes:
    message = DNS(id=7, qr=1, rd=1, ra=1, rcode=code, qd=DNSQR(qname=name), an=list(records))
    return bytes(dns_compress(message))


def test_a_query_is_its_name_in_lower_case_and_its_type() -> None:
    asked = query("WEB.Example.org")
    found = read_query(asked)
    assert (found.name, found.type, found.end) == (f"{WEB}.", 1, len(asked))


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


def test_records_of_names_that_the_question_does_not_lead_to_are_left_out() -> None:
    data = answer(
        DNSRR(rrname="other.example.net", type="A", ttl=1, rdata="192.0.2.66"),
        DNSRR(rrname="EDGE.example.net", type="A", ttl=60, rdata="192.0.2.1"),  # before what leads to it
        DNSRR(rrname=WEB, type="CNAME", ttl=50, rdata="edge.EXAMPLE.net"),
        DNSRR(rrname="other.example.net", type="CNAME", ttl=1, rdata="third.example.net"),
        DNSRR(rrname="third.example.net", type="AAAA", ttl=1, rdata="2001:db8::66"),
    )
    found = read_answer(data)
    assert (found.addresses, found.ttl) == ((IPv4Address("192.0.2.1"),), 50)


def test_names_that_lead_to_each_other_end() -> None:
    data = answer(
        DNSRR(rrname=WEB, type="CNAME", ttl=30, rdata="edge.example.net"),
        DNSRR(rrname="edge.example.net", type="CNAME", ttl=20, rdata=WEB),
        DNSRR(rrname=WEB, type="A", ttl=60, rdata="192.0.2.1"),
    )
    assert (read_answer(data).addresses, read_answer(data).ttl) == ((IPv4Address("192.0.2.1"),), 20)


def test_a_refused_response_repeats_the_question_and_has_the_code() -> None:
    asked = query(WEB)
    reply = DNS(refusal(asked + b"more", len(asked), 5))
    assert (reply.id, reply.qr, reply.rd, reply.rcode, reply.ancount) == (7, 1, 1, 5, 0)
    assert reply.qd[0].qname == f"{WEB}.".encode()


def flagged(message: bytes, flags: int) -> bytes:
    return message[:2] + struct.pack(">H", flags) + message[4:]


def test_invalid_queries_get_formerr_and_other_operations_notimp() -> None:
    asked = query(WEB)
    update = DNS(error_response(flagged(asked, 0x2800)))
    assert (update.id, update.qr, update.opcode, update.rcode, update.qdcount) == (7, 1, 5, 4, 0)
    cut = DNS(error_response(asked[:-1]))
    assert (cut.id, cut.qr, cut.rd, cut.rcode, cut.qdcount) == (7, 1, 1, 1, 0)
    two = asked[:5] + b"\2" + asked[6:] + asked[12:]
    assert (DNS(error_response(two)).rcode, DNS(error_response(two)).qdcount) == (1, 0)
    record_cut = DNS(error_response(asked[:11] + b"\1" + asked[12:] + b"\0"))
    assert (record_cut.rcode, record_cut.qd[0].qname) == (1, f"{WEB}.".encode())


def test_answers_and_less_than_a_header_get_no_reply() -> None:
    assert error_response(flagged(query(WEB), 0x8180)) is None
    assert error_response(query(WEB)[:11]) is None


def test_notify_is_a_query() -> None:
    asked = flagged(query(WEB), 0x2400)
    found = read_query(asked)
    assert found.name == f"{WEB}."
    assert DNS(sanitized_query(asked, found)).opcode == 4


def test_an_error_without_a_question_answers_any_query() -> None:
    error = read_answer(struct.pack(">HHHHHH", 7, 0x8081, 0, 0, 0, 0))
    assert (error.code, error.addresses, error.size) == (1, (), 12)
    assert error.is_to(read_query(query(WEB)))
    with pytest.raises(WireError, match="0 questions"):
        read_answer(struct.pack(">HHHHHH", 7, 0x8080, 0, 0, 0, 0))


def test_names_are_written_out_where_nothing_may_be_compressed() -> None:
    data = answer(
        DNSRR(rrname=WEB, type="CNAME", ttl=30, rdata=f"edge.{WEB}"),
        DNSRRMX(rrname=f"edge.{WEB}", ttl=5, preference=10, exchange=f"mail.{WEB}"),
    )
    whole = uncompressed(data)
    assert len(whole) > len(data)
    assert b"\xc0" not in whole
    read = DNS(whole)
    assert [record.rrname for record in read.an] == [f"{WEB}.".encode(), f"edge.{WEB}.".encode()]
    assert (read.an[0].rdata, read.an[1].exchange) == (f"edge.{WEB}.".encode(), f"mail.{WEB}.".encode())
    cut = DNS(truncated(whole, read_query(query(WEB)).end))
    assert (cut.tc, cut.ancount) == (1, 0)


def test_edns_gives_the_maximum_response_size() -> None:
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
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\x13" + RECORD,  # a record's name that points at itself
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\x15" + RECORD + b"\1b\0",  # forward
        HEADER + b"\1a\0\0\1\0\1" + b"\1b\xc0\x13" + RECORD,  # a loop by way of a label
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\xff" + RECORD,  # behind the end
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\x0c\0\1\0\1\0\0\0\5\0\5abcde",  # an A record of five bytes
        HEADER + b"\1a\0\0\1\0\1" + b"\xc0\x0c\0\1\0\1\0\0\0\5\0\4abc",
        struct.pack(">HHHHHH", 7, 0x8000, 2, 0, 0, 0) + b"\1a\0\0\1\0\1" * 2,
    ],
)
def test_an_invalid_response_raises_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        read_answer(data)


@settings(max_examples=scaled(60))
@given(st.binary(max_size=200), st.integers(0, 0xFFFF))
def test_bytes_of_any_kind_are_read_or_refused(data: bytes, flags: int) -> None:
    for message in (data, HEADER + b"\1a\0\0\1\0\1" + data, HEADER[:2] + struct.pack(">H", flags) + data):
        for read in (read_query, read_answer, uncompressed):
            try:
                read(message)
            except WireError:
                continue


def anew(asked: bytes) -> bytes:
    return sanitized_query(asked, read_query(asked))


def test_a_server_gets_the_question_and_nothing_that_follows_it() -> None:
    asked = query("WEB.Example.org")
    assert anew(asked) == asked, "the case of letters too, which resolvers compare"
    assert anew(asked + b"x" * 320) == asked
    record = bytes(DNSRR(rrname="x.org", type="TXT", rdata="secret"))
    for section in range(3):
        counts = struct.pack(">HHH", *(int(section == one) for one in range(3)))
        assert anew(asked[:6] + counts + asked[12:] + record) == asked
    noisy = asked[:2] + (int.from_bytes(asked[2:4], "big") | 0x064F).to_bytes(2, "big") + asked[4:]
    assert anew(noisy) == asked, "flags that only an answer has"


def test_a_question_with_a_compressed_name_is_written_uncompressed() -> None:
    asked = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"\xc0\x04" + struct.pack(">HH", 1, 1)
    assert b"\xc0" not in anew(asked)
    assert read_query(anew(asked)).name == read_query(asked).name


def test_queries_and_answers_that_differ_in_their_ids_are_read_alike() -> None:
    for number in (7, 0x0161):
        asked = query(WEB, number=number)
        assert anew(asked) == asked
        assert read_query(asked) == read_query(query(WEB))
    in_id = struct.pack(">HHHHHH", 0x0161, 0x100, 1, 0, 0, 0) + b"\xc0\0" + struct.pack(">HH", 1, 1)
    assert read_query(anew(in_id)).name == read_query(in_id).name, "a name that points at the id"


def test_of_edns_a_server_gets_what_is_understood() -> None:
    def opt(*options: tuple[int, bytes], ttl: int = 0x8000) -> bytes:
        value = b"".join(struct.pack(">HH", code, len(data)) + data for code, data in options)
        return b"\0" + struct.pack(">HHIH", 41, 1232, ttl, len(value)) + value

    plain = query(WEB)
    edns = plain[:10] + b"\0\1" + plain[12:]
    cookie, subnet = (10, b"12345678"), (8, b"\0\1\x18\0\xc0\0\2")
    assert anew(edns + opt(cookie, subnet)) == edns + opt(cookie, subnet)
    assert anew(edns + opt((65001, b"secret"), cookie, (12, b"padding")) + b"more") == edns + opt(cookie)
    assert anew(edns + opt((10, b"x" * 300))) == edns + opt()
    assert anew(edns + opt(ttl=0xFF01FFFF)) == edns + opt(ttl=0x00018000)
    for wrong in (opt(cookie)[:-1], opt((10, b"12"))[:-4] + b"\0\x0a\0\x09", b"\1x" + opt()):
        with pytest.raises(WireError):
            anew(edns + wrong)


@pytest.mark.parametrize("left_out", [0, 5, 6, 10, 21])
def test_a_truncated_answer_with_records_cut_off_reaches_the_client(left_out: int) -> None:
    whole = bytearray(answer(DNSRR(rrname=WEB, type="A", ttl=30, rdata="192.0.2.1")) + bytes(5))
    whole[2] |= 0x02
    whole[7] = 2
    data = bytes(whole[: len(whole) - left_out])
    found = read_answer(data)
    assert (found.name, found.addresses) == (f"{WEB}.", ())
    read = DNS(parsed_part(data, found))
    assert (read.id, read.tc, read.ancount, read.qd[0].qname) == (7, 1, 0, f"{WEB}.".encode())
    whole[2] &= ~0x02
    with pytest.raises(WireError):
        read_answer(bytes(whole[: len(whole) - left_out]))


def test_a_question_of_another_class_is_read() -> None:
    asked = bytes(DNS(id=7, rd=1, qd=DNSQR(qname="version.bind", qtype="TXT", qclass=3)))
    found = read_query(asked)
    assert (found.name, found.type) == ("version.bind.", 16)
    assert sanitized_query(asked, found)[12:] == asked[12:]
    text = DNSRR(rrname="version.bind", type="TXT", rclass=3, rdata="9.18")
    reply = DNS(id=7, qr=1, qd=DNSQR(qname="version.bind", qtype="TXT", qclass=3), an=[text])
    assert read_answer(bytes(reply)).name == "version.bind."


def test_bytes_after_the_last_record_are_ignored() -> None:
    data = answer(DNSRR(rrname=WEB, type="A", ttl=60, rdata="192.0.2.1"))
    assert read_answer(data + b"more").size == len(data)
    with_opt = data[:10] + b"\0\1" + data[12:] + bytes(DNSRROPT(rclass=1232))
    assert read_answer(with_opt + b"more").size == len(with_opt)
