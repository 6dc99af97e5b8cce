"""Start, find and stop the agent of a lab node.

The agent is a child process inside the node's namespaces that outlives the command that starts it. Its pid,
settings and log are files in the node's directory, so that later commands find them.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from hive.client import ask
from hive.lab import cgroups
from hive.lab.daemon import POLL, Daemon
from hive.lab.node import Lab, LabError

READY_WITHIN = 60.0
FIRST_IDENTITY = 32768


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
    with lab.open() as node:
        pid = _daemon(lab).start(node, command, _environment(lab))
    _settings_file(lab).write_text(json.dumps(settings))
    return pid


def _daemon(lab: Lab) -> Daemon:
    return Daemon(f"the agent of node {lab.name}", lab.directory / "agent.pid", lab.agent_log)


def _numbering(settings: Sequence[str]) -> list[str]:
    """Return a setting for identity numbers that also set the highest bit of packet marks."""
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
    agent_socket = api_socket(pid)
    # no request before the file exists
    return _daemon(lab).wait(pid, lambda: lab.cni_conf.exists() and _serves(agent_socket), within)


def wait_for_pod(lab: Lab, namespace: str, pod: str) -> None:
    """Wait until the node's agent, if one runs, has received a Pod object. Raises LabError."""
    began = time.monotonic()
    while (pid := running(lab)) is not None:
        rows = ask("/statedb/dump/k8s-pods", api_socket(pid))["k8s-pods"]
        if any(row["key"] == [namespace, pod] for row in rows):
            return
        if time.monotonic() - began > READY_WITHIN:
            raise LabError(f"the agent of node {lab.name} does not have {namespace}/{pod} in k8s-pods")
        time.sleep(POLL)


def api_socket(pid: int) -> Path:
    """Return the path of an agent's API socket from outside its node.

    Not by /var/run, an absolute symbolic link, which would lead out of /proc/<pid>/root.
    """
    return Path(f"/proc/{pid}/root/run/cilium/cilium.sock")


def running(lab: Lab) -> int | None:
    """Return the pid of the node's agent; None if it does not run."""
    return _daemon(lab).pid


def terminate(lab: Lab, within: float = 30.0) -> bool:
    """Send SIGTERM to the agent and wait; False if it still runs after ``within`` seconds."""
    return _daemon(lab).end(signal.SIGTERM, within)


def crash(lab: Lab) -> None:
    """Kill the agent with SIGKILL. Raises LabError if it survives."""
    _daemon(lab).kill()


def log_end(lab: Lab, lines: int = 12) -> str:
    """Return the last lines of the agent's log."""
    return _daemon(lab).log_end(lines)


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
