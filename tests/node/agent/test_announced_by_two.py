"""``type: LoadBalancer`` on two bare nodes: one announces the address, the other after its failure."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hive.lab import agent_process, pods
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.cluster.manifests import node_objects
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import Lab, exclusive
from hive.lab.pods import Attached
from hive.lab.traffic.flows import tcp_listener
from hive.lab.traffic.requests import answer, send_requests, send_until_stopped
from tests.node.agent.announced import LEASE, OBJECTS, VIP, heard_neighbour, mac_of, running
from tests.node.agent.node_ports import TARGET
from tests.node.agent.served import PORT, asked
from tests.support.namespaces import need_root
from tests.support.waiting import eventually
from tests.unit.kubernetes.cluster import pod

RESET = str(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

pytestmark = pytest.mark.node

LEASE_SECONDS = 15
SETTINGS = (
    *("--manifests-dir=", "--ipam=kubernetes", "--routing-mode=native", "--auto-direct-node-routes=true"),
    *("--k8s-client-qps=0", "--k8s-namespace=default", "--enable-node-port=true"),
    *("--enable-l2-announcements=true", f"--l2-announcements-lease-duration={LEASE_SECONDS}s"),
    *("--l2-announcements-renew-deadline=12s", "--l2-announcements-retry-period=500ms"),
)


class AnnouncementScenario:
    """Two nodes, and a client, an API server and an operator in the network between them."""

    def __init__(self, cluster: Cluster, network: Namespaces, folder: Path) -> None:
        self.labs = cluster.nodes()
        self.client = network
        self._cluster = cluster
        self._host = cluster.place(self.labs[0]).routers[0]
        self._kubeconfig = folder / "kubeconfig"
        self._objects = folder / "objects.yaml"
        self.pids: dict[Lab, int] = {}

    def serve(self, stack: ExitStack) -> None:
        """The API server and the operator, with a pool, a policy and a service, until the block ends."""
        known = [node_objects(lab, self._cluster.place(lab))[0] for lab in self.labs]
        known += [pod(lab.name, lab.name) for lab in self.labs]
        self._objects.write_text("---\n".join(json.dumps(one) + "\n" for one in known))
        config = str(self._kubeconfig)
        server = ("tests.support.apiserver", "--plain", "--host", self._host, "--port", str(PORT))
        stack.enter_context(
            running(self.client, *server, "--kubeconfig", config, "--objects", str(self._objects))
        )
        eventually(lambda: self.ask("GET", "/version"))
        settings = (
            f"--k8s-kubeconfig-path={config}",
            "--k8s-namespace=default",
            "--operator-k8s-client-qps=0",
        )
        stack.enter_context(running(self.client, "hive", "operator", *settings, "--ipam=kubernetes"))
        for path, body in OBJECTS:
            eventually(lambda: self.ask("GET", path))  # noqa: B023
            self.ask("POST", path, body)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Of the API server."""
        return self.client.run(asked, method, path, body, self._host)

    def start(self, *labs: Lab) -> None:
        """Agents, until they serve."""
        for lab in labs:
            self.pids[lab] = agent_process.start(lab, *SETTINGS, f"--k8s-kubeconfig-path={self._kubeconfig}")
        for lab in labs:
            agent_process.wait_ready(lab, self.pids[lab])

    def holder(self) -> str:
        """The holder of the service's lease; empty without one."""
        lease = self.ask("GET", f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{LEASE}")
        return str(lease["spec"].get("holderIdentity") or "")

    def answers(self, lab: Lab) -> bool:
        """Whether the client has heard that this node has the address, and the node has the lease."""
        return self.holder() == lab.name and self.client.run(heard_neighbour) == mac_of(lab, "uplink")


@pytest.fixture
def scenario(tmp_path: Path) -> Iterator[AnnouncementScenario]:
    """Served by two agents, a backend on each node."""
    need_root()
    cluster = Cluster(f"announced-{os.getpid()}")
    try:
        with exclusive():
            cluster.make(2, 1)
        with cluster.network.open() as network, ExitStack() as stack:
            found = AnnouncementScenario(cluster, network, tmp_path)
            found.serve(stack)
            found.start(*found.labs)
            yield found
    finally:
        with exclusive():
            cluster.remove(cluster.nodes())


def backends(labs: list[Lab], attached: list[Attached]) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [one.ipv4], "nodeName": lab.name} for lab, one in zip(labs, attached, strict=True)
        ],
        "ports": [{"name": "tcp", "port": TARGET, "protocol": "TCP"}],
    }


def kill_all(children: list[Child[Any]]) -> None:
    for child in children:
        child.kill()


def test_another_node_answers_for_the_address_when_an_agent_dies_and_no_request_waits(
    scenario: AnnouncementScenario,
) -> None:
    attached = [pods.add(lab, lab.name) for lab in scenario.labs]
    names = sorted(lab.name for lab in scenario.labs)
    children: list[Child[Any]] = []
    with ExitStack() as stack:
        stack.callback(kill_all, children)
        for lab in scenario.labs:
            place = stack.enter_context(lab.open_pod(lab.name))
            with inside(place):
                listener = tcp_listener(port=TARGET)
            with listener:
                children.append(place.start(answer, listener, lab.name))
        slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
        scenario.ask("POST", slices, backends(scenario.labs, attached))
        eventually(lambda: scenario.client.run(send_requests, (VIP, TARGET), 20).servers == names)
        first = scenario.holder()
        (lost,) = (lab for lab in scenario.labs if lab.name == first)
        (other,) = (lab for lab in scenario.labs if lab.name != first)
        eventually(lambda: scenario.answers(lost))
        asking = scenario.client.start(send_until_stopped, (VIP, TARGET), 0.01)
        children.append(asking)
        os.kill(scenario.pids[lost], signal.SIGKILL)
        os.waitpid(scenario.pids[lost], 0)
        # Its programs go on, and the other announces itself when it takes over.
        eventually(lambda: scenario.answers(other), within=LEASE_SECONDS + 60)
        scenario.start(lost)
        # An agent that ends in order gives it back at once.
        assert agent_process.terminate(other)
        eventually(lambda: scenario.answers(lost), within=LEASE_SECONDS + 60)
        found = asking.finish(within=60)
    # A connection that is open while the address moves is unknown to the node that it moves to.
    assert found.failed in ([], [RESET], [RESET, RESET])
    assert found.servers == names
