"""Several lab nodes as one cluster: made, grown, and told of objects.

Needs: root.   Gives: Cluster.

The agents get their objects from manifests, the same in every node; each node's range and addresses are in
its Node and CiliumNode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hive.lab import agent_process, pods
from hive.lab.manifests import Manifests, namespace_object, node_objects, pod_object
from hive.lab.network import LabNetwork, Place, make_network, remove_network
from hive.lab.node import Lab, LabError, create, destroy, labs

MOST_NODES = 50
TUNNEL = "--routing-mode=tunnel"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes `<name>-1`, `<name>-2`, … and the network between them."""

    name: str

    @classmethod
    def of(cls, lab: Lab) -> Cluster:
        """That a node is of, by its name: node-1 is of the cluster node."""
        return cls(re.sub(r"-[0-9]+$", "", lab.name))

    @property
    def network(self) -> LabNetwork:
        """What the nodes are joined by."""
        return LabNetwork(self.name)

    def node(self, number: int) -> Lab:
        """Node `number`, from 1, whether it exists or not."""
        return Lab(f"{self.name}-{number}")

    def nodes(self) -> list[Lab]:
        """Those there are, in order."""
        found = [lab for lab in labs() if lab.cluster == self.name and lab.exists]
        return sorted(found, key=self.number)

    def number(self, lab: Lab) -> int:
        """The number of one of its nodes."""
        return int(lab.name.rpartition("-")[2])

    @property
    def manifests(self) -> Manifests:
        """The objects all nodes know."""
        return Manifests(self.nodes())

    def place(self, lab: Lab) -> Place:
        """Where one of its nodes stands."""
        return self.network.place(self.number(lab))

    def make(self, count: int, segments: int) -> list[Lab]:
        """Make what is missing of the network and of nodes 1 to `count`; those that were made."""
        if not self.network.exists:
            remove_network(self.network)
            make_network(self.network, segments)
        elif self.network.segments != segments:
            raise LabError(
                f"the network of {self.name} has {self.network.segments} segments: take it down first"
            )
        made = []
        for number in range(1, count + 1):
            lab = self.node(number)
            if lab.exists and lab.cluster != self.name:
                raise LabError(f"node {lab.name} stands alone: take it down first (hive lab down)")
            if not lab.exists:
                destroy(lab)  # half of one
                create(lab, self.network)
                self.network.route(self.place(lab))
                self.manifests.join(lab)
                made.append(lab)
        self.manifests.write("namespaces", [namespace_object()])
        self.manifests.write(
            "nodes", [one for lab in self.nodes() for one in node_objects(lab, self.place(lab))]
        )
        return made

    def settings(self, more: Sequence[str] = ()) -> list[str]:
        """What every agent of the cluster is started with; ``more`` is what somebody asks for besides."""
        if TUNNEL in more:
            return ["--ipam=kubernetes", *more]
        found = ["--ipam=kubernetes", "--auto-direct-node-routes=true"]
        # Between segments the router leads to the pods: it knows every range, as BGP would have told it.
        between = ["--direct-routing-skip-unreachable=true"] if self.network.segments > 1 else []
        return [*found, *between, *more]

    def add_pod(self, lab: Lab, name: str) -> pods.Attached:
        """Tell everybody of a pod, attach it, tell where it is."""
        manifests, place = self.manifests, self.place(lab)
        manifests.write(f"pod-{name}", [pod_object(lab, place, name)])
        try:
            attached = pods.add(lab, name)
        except BaseException:
            manifests.remove(f"pod-{name}")
            raise
        addresses = [ip for ip in (attached.ipv4, attached.ipv6) if ip]
        manifests.write(f"pod-{name}", [pod_object(lab, place, name, addresses)])
        return attached

    def remove(self, gone: Sequence[Lab]) -> None:
        """Take these nodes down; with the last one the network goes."""
        for lab in gone:
            agent_process.terminate(lab)
            pods_gone = lab.pods()
            destroy(lab)
            left = self.nodes()
            if left and self.network.exists:
                manifests = self.manifests
                for pod in pods_gone:
                    manifests.remove(f"pod-{pod}")
                manifests.write(
                    "nodes", [one for each in left for one in node_objects(each, self.place(each))]
                )
        if not self.nodes():
            remove_network(self.network)
