"""``hive lab`` with the real agent and plugin: created twice, entered, crashed, removed without remains."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute

from hive.lab import cgroups
from hive.lab.cluster import Cluster
from hive.lab.kernel import lab_links
from hive.lab.node import ROOT, Lab, destroy, exclusive, wait_exited
from tests.support.namespaces import need_root
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"test-{os.getpid()}"
TREE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def lab() -> Iterator[Lab]:
    need_root()
    node = Lab(NAME)
    yield node
    with exclusive():
        destroy(node)


@pytest.fixture(scope="module")
def shared_lab() -> Iterator[Lab]:
    """A node with a pod, which tests only look at."""
    need_root()
    node = Lab(f"{NAME}-shared")
    made = hive("lab", "up", "--name", node.name, "--pods", "1")
    assert made.returncode == 0, made.stderr
    yield node
    with exclusive():
        destroy(node)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    links, mounts = lab_links(), mount_points()
    yield
    assert not lab_links() - links
    assert not {point for point in mount_points() - mounts if point.startswith(str(ROOT / NAME))}


def mount_points() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[4] for line in lines}


def hive(*arguments: str, within: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hive", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=within, env=TREE, check=False)


def listed(name: str) -> dict[str, object] | None:
    nodes = json.loads(hive("lab", "list", "-o", "json").stdout)
    return next((node for node in nodes if node["name"] == name), None)


def demo(lab: Lab, part: int) -> dict[str, Any]:
    """What a part of the demo measured and checked; all of it holds."""
    done = hive("lab", "demo", "--json", "--name", lab.name, "--part", str(part))
    account: dict[str, Any] = json.loads(done.stdout)
    assert [check for check in account["checks"] if not check["ok"]] == []
    assert (account["ok"], account["error"], done.returncode) == (True, None, 0)
    return account


def test_the_demo_holds_and_leaves_nothing(lab: Lab) -> None:
    account = demo(lab, 1)
    steps = [check["step"] for check in account["checks"]]
    assert list(dict.fromkeys(steps)) == [
        "node", "agent", "pods", "talk", "endpoints", "upgrade", "delete", "nothing left",
    ]  # fmt: skip
    upgrade = account["measured"]["upgrade"]
    assert upgrade["udp"]["lost"] == 0
    assert upgrade["udp"]["sent"] > 2000
    assert all(before == after for before, after in upgrade["map_ids"].values())
    assert not set(upgrade["program_ids"][0]) & set(upgrade["program_ids"][1])
    assert not lab.directory.exists()


@pytest.mark.parametrize("command", [("lab", "demo"), ("lab", "up", "--pods", "0")], ids=" ".join)
def test_where_the_lab_cannot_work_it_reports_that_in_one_line(lab: Lab, command: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-m", "hive", *command, "--name", lab.name],
        capture_output=True, text=True, timeout=60, env=TREE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "hive: the lab cannot make network and mount namespaces here (Operation not permitted): run it on a"
        " machine, in a virtual machine, or in a privileged container\n"
    )
    assert not lab.exists


def test_the_demo_of_two_nodes_is_for_people_and_does_not_take_links_of_others_for_its_own(lab: Lab) -> None:
    command = [sys.executable, "-m", "hive", "lab", "demo", "--name", lab.name, "--part", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=TREE) as shown, IPRoute() as ip:
        eventually(lambda: Cluster(f"{lab.name}-pair").node(1).exists)
        ip.link("add", ifname="other-1", kind="veth", peer={"ifname": "other-2"})
        try:
            printed = shown.communicate(timeout=240)[0]
        finally:
            ip.link("del", ifname="other-1")
    assert shown.returncode == 0, printed
    assert "\x1b[" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "✘" not in printed


def test_the_demo_of_services_holds(lab: Lab) -> None:
    account = demo(lab, 3)
    assert account["measured"]["services_removed"]["answered"] > 0


def test_the_demo_of_policies_holds(lab: Lab) -> None:
    account = demo(lab, 4)
    assert account["measured"]["policies"]["rules"] == ["spec.ingress[0] of CiliumNetworkPolicy default/cart"]


def test_up_again_keeps_what_is_there(lab: Lab) -> None:
    assert hive("lab", "up", "--name", lab.name, "--pods", "1").returncode == 0
    first = listed(lab.name)
    assert first is not None
    assert hive("lab", "up", "--name", lab.name, "--pods", "2").returncode == 0
    second = listed(lab.name)
    assert second is not None
    assert first["agent_pid"] == second["agent_pid"]
    assert (first["pods"], second["pods"]) == (["pod-1"], ["pod-1", "pod-2"])
    for _ in range(2):
        assert hive("lab", "down", "--name", lab.name).returncode == 0
        assert listed(lab.name) is None


def test_the_agent_gets_settings_of_its_own(lab: Lab) -> None:
    wrong = hive("lab", "up", "--name", lab.name, "--enable-policy=sometimes", "--mtuu=1")
    assert (wrong.returncode, lab.exists, len(wrong.stderr.splitlines())) == (2, False, 2)
    made = hive("lab", "up", "--name", lab.name, "--pods", "0", "--mtu=1400", "--enable-policy=always")
    assert made.returncode == 0, made.stderr
    asked = hive("lab", "exec", "--name", lab.name, "--", "hive", "config", "list", "--live", "-o", "json")
    found = {one["name"]: one["value"] for one in json.loads(asked.stdout)}
    assert (found["mtu"], found["enable-policy"]) == ("1400", "always")
    again = hive("lab", "up", "--name", lab.name, "--mtu=1500")
    assert again.returncode == 1
    assert "settings count at its start" in again.stderr


def test_commands_run_inside_the_node_and_its_pods(shared_lab: Lab) -> None:
    lab = shared_lab
    asked = [sys.executable, "-m", "hive", "endpoint", "list", "-o", "json"]
    inside = hive("lab", "exec", "--name", lab.name, "--", *asked)
    (endpoint,) = json.loads(inside.stdout)
    address = endpoint["status"]["networking"]["addressing"][0]["ipv4"]
    pod = hive("lab", "exec", "--name", lab.name, "--pod", "pod-1", "--", "cat", "/proc/net/fib_trie")
    assert address in pod.stdout
    assert hive("lab", "exec", "--name", lab.name, "--", "sh", "-c", "exit 7").returncode == 7
    wrong = hive("lab", "exec", "--name", lab.name, "--pod", "pod-9", "--", "true")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (1, 1)
    assert "it has: pod-1" in wrong.stderr
    (option,) = cgroups.settings_of(lab.name, ["--bpf-lb-sock=true"])
    joined = hive("lab", "exec", "--name", lab.name, "--", "cat", "/proc/self/cgroup")
    assert f"0::/{Path(option).name}\n" in joined.stdout, "services at sockets are served to it"
    missing = hive("lab", "exec", "--name", lab.name, "--", "no-such-command")
    assert (missing.returncode, missing.stderr) == (127, "hive: no-such-command: no such command\n")


def test_inspect_shows_graph_and_start_timeline_of_the_agent(shared_lab: Lab) -> None:
    asked = ["lab", "exec", "--name", shared_lab.name, "--", sys.executable, "-m", "hive", "inspect"]
    graph = json.loads(hive(*asked, "--live", "--format", "json").stdout)
    timeline = json.loads(hive(*asked, "--timeline", "--format", "json").stdout)
    started = {span["id"] for span in timeline["spans"] if span["kind"] == "start"}
    assert started == {hook["id"] for hook in graph["hooks"]}
    chart = hive(*asked, "--timeline").stdout.splitlines()
    assert f"{len(started)} of {len(started)} hooks started" in chart[0]
    assert max(map(len, chart)) <= 80


def test_down_removes_a_node_with_a_crashed_agent(lab: Lab) -> None:
    hive("lab", "up", "--name", lab.name, "--pods", "1")
    node = listed(lab.name)
    assert node is not None
    pid = node["agent_pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    assert wait_exited(pid, 60)
    hive(
        "lab", "exec", "--name", lab.name, "--pod", "pod-1", "--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 &"
    )
    assert hive("lab", "down", "--name", lab.name).returncode == 0
    assert listed(lab.name) is None
    assert not lab.directory.exists()


def test_up_brings_a_crashed_agent_back_to_its_pods(lab: Lab) -> None:
    hive("lab", "up", "--name", lab.name, "--pods", "2")
    node = listed(lab.name)
    assert node is not None
    os.kill(int(str(node["agent_pid"])), signal.SIGKILL)
    again = hive("lab", "up", "--name", lab.name, "--pods", "2")
    assert again.returncode == 0
    assert "starting the agent" in again.stdout
    assert "attached" not in again.stdout


def test_a_node_that_dies_takes_no_connection_with_it_in_the_demo_of_routers(lab: Lab) -> None:
    account = demo(lab, 5)
    found = account["measured"]["bgp_connections"]
    assert found["unchanged"] == found["of"] > 0


def test_an_interrupted_demo_clears_up(lab: Lab) -> None:
    command = [sys.executable, "-m", "hive", "lab", "demo", "--name", lab.name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=TREE
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "pod-1 is added" in line:
                break
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate(timeout=240)
    assert demo.returncode == 130, rest + errors
    assert "Traceback" not in errors
    assert "✘" not in rest
    assert not lab.directory.exists()


def test_a_running_node_is_not_taken_for_the_demo(shared_lab: Lab) -> None:
    demo = hive("lab", "demo", "--name", shared_lab.name)
    assert (demo.returncode, demo.stdout, len(demo.stderr.splitlines())) == (1, "", 1)
    assert "is running" in demo.stderr
    assert listed(shared_lab.name) is not None


def test_an_unknown_node_is_one_line(lab: Lab) -> None:
    done = hive("lab", "exec", "--name", lab.name, "--", "true")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert f"no lab node named {lab.name}" in done.stderr
    vanished = hive("lab", "down", "--name", lab.name)
    assert (vanished.returncode, vanished.stdout) == (0, f"{lab.name}  is not there\n")


DENY = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny, namespace: default}
spec: {podSelector: {}, policyTypes: [Ingress]}
"""
WRONG = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: wrong, namespace: default}
spec: {endpointSelector: {}, ingress: [{toPorts: [{ports: [{port: "70000"}]}]}]}
"""
WEB = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {type: NodePort, selector: {app: pod-1}, ports: [{port: 80, targetPort: 8080}]}
"""
UNSERVED = """
apiVersion: v1
kind: Service
metadata: {name: direct, namespace: default, labels: {service.kubernetes.io/headless: ""}}
spec: {selector: {app: pod-1}, ports: [{port: 80, targetPort: 8080}]}
"""


