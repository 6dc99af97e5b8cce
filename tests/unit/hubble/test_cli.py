"""``hubble`` as recorded: requests, output and exit code of each command line."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells.hubble.codec import WireMessage, decode, encode, from_json, to_json
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
    "print/debug": "the debug output has another wording",
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
            yield [encode(from_json(MESSAGES[path][1], tree)) for tree in self._trees(name)]
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
        reported = [line for line in err.replace(folder, "<DIR>").split("\n") if "lost" not in line.lower()]
        assert reported == case["stderr"]


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


def test_an_invalid_filter_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flows.json").touch()
    assert run(["observe", "--input-file", str(tmp_path / "flows.json"), "--ip", "nowhere"]) == 1
    assert capsys.readouterr().err == 'invalid IP address in filter: "nowhere"\n'
