"""``hive bpf`` and ``hive debug`` on a node with pods."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hive.lab import agent_process, pods
from hive.lab.node import Lab
from hive.maps.bpf import command as dumping
from tests.support.agents import environment, serving

pytestmark = pytest.mark.node


LOOKED_AT = "looked-at"


@pytest.fixture(scope="module")
def looked_at(shared_node: Lab) -> Lab:
    """A node with an agent and a pod, which is only inspected."""
    serving(shared_node)
    pods.add(shared_node, LOOKED_AT)
    return shared_node


def hive(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    with lab.open() as node:
        command = [sys.executable, "-m", "hive", *arguments]
        with node.popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        ) as process:
            out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out.decode(), err.decode())


def bpf(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    return hive(lab, "bpf", *arguments)


def refusals(names: list[str]) -> dict[str, str]:
    """The maps of these that are not dumped, and what is printed instead; all in one process."""
    done = {name: CliRunner().invoke(dumping, ["dump", name]) for name in names}
    return {name: each.output for name, each in done.items() if each.exit_code}


def as_json(lab: Lab, *arguments: str) -> Any:
    return json.loads(bpf(lab, *arguments, "-o", "json").stdout)


def test_the_maps_of_a_node_can_be_read_with_and_without_an_agent(lab: Lab) -> None:
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    agent_process.crash(lab)
    listed = {one["name"]: one for one in as_json(lab, "list")}
    assert listed["cilium_lxc"]["rows"] == 4
    with lab.open() as node:
        dumped = node.run(refusals, sorted(listed))
    assert dumped.keys() == {name for name, one in listed.items() if one["type"] == "perf_event_array"}, (
        dumped
    )
    rows = {row["address"]: row for row in as_json(lab, "dump", "lxc")}
    assert rows[first.ipv4]["mac"] == first.pod_mac
    assert {first.ipv4, second.ipv4} <= {
        row["prefix"].removesuffix("/32") for row in as_json(lab, "dump", "ipcache")
    }
    endpoint = rows[first.ipv4]["endpoint"]
    dumped_rows = as_json(lab, "dump", f"policy/{endpoint}")
    assert {row["verdict"] for row in dumped_rows} == {"allow"}
    of_one = as_json(lab, "policy", str(endpoint))
    assert [row.pop("endpoint") for row in of_one] == [endpoint] * len(dumped_rows)
    assert [row["direction"] for row in of_one] == ["ingress", "egress"]
    assert all(row in dumped_rows for row in of_one)
    of_all = as_json(lab, "policy")
    assert {endpoint, rows[second.ipv4]["endpoint"]} <= {row["endpoint"] for row in of_all}


def test_one_archive_has_all_a_maintainer_asks_for(looked_at: Lab, tmp_path: Path) -> None:
    target = tmp_path / "bundle.tar.gz"
    ended = hive(looked_at, "debug", "bundle", "-f", str(target))
    assert (ended.returncode, ended.stderr) == (0, "")
    with tarfile.open(target) as archive:
        files = {
            entry.name.split("/", 1)[1]: file.read().decode()
            for entry in archive.getmembers()
            if (file := archive.extractfile(entry)) is not None
        }
    wanted = {"agent/debuginfo.json", "agent/graph.json", "kernel/maps/cilium_lxc.json", "state/listing.txt"}
    assert wanted <= files.keys()
    assert "serving the API" in files["process/log.txt"]
    assert "05-cilium.conflist" in files["node/cni.txt"]
    network = json.loads(files["node/network.json"])
    links = {link["IFLA_IFNAME"] for link in network["links"]}
    assert {"lo", "uplink"} < links
    assert [name for name in links if name.startswith("lxc")]
    assert {each["TCA_KIND"] for each in network["filters"]} == {"bpf"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dump", "nope"], "there is no map nope at /sys/fs/bpf/tc/globals; `hive bpf list` names them"),
        (
            ["dump", "policy/4095"],
            "there is no map /sys/fs/bpf/tc/globals/cilium_policy_04095; `hive bpf list`",
        ),
        (
            ["policy", "4095"],
            "endpoint 4095 has no policy map at /sys/fs/bpf/tc/globals; `hive bpf policy` shows",
        ),
        (["list", "--bpf-root", "/tmp"], "there are no maps at /tmp/tc/globals: has an agent run here"),
        (["dump", "events"], "cilium_events is a perf_event_array, which holds no rows"),
    ],
    ids=["unknown", "no endpoint", "no policy", "elsewhere", "no rows"],
)
def test_a_missing_object_is_reported_in_one_line(looked_at: Lab, arguments: list[str], message: str) -> None:
    ended = bpf(looked_at, *arguments)
    assert (ended.returncode, message in ended.stderr, ended.stderr.count("\n")) == (1, True, 1), ended.stderr


def test_the_shell_looks_into_the_running_agent(looked_at: Lab) -> None:
    (endpoint,) = json.loads(hive(looked_at, "endpoint", "list", "-o", "json").stdout)
    address = endpoint["status"]["networking"]["addressing"][0]["ipv4"]
    shown = hive(looked_at, "shell", "db/show", "--columns=ipv4", "endpoints")
    assert (shown.returncode, address in shown.stdout) == (0, True), shown.stdout + shown.stderr
    assert "degraded" in hive(looked_at, "shell", "status").stdout
    assert "cilium_endpoint" in hive(looked_at, "shell", "metrics", "endpoint").stdout
    refused = hive(looked_at, "shell", "db/show", "endpoint")
    assert (refused.returncode, refused.stdout) == (
        1,
        "no table is named endpoint; did you mean endpoints?\n",
    )
