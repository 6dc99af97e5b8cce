"""Labels the addresses of API servers, for ``toEntities: [kube-apiserver]``.

Source: the EndpointSlices of the Service default/kubernetes in; labels of their addresses out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from ipaddress import ip_network
from typing import Final

from cells.cluster.ipcache.rows import Prefix, Source
from cells.cluster.prefix_labels import PrefixLabels, PrefixMetadata
from cells.kubernetes.objects.core import EndpointSlice
from lifecycle import Jobs, Logger, Table, invoke, module, provide_private

__all__ = ["cell"]


# The label reserved:kube-apiserver.
#
# Source: Cilium 1.17, the watcher of the Service default/kubernetes.
#
# The host keeps its identity and gets the label, another node gets identity 7, a pod keeps its identity. Any
# other address gets a local identity, with the labels of the nearest CIDR in policies.

SERVICE: Final = ("default", "kubernetes")
RESOURCE: Final = "endpointslices/default/kubernetes"
LABEL: Final = "reserved:kube-apiserver"


def addresses_of(slices: Iterable[EndpointSlice]) -> Iterator[Prefix]:
    """The addresses of API servers that answer, including those that are shutting down and still serve."""
    for one in slices:
        for endpoint in one.endpoints or ():
            if endpoint.conditions.ready is not False or endpoint.conditions.serving:
                for text in endpoint.addresses or ():
                    try:
                        yield str(ip_network(text))
                    except ValueError:  # of addressType FQDN, or invalid
                        continue


def _is_of_servers(_: object, *rows: EndpointSlice | None) -> bool:
    """Whether a slice is or was one of the API servers."""
    return any(row is not None and (row.namespace, row.service) == SERVICE for row in rows)


class ApiServerLabels:
    """Publishes the labels of these addresses."""

    def __init__(
        self,
        slices: Table[tuple[str, str], EndpointSlice],
        metadata: PrefixMetadata,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._slices = slices
        self._metadata = metadata
        self._log = log
        self._servers: set[Prefix] = set()
        self._first = metadata.table.initializer("kube-apiserver")
        jobs.observe("API servers", self._slice_changes, self._follow)

    async def _slice_changes(self) -> AsyncIterator[None]:
        """Yield once at the beginning, then after every change of these slices."""
        await self._slices.wait_initialized()
        changes = self._slices.changes(self._slices.revision, only=_is_of_servers)
        yield
        async for _ in changes:
            yield

    async def _follow(self, _: None) -> None:
        servers = set(addresses_of(self._slices.by("service").get(SERVICE)))
        if servers != self._servers:
            removed, self._servers = self._servers - servers, servers
            self._log.info("addresses of API servers", addresses=sorted(servers))
            self._metadata.remove(RESOURCE, removed)
            self._metadata.upsert(
                *(
                    PrefixLabels(prefix=one, resource=RESOURCE, source=Source.KUBE_APISERVER, labels=(LABEL,))
                    for one in servers
                )
            )
        self._first.done()


cell = module(
    "kube-apiserver",
    "Addresses of API servers",
    provide_private(ApiServerLabels),
    invoke(ApiServerLabels),
)
