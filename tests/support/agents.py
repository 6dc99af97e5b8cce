"""Real agents and the real plugin in a lab node, used as an operator and a container runtime use them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hive.lab import agent_process, pods
from hive.lab.node import Lab, create, destroy, exclusive, wait_exited
from tests.support.plugin import compiled_plugin

LOG_LINE = re.compile(r"time=\S+ level=\w+ ")


@dataclass(frozen=True)
class Ended:
    """The result of a program."""

    code: int
    stdout: str
    stderr: str

    @property
    def messages(self) -> list[str]:
        """Return the lines of standard error without log lines."""
        return [line for line in self.stderr.splitlines() if not LOG_LINE.match(line)]

    @property
    def line(self) -> str:
        """Return the only such line."""
        (line,) = self.messages
        return line

    @property
    def json(self) -> Any:
        """Return standard output, decoded from JSON."""
        return json.loads(self.stdout)


def run_agent(
    lab: Lab,
    *settings: str | Path,
    env: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    within: float = 60.0,
) -> Ended:
    """Run ``hive agent`` inside the node until it ends; AssertionError if it does not end in time."""
    command = [*wrapper, sys.executable, "-m", "hive", "agent", *map(str, settings)]
    with lab.open() as node, node.popen(command, **_streams(), env=environment(env)) as process:
        try:
            stdout, stderr = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            process.kill()
            _, stderr = process.communicate()
            raise AssertionError(f"the agent went on:\n{stderr.decode(errors='replace')}") from None
    return Ended(process.returncode, stdout.decode(), stderr.decode())


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without the agent's settings, with these changes."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("CILIUM_")}
    return ours | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(changes or {})


def _streams() -> dict[str, int]:
    return {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def serving(lab: Lab, *settings: str) -> int:
    """Start an agent, wait until it serves, and return its pid."""
    pid = agent_process.start(lab, *settings)
    agent_process.wait_ready(lab, pid)
    return pid


def terminated(lab: Lab, pid: int, within: float = 60.0) -> int:
    """Send SIGTERM to an agent of ours and wait; return its exit code, -15 if the signal itself ended it."""
    os.kill(pid, signal.SIGTERM)
    assert wait_exited(pid, within), f"the agent goes on after SIGTERM:\n{agent_process.log_end(lab, 40)}"
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# The plugin


def hasty_plugin() -> Path:
    """Return a plugin with short timeouts: 1 s for an agent, 0.1 s before it queues a DEL.

    It waits a minute for the queue's lock, not 10 s: an agent that starts on a busy machine holds it for
    long.
    """
    return compiled_plugin("-DADD_PATIENCE_MS=1000", "-DDEL_PATIENCE_MS=100", "-DLOCK_PATIENCE_MS=60000")


def call_environment(lab: Lab, pod: str, command: str, **changes: str | None) -> dict[str, str]:
    """Return the environment that a runtime sets for the plugin; a change to None removes the variable."""
    variables: dict[str, str | None] = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": pods.container_id(lab, pod),
        "CNI_NETNS": f"/run/netns/{pod}",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
        "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={pod}",
        **changes,
    }
    return {name: value for name, value in variables.items() if value is not None}


def start_plugin(
    lab: Lab, env: Mapping[str, str], stdin: object = None, *, plugin: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start the plugin inside the node; ``stdin`` is bytes, JSON, or the agent's CNI configuration file.

    It is the hasty plugin unless ``plugin`` is another.
    """
    command = [plugin or hasty_plugin()]
    with lab.open() as node:
        process = node.popen(command, **_streams() | {"stdin": subprocess.PIPE}, env=dict(env))
    given = pods.network_configuration(lab) if stdin is None else stdin
    assert process.stdin is not None
    try:
        process.stdin.write(given if isinstance(given, bytes) else json.dumps(given).encode())
        process.stdin.close()
    except BrokenPipeError:  # it did not want to read it
        process.stdin = None
    return process


def ended(process: subprocess.Popen[bytes], within: float = 120.0) -> Ended:
    """Wait for a program that was started with pipes."""
    process.stdin = None
    with process:
        try:
            stdout, stderr = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Ended(process.returncode, stdout.decode(), stderr.decode())


def invoke(lab: Lab, pod: str, command: str, stdin: object = None, **changes: str | None) -> Ended:
    """Run the plugin for a pod until it ends."""
    return ended(start_plugin(lab, call_environment(lab, pod, command, **changes), stdin))


@contextmanager
def made(lab: Lab) -> Iterator[Lab]:
    """Create the node for one block, after removing what an interrupted test left; remove it afterwards."""
    with exclusive():
        destroy(lab)
        create(lab)
    try:
        yield lab
    finally:
        with exclusive():
            destroy(lab)


def known_pods(folder: Path, *names: str) -> None:
    """Write the pods' objects into a folder of manifests; an endpoint without a pod object stays in
    reserved:init.
    """
    objects = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        }
        for name in names
    ]
    text = json.dumps({"kind": "List", "apiVersion": "v1", "items": objects})
    (folder / "pods.json").write_text(text, encoding="utf-8")
