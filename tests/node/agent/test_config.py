"""A real agent with a ConfigMap of Cilium's chart: copied by build-config, mounted, edited at runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from tests.support.agents import environment, run_agent, serving, terminated
from tests.support.waiting import eventually
from tests.unit.config.rendered import CHART

pytestmark = pytest.mark.node


def swap(directory: Path, generation: str, values: dict[str, str]) -> None:
    """Put a generation of a mounted ConfigMap in place, as the kubelet does."""
    (directory / generation).mkdir(parents=True)
    for name, value in values.items():
        (directory / generation / name).write_text(value)
    data = directory / "..data"
    earlier = data.readlink() if data.is_symlink() else None
    (directory / "..tmp").symlink_to(generation)
    (directory / "..tmp").replace(data)
    for name in values:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    if earlier is not None:
        shutil.rmtree(directory / earlier)


def hive(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command, to its end."""
    command = [sys.executable, "-m", "hive", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment())


def test_an_edit_of_the_config_map_shows_until_it_is_undone_or_the_agent_is_restarted(
    node: Lab, tmp_path: Path
) -> None:
    mounted, config_dir = tmp_path / "mounted", tmp_path / "config-map"
    values = CHART
    swap(mounted, "..1", values)
    assert hive("build-config", f"--dest={config_dir}", f"--source=directory:{mounted}").returncode == 0
    pid = serving(node, f"--config-dir={config_dir}")
    socket = f"--socket={api_socket(pid)}"
    states = f"{mounted} matches the running configuration.\n"
    eventually(lambda: hive("config", "diff", socket).stdout == states)

    swap(mounted, "..2", values | {"monitor-aggregation": "low"})
    eventually(lambda: hive("config", "diff", socket).returncode == 1)
    shown = hive("config", "diff", socket, "-o", "json")
    origin = f"file {mounted}/monitor-aggregation"
    assert json.loads(shown.stdout) == [
        {"name": "monitor-aggregation", "running": "medium", "configured": "low", "origin": origin}
    ]
    assert "agent.config-drift.drift" in hive("status", socket).stdout

    swap(mounted, "..3", values)
    eventually(lambda: hive("config", "diff", socket).returncode == 0)
    swap(mounted, "..4", values | {"enable-envoy-config": "true"})
    eventually(lambda: "would not start again" in hive("config", "diff", socket).stderr)
    assert terminated(node, pid) == 0

    assert hive("build-config", f"--dest={config_dir}", f"--source=directory:{mounted}").returncode == 0
    ended = run_agent(node, f"--config-dir={config_dir}")
    refused = f"{config_dir}/enable-envoy-config: 'true'"
    line = f"hive: {refused}: not supported yet, expected false, or leave it unset"
    assert (ended.code, ended.line) == (2, line)


def test_the_running_configuration_is_saved_for_tools_without_an_agent(node: Lab) -> None:
    terminated(node, serving(node, "--mtu=1400"))
    terminated(node, serving(node, "--mtu=1410"))
    with node.open() as inside:
        retained = [
            inside.run(read, f"/run/cilium/state/agent-runtime-config{one}.json") for one in ("", "-1")
        ]
    assert [one["Settings"]["mtu"] for one in retained] == ["1410", "1400"]
    assert (retained[0]["EnableIPv4"], retained[0]["ClockSource"]) == (True, 0)


def read(path: str) -> dict[str, Any]:
    """What a JSON file of the node holds."""
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found
