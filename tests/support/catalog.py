"""A catalog of services without an agent: the tables that it reads and writes are its own."""

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
    """Slices go into it as services do; what is served is in its table ``frontends``."""

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
        """A slice, new or changed."""
        self.slices.put(slice_)
        self.slices_changed(ServiceName(slice_.namespace, slice_.service))

    def delete_slice(self, service: ServiceName, name: str) -> None:
        """A slice that no longer exists."""
        with self.slices.txn() as rows:
            rows.delete((service.namespace, name))
        self.slices_changed(service)

    def move(self, node: ServingNode) -> None:
        """The node has changed; all frontends are found again at once."""
        super().move(node)
        self._refresh()

    def set_own_addresses(self, addresses: Collection[IPAddress]) -> None:
        """The same of the addresses of its devices."""
        super().set_own_addresses(addresses)
        self._refresh()

    def _refresh(self) -> None:
        for name in self.take_outdated():
            self.refresh(name)

    def news(self) -> list[Change[FrontendKey, Frontend]]:
        """What became of frontends since the last time."""
        return self._news.take()
