"""Failures on a node with running pods: pods continue, faults are reported, and all recovers."""

from __future__ import annotations

import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hive import syscalls
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.node import Lab
from hive.lab.pods import Attached
from hive.lab.traffic.probe import ping
from tests.support.account import agreed, in_kernel
from tests.support.agents import invoke, run_agent, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

RUN = Path("/run/cilium")
MS_RDONLY, MS_REMOUNT = 1, 32
POWERLESS = ("setpriv", "--bounding-set=-all,+dac_read_search")
YEARS = 10 * 365 * 86400
TRACEBACK = "Traceback (most recent call last)"


@pytest.fixture
def pair(lab: Lab) -> tuple[Attached, Attached]:
    """Two pods of a node with a serving agent."""
    return pods.add(lab, "first"), pods.add(lab, "second")


def speak(lab: Lab, pair: tuple[Attached, Attached]) -> None:
    """The pods reach one another."""
    first, second = pair
    for name, other in (("first", second), ("second", first)):
        with lab.open_pod(name) as pod:
            assert len(pod.run(ping, other.ipv4, 2)) == 2


# What keeps an agent from starting


def read_only_state() -> None:
    syscalls.mount(str(RUN), RUN, flags=syscalls.MS_BIND)
    syscalls.mount("none", RUN, flags=syscalls.MS_BIND | MS_REMOUNT | MS_RDONLY)


def hidden_bpffs() -> None:
    syscalls.mount("none", "/sys/fs/bpf", "tmpfs")


