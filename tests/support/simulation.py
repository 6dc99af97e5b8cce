"""A cluster from a seed: what it has of objects, how it changes, and what one node's maps then hold.

It is a plain model: sets and dictionaries that are made anew from all objects each time they are looked at,
with nothing of the agent's. Its objects stand in the store of a fake API server, written past admission, as
what arrives from a real one has passed it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from typing import Any

from tests.support import simulated_objects as objects
from tests.support.simulated_objects import Body

Allowed = tuple[int, int]
"""An identity and the TCP port that it may reach."""

REMOTE_NODE = 6
IN_A_RANGE = 253
"""Addresses of pods in a /24."""
A_SLICE = 100
"""Endpoints in an EndpointSlice, as Kubernetes' controller fills it."""


@dataclass(frozen=True)
class Size:
    """Numbers of a cluster's objects at the beginning, and of the workloads of its pods."""

    nodes: int
    pods: int
    services: int
    policies: int
    workloads: int
    local: tuple[str, ...] = ("local-0", "local-1", "local-2")
    """Pods of the agent's node, which policies select."""


@dataclass
class Machine:
    """Another node: its own address, the range of its pods, and the free addresses of the range."""

    name: str
    ip: str
    range: str = ""
    """Empty until it has one."""
    addresses: list[int] = field(default_factory=list)
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


