"""Replays a recording of Cilium's plugin on ours; compares the output and the kernel's state afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio

from tests.kernel.cni_plugin.differences import DIFFERENT, Difference
from tests.kernel.cni_plugin.kernel_state import POD, read_state
from tests.kernel.cni_plugin.recorded_agent import RecordedNode, serving
from tests.support.cni_plugin import Ended, run_plugin
from tests.support.waiting import eventually
from tests.unit.conformance.recordings import load

Json = Any
QUEUE: Final = Path("/var/run/cilium/deleteQueue")
LOCK: Final = Path("/run/cilium/deleteQueue/lockfile")
NOTHING_RUNS: Final = {
    "add_agent_down": {0},
    "check_agent_down": {0},
    "del_agent_down": {1, 2, 3},
    "del_queue_full": {0, 1},
    "del_queue_locked_client1.17": {0},
    "status_agent_down_client1.19": {0},
}
"""Commands that run without an agent."""
BEFORE: Final = {
    "address removed from eth0": f"ip -n {POD} address del 10.0.1.77/32 dev eth0",
    "eth0 removed": f"ip -n {POD} link del eth0",
}
"""Preparations before a command, by its note."""
_CLIENT_WORDS = re.compile(r"\[[A-Z]+ /[^\]]*\]\[\d+\] \w+ +")
_PATIENCE = re.compile(r"after \d+\.0+ seconds")
_FREE = frozenset({"<IFINDEX>", "<NETNSID>", "<LENGTH>", "<LINK_LOCAL>"})
_ANNOTATIONS = "io.kubernetes.cri.pod-annotations"


class Replay:
    """One recording, command by command."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.recording = load(f"cni/{name}")
        self.node = RecordedNode()
        self.node.route_mtu_in_chains = "enableRouteMTUForCNIChaining" in json.dumps(self.recording)
        self.seen: dict[str, object] = {}
        """The value of each placeholder in this replay."""
        self.ended = anyio.Event()
        """Set when the plugin has exited, if there is one command."""

    async def run(self) -> None:
        """Prepare the node, run every command, compare."""
        await anyio.to_thread.run_sync(self._set_up)
        commands = list(enumerate(self.recording["steps"]))
        absent = NOTHING_RUNS.get(self.name, set())
        if self.name == "add_agent_starts_late":
            await self._start_late(*commands[0])
        elif self.name == "del_agent_returns_during_lock":
            await self._return_during_lock(*commands[0])
        else:
            async with _agent(self.node, wanted=0 not in absent):
                for number, step in commands:
                    if number not in absent or 0 in absent:
                        await self._command(number, step)
            for number, step in commands:
                if number in absent and 0 not in absent:
                    await self._command(number, step)

    def _set_up(self) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
        Path("/var/run/cilium").mkdir(parents=True)
        if (
            f"ip netns add {POD}" not in self.recording["setup"]
        ):  # where the recorded plugin did not come so far
            subprocess.run(["ip", "netns", "add", POD], check=True)
        for line in self.recording["setup"]:
            if line.startswith("ip "):
                subprocess.run(line.split(), check=True)
            elif "257 files" in line:
                QUEUE.mkdir(parents=True)
                for number in range(257):
                    (QUEUE / f"{number:064x}.delete").write_text("x")

    async def _start_late(self, number: int, step: Json) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._command, number, step)
            done = anyio.Event()

            async def serve() -> None:
                async with serving(self.node):
                    await done.wait()

            tasks.start_soon(serve)
            await self.ended.wait()
            done.set()

    async def _return_during_lock(self, number: int, step: Json) -> None:
        with locked_queue() as lock:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._command, number, step)
                await anyio.to_thread.run_sync(eventually, someone_wants_the_lock)
                async with serving(self.node):
                    os.close(lock.pop())
                    await self.ended.wait()

    async def _command(self, number: int, step: Json) -> None:
        difference = DIFFERENT.get((self.name, number))
        if (command := BEFORE.get(step.get("note", ""))) is not None:
            await anyio.to_thread.run_sync(partial(subprocess.run, command.split(), check=True))
        before = await anyio.to_thread.run_sync(read_state) if difference and difference.clean else None
        if step["command"] == "ADD":  # other links, other addresses
            self.seen.clear()
        self.node.follow(step)
        env = {name: str(value) for name, value in step["env"].items()}
        stdin = self._stdin(step)
        with locked_queue() if self.name == "del_queue_locked_client1.17" else nothing():
            ended = await anyio.to_thread.run_sync(run_plugin, env, stdin)
        self.ended.set()
        where = f"{self.name}, command {number} ({step['command']}): {ended}"
        changed = None if difference is None else difference.exit_code
        assert ended.code == (step["exit_code"] if changed is None else changed), where
        self._compare_stdout(step, ended, difference, where)
        if difference is None or not difference.earlier:
            self._compare_puts(step, where)
        if (queue := step.get("delete_queue_after")) is not None:
            compare_queue(queue)
        expected = before if before is not None else step.get("kernel_after")
        if expected is not None:
            await self._compare_kernel(expected, where, exact=before is not None)

    def _stdin(self, step: Json) -> bytes:
        given = step["stdin"]
        if not isinstance(given, dict):
            return (given or "").encode()
        puts = [e["response"] for e in step["exchanges"] if e["request"]["method"] == "PUT"]
        answered = puts[0].get("body") if puts else None
        if isinstance(answered, dict) and "status" in answered:
            # There the agent's answer brings the annotation's MAC address, here the runtime's request does.
            mac = (answered["status"].get("networking") or {}).get("mac", "<")
            if not mac.startswith("<"):
                given = {**given, "runtimeConfig": {_ANNOTATIONS: {"cni.cilium.io/mac-address": mac}}}
        text = json.dumps(given)
        for placeholder, value in self.seen.items():
            text = text.replace(placeholder, str(value))
        return text.encode()

    def _compare_stdout(self, step: Json, ended: Ended, difference: Difference | None, where: str) -> None:
        printed = json.loads(ended.stdout) if ended.stdout else ""
        recorded = step["stdout"]
        if isinstance(printed, dict) and "code" in printed:
            assert printed.pop("cniVersion"), where
        if difference is not None and difference.stdout is not None:
            if isinstance(difference.stdout, dict):
                recorded = {**(recorded or {}), **difference.stdout}
            else:
                recorded = difference.stdout
        self.same(self._translated(recorded), self._translated(printed), where)
        if "stderr_head" in step and step["exit_code"] == 0:
            assert ended.stderr.splitlines()[1].startswith(step["stderr_head"].splitlines()[1])

    def _translated(self, output: Json) -> Json:
        """Return an output without the HTTP client's words, with our socket."""
        if isinstance(output, dict):
            return {key: self._translated(value) for key, value in output.items()}
        if isinstance(output, list):
            return [self._translated(value) for value in output]
        if not isinstance(output, str):
            return output
        text = _CLIENT_WORDS.sub("", output).replace('Get "http://localhost/v1/config": ', "")
        return _PATIENCE.sub("after N seconds", text.replace("/cilium.sock", "/cni.sock"))

    def _compare_puts(self, step: Json, where: str) -> None:
        recorded = [e["request"]["body"] for e in step["exchanges"] if e["request"]["method"] == "PUT"]
        for body in recorded:
            wanted = {k: v for k, v in body.items() if k not in {"state", "sync-build-endpoint"}}
            families = body["addressing"].items()
            wanted["addressing"] = {k: v for k, v in families if not k.endswith("-expiration-uuid")}
            self.same(wanted, self.node.puts[-1], where)

    async def _compare_kernel(self, expected: Json, where: str, *, exact: bool) -> None:
        wanted = sorted_lists(expected if exact else self._our_kernel(expected))

        def differences() -> list[str]:
            return list(unlike(wanted, projected(wanted, read_state()), dict(self.seen)))

        with suppress(AssertionError):  # shown in full below
            await anyio.to_thread.run_sync(eventually, lambda: not differences())
        self.same(wanted, projected(wanted, await anyio.to_thread.run_sync(read_state)), where)

    def _our_kernel(self, recorded: Json) -> Json:
        """Return the recorded state with the values that differ everywhere; see EVERYWHERE."""
        wanted = json.loads(json.dumps(recorded))
        for side in wanted.values():
            for link in side["links"]:
                if not self._set_up_beforehand(link["ifname"]) and link.get("link_netnsid") is not None:
                    link["num_tx_queues"] = link["num_rx_queues"] = 1
        return wanted

    def _set_up_beforehand(self, name: str) -> bool:
        """Return whether the link was created before the plugin ran."""
        lines = (line.split() for line in self.recording["setup"])
        made = any(line[:3] == ["ip", "link", "add"] and name in line for line in lines)
        return made and self.name.startswith("chained_")

    def same(self, recorded: Json, got: Json, where: str) -> None:
        """Raise AssertionError unless equal, with one value for each placeholder throughout."""
        differences = list(unlike(recorded, got, self.seen))
        assert not differences, (where, differences)


