"""The services of the cluster's objects, as ``toServices`` means them.

For:    RulePolicy.   Needs: Resources.   Gives: ClusterServices.
Source: Cilium 1.17, toServices: services without a selector stand for their backends' addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network

from cells.kubernetes import ENDPOINT_SLICES, SERVICES, EndpointSlice, Resources
from cells.policy.labels import Prefix
from cells.policy.rules import ServiceReference, means_service

SERVICE_NAME = "kubernetes.io/service-name"


class ClusterServices:
    """Looks services up in the tables of objects."""

    def __init__(self, resources: Resources) -> None:
        self._services = resources.table(SERVICES)
        self._slices = resources.table(ENDPOINT_SLICES)

    def prefixes(self, reference: ServiceReference) -> Iterator[Prefix]:
        """The addresses behind the services meant."""
        meant = {
            service.key
            for service in self._services.all()
            if not service.spec.selector
            and means_service(reference, service.namespace, service.name, service.labels)
        }
        for slice_ in self._slices.all() if meant else ():
            if (slice_.namespace, slice_.labels.get(SERVICE_NAME, "")) in meant:
                yield from addresses(slice_)


def addresses(slice_: EndpointSlice) -> Iterator[Prefix]:
    """The backends' addresses, as /32 or /128; none where they are names."""
    if slice_.address_type != "FQDN":
        for endpoint in slice_.endpoints or ():
            yield from (ip_network(address) for address in endpoint.addresses or ())
