"""What an endpoint claims in the ipcache: its addresses, each alone.

For:   Endpoints and endpoint restore.   Needs: nothing.   Gives: claims_of, resource_of.
"""

from collections.abc import Iterable

from cells.cluster.ipcache import IpcacheEntry, Source, prefix_of
from cells.endpoint.table.model import Endpoint, IPAddress


def resource_of(endpoint_id: int) -> str:
    """Whose claims they are."""
    return f"ep//{endpoint_id}"


def claims_of(endpoint: Endpoint) -> list[IpcacheEntry]:
    """Its addresses have its identity; the pod is on this node, so there is no tunnel endpoint."""
    resource, identity = resource_of(endpoint.id), endpoint.identity
    return [
        IpcacheEntry(prefix=prefix_of(ip), identity=identity, source=Source.LOCAL, resource=resource)
        for ip in endpoint.addresses
    ]


def restored_claims(endpoint_id: int, identity: int, addresses: Iterable[IPAddress]) -> list[IpcacheEntry]:
    """Addresses that a former agent's endpoint has, until it is regenerated."""
    resource = resource_of(endpoint_id)
    return [
        IpcacheEntry(prefix=prefix_of(ip), identity=identity, source=Source.RESTORED, resource=resource)
        for ip in addresses
    ]
