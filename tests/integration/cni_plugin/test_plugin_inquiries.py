"""The plugin's STATUS and GC against a stub agent; CHECK needs a namespace and is a kernel test."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.cni_plugin import (
    Ended,
    Patience,
    Seen,
    StubAgent,
    answer,
    environment,
    hang_up,
    reply,
    run_plugin,
)

NOTHING_OF_A_POD = dict.fromkeys(("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"))


@pytest.fixture
def sock(tmp_path: Path) -> Path:
    return tmp_path / "cni.sock"


def call(command: str, sock: Path, patience: Patience = Patience.USUAL) -> Ended:
    conf = {"cniVersion": "1.1.0", "name": "cilium", "type": "cilium-cni", "agent-socket": str(sock)}
    return run_plugin(environment(command, **NOTHING_OF_A_POD), conf, patience)


@pytest.mark.parametrize("command", ["STATUS", "GC"])
def test_check_gc_and_status_print_the_answer_of_the_agent(command: str, sock: Path) -> None:
    with StubAgent(sock).answering(answer(reply(0, b"")), answer(reply(1, b'{"code":50}\n'))) as agent:
        first, second = call(command, sock), call(command, sock)
    assert (first.code, first.stdout) == (0, "")
    assert (second.code, second.json) == (1, {"code": 50})
    assert [seen.environment["CNI_COMMAND"] for seen in agent.requests] == [command] * 2
    assert [seen.fds for seen in agent.requests] == [[], []]


@pytest.mark.parametrize(("command", "code"), [("STATUS", 50), ("GC", 11)])
def test_without_an_agent_check_gc_and_status_return_their_own_codes(
    command: str, code: int, sock: Path
) -> None:
    ended = call(command, sock)
    assert (ended.code, ended.json["code"], ended.json["msg"]) == (1, code, "DaemonDown")
    assert f"dial unix {sock}: connect: no such file or directory" in ended.json["details"]


@pytest.mark.parametrize("command", ["STATUS", "GC"])
def test_a_request_to_a_dying_agent_is_repeated(command: str, sock: Path) -> None:
    with StubAgent(sock).answering(hang_up, answer(reply(0, b""))) as agent:
        assert call(command, sock, Patience.ENDLESS).code == 0
    assert len(agent.requests) == 2


def test_a_request_to_a_silent_agent_fails(sock: Path) -> None:
    def be_silent(connected: socket.socket, seen: Seen) -> None:
        del seen
        assert connected.recv(1) == b""  # the plugin has given up

    with StubAgent(sock).answering(be_silent):
        ended = call("STATUS", sock, Patience.OF_THE_SILENT)
    assert (ended.code, ended.json["code"]) == (1, 50)
    assert "did not answer in time" in ended.json["msg"]
