"""Whose address is an API server's: ``toEntities: [kube-apiserver]`` selects it, node or not.

Controller: the EndpointSlices of the Service default/kubernetes, and other claims of their addresses, in;
        claims of the ipcache out, and the labels of the host's identity where a server is on this node.
Needs:  Table[EndpointSlice], Ipcache, Identities, EndpointPolicies.
"""

from cells.cluster.apiservers.claims import ApiServerClaims
from lifecycle import invoke, module, provide_private

__all__ = ["cell"]

cell = module(
    "kube-apiserver",
    "Addresses of API servers",
    provide_private(ApiServerClaims),
    invoke(ApiServerClaims),
)
