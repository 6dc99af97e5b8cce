"""The pods, services, networks and names of a folder of manifests, for explanations of policies.

Objects that are not applied yet have no addresses. Such pods and services get reserved addresses, so that the
agent's own code can process their services.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Any

from msgspec.structs import replace

from cells.kubernetes.objects.core import ENDPOINT_SLICES, SERVICES, EndpointSlice, Service, served_by
from cells.policy.compute import PolicyConflictError
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.compute.policies import NamedPodPort
from cells.policy.explain import EnclosingPrefix, End, UnanswerableError
from cells.policy.explain.cluster import RESERVED, Cluster, ExplainedPod, KnownPod
from cells.policy.explain.directory import BackendForClient, IPAddress, ServedPort, headless, refusal
from cells.policy.rules import Direction, PolicyError
from cells.services import Frontend as ServedAt
from cells.services import LoadBalancerOptions, ServiceName, ServiceType, ServingNode
from cells.services.model.backends import backends_by_port, backends_of, selectable
from cells.services.model.claims import Holder, Reservation, ReservedAddresses, cluster_hosts
from cells.services.model.frontends import frontends_of, is_headless, visible_in_cluster
from hive.endpoint_slices import SERVICE_NAME, endpoint_slices, namespace_of, selects

INVENTED = int(IPv4Address("240.0.0.0"))
"""First reserved address (RFC 1112) for pods and services without one."""
OPTIONS = LoadBalancerOptions(enable_sctp=True)
HOST_NETWORK = "in the host's network"
LOCAL = "Local"

Object = Mapping[str, Any]


class FolderDirectory:
    """The directory of ends in a folder; it decides the policies of all nodes."""

    place = "in the manifests"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._invented = INVENTED
        self._pods: dict[IPAddress, KnownPod] = {}
        self._addresses: dict[str, list[IPAddress]] = {}
        """Known addresses of pods."""
        self._in_host: dict[str, str] = {}
        """Pods in the host network -> node."""
        pods = [self._add_pod(one) for one in cluster.objects("Pod")]
        self._nodes = {
            ip_address(address["address"]): one["metadata"]["name"]
            for one in cluster.objects("Node")
            for address in (one.get("status") or {}).get("addresses") or ()
            if address.get("type") in {"InternalIP", "ExternalIP"}
        }
        self._services: dict[str, Service] = {}
        self._slices: dict[str, list[EndpointSlice]] = {}
        for slice_ in cluster.objects("EndpointSlice"):
            labels = slice_["metadata"].get("labels") or {}
            if SERVICE_NAME in labels:
                name = f"{namespace_of(slice_)}/{labels[SERVICE_NAME]}"
                self._slices.setdefault(name, []).append(ENDPOINT_SLICES.convert(slice_))
        self._reserved = ReservedAddresses()
        for address in self._pods:
            self._reserved.replace(
                f"pod {address}", [Reservation(address, Holder.POD, "the address of a pod")]
            )
        for service in cluster.objects("Service"):
            self._add_service(service, pods)

    def _next_address(self) -> IPv4Address:
        self._invented += 1
        return IPv4Address(self._invented)

    def _add_pod(self, pod: Object) -> Object:
        """Add a pod; return it with an address."""
        status, spec = dict(pod.get("status") or {}), pod.get("spec") or {}
        name = ExplainedPod(namespace_of(pod), pod["metadata"]["name"])
        if spec.get("hostNetwork"):
            self._in_host[str(name)] = spec.get("nodeName") or ""
            return pod
        texts = [one["ip"] for one in status.get("podIPs") or ()] or [status.get("podIP")]
        addresses = [ip_address(text) for text in texts if text] or [self._next_address()]
        for address in addresses:
            self._pods[address] = self._cluster.pods[name]
        self._addresses[str(name)] = [ip_address(text) for text in texts if text]
        return {**pod, "status": status | {"podIPs": [{"ip": str(one)} for one in addresses]}}

    def _add_service(self, service: Object, pods: Sequence[Object]) -> None:
        spec = dict(service.get("spec") or {})
        if not spec.get("clusterIP") and not spec.get("clusterIPs") and spec.get("type") != "ExternalName":
            spec["clusterIP"] = str(self._next_address())
        name = f"{namespace_of(service)}/{service['metadata']['name']}"
        converted = self._services[name] = SERVICES.convert({**service, "spec": spec})
        self._reserved.replace_cluster(ServiceName(*name.split("/")), cluster_hosts(converted))
        if name not in self._slices:
            # reserved addresses of pods say nothing about their family
            plain = {**service, "spec": {key: one for key, one in spec.items() if "clusterIP" not in key}}
            selected = [pod for pod in pods if selects(service, pod) and str_name(pod) not in self._in_host]
            slices = endpoint_slices(plain, selected, "hive-policy-explain")
            self._slices[name] = [ENDPOINT_SLICES.convert(one) for one in slices]

    # Ends

    def reserved(self, name: str) -> End | None:
        """Return the end of a reserved identity, or None for another word."""
        return self.identity(RESERVED[name]) if name in RESERVED else None

    def identity(self, number: int) -> End:
        """Return the end of an identity."""
        labels = self._cluster.cache.identities.get(number)
        if labels is None:
            raise UnanswerableError(f"there is no identity {number} in the manifests")
        names = {reserved: name for name, reserved in RESERVED.items()}
        return End(names.get(number, f"identity {number}"), number, labels)

    def pod(self, name: str) -> End | None:
        """Return a pod by namespace and name, or None."""
        if name in self._in_host:
            raise UnanswerableError(
                f"{name} is {HOST_NETWORK}, policies of pods do not select it: ask of host, as pods of its"
                " own node see it, or of remote-node"
            )
        namespace, _, short = name.partition("/")
        known = self._cluster.pods.get(ExplainedPod(namespace, short))
        return self._end(known) if known is not None else None

    def _end(self, pod: KnownPod) -> End:
        def policy(direction: Direction) -> DirectionPolicy:
            try:
                return self._cluster.policy(pod, direction)
            except PolicyConflictError as error:
                raise UnanswerableError(
                    f"the policies for {pod.name} contradict each other: {error}"
                ) from None

        name = str(pod.name)
        around: tuple[EnclosingPrefix, ...] = ()
        if self._cluster.options.cidr_matches_pods:
            around = tuple(map(self._cluster.around, self._addresses[name]))
        return End(name, pod.identity, pod.labels, key=name, policy=policy, around=around)

    def without_address(self) -> list[str]:
        """Return pods without a known address: no network selects them."""
        return sorted(name for name, addresses in self._addresses.items() if not addresses)

    def pods(self) -> Sequence[str]:
        """Return all pods, by namespace and name."""
        return [str(name) for name in self._cluster.pods]

    def pod_ports(self, pod: str) -> Sequence[NamedPodPort]:
        """Return the named ports of a pod's containers."""
        namespace, _, name = pod.partition("/")
        return sorted(self._cluster.pods[ExplainedPod(namespace, name)].ports)

    def network(self, text: str) -> End:
        """Return the end of a network. Raises ValueError for an invalid one."""
        network = ip_network(text, strict=False)
        inside = [str(self._pods[one].name) for one in self._pods if one in network]
        if inside:
            near = ", ".join(sorted(inside)[:3])
            raise UnanswerableError(f"pods have addresses within {network}: give one of them ({near})")
        try:
            number = self._cluster.identity_of(network)
        except PolicyError as error:
            raise UnanswerableError(str(error)) from None
        return End(text, number, self._cluster.cache.identities[number], network=network)

    def at(self, address: IPAddress, client: End | None) -> Sequence[tuple[End, str]]:
        """Return the owners of an address; a node is the client's own or another, both if uncertain."""
        if (pod := self._pods.get(address)) is not None:
            return [(self._end(pod), "")]
        if address not in self._nodes:
            return [(self.network(f"{address}/{address.max_prefixlen}")._replace(title=str(address)), "")]
        node, clients = self._nodes[address], self._node_of(client)
        found = []
        for name in ("host", "remote-node"):
            end = self.identity(RESERVED[name])._replace(title=f"node {node} ({name})")
            if not clients or (clients == node) == (name == "host"):
                note = "" if clients else "the client's spec.nodeName is not set, so both are asked of"
                found.append((end, note))
        return found

    def named(self, name: str) -> Sequence[End]:
        """Return the addresses to which DNS would resolve a name."""
        number = self._cluster.identity_of_name(name)
        return [End(name, number, self._cluster.cache.identities[number])]

    def served_elsewhere(self, address: IPAddress, port: int | None) -> str:
        """Return nothing: every service of the folder is served by the client's node."""
        del address, port
        return ""

    def _node_of(self, client: End | None) -> str:
        if client is None or not client.key:
            return ""
        namespace, _, name = client.key.partition("/")
        spec = self._cluster.pods[ExplainedPod(namespace, name)].located.object.get("spec") or {}
        return str(spec.get("nodeName") or "")

    # Services

    def has_service(self, name: str) -> bool:
        """Whether there is a service of this namespace and name."""
        return name in self._services

    def frontends(self, name: str, client: End) -> Sequence[ServedPort]:
        """Return the ports of a service's frontends."""
        service = self._services[name]
        if service.spec.type == "ExternalName":
            raise UnanswerableError(
                f"service {name} is another name of {service.spec.external_name}: ask of that"
            )
        if is_headless(service):
            return list(self._headless(name, client))
        found = self._served(name, client)
        if not found:
            raise UnanswerableError(f"service {name} is left to another proxy, or has no ports")
        meant = [one for one in found if (one.type is ServiceType.CLUSTER_IP) != client.is_outside] or found
        return [self._shown(name, one, client) for one in meant]

    def frontends_at(self, address: IPAddress, client: End) -> Sequence[ServedPort]:
        """Return the frontends at an address."""
        return [
            self._shown(name, one, client)
            for name in self._services
            for one in self._served(name, client)
            if one.key.address.ip == address
        ]

    def _served(self, name: str, client: End) -> list[ServedAt]:
        service, node = self._services[name], self._node_of(client)
        if not served_by(service.labels, OPTIONS.k8s_service_proxy_name):
            return []
        if not node:  # the number of local backends is unknown: all count
            spec = replace(service.spec, internal_traffic_policy="Cluster", external_traffic_policy="Cluster")
            service = replace(service, spec=spec)
        backends = backends_of(self._slices[name], OPTIONS)
        of_nodes = tuple(self._nodes)
        found = frontends_of(service, backends, ServingNode(name=node, node_port_addresses=of_nodes), OPTIONS)
        found = [
            one for one in found if not one.key.address.is_wildcard and self._reserved.serves(one, OPTIONS)
        ]
        return [one for one in found if not one.key.scope] if client.is_outside else visible_in_cluster(found)

    def _headless(self, name: str, client: End) -> Iterator[ServedPort]:
        backends = backends_of(self._slices[name], OPTIONS)
        for port_name, port, protocol, some in backends_by_port(backends):
            ends = [end for one in some for end, _ in self.at(one.address.ip, client)]
            yield headless(name, port_name, port, protocol, ends)

    def _shown(self, name: str, frontend: ServedAt, client: End) -> ServedPort:
        address = frontend.key.address
        chosen, _ = selectable(frontend.backends)
        spec = self._services[name].spec
        local = LOCAL in (spec.internal_traffic_policy, spec.external_traffic_policy)
        note = ""
        if frontend.type is not ServiceType.CLUSTER_IP and not client.is_outside:
            note = (
                "with kube-proxy-replacement; without it, egress policies see this address, not a backend's"
            )
        if local and client.key and not self._node_of(client):
            note = "its traffic policy is Local: of these, only backends on the client's node count"
        return ServedPort(
            service=name,
            address=str(address.ip) if int(address.ip) <= INVENTED or address.version == 6 else "",
            port=address.port,
            protocol=address.protocol,
            name=frontend.port_name,
            of_nodes=frontend.type is ServiceType.NODE_PORT,
            backends=tuple(
                BackendForClient(end, one.address.port)
                for one in chosen
                for end, _ in self.at(one.address.ip, client)
            ),
            problem=refusal(
                client,
                name,
                inside_only=not frontend.routable,
                ranges=frontend.source_ranges,
                deny=frontend.source_ranges_deny,
            ),
            note=note,
        )


def str_name(object_: Object) -> str:
    """Return ``namespace/name``."""
    return f"{namespace_of(object_)}/{object_['metadata']['name']}"
