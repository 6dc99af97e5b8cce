"""The service controller without an agent, over tables of its own."""

from __future__ import annotations

from collections.abc import Collection

from cells.clustermesh.tables import RemoteService, RemoteServiceKey
from cells.kubernetes.objects.core import ENDPOINT_SLICES, EndpointSlice
from cells.kubernetes.resources import INDEXES
from cells.services import Frontend, FrontendKey, IPAddress, LoadBalancerOptions, ServiceName, ServingNode
from cells.services.model import ServiceCatalog
from cells.services.model.claims import frontends
from lifecycle import Change, ReadTable, Table


class LoneCatalog(ServiceCatalog):
    """Accepts services and slices; the resulting rows are in its table ``frontends``."""

    def __init__(
        self,
        options: LoadBalancerOptions,
        node: ServingNode,
        remote: ReadTable[RemoteServiceKey, RemoteService] | None = None,
    ) -> None:
        self.slices: Table[tuple[str, str], EndpointSlice] = Table(
            "k8s-endpoint-slices", key=lambda one: one.key, indexes=INDEXES[ENDPOINT_SLICES.qualified]
        )
        self.frontends = frontends()
        self._news = self.frontends.changes()
        super().__init__(options, node, self.slices, self.frontends, remote)

    def upsert_slice(self, slice_: EndpointSlice) -> None:
        """Add or replace a slice."""
        self.slices.put(slice_)
        self.slices_changed(ServiceName(slice_.namespace, slice_.service))

    def delete_slice(self, service: ServiceName, name: str) -> None:
        """Remove a slice."""
        with self.slices.txn() as rows:
            rows.delete((service.namespace, name))
        self.slices_changed(service)

    def move(self, node: ServingNode) -> None:
        """Change the node; all frontends are recomputed at once."""
        super().move(node)
        self._refresh()

    def set_own_addresses(self, addresses: Collection[IPAddress]) -> None:
        """Change the addresses of the node's devices; all frontends are recomputed at once."""
        super().set_own_addresses(addresses)
        self._refresh()

    def _refresh(self) -> None:
        for name in self.pop_outdated():
            self.refresh(name)

    def news(self) -> list[Change[FrontendKey, Frontend]]:
        """Return the frontends that have changed since the last call."""
        return self._news.take()
