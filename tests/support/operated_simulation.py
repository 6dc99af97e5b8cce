"""A simulated cluster with an operator, which gives ranges to nodes and deletes what others leave behind.

A node that goes leaves its CiliumNode and the CiliumEndpoints of its pods, as its agent is dead; labels that
get another identity leave the one before. What the operator has done is read from the API server's store, and
compared with when it must and may have done it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.support import simulated_objects as objects
from tests.support.simulated_objects import Body
from tests.support.simulation import REMOTE_NODE, Allowed, Machine, RunningPod, Simulation, Size

HEARTBEAT: Final = "io.cilium.heartbeat"
NODE_PASSES, IDENTITY_PASSES = 300.0, 900.0
"""Seconds between two passes of garbage collection: Cilium's defaults."""
UNUSED: Final = 1800.0
"""Seconds without endpoints before an identity is marked, and again before it is deleted."""
REST: Final = 2 * UNUSED + 3 * IDENTITY_PASSES
"""Seconds without an event after which all unneeded objects are deleted."""
IN_TURN: Final = 5.0
"""Seconds by which a pass may be early or late."""

Get = Callable[[str, str, str], Body | None]


@dataclass(frozen=True)
class Orphan:
    """A CiliumEndpoint that its dead node cannot delete."""

    pod: RunningPod
    identity: int
    node_ip: str


