"""``hubble`` as recorded: requests, output and exit code of each command line."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells.hubble.codec import WireMessage, decode, encode, from_json, to_json
from cells.hubble.enums import FlowVerdict
from cells.hubble.flow import Flow
from cells.hubble.rpc import observer
from cells.hubble.rpc.grpc import GrpcServer
from cells.hubble.rpc.messages import (
    Answers,
    HealthCheckRequest,
    HealthCheckResponse,
    Method,
    RpcCode,
    RpcError,
    ServingStatus,
    code_name,
    server_streaming,
    unary,
)
from hive.observe.hubble import run
from lifecycle.process.logs import logger_for
from tests.support.command_line import hive
from tests.support.recordings import recordings

DATA = recordings("hubble")
RECORDED = json.loads((DATA / "cli.json").read_text())
MESSAGES: dict[str, tuple[type[WireMessage], type[WireMessage]]] = {
    "observer.Observer/GetFlows": (observer.GetFlowsRequest, observer.GetFlowsResponse),
    "observer.Observer/GetAgentEvents": (observer.GetAgentEventsRequest, observer.GetAgentEventsResponse),
    "observer.Observer/GetDebugEvents": (observer.GetDebugEventsRequest, observer.GetDebugEventsResponse),
    "observer.Observer/GetNodes": (observer.GetNodesRequest, observer.GetNodesResponse),
    "observer.Observer/GetNamespaces": (observer.GetNamespacesRequest, observer.GetNamespacesResponse),
    "observer.Observer/ServerStatus": (observer.ServerStatusRequest, observer.ServerStatusResponse),
    "peer.Peer/Notify": (observer.NotifyRequest, observer.ChangeNotification),
    "grpc.health.v1.Health/Check": (HealthCheckRequest, HealthCheckResponse),
}
STREAMED = {"GetFlows", "GetAgentEvents", "GetDebugEvents", "Notify"}
CODES = {code_name(code): code for code in RpcCode}

DIFFERENT = {
    "status/tls": "needs certificates: see test_server",
    "input-file/garbage": "the message about a line that is not a flow has another wording",
    "input-file/agent-line": "the message about a line that is not a flow has another wording",
}
"""Recordings with a stderr of our own; stdout and the exit code are compared all the same, but for TLS."""


def different(name: str) -> bool:
    return any(name.startswith(prefix) for prefix in DIFFERENT)


def cases(prefix: str = "") -> list[Any]:
    found = [case for case in RECORDED["cases"] if case["name"].startswith(prefix)]
    return [
        pytest.param(case, id=case["name"]) for case in found if not case["name"].startswith("status/tls")
    ]


class Stub:
    """A server that answers as a recording has it, and remembers what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.case: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.encoded: list[bytes] = []
        """Further answers of streams, those that have no JSON."""
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Stub:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _serve(self) -> None:
        server = GrpcServer(map(self._method, MESSAGES), log=logger_for("stub"))
        async with (
            await anyio.create_unix_listener(self.path) as listener,
            anyio.create_task_group() as tasks,
        ):

            async def serve(stream: anyio.abc.SocketStream) -> None:
                await server.serve(stream, "client")

            tasks.start_soon(listener.serve, serve)
            self._ready.set()
            await anyio.to_thread.run_sync(self._stop.wait)
            tasks.cancel_scope.cancel()

    def _method(self, path: str) -> Method:
        service, name = path.split("/")

        async def streamed(request: bytes) -> Answers:
            self._remember(path, request)
            yield [encode(from_json(MESSAGES[path][1], tree)) for tree in self._trees(name)] + self.encoded
            self._raise("then_error")

        async def single(request: bytes) -> bytes:
            self._remember(path, request)
            return encode(await self._single(name))

        return server_streaming(service, name, streamed) if name in STREAMED else unary(service, name, single)

    def _remember(self, path: str, request: bytes) -> None:
        message = decode(MESSAGES[path][0], request)
        tree = to_json(message)
        asked_for = {"method": path, "request": tree}
        if tree.pop("experimental", None):
            assert isinstance(message, observer.GetFlowsRequest)
            assert message.experimental is not None
            asked_for["mask"] = list(message.experimental.field_mask or ())
        self.asked.append(asked_for)

    def _trees(self, method: str) -> list[Any]:
        answer = self.case.get("answer") or {}
        if "set" in answer:
            name, one, _ = answer["set"].partition("[:1]")
            trees: list[Any] = RECORDED["answer_sets"][name] or []
            return trees[:1] if one else trees
        return answer.get("peers" if method == "Notify" else "flows") or []

    def _raise(self, key: str) -> None:
        error = (self.case.get("answer") or {}).get(key)
        if error is not None:
            text = self.case["stderr"][0].partition(" desc = ")[2]
            raise RpcError(CODES[error.split(" ")[0]], text)

    async def _single(self, name: str) -> WireMessage:
        answer = self.case["answer"]
        if name == "Check":
            self._raise("health_error")
            return HealthCheckResponse(status=ServingStatus[answer["health"]])
        self._raise("error")
        self._raise("status_error")
        if "delay_s" in answer:
            await anyio.sleep_forever()
        answers: dict[str, tuple[str, type[WireMessage]]] = {
            "GetNodes": ("nodes", observer.GetNodesResponse),
            "GetNamespaces": ("namespaces", observer.GetNamespacesResponse),
            "ServerStatus": ("server_status", observer.ServerStatusResponse),
        }
        key, kind = answers[name]
        return from_json(kind, answer[key])


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    with Stub(tmp_path_factory.mktemp("hubble") / "hubble.sock") as served:
        yield served


