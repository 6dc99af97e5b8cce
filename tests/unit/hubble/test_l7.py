"""Proxy log records become the flows of Cilium's Hubble."""

from __future__ import annotations

from typing import Any

import pytest

from cells.hubble.codec import to_json
from cells.hubble.parser import MalformedRecord
from cells.hubble.parser.l7 import (
    AccessLogRecord,
    DNSRecord,
    HTTPRecord,
    KafkaRecord,
    L7Parser,
    OtherRecord,
    Redaction,
    RequestParty,
)
from tests.unit.hubble.recordings import recorded
from tests.unit.hubble.stamped import ORIGIN, STAMP
from tests.unit.hubble.worlds import world


def _party(row: dict[str, Any], version: int) -> RequestParty:
    address = row.get("ipv4" if version == 4 else "ipv6", "")
    return RequestParty(address, row["port"], row["id"], row["identity"], tuple(row.get("labels") or ()))


def _record(row: dict[str, Any]) -> AccessLogRecord:
    version = {0: 4, 1: 6}.get(row["ip_version_enum"], 0)
    dns, http, kafka, other = (row.get(name) for name in ("dns", "http", "kafka", "l7"))
    return AccessLogRecord(
        type=row["type"],
        time=row["timestamp"],
        observation_point=row["observation_point"],
        source=_party(row["source"], version),
        destination=_party(row["destination"], version),
        ip_version=version,
        verdict=row["verdict"],
        transport_protocol=row["transport_protocol"],
        dns=dns
        and DNSRecord(
            query=dns.get("Query", ""),
            addresses=dns.get("IPs") or (),
            ttl=dns.get("TTL", 0),
            aliases=dns.get("CNAMEs") or (),
            observation_source=dns.get("ObservationSource", ""),
            code=dns.get("RCode", 0),
            types=dns.get("QTypes") or (),
            answer_types=dns.get("AnswerTypes") or (),
        ),
        http=http and HTTPRecord(**{key: value for key, value in http.items() if value is not None}),
        kafka=kafka
        and KafkaRecord(
            error_code=kafka["ErrorCode"],
            api_version=kafka["APIVersion"],
            api_key=kafka["APIKey"],
            correlation_id=kafka["CorrelationID"],
            topic=kafka["Topic"]["Topic"],
        ),
        other=other and OtherRecord(other["Proto"], other["Fields"]),
    )


def _redaction(row: dict[str, Any] | None) -> Redaction:
    if row is None:
        return Redaction()
    return Redaction(
        enabled=True,
        url_query=row["http_url_query"],
        user_info=row["http_user_info"],
        kafka_api_key=row["kafka_api_key"],
        headers_allow=frozenset(name.lower() for name in row["http_headers_allow"] or ()),
        headers_deny=frozenset(name.lower() for name in row["http_headers_deny"] or ()),
    )


@pytest.mark.parametrize("case", recorded("parser_l7"), ids=lambda case: case["name"])
def test_records_become_the_recorded_flows(case: dict[str, Any]) -> None:
    parser, resolver = L7Parser(ORIGIN, _redaction(case.get("redact"))), world(case["world"])
    for row, result in zip(case["records"], case["results"], strict=True):
        if "error" in result:
            with pytest.raises(MalformedRecord):
                parser.read(_record(row), STAMP, resolver)
        else:
            assert {"flow": to_json(parser.read(_record(row), STAMP, resolver))} == result
