"""``hive check`` at an API server with kubelets that run probes in a simulated network."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.shell_completion import ShellComplete

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.errors import ApiError, NotFoundError
from hive.check.checks import CHECKS, NAMES
from hive.check.objects import LABEL, OPEN
from hive.check.run import PAGE
from hive.main import cli
from hive.pod_exec import execute
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN
from tests.support.apiserver.exec import Command, Ended
from tests.unit.kubernetes.cluster import Body, Cluster, cluster, kubeconfig, namespace

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[3]
NODES = {"node1": "192.168.0.1", "node2": "192.168.0.2"}
SPACE = "hive-check"


class Done(NamedTuple):
    """What the command gave."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    def states(self) -> dict[str, str]:
        return {one["name"]: one["state"] for one in self.document["checks"]}


class Network:
    """Kubelets that make every pod ready, a namespace controller, and packets that arrive or do not."""

    def __init__(self, found: Cluster) -> None:
        self.cluster = found
        self.lost: Callable[[str, Body], bool] = lambda _pod, _try: False
        self.stuck: set[str] = set()
        """Pods that do not start."""
        self.seen: list[Command] = []
        self.hold = asyncio.Event()
        self.hold.set()
        found.server.executor = self.execute

    async def run(self) -> None:
        while True:
            for pod in self.objects("pods"):
                self._start(pod)
            for space in self.objects("namespaces"):
                if space.get("status", {}).get("phase") == "Terminating":
                    self._end(space["metadata"]["name"])
            await asyncio.sleep(0.01)

    async def execute(self, command: Command) -> Ended:
        """The probe of a pod."""
        self.seen.append(command)
        await self.hold.wait()
        assert command.words[:3] == ["hive", "probe", "try"]
        answers = [self._answer(command.pod, one) for one in json.loads(command.words[3])]
        return Ended(0, json.dumps(answers).encode(), b"")

    def _answer(self, pod: str, one: Body) -> list[Any]:
        who = self._owner(one["to"], one["port"])
        denied = bool(self.objects("networkpolicies") or self.objects("ciliumnetworkpolicies")) and not (
            pod.startswith("client-") and one["port"] == OPEN
        )
        answers = not denied and not self.lost(pod, one)
        if answers == one["answers"]:
            return [True, who if answers else "", ""]
        return [False, "", "no answer" if one["answers"] else "it answers, and should not"]

    def _owner(self, address: str, port: int) -> str:
        for service in self.objects("services"):
            spec = service["spec"]
            name = service["metadata"]["name"]
            if address == f"{name}.{SPACE}.svc":
                return " ".join(spec["clusterIPs"])
            if address in spec["clusterIPs"] or port == spec["ports"][0].get("nodePort"):
                return str(name)
        for pod in self.objects("pods"):
            if {"ip": address} in (pod["status"].get("podIPs") or ()):
                return str(pod["metadata"]["name"])
        return "host-" + next((node for node, ip in NODES.items() if ip == address), "nothing")

    def _start(self, pod: Body) -> None:
        name = pod["metadata"]["name"]
        if (
            LABEL not in pod["metadata"].get("labels", {})
            or pod["status"].get("podIPs")
            or name in self.stuck
        ):
            return
        number = sum(map(ord, name)) % 200
        ips = [{"ip": f"10.0.0.{number}"}, {"ip": f"fd00::{number}"}]
        ready = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": ips[0]["ip"], "podIPs": ips, "conditions": ready}
        self.cluster.put(pod | {"status": status})

    def _end(self, name: str) -> None:
        """A namespace goes, with what is in it."""
        store = self.cluster.server.store
        for plural in ("pods", "services", "networkpolicies", "ciliumnetworkpolicies", "events"):
            for one in self.objects(plural):
                if one["metadata"].get("namespace") == name:
                    store.delete(self._kind(plural).storage, (name, one["metadata"]["name"]))
        store.delete(self._kind("namespaces").storage, ("", name))

    def objects(self, plural: str) -> list[Body]:
        return [
            dict(one) for one in self.cluster.server.store.of(self._kind(plural).storage).objects.values()
        ]

    def _kind(self, plural: str) -> Any:
        groups = {
            "networkpolicies": "networking.k8s.io",
            "ciliumnetworkpolicies": "cilium.io",
            "events": "events.k8s.io",
        }
        group = groups.get(plural, "")
        kinds = (self.cluster.server.kinds.get(group, version, plural) for version in ("v1", "v2"))
        return next(one for one in kinds if one is not None)