@pytest.mark.parametrize("case", cases())
def test_hubble_commands_have_the_recorded_output(
    case: dict[str, Any],
    stub: Stub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub.case, stub.asked = case, []
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(case.get("stdin", []))))
    monkeypatch.delenv("HUBBLE_SERVER", raising=False)
    server, folder = f"unix://{stub.path}", str(stub.path.parent)
    code = run([word.replace("<UNIX>", server).replace("<DIR>", folder) for word in case["argv"]])
    out, err = capsys.readouterr()
    printed = out.replace(server, "<UNIX>").split("\n")
    assert (code, printed) == (case["exit_code"], case["stdout"])
    assert stub.asked == [asked(request) for request in case["requests"] or []]
    if not different(case["name"]):
        words = 2 if "-D" in case["argv"] else 0  # connection and request are logged in other words
        assert err.replace(folder, "<DIR>").split("\n")[words:] == case["stderr"][words:]


def asked(request: dict[str, Any]) -> dict[str, Any]:
    """What a recording has of a request that is ours to send, too."""
    mask = request.get("experimental_field_mask_paths")
    tree = to_json(from_json(MESSAGES[request["method"]][0], request["request"]))
    return {"method": request["method"], "request": tree} | ({"mask": mask} if mask else {})


def test_flows_of_a_file_are_filtered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flows.json"
    flows = RECORDED["answer_sets"]["flows:std"]
    file.write_text("\n".join(map(json.dumps, flows)))
    dropped = [one for one in flows if one["flow"].get("verdict") == "DROPPED"]
    assert (
        run(["observe", "--input-file", str(file), "--verdict", "DROPPED", "-o", "json", "--last", "2"]) == 0
    )
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["flow"]["uuid"] for line in printed] == [
        one["flow"]["uuid"] for one in dropped[-2:]
    ]


INJECTED = "a\x1b]0;pwned\x07\x1b[31m\r\x9b2Jb"
"""Text that sets the title of a terminal, its colour and its contents."""
ESCAPED = r"a^[]0;pwned\u0007^[[31m\r\u009b2Jb"


def injecting(tmp_path: Path) -> Path:
    """A file of one flow, with control characters in its names and its summary."""
    flow = {
        "verdict": "FORWARDED",
        "IP": {"source": "10.0.0.1", "destination": "192.0.2.7"},
        "source": {"namespace": "shop", "pod_name": INJECTED},
        "destination_names": [INJECTED],
        "Summary": f"HTTP/1.1 GET /{INJECTED}",
        "node_name": INJECTED,
    }
    (tmp_path / "flows").write_text(json.dumps({"flow": flow}), encoding="utf-8")
    return tmp_path / "flows"


