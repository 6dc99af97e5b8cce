"""Keys and values in a remote cluster's etcd: prefixes, parsing and validation.

Source: Cilium 1.17, pkg/clustermesh: the prefixes, CiliumClusterConfig below cluster-config, and the
        validators of nodes, services, addresses and identities.
Why:    a remote etcd is not trusted: its data about clusters other than its own must have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec

from cells.base.labels import CLUSTER, parse, texts
from cells.cluster.identity.numbers import CLUSTER as POD_NUMBERS
from cells.cluster.identity.numbers import HOST, REMOTE_NODE, ClusterNumbers
from cells.cluster.ipcache.rows import Source, prefix_of
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.nodes.parse import parse_ip
from cells.clustermesh.tables import (
    RemoteAddress,
    RemoteClusterConfig,
    RemoteIdentity,
    RemotePort,
    RemoteService,
)
from cells.kubernetes.objects.cilium_endpoint import NamedPort
from cells.remote.shared_keys import IPIdentityPair, Network, UInt32, WireNode, node_of, optional_ip

# The configuration of a cluster.


class RemoteCapabilities(msgspec.Struct, frozen=True, rename="camel"):
    """The capabilities of a cluster's etcd; missing ones are off."""

    synced_canaries: bool = False
    cached: bool = False
    max_connected_clusters: int = 0
    service_exports_enabled: bool | None = None


class Announcement(msgspec.Struct, frozen=True):
    """The value of cilium/cluster-config/NAME: CiliumClusterConfig in Cilium."""

    id: int = 0
    capabilities: RemoteCapabilities | None = None

    @property
    def config(self) -> RemoteClusterConfig:
        """The configuration as the status shows it."""
        known = self.capabilities or RemoteCapabilities()
        return RemoteClusterConfig(
            required=True,
            retrieved=True,
            cluster_id=self.id,
            kvstoremesh=known.cached,
            sync_canaries=known.synced_canaries,
            service_exports_enabled=known.service_exports_enabled,
        )


_ANNOUNCEMENT: Final = msgspec.json.Decoder(Announcement | None)


def read_announcement(value: bytes) -> Announcement:
    """Parse a cluster's configuration. Raises ValueError."""
    return _ANNOUNCEMENT.decode(value) or Announcement()


def announcement_fault(found: Announcement, numbers: ClusterNumbers) -> str:
    """Return why the agent must not connect to the cluster, in Cilium's words; empty if it may.

    ``numbers`` are those of the local cluster.
    """
    most, theirs = numbers.most_clusters, (found.capabilities or RemoteCapabilities()).max_connected_clusters
    if found.id == 0:
        return "ClusterID 0 is reserved"
    if not 0 < found.id <= most:
        return f"ClusterID > {most} is not supported"
    if most != ClusterNumbers().most_clusters and theirs != most:
        return f"mismatched MaxConnectedClusters; local={most}, remote={theirs}"
    if found.id == numbers.cluster_id:
        return f"clusterID {found.id} is assigned to the local cluster"
    return ""


# Prefixes.


class RemoteKeys(msgspec.Struct, frozen=True):
    """The key prefixes of a cluster by KINDS, and its canary keys."""

    cluster: str
    cached: bool

    @property
    def prefixes(self) -> Mapping[str, str]:
        """Prefixes by kind."""
        cluster = self.cluster
        if self.cached:
            base = "cilium/cache"
            addresses, identities = f"{base}/ip/v1/{cluster}/", f"{base}/identities/v1/{cluster}/id/"
        else:
            base = "cilium/state"
            addresses, identities = f"{base}/ip/v1/default/", f"{base}/identities/v1/id/"
        return {
            "nodes": f"{base}/nodes/v1/{cluster}/",
            "services": f"{base}/services/v1/{cluster}/",
            "endpoints": addresses,
            "identities": identities,
        }

    @property
    def canaries(self) -> Mapping[str, str]:
        """Keys by kind that appear once all keys of the kind are written."""
        base = f"{synced_prefix(self.cluster)}cilium/{'cache' if self.cached else 'state'}"
        return {
            "nodes": f"{base}/nodes/v1",
            "services": f"{base}/services/v1",
            "endpoints": f"{base}/ip/v1",
            "identities": f"{base}/identities/v1",
        }


def synced_prefix(cluster: str) -> str:
    """Return the prefix of a cluster's canary keys."""
    return f"cilium/synced/{cluster}/"


# Values to rows. A ValueError is logged, and the last valid row stays.


