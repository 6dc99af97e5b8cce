"""Sources and destinations that the policy explanation accepts: pods, addresses, DNS names, identities.

``explain`` resolves the names in its requests by AgentEnds, which reads the agent's tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from ipaddress import ip_address, ip_network

import msgspec

from cells.api.operations.status import NodeSummary
from cells.base.addresses import IPAddress
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import RESERVED_IDENTITIES
from cells.cluster.ipcache.rows import IpcacheEntry
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.remote_endpoints import RemoteEndpoint
from cells.config import AgentConfig
from cells.endpoint import Endpoint, Endpoints
from cells.endpoint.host import HostEndpoint
from cells.kubernetes.objects.core import Pod
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.compute.policies import NamedPodPort
from cells.policy.control import NamedAddresses, PodNetworks, PolicyView, of_pod, of_remote
from cells.policy.explain import EnclosingPrefix, End, UnanswerableError
from cells.policy.labels import LabelSet, canonical_name
from cells.policy.rules import Direction
from cells.remote.shared import SharedTables
from lifecycle import ReadTable, Table

# Pods of other nodes.

SOMEWHERE = "its node"


class PodsOfIdentity(msgspec.Struct, frozen=True):
    """Pods of one identity (or a reserved identity), for the policy matrix."""

    query: str
    """Name in requests: a pod of this node, a reserved identity, or a numeric identity."""
    end: End
    """Has no key, so that policies also apply to traffic between two of these pods."""
    namespace: str
    labels: tuple[str, ...]
    pods: tuple[str, ...]
    """Pods on this node, by namespace and name."""


class RemotePod(msgspec.Struct, frozen=True):
    """A pod on another node."""

    name: str
    """Namespace and name."""
    address: IPAddress
    node: str
    """Name of the node; ``its node`` if unknown."""


class OtherNodes:
    """Looks up pods of other nodes in Pod objects, the kvstore and CiliumEndpoints."""

    def __init__(
        self,
        pods: Table[tuple[str, str], Pod],
        remote: Table[tuple[str, str], RemoteEndpoint] | None,
        shared: SharedTables | None,
        nodes: ReadTable[str, ClusterNode] | None,
    ) -> None:
        self._pods = pods
        self._remote = remote
        self._shared = shared
        self._nodes = nodes

    def pod(self, name: str) -> RemotePod | None:
        """Return the pod with this namespace and name; None if it is unknown or has no address."""
        namespace, _, short = name.partition("/")
        row = self._remote.get((namespace, short)) if self._remote is not None else None
        if row is not None and row.prefixes:
            address = ip_address(row.prefixes[-1].partition("/")[0])
            return RemotePod(name, address, self._node_at(row.node))
        for one in self._shared.addresses.all() if self._shared is not None else ():
            if (one.namespace, one.pod) == (namespace, short):
                return RemotePod(name, ip_address(one.prefix.partition("/")[0]), self._node_at(one.node))
        pod = self._pods.get((namespace, short))
        if pod is not None and pod.addresses and not pod.finished:
            return RemotePod(name, ip_address(pod.addresses[0]), pod.spec.node_name or SOMEWHERE)
        return None

    def at(self, address: IPAddress) -> RemotePod | None:
        """Return the pod with this address."""
        prefix = f"{address}/{address.max_prefixlen}"
        for row in self._remote.all() if self._remote is not None else ():
            if prefix in row.prefixes:
                return RemotePod(f"{row.namespace}/{row.name}", address, self._node_at(row.node))
        shared = self._shared.addresses.get(str(address)) if self._shared is not None else None
        if shared is not None and shared.pod:
            return RemotePod(f"{shared.namespace}/{shared.pod}", address, self._node_at(shared.node))
        for pod in self._pods.by("address").get(str(address)):
            return RemotePod("/".join(pod.key), address, pod.spec.node_name or SOMEWHERE)
        return None

    def addresses(self, name: str) -> list[IPAddress]:
        """Return all addresses of a pod."""
        namespace, _, short = name.partition("/")
        row = self._remote.get((namespace, short)) if self._remote is not None else None
        texts = [one.partition("/")[0] for one in row.prefixes] if row is not None else []
        shared = self._shared.addresses.all() if self._shared is not None else ()
        texts += [
            one.prefix.partition("/")[0] for one in shared if (one.namespace, one.pod) == (namespace, short)
        ]
        if (pod := self._pods.get((namespace, short))) is not None:
            texts += pod.addresses
        return [ip_address(text) for text in dict.fromkeys(texts)]

    def names(self) -> Collection[str]:
        """Return ``namespace/name`` of all pods."""
        found = {"/".join(pod.key) for pod in self._pods.all()}
        found |= {"/".join(row.key) for row in self._remote.all()} if self._remote is not None else set()
        if self._shared is not None:
            found |= {f"{one.namespace}/{one.pod}" for one in self._shared.addresses.all() if one.pod}
        return found

    def is_host_network(self, name: str) -> bool:
        """Whether a pod uses the host network."""
        namespace, _, short = name.partition("/")
        pod = self._pods.get((namespace, short))
        return pod is not None and pod.spec.host_network

    def ports(self, name: str) -> list[NamedPodPort]:
        """Return the named ports of a pod's containers."""
        namespace, _, short = name.partition("/")
        if (pod := self._pods.get((namespace, short))) is not None:
            return sorted(of_pod(pod))
        row = self._remote.get((namespace, short)) if self._remote is not None else None
        return sorted(of_remote(row)) if row is not None else []

    def node_of(self, address: IPAddress) -> ClusterNode | None:
        """Return the other node with this address, or with a pod CIDR that contains it."""
        return next((node for node in self._others() if _has(node, address)), None)

    def is_node(self, address: IPAddress) -> ClusterNode | None:
        """Whether a node, possibly this one, has the address."""
        found = self._nodes.by("address").get(address) if self._nodes is not None else ()
        return next(iter(found), None)

    def _others(self) -> Iterator[ClusterNode]:
        return (node for node in (self._nodes.all() if self._nodes is not None else ()) if not node.local)

    def _node_at(self, text: str) -> str:
        try:
            node = self.is_node(ip_address(text))
        except ValueError:
            node = None
        return node.name if node is not None else SOMEWHERE


