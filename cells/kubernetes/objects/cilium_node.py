"""CiliumNode: a node's addresses, settings and IPAM, written by agents and the operator.

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
    """The key that a node encrypts with; 0 for none."""

    key: int = 0


class Usage(ObjectPart, frozen=True, gc=False):
    """The owner of an address of a pool."""

    owner: str = ""
    resource: str = ""


class Needed(ObjectPart, frozen=True, gc=False):
    """Number of addresses that a node requests."""

    ipv4: int = field(name="ipv4-addrs", default=0)
    ipv6: int = field(name="ipv6-addrs", default=0)


class RequestedPool(ObjectPart, frozen=True, gc=False):
    """A node's request for addresses of a pool."""

    pool: PoolName
    needed: Needed = Needed()


class AllocatedPool(ObjectPart, frozen=True, gc=False):
    """The CIDRs of a pool that are assigned to a node."""

    pool: PoolName
    cidrs: tuple[str, ...] | None = None


class Pools(ObjectPart, frozen=True, gc=False):
    """IPAM mode multi-pool."""

    requested: tuple[RequestedPool, ...] | None = None
    allocated: tuple[AllocatedPool, ...] | None = None


class IPAMSpec(ObjectPart, frozen=True, gc=False):
    """IPAM settings of a node."""

    pod_cidrs: tuple[str, ...] | None = field(name="podCIDRs", default=None)
    pool: dict[str, Usage] | None = None
    pools: Pools = Pools()
    min_allocate: Count = field(name="min-allocate", default=0)
    max_allocate: Count = field(name="max-allocate", default=0)
    pre_allocate: Count = field(name="pre-allocate", default=0)
    max_above_watermark: Count = field(name="max-above-watermark", default=0)


class CiliumNodeSpec(ObjectPart, frozen=True, gc=False):
    """Spec of a CiliumNode."""

    addresses: tuple[Address, ...] | None = None
    boot_id: str = field(name="bootid", default="")
    instance_id: str = field(name="instance-id", default="")
    """Written only in the IPAM modes of clouds."""
    node_identity: int = field(name="nodeidentity", default=0)
    encryption: Encryption = Encryption()
    health: Pair = Pair()
    ingress: Pair = Pair()
    ipam: IPAMSpec = IPAMSpec()


class PodCIDRStatus(ObjectPart, frozen=True, gc=False):
    """State of a node's pod CIDR: released, depleted, in-use."""

    status: str = ""


class OperatorStatus(ObjectPart, frozen=True, gc=False):
    """Error of the operator for a node."""

    error: str = ""


class NodeIPAMStatus(ObjectPart, frozen=True, gc=False):
    """Usage of a node's addresses."""

    used: dict[str, Usage] | None = None
    pod_cidrs: dict[str, PodCIDRStatus] | None = field(name="pod-cidrs", default=None)
    operator_status: OperatorStatus = field(name="operator-status", default=OperatorStatus())
    release_ips: dict[str, str] | None = field(name="release-ips", default=None)


class CiliumNodeStatus(ObjectPart, frozen=True, gc=False):
    """Status of a CiliumNode."""

    ipam: NodeIPAMStatus = NodeIPAMStatus()


class CiliumNode(Object, frozen=True, gc=False):
    """A node, written by its agent; the operator writes its pod CIDRs."""

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
