"""``hive monitor``: output and errors."""

import base64
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

import pytest

from cells.api.operations.agent import NO_EVENTS
from cells.observe.events import (
    AgentNotification,
    Lost,
    Party,
    RequestRecord,
    Sample,
    decode,
    request_sample,
)
from cells.observe.monitor import PREFACE, SOCKET, encode
from hive.observe.drop_reason import reason_text
from hive.observe.monitor_filter import EventFilter
from tests.support.command_line import Result, hive
from tests.support.recordings import recordings
from tests.unit.hive.stub_agent import stub_agent


def tcp(source: str, destination: str) -> bytes:
    """The first bytes of a SYN to port 80."""
    ends = ip_address(source).packed + ip_address(destination).packed
    header = struct.pack(">BBHHHBBH", 0x45, 0, 40, 1, 0, 64, 6, 0) + ends
    return (
        bytes.fromhex("02000000000b02000000000a0800")
        + header
        + struct.pack(">HHIIBB", 40000, 80, 0, 0, 0x50, 2)
    )


def head(kind: int, subtype: int, source: int, packet: bytes) -> bytes:
    return struct.pack("<BBHIIHH", kind, subtype, source, 0xAB, 60, len(packet), 1)


def drop(source: int, packet: bytes) -> Sample:
    """A drop because of policy, on its way to endpoint 12."""
    return Sample(
        1, head(1, 133, source, packet) + struct.pack("<IIIHBbI", 256, 257, 12, 0, 0, 0, 5) + packet
    )


def trace(source: int, destination: int, packet: bytes) -> Sample:
    """An established packet that is delivered."""
    body = struct.pack("<IIHBBI16s", 256, 257, destination, 1, 0, 5, bytes(16))
    return Sample(0, head(4, 0, source, packet) + body + packet)


def verdict(endpoint: int, packet: bytes) -> Sample:
    """An incoming packet that is allowed."""
    body = struct.pack("<IiHBBB3x", 256, 0, 80, 6, 1 | 1 << 3, 0)
    return Sample(0, head(5, 0, endpoint, packet) + body + packet)


ONE, OTHER = tcp("10.0.0.1", "10.0.0.2"), tcp("10.0.0.3", "10.0.0.4")
EVENTS: list[Sample | Lost] = [drop(11, ONE), trace(13, 14, OTHER), verdict(14, OTHER), Lost(7, 1)]


