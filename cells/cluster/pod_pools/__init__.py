"""Which pool a pod's addresses come from: what the annotations of its object and its namespace say.

Source: Table[Pod] and Table[Namespace] in, a pool out; asked in IPAM mode multi-pool alone.
Needs:  Table[Pod], Table[Namespace], KubernetesSettings.   Gives: PodPools (for Ipam).
Source of the rules: Cilium 1.17, pkg/ipam/metadata: the pod before its namespace, the family's key before the
        one for both.
"""

from cells.cluster.pod_pools.annotations import AnnotatedPools
from cells.ipam import PodPools
from lifecycle import module, provide, provide_private

__all__ = ["AnnotatedPools", "cell"]


def pod_pools(pools: AnnotatedPools) -> PodPools:
    """What objects say."""
    return pools


cell = module("pod-pools", "Pools that pods choose", provide(pod_pools), provide_private(AnnotatedPools))
