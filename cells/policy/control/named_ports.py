"""The named ports of pods, as policies mean them.

For:    RulePolicy and PolicyWatch.   Needs: Table[Pod].
Gives:  PodPorts, ClusterPorts, of_pod, of_remote.
Source: Cilium 1.17: at ingress a name is a port of the endpoint's own pod, at egress of any pod of the
        cluster that the node knows of; a name of two numbers is no port there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from cells.cluster.endpoints import RemoteEndpoint
from cells.kubernetes import PODS, Pod, Resources
from cells.policy.compute import NamedPort
from cells.policy.maps import PodKey
from cells.policy.rules import PROTOCOLS

NONE: frozenset[NamedPort] = frozenset()


class PodPorts:
    """Looks up what this node's pods name: as fresh as their labels, so an ADD has both."""

    def __init__(self, resources: Resources) -> None:
        self._pods = resources.table(PODS)

    def of(self, pod: PodKey) -> frozenset[NamedPort]:
        """The ports of a pod, by namespace and name; none of one that there is no object of."""
        row = self._pods.get(pod)
        return of_pod(row) if row is not None else NONE


class ClusterPorts:
    """The ports that pods name anywhere, each for as long as somebody tells of it."""

    def __init__(self) -> None:
        self._told: dict[Any, frozenset[NamedPort]] = {}
        self._tellers: Counter[NamedPort] = Counter()

    def tell(self, teller: object, ports: frozenset[NamedPort]) -> None:
        """What a teller knows of now; nothing where it is gone."""
        self._tellers.subtract(self._told.pop(teller, ()))
        if ports:
            self._told[teller] = ports
            self._tellers.update(ports)

    def all(self) -> frozenset[NamedPort]:
        """Every port with a name."""
        self._tellers = +self._tellers  # those nobody tells of go
        return frozenset(self._tellers)


def of_pod(pod: Pod) -> frozenset[NamedPort]:
    """What a pod's containers name; nothing of a pod in the host's network or one that has ended."""
    if pod.spec.host_network or pod.finished:
        return NONE
    ports = ((one.name, one.protocol, one.container_port) for one in pod.named_ports)
    return frozenset(_known(ports))


def of_remote(endpoint: RemoteEndpoint) -> frozenset[NamedPort]:
    """What a pod of another node names."""
    return frozenset(_known((one.name, one.protocol, one.port) for one in endpoint.ports))


def _known(ports: Iterable[tuple[str, str, int]]) -> Iterator[NamedPort]:
    """Those of a protocol that policies can name."""
    for name, protocol, port in ports:
        if name and (number := PROTOCOLS.get(protocol.upper())):
            yield NamedPort(name, number, port)
