"""The commands that ``cilium`` (cilium-cli) runs in an agent's pod, and how it parses their output.

They are those of its ``status``, ``connectivity test`` and ``sysdump``; a real agent answers. ``hive``'s
output about that agent fits on a terminal. Other programs are this machine's; the image has Debian's
(tests/node/image).
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.node import Lab
from tests.support.agents import environment, made, serving
from tests.support.cilium_cli import EXECS, HEALTH, MULTICAST, sysdump
from tests.support.namespaces import need_root
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

RUNTIME_CONFIG = "/var/run/cilium/state/agent-runtime-config.json"
MODULES = {
    "cilium": "hive.dbg.main",
    "cilium-dbg": "hive.dbg.main",
    "cilium-bugtool": "hive.agent.bugtool",
    "cilium-health": "hive.dbg.health",
    "hubble": "hive.observe.hubble",
}
"""Commands of the image, and our modules behind them."""
SETTINGS = (
    *("--kube-proxy-replacement=true", "--enable-hubble=true", "--enable-bgp-control-plane=true"),
    *("--enable-health-checking=true", "--connectivity-probe-frequency-ratio=0"),
    *("--enable-ipv4-egress-gateway=true", "--enable-bpf-masquerade=true"),
)


COLUMNS = 80


class Pod:
    """Where the agent runs, with the image's commands in PATH."""

    def __init__(self, node: Lab, commands: Path) -> None:
        self.node = node
        self._environment = environment({"PATH": f"{commands}:{os.environ['PATH']}:/usr/sbin"})
        for name, module in MODULES.items():
            command = commands / name
            command.write_text(f"#!{sys.executable}\nfrom {module} import main\nmain()\n")
            command.chmod(0o755)

    def start(self, words: Sequence[str], **streams: int) -> subprocess.Popen[bytes]:
        """Start a program there."""
        with self.node.open() as inside:
            return inside.popen(words, env=self._environment, cwd=Path.cwd(), **streams)

    def run(self, *words: str, code: int = 0) -> bytes:
        """What a command prints; of one that fails, its errors."""
        process = self.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, f"{words}: {process.returncode}, {err.decode()}"
        return err if code else out

    def text(self, *words: str) -> str:
        """The same, decoded."""
        return self.run(*words).decode()

    def json(self, *words: str) -> Any:
        """The same, as JSON."""
        return json.loads(self.run(*words))

    def on_terminal(self, *words: str) -> str:
        """What it prints on a terminal of its own, which ends its lines with a carriage return, too."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        process = self.start(words, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        printed = b""
        try:
            while chunk := os.read(ours, 65536):
                printed += chunk
        except OSError:  # EIO: the last process on it has ended
            pass
        finally:
            os.close(ours)
        assert process.wait(60) == 0, f"{words}: {printed.decode()}"
        return printed.decode()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """A node with a serving agent and a pod."""
    need_root()
    objects = tmp_path_factory.mktemp("objects")
    with made(Lab(f"cli-{os.getpid()}")) as node:
        serving(node, *SETTINGS, f"--manifests-dir={objects}")
        pods.add(node, "client")
        yield Pod(node, tmp_path_factory.mktemp("bin"))


def test_every_exec_of_cilium_cli_succeeds(agent: Pod) -> None:
    for one in EXECS:
        printed = agent.on_terminal(*one.words) if one.terminal else agent.text(*one.words)
        assert one.reads(printed), f"{one.words}: {printed}"
    assert b"multicast not enabled" in agent.run(*MULTICAST, code=1)


def test_the_health_test_of_cilium_cli_passes(agent: Pod) -> None:
    pid = agent_process.running(agent.node)
    assert pid is not None
    socket = agent_process.api_socket(pid).with_name("health.sock")
    eventually(lambda: ask("/v1beta/status", socket)["nodes"])
    assert HEALTH.reads(agent.on_terminal(*HEALTH.words))


def test_cilium_cli_detects_features(agent: Pod) -> None:
    status = agent.json("cilium", "status", "-o", "json")
    assert ("proxy" in status) == (find_spec("envoy") is not None), "L7 proxy is detected by it"
    assert status["host-firewall"]["mode"] in {"Disabled", "Enabled"}
    assert status["encryption"]["mode"] == "Disabled"
    assert status["cni-chaining"]["mode"] == "none"
    replacement = status["kube-proxy-replacement"]
    assert replacement["mode"] == "True"
    features = ("externalIPs", "hostPort", "gracefulTermination", "nodePort", "sessionAffinity", "socketLB")
    assert {name for name in features if replacement["features"][name].get("enabled")} >= {"nodePort"}

    version = agent.text("cilium", "version", "-o", "jsonpath={$.Daemon.Version}")
    assert re.fullmatch(r"1\.17\.\d+\S*", version.strip())

    config = json.loads(agent.text("cat", RUNTIME_CONFIG))
    read = {
        "MonitorAggregation": "medium",
        "EnableICMPRules": True,
        "EnableHealthChecking": True,
        "EnableEndpointHealthChecking": True,
        "EncryptNode": False,
        "EnableK8sNetworkPolicy": True,
    }
    assert {name: config[name] for name in read} == read


def test_cilium_cli_waits_for_policies_services_and_identities(agent: Pod) -> None:
    def ready() -> bool:
        endpoints = agent.json("cilium", "endpoint", "list", "-o", "json")
        return bool(endpoints) and all(one["status"]["state"] == "ready" for one in endpoints)

    eventually(ready)
    revision = int(agent.text("cilium", "policy", "get", "-o", "jsonpath='{.revision}'").strip("'\n"))
    assert agent.text("cilium", "policy", "wait", str(revision), "--max-wait-time", "30") == ""
    services = agent.json("cilium", "service", "list", "--output=json")
    assert all(one["status"]["realized"]["frontend-address"]["ip"] for one in services)
    prefixes = agent.json("cilium", "bpf", "ipcache", "list", "-o", "json")
    assert all(re.search(r"identity=\d+", text) for texts in prefixes.values() for text in texts)
    assert "0.0.0.0/0" in prefixes


def test_cilium_cli_reads_metrics_and_encryption(agent: Pod) -> None:
    metrics = agent.json("cilium", "metrics", "list", "-o", "json")
    assert all({"name", "value"} <= one.keys() for one in metrics)
    assert "cilium_endpoint_state" in {one["name"] for one in metrics}
    assert agent.json("cilium", "metrics", "list", "-ojson", "-pcilium_ipsec_xfrm_error") == []
    assert agent.json("cilium", "encrypt", "status", "-o", "json")["mode"] == "Disabled"


def test_a_sysdump_gets_its_archive(agent: Pod) -> None:
    assert any(name.endswith("agent/healthz.json") for name in sysdump(agent.run))


LOOKS = (
    "status --verbose",
    "status --brief",
    "endpoint list",
    "identity list",
    "ip list",
    "node list",
    "service list",
    "map list",
    "config -a",
    "policy selectors",
    "fqdn cache list",
    "debuginfo",
    "bgp peers",
    "bpf endpoint list",
    "bpf lb list",
    "bpf ct list global",
    "bpf nat list",
    "bpf policy get --all",
    "bpf metrics list",
    "bpf egress list",
    "statedb devices",
    "statedb dump",
)
"""What people look at."""


def test_manual_cilium_dbg_commands_work_on_a_node(agent: Pod) -> None:
    for words in LOOKS:
        assert agent.text("cilium-dbg", *words.split()) or words == "bpf egress list"


SEVERAL = """
import sys
from hive.main import main
for line in sys.argv[1:]:
    print("$", line)
    try:
        main(line.split())
    except SystemExit:
        pass
