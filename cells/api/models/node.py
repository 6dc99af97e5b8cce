"""The wire types of node information besides endpoints: identities, prefixes, maps, nodes.

Needs: Model.   Gives: one Struct per model, with the exact JSON keys of api/v1/openapi.yaml (1.17).
"""

from __future__ import annotations

from msgspec import field

from cells.api.models.policy import Policy
from cells.api.models.status import NodeElement, StatusResponse
from cells.api.models.v1 import Endpoint, Identity, Model, Time


class IdentityEndpoints(Model, frozen=True):
    """An identity, and how many endpoints of this node have it."""

    identity: Identity
    ref_count: int = field(default=0, name="refCount")


class IPListMetadata(Model, frozen=True):
    """Who said whose a prefix is; the pod, if it is one's."""

    source: str = ""
    namespace: str = ""
    name: str = ""


class IPListEntry(Model, frozen=True, omit_defaults=False):
    """A prefix and whose it is."""

    cidr: str
    identity: int
    metadata: IPListMetadata
    host_ip: str = field(default="", name="hostIP")
    encrypt_key: int = field(default=0, name="encryptKey")


class BPFMapEntry(Model, frozen=True, omit_defaults=False):
    """A row of a map in words; ``desired-action`` is what is still to be done with it."""

    key: str
    value: str
    desired_action: str = "sync"
    last_error: str = ""


class BPFMap(Model, frozen=True):
    """A map; ``cache`` is absent if the datapath writes the map, or no copy of it is kept."""

    path: str
    cache: list[BPFMapEntry] | None = None


class BPFMapList(Model, frozen=True):
    """The node's maps."""

    maps: list[BPFMap]


class MapEvent(Model, frozen=True, omit_defaults=False):
    """One change of a map by the agent."""

    timestamp: Time
    key: str
    value: str
    action: str
    desired_action: str = "sync"
    last_error: str = ""


class ClusterNodeStatus(Model, frozen=True, omit_defaults=False):
    """The nodes that came and went since the client asked last."""

    self_name: str = field(name="self")
    client_id: int
    nodes_added: list[NodeElement] | None = None
    nodes_removed: list[NodeElement] | None = None


class NodeID(Model, frozen=True, omit_defaults=False):
    """The number a node has in the datapath; 0 is this one."""

    id: int
    ips: list[str]


class CgroupContainer(Model, frozen=True):
    """A container's control group."""

    cgroup_id: int = 0
    cgroup_path: str = ""


class CgroupPod(Model, frozen=True):
    """A pod's control groups."""

    name: str = ""
    namespace: str = ""
    ips: list[str] = field(default_factory=list)
    containers: list[CgroupContainer] = field(default_factory=list)


class CgroupDumpMetadata(Model, frozen=True, omit_defaults=False):
    """The control groups of pods."""

    pod_metadatas: list[CgroupPod] = field(default_factory=list)


class DebugInfo(Model, frozen=True, omit_defaults=False):
    """Everything a maintainer asks for at first."""

    cilium_version: str
    kernel_version: str
    cilium_status: StatusResponse
    endpoint_list: list[Endpoint]
    policy: Policy
    environment_variables: list[str]
    cilium_memory_map: str
    subsystem: dict[str, str]
    service_list: list[dict[str, str]] = field(default_factory=list)
    cilium_nodemonitor_memory_map: str = ""
