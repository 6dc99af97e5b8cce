"""Garbage collection: identities, CiliumEndpoints and CiliumNodes that nobody needs any more.

Controller: tables of the cluster's objects in, deletions at the API server out.
Needs:      ClusterAPI, ClusterObjects, GCSettings, Metrics.   Gives: EndpointGC, IdentityGC, NodeGC,
            IdentityPasses.
Why:        an agent that died cannot delete what it wrote. Nothing is deleted before every object that speaks
            for it is known, and then only as it was seen: by uid, identities by version as well.
"""

from cells.operator.gc.endpoints import EndpointGC
from cells.operator.gc.identities import IdentityGC
from cells.operator.gc.metrics import tell
from cells.operator.gc.nodes import NodeGC
from cells.operator.gc.passes import IdentityPasses
from cells.operator.gc.settings import GCSettings
from lifecycle import after, config, invoke, module, provide

__all__ = ["EndpointGC", "GCSettings", "IdentityGC", "IdentityPasses", "NodeGC", "cell"]


@after(NodeGC, EndpointGC, IdentityGC)
def collect() -> None:
    """Have all three collect."""


cell = module(
    "gc",
    "Deletes objects that are no longer needed",
    config(GCSettings),
    provide(NodeGC, EndpointGC, IdentityGC, IdentityPasses),
    invoke(collect, tell),
)
