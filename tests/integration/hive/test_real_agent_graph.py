"""``hive inspect`` and ``hive agent`` on the real agent: unprivileged, one line per mistake."""

import json
import os
import subprocess
import sys

import pytest

TREE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}


def hive(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command without any capability; the user may stay root, who can read the interpreter."""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*drop, sys.executable, "-m", "hive", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=TREE, check=False)


def test_the_graph_of_the_agent_is_shown_to_anyone() -> None:
    done = hive("inspect", "--format=json")
    assert (done.returncode, done.stderr) == (0, "")
    graph = json.loads(done.stdout)
    modules = {one["id"].rpartition(".")[2] for one in graph["modules"]}
    assert {"config", "maps", "datapath", "ipam", "endpoint", "cni-server", "api", "health"} <= modules
    assert {"mtu", "state-dir", "ipv4-range", "datapath-object"} <= {one["name"] for one in graph["settings"]}


def test_tree_and_dot_of_the_agent_are_drawn() -> None:
    assert "IPAM" in hive("inspect").stdout.upper()
    assert hive("inspect", "--format=dot").stdout.startswith("digraph")


def test_every_setting_of_the_agent_has_help() -> None:
    done = hive("agent", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--ipv4-range" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--enable-ipv4=false"], "a pod needs an address"),
        (["--mtu=12"], "mtu=12"),
        (["--mut=1500"], "did you mean --mtu?"),
        (["--config-dir=/nowhere"], "expected a directory"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(arguments: list[str], part: str) -> None:
    done = hive("agent", *arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert part in done.stderr


def test_missing_privileges_are_one_line_and_exit_code_1() -> None:
    done = hive("agent")
    assert (done.returncode, done.stdout) == (1, "")
    errors = [line for line in done.stderr.splitlines() if not line.startswith("time=")]
    assert len(errors) == 1
    assert errors[0].startswith("hive: ")
    assert "CAP_NET_ADMIN" in errors[0]
