"""Request log records as events: a gob round trip."""

from __future__ import annotations

import msgspec
import pytest

from cells.observe.events import (
    LookupRecord,
    Party,
    Raw,
    RequestRecord,
    decode,
    event_text,
    lookup_sample,
    request_sample,
)
from cells.observe.events.gob import BYTES, INT, UINT, GobError, Type, encode
from cells.observe.events.gob import decode as read_gob
from cells.observe.monitor import PREFACE

RECORD = RequestRecord(
    answer=True,
    time="2026-11-23T14:00:00.000000001Z",
    ingress=True,
    source=Party("10.0.0.1", 40000, 70000, labels=("k8s:app=client", "k8s:tier")),
    destination=Party("10.0.0.2", 8080, 300, 7),
    verdict="Forwarded",
    code=200,
    method="GET",
    url="http://shop/public/1?x=1",
    protocol="HTTP/1.1",
    headers={"X-Request-Id": ["a", "b"]},
)


@pytest.mark.parametrize(
    "record", [RECORD, msgspec.structs.replace(RECORD, answer=False, code=0, headers={})]
)
def test_an_http_record_is_decoded_as_written(record: RequestRecord) -> None:
    data = request_sample(record)
    assert data[0] == 129
    assert decode(data) == record


def test_a_record_is_a_line() -> None:
    assert event_text(RECORD) == (
        "http response, Forwarded: from endpoint 7 10.0.0.2:8080 (identity 300)"
        " to 10.0.0.1:40000 (identity 70000 k8s:app=client, k8s:tier) GET http://shop/public/1?x=1 => 200"
    )


LOOKUP = LookupRecord(
    answer=True,
    time="2026-11-23T14:00:00.000001Z",
    source=Party("fd00::53", 53, 2, labels=("reserved:world",)),
    destination=Party("fd00::7", 40000, 70000, 7),
    protocol=17,
    verdict="Forwarded",
    query="web.example.org.",
    type=28,
    addresses=("192.0.2.1", "2001:db8::1"),
    ttl=30,
    aliases=("other.example.org.",),
    answer_types=(5, 1, 28),
)


@pytest.mark.parametrize("answer", [True, False])
def test_a_dns_record_is_decoded_as_written(answer: bool) -> None:
    record = msgspec.structs.replace(LOOKUP, answer=answer)
    assert decode(lookup_sample(record)) == record
    line = event_text(record)
    ends = (
        "from [fd00::53]:53 (identity 2 reserved:world) to endpoint 7 [fd00::7]:40000 (identity 70000)"
        " web.example.org. AAAA"
    )
    assert line == (
        f"dns response, Forwarded: {ends} => 192.0.2.1,2001:db8::1, TTL 30, CNAMEs other.example.org."
        if answer
        else f"dns request, Forwarded: {ends}"
    )


def test_types_are_defined_as_go_defines_them() -> None:
    payload = {66: Type("Payload", {"Data": BYTES, "CPU": INT, "Lost": UINT, "Type": INT})}
    assert encode(payload, {}).startswith(PREFACE), "what cilium-dbg reads"


def test_a_truncated_record_is_returned_raw() -> None:
    whole = request_sample(RECORD)
    for size in range(1, len(whole)):
        assert decode(whole[:size]) == Raw(whole[:size])
    with pytest.raises(GobError):
        read_gob(b"\xff")