class Simulation(ABC):
    """All objects, and one method that changes some of them as a cluster would.

    ``put`` and ``delete`` are called with each object as it changes.
    """

    def __init__(
        self, seed: int, size: Size, put: Callable[[Body], None], delete: Callable[[str, str, str], None]
    ) -> None:
        """The cluster is empty before found() and fill()."""
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
        self._of: dict[int, dict[str, RunningPod]] = {}
        """The pods of each workload."""
        self._slices: dict[str, int] = {}
        """Number of slices of a service."""
        self._made = self._joined = 0

    # Its beginning

    def found(self) -> None:
        """Create identities and other nodes."""
        for workload in range(self.size.workloads):
            self._identify(workload)
        for _ in range(self.size.nodes):
            self._join()

    def fill(self) -> None:
        """Create pods on the nodes that have a range, services and policies."""
        for number in range(self.size.pods):
            self._run(number % self.size.workloads)
        for _ in range(self.size.services):
            self._add_service()
        for name in self.size.local:
            self._put_rule(f"first-of-{name}", Rule(name, self._any_workload(), 80))
        for _ in range(self.size.policies - len(self.size.local)):
            self._add_rule()

    # What a node's maps hold

    def prefixes(self) -> dict[str, tuple[int, str]]:
        """Return identity and tunnel endpoint of each address of other nodes and their pods."""
        found = {f"{one.ip}/32": (REMOTE_NODE, "0.0.0.0") for one in self.machines.values()}
        for pod in self.pods.values():
            found[f"{pod.ip}/32"] = self.identities[pod.workload], self.machines[pod.machine].ip
        return found

    def frontends(self) -> dict[str, set[str]]:
        """Return the backends of each frontend, each with its port."""
        addresses: dict[int, list[str]] = {}
        for pod in self.pods.values():
            addresses.setdefault(pod.workload, []).append(pod.ip)
        return {
            f"{one.ip}:{one.port}": {f"{ip}:{one.target}" for ip in addresses.get(one.workload, ())}
            for one in self.services.values()
        }

    def allowed(self) -> dict[str, set[Allowed]]:
        """Return what may reach each pod of the node."""
        found: dict[str, set[Allowed]] = {name: set() for name in self.size.local}
        for rule in self.rules.values():
            found[rule.selected].add((self.identities[rule.workload], rule.port))
        return found

    # What happens

    def step(self) -> str:
        """Execute one event and describe it."""
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

    def _roll(self) -> str:
        """Replace pods of a workload one by one: the new one exists before the old one ends."""
        workload = self._any_workload()
        replaced = self._running(workload)
        for pod in self.random.sample(replaced, min(len(replaced), 10)):
            self._run(workload)
            self._end(pod)
        self._put_slices(workload)
        return f"workload {workload} rolls"

    def _scale(self) -> str:
        workload = self._any_workload()
        running = self._running(workload)
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
        machine = Machine(f"machine-{number}", str(IPv4Address("172.16.0.0") + number))
        self.machines[machine.name] = machine
        self._put_machine(machine)
        return f"{machine.name} joins"

    def _leave(self) -> str:
        """Remove a node and its pods; the pods are replaced elsewhere."""
        if 2 * len(self.pods) > IN_A_RANGE * len(self.machines):  # the others have no room for its pods
            return self._join()
        machine = self.machines[self.random.choice(list(self.machines))]
        moved = [self.pods[name] for name in sorted(machine.pods)]
        for pod in moved:
            self._forget(pod)
        del self.machines[machine.name]
        self._delete_machine(machine, moved)
        for pod in moved:
            self._run(pod.workload)
        self._put_slices(*{pod.workload for pod in moved})
        return f"{machine.name} leaves with {len(moved)} pods"

    def _reboot(self) -> str:
        """Give every pod of a node another address."""
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
        """Give a workload's labels, and so all its pods, another identity."""
        workload = self._any_workload()
        before = self.identities[workload]
        self._identify(workload)
        for pod in self._running(workload):
            self._put_pod(pod)
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
        taken = self._unavailable()
        number = next(
            one for one in iter(lambda: self.random.randrange(256, 65536), None) if one not in taken
        )
        self.identities[workload] = number
        self._put(objects.cilium_identity(number, workload))

    def _unavailable(self) -> set[int]:
        """Return the identities that cannot be chosen for a new one."""
        return self.taken.union(self.identities.values())

    @abstractmethod
    def _put_machine(self, machine: Machine) -> None:
        """Register a new node."""

    @abstractmethod
    def _delete_machine(self, machine: Machine, pods: list[RunningPod]) -> None:
        """Remove a node with its pods."""

    def _take_range(self, machine: Machine, found: str) -> None:
        """Assign a node the range of its pods' addresses."""
        machine.range = found
        machine.addresses = self.random.sample(range(2, 2 + IN_A_RANGE), IN_A_RANGE)

    def _address(self, machine: Machine) -> str:
        return f"{machine.range.rpartition('.')[0]}.{machine.addresses.pop()}"

    def _run(self, workload: int) -> None:
        """Start a pod of a workload on a node with room."""
        machine = self.machines[self.random.choice(list(self.machines))]
        while not machine.addresses:
            machine = self.machines[self.random.choice(list(self.machines))]
        self._made += 1
        self._put_pod(RunningPod(f"pod-{self._made}", machine.name, workload, self._address(machine)))

    def _running(self, workload: int) -> list[RunningPod]:
        return list(self._of.get(workload, {}).values())

    def _end(self, pod: RunningPod) -> None:
        self._forget(pod)
        self._delete_pod(pod)

    def _forget(self, pod: RunningPod) -> None:
        machine = self.machines[pod.machine]
        machine.pods.discard(pod.name)
        machine.addresses.insert(0, int(pod.ip.rpartition(".")[2]))
        del self.pods[pod.name], self._of[pod.workload][pod.name]

    def _put_pod(self, pod: RunningPod) -> None:
        machine = self.machines[pod.machine]
        machine.pods.add(pod.name)
        self.pods[pod.name] = self._of.setdefault(pod.workload, {})[pod.name] = pod
        self._put(objects.cilium_endpoint(pod, self.identities[pod.workload], machine.ip))

    def _delete_pod(self, pod: RunningPod) -> None:
        self._delete("CiliumEndpoint", pod.name, "default")

    def _put_service(self, name: str, service: ClusterIP) -> None:
        self.services[name] = service
        self._put(objects.cluster_ip(name, service))
        self._put_slices_of(name)

    def _put_slices(self, *workloads: int) -> None:
        for name, service in self.services.items():
            if service.workload in workloads:
                self._put_slices_of(name)

    def _put_slices_of(self, name: str) -> None:
        service = self.services[name]
        pods = self._running(service.workload)
        parts = [pods[at : at + A_SLICE] for at in range(0, len(pods), A_SLICE)] or [[]]
        for number, part in enumerate(parts):
            self._put(objects.endpoint_slice(name, number, service.target, part))
        for number in range(len(parts), self._slices.get(name, 0)):
            self._delete("EndpointSlice", f"{name}-{number}", "default")
        self._slices[name] = len(parts)

    def _put_rule(self, name: str, rule: Rule) -> None:
        self.rules[name] = rule
        self._put(objects.policy(name, rule))


def differences(actual: dict[Any, Any], wanted: dict[Any, Any]) -> Iterator[str]:
    """Return a line for each difference between two mappings."""
    for key in actual.keys() | wanted.keys():
        if actual.get(key) != wanted.get(key):
            yield f"{key}: {actual.get(key, 'nothing')} instead of {wanted.get(key, 'nothing')}"