@pytest.mark.parametrize("output", ["compact", "dict", "table"])
def test_control_characters_of_a_flow_are_escaped(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(injecting(tmp_path))
    assert run(["observe", "--input-file", file, "-o", output, "--print-node-name"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(ESCAPED) == 4
    assert printed.isprintable() or set(filter(lambda one: not one.isprintable(), printed)) == {"\n"}


def test_with_colours_only_their_sequences_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["observe", "--input-file", str(injecting(tmp_path)), "--color", "always"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(r"N/A: " + "\x1b[36mshop/a^[]0;pwned")
    assert set(re.findall(r"\x1b(?:\[\d+m)?", printed)) <= {f"\x1b[{code}m" for code in (0, 31, 32, 35, 36)}


def test_json_of_a_flow_keeps_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["observe", "--input-file", str(injecting(tmp_path)), "-o", "json"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert json.loads(printed)["flow"]["node_name"] == INJECTED


def test_control_characters_of_names_and_errors_of_a_server_are_escaped(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    server = f"unix://{stub.path}"
    stub.case = {"answer": {"nodes": {"nodes": [{"name": INJECTED}]}}}
    assert run(["list", "nodes", "--server", server]) == 0
    status = {"num_connected_nodes": 1, "num_unavailable_nodes": 1, "unavailable_nodes": [INJECTED]}
    stub.case["answer"] = {"health": "SERVING", "server_status": status}
    assert run(["status", "--server", server]) == 0
    stub.case["answer"] = {"peers": [{"name": INJECTED, "address": "192.0.2.1", "type": "PEER_ADDED"}]}
    assert run(["watch", "peers", "--server", server]) == 0
    stub.case = {"answer": {"error": "Internal"}, "stderr": [f"rpc error: code = Internal desc = {INJECTED}"]}
    assert run(["list", "nodes", "--server", server]) == 1
    out, err = capsys.readouterr()
    assert (out.count(ESCAPED), err.count(ESCAPED)) == (3, 1)
    assert "\x1b" not in out + err


def test_unavailable_nodes_are_sorted_and_counted_as_far_as_they_are_known(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(**status: object) -> list[str]:
        stub.case = {"answer": {"health": "SERVING", "server_status": status}}
        assert run(["status", "--server", f"unix://{stub.path}"]) == 0
        return capsys.readouterr().out.splitlines()[3:]

    assert lines(num_connected_nodes=2) == ["Connected Nodes: 2"]
    assert lines(num_connected_nodes=2, num_unavailable_nodes=3) == [
        "Connected Nodes: 2/5",
        "Unavailable Nodes: 3",
    ]
    assert lines(num_connected_nodes=2, num_unavailable_nodes=3, unavailable_nodes=["n2", "n1"]) == [
        "Connected Nodes: 2/5",
        "Unavailable Nodes: 3",
        "  - n1",
        "  - n2",
        "  - and 1 more...",
    ]


def test_half_a_second_of_uptime_is_rounded_up(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    node = {"name": "n1", "uptime_ns": "2500000000", "seen_flows": "6"}
    stub.case = {"answer": {"nodes": {"nodes": [node]}}}
    assert run(["list", "nodes", "--server", f"unix://{stub.path}"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["n1", "Unknown", "3s", "2.00", "N/A"]


def test_an_invalid_time_is_printed_as_not_available(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.case = {"answer": {"flows": []}}
    late = Flow(time=(1 << 62) * 1_000_000_000, verdict=FlowVerdict.DROPPED)
    stub.encoded = [encode(observer.GetFlowsResponse(flow=late))]
    assert run(["observe", "--server", f"unix://{stub.path}"]) == 0
    stub.encoded = []
    assert capsys.readouterr().out.startswith("N/A: ")


def test_hive_observe_reports_lost_events(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    """Cilium's hubble ignores them."""
    lost = {"source": "PERF_EVENT_RING_BUFFER", "num_events_lost": "42", "cpu": 3}
    stub.case = {"answer": {"flows": [{"lost_events": lost, "time": "2023-11-14T22:13:20Z"}]}}
    for options, expected in (
        ((), "Nov 14 22:13:20.000 EVENTS LOST: PERF_EVENT_RING_BUFFER CPU(3) 42\n"),
        (("--silent-errors",), ""),
    ):
        result = hive(capsys, "observe", "--server", f"unix://{stub.path}", *options)
        assert (result.code, result.out, result.err) == (0, "", expected)


def test_an_invalid_filter_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flows.json").touch()
    assert run(["observe", "--input-file", str(tmp_path / "flows.json"), "--ip", "nowhere"]) == 1
    assert capsys.readouterr().err == 'invalid IP address in filter: "nowhere"\n'
