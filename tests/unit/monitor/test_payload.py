"""The bytes of the monitor socket, and those that Cilium's own client has read."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.observe.events import AgentNotification, Drop, Lost, Raw, Sample, Trace, decode
from cells.observe.monitor import PREFACE, MonitorProtocolError, Payloads, encode
from tests.support.recordings import recordings

RECORDED = recordings("dbg") / "monitor_json.json"
"""Frames a server sent, which ``cilium-dbg monitor -j`` of Cilium 1.17 printed."""

EVENTS = st.one_of(
    st.builds(Sample, st.integers(0, 511), st.binary(max_size=300)),
    st.builds(Lost, st.integers(1, 2**64 - 1), st.integers(0, 511)),
)


def frames() -> dict[str, bytes]:
    recorded = json.loads(RECORDED.read_text())["monitor_socket"]["frames_sent"]
    return {frame["event"]: bytes.fromhex(frame["gob_bytes_hex"]) for frame in recorded}


def data_of(name: str) -> bytes:
    recorded = json.loads(RECORDED.read_text())["monitor_socket"]["frames_sent"]
    return bytes.fromhex(next(each["payload_data_hex"] for each in recorded if each["event"] == name))


def test_a_connection_begins_as_ciliums_client_has_read_it() -> None:
    assert frames()["agent_started"].startswith(PREFACE)


def test_events_are_sent_as_ciliums_client_has_read_them() -> None:
    known = frames()
    assert encode(Sample(1, data_of("drop"))) == known["drop"]
    assert encode(Sample(0, data_of("trace_to_lxc"))) == known["trace_to_lxc"]
    assert encode(Lost(7, 1)) == known["lost"]


def test_notifications_are_sent_as_ciliums_client_has_read_them() -> None:
    started = AgentNotification(2, '{"time":"2024-12-18T10:00:00Z"}')
    assert PREFACE + encode(Sample(0, started.data)) == frames()["agent_started"]
    assert decode(data_of("agent_started")) == started


@pytest.mark.parametrize("data", [b"\x82", b"\x82gob", b"\x82" + bytes(20)], ids=bytes.hex)
def test_a_notification_that_cannot_be_read_stays_raw(data: bytes) -> None:
    assert decode(data) == Raw(data)


def test_monitor_messages_of_cilium_are_decoded() -> None:
    payloads = Payloads()
    agent, drop, trace, lost = payloads.feed(b"".join(frames().values()))
    assert isinstance(agent, Sample)
    assert isinstance(drop, Sample)
    assert isinstance(trace, Sample)
    assert (type(decode(drop.data)), type(decode(trace.data)), lost) == (Drop, Trace, Lost(7, 1))


@given(st.lists(EVENTS), st.integers(1, 50))
def test_what_is_sent_is_read_in_pieces_of_any_size(events: list[Sample | Lost], size: int) -> None:
    sent = PREFACE + b"".join(map(encode, events))
    payloads = Payloads()
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert [event for piece in pieces for event in payloads.feed(piece)] == events


@given(st.binary(min_size=1))
def test_nonsense_is_refused_or_waited_on_but_never_shown(data: bytes) -> None:
    with suppress(MonitorProtocolError):
        assert list(Payloads().feed(data)) == []


@pytest.mark.parametrize("rest", [b"\x03\xff\x84\x01", b"\x05\xff\x84\x09\x01\x00", b"\x02\x04\x00"])
def test_a_broken_event_is_refused(rest: bytes) -> None:
    with pytest.raises(MonitorProtocolError):
        list(Payloads().feed(PREFACE + rest))
