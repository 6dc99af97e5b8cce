"""Pods of other nodes: their addresses in the ipcache, with identity and node.

Source: CiliumEndpoint objects, or CiliumEndpointSlices, in; claims of prefixes out. Pods of manifests, too.
Needs:  Resources, the table ``nodes``, Identities, Ipcache.
Gives:  RemoteEndpoints, Table[RemoteEndpoint], EndpointObjects.
Why:    by its address alone a packet is known to be a pod's, and whose.
"""

from cells.cluster.endpoints.manifest_pods import ManifestPods
from cells.cluster.endpoints.remote import RemoteEndpoint, RemoteEndpoints, remote_endpoints
from cells.cluster.endpoints.settings import ClusterEndpointSettings, EndpointObjects, endpoint_objects
from lifecycle import config, group, invoke, module, provide

__all__ = ["ClusterEndpointSettings", "EndpointObjects", "RemoteEndpoint", "RemoteEndpoints", "cell"]


cell = group(
    module(
        "remote-endpoints",
        "Where pods of other nodes are read from",
        config(ClusterEndpointSettings),
        provide(endpoint_objects, remote_endpoints),
    ),
    module(
        "cluster-endpoints",
        "Pods of other nodes",
        provide(RemoteEndpoints, ManifestPods),
        invoke(RemoteEndpoints, ManifestPods),
    ),
)
