"""The agent's start from outside: files, sockets and ports appear in the documented order.

The API's responses during the start are tested in tests/unit/api/test_gate.py, the order of hooks in
tests/unit/agent and tests/kernel/agent.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

import pytest
from asyncinotify import Inotify, Mask

from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.children import Stop
from hive.lab.node import Lab
from tests.support.agents import serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

RUN = Path("/run/cilium")
PROBED = ("127.0.0.1", 9879)
LATER = ("cilium.sock", "cni.sock")
SEEN = Mask.CREATE | Mask.DELETE | Mask.CLOSE_WRITE | Mask.MOVED_TO


def seen(stop: Stop, folders: list[Path], last: str) -> list[tuple[str, Mask]]:
    """What happens to the files of these folders, in order, until a file of this name has been made."""
    with Inotify(sync_timeout=60) as inotify:
        for folder in folders:
            inotify.add_watch(folder, SEEN)
        (RUN / "watched").touch()
        found: list[tuple[str, Mask]] = []
        for event in inotify:
            found.append((str(event.name), event.mask & SEEN))
            if str(event.name) == last or stop.wait(0):
                break
        return found


def hold_queue(stop: Stop) -> None:
    """Be a plugin that is writing to the delete queue."""
    lock = os.open(RUN / "deleteQueue" / "lockfile", os.O_RDWR)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    (RUN / "held").touch()
    stop.wait(600)


def connected() -> bool:
    """Whether the port for probes takes connections."""
    with socket.socket() as asking:
        return asking.connect_ex(PROBED) == 0


def pidfile() -> tuple[str, int]:
    """Contents and mode of the pidfile."""
    path = RUN / "cilium.pid"
    return path.read_text(), stat.S_IMODE(path.stat().st_mode)


def test_start_steps_become_visible_in_order(lab: Lab) -> None:
    pods.add(lab, "pod")
    agent_process.crash(lab)
    conf = lab.cni_conf
    conf.unlink()
    with lab.open() as inside:
        watching = inside.start(seen, [RUN, conf.parent], conf.name)
        eventually(lambda: inside.run((RUN / "watched").exists))
        serving(lab)
        events = watching.result(within=60)
        eventually(lambda: inside.run(connected))
    at = {event: number for number, event in reversed(list(enumerate(events)))}
    vanished, claimed = [at[name, Mask.DELETE] for name in LATER], at["cilium.pid", Mask.CLOSE_WRITE]
    serve, announced = [at[name, Mask.CREATE] for name in LATER], at[conf.name, Mask.MOVED_TO]
    assert max(vanished) < claimed < min(serve)
    assert max(serve) < announced == len(events) - 1


def test_nothing_is_announced_while_the_queue_is_held(lab: Lab) -> None:
    """A slow plugin holds up the sockets, and with them all that follows; what comes before is there."""
    pods.add(lab, "pod")
    agent_process.crash(lab)
    lab.cni_conf.unlink()
    lab.agent_log.unlink()
    with lab.open() as inside:
        holding = inside.start(hold_queue)
        eventually(lambda: inside.run((RUN / "held").exists))
        pid = agent_process.start(lab)
        eventually(lambda: "Finished regenerating" in lab.agent_log.read_text())
        assert inside.run(pidfile) == (f"{pid}\n", 0o660)
        assert not set(LATER) & set(inside.run(os.listdir, RUN))
        assert not inside.run(connected)
        assert not lab.cni_conf.exists()
        holding.finish(within=60)
        agent_process.wait_ready(lab, pid)
        eventually(lambda: inside.run(connected))
        assert set(LATER) <= set(inside.run(os.listdir, RUN))


def test_a_start_loads_nothing_that_only_repairs_and_others_need(node: Lab) -> None:
    pid = agent_process.start(node, wrapper=["env", "PYTHONPROFILEIMPORTTIME=1"])
    agent_process.wait_ready(node, pid)
    ask("/v1/healthz", agent_process.api_socket(pid))
    eventually(lambda: "the DNS proxy is serving" in node.agent_log.read_text())
    lines = node.agent_log.read_text().splitlines()
    loaded = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "cells.agent" in loaded
    assert loaded & {"pyroute2", "importlib.metadata", "grpc", "aetcd", "multiprocessing"} == set()
