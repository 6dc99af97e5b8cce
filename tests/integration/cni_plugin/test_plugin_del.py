"""DEL while the agent is up, down, restarting or hung; a DEL without a namespace needs no privileges."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.cni_plugin import (
    Patience,
    Seen,
    StubAgent,
    answer,
    environment,
    hang_up,
    reply,
    run_plugin,
)
from tests.support.plugin import ROOT
from tests.support.waiting import eventually

QUEUED = "6165ceb541bc14f80799dffd3b18f9166b484c538931c5d3fb992084686c7bb8.delete"
FLOCK = struct.Struct("hhqqi4x")


@pytest.fixture
def sock(tmp_path: Path) -> Path:
    return tmp_path / "run" / "cni.sock"


def conf(sock: Path, **more: object) -> dict[str, object]:
    return {"cniVersion": "1.0.0", "name": "cilium", "type": "cilium-cni", "agent-socket": str(sock), **more}


def queue_of(sock: Path) -> list[str]:
    return sorted(path.name for path in (sock.parent / "deleteQueue").iterdir())


def lock_exclusively(sock: Path) -> int:
    queue = sock.parent / "deleteQueue"
    queue.mkdir(parents=True)
    lock = os.open(queue / "lockfile", os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
    return lock


def opened_by_another(path: Path) -> bool:
    """Whether a process other than this one has the file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # processes end while we look
            if link.parts[2] != str(os.getpid()) and link.readlink() == path:
                return True
    return False


def test_the_agent_gets_environment_and_stdin_and_its_answer_is_printed(sock: Path) -> None:
    sock.parent.mkdir()
    stdin = json.dumps(conf(sock)).encode()
    env = environment("DEL", HOME="/root")
    with StubAgent(sock).answering(answer(reply(0, b""))) as agent:
        ended = run_plugin(env, stdin)
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")
    (seen,) = agent.requests
    assert (seen.version, seen.stdin, seen.fds) == (1, stdin, [])
    assert seen.environment == {name: value for name, value in env.items() if name.startswith("CNI_")}
    assert not (sock.parent / "deleteQueue").exists()


def test_the_agents_error_is_printed_as_it_is(sock: Path) -> None:
    sock.parent.mkdir()
    spoken = b'{"cniVersion":"1.0.0","code":999,"msg":"no"}\n'
    with StubAgent(sock).answering(answer(reply(1, spoken, version=7))):
        ended = run_plugin(environment("DEL"), conf(sock))
    assert (ended.code, ended.stdout) == (1, spoken.decode())


def test_without_an_agent_the_request_is_queued_once(sock: Path) -> None:
    for _ in range(2):
        ended = run_plugin(environment("DEL"), conf(sock))
        assert (ended.code, ended.stdout) == (0, "")
    assert queue_of(sock) == [QUEUED, "lockfile"]
    queue = sock.parent / "deleteQueue"
    assert (queue / QUEUED).read_text() == '{"container-id":"cid1"}'
    modes = [path.stat().st_mode & 0o7777 for path in (queue, queue / QUEUED, queue / "lockfile")]
    assert modes == [0o755, 0o644, 0o644]


@pytest.mark.parametrize("length", [1, 8, 31, 32, 33, 64, 100, 200, 500])
def test_files_are_named_by_the_digest_of_their_contents(sock: Path, length: int) -> None:
    run_plugin(environment("DEL", CNI_CONTAINERID="c" * length), conf(sock))
    (name, _) = queue_of(sock)
    contents = (sock.parent / "deleteQueue" / name).read_bytes()
    assert json.loads(contents) == {"container-id": "c" * length}
    assert name == sha256(contents).hexdigest() + ".delete"


@pytest.mark.parametrize(("files", "queued"), [(255, True), (256, False)])
def test_a_full_queue_takes_no_more_and_the_delete_succeeds_all_the_same(
    sock: Path, files: int, queued: bool
) -> None:
    queue = sock.parent / "deleteQueue"
    queue.mkdir(parents=True)
    for number in range(files):
        (queue / f"{number:064x}.delete").touch()
    ended = run_plugin(environment("DEL"), conf(sock))
    assert ended.code == 0
    assert (queue / QUEUED).exists() == queued
    assert ("has too many entries; aborting" in ended.stderr) != queued


