"""CiliumNode: what agents and the operator share about a node.

Source: Cilium 1.17, custom resource CiliumNode of group cilium.io, version v2.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Limits
from msgspec import field

from cells.kubernetes.objects.kind import AGE, Column, DatedMeta, Kind, Object, ObjectPart

__all__ = ["CILIUM_NODES", "AllocatedPool", "CiliumNode", "Needed", "RequestedPool"]


Count = Annotated[int, Limits(ge=0)]
PoolName = Annotated[str, Limits(min_length=1)]


class Address(ObjectPart, frozen=True, gc=False):
    """One address of a node: InternalIP, ExternalIP, CiliumInternalIP."""

    type: str = ""
    ip: str = ""


class Pair(ObjectPart, frozen=True, gc=False):
    """One address of each family."""

    ipv4: str = ""
    ipv6: str = ""


class Encryption(ObjectPart, frozen=True, gc=False):
    """The key a node encrypts with; 0 for none."""

    key: int = 0


class Usage(ObjectPart, frozen=True, gc=False):
    """Who uses an address of a pool."""

    owner: str = ""
    resource: str = ""


class Needed(ObjectPart, frozen=True, gc=False):
    """How many addresses a node asks for."""

    ipv4: int = field(name="ipv4-addrs", default=0)
    ipv6: int = field(name="ipv6-addrs", default=0)


class RequestedPool(ObjectPart, frozen=True, gc=False):
    """A node's request to a pool."""

    pool: PoolName
    needed: Needed = Needed()


class AllocatedPool(ObjectPart, frozen=True, gc=False):
    """What a node was given of a pool."""

    pool: PoolName
    cidrs: tuple[str, ...] | None = None


class Pools(ObjectPart, frozen=True, gc=False):
    """Of IPAM mode multi-pool."""

    requested: tuple[RequestedPool, ...] | None = None
    allocated: tuple[AllocatedPool, ...] | None = None


class IPAMSpec(ObjectPart, frozen=True, gc=False):
    """What is decided about a node's addresses."""

    pod_cidrs: tuple[str, ...] | None = field(name="podCIDRs", default=None)
    pool: dict[str, Usage] | None = None
    pools: Pools = Pools()
    min_allocate: Count = field(name="min-allocate", default=0)
    max_allocate: Count = field(name="max-allocate", default=0)
    pre_allocate: Count = field(name="pre-allocate", default=0)
    max_above_watermark: Count = field(name="max-above-watermark", default=0)


class CiliumNodeSpec(ObjectPart, frozen=True, gc=False):
    """Of a CiliumNode."""

    addresses: tuple[Address, ...] | None = None
    boot_id: str = field(name="bootid", default="")
    instance_id: str = field(name="instance-id", default="")
    node_identity: int = field(name="nodeidentity", default=0)
    encryption: Encryption = Encryption()
    health: Pair = Pair()
    ingress: Pair = Pair()
    ipam: IPAMSpec = IPAMSpec()


class PodCIDRStatus(ObjectPart, frozen=True, gc=False):
    """How a node's use of a range is: released, depleted, in-use."""

    status: str = ""


class OperatorStatus(ObjectPart, frozen=True, gc=False):
    """What the operator could not do."""

    error: str = ""


class NodeIPAMStatus(ObjectPart, frozen=True, gc=False):
    """How a node's addresses are used."""

    used: dict[str, Usage] | None = None
    pod_cidrs: dict[str, PodCIDRStatus] | None = field(name="pod-cidrs", default=None)
    operator_status: OperatorStatus = field(name="operator-status", default=OperatorStatus())
    release_ips: dict[str, str] | None = field(name="release-ips", default=None)


class CiliumNodeStatus(ObjectPart, frozen=True, gc=False):
    """Of a CiliumNode."""

    ipam: NodeIPAMStatus = NodeIPAMStatus()


class CiliumNode(Object, frozen=True, gc=False):
    """A node as its agent describes it; the operator writes its ranges."""

    metadata: DatedMeta
    spec: CiliumNodeSpec = CiliumNodeSpec()
    status: CiliumNodeStatus = CiliumNodeStatus()


CILIUM_NODES = Kind(
    CiliumNode,
    "cilium.io/v2",
    "ciliumnodes",
    namespaced=False,
    short=("cn", "ciliumn"),
    categories=("cilium",),
    columns=(
        Column("CiliumInternalIP", '.spec.addresses[?(@.type=="CiliumInternalIP")].ip'),
        Column("InternalIP", '.spec.addresses[?(@.type=="InternalIP")].ip'),
        AGE,
    ),
    status=True,
)