@contextmanager
def agent(directory: Path, sent: bytes) -> Iterator[Path]:
    """A monitor socket that sends this to its first client, and then closes; the API socket's path."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / SOCKET))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(sent)

        serving = threading.Thread(target=serve)
        serving.start()
        yield directory / "cilium.sock"
        serving.join()


def watch(
    capsys: pytest.CaptureFixture[str],
    directory: Path,
    *options: str,
    sent: Sequence[Sample | Lost] = EVENTS,
) -> Result:
    with agent(directory, PREFACE + b"".join(map(encode, sent))) as path:
        return hive(capsys, "monitor", "--no-rules", "--numeric", "-H", path, *options)


def test_events_are_shown_a_line_each_and_losses_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = watch(capsys, tmp_path)
    times, texts = zip(*(line.split(" ", 1) for line in result.out.splitlines()), strict=True)
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d[.]\d\d\d", time) for time in times), times
    assert list(texts) == [
        (
            "drop, Policy denied: from endpoint 11 10.0.0.1:40000 (identity 256)"
            " to endpoint 12 10.0.0.2:80 (identity 257) tcp SYN, at endpoint 11, ifindex 5, flow 0xab"
        ),
        (
            "trace, to-endpoint: from endpoint 13 10.0.0.3:40000 (identity 256)"
            " to endpoint 14 10.0.0.4:80 (identity 257) tcp SYN, established, ifindex 5, flow 0xab"
        ),
        (
            "verdict, ingress of endpoint 14 allowed: from 10.0.0.3:40000 (identity 256)"
            " to endpoint 14 10.0.0.4:80 tcp SYN, match L3-Only"
        ),
        "lost 7 events on CPU 1",
    ]
    assert result.code == 1
    assert result.err.splitlines() == [
        "Listening for events; press ctrl-C to quit",
        f"{reason_text(133)} (hive drop-reason)",
        "hive: the agent has closed the connection after 3 events (7 lost): did it stop?",
    ]


def test_control_characters_of_requests_and_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RequestRecord(
        answer=False,
        time="2026-11-28T08:00:00Z",
        ingress=True,
        source=Party("10.0.0.1", 4000, 256),
        destination=Party("10.0.0.2", 80, 257),
        verdict="Forwarded",
        method="GET\x1b]0;pwned\x07\r\x9b2J",
        url="http://web/",
        protocol="HTTP/1.1",
    )
    result = watch(capsys, tmp_path, sent=[Sample(0, request_sample(record))])
    assert r"^[]0;pwned\u0007\r\u009b2J" in result.out
    assert set(filter(lambda one: not one.isprintable(), result.out)) == {"\n"}


PODS = [
    {"id": number, "status": {"external-identifiers": {"pod-name": name}}}
    for number, name in ((11, "shop/web-0"), (14, "shop/db-0"))
]
IPS = [{"cidr": "10.0.0.1/32", "identity": 256, "metadata": {"namespace": "shop", "name": "web-0"}}]
WEB = {
    "frontend-address": {"ip": "10.0.0.2"},
    "flags": {"type": "ClusterIP", "name": "web", "namespace": "shop"},
}
NAMES = {
    "/v1/endpoint": (200, PODS),
    "/v1/ip": (200, IPS),
    "/v1/service": (200, [{"spec": WEB}]),
    "/v1/identity": (200, [{"id": 256, "labels": ["k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"]}]),
    "/v1/cluster/nodes": (
        200,
        {"nodes-added": [{"name": "default/one", "primary-address": {"ipv4": {"ip": "10.0.0.3"}}}]},
    ),
}


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--pod", "shop/web-0"], ["drop"]),
        (["--pod", "db-0"], ["trace", "verdict"]),
        (["--pod", "web-0", "--pod", "db-0"], ["drop", "trace", "verdict"]),
        (["--pod", "other/db-0"], []),
        (["--namespace", "shop"], ["drop", "trace", "verdict"]),
        (["--namespace", "other"], []),
        (["--namespace", "shop", "--pod", "web-0", "--verdict", "forwarded"], []),
        (["--verdict", "dropped"], ["drop"]),
        (["--verdict", "forwarded"], ["trace", "verdict"]),
        (["--verdict", "audit"], []),
        (["--pod", "db-0", "-n", "-t", "trace"], ["trace"]),
    ],
)
def test_events_are_filtered_by_pod_namespace_and_verdict(
    options: list[str], shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, NAMES), agent(tmp_path, PREFACE + b"".join(map(encode, EVENTS))) as path:
        result = hive(capsys, "monitor", "--no-rules", "-H", path, *options)
    kinds = [re.split(r"[ ,]", line)[1] for line in result.out.splitlines()]
    assert kinds == [*shown, "lost"]


def test_pods_services_nodes_and_identities_have_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, NAMES), agent(tmp_path, PREFACE + b"".join(map(encode, EVENTS))) as path:
        result = hive(capsys, "monitor", "--no-rules", "-H", path)
    dropped, traced, decided, _ = (line.split(" ", 1)[1] for line in result.out.splitlines())
    assert dropped.startswith(
        "drop, Policy denied: from shop/web-0 10.0.0.1:40000 (identity 256 app=web)"
        " to shop/web 10.0.0.2:80 (identity 257) tcp SYN, at shop/web-0,"
    )
    assert "from node one 10.0.0.3:40000 (identity 256 app=web) to shop/db-0 10.0.0.4:80" in traced
    assert decided.startswith("verdict, ingress of shop/db-0 allowed: from node one 10.0.0.3:40000")


def test_json_has_the_whole_time_and_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, NAMES), agent(tmp_path, PREFACE + b"".join(map(encode, EVENTS))) as path:
        result = hive(capsys, "monitor", "--no-rules", "-o", "json", "--from", "web-0", "-H", path)
    line = json.loads(result.out.splitlines()[0])
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert (line["type"], line["names"]) == ("drop", {"src": "shop/web-0", "dst": "shop/web"})
    assert [json.loads(each)["type"] for each in result.out.splitlines()] == ["drop", "lost"]


def test_without_names_there_are_numbers_and_one_line_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent(tmp_path, PREFACE + b"".join(map(encode, EVENTS))) as path:
        result = hive(capsys, "monitor", "--no-rules", "-H", path)
    assert len(result.out.splitlines()) == 4
    assert [line for line in result.err.splitlines() if "names" in line] == [
        f"names are not shown: no agent answers at {path}: start one (hive agent) or name its --socket"
    ]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["-t", "drop"], ["drop"]),
        (["-t", "trace", "-t", "policy-verdict"], ["trace", "policy-verdict"]),
        (["--from", "11"], ["drop"]),
        (["--from", "13", "--from", "11"], ["drop", "trace"]),
        (["--to", "14"], ["trace", "policy-verdict"]),
        (["--related-to", "12"], ["drop"]),
        (["--related-to", "14"], ["trace", "policy-verdict"]),
        (["--address", "10.0.0.2"], ["drop"]),
        (["--address", "10.0.0.0/30", "-t", "trace"], ["trace"]),
        (["--address", "fd00::/64"], []),
    ],
    ids=" ".join,
)
def test_only_what_is_wanted_is_shown_and_losses_always(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], shown: list[str]
) -> None:
    result = watch(capsys, tmp_path, "--json", *options)
    assert [json.loads(line)["type"] for line in result.out.splitlines()] == [*shown, "lost"]


def test_json_has_the_keys_of_ciliums_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recordings("dbg") / "monitor_json.json"
    printed = [
        json.loads(line) for line in json.loads(path.read_text())["stdout"].splitlines() if line[0] == "{"
    ]
    ours = [json.loads(line) for line in watch(capsys, tmp_path, "-j").out.splitlines()]
    for kind in ("drop", "trace"):
        theirs, mine = (next(each for each in lines if each["type"] == kind) for lines in (printed, ours))
        assert theirs.keys() - mine.keys() <= {"traceSummary"}
        assert {"l2", "l3", "l4"} <= mine["summary"].keys()
    assert ours[0]["summary"]["l3"] == {"src": "10.0.0.1", "dst": "10.0.0.2"}


def test_notifications_are_shown_as_ciliums_client_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = json.loads((recordings("dbg") / "monitor_json.json").read_text())
    theirs = next(json.loads(line) for line in recorded["stdout"].splitlines() if '"agent"' in line)
    sent = [Sample(0, AgentNotification(2, json.dumps(theirs["message"])).data), *EVENTS]
    ours = json.loads(watch(capsys, tmp_path, "-j", "-t", "agent", sent=sent).out.splitlines()[0])
    assert {key: ours[key] for key in theirs} == theirs


def test_a_line_has_what_changed_in_the_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent = [Sample(0, AgentNotification(7, '{"id":11}').data), Sample(0, AgentNotification(99, "?").data)]
    lines = watch(capsys, tmp_path, "-t", "agent", sent=sent).out.splitlines()
    assert [line[13:] for line in lines] == ['agent, Endpoint created: {"id":11}', "agent, 99: ?"]


def test_bytes_are_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = watch(capsys, tmp_path, "-t", "drop", "-x").out.splitlines()
    assert lines[1] == "00000000  02 00 00 00 00 0b 02 00  00 00 00 0a 08 00 45 00  |..............E.|"


SECOND = 1_000_000_000
MORNING = 1_700_000_000
"""2023-11-14T22:13:20Z"""


def line_of(event: Sample | Lost, at: int, **names: object) -> dict[str, object]:
    """An event as the agent sends it, some seconds after MORNING."""
    line: dict[str, object] = {"time": (MORNING + at) * SECOND, "cpu": event.cpu}
    if isinstance(event, Lost):
        return line | {"lost": event.count}
    return line | {"data": base64.b64encode(event.data).decode()} | ({"names": names} if names else {})


THEN = {
    "endpoints": {"11": "shop/past-0"},
    "pods": {"10.0.0.1": "shop/past-0"},
    "services": {"10.0.0.2": "shop/then"},
}
HELD = [line_of(drop(11, ONE), 1, **THEN), line_of(Lost(7, 1), 2), line_of(trace(13, 14, OTHER), 3)]
COMING = [line_of(drop(11, ONE), 4), line_of(verdict(14, OTHER), 5)]


def remembered(
    capsys: pytest.CaptureFixture[str], directory: Path, query: str, *options: str, held: int = 4095
) -> Result:
    """The command where the agent holds three events, the first long after MORNING - 3600, and two come."""
    history = {"history": {"begins": (MORNING + 1) * SECOND, "held": held, "capacity": 4095}}
    lines = [history, *HELD, {"live": True}, *COMING]
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with stub_agent(directory, {**NAMES, f"/hive/events?{query}": (200, body)}) as stub:
        return hive(capsys, "monitor", "--no-rules", "-H", stub.socket, *options)


EVERYTHING = "since=0&names=true"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--last", "1"], ["lost", "trace", "drop", "verdict"]),
        (["--last", "2"], ["drop", "lost", "trace", "drop", "verdict"]),
        (["--last", "9"], ["drop", "lost", "trace", "drop", "verdict"]),
        (["--last", "1", "-t", "drop"], ["drop", "lost", "drop"]),
        (["--last", "2", "--verdict", "dropped", "--pod", "past-0"], ["drop", "lost"]),
        (["--last", "2", "--pod", "then"], ["lost"]),
        (["--last", "2", "-c", "3"], ["drop", "lost", "trace", "drop"]),
    ],
)
def test_the_last_events_come_first_and_then_those_that_follow(
    options: list[str], shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = remembered(capsys, tmp_path, EVERYTHING, *options)
    assert [re.split(r"[ ,]", line)[1] for line in result.out.splitlines()] == shown
    assert "Listening for events; press ctrl-C to quit" in result.err.splitlines()


def test_past_events_have_the_time_and_the_names_of_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = remembered(capsys, tmp_path, EVERYTHING, "--last", "3").out.splitlines()
    local = datetime.fromtimestamp(MORNING + 1).astimezone()
    assert lines[0].startswith(
        f"{local:%H:%M:%S}.000 drop, Policy denied: from shop/past-0 10.0.0.1:40000 (identity 256 app=web)"
        " to shop/then 10.0.0.2:80"
    )
    assert " from shop/web-0 10.0.0.1:40000 " in lines[3]
    assert " to shop/web 10.0.0.2:80 " in lines[3]


def test_past_events_as_json_and_without_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = remembered(capsys, tmp_path, "since=0&names=false", "--last", "3", "-n", "-j")
    record = json.loads(result.out.splitlines()[0])
    assert datetime.fromisoformat(record["time"]).timestamp() == MORNING + 1
    assert record["type"] == "drop"


@pytest.mark.parametrize(
    ("since", "held", "begins"), [("22:13:21", 4095, False), ("21:00:00", 3, False), ("21:00:00", 4095, True)]
)
def test_the_start_of_the_events_is_shown_when_older_ones_are_lost(
    since: str, held: int, begins: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"2023-11-14T{since}Z"
    query = f"since={int(datetime.fromisoformat(asked).timestamp()) * SECOND}&names=true"
    result = remembered(capsys, tmp_path, query, "--since", asked, held=held)
    assert len(result.out.splitlines()) == len(HELD) + len(COMING)
    local = datetime.fromtimestamp(MORNING + 1).astimezone()
    line = f"the agent's events begin at {local:%H:%M:%S}: it holds 4095 (hubble-event-buffer-capacity)"
    assert (line in result.err.splitlines()) is begins
    assert result.code == 1
    assert "has ended the answer: did it stop?" in result.err


def test_without_hubble_the_setting_to_enable_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, {f"/hive/events?{EVERYTHING}": (404, {"err": NO_EVENTS})}) as stub:
        result = hive(capsys, "monitor", "--last", "5", "-H", stub.socket)
    assert (result.code, result.out, result.err) == (1, "", f"hive: {NO_EVENTS}\n")


def test_another_socket_is_reported_as_not_a_monitor_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent(tmp_path, b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100)) as path:
        result = hive(capsys, "monitor", "-H", path)
    assert (result.code, result.err.splitlines()[1][:35]) == (1, "hive: this is not a monitor socket:")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--address", "web"], "expected an address or a network, such as 10.0.1.5 or fd00::/64"),
        (["-t", "agents"], "'agents' is not one of 'drop', 'trace', 'policy-verdict', 'l7'"),
        (["--from", "0"], "0 is not in the range 1<=x<=65535"),
        (["--since", "yesterday"], "'yesterday': expected how long ago, such as 5m or 1h30m, or a time"),
        (["--since", "2999-01-01T00:00:00Z"], "is still to come: expected a time before now"),
        (["--since", "1969-01-01"], "is before 1970"),
        (["--since=-5m"], "is still to come"),
        (["--last", "0"], "0 is not in the range x>=1"),
        (["--last", "few"], "'few' is not a valid integer"),
        (["--last", "5", "--monitor-socket", "/m.sock"], "--monitor-socket has only events that come"),
    ],
    ids=str,
)
def test_wrong_options_end_with_a_line(
    capsys: pytest.CaptureFixture[str], options: list[str], line: str
) -> None:
    result = hive(capsys, "monitor", *options)
    assert (result.code, result.out, line in result.err, result.err.count("\n")) == (2, "", True, 1)


def test_without_an_agent_the_command_fails_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "monitor", "-H", tmp_path / "cilium.sock")
    assert (result.code, result.err) == (
        1,
        f"hive: no agent answers at {tmp_path / SOCKET}: start one (hive agent) or name its --socket\n",
    )


def test_what_is_delivered_to_an_endpoint_is_not_from_it() -> None:
    delivered = decode(trace(14, 14, ONE).data)
    assert not EventFilter(source=frozenset({14})).matches(delivered)
    assert EventFilter(destination=frozenset({14})).matches(delivered)
    assert EventFilter(related=frozenset({14})).matches(delivered)
