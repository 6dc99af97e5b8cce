"""A cluster from a seed: what it has of objects, how it changes, and what one node's maps then hold.

It is a plain model: sets and dictionaries that are made anew from all objects each time they are looked at,
with nothing of the agent's. Its objects stand in the store of a fake API server, written past admission, as
what arrives from a real one has passed it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from typing import Any

Body = dict[str, Any]
Allowed = tuple[int, int]
"""An identity and the TCP port that it may reach."""

REMOTE_NODE = 6
IN_A_RANGE = 253
"""Addresses of pods in a /24."""
A_SLICE = 100
"""Endpoints in an EndpointSlice, as Kubernetes' controller fills it."""


@dataclass(frozen=True)
class Size:
    """How many of each a cluster begins with, and how many workloads its pods belong to."""

    nodes: int
    pods: int
    services: int
    policies: int
    workloads: int
    local: tuple[str, ...] = ("local-0", "local-1", "local-2")
    """Pods of the node that is looked at, which policies select."""


@dataclass
class Machine:
    """Another node: its own address, the range of its pods, and which of those are free."""

    name: str
    ip: str
    range: str
    addresses: list[int]
    pods: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class RunningPod:
    """A pod of another node."""

    name: str
    machine: str
    workload: int
    ip: str


@dataclass(frozen=True)
class ClusterIP:
    """A service of one port, in front of the pods of a workload."""

    ip: str
    port: int
    workload: int
    target: int
    """The port of the pods."""


@dataclass(frozen=True)
class Rule:
    """A policy: pods of `workload` may reach the pod `selected` by this port."""

    selected: str
    workload: int
    port: int