def test_objects_are_applied_waited_for_and_deleted(lab: Lab, tmp_path: Path) -> None:
    name = ("--name", lab.name)
    for file, text in {"deny": DENY, "wrong": WRONG, "web": WEB, "direct": UNSERVED}.items():
        (tmp_path / f"{file}.yaml").write_text(text, encoding="utf-8")

    def apply(file: str) -> subprocess.CompletedProcess[str]:
        return hive("lab", "apply", *name, "--wait", "-f", str(tmp_path / f"{file}.yaml"))

    def reached() -> bool:
        (pod,) = json.loads(hive("lab", "get", *name, "pod", "pod-1", "-o", "json").stdout)
        ping = ("ping", "-c1", "-W1", pod["status"]["podIP"])
        return hive("lab", "exec", *name, "--pod", "pod-2", "--", *ping).returncode == 0

    def endpoints() -> list[object]:
        (found,) = json.loads(hive("lab", "get", *name, "endpointslice", "-o", "json").stdout)
        return [each["targetRef"]["name"] for each in found["endpoints"]]

    assert hive("lab", "up", *name).returncode == 0
    seventh = hive("lab", "exec", *name, "--node", "7", "--", "true")
    assert (seventh.returncode, seventh.stderr.count("\n")) == (1, 1)
    assert f"{lab.name} has no node 7: it is a node alone: leave out --node" in seventh.stderr
    nothing = hive("lab", "apply", *name, "-f", "/dev/null")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "/dev/null has no objects" in nothing.stderr
    assert reached()
    assert apply("direct").stdout == "service/direct applied\n", "no proxy serves it: nothing is waited for"
    assert hive("lab", "delete", *name, "service", "direct").returncode == 0
    assert apply("deny").stdout == "networkpolicy/deny applied\n"
    assert not reached(), "it holds once it is waited for"
    done = apply("wrong")
    assert done.returncode == 1
    assert "ciliumnetworkpolicy/wrong refused: spec.ingress[0].toPorts[0].ports[0]: " in done.stdout
    deleted = hive("lab", "delete", *name, "--wait", "networkpolicy", "deny")
    assert deleted.stdout == "networkpolicy/deny deleted\n"
    assert reached()
    assert apply("web").stdout == "service/web applied\n"
    (service,) = json.loads(hive("lab", "get", *name, "service", "web", "-o", "json").stdout)
    assert service["spec"]["clusterIP"].startswith("10.96.")
    assert service["spec"]["ports"][0]["nodePort"] >= 30000
    assert endpoints() == ["pod-1"]
    assert hive("lab", "delete", *name, "pod", "pod-1").stdout == "pod/pod-1 deleted\n"
    assert endpoints() == []
    assert hive("lab", "up", *name).returncode == 0
    assert endpoints() == ["pod-1"], "the pod is back"
    assert apply("web").returncode == 0
    assert json.loads(hive("lab", "get", *name, "service", "web", "-o", "json").stdout) == [service]
    (tmp_path / "other.yaml").write_text(WEB.replace("app: pod-1", "app: pod-2"), encoding="utf-8")
    assert apply("other").stdout == "service/web applied\n"
    assert endpoints() == ["pod-2"], "the same object from another file replaces it"
    assert hive("lab", "delete", *name, "-f", str(tmp_path / "other.yaml")).stdout == "service/web deleted\n"
    again = hive("lab", "delete", *name, "service", "web")
    assert again.returncode == 1
    assert "nothing was applied of service web" in again.stderr


def test_an_agent_is_restarted_as_it_was_made(lab: Lab) -> None:
    name = ("--name", lab.name)

    def setting(which: str) -> str:
        return hive("lab", "exec", *name, "--", sys.executable, "-m", "hive", "config", "get", which).stdout

    assert hive("lab", "up", *name, "--pods", "0", "--mtu=1400").returncode == 0
    assert hive("lab", "restart", *name, "--enable-policy=always").returncode == 0
    assert (setting("mtu"), setting("enable-policy")) == ("1400\n", "always\n")
    assert hive("lab", "crash", *name).returncode == 0
    assert hive("lab", "up", *name, "--pods", "0").returncode == 0
    assert (setting("mtu"), setting("enable-policy")) == ("1400\n", "always\n")
    outside = hive("lab", "exec", *name, "--outside", "--", "ip", "-4", "-brief", "address")
    assert "192.168.50.1/24" in outside.stdout
    assert hive("lab", "path", *name).stdout.strip() == str(lab.directory)
