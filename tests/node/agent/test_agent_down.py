"""While the agent is down, an ADD waits and then fails with that reason; a DEL is queued."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
import time
from pathlib import Path

import click
import pytest

from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.children import Stop
from hive.lab.kernel import machine_links
from hive.lab.node import Lab
from tests.support.account import agreed
from tests.support.agents import call_environment, ended, invoke, start_plugin
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

CONF = {"cniVersion": "1.0.0", "name": "cilium", "type": "cilium-cni"}
RUN = Path("/run/cilium")
QUEUE = RUN / "deleteQueue"


def queued() -> list[str]:
    return sorted(path.name for path in QUEUE.glob("*.delete"))


def links_of(lab: Lab, pod: str) -> frozenset[str]:
    with lab.open_pod(pod) as inside:
        return inside.run(machine_links)


def queue_of(lab: Lab) -> list[str]:
    with lab.open() as inside:
        return inside.run(queued)


def test_an_add_without_an_agent_waits_and_then_names_the_socket(node: Lab) -> None:
    node.hold_pod("pod")
    began = time.monotonic()
    refusal = invoke(node, "pod", "ADD", CONF)
    assert time.monotonic() - began >= 1
    assert (refusal.code, refusal.json["code"]) == (1, 999)
    assert refusal.json["msg"] == (
        "unable to connect to Cilium agent: failed to create cilium agent client after 1.000000 seconds"
        " timeout: dial unix /var/run/cilium/cni.sock: connect: no such file or directory"
        "\nIs the agent running?"
    )
    assert links_of(node, "pod") == {"lo"}
    assert not node.cni_conf.exists()


def test_the_plugin_that_is_installed_waits_half_a_minute() -> None:
    source = (Path(__file__).parents[3] / "cmd" / "cilium-cni" / "main.c").read_text()
    assert re.findall(r"#define (\w+_PATIENCE_MS) (\d+)", source)[:2] == [
        ("ADD_PATIENCE_MS", "30000"),
        ("DEL_PATIENCE_MS", "1000"),
    ]


@pytest.mark.parametrize("before", ["never", "crashed"])
def test_an_add_that_came_first_succeeds_when_the_agent_comes(node: Lab, before: str) -> None:
    if before == "crashed":
        agent_process.wait_ready(node, agent_process.start(node))
        agent_process.crash(node)
    waiting = []
    for pod in ("first", "second"):
        node.hold_pod(pod)
        env = call_environment(node, pod, "ADD")
        waiting.append(start_plugin(node, env, CONF, plugin=pods.PLUGIN))
    agent_process.wait_ready(node, agent_process.start(node))
    assert [ended(one).code for one in waiting] == [0, 0]
    assert len(agreed(node).listed) == 2
    assert links_of(node, "first") == {"lo", "eth0"}


def first_sight(stop: Stop) -> list[str] | None:
    """What was still queued when pods could be made."""
    while not stop.wait(0.0005):
        if (RUN / "cni.sock").exists():
            return queued()
    return None


def first_answer(stop: Stop) -> int | None:
    """How many endpoints the API first showed."""
    while not stop.wait(0.0005):
        with contextlib.suppress(click.ClickException):  # the server does not listen yet
            return len(ask("/v1/endpoint", RUN / "cilium.sock"))
    return None


def test_queued_deletes_are_done_before_the_next_agent_serves(lab: Lab) -> None:
    attached = [pods.add(lab, f"pod-{number}") for number in range(3)]
    agent_process.crash(lab)
    with lab.open() as inside:
        for name in ("cilium.sock", "cni.sock"):
            inside.run((RUN / name).unlink)
    for pod in (attached[0].pod, attached[1].pod, attached[0].pod):
        done = invoke(lab, pod, "DEL")
        assert (done.code, done.stdout) == (0, "")
        assert links_of(lab, pod) == {"lo"}
    assert len(queue_of(lab)) == 2

    with lab.open() as inside:
        watching, asking = inside.start(first_sight), inside.start(first_answer)
        agent_process.wait_ready(lab, agent_process.start(lab))
        assert watching.result(within=60) == []
        assert asking.result(within=60) == 1
    assert {ip for ip, _, _ in agreed(lab).listed.values()} == {attached[2].ipv4}
    log = lab.agent_log.read_text(encoding="utf-8")
    assert log.count('level=info msg="stale endpoint removed"') == 2
    assert "Unable to restore endpoint" not in log
    for one in attached:
        assert invoke(lab, one.pod, "DEL").code == 0
    assert agreed(lab).listed == {}


def write_slowly(stop: Stop, name: str, contents: str) -> None:
    """A plugin that holds the queue's lock, and writes its request late."""
    lock = os.open(QUEUE / "lockfile", os.O_RDWR)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    (QUEUE / "written-first").touch()
    stop.wait(600)
    (QUEUE / name).write_text(contents)


def test_a_plugin_that_is_writing_to_the_queue_is_waited_for(lab: Lab) -> None:
    pods.add(lab, "pod")
    agent_process.crash(lab)
    lab.agent_log.unlink()
    request = json.dumps({"container-id": pods.container_id(lab, "pod")})
    with lab.open() as inside:
        writing = inside.start(write_slowly, "late.delete", request)
        eventually(lambda: inside.run((QUEUE / "written-first").exists))
        pid = agent_process.start(lab)
        eventually(lambda: "Endpoints restored" in lab.agent_log.read_text())
        assert not {"cilium.sock", "cni.sock"} & set(inside.run(os.listdir, RUN))
        writing.finish(within=60)
        agent_process.wait_ready(lab, pid)
    assert agreed(lab).listed == {}


def test_invalid_files_in_the_delete_queue_do_not_stop_the_agent(lab: Lab) -> None:
    attached = pods.add(lab, "pod")
    agent_process.crash(lab)
    with lab.open() as inside:
        for name, contents in (
            ("empty", ""),
            ("rubbish", "{\x00"),
            ("stranger", '{"container-id":"nobody"}'),
            ("nameless", '{"container-id":""}'),
            ("long", "x" * 100_000),
        ):
            inside.run((QUEUE / f"{name}.delete").write_text, contents)
        inside.run((QUEUE / "note").touch)
        agent_process.wait_ready(lab, agent_process.start(lab))
        assert sorted(inside.run(os.listdir, QUEUE)) == ["lockfile", "note"]
    assert {ip for ip, _, _ in agreed(lab).listed.values()} == {attached.ipv4}


def test_deletes_that_meet_a_starting_agent_are_done_once(lab: Lab) -> None:
    """One after the other: some find no socket, some a locked queue, some the agent. None is lost."""
    names = [f"pod-{number}" for number in range(8)]
    for name in names:
        pods.add(lab, name)
    agent_process.crash(lab)
    pid = agent_process.start(lab)
    assert [invoke(lab, name, "DEL").code for name in names] == [0] * len(names)
    agent_process.wait_ready(lab, pid)
    assert agreed(lab).listed == {}