@asynccontextmanager
async def network(folder: Path) -> AsyncIterator[Network]:
    async with cluster("ciliumnetworkpolicies") as found:
        kubeconfig(folder, found.url)
        for name, ip in NODES.items():
            addresses = [{"type": "InternalIP", "address": ip}]
            found.put(
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": name},
                    "spec": {},
                    "status": {"addresses": addresses},
                }
            )
            found.put(agent(name))
        settings = {"routing-mode": "tunnel", "tunnel-protocol": "vxlan"}
        metadata = {"name": "cilium-config", "namespace": "kube-system"}
        found.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": settings})
        made = Network(found)
        running = asyncio.ensure_future(made.run())
        try:
            yield made
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def agent(node: str, *, ready: bool = True) -> Body:
    metadata = {"name": f"cilium-{node}", "namespace": "kube-system", "labels": {"k8s-app": "cilium"}}
    containers = [{"name": "cilium-agent", "image": f"registry.example/hive:{node}"}]
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    spec = {"nodeName": node, "hostNetwork": True, "containers": containers}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Network]:
    async with network(tmp_path) as found:
        yield found
        assert found.cluster.get("Namespace", SPACE) is None or "mine" in str(
            found.cluster.get("Namespace", SPACE)
        )


async def start(folder: Path, *words: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "hive", "check", "--kubeconfig", str(folder / "kubeconfig"), *words]
    pipe = asyncio.subprocess.PIPE
    path = f"{ROOT}:{ROOT / 'cmd'}"
    return await asyncio.create_subprocess_exec(
        *command, stdout=pipe, stderr=pipe, env={**os.environ, "PYTHONPATH": path}
    )


async def check(folder: Path, *words: str) -> Done:
    process = await start(folder, *words)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return Done(process.returncode or 0, out.decode(), err.decode())


async def test_every_check_passes_on_a_working_cluster(net: Network, tmp_path: Path) -> None:
    dns = {"apiVersion": "v1", "kind": "Service", "spec": {"clusterIPs": [], "ports": [{"port": 53}]}}
    metadata = {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    net.cluster.put(dns | {"metadata": metadata})
    done = await check(tmp_path, "--outside", "192.0.2.1")
    assert (done.code, done.err) == (0, ""), done.out
    lines = done.out.splitlines()
    assert lines[0].startswith(net.cluster.url)
    assert lines[0].endswith("2 nodes, routing vxlan")
    assert [re.split(r"[ :]+", line)[:2] for line in lines[1:-1]] == [["passed", name] for name in NAMES]
    assert lines[-1].startswith(f"{len(NAMES)} passed, in ")


async def test_a_failed_check_is_shown_with_the_remedy(net: Network, tmp_path: Path) -> None:
    net.lost = lambda _, one: one["kind"] == "mtu"
    done = await check(tmp_path, "--only", "mtu", "--json")
    assert done.code == 1
    assert done.states() == {"agents": "passed", "pods": "passed", "mtu": "failed"}
    mtu = done.document["checks"][-1]
    assert done.document["families"] == ["IPv4", "IPv6"]
    assert (mtu["tries"], len(mtu["failures"])) == (16, 8)
    assert mtu["failures"][0].startswith("client-node1 → server-node1, 10.0.0.")
    assert mtu["see"] == '"Does the cluster work?" in the documentation, section mtu'
    done = await check(tmp_path, "--only", "mtu")
    assert "          What to do: set mtu" in done.out
    assert "          and 2 more (--json has all)" in done.out.splitlines()


async def test_pods_run_the_image_of_their_nodes_agent_and_are_restricted(
    net: Network, tmp_path: Path
) -> None:
    net.hold.clear()
    process = await start(tmp_path, "--only", "host")
    await eventually(lambda: net.seen)
    pods = {one["metadata"]["name"]: one["spec"] for one in net.objects("pods")}
    assert pods["client-node2"]["containers"][0]["image"] == "registry.example/hive:node2"
    for name, spec in pods.items():
        if not name.startswith("cilium-"):
            security = spec["containers"][0]["securityContext"]
            assert security["runAsNonRoot"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert spec["automountServiceAccountToken"] is False
            assert spec.get("hostNetwork", False) is name.startswith("host-")
    net.hold.set()
    assert await process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_leaves_nothing_behind(net: Network, tmp_path: Path, number: int) -> None:
    net.hold.clear()
    process = await start(tmp_path)
    await eventually(lambda: net.seen)
    assert net.cluster.get("Namespace", SPACE) is not None
    process.send_signal(number)  # while probes are at work
    assert await process.wait() == (130 if number == signal.SIGINT else 128 + number)
    assert net.cluster.get("Namespace", SPACE) is None
    assert [one for one in net.objects("pods") if LABEL in one["metadata"].get("labels", {})] == []


async def test_a_namespace_of_others_is_not_touched(net: Network, tmp_path: Path) -> None:
    net.cluster.put(namespace(SPACE, owner="mine"))
    done = await check(tmp_path)
    assert done.code == 2
    assert "is not of a check" in done.err
    done = await check(tmp_path, "--clean")
    assert done.code == 2
    assert net.cluster.get("Namespace", SPACE) is not None


async def test_what_a_killed_check_left_is_removed_when_asked(net: Network, tmp_path: Path) -> None:
    net.hold.clear()
    process = await start(tmp_path)
    await eventually(lambda: net.seen)
    process.kill()
    await process.wait()
    done = await check(tmp_path)
    assert done.code == 2
    assert "hive check --clean" in done.err
    assert net.cluster.get("Namespace", SPACE) is not None
    done = await check(tmp_path, "--clean")
    assert (done.code, done.out) == (0, f"namespace {SPACE} removed\n")
    assert net.cluster.get("Namespace", SPACE) is None


async def test_a_pod_that_does_not_start_is_explained(net: Network, tmp_path: Path) -> None:
    net.stuck = {"server-node2"}
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "one", "namespace": SPACE},
        "regarding": {"kind": "Pod", "name": "server-node2"},
        "type": "Warning",
        "note": "range is full",
    }
    net.cluster.put(event)
    done = await check(tmp_path, "--start-within", "1", "--only", "pods-other-node", "--json")
    assert done.code == 1
    assert done.states() == {"agents": "passed", "pods": "failed", "pods-other-node": "skipped"}
    assert done.document["checks"][1]["failures"] == ["node node2: pod server-node2: range is full"]


