"""Two clusters of one node each, with separate etcds, that watch each other."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hive.lab import agent_process
from hive.lab.cluster import Cluster
from hive.lab.cluster.network import Place
from hive.lab.cluster.store import Store
from hive.lab.namespaces import Namespaces
from hive.lab.node import ROOT, Lab, exclusive
from tests.support.etcd import installed
from tests.support.namespaces import need_root
from tests.support.sockets import seen_by_server
from tests.support.two_nodes import SETTINGS, address, asked
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"mesh-{os.getpid()}"
CLUSTER_IP, PORT, TARGET = "10.96.0.77", 80, 8080
PORTS = {"west": 2379, "east": 2389}
"""Of the etcd of each cluster, beside the nodes."""
STATE = "cilium/state"
GLOBAL = f"""
apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: default
  annotations: {{service.cilium.io/global: "true"}}
spec:
  clusterIP: {CLUSTER_IP}
  clusterIPs: [{CLUSTER_IP}]
  ports: [{{name: udp, port: {PORT}, protocol: UDP}}]
"""
FROM_WEST = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: from-west, namespace: default}
spec:
  endpointSelector: {}
  ingress:
  - fromEndpoints: [{matchLabels: {io.cilium.k8s.policy.cluster: CLUSTER}}]
"""


def url(cluster: str) -> str:
    return f"http://{Place(0, 0).routers[0]}:{PORTS[cluster]}"


def put(port: int, key: str, value: str) -> None:
    """Write a key, through etcd's gateway for JSON."""
    texts = {"key": b64encode(key.encode()).decode(), "value": b64encode(value.encode()).decode()}
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    asking.request("POST", "/v3/kv/put", json.dumps(texts))
    assert asking.getresponse().status == 200


