"""What is known of remote clusters: the rows, and the tables that connections write.

Source: Cilium 1.17, the keys of remote clusters: services as pkg/clustermesh/store.ClusterService, and the
        status of each cluster as /v1/healthz shows it.
Why:    a lost connection removes nothing. Rows stay until a listing lacks their keys, or the cluster's
        configuration is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from lifecycle import Named, ReadTable

__all__ = [
    "BY_CLUSTER",
    "BY_NAME",
    "CONNECTING",
    "MeshServices",
    "RemoteCluster",
    "RemoteClusterConfig",
    "RemotePort",
    "RemoteService",
    "RemoteServiceKey",
]

BY_CLUSTER: Final = "cluster"
"""The index by the name of the cluster."""
BY_NAME: Final = "name"
"""The index of services by namespace and name: those of all clusters that one local service may use."""
CONNECTING: Final = "Waiting for initial connection to be established"


class RemotePort(NamedTuple):
    """A port of a service or of a backend."""

    protocol: str
    """``TCP``, ``UDP`` or ``SCTP``."""
    port: int


Ports = Mapping[str, Mapping[str, RemotePort]]
"""Address to port name to port."""

RemoteServiceKey = tuple[str, str, str]
"""Cluster, namespace and name."""


class RemoteService(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A global service of a remote cluster, as that cluster publishes it.

    Addresses are checked: each key of ``frontends`` and ``backends`` is an IP address, as it was written.
    """

    cluster: str
    """The name of the remote cluster."""
    namespace: str
    name: str
    cluster_id: int
    frontends: Ports = {}
    backends: Ports = {}
    """Without any the service exists all the same, and has no backends."""
    shared: bool = False
    """Whether the remote cluster lets others use its backends."""

    @property
    def key(self) -> RemoteServiceKey:
        """Of its row."""
        return self.cluster, self.namespace, self.name


MeshServices = Annotated[ReadTable[RemoteServiceKey, RemoteService], Named("clustermesh")]
"""The table ``global-services``: valid and shared services of all remote clusters, none of the own cluster.

A service that is no longer shared is deleted here. BY_NAME finds the rows of a namespace and name.

The table is initialized once all clusters that were configured at the start have listed their services, or
clustermesh-sync-timeout has passed. Before that a missing row means nothing, so no backend may be deleted for
want of one; what is local must not wait for it. Without a mesh it is empty, and initialized.
"""


class RemoteClusterConfig(msgspec.Struct, frozen=True):
    """What a remote cluster announces of itself, as the status shows it."""

    required: bool = True
    retrieved: bool = False
    cluster_id: int = 0
    kvstoremesh: bool = False
    """Whether kvstoremesh copies the keys: they are below ``cilium/cache``."""
    sync_canaries: bool = False
    """Whether each prefix has a key that appears when all of it is there."""
    service_exports_enabled: bool | None = None
    """Whether it exports services of the MCS API; None: it does not know of them."""


class RemoteCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``remote-clusters``, by name: how the connection to a remote cluster is.

    The numbers of its nodes, services, endpoints and identities are those of the rows by BY_CLUSTER.
    """

    name: str
    connected: bool = False
    """Whether there is a connection to its etcd."""
    status: str = CONNECTING
    """The state of the connection, for people."""
    config: RemoteClusterConfig | None = None
    """None: no connection has been established yet."""
    synced: frozenset[str] = frozenset()
    """What has been listed over this connection: ``nodes``, ``services``, ``endpoints``, ``identities``."""
    failures: int = 0
    """How often an established connection was lost."""
    last_failure: float = 0.0
    """When that was last, in seconds since the epoch; 0: never."""

    @property
    def ready(self) -> bool:
        """Whether everything of it is known, and followed."""
        retrieved = self.config is not None and self.config.retrieved
        return self.connected and retrieved and len(self.synced) == len(KINDS)


KINDS: Final = ("nodes", "services", "endpoints", "identities")
"""What is read of a remote cluster, by its names in the status."""
