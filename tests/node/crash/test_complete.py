"""The interposer sees every changing system call: strace of the same agents confirms it."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.lab import agent_process, pods
from hive.lab.demo.upgrade import second_build
from hive.lab.node import Lab, wait_exited
from tests.support.agents import invoke
from tests.support.crash.calls import BPF_READS, HARMLESS, IOCTL_READS
from tests.support.crash.interposer import Interposer
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

CALL = re.compile(r"\d+ +(?P<name>\w+)\((?P<arguments>.*)")
WRITES = re.compile(r"p?writev?(64|2)?|send(to|m?msg)")
INWARD = re.compile(
    r"[12]<"  # the log
    r"|\d+<pipe:|\d+<anon_inode:\[eventfd\]>"
    r"|\d+<UNIX-STREAM:\[\d+->\d+\]>"  # a pair; others have a path
    r'|\d+<UNIX[^>]*>, "HTTP/1'  # an answer of the API
)


def changing(line: str) -> str | None:
    """What strace shows of a call that changes something, or may: its name, and a bpf command."""
    if (call := CALL.match(line)) is None:
        return None
    name, arguments = call["name"], call["arguments"]
    if name == "bpf":
        command = arguments.removeprefix("BPF_").partition(",")[0]
        return None if command in BPF_READS else f"bpf {command}"
    if name in {"open", "openat"} and not re.search(r"O_(CREAT|TRUNC|TMPFILE)", arguments):
        return None
    if name == "ioctl" and IOCTL_READS.keys() & set(re.findall(r", ([A-Z]+)\b", arguments)):
        return None
    if name in HARMLESS:
        return None
    return f"- {name}" if WRITES.fullmatch(name) and INWARD.match(arguments) else name


def by_strace(trace: Path) -> Counter[str]:
    """What an agent did that changes something; what counts and, after a dash, what stays inside."""
    lines = trace.read_text(errors="replace").splitlines()
    (*_, begin) = (number for number, line in enumerate(lines) if " execve(" in line)
    agent = lines[begin + 1 :]
    written = [line for line in agent if re.search(r" mmap\(.*PROT_WRITE.*MAP_SHARED", line)]
    assert [line for line in written if re.search(r"\d+</", line)] == []  # a file changed without any call
    return Counter(filter(None, map(changing, agent)))


def by_interposer(lines: list[str]) -> Counter[str]:
    seen: Counter[str] = Counter()
    for line in lines:
        number, name, what = line.split(" ", 2)
        seen[("- " if number == "-" else "") + (f"bpf {what}" if name == "bpf" else name)] += 1
    return seen


class Witnessed:
    """Agents watched by both."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.interposer = Interposer(directory)
        self._trace = directory / "trace"

    def start(self, *settings: str) -> None:
        self._trace.unlink(missing_ok=True)
        tracer = ["strace", "-D", "-f", "-yy", "-s", "8", "-o", str(self._trace)]
        pid = self.interposer.start(self.lab, *settings, tracer=tracer)
        agent_process.wait_ready(self.lab, pid)
        self.interposer.rest()

    def agree(self, ending: signal.Signals) -> Counter[str]:
        """End the agent; what it did, which both saw."""
        self.interposer.rest()
        pid = agent_process.running(self.lab)
        assert pid is not None
        os.kill(pid, ending)
        assert wait_exited(pid, 60)
        agent_process.crash(self.lab)
        over = re.compile(rf"^{pid} +\+\+\+ ", re.MULTILINE)
        eventually(lambda: over.search(self._trace.read_text(errors="replace")))
        seen = by_interposer(self.interposer.lines)
        assert seen == by_strace(self._trace)
        return seen


@pytest.fixture
def witnessed(node: Lab, tmp_path: Path) -> Iterator[Witnessed]:
    witnessed = Witnessed(node, tmp_path)
    yield witnessed
    agent_process.crash(node)
    witnessed.interposer.close()


def test_whatever_an_agent_does_the_interposer_sees_what_strace_sees(witnessed: Witnessed) -> None:
    lab = witnessed.lab
    witnessed.start()
    for pod in ("stays", "goes", "queued"):
        pods.add(lab, pod)
    pods.delete(lab, "goes")
    done = witnessed.agree(signal.SIGKILL)
    assert {"bpf MAP_CREATE", "bpf OBJ_PIN", "bpf MAP_UPDATE_ELEM", "bpf MAP_DELETE_ELEM"} <= done.keys()
    assert {"mkdir", "openat", "write", "rename", "unlink", "rmdir", "sendto", "chmod", "bind"} <= done.keys()
    assert invoke(lab, "queued", "DEL").code == 0
    witnessed.start()
    restored = witnessed.agree(signal.SIGKILL)
    assert restored.total() < done.total()
    witnessed.start(f"--datapath-object={second_build(lab)}", "--bpf-ct-global-any-max=70000")
    upgraded = witnessed.agree(signal.SIGTERM)
    assert upgraded["bpf PROG_LOAD"] > restored["bpf PROG_LOAD"]


def test_writing_system_calls_are_never_classified_as_harmless() -> None:
    """Those that the issue of crashes names, and their kin."""
    writing = """
        write writev pwrite64 pwritev pwritev2 sendto sendmsg sendmmsg sendfile splice copy_file_range
        rename renameat renameat2 link linkat unlink unlinkat symlink symlinkat mkdir mkdirat rmdir mknod
        mknodat creat openat2 truncate ftruncate fallocate fsync fdatasync sync syncfs sync_file_range msync
        chmod fchmod fchmodat chown fchown fchownat lchown utimensat setxattr fsetxattr removexattr
        mount umount2 move_mount open_tree fsopen fsmount pivot_root setns unshare bind
        io_uring_setup io_uring_enter process_vm_writev ptrace kill tgkill tkill pidfd_send_signal sethostname
    """
    assert HARMLESS & set(writing.split()) == set()