"""
TABLES = (
    *("status", "status --verbose", "endpoint list", "endpoint get {endpoint}", "policy list", "policy get"),
    *("service list", "identity list", "ip list", "fqdn names", "bgp peers", "bgp routes", "health"),
    *("config list", "config list --live --origin --set", "config diff", "db list", "db show endpoints"),
    *("bpf list", "bpf policy", "bpf dump ipcache", "map list", "map get cilium_lxc", "api"),
    *("node list", "kubernetes status"),
)
"""Of ``hive``, as the pages of docs/operate name them."""


def test_what_hive_shows_fits_on_a_terminal_of_80_columns(agent: Pod) -> None:
    endpoint = json.loads(agent.text("cilium-dbg", "endpoint", "list", "-o", "json"))[0]["id"]
    lines = [line.format(endpoint=endpoint) for line in TABLES]
    printed = re.sub(r"\x1b\[[0-9;]*m", "", agent.on_terminal(sys.executable, "-c", SEVERAL, *lines))
    shown = printed.replace("\r", "").split("$ ")[1:]
    assert [one.partition("\n")[0] for one in shown] == lines
    for one in shown:
        line, _, text = one.partition("\n")
        assert text.strip(), line
        assert "hive: " not in text, one
        assert [each for each in text.splitlines() if len(each) > COLUMNS] == [], line