async def test_an_agent_that_is_not_ready_fails_alone(net: Network, tmp_path: Path) -> None:
    net.cluster.put(agent("node1", ready=False))
    done = await check(tmp_path, "--only", "pods-same-node", "--json")
    assert done.states() == {"agents": "failed", "pods": "passed", "pods-same-node": "passed"}
    assert done.document["checks"][0]["failures"] == [
        "node node1: agent cilium-node1: not ready (Running); see kubectl describe pod"
    ]


async def test_wrong_usage_is_refused_before_anything_is_made(net: Network, tmp_path: Path) -> None:
    for words, expected in (
        (("--only", "pings"), "is not one of 'agents', 'pods'"),
        (("--skip", "pods"), "every other check needs it"),
        (("--node", "node3"), "expected one of node1, node2"),
        (("--outside", "a:b:c:"), "expected"),
    ):
        done = await check(tmp_path, *words)
        assert (done.code, expected in done.err) == (2, True), done
    assert not net.seen


async def test_commands_in_pods_give_what_they_print_and_their_code(net: Network) -> None:
    """Also more than one frame, and refusals in the server's words."""

    async def run(command: Command) -> Ended:
        return Ended(int(command.words[0]), b"x" * 200_000, b"wrong")

    net.cluster.server.executor = run
    client = connect(Access(servers=(net.cluster.url,), token=ADMIN_TOKEN), qps=0)
    done = await execute(client, "kube-system", "cilium-node1", "cilium-agent", ["3"], within=20)
    assert (done.code, len(done.out), done.err) == (3, 200_000, b"wrong")
    done = await execute(client, "kube-system", "cilium-node1", "cilium-agent", ["0"], within=20)
    assert done.code == 0
    with pytest.raises(NotFoundError, match='pods "none" not found'):
        await execute(client, "kube-system", "none", "c", ["0"], within=20)
    net.cluster.server.executor = None
    with pytest.raises(ApiError, match="pods/exec"):
        await execute(client, "kube-system", "cilium-node1", "c", ["0"], within=20)
    await client.reset()


def test_a_shell_completes_the_names_of_checks() -> None:
    for words in (["check"], ["lab", "check"]):
        completing = ShellComplete(cli, {}, "hive", "_HIVE_COMPLETE")
        found = completing.get_completions([*words, "--only"], "pods-")
        assert [one.value for one in found] == ["pods-same-node", "pods-other-node"]


async def test_every_check_has_its_part_of_the_page() -> None:
    text = (ROOT / "docs" / "operate" / "check.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\S+)$", text, re.MULTILINE) == [one.name for one in CHECKS]
    assert text.startswith(f"# {PAGE}\n")