def full_state() -> None:
    """A file system without a byte left over what is there now, its directories in their places."""
    syscalls.mount("none", "/mnt", "tmpfs", data="size=256k")
    shutil.copytree(RUN, "/mnt", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", "*.pipe"))
    Path("/mnt/cilium.pid").write_bytes(b"")
    with Path("/mnt/filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
    syscalls.mount("/mnt", RUN, flags=syscalls.MS_BIND)


def nothing() -> None:
    """The node is as it was."""


def uncover(where: str) -> None:
    syscalls.unmount(where, syscalls.MNT_DETACH)


@pytest.mark.parametrize(
    ("cause", "where", "wrapper", "line"),
    [
        (
            read_only_state,
            str(RUN),
            (),
            "state-dir /var/run/cilium is not usable: .*Read-only file system; .*",
        ),
        (full_state, str(RUN), (), "state-dir /var/run/cilium is not usable: .*No space left on device; .*"),
        (hidden_bpffs, "/sys/fs/bpf", (), "no bpffs at bpf-root /sys/fs/bpf: mount one with: .*"),
        (nothing, "", POWERLESS, "the agent lacks CAP_NET_ADMIN and CAP_SYS_ADMIN: .*"),
        (
            nothing,
            "",
            ("strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", "inject=bpf:error=ENOMEM"),
            ".*memory.*",
        ),
    ],
    ids=["read-only state", "full disk", "no bpffs", "no capabilities", "no kernel memory"],
)
def test_a_start_that_fails_leaves_pods_alone_and_the_next_one_works(
    lab: Lab,
    pair: tuple[Attached, Attached],
    cause: Callable[[], None],
    where: str,
    wrapper: tuple[str, ...],
    line: str,
) -> None:
    before = agreed(lab)
    agent_process.crash(lab)
    with lab.open() as inside:
        kernel = inside.run(in_kernel)
        inside.run(cause)
        ended = run_agent(lab, wrapper=wrapper)
        assert ended.code == 1
        assert re.fullmatch(f"hive: {line}", ended.line)
        assert TRACEBACK not in ended.stderr
        speak(lab, pair)
        if where:
            inside.run(uncover, where)
        assert inside.run(in_kernel) == kernel
    serving(lab)
    assert agreed(lab) == before
    speak(lab, pair)


# What befalls an agent that serves


def injecting(call: str, error: str) -> tuple[str, ...]:
    """The command that has every such system call of a process fail; what to run, or a pid, follows."""
    inject = f"inject={call}:error={error}"
    return "strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject


@contextmanager
def failing(pid: int, call: str, error: str) -> Iterator[None]:
    """Inside, every such system call of the process fails; RuntimeError when it cannot be arranged."""
    tracer = subprocess.Popen([*injecting(call, error), "-p", str(pid)], stdin=subprocess.DEVNULL)
    try:
        eventually(lambda: all(traced(task) for task in Path(f"/proc/{pid}/task").iterdir()))
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(60)


def traced(task: Path) -> bool:
    return "TracerPid:\t0\n" not in (task / "status").read_text()


@pytest.mark.parametrize(("call", "error"), [("bpf", "ENOMEM"), ("mkdir", "ENOSPC"), ("rename", "EIO")])
def test_a_kernel_that_refuses_calls_refuses_pods_and_nothing_else(
    lab: Lab, pair: tuple[Attached, Attached], call: str, error: str
) -> None:
    before = agreed(lab)
    lab.hold_pod("third")
    pid = agent_process.running(lab)
    assert pid is not None
    with failing(pid, call, error):
        refusal = invoke(lab, "third", "ADD")
        assert refusal.code == 1
        assert refusal.json["msg"].startswith("unable to ")
        assert "internal" not in refusal.json["msg"]
        speak(lab, pair)
    assert TRACEBACK not in lab.agent_log.read_text()
    eventually(lambda: agreed(lab) == before)
    assert invoke(lab, "third", "ADD").code == 0
    assert len(agreed(lab).listed) == 3


def test_without_inotify_pods_are_added_and_the_file_is_watched_later(node: Lab) -> None:
    pid = serving(node, "--cni-exclusive=true")
    with failing(pid, "inotify_init1", "EMFILE"):
        shutil.rmtree(node.cni_conf.parent)
        eventually(node.cni_conf.exists)
        eventually(lambda: "Too many open files" in node.agent_log.read_text())
        pods.add(node, "pod")
    assert TRACEBACK not in node.agent_log.read_text()

    def put_back() -> bool:
        node.cni_conf.unlink(missing_ok=True)
        eventually(node.cni_conf.exists, within=5)
        return True

    eventually(put_back)


def test_an_agent_without_inotify_serves_and_reports_what_it_cannot_watch(node: Lab) -> None:
    tracer = (*injecting("inotify_init1", "EMFILE"), "--daemonize")
    pid = agent_process.start(node, "--cni-exclusive=true", wrapper=tracer)
    agent_process.wait_ready(node, pid)
    speak(node, (pods.add(node, "first"), pods.add(node, "second")))
    eventually(lambda: "Too many open files" in node.agent_log.read_text())
    message = ask("/v1/healthz", agent_process.api_socket(pid))["cni-file"]["msg"]
    assert message.endswith(f"{node.cni_conf}; not watched: Too many open files")
    assert TRACEBACK not in node.agent_log.read_text()


@pytest.fixture(scope="module")
def moved_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that moves the clock of the process that loads it."""
    library = tmp_path_factory.mktemp("clock") / "clock_offset.so"
    source = Path(__file__).parents[2] / "support" / "clock_offset.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


def jump(offset: Path, seconds: int) -> None:
    fresh = offset.with_suffix(".new")
    fresh.write_bytes(struct.pack("<q", seconds))
    fresh.replace(offset)


def test_a_jump_of_the_clock_disturbs_no_traffic(node: Lab, moved_clock: Path) -> None:
    offset = moved_clock.with_name("offset")
    jump(offset, 0)
    pid = agent_process.start(node, wrapper=("env", f"LD_PRELOAD={moved_clock}", f"CLOCK_OFFSET={offset}"))
    agent_process.wait_ready(node, pid)
    pair = pods.add(node, "first"), pods.add(node, "second")
    for seconds in (YEARS, -YEARS, 0):
        jump(offset, seconds)
        year = time.gmtime(time.time() + seconds).tm_year
        pods.add(node, "third")
        eventually(lambda year=year: f"time={year}-" in agent_process.log_end(node, 3))  # type: ignore[misc]
        speak(node, pair)
        brief = ask("/v1/healthz", agent_process.api_socket(pid), {"brief": "true"})
        assert brief["cilium"]["state"] == "Ok"
        assert len(agreed(node).listed) == 3
        pods.delete(node, "third")
        assert len(agreed(node).listed) == 2
    assert TRACEBACK not in node.agent_log.read_text()
    assert agent_process.running(node) == pid
