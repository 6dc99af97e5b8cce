"""Create a cluster of lab nodes, add nodes and pods, and distribute objects.

The agents read their objects from manifests, the same on every node; the range and addresses of each node are
in its Node and CiliumNode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hive.lab import agent_process, pods
from hive.lab.cluster.manifests import Manifests, namespace_object, node_objects, pod_object
from hive.lab.cluster.network import LabNetwork, Place, make_network, remove_network
from hive.lab.cluster.router import Router, bgp_objects
from hive.lab.cluster.store import Store
from hive.lab.node import Lab, LabError, create, destroy, labs

MOST_NODES = 50
TUNNEL = "--routing-mode=tunnel"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes `<name>-1`, `<name>-2`, … and the network between them."""

    name: str

    @classmethod
    def of(cls, lab: Lab) -> Cluster:
        """Return the cluster of a node by the node's name: node-1 belongs to the cluster node."""
        return cls(re.sub(r"-[0-9]+$", "", lab.name))

    @property
    def network(self) -> LabNetwork:
        """The network between the nodes."""
        return LabNetwork(self.name)

    @property
    def store(self) -> Store:
        """The etcd that the nodes share, if the cluster has one."""
        return Store(self.network)

    @property
    def router(self) -> Router:
        """The BGP router beside the nodes, if the cluster has one."""
        return Router(self.network)

    def node(self, number: int) -> Lab:
        """Return node ``number``, from 1, whether it exists or not."""
        return Lab(f"{self.name}-{number}")

    def nodes(self) -> list[Lab]:
        """Return the existing nodes, in order."""
        found = [lab for lab in labs() if lab.cluster == self.name and lab.exists]
        return sorted(found, key=self.number)

    def number(self, lab: Lab) -> int:
        """Return the number of a node."""
        return int(lab.name.rpartition("-")[2])

    @property
    def manifests(self) -> Manifests:
        """The objects of all nodes."""
        return Manifests(self.nodes())

    def place(self, lab: Lab) -> Place:
        """Return the number and segment of a node."""
        return self.network.place(self.number(lab))

    def make(
        self, count: int, segments: int, *, etcd: bool = False, bgp: bool = False, ipv6: bool = False
    ) -> list[Lab]:
        """Create what is missing of the network and of nodes 1 to ``count``; return the new nodes.

        With ``etcd`` the nodes publish themselves there, and each has only its own objects. With ``bgp`` the
        nodes announce their pods to a router, with ``ipv6`` also those of IPv6; there are no other routes to
        pods from outside.
        """
        self._make_network(segments, etcd=etcd, bgp=bgp, ipv6=ipv6)
        made = []
        for number in range(1, count + 1):
            lab = self.node(number)
            if lab.exists and lab.cluster != self.name:
                raise LabError(f"node {lab.name} stands alone: take it down first (hive lab down)")
            if not lab.exists:
                destroy(lab)  # an incomplete one
                create(lab, self.network)
                if not self.router.exists:
                    self.network.route(self.place(lab))
                self.manifests.join(lab)
                made.append(lab)
        self.manifests.write("namespaces", [namespace_object()])
        self._announce_nodes()
        return made

    def _make_network(self, segments: int, *, etcd: bool, bgp: bool, ipv6: bool) -> None:
        """Create the network with its etcd and router. Raises LabError if it exists with others."""
        if not self.network.exists:
            remove_network(self.network)
            make_network(self.network, segments)
            if etcd:
                self.store.start()
            if bgp:
                self.router.start(ipv6=ipv6)
        elif bgp and not self.router.exists:
            raise LabError(f"the nodes of {self.name} have no router beside them: take them down first")
        elif etcd and not self.store.exists:
            raise LabError(f"the nodes of {self.name} share no etcd: take them down first")
        elif self.network.segments != segments:
            raise LabError(
                f"the network of {self.name} has {self.network.segments} segments: take it down first"
            )

    def _announce_nodes(self) -> None:
        """Write the objects of all nodes to every node; with etcd, of each node only its own."""
        objects = {lab: node_objects(lab, self.place(lab)) for lab in self.nodes()}
        for lab in objects if self.router.exists else ():
            bgp = bgp_objects(lab.name, self.place(lab), ipv6=self.router.ipv6)
            Manifests([lab]).write("bgp", bgp)
        if self.store.exists:
            for lab, own in objects.items():
                Manifests([lab]).write("nodes", own)
        else:
            self.manifests.write("nodes", [one for own in objects.values() for one in own])

    def settings(self, more: Sequence[str] = ()) -> list[str]:
        """Return the settings of every agent of the cluster, with ``more``."""
        found = ["--ipam=kubernetes", *self.store.settings, *self.router.settings]
        if TUNNEL in more:
            return [*found, *more]
        found += ["--routing-mode=native", "--auto-direct-node-routes=true"]
        # The router has a route to every node's pods, as if it had learnt them by BGP.
        between = ["--direct-routing-skip-unreachable=true"] if self.network.segments > 1 else []
        return [*found, *between, *more]

    def add_pod(self, lab: Lab, name: str) -> pods.Attached:
        """Attach a pod; all nodes have its object."""
        return add_pod(self.manifests, lab, self.place(lab).ipv4, name)

    def remove(self, removed: Sequence[Lab]) -> None:
        """Remove nodes; with the last one, the network."""
        for lab in removed:
            agent_process.terminate(lab)
            removed_pods = lab.pods()
            destroy(lab)
            if self.nodes() and self.network.exists:
                for pod in removed_pods:
                    self.manifests.remove(f"pod-{pod}")
                self.manifests.follow_services()
                self._announce_nodes()
        if not self.nodes():
            self.store.remove()
            self.router.remove()
            remove_network(self.network)


def add_pod(manifests: Manifests, lab: Lab, host_ip: str, name: str) -> pods.Attached:
    """Write a pod's object, attach it, then write its addresses and its services' EndpointSlices."""
    manifests.write(f"pod-{name}", [pod_object(lab, host_ip, name)])
    try:
        # As with kubelet, the object comes first.
        agent_process.wait_for_pod(lab, "default", name)
        attached = pods.add(lab, name)
    except BaseException:
        manifests.remove(f"pod-{name}")
        raise
    addresses = [ip for ip in (attached.ipv4, attached.ipv6) if ip]
    manifests.write(f"pod-{name}", [pod_object(lab, host_ip, name, addresses)])
    manifests.follow_services()
    return attached


def remove_pod(manifests: Manifests, lab: Lab, name: str) -> None:
    """Remove a pod from services, detach it, and remove its object."""
    manifests.remove(f"pod-{name}")
    manifests.follow_services()
    pods.delete(lab, name)
