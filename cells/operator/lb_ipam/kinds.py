"""CiliumLoadBalancerIPPool as LB-IPAM reads it: with its age, and the version its conditions are about.

Needs: nothing.   Gives: LoadBalancerPool, LOAD_BALANCER_POOLS, Block.
Source: Cilium 1.17, custom resource of group cilium.io, version v2alpha1.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cells.kubernetes import CILIUM_LOAD_BALANCER_IP_POOLS, Condition, DatedMeta, Kind, Object, Selector


class _Part(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A part of an object."""


class PoolMeta(DatedMeta, frozen=True, gc=False):
    """With its generation."""

    generation: int = 0


class Block(_Part, frozen=True, gc=False):
    """A network, or a range from ``start`` to ``stop``."""

    cidr: str = ""
    start: str = ""
    stop: str = ""


class PoolSpec(_Part, frozen=True, gc=False):
    """What a pool has, and for whom."""

    blocks: tuple[Block, ...] | None = None
    service_selector: Selector | None = None
    disabled: bool = False
    allow_first_last_ips: str = msgspec.field(name="allowFirstLastIPs", default="")


class PoolStatus(_Part, frozen=True, gc=False):
    """What is said of a pool."""

    conditions: tuple[Condition, ...] | None = None


class LoadBalancerPool(Object, frozen=True, gc=False):
    """Addresses for services."""

    metadata: PoolMeta
    spec: PoolSpec = PoolSpec()
    status: PoolStatus = PoolStatus()


LOAD_BALANCER_POOLS: Final = Kind(
    LoadBalancerPool,
    CILIUM_LOAD_BALANCER_IP_POOLS.api_version,
    CILIUM_LOAD_BALANCER_IP_POOLS.plural,
    kind=CILIUM_LOAD_BALANCER_IP_POOLS.kind,
    namespaced=False,
    status=True,
)
