"""Kubernetes' services as the datapath serves them: frontends, backends, and which serve which.

Pure values; no cell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import Final

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
)
from cells.services.model.backends import Backends, backends_of
from cells.services.model.claims import (
    FOREIGN_HOST_IP,
    HOST_IP,
    Claims,
    FrontendChange,
    Holder,
    RefusedAddress,
    Reservation,
    ReservedAddresses,
    cluster_reservations,
    outside_addresses,
    plain,
)
from cells.services.model.frontends import frontends_of
from cells.services.model.redirect import (
    RedirectPolicy,
    foreign_host_ips,
    host_port_frontends,
    redirect_frontends,
)

__all__ = ["ServiceCatalog"]


# The services of a node: objects in, changed frontends out.

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
OF_OTHER_CLUSTERS = "endpointslice-mesh-controller.cilium.io"
"""Who copies the slices of other clusters, which agents do not read."""

_SYSTEM: Final = {
    ServiceName("default", "kubernetes"): "an address of the API server",
    ServiceName("kube-system", "kube-dns"): "an address of the cluster's DNS server",
}
"""Services that the whole cluster depends on."""


class ServiceCatalog:
    """Services with their slices, and the frontends that follow from them.

    A service without slices is served without backends, so that its clients are refused, as Kubernetes asks
    of proxies. The recorded tree waits for the first slice, even an empty one.
    """

    def __init__(self, options: LoadBalancerOptions, node: ServingNode) -> None:
        self._options = options
        self._node = node
        self._services: dict[ServiceName, Service] = {}
        self._slices: dict[ServiceName, dict[str, EndpointSlice]] = {}
        self._backends: dict[ServiceName, Backends] = {}
        """The backends of the slices, computed when first asked for after a change."""
        self._pods: dict[ServiceName, Pod] = {}
        self.redirects: dict[ServiceName, RedirectPolicy] = {}
        """The redirections to pods of this node."""
        self.redirected: dict[ServiceName, list[Frontend]] = {}
        """The frontends of each redirection that has pods here."""
        self.refused_redirects: dict[ServiceName, str] = {}
        """Redirections of an address that is not theirs, and why."""
        self._own_addresses: Collection[IPAddress] | None = None
        self._reserved = ReservedAddresses()
        self._asked: dict[ServiceName, set[IPAddress]] = {}
        self._askers: dict[IPAddress, dict[ServiceName, None]] = {}
        """Services by the addresses outside that they ask for."""
        self.refused: dict[ServiceName, tuple[RefusedAddress, ...]] = {}
        """What of that they do not get; of pods, as ``pod/NAME``, addresses of host ports."""
        self._claims = Claims()

    def upsert_service(self, service: Service) -> Iterator[FrontendChange]:
        """A service, new or changed."""
        name = ServiceName(service.metadata.namespace, service.metadata.name)
        if not served_by(service.labels, self._options.k8s_service_proxy_name):
            yield from self._remove(name)
            yield from self._reserve_cluster_addresses(name, service)
            return
        self._services[name] = service
        yield from self._changes(name)
        yield from self._redirects_of(name)
        yield from self._reserve_cluster_addresses(name, service)

    def delete_service(self, name: ServiceName) -> Iterator[FrontendChange]:
        """A service that no longer exists."""
        yield from self._remove(name)
        yield from self._reserve_cluster_addresses(name, None)

    def _remove(self, name: ServiceName) -> Iterator[FrontendChange]:
        self._services.pop(name, None)
        yield from self._changes(name)
        yield from self._redirects_of(name)

    def upsert_slice(self, slice_: EndpointSlice) -> Iterator[FrontendChange]:
        """A slice, new or changed."""
        name = ServiceName(slice_.metadata.namespace, slice_.service)
        if slice_.labels.get(MANAGED_BY) == OF_OTHER_CLUSTERS or HEADLESS in slice_.labels:
            return self.delete_slice(name, slice_.metadata.name)
        self._slices.setdefault(name, {})[slice_.metadata.name] = slice_
        return self._slices_changed(name)

    def delete_slice(self, name: ServiceName, slice_name: str) -> Iterator[FrontendChange]:
        """A slice that no longer exists."""
        slices = self._slices.get(name, {})
        slices.pop(slice_name, None)
        if not slices:
            self._slices.pop(name, None)
        return self._slices_changed(name)

    def _slices_changed(self, name: ServiceName) -> Iterator[FrontendChange]:
        self._backends.pop(name, None)
        yield from self._changes(name)
        use = _SYSTEM.get(name)
        if use is not None:
            texts = [
                text
                for slice_ in self._slices.get(name, {}).values()
                for endpoint in slice_.endpoints or ()
                for text in endpoint.addresses or ()
            ]
            found = [
                Reservation(ip, Holder.SYSTEM, use) for ip in map(parse_address, texts) if ip is not None
            ]
            yield from self.reserve(f"endpoints of {name}", found)

    def reserve(self, name: str, reservations: Iterable[Reservation]) -> Iterator[FrontendChange]:
        """These addresses and ranges are an object's: services that ask for one outside lose or regain it."""
        changed = self._reserved.replace(name, reservations)
        affected: dict[ServiceName, None] = {}
        for what in changed:
            if isinstance(what, IPv4Address | IPv6Address):
                affected |= self._askers.get(what, {})
            else:
                for ip, names in self._askers.items():
                    if ip in what:
                        affected |= names
        for each in affected:
            yield from self._changes(each)
        for redirect in list(self.redirects.values()) if changed else ():
            if redirect.address is not None:
                yield from self._redirect(redirect)

    def _reserve_cluster_addresses(
        self, name: ServiceName, service: Service | None
    ) -> Iterator[FrontendChange]:
        found = cluster_reservations(service) if service is not None else frozenset()
        return self.reserve(f"cluster addresses of {name}", found)

    def move(self, node: ServingNode) -> Iterator[FrontendChange]:
        """The node has changed: its addresses, its zone, its exposure."""
        self._node = node
        for name in list(self._services):
            yield from self._changes(name)
        for name, pod in list(self._pods.items()):
            yield from self._host_ports(name, pod)

    def set_own_addresses(self, addresses: Collection[IPAddress]) -> Iterator[FrontendChange]:
        """The addresses of the node's devices: host ports are served at no others."""
        self._own_addresses = addresses
        for name, pod in list(self._pods.items()):
            yield from self._host_ports(name, pod)

    def _host_ports(self, name: ServiceName, pod: Pod) -> Iterator[FrontendChange]:
        own = self._own_addresses
        foreign = foreign_host_ips(pod, own, self._options) if own is not None else []
        if foreign:
            self.refused[name] = tuple(RefusedAddress(name, ip, HOST_IP, FOREIGN_HOST_IP) for ip in foreign)
        else:
            self.refused.pop(name, None)
        found = host_port_frontends(pod, self._node, self._options)
        return self._claims.replace(name, [one for one in found if one.key.address.ip not in foreign])

    def upsert_pod(self, pod: Pod) -> Iterator[FrontendChange]:
        """A pod of this node, new or changed: its host ports, and what is redirected to it."""
        name = ServiceName(pod.metadata.namespace, f"pod/{pod.metadata.name}")
        self._pods[name] = pod
        yield from self._host_ports(name, pod)
        yield from self._redirects_in(pod.metadata.namespace)

    def delete_pod(self, namespace: str, name: str) -> Iterator[FrontendChange]:
        """A pod that no longer exists."""
        key = ServiceName(namespace, f"pod/{name}")
        self._pods.pop(key, None)
        self.refused.pop(key, None)
        yield from self._claims.replace(key, [])
        yield from self._redirects_in(namespace)

    def upsert_redirect(self, redirect: RedirectPolicy) -> Iterator[FrontendChange]:
        """A redirection to pods of this node, new or changed."""
        self.redirects[redirect.name] = redirect
        return self._redirect(redirect)

    def delete_redirect(self, name: ServiceName) -> Iterator[FrontendChange]:
        """A redirection that no longer exists."""
        self.redirects.pop(name, None)
        self.redirected.pop(name, None)
        self.refused_redirects.pop(name, None)
        return self._claims.replace(_owner(name), [])

    def override(self, key: FrontendKey, frontend: Frontend | None) -> Iterator[FrontendChange]:
        """Serve this manually, or nothing if None, until an object changes the same frontend."""
        return self._claims.override(key, frontend)

    def clear_override(self, key: FrontendKey) -> Iterator[FrontendChange]:
        """Serve what objects say of the frontend."""
        return self._claims.clear_override(key)

    def set_state(self, address: ServiceAddress, state: BackendState) -> Iterator[FrontendChange]:
        """Set a backend's state manually, until no frontend has the backend any more."""
        return self._claims.set_state(address, state)

    def pods_of(self, namespace: str) -> dict[str, str]:
        """The names of a namespace's pods here, by address."""
        pods = [pod for pod in self._pods.values() if pod.namespace == namespace]
        return {address: pod.name for pod in pods for address in pod.addresses}

    def _redirects_of(self, service: ServiceName) -> Iterator[FrontendChange]:
        for redirect in [each for each in self.redirects.values() if each.service == service]:
            yield from self._redirect(redirect)

    def _redirects_in(self, namespace: str) -> Iterator[FrontendChange]:
        for redirect in [each for each in self.redirects.values() if each.name.namespace == namespace]:
            yield from self._redirect(redirect)

    def _redirect(self, redirect: RedirectPolicy) -> Iterator[FrontendChange]:
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
        return self._claims.replace(_owner(redirect.name), found)

    @property
    def contested(self) -> Mapping[FrontendKey, tuple[ServiceName, ...]]:
        """Frontends that several services claim: the one that is served, then those that are not."""
        return self._claims.contested

    def names(self) -> Iterable[ServiceName]:
        """Every known service."""
        return self._services.keys()

    def _changes(self, name: ServiceName) -> Iterator[FrontendChange]:
        """What became of a service's frontends; unchanged ones are left out."""
        service = self._services.get(name)
        frontends: list[Frontend] = []
        if service is not None:
            frontends = frontends_of(service, self._backends_of(name), self._node, self._options)
        refused = self._refuse(name, service)
        if refused:
            frontends = [one for one in frontends if (one.type, one.key.address.ip) not in refused]
        return self._claims.replace(name, frontends)

    def _refuse(
        self, name: ServiceName, service: Service | None
    ) -> Collection[tuple[ServiceType, IPAddress]]:
        """Note which addresses outside a service asks for, and which of them it does not get."""
        asked = list(outside_addresses(service, self._options)) if service is not None else []
        wanted = {plain(ip) for _, _, ip, _ in asked}
        for ip in self._asked.pop(name, set()) - wanted:
            del self._askers[ip][name]
            if not self._askers[ip]:
                del self._askers[ip]
        for ip in wanted:
            self._askers.setdefault(ip, {})[name] = None
        if wanted:
            self._asked[name] = wanted
        refused = {
            (type_, ip): RefusedAddress(name, ip, part, reason, announced_only=not served)
            for type_, part, ip, served in asked
            if (reason := self._reserved.refusal(ip, type_, self._options))
        }
        if refused:
            self.refused[name] = tuple(refused.values())
        else:
            self.refused.pop(name, None)
        return refused

    def _backends_of(self, name: ServiceName) -> Backends:
        slices = self._slices.get(name)
        if not slices:
            return {}
        found = self._backends.get(name)
        if found is None:
            found = self._backends[name] = backends_of(slices.values(), self._options)
        return found


def _owner(redirect: ServiceName) -> ServiceName:
    """Under which name a redirection claims its frontends; no service has such a one."""
    return ServiceName(redirect.namespace, f"redirect/{redirect.name}")
