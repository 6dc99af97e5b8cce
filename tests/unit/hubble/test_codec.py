"""Protobuf messages are encoded as by Go: against recorded bytes, JSON and field masks."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import (
    any_pb2,
    descriptor_pool,
    field_mask_pb2,
    message_factory,
    timestamp_pb2,
    wrappers_pb2,
)

from cells.hubble import flow
from cells.hubble.codec import (
    DecodeError,
    FieldMask,
    InvalidFieldMask,
    WireMessage,
    decode,
    encode,
    from_json,
    to_json,
)
from cells.hubble.filters.descriptors import file_descriptors
from cells.hubble.flow import TCP, Flow, FlowFilter, Layer4, LostEvent
from cells.hubble.rpc import observer
from cells.hubble.rpc.observer import GetFlowsRequest
from tests.unit.hubble.recordings import recorded, recording

MESSAGES = {
    cls.protobuf: cls
    for module in (flow, observer)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, WireMessage) and cls.protobuf
}


@pytest.mark.parametrize("case", recorded("wire"), ids=lambda case: case["name"])
def test_recorded_bytes_and_json_are_the_same_message(case: dict[str, Any]) -> None:
    cls, data = MESSAGES[case["message"]], bytes.fromhex(case["wire"])
    message = decode(cls, data)
    assert to_json(message) == case["json"]
    assert from_json(cls, case["json"]) == message
    assert decode(cls, encode(message)) == message
    assert len(encode(message)) == len(data)


@pytest.mark.parametrize("case", recorded("fieldmask"), ids=lambda case: case["name"])
def test_a_field_mask_keeps_what_it_names(case: dict[str, Any]) -> None:
    flows = [from_json(Flow, each) for each in recording("fieldmask")["flows"]]
    paths = case["paths"] or []
    if "error" in case:
        with pytest.raises(InvalidFieldMask, match=case["error"]):
            FieldMask.parse(paths, Flow)
        return
    mask = FieldMask.parse(paths, Flow)
    assert bool(mask) == case["active"]
    masked = [mask.apply(flows[index]) for index in (0, 1, 2, 0)]
    assert [to_json(each) for each in masked] == case["out"]


def test_a_mask_of_two_members_of_a_oneof_keeps_the_one_that_is_set() -> None:
    mask = FieldMask.parse(["l4.UDP.source_port", "l4.TCP.source_port", "l7.dns", "l7.http.url"], Flow)
    udp = Flow(l4=Layer4(UDP=flow.UDP(source_port=53)), l7=flow.Layer7(http=flow.HTTP(url="/a", code=200)))
    selected = Flow(l4=udp.l4, l7=flow.Layer7(http=flow.HTTP(url="/a")))
    assert mask.apply(udp) == selected
    assert decode(Flow, encode(mask.apply(udp))) == selected


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\x05ab", b"\x80" * 11, b"\x0b", b"\x0f", b"\x92\x02\x02\xff\xfe", b"\x00\x01"],
    ids=["no size", "short", "overlong number", "group", "wire type 7", "no UTF-8", "field 0"],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(Flow, data)


def test_unknown_fields_are_skipped() -> None:
    known = encode(Flow(uuid="a"))
    others = b"\xfa\x7f\x03abc" + b"\xf8\x7f\x05" + b"\xfd\x7f1234" + b"\xf9\x7f12345678"
    assert decode(Flow, others + known) == Flow(uuid="a")


def test_the_last_member_of_a_oneof_counts_and_messages_merge() -> None:
    both = encode(Layer4(ICMPv4=flow.ICMPv4(type=3))) + encode(Layer4(TCP=TCP(source_port=1)))
    assert decode(Layer4, both) == Layer4(TCP=TCP(source_port=1))
    merged = encode(Layer4(TCP=TCP(source_port=1))) + encode(Layer4(TCP=TCP(destination_port=2)))
    assert decode(Layer4, merged) == Layer4(TCP=TCP(source_port=1, destination_port=2))


def test_numbers_packed_or_not_are_the_same() -> None:
    assert decode(FlowFilter, b"\x9a\x01\x02\x01\x02") == decode(FlowFilter, b"\x98\x01\x01\x98\x01\x02")


def test_zero_that_is_set_differs_from_absent() -> None:
    assert decode(Flow, encode(Flow(is_reply=False, time=0))) == Flow(is_reply=False, time=0)
    assert to_json(LostEvent(cpu=0)) == {"cpu": 0}
    assert to_json(Flow(is_reply=False, time=0)) == {"is_reply": False, "time": "1970-01-01T00:00:00Z"}


def test_negative_numbers_keep_their_sign() -> None:
    message = flow.EventTypeFilter(type=-1, sub_type=-(1 << 31))
    assert decode(flow.EventTypeFilter, encode(message)) == message


@pytest.mark.parametrize(
    "tree",
    [
        [],
        {"nope": 1},
        {"number": -1},
        {"number": True},
        {"number": "1.5"},
        {"first": "yes"},
        {"since": "yesterday"},
        {"since": "2023-02-30T00:00:00Z"},
        {"whitelist": {}},
        {"whitelist": [{"verdict": ["NONE"]}]},
        {"whitelist": [{"sourcePod": [1]}]},
        {"whitelist": [{"sourcePod": [], "source_pod": []}]},
    ],
    ids=str,
)
def test_json_of_no_message_is_refused(tree: object) -> None:
    with pytest.raises(DecodeError):
        from_json(GetFlowsRequest, tree)


def test_json_names_may_be_camel_case_and_numbers_texts() -> None:
    tree = {
        "number": "18446744073709551615",
        "since": "2023-11-14T22:13:20.5+01:00",
        "whitelist": [{"sourcePod": ["a"], "verdict": ["DROPPED", 1]}],
        "fieldMask": "source.podName,time",
        "until": None,
    }
    request = from_json(GetFlowsRequest, tree)
    assert (request.number, request.since) == ((1 << 64) - 1, 1_699_996_400_500_000_000)
    assert request.whitelist == (FlowFilter(source_pod=("a",), verdict=(2, 1)),)
    assert request.field_mask == ("source.pod_name", "time")
    assert decode(GetFlowsRequest, encode(request)) == request


def test_protobuf_reads_what_is_written_by_the_descriptors() -> None:
    pool = descriptor_pool.DescriptorPool()
    for known in (any_pb2, field_mask_pb2, timestamp_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    for data in file_descriptors():
        pool.AddSerializedFile(data)
    for case in recorded("wire"):
        message = decode(MESSAGES[case["message"]], bytes.fromhex(case["wire"]))
        cls = message_factory.GetMessageClass(pool.FindMessageTypeByName(case["message"]))
        assert cls.FromString(encode(message)) == cls.FromString(bytes.fromhex(case["wire"]))
    assert pool.FindServiceByName("observer.Observer").methods_by_name["GetFlows"].server_streaming
