"""A CiliumEndpoint for every pod of this node: its address and identity, for all other nodes.

Controller and reconciler: endpoints, pods, policies and this node in, the table ``ciliumendpoint`` out, which
        objects of an API server are made equal to. From manifests it is only shown.
Needs:  Table[Endpoint], Table[Pod], Table[RealizedPolicy], ReadTable[ClusterNode], ExposedEndpoints,
        KubernetesAPI.   Gives: Table[PodEndpoint].
Why:    other nodes know a pod's packets by it. It goes with its pod, and is written only when it differs.
"""

from cells.endpoint.ciliumendpoint.model import PodEndpoint
from cells.endpoint.ciliumendpoint.published import PodEndpoints, pod_endpoints
from cells.endpoint.ciliumendpoint.sync import CiliumEndpointSync
from lifecycle import after, invoke, module, provide, provide_private

__all__ = ["PodEndpoint", "cell"]


@after(CiliumEndpointSync)
def keep() -> None:
    """Objects are written whether or not anybody asks."""


cell = module(
    "cilium-endpoint",
    "CiliumEndpoints of this node's pods",
    provide(pod_endpoints),
    provide_private(PodEndpoints, CiliumEndpointSync),
    invoke(keep),
)