@contextmanager
def second_etcd(cluster: Cluster, folder: Path) -> Iterator[int]:
    """That of the cluster east; its pid."""
    listen = f"http://0.0.0.0:{PORTS['east']}"
    with cluster.network.open() as network, (folder / "log").open("ab") as log:
        process = network.popen(
            [
                str(Store.program()),
                f"--data-dir={folder / 'data'}",
                f"--listen-client-urls={listen}",
                f"--advertise-client-urls={url('east')}",
                "--listen-peer-urls=http://127.0.0.1:2390",
                "--initial-advertise-peer-urls=http://127.0.0.1:2390",
                "--initial-cluster=default=http://127.0.0.1:2390",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            eventually(lambda: not network.run(partial(_refused, PORTS["east"])))
            yield process.pid
        finally:
            process.kill()
            process.wait()


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


class Mesh:
    """The node of each cluster, and the address of its pod."""

    def __init__(self, cluster: Cluster, folder: Path, east: int) -> None:
        self.cluster = cluster
        self.etcds = {"west": cluster.store.pid or 0, "east": east}
        self.west, self.east = cluster.nodes()
        self._folder = folder

    def start(self, lab: Lab) -> None:
        """The agent of a cluster, anew."""
        own, number = ("west", 1) if lab == self.west else ("east", 2)
        self.configure(lab)
        agent_process.crash(lab)
        settings = [one for one in self.cluster.settings(SETTINGS) if "--kvstore-opt" not in one]
        directory = self.file(lab).parent
        mesh = [f"--cluster-name={own}", f"--cluster-id={number}", f"--clustermesh-config={directory}"]
        store = [f"--kvstore-opt=etcd.address={url(own)}", "--clustermesh-sync-timeout=10s"]
        agent_process.wait_ready(lab, agent_process.start(lab, *settings, *mesh, *store))

    def file(self, lab: Lab) -> Path:
        """How the agent of this node reaches the other cluster."""
        return self._folder / ("west/east" if lab == self.west else "east/west")

    def configure(self, lab: Lab) -> None:
        """Write the file."""
        file = self.file(lab)
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"endpoints:\n- {url(file.name)}\n")

    @contextmanager
    def etcd_frozen(self, cluster: str) -> Iterator[None]:
        """Its etcd takes connections, and answers nothing."""
        pid = self.etcds[cluster]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def put(self, cluster: str, key: str, value: Any) -> None:
        """Write a key of a cluster, as its operator does."""
        with self.cluster.network.open() as network:
            network.run(partial(put, PORTS[cluster], key, json.dumps(value)))

    def export(self, *backends: str) -> None:
        """Backends of the service of the cluster east."""
        ports = {"udp": {"Protocol": "UDP", "Port": TARGET}}
        value = {
            "cluster": "east", "namespace": "default", "name": "web", "clusterID": 2, "shared": True,
            "includeExternal": True, "frontends": {CLUSTER_IP: {"udp": {"Protocol": "UDP", "Port": PORT}}},
            "backends": dict.fromkeys(backends, ports),
        }  # fmt: skip
        self.put("east", f"{STATE}/services/v1/east/default/web", value)

    def backends(self) -> list[str]:
        """Of the service in the cluster west, as the maps have them; none if it is not served."""
        specs = [one["spec"] for one in asked(self.west, "/v1/service")]
        served = [one for one in specs if one["frontend-address"]["ip"] == CLUSTER_IP]
        backends = [backend for one in served for backend in one.get("backend-addresses") or ()]
        return [f"{one['ip']}:{one['port']}" for one in backends]

    def reached(self) -> str:
        """The client that the pod of the cluster east sees, when that of west asks the service."""
        with self.west.open_pod("pod-1") as client, self.east.open_pod("pod-2") as server:
            return asked_by(client, server)


def asked_by(client: Namespaces, server: Namespaces) -> str:
    try:
        return seen_by_server(client, server, 4, ("", TARGET), (CLUSTER_IP, PORT), 100)
    except OSError:
        return ""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    need_root()
    if not installed():
        pytest.fail("etcd is not installed: install Debian's etcd-server")
    folder = tmp_path_factory.mktemp("mesh")
    cluster = Cluster(NAME)
    try:
        with exclusive():
            cluster.make(2, 1, etcd=True)
        with second_etcd(cluster, folder) as east:
            found = Mesh(cluster, folder, east)
            for number, name in enumerate(("west", "east"), 1):
                announced = {"id": number, "capabilities": {"maxConnectedClusters": 255}}
                found.put(name, f"cilium/cluster-config/{name}", announced)
            cluster.manifests.copy("web.yaml", GLOBAL)
            for number, lab in enumerate((found.west, found.east), 1):
                found.start(lab)
                cluster.add_pod(lab, f"pod-{number}")
            yield found
    finally:
        with exclusive():
            cluster.remove(cluster.nodes())
    assert not list(ROOT.glob(f"{NAME}*"))


def clusters(lab: Lab) -> dict[str, Any]:
    found = asked(lab, "/v1/healthz")["cluster-mesh"]
    return {one["name"]: one for one in found["clusters"]}


def test_a_pod_reaches_a_global_service_by_a_backend_of_the_other_cluster(mesh: Mesh) -> None:
    eventually(lambda: clusters(mesh.west)["east"].get("ready"))
    eventually(lambda: clusters(mesh.east)["west"].get("ready"))
    pod = address(mesh.east)
    mesh.export(pod)
    eventually(lambda: mesh.backends() == [f"{pod}:{TARGET}"])
    eventually(lambda: mesh.reached() == address(mesh.west))
    (identity,) = (row["identity"] for row in asked(mesh.west, "/v1/ip") if row["cidr"] == f"{pod}/32")
    assert identity >> 16 == 2


def test_policies_select_pods_by_their_cluster(mesh: Mesh) -> None:
    pod = address(mesh.east)
    mesh.export(pod)
    eventually(lambda: mesh.reached() == address(mesh.west))
    policy = mesh.cluster.manifests
    try:
        policy.copy("from-west.yaml", FROM_WEST.replace("CLUSTER", "north"))
        eventually(lambda: mesh.reached() == "")
        policy.copy("from-west.yaml", FROM_WEST.replace("CLUSTER", "west"))
        eventually(lambda: mesh.reached() == address(mesh.west))
    finally:
        policy.remove("from-west")


def test_what_is_known_of_another_cluster_outlives_its_etcd_and_a_restart_and_goes_with_its_file(
    mesh: Mesh,
) -> None:
    pod, own = address(mesh.east), address(mesh.west)
    mesh.export(pod)
    eventually(lambda: mesh.reached() == own)
    agent_process.crash(mesh.west)
    assert mesh.reached() == own, "the datapath goes on without its agent"
    with mesh.etcd_frozen("east"):
        mesh.start(mesh.west)
        assert mesh.reached() == own
        assert mesh.backends() == [f"{pod}:{TARGET}"], "of the earlier agent: nothing is listed yet"
    eventually(lambda: clusters(mesh.west)["east"].get("ready"))
    assert mesh.backends() == [f"{pod}:{TARGET}"]
    mesh.file(mesh.west).unlink()
    eventually(lambda: mesh.backends() == [])
    mesh.configure(mesh.west)
    eventually(lambda: mesh.reached() == own)
