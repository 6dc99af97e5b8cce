"""Whose address is an API server's: ``toEntities: [kube-apiserver]`` selects it, node or not.

Source: the EndpointSlices of the Service default/kubernetes in; labels of their addresses out.
Needs:  Table[EndpointSlice], PrefixMetadata.   Gives: nothing; it is invoked.
"""

from cells.cluster.apiservers.labels import ApiServerLabels
from lifecycle import invoke, module, provide_private

__all__ = ["cell"]

cell = module(
    "kube-apiserver",
    "Addresses of API servers",
    provide_private(ApiServerLabels),
    invoke(ApiServerLabels),
)
