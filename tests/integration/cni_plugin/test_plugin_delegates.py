"""The plugin calls the IPAM plugin of its configuration, here a script."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.cni_plugin import (
    Ended,
    Seen,
    StubAgent,
    answer,
    environment,
    hang_up,
    reply,
    run_plugin,
)

REQUEST = reply(1, b'{"cniVersion":"1.1.0","code":999,"msg":"addresses, please"}', patch=2)
RESULT = {"cniVersion": "1.1.0", "ips": [{"address": "10.77.0.5/16"}]}


class Delegate:
    """A directory of CNI_PATH with a plugin called ``giver``."""

    def __init__(self, folder: Path, *, code: int = 0, states: object = RESULT) -> None:
        folder.mkdir()
        self.folder = folder
        self.calls = folder / "calls"
        script = folder / "giver"
        (folder / "says").write_text(json.dumps(states) if states is not None else "")
        script.write_text(
            f'#!/bin/sh\nread -r line || true\necho "$CNI_COMMAND $CNI_CONTAINERID $line" >> {self.calls}\n'
            f"if [ $CNI_COMMAND != DEL ]; then cat {folder}/says; exit {code}; fi\n"
        )
        script.chmod(0o755)

    @property
    def commands(self) -> list[str]:
        """What it was called for, and with which container."""
        if not self.calls.exists():
            return []
        return [" ".join(line.split(" ", 2)[:2]) for line in self.calls.read_text().splitlines()]

    @property
    def path(self) -> str:
        """CNI_PATH, in which it is not the first."""
        return f"/nonexistent:{self.folder}"


@pytest.fixture
def sock(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "cni.sock"


def call(sock: Path, command: str, delegate: Delegate, *, ipam: object = None, **more: object) -> Ended:
    conf = {
        "cniVersion": "1.1.0",
        "name": "cilium",
        "type": "cilium-cni",
        "agent-socket": str(sock),
        "ipam": {"type": "giver"} if ipam is None else ipam,
        **more,
    }
    netns = "" if command in {"DEL", "STATUS", "GC"} else "/proc/self/ns/net"
    env = environment(command, CNI_NETNS=netns, CNI_NETNS_OVERRIDE="1", CNI_PATH=delegate.path)
    return run_plugin({**env, "PATH": os.environ["PATH"]}, conf)


def needs_root() -> None:
    if os.geteuid():
        pytest.skip("an ADD enters a network namespace: it needs root")


def test_the_agent_gets_the_addresses_it_requests_from_delegated_ipam(sock: Path, tmp_path: Path) -> None:
    needs_root()
    delegate, agent = Delegate(tmp_path / "bin"), StubAgent(sock)
    with agent.answering(answer(REQUEST), answer(reply(0, b'{"done":true}'))):
        done = call(sock, "ADD", delegate)
    assert (done.code, done.stdout) == (0, '{"done":true}')
    first, second = agent.requests
    assert (first.flags & 2, first.addresses) == (0, b"")
    assert second.flags & 2
    assert json.loads(second.addresses) == RESULT
    assert second.stdin == first.stdin
    assert delegate.commands == ["ADD cid1"]
    assert '"giver"' in delegate.calls.read_text()  # it has our configuration


def test_addresses_are_given_back_when_the_agent_refuses_the_pod(sock: Path, tmp_path: Path) -> None:
    needs_root()
    delegate, agent = Delegate(tmp_path / "bin"), StubAgent(sock)
    refused = b'{"cniVersion":"1.1.0","code":11,"msg":"not today"}'
    with agent.answering(answer(REQUEST), answer(reply(1, refused))):
        done = call(sock, "ADD", delegate)
    assert (done.code, done.json["msg"]) == (1, "not today")
    assert delegate.commands == ["ADD cid1", "DEL cid1"]


def test_addresses_stay_allocated_while_the_state_of_the_pod_is_unknown(sock: Path, tmp_path: Path) -> None:
    needs_root()
    delegate, agent = Delegate(tmp_path / "bin"), StubAgent(sock)
    with agent.answering(answer(REQUEST), hang_up):
        done = call(sock, "ADD", delegate)
    assert (done.code, done.json["code"]) == (1, 11)
    assert delegate.commands == ["ADD cid1"]  # the runtime's DEL gives them back


def test_an_error_of_the_delegated_plugin_is_reported(sock: Path, tmp_path: Path) -> None:
    needs_root()
    error = {"cniVersion": "1.1.0", "code": 7, "msg": "no more addresses", "details": "in 10.77.0.0/16"}
    delegate, agent = Delegate(tmp_path / "bin", code=1, states=error), StubAgent(sock)
    with agent.answering(answer(REQUEST)):
        done = call(sock, "ADD", delegate)
    assert done.code == 1
    assert done.json["msg"] == "failed to invoke delegated plugin ADD for IPAM: no more addresses"
    assert done.json["details"] == "in 10.77.0.0/16"
    assert delegate.commands == ["ADD cid1", "DEL cid1"]  # CNI spec 1.1, section 4


@pytest.mark.parametrize(
    ("ipam", "spoken"),
    [
        ({"type": "absent"}, 'failed to find plugin "absent" in path [/nonexistent:'),
        ({"type": "../giver"}, 'invalid plugin name: "../giver"'),
        ({}, 'failed to find plugin "" in path ['),
    ],
)
def test_a_plugin_that_is_not_there_is_named(sock: Path, tmp_path: Path, ipam: object, spoken: str) -> None:
    needs_root()
    with StubAgent(sock).answering(answer(REQUEST)):
        done = call(sock, "ADD", Delegate(tmp_path / "bin"), ipam=ipam)
    assert done.code == 1
    assert done.json["msg"].startswith(f"failed to invoke delegated plugin ADD for IPAM: {spoken}")


def test_a_delegated_plugin_that_fails_silently_is_reported_with_its_exit_status(
    sock: Path, tmp_path: Path
) -> None:
    needs_root()
    with StubAgent(sock).answering(answer(REQUEST)):
        done = call(sock, "ADD", Delegate(tmp_path / "bin", code=3, states=None))
    assert done.json["msg"].endswith("netplugin failed with no error message: exit status 3")


def test_a_delete_gives_the_address_back_with_the_agent_and_without(sock: Path, tmp_path: Path) -> None:
    delegate = Delegate(tmp_path / "bin")
    order: list[str] = []

    def deleted(connected: object, seen: Seen) -> None:
        order.extend(delegate.commands)
        answer(reply(0, b""))(connected, seen)  # type: ignore[arg-type]

    with StubAgent(sock).answering(deleted):
        assert call(sock, "DEL", delegate).code == 0
    assert (order, delegate.commands) == ([], ["DEL cid1"])  # not before the agent has let go of it
    assert call(sock, "DEL", delegate).code == 0  # without a listener it is queued
    assert list((sock.parent / "deleteQueue").glob("*.delete"))
    assert delegate.commands == ["DEL cid1", "DEL cid1"]


def test_in_a_chain_addresses_are_the_business_of_the_plugin_before(sock: Path, tmp_path: Path) -> None:
    delegate = Delegate(tmp_path / "bin")
    with StubAgent(sock).answering(answer(reply(0, b""))):
        assert call(sock, "DEL", delegate, **{"chaining-mode": "generic-veth"}).code == 0
    assert delegate.commands == []


@pytest.mark.parametrize("command", ["CHECK", "STATUS", "GC"])
def test_a_check_fails_when_the_delegated_plugin_fails(sock: Path, tmp_path: Path, command: str) -> None:
    if command == "CHECK":
        needs_root()
    error = {"cniVersion": "1.1.0", "code": 50, "msg": "the pool is closed"}
    for code, states in ((0, None), (1, error)):
        delegate = Delegate(tmp_path / f"bin{code}", code=code, states=states)
        with StubAgent(sock).answering(answer(reply(0, b""))):
            done = call(sock, command, delegate)
        assert delegate.commands == [f"{command} cid1"]
        assert done.code == code
        assert (json.loads(done.stdout) if done.stdout else None) == states
    delegate = Delegate(tmp_path / "unasked")
    with StubAgent(sock).answering(answer(reply(1, b'{"code":50,"msg":"no"}'))):
        assert call(sock, command, delegate).json["msg"] == "no"
    assert delegate.commands == []
