"""CiliumPodIPPool, CiliumLoadBalancerIPPool, CiliumL2AnnouncementPolicy and CiliumNodeConfig.

Source: Cilium 1.17, custom resources of group cilium.io.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Limits
from msgspec import field

from cells.kubernetes.objects.kind import (
    AGE,
    Column,
    Condition,
    Kind,
    LabelSelector,
    Meta,
    Object,
    ObjectPart,
)

__all__ = [
    "CILIUM_L2_ANNOUNCEMENTS",
    "CILIUM_LOAD_BALANCER_IP_POOLS",
    "CILIUM_NODE_CONFIGS",
    "CILIUM_POD_IP_POOLS",
    "CiliumL2AnnouncementPolicy",
    "CiliumLoadBalancerIPPool",
    "CiliumNodeConfig",
    "CiliumPodIPPool",
]


class PoolIPv4(ObjectPart, frozen=True, gc=False):
    """The IPv4 ranges of a pool."""

    cidrs: Annotated[tuple[str, ...], Limits(min_length=1)]
    mask_size: Annotated[int, Limits(ge=1, le=32)]


class PoolIPv6(ObjectPart, frozen=True, gc=False):
    """The IPv6 ranges of a pool."""

    cidrs: Annotated[tuple[str, ...], Limits(min_length=1)]
    mask_size: Annotated[int, Limits(ge=1, le=128)]


class PodIPPoolSpec(ObjectPart, frozen=True, gc=False):
    """Spec of a pool of pod addresses."""

    ipv4: PoolIPv4 | None = None
    ipv6: PoolIPv6 | None = None


class CiliumPodIPPool(Object, frozen=True, gc=False):
    """A pool of addresses for pods."""

    spec: PodIPPoolSpec


class Block(ObjectPart, frozen=True, gc=False):
    """A CIDR, or a range from ``start`` to ``stop``."""

    cidr: str = ""
    start: str = ""
    stop: str = ""


class LoadBalancerIPPoolSpec(ObjectPart, frozen=True, gc=False):
    """Spec of a pool of service addresses."""

    blocks: tuple[Block, ...] | None = None
    service_selector: LabelSelector | None = None
    disabled: bool = False
    allow_first_last_ips: Literal["Yes", "No"] | None = field(name="allowFirstLastIPs", default=None)


class LoadBalancerIPPoolStatus(ObjectPart, frozen=True, gc=False):
    """Status of a pool of service addresses."""

    conditions: tuple[Condition, ...] | None = None


class CiliumLoadBalancerIPPool(Object, frozen=True, gc=False):
    """A pool of addresses for services."""

    spec: LoadBalancerIPPoolSpec
    status: LoadBalancerIPPoolStatus = LoadBalancerIPPoolStatus()


class L2AnnouncementSpec(ObjectPart, frozen=True, gc=False):
    """Announced services, and the nodes that announce them; interfaces are regular expressions."""

    interfaces: tuple[str, ...] | None = None
    node_selector: LabelSelector | None = None
    service_selector: LabelSelector | None = None
    external_ips: bool = field(name="externalIPs", default=False)
    load_balancer_ips: bool = field(name="loadBalancerIPs", default=False)


class PolicyMeta(Meta, frozen=True, gc=False):
    """Metadata with the generation of the spec, which conditions refer to."""

    generation: int = 0


class CiliumL2AnnouncementPolicy(Object, frozen=True, gc=False):
    """Announces addresses of services on the local network (ARP, NDP)."""

    metadata: PolicyMeta
    spec: L2AnnouncementSpec = L2AnnouncementSpec()
    status: LoadBalancerIPPoolStatus = LoadBalancerIPPoolStatus()


class NodeConfigSpec(ObjectPart, frozen=True, gc=False):
    """Settings, and the nodes that they apply to."""

    defaults: dict[str, str]
    node_selector: LabelSelector | None = None


class CiliumNodeConfig(Object, frozen=True, gc=False):
    """Agent settings for some nodes."""

    spec: NodeConfigSpec


CILIUM_POD_IP_POOLS = Kind(
    CiliumPodIPPool,
    "cilium.io/v2alpha1",
    "ciliumpodippools",
    namespaced=False,
    short=("cpip",),
    categories=("cilium",),
)
CILIUM_LOAD_BALANCER_IP_POOLS = Kind(
    CiliumLoadBalancerIPPool,
    "cilium.io/v2alpha1",
    "ciliumloadbalancerippools",
    namespaced=False,
    short=("ippools", "ippool", "lbippool", "lbippools"),
    categories=("cilium",),
    columns=(
        Column("Disabled", ".spec.disabled", "boolean"),
        Column("Conflicting", '.status.conditions[?(@.type=="cilium.io/PoolConflict")].status'),
        Column("IPs Available", '.status.conditions[?(@.type=="cilium.io/IPsAvailable")].message'),
        AGE,
    ),
    status=True,
)
CILIUM_L2_ANNOUNCEMENTS = Kind(
    CiliumL2AnnouncementPolicy,
    "cilium.io/v2alpha1",
    "ciliuml2announcementpolicies",
    namespaced=False,
    short=("l2announcement",),
    categories=("cilium",),
    columns=(AGE,),
    status=True,
)
CILIUM_NODE_CONFIGS = Kind(
    CiliumNodeConfig,
    "cilium.io/v2",
    "ciliumnodeconfigs",
    categories=("cilium",),
)
