"""Datapath records become the flows of Cilium's Hubble."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from cells.hubble.codec import to_json
from cells.hubble.flow import DebugEvent
from cells.hubble.parser import (
    EmptyRecord,
    MalformedRecord,
    Parser,
    SkippedRecord,
    UnknownRecord,
)
from cells.hubble.parser.packet import PacketError, read_packet
from tests.unit.hubble.recordings import recorded
from tests.unit.hubble.stamped import ORIGIN, STAMP
from tests.unit.hubble.worlds import world

ERRORS = {
    "decode": MalformedRecord,
    "empty-data": EmptyRecord,
    "invalid-type": UnknownRecord,
    "event-skipped": SkippedRecord,
}
NO_ADDRESS = "sock/cgroup1004/"
"""Its pod has an address that is none, which the agent's tables cannot hold."""
CASES = [
    case
    for name in ("trace", "drop", "verdict", "debug", "packet", "errors", "sock")
    for case in recorded(f"parser_{name}")
    if "perf" in case and not case["name"].startswith(NO_ADDRESS)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_record_becomes_the_recorded_event(case: dict[str, Any]) -> None:
    parser = Parser(ORIGIN, skip_unknown_cgroup_ids=case.get("skip_unknown_cgroup_ids", True))
    data, resolver, result = bytes.fromhex(case["perf"]), world(case["world"]), case["result"]
    if "error" in result:
        with pytest.raises(ERRORS[result["error"]]):
            parser.read(data, case["cpu"], STAMP, resolver)
        return
    event = parser.read(data, case["cpu"], STAMP, resolver)
    name = "debug_event" if isinstance(event, DebugEvent) else "flow"
    assert {name: to_json(event)} == result


@pytest.mark.parametrize(
    ("words", "options", "fault"),
    [
        (6, "01010101", ""),
        (7, "020405b400ffffff", ""),
        (7, "020405b4", "TCP data offset greater than packet length"),
        (6, "02000101", "Invalid TCP option length 0 of 4 bytes"),
        (6, "02060101", "Invalid TCP option length 6 of 4 bytes"),
        (6, "01010102", "Invalid TCP option length 0 of 1 bytes"),
    ],
)
def test_malformed_tcp_options_are_refused(words: int, options: str, fault: str) -> None:
    segment = struct.pack(">HHIIBBHHH", 40000, 80, 1, 0, words << 4, 2, 0, 0, 0) + bytes.fromhex(options)
    header = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(segment), 1, 0, 64, 6, 0) + bytes(8)
    data = bytes.fromhex("02000000000b02000000000a0800") + header + segment
    if fault:
        with pytest.raises(PacketError, match=fault):
            read_packet(data)
    else:
        assert read_packet(data).summary == "TCP Flags: SYN"