class RemoteValues:
    """Parses and validates the values of one cluster, with the cluster id it has announced."""

    def __init__(self, cluster: str, cluster_id: int, numbers: ClusterNumbers) -> None:
        self.cluster = cluster
        self.cluster_id = cluster_id
        self._numbers = numbers.of(cluster_id)

    def node(self, name: str, value: bytes) -> ClusterNode:
        """Parse a node. Raises ValueError."""
        found = _NODE.decode(value)
        self._check_origin(found.cluster, found.cluster_id)
        if found.name != name:
            raise ValueError(f"unexpected node name: got {found.name}, expected {name}")
        return node_of(found, Source.CLUSTERMESH)

    def service(self, name: str, value: bytes) -> RemoteService:
        """Parse a service by its ``namespace/name``. Raises ValueError."""
        found = _SERVICE.decode(value) or _WireService()
        self._check_origin(found.cluster, found.cluster_id)
        if f"{found.namespace}/{found.name}" != name or not found.namespace:
            raise ValueError(f"unexpected service name: got {found.namespace}/{found.name}, expected {name}")
        return RemoteService(
            cluster=self.cluster,
            namespace=found.namespace,
            name=found.name,
            cluster_id=self.cluster_id,
            frontends=dict(_ports(found.frontends, "frontend")),
            backends=dict(_ports(found.backends, "backend")),
            shared=found.shared,
        )

    def address(self, name: str, value: bytes) -> RemoteAddress:
        """Parse an address. Raises ValueError.

        The identity is 0 if the value has one of another cluster.
        """
        found = _ADDRESS.decode(value) or IPIdentityPair()
        ip = parse_ip(found.ip)
        if ip is None:
            raise ValueError(f"no IP address: {found.ip!r}")
        network = Network(found.ip, found.mask).network if found.mask else None
        if found.mask and network is None:
            raise ValueError(f"no network mask of {ip}: {found.mask.hex()}")
        host = optional_ip(found.host_ip)
        identity = self._identity(found.id)
        return RemoteAddress(
            cluster=self.cluster,
            name=name,
            prefix=str(network) if network is not None else prefix_of(ip),
            identity=identity,
            node=str(host) if host is not None else "",
            encrypt_key=found.key & 0xFF,
            namespace=found.namespace,
            pod=found.pod_name,
            ports=tuple(_named_ports(found)) if identity else (),
        )

    def identity(self, name: str, value: bytes) -> RemoteIdentity:
        """Parse an identity by its number. Raises ValueError."""
        number = int(name) if name.isascii() and name.isdigit() else 0
        if number not in self._numbers or str(number) != name:
            first, last = self._numbers[0], self._numbers[-1]
            raise ValueError(f"ID {name} does not belong to the range {first} to {last} of the cluster")
        labels = [parse(part) for part in value.decode(errors="replace").split(";") if part]
        if not any((one.source, one.key, one.value) == ("k8s", CLUSTER, self.cluster) for one in labels):
            raise ValueError(f"could not find expected label k8s:{CLUSTER}={self.cluster}")
        return RemoteIdentity(cluster=self.cluster, name=name, number=number, labels=texts(labels))

    def _identity(self, number: int) -> int:
        if number == HOST:  # the host of a remote node
            return REMOTE_NODE
        return number if 0 < number < POD_NUMBERS.start or number in self._numbers else 0

    def _check_origin(self, cluster: str, cluster_id: int) -> None:
        if cluster != self.cluster:
            raise ValueError(f"unexpected cluster name: got {cluster}, expected {self.cluster}")
        if cluster_id != self.cluster_id:
            raise ValueError(f"unexpected cluster ID: got {cluster_id}, expected {self.cluster_id}")


def _named_ports(pair: IPIdentityPair) -> Iterator[NamedPort]:
    for one in pair.named_ports or ():
        yield NamedPort(one.name, one.port, one.protocol)


class _WirePort(msgspec.Struct, rename="pascal"):
    protocol: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0


class _WireService(msgspec.Struct):
    cluster: str = ""
    namespace: str = ""
    name: str = ""
    cluster_id: UInt32 = msgspec.field(name="clusterID", default=0)
    frontends: dict[str, dict[str, _WirePort | None] | None] | None = None
    backends: dict[str, dict[str, _WirePort | None] | None] | None = None
    shared: bool = False


_NODE: Final = msgspec.json.Decoder(WireNode)
_SERVICE: Final = msgspec.json.Decoder(_WireService | None)
_ADDRESS: Final = msgspec.json.Decoder(IPIdentityPair | None)


def _ports(
    found: dict[str, dict[str, _WirePort | None] | None] | None, what: str
) -> Iterator[tuple[str, Mapping[str, RemotePort]]]:
    for address, ports in (found or {}).items():
        if parse_ip(address) is None:
            raise ValueError(f"invalid {what} address: {address!r}")
        yield (
            address,
            {
                name: RemotePort(port.protocol, port.port)
                for name, port in (ports or {}).items()
                if port is not None
            },
        )
