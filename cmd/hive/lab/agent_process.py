"""Start, find and stop the agent of a lab node.

The agent is a child process inside the node's namespaces that outlives the command that starts it. Its pid,
settings and log are files in the node's directory, so that later commands find them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from hive.client import ask
from hive.lab import cgroups
from hive.lab.node import Lab, LabError, wait_exited

READY_WITHIN = 60.0
FIRST_IDENTITY = 32768
_SETTLE = 0.02


def start(lab: Lab, *settings: str, wrapper: Sequence[str] = ()) -> int:
    """Start ``hive agent`` inside the node and return its pid.

    ``settings`` are further ``--name=value`` options. ``wrapper`` is a command that executes the agent, such
    as strace. The agent gets its own session, and writes to agent.log of the node.
    """
    command = [
        *wrapper,
        sys.executable,
        "-m",
        "hive",
        "agent",
        f"--write-cni-conf-when-ready={lab.cni_conf}",
        *([f"--manifests-dir={lab.manifests}"] if lab.manifests.is_dir() else []),
        *_numbering(settings),
        *settings,
        *cgroups.settings_of(lab.name, settings),
    ]
    with lab.open() as node, lab.agent_log.open("ab") as log:
        process = node.popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(lab),
            start_new_session=True,
        )
    # Popen must not wait for it: it outlives this process, and is found by its pid file.
    process.returncode = 0
    _pidfile(lab).write_text(f"{process.pid} {birth(process.pid)}")
    _settings_file(lab).write_text(json.dumps(settings))
    return process.pid


def _numbering(settings: Sequence[str]) -> list[str]:
    """Return a setting for identities whose numbers also set the highest bit of packet marks."""
    named = any(each.startswith("--first-identity=") for each in settings)
    return [] if named else [f"--first-identity={FIRST_IDENTITY}"]


def last_settings(lab: Lab) -> list[str]:
    """Return the settings of the agent's last start; none if it never started."""
    try:
        found: list[str] = json.loads(_settings_file(lab).read_text())
    except FileNotFoundError:
        return []
    return found


def _settings_file(lab: Lab) -> Path:
    return lab.directory / "settings.json"


def _environment(lab: Lab) -> dict[str, str]:
    """Return this process's environment without agent settings; a node with objects gets its own name."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("CILIUM_")}
    return found | ({"K8S_NODE_NAME": lab.name} if lab.manifests.is_dir() else {})


def wait_ready(lab: Lab, pid: int, within: float = READY_WITHIN) -> float:
    """Wait until the agent serves its API and has written the CNI configuration; return the seconds.

    Raises LabError with the end of the agent's log if the agent exits or the time runs out.
    """
    began = time.monotonic()
    agent_socket = api_socket(pid)
    while not (lab.cni_conf.exists() and _serves(agent_socket)):  # no request before the file exists
        if wait_exited(pid, _SETTLE):
            _collect(pid)
            raise LabError(f"the agent of node {lab.name} ended instead of serving:\n{log_end(lab)}")
        if time.monotonic() - began > within:
            raise LabError(f"the agent of node {lab.name} did not serve within {within:g} s:\n{log_end(lab)}")
    return time.monotonic() - began


def wait_for_pod(lab: Lab, namespace: str, pod: str) -> None:
    """Wait until the node's agent, if one runs, has received a Pod object. Raises LabError."""
    began = time.monotonic()
    while (pid := running(lab)) is not None:
        rows = ask("/statedb/dump/k8s-pods", api_socket(pid))["k8s-pods"]
        if any(row["key"] == [namespace, pod] for row in rows):
            return
        if time.monotonic() - began > READY_WITHIN:
            raise LabError(f"the agent of node {lab.name} does not have {namespace}/{pod} in k8s-pods")
        time.sleep(_SETTLE)


def api_socket(pid: int) -> Path:
    """Return the path of an agent's API socket from outside its node.

    Not by /var/run, an absolute symbolic link, which would lead out of /proc/<pid>/root.
    """
    return Path(f"/proc/{pid}/root/run/cilium/cilium.sock")


def running(lab: Lab) -> int | None:
    """Return the pid of the node's agent; None if it does not run."""
    try:
        pid, born = _pidfile(lab).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if birth(int(pid)) == born else None


def terminate(lab: Lab, within: float = 30.0) -> bool:
    """Send SIGTERM to the agent and wait; False if it still runs after ``within`` seconds."""
    return _end(lab, signal.SIGTERM, within)


def crash(lab: Lab) -> None:
    """Kill the agent with SIGKILL. Raises LabError if it survives."""
    if not _end(lab, signal.SIGKILL, 30.0):
        raise LabError(f"the agent of node {lab.name} survives SIGKILL")


def log_end(lab: Lab, lines: int = 12) -> str:
    """Return the last lines of the agent's log."""
    try:
        text = lab.agent_log.read_text(errors="replace")
    except FileNotFoundError:
        return "  (it printed nothing)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (it printed nothing)"


def _end(lab: Lab, signal_number: signal.Signals, within: float) -> bool:
    pid = running(lab)
    if pid is None:
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)
    exited = wait_exited(pid, within)
    if exited:
        _collect(pid)
    return exited


def _collect(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # another process started it
        os.waitpid(pid, 0)


def _pidfile(lab: Lab) -> Path:
    return lab.directory / "agent.pid"


def birth(pid: int) -> str | None:
    """Return the start time of a process, None if it has exited: a later process with its pid differs.

    Source: proc_pid_stat(5), field 22.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def _serves(agent_socket: Path) -> bool:
    """Return whether the agent reports health, or fails only because its kvstore is unreachable."""
    try:
        if (
            ask("/v1/healthz", agent_socket, {"Brief": "true"}, timeout=READY_WITHIN)["cilium"]["state"]
            == "Ok"
        ):
            return True
        answer = ask("/v1/healthz", agent_socket, timeout=READY_WITHIN)
    except click.ClickException:
        return False
    return bool(answer["kvstore"]["state"] == "Failure" and not answer.get("stale"))
