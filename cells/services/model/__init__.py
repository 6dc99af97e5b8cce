"""``ServiceCatalog``: computes frontends and backends from Services, EndpointSlices, pods and policies.

``ServiceWatch`` applies changed objects; the result is the table ``frontends``, and the addresses, backends
and policies that are refused. Synchronous; no cell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

import msgspec

from cells.clustermesh.tables import BY_NAME, RemoteService, RemoteServiceKey
from cells.kubernetes.objects.core import HEADLESS, EndpointSlice, Pod, Service, served_by
from cells.services import (
    BackendState,
    Frontend,
    FrontendKey,
    IPAddress,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    ServiceType,
    ServingNode,
    parse_address,
    plain,
)
from cells.services.model.backends import Backends, RefusedBackend, backends_of, with_remote
from cells.services.model.claims import (
    FOREIGN_HOST_IP,
    HOST_IP,
    Claims,
    Holder,
    IPNetwork,
    RefusedAddress,
    Reservation,
    ReservedAddresses,
    cluster_hosts,
    outside_addresses,
    same_cluster_addresses,
)
from cells.services.model.frontends import affinity_of, frontends_of, is_global, may_differ
from cells.services.model.redirect import (
    RedirectPolicy,
    foreign_host_ips,
    host_port_frontends,
    pod_claimant,
    redirect_claimant,
    redirect_frontends,
)
from lifecycle import ReadTable, Table

__all__ = ["ServiceCatalog"]


# The services of a node: objects in, the table of frontends out.

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
OF_OTHER_CLUSTERS = "endpointslice-mesh-controller.cilium.io"
"""The controller that copies slices of remote clusters; agents ignore these copies."""

_SYSTEM: Final = {
    ServiceName("default", "kubernetes"): "an address of the API server",
    ServiceName("kube-system", "kube-dns"): "an address of the cluster's DNS server",
}
"""Services on which the whole cluster depends."""


class ServiceCatalog:
    """Computes frontends from services, their slices and other objects, and writes the table.

    A service without slices is served without backends, so that its clients are refused, as Kubernetes
    requires of proxies. Cilium instead waits for the first slice, even an empty one. A global service is
    served, as in Cilium, while it has a slice or a remote cluster has the service.
    """

    def __init__(
        self,
        options: LoadBalancerOptions,
        node: ServingNode,
        slices: ReadTable[tuple[str, str], EndpointSlice],
        frontends: Table[FrontendKey, Frontend],
        remote: ReadTable[RemoteServiceKey, RemoteService] | None = None,
    ) -> None:
        self._remote = remote.by(BY_NAME) if remote is not None else None
        self.remote_known = remote is None or remote.initialized
        """Whether the remote clusters are listed, so that no remote backend is missing."""
        self.refused_backends: dict[ServiceName, tuple[RefusedBackend, ...]] = {}
        """Addresses in remote clusters that are refused as backends, by global service."""
        self._options = options
        self._node = node
        self._services: dict[ServiceName, Service] = {}
        self._slices = slices.by("service")
        self._pods: dict[ServiceName, Pod] = {}
        self.redirects: dict[ServiceName, RedirectPolicy] = {}
        """Local redirect policies."""
        self.redirected: dict[ServiceName, list[Frontend]] = {}
        """The frontends of each local redirect policy with ready pods on this node."""
        self.refused_redirects: dict[ServiceName, str] = {}
        """Policies that may not redirect their address, with the reason."""
        self._own_addresses: Collection[IPAddress] | None = None
        self._outdated: dict[ServiceName, None] = {}
        self._reserved = ReservedAddresses()
        self._requested: dict[ServiceName, set[IPAddress]] = {}
        self._requesters: dict[IPAddress, dict[ServiceName, None]] = {}
        """Services by the outside addresses that they request."""
        self.refused: dict[ServiceName, tuple[RefusedAddress, ...]] = {}
        """Refused addresses by service, and of host ports by ``pod/NAME``."""
        self._claims = Claims(frontends)

    @property
    def changes(self) -> Claims:
        """A context manager: changes within it appear together in the table of frontends."""
        return self._claims

    def upsert_service(self, service: Service) -> None:
        """Add or update a service."""
        name = ServiceName(service.metadata.namespace, service.metadata.name)
        if not served_by(service.labels, self._options.k8s_service_proxy_name):
            self._remove(name)
            self._reserve_cluster_addresses(name, service)
            return
        before = self._services.get(name)
        self._services[name] = service
        self._update(name)
        self._redirects_of(name)
        if before is None or not same_cluster_addresses(before, service):
            self._reserve_cluster_addresses(name, service)

    def delete_service(self, name: ServiceName) -> None:
        """Remove a service."""
        self._remove(name)
        self._reserve_cluster_addresses(name, None)

    def _remove(self, name: ServiceName) -> None:
        self._services.pop(name, None)
        self._update(name)
        self._redirects_of(name)

    def remote_changed(self, name: ServiceName) -> None:
        """Update a global service after a change of its backends in remote clusters."""
        service = self._services.get(name)
        if service is not None and is_global(service):
            self._update(name)

    def remote_listed(self) -> Sequence[ServiceName]:
        """Record that remote clusters are listed; return the services to update."""
        self.remote_known = True
        return [name for name, service in self._services.items() if is_global(service)]

    def slices_changed(self, name: ServiceName) -> None:
        """Update a service after a change of its slices."""
        if name in self._services:
            self._update(name)
        use = _SYSTEM.get(name)
        if use is not None:
            texts = [
                text
                for slice_ in self._slices_of(name)
                for endpoint in slice_.endpoints or ()
                for text in endpoint.addresses or ()
            ]
            found = [
                Reservation(ip, Holder.SYSTEM, use) for ip in map(parse_address, texts) if ip is not None
            ]
            self.reserve(f"endpoints of {name}", found)

    def reserve(self, name: str, reservations: Iterable[Reservation]) -> None:
        """Replace the reservations of an object, and update services that request these addresses."""
        changed = self._reserved.replace(name, reservations)
        if changed and (self._requesters or self.redirects):  # otherwise no object requests outside addresses
            self._update_requesting(changed)

    def _update_requesting(self, changed: Iterable[IPAddress | IPNetwork]) -> None:
        """Update services and policies that request one of these addresses."""
        affected: dict[ServiceName, None] = {}
        for what in changed:
            if isinstance(what, IPv4Address | IPv6Address):
                affected |= self._requesters.get(what, {})
            else:
                for ip, names in self._requesters.items():
                    if ip in what:
                        affected |= names
        for each in affected:
            self._update(each)
        for redirect in list(self.redirects.values()):
            if redirect.address is not None:
                self._redirect(redirect)

    def _reserve_cluster_addresses(self, name: ServiceName, service: Service | None) -> None:
        changed = self._reserved.replace_cluster(name, cluster_hosts(service) if service is not None else [])
        if changed and (self._requesters or self.redirects):
            self._update_requesting([ip_address(host[1:]) for host in changed])

    def move(self, node: ServingNode) -> None:
        """Set the node's addresses, zone or exposure, and mark the services that depend on them outdated."""
        before, self._node = self._node, node
        for name, service in self._services.items():
            if may_differ(service, before, node, self._options):
                self._outdated[name] = None
        self._outdated.update(dict.fromkeys(self._pods))

    def set_own_addresses(self, addresses: Collection[IPAddress]) -> None:
        """Set the devices' addresses, to which host ports are limited; mark pods outdated."""
        self._own_addresses = addresses
        self._outdated.update(dict.fromkeys(self._pods))

    def pop_outdated(self) -> Sequence[ServiceName]:
        """Return services and pods that are outdated after a change of the node, for refresh()."""
        found, self._outdated = self._outdated, {}
        return list(found)

    def refresh(self, name: ServiceName) -> None:
        """Recompute the frontends of a service or pod."""
        if name in self._services:
            self._update(name)
        elif (pod := self._pods.get(name)) is not None:
            self._host_ports(name, pod)

    def _host_ports(self, name: ServiceName, pod: Pod) -> None:
        own = self._own_addresses
        foreign = foreign_host_ips(pod, own, self._options) if own is not None else []
        if foreign:
            self.refused[name] = tuple(RefusedAddress(name, ip, HOST_IP, FOREIGN_HOST_IP) for ip in foreign)
        else:
            self.refused.pop(name, None)
        found = host_port_frontends(pod, self._node, self._options)
        self._claims.replace(name, [one for one in found if one.key.address.ip not in foreign])

    def upsert_pod(self, pod: Pod) -> None:
        """Add or update a pod of this node: its host ports, and the policies that select it."""
        name = pod_claimant(pod.metadata.namespace, pod.metadata.name)
        self._pods[name] = pod
        self._host_ports(name, pod)
        self._redirects_in(pod.metadata.namespace)

    def delete_pod(self, namespace: str, name: str) -> None:
        """Remove a pod."""
        key = pod_claimant(namespace, name)
        self._pods.pop(key, None)
        self.refused.pop(key, None)
        self._claims.replace(key, [])
        self._redirects_in(namespace)

    def upsert_redirect(self, redirect: RedirectPolicy) -> None:
        """Add or update a local redirect policy."""
        self.redirects[redirect.name] = redirect
        self._redirect(redirect)

    def delete_redirect(self, name: ServiceName) -> None:
        """Remove a local redirect policy."""
        self.redirects.pop(name, None)
        self.redirected.pop(name, None)
        self.refused_redirects.pop(name, None)
        self._claims.replace(redirect_claimant(name), [])

    def override(self, key: FrontendKey, frontend: Frontend | None) -> None:
        """Serve a frontend as set manually (None: not at all), until an object changes the frontend."""
        self._claims.override(key, frontend)

    def clear_override(self, key: FrontendKey) -> None:
        """Serve the frontend of the objects again."""
        self._claims.clear_override(key)

    def set_state(self, address: ServiceAddress, state: BackendState) -> None:
        """Set a backend's state manually; it lasts while any frontend has the backend."""
        self._claims.set_state(address, state)

    def pods_of(self, namespace: str) -> dict[str, str]:
        """Return the names of the namespace's pods on this node, by address."""
        pods = [pod for pod in self._pods.values() if pod.namespace == namespace]
        return {address: pod.name for pod in pods for address in pod.addresses}

    def _redirects_of(self, service: ServiceName) -> None:
        for redirect in [each for each in self.redirects.values() if each.service == service]:
            self._redirect(redirect)

    def _redirects_in(self, namespace: str) -> None:
        for redirect in [each for each in self.redirects.values() if each.name.namespace == namespace]:
            self._redirect(redirect)

    def _redirect(self, redirect: RedirectPolicy) -> None:
        service = self._services.get(redirect.service) if redirect.service is not None else None
        found = []
        reason = ""
        if redirect.address is not None:
            reason = self._reserved.redirect_refusal(redirect.address, redirect.name.namespace)
        if reason:
            self.refused_redirects[redirect.name] = f"addressMatcher.ip={redirect.address} {reason}"
        else:
            self.refused_redirects.pop(redirect.name, None)
            found = redirect_frontends(redirect, self._pods.values(), service, self._node, self._options)
        self.redirected[redirect.name] = found
        self._claims.replace(redirect_claimant(redirect.name), found)

    @property
    def contested(self) -> Mapping[FrontendKey, tuple[ServiceName, ...]]:
        """Frontends that several services claim: the served claimant first, then the others."""
        return self._claims.contested

    def _update(self, name: ServiceName) -> None:
        """Recompute a service's frontends; unchanged ones are not written."""
        service = self._services.get(name)
        frontends: list[Frontend] = []
        if service is not None:
            slices = self._slices_of(name)
            backends = backends_of(slices, self._options)
            remote: Sequence[RemoteService] | None = None
            if self._remote is not None and is_global(service):
                remote = list(self._remote.get(name))
                backends = self._with_remote(name, service, backends, remote)
            if slices or remote or remote is None or not self.remote_known:
                frontends = frontends_of(service, backends, self._node, self._options)
            if remote is not None and not self.remote_known:
                frontends = [msgspec.structs.replace(one, partial=True) for one in frontends]
        if self.refused_backends and (service is None or not is_global(service)):
            self.refused_backends.pop(name, None)
        refused = self._refuse(name, service)
        if refused:
            frontends = [one for one in frontends if (one.type, one.key.address.ip) not in refused]
        self._claims.replace(name, frontends)

    def _with_remote(
        self, name: ServiceName, service: Service, local: Backends, remote: Iterable[RemoteService]
    ) -> Backends:
        """Add remote backends, and record the refused ones."""
        backends, refused = with_remote(local, remote, affinity_of(service), self._options)
        if refused:
            self.refused_backends[name] = tuple(refused)
        else:
            self.refused_backends.pop(name, None)
        return backends

    def _refuse(
        self, name: ServiceName, service: Service | None
    ) -> Collection[tuple[ServiceType, IPAddress]]:
        """Record the external addresses that a service requests; return the refused ones."""
        requested = list(outside_addresses(service, self._options)) if service is not None else []
        if not requested and name not in self._requested:  # as for nearly all services
            self.refused.pop(name, None)
            return ()
        wanted = {plain(ip) for _, _, ip, _ in requested}
        for ip in self._requested.pop(name, set()) - wanted:
            del self._requesters[ip][name]
            if not self._requesters[ip]:
                del self._requesters[ip]
        for ip in wanted:
            self._requesters.setdefault(ip, {})[name] = None
        if wanted:
            self._requested[name] = wanted
        refused = {
            (type_, ip): RefusedAddress(name, ip, part, reason, announced_only=not served)
            for type_, part, ip, served in requested
            if (reason := self._reserved.refusal(ip, type_, self._options))
        }
        if refused:
            self.refused[name] = tuple(refused.values())
        else:
            self.refused.pop(name, None)
        return refused

    def _slices_of(self, name: ServiceName) -> list[EndpointSlice]:
        """Return the service's slices, except copies of remote slices and those of headless services."""
        return [
            slice_
            for slice_ in self._slices.get(name)
            if slice_.labels.get(MANAGED_BY) != OF_OTHER_CLUSTERS and HEADLESS not in slice_.labels
        ]