def unlike(recorded: Json, got: Json, seen: dict[str, object], path: str = "") -> Iterator[str]:
    """Describe how the two differ; values of placeholders are stored in ``seen``."""
    if recorded is ... and got:
        return
    if isinstance(recorded, dict) and isinstance(got, dict) and recorded.keys() == got.keys():
        for key in recorded:
            yield from unlike(recorded[key], got[key], seen, f"{path}/{key}")
    elif isinstance(recorded, list) and isinstance(got, list) and len(recorded) == len(got):
        for number, (one, other) in enumerate(zip(recorded, got, strict=True)):
            yield from unlike(one, other, seen, f"{path}[{number}]")
    elif isinstance(recorded, str) and recorded.startswith("<") and recorded.endswith(">"):
        if recorded not in _FREE and seen.setdefault(recorded, got) != got:
            yield f"{path}: {recorded} was {seen[recorded]!r}, is {got!r}"
    elif recorded != got:
        yield f"{path}: recorded {recorded!r}, got {got!r}"


def _order(item: Json) -> str:
    if not isinstance(item, dict):
        return str(item)
    return str([item.get(key) for key in ("ifname", "dst", "table", "type", "local", "priority", "table")])


def sorted_lists(value: Json) -> Json:
    """Return the value with sorted lists: the kernel's order has no meaning."""
    if isinstance(value, dict):
        return {key: sorted_lists(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted((sorted_lists(item) for item in value), key=_order)
    return value


def projected(wanted: Json, got: Json) -> Json:
    """Return only the keys that were recorded; all others that the tool prints are ignored."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return {key: projected(wanted[key], got.get(key)) for key in wanted}
    if isinstance(wanted, list) and isinstance(got, list):
        ours, theirs = sorted(got, key=_order), sorted(wanted, key=_order)
        if len(ours) != len(theirs):
            return ours
        return [projected(one, other) for one, other in zip(theirs, ours, strict=True)]
    return got


def compare_queue(recorded: Json) -> None:
    """Compare the delete queue's directory with the recorded files."""
    entries = list(QUEUE.iterdir())
    assert (len(entries), oct(QUEUE.stat().st_mode & 0o7777)) == (recorded["count"], recorded["dir_mode"])
    for name, file in recorded["files"].items():
        path = QUEUE / name
        assert (oct(path.stat().st_mode & 0o7777), path.read_text()) == (file["mode"], file["content"])


@asynccontextmanager
async def _agent(node: RecordedNode, *, wanted: bool) -> AsyncIterator[None]:
    if wanted:
        async with serving(node):
            yield
    else:
        yield


@contextmanager
def nothing() -> Iterator[None]:
    """Take no lock."""
    yield


@contextmanager
def locked_queue() -> Iterator[list[int]]:
    """Take the queue's lock as the agent does; a test that pops the descriptor must close it."""
    QUEUE.mkdir(parents=True, exist_ok=True, mode=0o755)
    fds = [os.open(QUEUE / "lockfile", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)]
    fcntl.fcntl(fds[0], fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def someone_wants_the_lock() -> bool:
    """Return whether a plugin has the lock file open."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            if any(fd.readlink() == LOCK for fd in (process / "fd").iterdir()):
                return True
        except OSError:
            continue
    return False