def test_while_the_agent_drains_the_delete_waits_and_then_fails(sock: Path) -> None:
    lock = lock_exclusively(sock)
    try:
        ended = run_plugin(environment("DEL"), conf(sock))
    finally:
        os.close(lock)
    assert ended.code == 1
    assert ended.json["code"] == 999
    assert ended.json["msg"] == (
        "unable to connect to Cilium agent: failed to acquire deletion queue:"
        " failed to acquire lock: context deadline exceeded"
    )
    assert queue_of(sock) == ["lockfile"]


def test_an_agent_that_returns_while_the_delete_waits_for_the_lock_gets_it(sock: Path) -> None:
    patience = Patience.WAITING_FOR_THE_LOCK
    lock = lock_exclusively(sock)
    result = []
    plugin = threading.Thread(
        target=lambda: result.append(run_plugin(environment("DEL"), conf(sock), patience))
    )
    plugin.start()
    eventually(lambda: opened_by_another(sock.parent / "deleteQueue" / "lockfile"))
    with StubAgent(sock).answering(answer(reply(0, b""))) as agent:
        os.close(lock)
        plugin.join()
    assert result[0].code == 0
    assert len(agent.requests) == 1
    assert queue_of(sock) == ["lockfile"]


def test_a_delete_with_a_dying_agent_stays_queued(sock: Path) -> None:
    sock.parent.mkdir()
    with StubAgent(sock).answering(hang_up, hang_up) as agent:
        ended = run_plugin(environment("DEL"), conf(sock))
    assert ended.code == 0
    assert len(agent.requests) == 2
    assert queue_of(sock) == [QUEUED, "lockfile"]


def test_a_silent_agent_makes_the_delete_fail_so_that_it_is_tried_again(sock: Path) -> None:
    sock.parent.mkdir()

    def wait_for_the_end(connected: socket.socket, _seen: Seen) -> None:
        assert connected.recv(1) == b""

    with StubAgent(sock).answering(wait_for_the_end):
        ended = run_plugin(environment("DEL"), conf(sock), Patience.OF_THE_SILENT)
    assert (ended.code, ended.json["code"]) == (1, 11)
    assert "did not answer in time" in ended.json["msg"]


@pytest.mark.parametrize("packet", [b"HTTP/1.1 400", b"HCNI", reply(0, b"abc")[:-1]])
def test_a_socket_of_another_service_is_an_error(sock: Path, packet: bytes) -> None:
    sock.parent.mkdir()
    with StubAgent(sock).answering(answer(packet)):
        ended = run_plugin(environment("DEL"), conf(sock))
    assert ended.code == 1
    assert "gave no proper answer" in ended.json["msg"]


@pytest.mark.parametrize("netns", ["", "/var/run/netns/gone", str(ROOT / "pyproject.toml"), "/etc/passwd/x"])
def test_del_without_the_network_namespace_succeeds(sock: Path, netns: str) -> None:
    sock.parent.mkdir()
    with StubAgent(sock).answering(answer(reply(0, b""))) as agent:
        ended = run_plugin(environment("DEL", CNI_NETNS=netns), conf(sock))
    assert ended.code == 0
    assert agent.requests[0].fds == []


def test_a_chained_delete_is_queued_like_any_other(sock: Path) -> None:
    ended = run_plugin(environment("DEL"), conf(sock, name="mynet", **{"chaining-mode": "generic-veth"}))
    assert ended.code == 0
    assert queue_of(sock) == [QUEUED, "lockfile"]


def test_an_unknown_chaining_mode_is_refused(sock: Path) -> None:
    ended = run_plugin(environment("DEL"), conf(sock, **{"chaining-mode": "none"}))
    assert (ended.code, ended.json["msg"]) == (1, "invalid chaining-mode none")


def test_errors_go_to_the_log_file_and_debug_logs_every_call(sock: Path, tmp_path: Path) -> None:
    log = tmp_path / "cni.log"
    run_plugin(environment("DEL"), conf(sock, **{"log-file": str(log), "enable-debug": True}))
    lines = log.read_text().splitlines()
    assert "wrote queued deletion file" in lines[0]
    assert 'level=debug msg="DEL container cid1 done after' in lines[1]


def test_a_log_file_that_cannot_be_written_changes_nothing(sock: Path) -> None:
    ended = run_plugin(environment("DEL"), conf(sock, **{"log-file": "/nowhere/cni.log"}))
    assert ended.code == 0
