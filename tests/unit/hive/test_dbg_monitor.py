"""``cilium-dbg monitor`` against recordings of Cilium's, and events of every kind in its lines."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from cells.observe.events import (
    LookupRecord,
    Lost,
    Party,
    RequestRecord,
    Sample,
    lookup_sample,
    request_sample,
)
from cells.observe.monitor import PREFACE, SOCKET, encode
from hive.dbg.main import run
from tests.unit.conformance.recordings import load
from tests.unit.conformance.replayed_agent import replaying


@contextmanager
def node(directory: Path, sent: bytes) -> Iterator[None]:
    """A monitor socket that sends this to its first client, and then closes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / SOCKET))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(sent)

        serving = threading.Thread(target=serve)
        serving.start()
        yield
        serving.join()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the monitor waits for the agent."""

    def wait(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hive.dbg.monitor.command.time.sleep", wait)


CLOSED: Final = 'level=warning msg="connection closed" error=EOF subsys=cilium-dbg'


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("name", ["monitor", "monitor_json"])
def test_events_are_printed_as_recorded(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = load(f"dbg/{name}")
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    frames = recording["monitor_socket"]["frames_sent"]
    sent = bytes.fromhex("".join(frame["gob_bytes_hex"] for frame in frames))
    with node(tmp_path, sent), replaying(tmp_path / "cilium.sock", recording["exchanges"]) as asked:
        assert run(recording["argv"][1:]) == recording["exit_code"]
    out, err = capfd.readouterr()
    assert re.sub(r"0xdeadbeef", "0x<ADDR>", out).splitlines() == recording["stdout"].splitlines()
    reported = [line for line in err.splitlines() if line != CLOSED]
    assert reported == recording["stderr"].splitlines()
    assert [one[:2] for one in asked] == [("GET", "/v1/healthz")]


def printed(
    directory: Path, capfd: pytest.CaptureFixture[str], *options: str, sent: Sequence[Sample | Lost]
) -> list[str]:
    """The lines of these events."""
    socket_file = f"--monitor-socket={directory / SOCKET}"
    with node(directory, PREFACE + b"".join(map(encode, sent))):
        assert run(["monitor", "-H", f"unix://{directory}/cilium.sock", socket_file, *options]) == 0
    (directory / SOCKET).unlink()
    return capfd.readouterr().out.splitlines()


def packet(source: str, destination: str, protocol: int, body: bytes, kind: int = 0) -> bytes:
    ends = ip_address(source).packed + ip_address(destination).packed
    if ":" in source:
        header = struct.pack(">IHBB", 6 << 28, len(body), protocol, 64) + ends
    else:
        header = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 7, 0x4000, 64, protocol, 0) + ends
    ethernet = "86dd" if ":" in source else "0800"
    return bytes.fromhex("02000000000b02000000000a" + (f"{kind:04x}" if kind else ethernet)) + header + body


def tcp(flags: int, options: bytes = b"", data: bytes = b"") -> bytes:
    offset = (20 + len(options)) // 4 << 4
    return struct.pack(">HHIIBBHHH", 40000, 8080, 1, 2, offset, flags, 502, 0, 0) + options + data


SYN: Final = packet("10.0.0.1", "10.0.0.2", 6, tcp(2))
UDP: Final = packet("fd00::1", "fd00::2", 17, struct.pack(">HHHH", 5000, 53, 8, 0))
PING: Final = packet("10.0.0.1", "10.0.0.2", 1, struct.pack(">BBHHH", 8, 0, 0, 1, 2))
NEIGHBOUR: Final = packet("fd00::1", "fd00::2", 58, struct.pack(">BBH", 135, 0, 9) + bytes(20))
ARP: Final = bytes.fromhex("ffffffffffff02000000000a0806") + bytes(28)
FRAGMENT: Final = SYN[:20] + struct.pack(">H", 0x2000) + SYN[22:]


def header(kind: int, sub: int, source: int, length: int, version: int = 0) -> bytes:
    return struct.pack("<BBHIIHH", kind, sub, source, 0xAB, length, length, version)


def drop(data: bytes, *, reason: int = 133, file: int = 2, extended: int = 0, source: int = 11) -> Sample:
    body = struct.pack("<IIIHBbI", 256, 2, 12, 77, file, extended, 5)
    return Sample(1, header(1, reason, source, len(data), 1) + body + data)


def trace(
    data: bytes, *, point: int = 0, reason: int = 0, destination: int = 14, flags: int = 0, version: int = 1
) -> Sample:
    body = struct.pack("<IIHBBI", 1, 257, destination, reason, flags, 0) + bytes(16 * version)
    return Sample(0, header(4, point, 13, len(data), version) + body + data)


def verdict(data: bytes, *, flags: int = 0x19, value: int = 0, auth: int = 0, remote: int = 256) -> Sample:
    body = struct.pack("<IiHBBB3x", remote, value, 80, 6, flags, auth)
    return Sample(0, header(5, 0, 14, len(data), 1) + body + data)


def debug(kind: int, *arguments: int) -> Sample:
    return Sample(2, struct.pack("<BBHIIII", 2, kind, 11, 0xAB, *arguments))


def capture(kind: int, first: int, data: bytes = SYN) -> Sample:
    return Sample(0, struct.pack("<BBHIIIII", 3, kind, 11, 0xAB, len(data), len(data), first, 0) + data)


def sock(point: int, address: str, protocol: int = 1) -> Sample:
    packed = ip_address(address).packed.ljust(16, b"\0")
    return Sample(0, struct.pack("<BB16sHQQBB", 7, point, packed, 80, 9, 33, protocol, ":" in address))


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(
    ("event", "options", "lines"),
    [
        (
            drop(PING),
            "",
            (
                "xx drop (Policy denied) flow 0xab to endpoint 12, ifindex 5, file bpf_lxc.c:77, , "
                "identity 256->world: 10.0.0.1 -> 10.0.0.2 EchoRequest"
            ),
        ),
        (
            drop(UDP, reason=169, file=250, extended=-2),
            "-n",
            (
                "xx drop (FIB lookup failed, -2) flow 0xab to endpoint 12, ifindex 5, file unknown(250):77, ,"
                " identity 256->2: [fd00::1]:5000 -> [fd00::2]:53 udp"
            ),
        ),
        (
            drop(ARP, reason=250),
            "-v",
            (
                "xx drop (250, 0) flow 0xab to endpoint 12, ifindex 5, file bpf_lxc.c:77, , identity"
                " 256->world: 02:00:00:00:00:0a -> ff:ff:ff:ff:ff:ff ARP"
            ),
        ),
        (
            drop(b""),
            "",
            (
                "xx drop (Policy denied) flow 0xab to endpoint 12, ifindex 5, file bpf_lxc.c:77, , "
                "identity 256->world: [unknown]"
            ),
        ),
        (
            trace(SYN),
            "",
            (
                "-> endpoint 14 flow 0xab , identity host->257 state new ifindex 0 orig-ip 0.0.0.0: "
                "10.0.0.1:40000 -> 10.0.0.2:8080 tcp SYN"
            ),
        ),
        (
            trace(NEIGHBOUR, point=3, reason=0x82, flags=1),
            "",
            (
                "-> stack encrypted  flow 0xab , identity host->257 state reply ifindex 0 orig-ip ::: "
                "fd00::1 -> fd00::2 NeighborSolicitation"
            ),
        ),
        (
            trace(FRAGMENT, point=1, destination=15001, reason=5, version=0),
            "-n",
            (
                "-> proxy port 15001 flow 0xab , identity 1->257 state unknown ifindex 0 orig-ip 0.0.0.0: "
                "10.0.0.1 -> 10.0.0.2"
            ),
        ),
        (
            trace(SYN, point=5, reason=7),
            "",
            (
                "<- endpoint 13 flow 0xab , identity host->257 state srv6-decap ifindex 0 orig-ip 0.0.0.0: "
                "10.0.0.1:40000 -> 10.0.0.2:8080 tcp SYN"
            ),
        ),
        (
            verdict(SYN),
            "",
            (
                "Policy verdict log: flow 0xab local EP ID 14, remote ID 256, proto 6, ingress, action allow,"
                " auth: disabled, match L4-Only, 10.0.0.1:40000 -> 10.0.0.2:8080 tcp SYN"
            ),
        ),
        (
            verdict(UDP, flags=0x32, value=-133, auth=1, remote=6),
            "-j",
            (
                "Policy verdict log: flow 0xab local EP ID 14, remote ID remote-node, proto 6, egress,"
                " action deny, auth: spire, match Proto-Only, [fd00::1]:5000 -> [fd00::2]:53 udp"
            ),
        ),
        (
            verdict(SYN, flags=0x42, value=15001, auth=9),
            "-n",
            (
                "Policy verdict log: flow 0xab local EP ID 14, remote ID 256, proto 6, egress, action audit, "
                "auth: Unknown-auth-type-9, match none, 10.0.0.1:40000 -> 10.0.0.2:8080 tcp SYN"
            ),
        ),
        (debug(19, 1, 0, 0), "", ""),
        (debug(19, 1, 0, 0), "-v", "CPU 02: MARK 0xab FROM 11 DEBUG: Going to host, policy-skip=1"),
        (
            debug(4, 4294967, 256, 0),
            "-vv",
            "CPU 02: MARK 0xab FROM 11 DEBUG: Local container found ifindex 4294967 seclabel 1",
        ),
        (
            debug(19, 1, 0, 0),
            "-j",
            '{"cpu":"CPU 02:","type":"debug","message":"Going to host, policy-skip=1"}',
        ),
        (capture(5, 4294967), "", "<- load-balancer 4294967: 10.0.0.1:40000 -> 10.0.0.2:8080 tcp SYN"),
        (capture(9, 0x901F), "-v", "-> proxy port 8080: 10.0.0.1:40000 -> 10.0.0.2:8080 tcp SYN"),
        (capture(8, 0x901F), "", ""),
        (
            capture(8, 0x901F),
            "-j",
            (
                '{"cpu":"CPU 00:","type":"capture","mark":"0xab","message":"Packet to proxy port 8080 (Pre)",'
                '"source":11,"bytes":54,"summary":"10.0.0.1:40000 -\\u003e 10.0.0.2:8080 tcp SYN"}'
            ),
        ),
        (sock(1, "10.96.0.1"), "", ""),
        (
            sock(2, "fd00::1", 2),
            "-v",
            "CPU 00: [post-xlate-fwd] cgroup_id: 33 sock_cookie: 9, dst [fd00::1]:80 udp ",
        ),
        (Lost(7), "", "CPU 00: Lost 7 events"),
        (Sample(3, b"\xc8\1\2"), "", "CPU 03: Unknown event: [200 1 2]"),
        (
            Sample(0, b"\4\0\0"),
            "",
            (
                "Error while parsing trace notification message: unexpected TraceNotify data length, "
                "expected at least 32 but got 3"
            ),
        ),
    ],
)
def test_an_event_has_the_line_of_cilium_s_monitor(
    event: Sample | Lost, options: str, lines: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "\n".join(printed(tmp_path, capfd, *options.split(), sent=[event])) == lines


CLIENT = Party("10.0.0.1", 40000, 256, 11, ("k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"))
SERVER = Party("10.0.0.2", 80, 257, 0, ("reserved:world",))
GET = RequestRecord(
    answer=False,
    time="2026-01-01T00:00:00Z",
    ingress=True,
    source=CLIENT,
    destination=SERVER,
    verdict="Forwarded",
    method="GET",
    url="http://web/a?b=c",
    protocol="HTTP/1.1",
)


@pytest.mark.usefixtures("interrupted")
def test_control_characters_of_requests_are_escaped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = msgspec.structs.replace(GET, method="GET\x1b]0;pwned\x07\r\x9b2J")
    (line,) = printed(tmp_path, capfd, "-t", "l7", sent=[Sample(0, request_sample(record))])
    assert r"GET^[]0;pwned\u0007\r\u009b2J http://web/" in line
    (line,) = printed(tmp_path, capfd, "-t", "l7", "-j", sent=[Sample(0, request_sample(record))])
    assert line.isprintable()
    assert json.loads(line)["http"]["Method"] == record.method


ANSWER = LookupRecord(
    answer=True,
    time="2026-01-01T00:00:00Z",
    source=SERVER,
    destination=CLIENT,
    protocol=17,
    verdict="Forwarded",
    query="cilium.io.",
    type=65,
    addresses=("104.198.14.52", "fd00::1"),
    ttl=30,
    aliases=("a.example.",),
)


@pytest.mark.usefixtures("interrupted")
def test_requests_of_proxies_have_the_lines_of_cilium_s_monitor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sent = [Sample(0, request_sample(GET)), Sample(0, lookup_sample(ANSWER))]
    client, server = "11 ([k8s:app=web k8s:io.kubernetes.pod.namespace=shop])", "0 ([reserved:world])"
    assert printed(tmp_path, capfd, "-t", "l7", sent=[*sent, drop(SYN)]) == [
        (
            f"<- Request http from {client} to {server}, identity 256->257, verdict Forwarded"
            " GET http://web/a?b=c => 0"
        ),
        (
            f"-> Response dns to {client} from {server}, identity 257->256, verdict Forwarded"
            " DNS proxy: cilium.io. HTTPS TTL: 30 Answer: '104.198.14.52,fd00::1' CNAMEs: a.example."
        ),
    ]
    request, answer = map(json.loads, printed(tmp_path, capfd, "-j", "--from", "11", "--from=0", sent=sent))
    assert request["http"]["URL"] | {"Host": "web", "RawQuery": "b=c"} == request["http"]["URL"]
    assert list(request)[:5] == ["type", "observationPoint", "flowType", "l7Proto", "srcEpID"]
    assert request["srcEpLabels"][0] == {"key": "app", "value": "web", "source": "k8s"}
    assert answer["dns"] == {
        "Query": "cilium.io.",
        "IPs": ["104.198.14.52", "fd00::1"],
        "TTL": 30,
        "CNAMEs": ["a.example."],
        "ObservationSource": "proxy",
        "QTypes": [65],
    }


@pytest.mark.usefixtures("interrupted")
def test_very_verbose_events_have_a_line_for_each_header(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = bytes.fromhex("020405b40402080a0000000100000002")
    segment = packet("10.0.0.1", "10.0.0.2", 6, tcp(0x12, options + b"\1\3\3\7", b"hello"))
    lines = printed(tmp_path, capfd, "-vv", sent=[drop(segment), trace(NEIGHBOUR, flags=1)])
    assert lines == [
        "-" * 78,
        "CPU 01: MARK 0xab FROM 11 DROP: 79 bytes, reason Policy denied, identity 256->world, to endpoint 12",
        (
            "Ethernet\t{Contents=[..14..] Payload=[..65..] SrcMAC=02:00:00:00:00:0a DstMAC=02:00:00:00:00:0b"
            " EthernetType=IPv4 Length=0}"
        ),
        (
            "IPv4\t{Contents=[..20..] Payload=[..45..] Version=4 IHL=5 TOS=0 Length=65 Id=7 Flags=DF"
            " FragOffset=0 TTL=64 Protocol=TCP Checksum=0 SrcIP=10.0.0.1 DstIP=10.0.0.2"
            " Options=[] Padding=[]}"
        ),
        (
            "TCP\t{Contents=[..40..] Payload=[..5..] SrcPort=40000(safetynetp) DstPort=8080(http-alt) Seq=1"
            " Ack=2 DataOffset=10 FIN=false SYN=true RST=false PSH=false ACK=true URG=false ECE=false"
            " CWR=false NS=false Window=502 Checksum=0 Urgent=0 Options=[..5..] Padding=[]}"
        ),
        "  Failed to decode layer: No decoder for layer type Payload",
        "-" * 78,
        (
            "CPU 01: MARK 0xab FROM 13 to-endpoint: 78 bytes (78 captured), state new, , identity host->257,"
            " orig-ip ::, to endpoint 14"
        ),
        (
            "Ethernet\t{Contents=[..14..] Payload=[..64..] SrcMAC=02:00:00:00:00:0a DstMAC=02:00:00:00:00:0b"
            " EthernetType=IPv6 Length=0}"
        ),
        (
            "IPv6\t{Contents=[..40..] Payload=[..24..] Version=6 TrafficClass=0 FlowLabel=0 Length=24"
            " NextHeader=ICMPv6 HopLimit=64 SrcIP=fd00::1 DstIP=fd00::2 HopByHop=nil}"
        ),
        "ICMPv6\t{Contents=[135, 0, 0, 9] Payload=[..20..] TypeCode=NeighborSolicitation Checksum=9}",
        "  Failed to decode layer: No decoder for layer type ICMPv6NeighborSolicitation",
    ]
    assert printed(tmp_path, capfd, "-v", "-v", "--hex", sent=[capture(4, 7, SYN[:18])]) == [
        "-" * 78,
        "CPU 00: MARK 0xab FROM 11 DEBUG: 18 bytes, Delivery to ifindex 7",
        "00000000  02 00 00 00 00 0b 02 00  00 00 00 0a 08 00 45 00  |..............E.|",
        "00000010  00 28                                             |.(|",
    ]


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ("-t drop", ["xx"]),
        ("-t trace -t policy-verdict", ["->", "Policy"]),
        ("--type=agent", []),
        ("--from 13", ["->"]),
        ("--to 14", ["->"]),
        ("--to 12 --to 256", ["xx", "Policy"]),
        ("--related-to 14", ["->", "Policy"]),
        ("--related-to 12 --from 13", []),
    ],
)
def test_events_are_filtered_by_type_and_endpoint(
    options: str, kinds: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = printed(tmp_path, capfd, *options.split(), sent=[drop(SYN), trace(SYN), verdict(SYN)])
    assert [line.split()[0] for line in lines] == kinds


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            "-t nothing",
            'invalid argument "nothing" for "-t, --type" flag: Unknown type (nothing). Please use',
        ),
        (
            "--from x",
            'invalid argument "x" for "--from" flag: strconv.ParseUint: parsing "x": invalid syntax',
        ),
        ("--related-to 65536", 'parsing "65536": value out of range'),
    ],
)
def test_wrong_options_are_refused_in_cilium_s_words(
    options: str, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["monitor", *options.split()]) == 1
    assert fault in capfd.readouterr().err


def test_without_a_monitor_socket_the_command_ends_with_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    assert run(["monitor"]) == 0
    path = tmp_path / SOCKET
    reported: Any = capfd.readouterr().err.splitlines()
    assert reported == [
        "Press Ctrl-C to quit",
        (
            'level=error msg="Cannot open monitor socket" error="Cannot find or open a supported node-monitor'
            f' socket. {path}: dial unix {path}: connect: no such file or directory" subsys=cilium-dbg'
        ),
    ]