class OperatedSimulation(Simulation):
    """The cluster also has Nodes and Pods.

    ``get`` reads an object, ``now`` is the cluster's clock.
    """

    def __init__(
        self,
        seed: int,
        size: Size,
        put: Callable[[Body], None],
        delete: Callable[[str, str, str], None],
        *,
        get: Get,
        now: Callable[[], float],
    ) -> None:
        super().__init__(seed, size, put, delete)
        self._get, self._now = get, now
        self.left: dict[str, tuple[Machine, float]] = {}
        """Deleted nodes and their time of deletion: their CiliumNode may still exist."""
        self.orphans: dict[str, Orphan] = {}
        self.given: dict[int, tuple[int, float]] = {}
        """Every identity that may exist: its workload, and when a pod used it last."""
        self._early: list[str] = []
        """Objects that were deleted too early."""

    # What the operator has done

    def look(self) -> None:
        """Read new ranges and deletions: before an event, and before the model is used."""
        for machine in self.machines.values():
            if not machine.range and len(ranges := self._ranges(machine.name)) == 1:
                self._take_range(machine, ranges[0])
        self._look_at_what_is_left()
        now = self._now()
        for identity in self._used():
            if identity in self.given:
                self.given[identity] = self.given[identity][0], now

    def _look_at_what_is_left(self) -> None:
        now = self._now() + IN_TURN
        for name, (_, since) in [*self.left.items()]:
            if self._lost("CiliumNode", name):
                del self.left[name]
                self._note_early(f"the CiliumNode of {name}", now - since, NODE_PASSES)
        for name in [*self.orphans]:  # which goes in the next pass, however soon that is
            if self._lost("CiliumEndpoint", name, "default"):
                del self.orphans[name]
        for number, (_, since) in [*self.given.items()]:
            if self._lost("CiliumIdentity", number):
                del self.given[number]
                self._note_early(f"identity {number}", now - since, UNUSED)

    def _note_early(self, what: str, after: float, earliest: float) -> None:
        if after < earliest:
            self._early.append(f"{what} is deleted after {after:.0f} s, and not after {earliest:.0f}")

    def _used(self) -> set[int]:
        return {self.identities[workload] for workload, pods in self._of.items() if pods}

    def state(self) -> dict[str, Any]:
        """Return the nodes' ranges, and the existing objects of those kinds that an operator deletes."""
        return {
            "ranges": {name: self._ranges(name) for name in (*self.machines, *self.left)},
            "endpoints": sorted((*self.pods, *self.orphans)),
            "identities": sorted(self.given),
        }

    @property
    def ranged(self) -> bool:
        """Return whether every node has a range."""
        return all(machine.range for machine in self.machines.values())

    def faults(self, *, rested: bool = False) -> Iterator[str]:
        """Return what the operator did wrong; once the cluster is at rest, also what it failed to do."""
        yield from self._faults_of_ranges()
        yield from self._early
        used = self._used() | self.taken
        yield from (
            f"identity {one} is deleted, and in use" for one in used if self._lost("CiliumIdentity", one)
        )
        for pod in self.pods.values():
            if self._lost("CiliumEndpoint", pod.name, "default"):
                yield f"the CiliumEndpoint of {pod.name} is deleted, and its pod runs"
        if rested:
            yield from (f"the CiliumNode of {name} is left" for name in self.left)
            yield from (f"the CiliumEndpoint of {name} is left" for name in self.orphans)
            unused = self.given.keys() - used
            yield from (f"identity {number} is left, and not in use" for number in unused)

    def _faults_of_ranges(self) -> Iterator[str]:
        owners: dict[str, str] = {}
        for name in (*self.machines, *self.left):
            if (found := self._get("CiliumNode", name, "")) is None:
                yield f"the CiliumNode of {name} is deleted, and its node is there"
                continue
            ranges = (found["spec"].get("ipam") or {}).get("podCIDRs") or []
            if len(ranges) > 1:
                yield f"{name} has {ranges}"
            for one in ranges:
                if (other := owners.setdefault(one, name)) != name:
                    yield f"{one} is of {name} and of {other}"
            known = self.machines.get(name)
            if known is not None and known.range and ranges != [known.range]:
                yield f"{name} has {ranges} instead of {known.range}"

    def _ranges(self, node: str) -> list[str]:
        found = self._get("CiliumNode", node, "") or {}
        ranges: list[str] = (found.get("spec", {}).get("ipam") or {}).get("podCIDRs") or []
        return ranges

    def _lost(self, kind: str, name: object, namespace: str = "") -> bool:
        return self._get(kind, str(name), namespace) is None

    # What a node's maps hold: also of what is left behind

    def prefixes(self) -> dict[str, tuple[int, str]]:
        """Return identity and tunnel endpoint of each address of other nodes and their pods."""
        left = {f"{machine.ip}/32": (REMOTE_NODE, "0.0.0.0") for machine, _ in self.left.values()}
        orphans = {f"{one.pod.ip}/32": (one.identity, one.node_ip) for one in self.orphans.values()}
        return left | orphans | super().prefixes()

    def allowed(self) -> dict[str, set[Allowed]]:
        """Return what may reach each pod of the node: every identity that has the labels."""
        of: dict[int, list[int]] = {}
        for number, (workload, _) in self.given.items():
            of.setdefault(workload, []).append(number)
        found: dict[str, set[Allowed]] = {name: set() for name in self.size.local}
        for rule in self.rules.values():
            found[rule.selected].update((number, rule.port) for number in of.get(rule.workload, ()))
        return found

    # How objects come and go

    def step(self) -> str:
        """Execute one event and describe it."""
        self.look()
        return super().step()

    def _put_machine(self, machine: Machine) -> None:
        self._put(objects.node(machine.name, machine.ip))
        self._put(objects.cilium_node(machine))

    def _delete_machine(self, machine: Machine, pods: list[RunningPod]) -> None:
        now = self._now()
        for pod in pods:
            self._delete("Pod", pod.name, "default")
            self.orphans[pod.name] = Orphan(pod, self.identities[pod.workload], machine.ip)
        self._delete("Node", machine.name, "")
        self.left[machine.name] = machine, now

    def _identify(self, workload: int) -> None:
        super()._identify(workload)
        self.given[self.identities[workload]] = workload, self._now()

    def _unavailable(self) -> set[int]:
        return super()._unavailable().union(self.given)

    def _put_pod(self, pod: RunningPod) -> None:
        """As an agent: recreate a deleted identity, and remove the mark of garbage collection."""
        number = self.identities[pod.workload]
        found = self._get("CiliumIdentity", str(number), "")
        if found is None:
            self._identify(pod.workload)
        elif HEARTBEAT in _annotations(found):
            self._put(objects.cilium_identity(number, pod.workload))
        self._put(objects.running(pod))
        super()._put_pod(pod)

    def _delete_pod(self, pod: RunningPod) -> None:
        self._delete("Pod", pod.name, "default")
        super()._delete_pod(pod)


def _annotations(body: Body) -> dict[str, Any]:
    found: dict[str, Any] = body["metadata"].get("annotations") or {}
    return found