def _has(node: ClusterNode, address: IPAddress) -> bool:
    return any(address == each.ip for each in node.addresses) or any(
        address in network for network in node.all_cidrs()
    )


def _numbers(around: Iterable[EnclosingPrefix]) -> Networks:
    return tuple(sorted((one.version, one.identity) for one in around))


Networks = tuple[tuple[int, int], ...]  # address families, identities of the CIDRs around them
DEFAULT_CLUSTER = "default"
HOST, WORLD, REMOTE_NODES = 1, (2, 9, 10), (6, 7)
RESERVED_ENDS = ("host", "remote-node", "kube-apiserver", "world")
POD_NAMESPACE = "io.kubernetes.pod.namespace"
GLOBAL_IDENTITIES = range(256, 1 << 24)
"""Identities of pods, which are valid on all nodes."""


class OwnPolicies:
    """Policies of this node's endpoints and of the host, and whether audit mode is enabled."""

    def __init__(self, view: PolicyView | None, host: HostEndpoint | None, summary: NodeSummary) -> None:
        self._view = view
        self._host = host if host is not None and host.enabled else None
        self._summary = summary

    @property
    def no_http_proxy(self) -> str:
        """Reason why the received rules may be incomplete; empty if they are complete."""
        return self._view.no_http_proxy if self._view is not None else ""

    @property
    def host_row(self) -> Endpoint | None:
        """The host endpoint if the host firewall is enabled."""
        return self._host.row if self._host is not None else None

    def policy(self, title: str, endpoint_id: int) -> _Policy | None:
        """Return the policy of an endpoint; None if this agent reads no rules."""
        return _Policy(self._view, title, endpoint_id) if self._view is not None else None

    def audited(self) -> bool:
        """Whether pods' policies are in audit mode and drop nothing."""
        return self._summary.audited()

    def host_audited(self) -> bool:
        """Whether the host policy is in audit mode and drops nothing."""
        return self.audited() or (self._host is not None and self._host.audited)