class Simulation:
    """All objects, and one method that changes some of them as a cluster would.

    ``put`` and ``delete`` are called with each object as it changes.
    """

    def __init__(
        self, seed: int, size: Size, put: Callable[[Body], None], delete: Callable[[str, str, str], None]
    ) -> None:
        self.random = random.Random(seed)  # noqa: S311 - the same each time
        self.size = size
        self._put, self._delete = put, delete
        self.machines: dict[str, Machine] = {}
        self.pods: dict[str, RunningPod] = {}
        self.identities: dict[int, int] = {}
        """By workload."""
        self.services: dict[str, ClusterIP] = {}
        self.rules: dict[str, Rule] = {}
        self.taken: set[int] = set()
        """Identities that others have allocated."""
        self._slices: dict[str, int] = {}
        """How many slices a service has."""
        self._made = self._joined = 0
        self._begin()

    # What a node's maps hold

    def prefixes(self) -> dict[str, tuple[int, str]]:
        """Identity and tunnel endpoint of each address of other nodes and their pods."""
        found = {f"{one.ip}/32": (REMOTE_NODE, "0.0.0.0") for one in self.machines.values()}
        for pod in self.pods.values():
            found[f"{pod.ip}/32"] = self.identities[pod.workload], self.machines[pod.machine].ip
        return found

    def frontends(self) -> dict[str, set[str]]:
        """The backends of each frontend, each with its port."""
        addresses: dict[int, list[str]] = {}
        for pod in self.pods.values():
            addresses.setdefault(pod.workload, []).append(pod.ip)
        return {
            f"{one.ip}:{one.port}": {f"{ip}:{one.target}" for ip in addresses.get(one.workload, ())}
            for one in self.services.values()
        }

    def allowed(self) -> dict[str, set[Allowed]]:
        """What may reach each pod of the node."""
        found: dict[str, set[Allowed]] = {name: set() for name in self.size.local}
        for rule in self.rules.values():
            found[rule.selected].add((self.identities[rule.workload], rule.port))
        return found

    # What happens

    def step(self) -> str:
        """One event; what happened."""
        events: list[tuple[int, Callable[[], str]]] = [
            (6, self._roll),
            (3, self._add_service),
            (3, self._remove_service),
            (3, self._change_service),
            (4, self._add_rule),
            (4, self._remove_rule),
            (2, self._change_rule),
            (2, self._join),
            (2, self._leave),
            (2, self._reboot),
            (1, self._renumber),
            (2, self._scale),
        ]
        (event,) = self.random.choices([event for _, event in events], [weight for weight, _ in events])
        return event()

    def _begin(self) -> None:
        for workload in range(self.size.workloads):
            self._identify(workload)
        for _ in range(self.size.nodes):
            self._join()
        for number in range(self.size.pods):
            self._run(number % self.size.workloads)
        for _ in range(self.size.services):
            self._add_service()
        for name in self.size.local:
            self._put_rule(f"first-of-{name}", Rule(name, self._any_workload(), 80))
        for _ in range(self.size.policies - len(self.size.local)):
            self._add_rule()

    def _roll(self) -> str:
        """Replace pods of a workload one by one: the new one is there before the old one ends."""
        workload = self._any_workload()
        replaced = [pod for pod in self.pods.values() if pod.workload == workload]
        for pod in self.random.sample(replaced, min(len(replaced), 10)):
            self._run(workload)
            self._end(pod)
        self._put_slices(workload)
        return f"workload {workload} rolls"

    def _scale(self) -> str:
        workload = self._any_workload()
        running = [pod for pod in self.pods.values() if pod.workload == workload]
        if self.random.random() < 0.3:
            for pod in running:
                self._end(pod)
        else:
            for _ in range(5):
                self._run(workload)
        self._put_slices(workload)
        return f"workload {workload} has no longer {len(running)} pods"

    def _join(self) -> str:
        number = self._joined = self._joined + 1
        machine = Machine(
            f"machine-{number}",
            str(IPv4Address("172.16.0.0") + number),
            f"{IPv4Address('10.128.0.0') + number * 256}/24",
            self.random.sample(range(2, 2 + IN_A_RANGE), IN_A_RANGE),
        )
        self.machines[machine.name] = machine
        self._put(
            {
                "apiVersion": "cilium.io/v2",
                "kind": "CiliumNode",
                "metadata": {"name": machine.name},
                "spec": {
                    "addresses": [{"type": "InternalIP", "ip": machine.ip}],
                    "ipam": {"podCIDRs": [machine.range]},
                },
            }
        )
        return f"{machine.name} joins"

    def _leave(self) -> str:
        """A node and its pods go; the pods are replaced elsewhere."""
        if 2 * len(self.pods) > IN_A_RANGE * len(self.machines):  # the others have no room for its pods
            return self._join()
        machine = self.machines[self.random.choice(list(self.machines))]
        moved = [self.pods[name] for name in sorted(machine.pods)]
        for pod in moved:
            self._end(pod)
        del self.machines[machine.name]
        self._delete("CiliumNode", machine.name, "")
        for pod in moved:
            self._run(pod.workload)
        self._put_slices(*{pod.workload for pod in moved})
        return f"{machine.name} leaves with {len(moved)} pods"

    def _reboot(self) -> str:
        """Every pod of a node has another address afterwards."""
        machine = self.machines[self.random.choice(list(self.machines))]
        before = [self.pods[name] for name in sorted(machine.pods)]
        for pod in before:
            machine.addresses.append(int(pod.ip.rpartition(".")[2]))
        self.random.shuffle(machine.addresses)
        for pod in before:
            self._put_pod(RunningPod(pod.name, pod.machine, pod.workload, self._address(machine)))
        self._put_slices(*{pod.workload for pod in before})
        return f"{machine.name} boots, with {len(before)} pods"

    def _renumber(self) -> str:
        """A workload's labels get another identity, and all its pods have it."""
        workload = self._any_workload()
        before = self.identities[workload]
        self._identify(workload)
        for pod in [pod for pod in self.pods.values() if pod.workload == workload]:
            self._put_pod(pod)
        self._delete("CiliumIdentity", str(before), "")
        return f"workload {workload} has identity {self.identities[workload]}, not {before}"

    def _add_service(self) -> str:
        self._made += 1
        name = f"service-{self._made}"
        ip = str(IPv4Address("10.96.0.0") + 10 + self._made)
        self._put_service(name, ClusterIP(ip, self._any_port(), self._any_workload(), self._any_port()))
        return f"{name} is added"

    def _remove_service(self) -> str:
        if not self.services:
            return self._add_service()
        name = self.random.choice(list(self.services))
        del self.services[name]
        for number in range(self._slices.pop(name)):
            self._delete("EndpointSlice", f"{name}-{number}", "default")
        self._delete("Service", name, "default")
        return f"{name} is removed"

    def _change_service(self) -> str:
        if not self.services:
            return self._add_service()
        name = self.random.choice(list(self.services))
        before = self.services[name]
        workload = before.workload if self.random.random() < 0.5 else self._any_workload()
        self._put_service(name, replace(before, port=self._any_port(), workload=workload))
        return f"{name} changes"

    def _add_rule(self) -> str:
        self._made += 1
        rule = Rule(self.random.choice(self.size.local), self._any_workload(), self._any_port())
        self._put_rule(f"policy-{self._made}", rule)
        return f"policy-{self._made} is added"

    def _remove_rule(self) -> str:
        removable = [name for name in self.rules if name.startswith("policy-")]
        if not removable:
            return self._add_rule()
        name = self.random.choice(removable)
        del self.rules[name]
        self._delete("CiliumNetworkPolicy", name, "default")
        return f"{name} is removed"

    def _change_rule(self) -> str:
        name = self.random.choice(list(self.rules))
        before = self.rules[name]
        self._put_rule(name, Rule(before.selected, self._any_workload(), self._any_port()))
        return f"{name} changes"

    # Objects

    def _any_workload(self) -> int:
        return self.random.randrange(self.size.workloads)

    def _any_port(self) -> int:
        return self.random.randrange(1, 65536)

    def _identify(self, workload: int) -> None:
        taken = self.taken.union(self.identities.values())
        number = next(
            one for one in iter(lambda: self.random.randrange(256, 65536), None) if one not in taken
        )
        self.identities[workload] = number
        labels = {
            "k8s:app": f"workload-{workload}",
            "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name": "default",
            "k8s:io.cilium.k8s.policy.cluster": "default",
            "k8s:io.cilium.k8s.policy.serviceaccount": "default",
            "k8s:io.kubernetes.pod.namespace": "default",
        }
        self._put(
            {
                "apiVersion": "cilium.io/v2",
                "kind": "CiliumIdentity",
                "metadata": {"name": str(number), "labels": {}},
                "security-labels": labels,
            }
        )

    def _address(self, machine: Machine) -> str:
        return f"{machine.range.rpartition('.')[0]}.{machine.addresses.pop()}"

    def _run(self, workload: int) -> None:
        """Start a pod of a workload where there is room."""
        machine = self.machines[self.random.choice(list(self.machines))]
        while not machine.addresses:
            machine = self.machines[self.random.choice(list(self.machines))]
        self._made += 1
        self._put_pod(RunningPod(f"pod-{self._made}", machine.name, workload, self._address(machine)))

    def _end(self, pod: RunningPod) -> None:
        machine = self.machines[pod.machine]
        machine.pods.discard(pod.name)
        machine.addresses.insert(0, int(pod.ip.rpartition(".")[2]))
        del self.pods[pod.name]
        self._delete("CiliumEndpoint", pod.name, "default")

    def _put_pod(self, pod: RunningPod) -> None:
        machine = self.machines[pod.machine]
        machine.pods.add(pod.name)
        self.pods[pod.name] = pod
        self._put(
            {
                "apiVersion": "cilium.io/v2",
                "kind": "CiliumEndpoint",
                "metadata": {"name": pod.name, "namespace": "default"},
                "status": {
                    "id": 1,
                    "identity": {"id": self.identities[pod.workload]},
                    "networking": {"addressing": [{"ipv4": pod.ip}], "node": machine.ip},
                    "state": "ready",
                },
            }
        )

    def _put_service(self, name: str, service: ClusterIP) -> None:
        self.services[name] = service
        self._put(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {
                    "type": "ClusterIP",
                    "clusterIP": service.ip,
                    "clusterIPs": [service.ip],
                    "ipFamilies": ["IPv4"],
                    "ports": [
                        {"name": "p", "port": service.port, "targetPort": service.target, "protocol": "TCP"}
                    ],
                },
            }
        )
        self._put_slices_of(name)

    def _put_slices(self, *workloads: int) -> None:
        for name, service in self.services.items():
            if service.workload in workloads:
                self._put_slices_of(name)

    def _put_slices_of(self, name: str) -> None:
        service = self.services[name]
        pods = [pod for pod in self.pods.values() if pod.workload == service.workload]
        parts = [pods[at : at + A_SLICE] for at in range(0, len(pods), A_SLICE)] or [[]]
        for number, part in enumerate(parts):
            self._put(_slice(name, number, service.target, part))
        for number in range(len(parts), self._slices.get(name, 0)):
            self._delete("EndpointSlice", f"{name}-{number}", "default")
        self._slices[name] = len(parts)

    def _put_rule(self, name: str, rule: Rule) -> None:
        self.rules[name] = rule
        self._put(
            {
                "apiVersion": "cilium.io/v2",
                "kind": "CiliumNetworkPolicy",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {
                    "endpointSelector": {"matchLabels": {"app": rule.selected}},
                    "ingress": [
                        {
                            "fromEndpoints": [{"matchLabels": {"app": f"workload-{rule.workload}"}}],
                            "toPorts": [{"ports": [{"port": str(rule.port), "protocol": "TCP"}]}],
                        }
                    ],
                },
            }
        )


def _slice(name: str, number: int, port: int, pods: list[RunningPod]) -> Body:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-{number}",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "p", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [pod.ip], "conditions": {"ready": True}, "nodeName": pod.machine} for pod in pods
        ],
    }


def differences(actual: dict[Any, Any], wanted: dict[Any, Any]) -> Iterator[str]:
    """Where two differ, a line each."""
    for key in actual.keys() | wanted.keys():
        if actual.get(key) != wanted.get(key):
            yield f"{key}: {actual.get(key, 'nothing')} instead of {wanted.get(key, 'nothing')}"
