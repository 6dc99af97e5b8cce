"""The agent of a lab node: started as the child process a node would have, waited for, found again, ended."""

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
    """Start ``hive agent`` inside the node and return its pid; `settings` are more ``--name=value``.

    It outlives us: own session, output in the node's agent.log. `wrapper` is a command that becomes it.
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
    # It is found again by its pid: we do not wait for it as its parent.
    process.returncode = 0
    _pidfile(lab).write_text(f"{process.pid} {birth(process.pid)}")
    _settings_file(lab).write_text(json.dumps(settings))
    return process.pid


def _numbering(settings: Sequence[str]) -> list[str]:
    """Identities from the upper half, as half of a cluster's pods have: they set the highest bit of marks."""
    named = any(each.startswith("--first-identity=") for each in settings)
    return [] if named else [f"--first-identity={FIRST_IDENTITY}"]


def last_settings(lab: Lab) -> list[str]:
    """The settings its agent was started with last; none if it never was."""
    try:
        found: list[str] = json.loads(_settings_file(lab).read_text())
    except FileNotFoundError:
        return []
    return found


def _settings_file(lab: Lab) -> Path:
    return lab.directory / "settings.json"


def _environment(lab: Lab) -> dict[str, str]:
    """Ours without an agent's settings; a node that has objects goes by its own name."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("CILIUM_")}
    return found | ({"K8S_NODE_NAME": lab.name} if lab.manifests.is_dir() else {})


def wait_ready(lab: Lab, pid: int, within: float = READY_WITHIN) -> float:
    """Wait until the agent serves the API and has written the network configuration; seconds it took.

    Raises LabError, with the end of the agent's log, when it ends instead or takes too long.
    """
    began = time.monotonic()
    agent_socket = api_socket(pid)
    while not (lab.cni_conf.exists() and _serves(agent_socket)):  # it is asked only when it may be ready
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
    """The API socket of an agent, as seen from outside its node.

    Without /var/run: an absolute symbolic link leads out of /proc/<pid>/root again.
    """
    return Path(f"/proc/{pid}/root/run/cilium/cilium.sock")


def running(lab: Lab) -> int | None:
    """The pid of the node's agent, if it runs."""
    try:
        pid, born = _pidfile(lab).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if birth(int(pid)) == born else None


def terminate(lab: Lab, within: float = 30.0) -> bool:
    """Ask the agent to end, and wait; false when it does not within `within` seconds."""
    return _end(lab, signal.SIGTERM, within)


def crash(lab: Lab) -> None:
    """Kill the agent with -9, as the out-of-memory killer would."""
    if not _end(lab, signal.SIGKILL, 30.0):
        raise LabError(f"the agent of node {lab.name} survives SIGKILL")


def log_end(lab: Lab, lines: int = 12) -> str:
    """The last lines the agent printed."""
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
    """Start time, by which a later process with its pid differs (proc_pid_stat(5), field 22)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def _serves(agent_socket: Path) -> bool:
    """Whether the agent is well; without its store it does what it can."""
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