class Neighbourhood:
    """Addresses of DNS names, and CIDRs in rules that contain pod addresses."""

    def __init__(self, names: NamedAddresses | None, networks: PodNetworks | None) -> None:
        self._networks = networks
        self._names = names

    def addresses(self, name: str) -> list[IPAddress]:
        """Return the addresses in DNS answers for a name."""
        return self._names.addresses(canonical_name(name)) if self._names is not None else []

    def names(self, address: IPAddress) -> Collection[str]:
        """Return the names for which a DNS answer had the address, in canonical form."""
        return self._names.names(address) if self._names is not None else ()

    def around(self, addresses: Iterable[IPAddress]) -> tuple[EnclosingPrefix, ...]:
        """Return the CIDR of a rule around each address of a pod; empty if CIDRs select no pods."""
        return tuple(self._around(one) for one in addresses) if self.selects_pods else ()

    @property
    def selects_pods(self) -> bool:
        """Whether CIDR rules select pods."""
        return bool(self._networks and self._networks.matched)

    def _around(self, address: IPAddress) -> EnclosingPrefix:
        found = self._networks.around(address) if self._networks is not None else None
        if found is None:
            return EnclosingPrefix(address.version)
        return EnclosingPrefix(address.version, found.id, LabelSet.parse(found.labels))


class AgentEnds:
    """Resolves pods, addresses, names and identities from the agent's tables."""

    def __init__(
        self,
        own: OwnPolicies,
        endpoints: Endpoints,
        identities: Identities,
        prefixes: Table[str, IpcacheEntry],
        near: Neighbourhood,
        others: OtherNodes,
        agent: AgentConfig,
    ) -> None:
        self._own = own
        self._endpoints = endpoints
        self._identities = identities
        self._prefixes = prefixes
        self._near = near
        self._others = others
        self._agent = agent

    @property
    def node(self) -> str:
        """Name of this node as in flows: ``cluster/node``, or the node alone in the cluster ``default``."""
        name, cluster = self._agent.node_name, self._agent.cluster_name
        return name if cluster == DEFAULT_CLUSTER else f"{cluster}/{name}"

    @property
    def audited(self) -> bool:
        """Whether pods' policies are in audit mode and drop nothing."""
        return self._own.audited()

    def names_of(self, address: IPAddress) -> Collection[str]:
        """Return the names for which a DNS answer had the address, in canonical form."""
        return self._near.names(address)

    def reserved(self, name: str) -> End | None:
        """Return the end of a reserved identity; None for an unknown name."""
        for number, labels in RESERVED_IDENTITIES.items():
            if f"reserved:{name}" in labels:
                return self._numbered(name, number)
        return None

    def identity(self, number: int) -> End:
        """Return the end of an identity."""
        if not self._labels(number):
            raise UnanswerableError(f"there is no identity {number}")
        return self._numbered(f"identity {number}", number)

    def pod(self, name: str) -> End | None:
        """Return a pod of any node; None if it is unknown."""
        for one in self._endpoints.all():
            if one.pod_name and one.pod == name:
                return self._local(one)
        remote = self._others.pod(name)
        if remote is None:
            return None
        if self._others.is_host_network(name):
            return self._at(remote.address)._replace(title=f"{name} (in the host's network)")
        if self._others.node_of(remote.address) is None and remote.node == self._agent.node_name:
            raise UnanswerableError(f"{name} is a pod of this node that has no network yet")
        addresses = self._others.addresses(name) or [remote.address]
        return self._remote(name, self.identity_at(remote.address), remote.node, addresses)

    def pods(self) -> Sequence[str]:
        """Return ``namespace/name`` of all pods."""
        return sorted({one.pod for one in self._endpoints.all() if one.pod_name} | set(self._others.names()))

    def pod_ports(self, pod: str) -> Sequence[NamedPodPort]:
        """Return the named ports of a pod's containers."""
        return self._others.ports(pod)

    def network(self, text: str) -> End:
        """Refuse a CIDR, which may have many identities. Raises ValueError for invalid text."""
        raise UnanswerableError(f"{ip_network(text, strict=False)} is a network: give an address in it")

    def at(self, address: IPAddress, client: End | None) -> Sequence[tuple[End, str]]:
        """Return the end with the address."""
        del client
        end = self._at(address)
        node = self._others.node_of(address)
        if end.identity in WORLD and node is not None:
            note = f"the address is in the range of {node.name}, and this node knows no pod there"
            return [(end._replace(elsewhere=node.name), note)]
        return [(end, "")]

    def named(self, name: str) -> Sequence[End]:
        """Return the ends at the addresses in DNS answers for a name."""
        found = self._near.addresses(name)
        if not found:
            raise UnanswerableError(
                f"{name} is neither a pod nor a name that pods of this node have asked DNS for;"
                " until one has, policies treat it as world: give world"
            )
        ends = [self._at(address) for address in sorted(found, key=lambda one: (one.version, int(one)))]
        return [end._replace(title=f"{name} ({end.title})") for end in ends]

    def local(self, namespace: str) -> list[End]:
        """Return this node's pods of a namespace. Raises UnanswerableError if there are none."""
        local = (one for one in self._endpoints.all() if one.pod_name and one.pod_namespace == namespace)
        found = [self._local(one) for one in local]
        if not found:
            raise UnanswerableError(f"there are no pods of namespace {namespace} on this node")
        return found

    def reserved_ends(self) -> list[PodsOfIdentity]:
        """Return the sources and destinations other than pods."""
        return [
            PodsOfIdentity(name, end, "", tuple(self._labels(end.identity)), ())
            for name in RESERVED_ENDS
            if (end := self.reserved(name)) is not None
        ]

    def known_pods(self) -> list[PodsOfIdentity]:
        """Return all pods by identity, this node's first; also by CIDR if CIDR rules select pods."""
        here: dict[tuple[int, Networks], list[Endpoint]] = {}
        for one in self._endpoints.all():
            if one.pod_name and one.identity in GLOBAL_IDENTITIES:
                near = _numbers(self._near.around(one.addresses))
                here.setdefault((one.identity, near), []).append(one)
        found = []
        for (identity, _), pods in here.items():
            first, names = min(pods, key=lambda one: one.pod), tuple(sorted(one.pod for one in pods))
            end = self._local(first)._replace(key="")
            found.append(
                PodsOfIdentity(f"pod/{first.pod}", end, first.pod_namespace, self._labels(identity), names)
            )
        local = {identity for identity, _ in here}
        elsewhere = self._remote_pods() if self._near.selects_pods else {}
        for row in self._identities.table.all():
            if row.id not in GLOBAL_IDENTITIES or (row.id in local and row.id not in elsewhere):
                continue
            whole = self._numbered(f"identity {row.id}", row.id)
            namespace = whole.labels.value("k8s", POD_NAMESPACE) or ""
            for ask, end in elsewhere.get(row.id, [(str(row.id), whole)]):
                if (row.id, _numbers(end.around)) not in here:
                    found.append(PodsOfIdentity(ask, end, namespace, tuple(row.labels), ()))
        return sorted(found, key=lambda one: (not one.pods, one.namespace, one.pods, one.labels, one.query))

    def _remote_pods(self) -> dict[int, list[tuple[str, End]]]:
        """Return one pod of another node for each identity, and each CIDR around its addresses."""
        own = {str(ip_network(ip)) for one in self._endpoints.all() for ip in one.addresses}
        pods: dict[tuple[int, str], list[IPAddress]] = {}
        for row in self._prefixes.all():
            if row.identity in GLOBAL_IDENTITIES and row.prefix not in own:
                address, _, length = row.prefix.partition("/")
                if length == ("128" if ":" in address else "32"):
                    ask = address if row.pod is None else f"pod/{'/'.join(row.pod)}"
                    pods.setdefault((row.identity, ask), []).append(ip_address(address))
        found: dict[int, dict[Networks, tuple[str, End]]] = {}
        for (identity, ask), addresses in sorted(pods.items()):
            end = self._remote(ask.removeprefix("pod/"), identity, "its node", addresses)._replace(key="")
            found.setdefault(identity, {}).setdefault(_numbers(end.around), (ask, end))
        return {identity: list(ends.values()) for identity, ends in found.items()}

    def identity_at(self, address: IPAddress) -> int:
        """Return the identity of an address from the ipcache."""
        host = ip_network(address)
        for length in range(host.prefixlen, -1, -1):
            row = self._prefixes.get(str(host.supernet(new_prefix=length)))
            if row is not None:
                return int(row.identity)
        raise UnanswerableError(f"the identity of {address} is not known")

    def _at(self, address: IPAddress) -> End:
        for one in self._endpoints.all():
            if address in one.addresses:
                return self._local(one)
        number = self.identity_at(address)
        if number in GLOBAL_IDENTITIES:
            pod = self._others.at(address)
            if pod is not None:
                return self._remote(pod.name, number, pod.node, [address])
            node = self._others.node_of(address)
            where = node.name if node is not None else "its node"
            return self._remote(str(address), number, where, [address])._replace(key="")
        end = self._numbered(str(address), number)._replace(network=ip_network(address))
        node = self._others.is_node(address)
        if node is None or number not in (HOST, *REMOTE_NODES):
            return end
        elsewhere = node.name if end.elsewhere else ""
        return end._replace(title=f"{address} of node {node.name}", elsewhere=elsewhere)

    def _local(self, endpoint: Endpoint) -> End:
        key = endpoint.pod if endpoint.pod_name else endpoint.attachment_id
        return End(
            endpoint.title,
            endpoint.identity,
            LabelSet.parse(self._labels(endpoint.identity)),
            key=key,
            policy=self._own.policy(endpoint.title, endpoint.id),
            audited=self._own.audited(),
            no_http_proxy=self._own.no_http_proxy,
            around=self._near.around(endpoint.addresses),
        )

    def _remote(self, title: str, identity: int, node: str, addresses: Iterable[IPAddress]) -> End:
        labels = LabelSet.parse(self._labels(identity))
        return End(title, identity, labels, key=title, elsewhere=node, around=self._near.around(addresses))

    def _numbered(self, title: str, number: int) -> End:
        labels = LabelSet.parse(self._labels(number))
        row = self._own.host_row
        if number == HOST and row is not None:
            policy = self._own.policy("the host", row.id)
            audited = self._own.host_audited()
            return End(title, number, labels, key="host", policy=policy, audited=audited)
        firewall = number in REMOTE_NODES and row is not None
        elsewhere = "that node" if firewall else "its node" if number in GLOBAL_IDENTITIES else ""
        return End(title, number, labels, elsewhere=elsewhere)

    def _labels(self, identity: int) -> tuple[str, ...]:
        row = self._identities.table.get(identity)
        if row is not None:
            return tuple(row.labels)
        return tuple(RESERVED_IDENTITIES.get(identity, ()))


class _Policy:
    """The policy of an endpoint of this node."""

    def __init__(self, view: PolicyView, title: str, endpoint_id: int) -> None:
        self._view = view
        self._title = title
        self._endpoint = endpoint_id

    def __call__(self, direction: Direction) -> DirectionPolicy:
        """Return the policy of a direction. Raises UnanswerableError before the first computation."""
        found = self._view.policy(self._endpoint, direction)
        if found is None:
            raise UnanswerableError(f"{self._title} has no policy yet")
        return found
