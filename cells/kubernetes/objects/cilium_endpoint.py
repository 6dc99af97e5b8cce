"""CiliumEndpoint, CiliumEndpointSlice and CiliumIdentity: addresses and identities of pods.

Source: Cilium 1.17, custom resources of group cilium.io.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address
from socket import AF_INET, inet_pton
from sys import intern
from typing import Any, Final

import msgspec
from msgspec import field

from cells.kubernetes.objects.cilium_node import Encryption, Pair
from cells.kubernetes.objects.kind import AGE, Column, Key, Kind, Object, ObjectPart

__all__ = [
    "CILIUM_ENDPOINTS",
    "CILIUM_ENDPOINT_SLICES",
    "CILIUM_IDENTITIES",
    "NODE_NAME",
    "SLIM_ENDPOINTS",
    "SLIM_ENDPOINT_SLICES",
    "CiliumEndpoint",
    "CiliumEndpointSlice",
    "CiliumEndpointStatus",
    "CiliumIdentity",
    "CoreEndpoint",
    "NamedPort",
    "SlimEndpoint",
    "SlimEndpointSlice",
    "digest",
    "owner_of",
]


class Networking(ObjectPart, frozen=True, gc=False):
    """The addresses of an endpoint and of its node."""

    addressing: tuple[Pair, ...] | None = None
    node: str = ""


class NamedPort(ObjectPart, frozen=True, gc=False):
    """A port with a name."""

    name: str = ""
    port: int = 0
    protocol: str = ""


class EndpointIdentity(ObjectPart, frozen=True, gc=False):
    """The identity of an endpoint."""

    id: int = 0
    labels: tuple[str, ...] | None = None


class ExternalIdentifiers(ObjectPart, frozen=True, gc=False):
    """Names of an endpoint in the container runtime and in Kubernetes."""

    cni_attachment_id: str = field(name="cni-attachment-id", default="")
    container_id: str = field(name="container-id", default="")
    container_name: str = field(name="container-name", default="")
    k8s_namespace: str = field(name="k8s-namespace", default="")
    k8s_pod_name: str = field(name="k8s-pod-name", default="")
    pod_name: str = field(name="pod-name", default="")


class EndpointPolicyDirection(ObjectPart, frozen=True, gc=False):
    """Policy enforcement in one direction."""

    enforcing: bool = False
    state: str = ""


class CiliumEndpointPolicy(ObjectPart, frozen=True, gc=False):
    """Policy enforcement of an endpoint."""

    ingress: EndpointPolicyDirection | None = None
    egress: EndpointPolicyDirection | None = None


class CiliumEndpointStatus(ObjectPart, frozen=True, gc=False):
    """Status of a CiliumEndpoint."""

    id: int = 0
    state: str = ""
    identity: EndpointIdentity | None = None
    networking: Networking | None = None
    encryption: Encryption = Encryption()
    external_identifiers: ExternalIdentifiers | None = field(name="external-identifiers", default=None)
    named_ports: tuple[NamedPort, ...] | None = field(name="named-ports", default=None)
    policy: CiliumEndpointPolicy | None = None


class CiliumEndpoint(Object, frozen=True, gc=False):
    """The endpoint of the pod of the same name, written by the agent of its node."""

    status: CiliumEndpointStatus = CiliumEndpointStatus()


class CoreEndpoint(ObjectPart, frozen=True, gc=False):
    """One endpoint in a slice."""

    name: str = ""
    id: int = 0
    """Identity number."""
    networking: Networking | None = None
    encryption: Encryption = Encryption()
    named_ports: tuple[NamedPort, ...] | None = field(name="named-ports", default=None)


class CiliumEndpointSlice(Object, frozen=True, gc=False):
    """Endpoints of one namespace, batched by the operator."""

    endpoints: tuple[CoreEndpoint, ...]
    of_namespace: str = field(name="namespace", default="")


class CiliumIdentity(Object, frozen=True, gc=False):
    """An identity: its name is the number, and its security labels are the labels of the number."""

    security_labels: dict[str, str] = field(name="security-labels")

    @property
    def number(self) -> int | None:
        """The identity number; None if the name is not a number."""
        return int(self.name) if self.name.isascii() and self.name.isdigit() else None


CILIUM_ENDPOINTS = Kind(
    CiliumEndpoint,
    "cilium.io/v2",
    "ciliumendpoints",
    short=("cep", "ciliumep"),
    categories=("cilium",),
    columns=(
        Column("Security Identity", ".status.identity.id", "integer"),
        Column("Ingress Enforcement", ".status.policy.ingress.state", priority=1),
        Column("Egress Enforcement", ".status.policy.egress.state", priority=1),
        Column("Endpoint State", ".status.state"),
        Column("IPv4", ".status.networking.addressing[0].ipv4"),
        Column("IPv6", ".status.networking.addressing[0].ipv6"),
    ),
)
CILIUM_ENDPOINT_SLICES = Kind(
    CiliumEndpointSlice,
    "cilium.io/v2alpha1",
    "ciliumendpointslices",
    namespaced=False,
    short=("ces",),
    categories=("cilium",),
)
CILIUM_IDENTITIES = Kind(
    CiliumIdentity,
    "cilium.io/v2",
    "ciliumidentities",
    namespaced=False,
    short=("ciliumid",),
    categories=("cilium",),
    columns=(Column("Namespace", r".metadata.labels.io\.kubernetes\.pod\.namespace"), AGE),
    status=True,
)


# The reduced form of CiliumEndpoints and CiliumEndpointSlices that an agent keeps.
#
# Why: each node stores the pods of all nodes. A decoded object takes some 1,500 bytes, the reduced form 300.

NODE_NAME: Final = "network.cilium.io/node-name"
"""Annotation of CiliumEndpoints: the node of the agent that writes the object.

An admission policy requires that it is the node of the agent's token.
"""


class SlimEndpoint(msgspec.Struct, frozen=True, gc=False):
    """The fields of a pod's endpoint that an agent keeps."""

    key: Key
    """Namespace and name."""
    identity: int
    """0 if the endpoint has none, or if the object has an invalid one."""
    node: str
    """The address of its node."""
    addresses: str
    """Host prefixes, separated by spaces: ``10.0.1.7/32``.

    A text, since the ipcache shares it as its key if there is one address; a tuple would take 64 bytes more.
    """
    encrypt_key: int = 0
    ports: tuple[NamedPort, ...] = ()
    digest: int = 0
    """digest() of the whole object; 0 for an endpoint of a slice."""
    node_name: str = ""
    """The annotation NODE_NAME; empty without it, and for an endpoint of a slice."""

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.key[0]

    @property
    def name(self) -> str:
        """Its name."""
        return self.key[1]

    @property
    def endpoints(self) -> tuple[SlimEndpoint]:
        """The endpoint itself; as in SlimEndpointSlice."""
        return (self,)

    @property
    def prefixes(self) -> list[str]:
        """Its host prefixes."""
        return self.addresses.split()

    @property
    def is_reached(self) -> bool:
        """Whether it has an identity and an address, as the ipcache requires."""
        return bool(self.identity and self.addresses)


class SlimEndpointSlice(msgspec.Struct, frozen=True, gc=False):
    """The endpoints of a CiliumEndpointSlice."""

    name: str
    endpoints: tuple[SlimEndpoint, ...]

    @property
    def key(self) -> Key:
        """An empty namespace, and its name."""
        return "", self.name


def digest(
    labels: Mapping[str, str], pod: str, pod_uid: str, node_name: str, status: CiliumEndpointStatus
) -> int:
    """Return a hash of owner, node, labels and status; equal contents have equal hashes in this process."""
    return hash((tuple(sorted(labels.items())), pod, pod_uid, node_name, status)) & (1 << 60) - 1 | 1


def owner_of(row: CiliumEndpoint) -> tuple[str, str]:
    """Return name and UID of the pod that owns the object; empty without one."""
    found = next((one for one in row.metadata.owner_references or () if one.kind == "Pod"), None)
    return (found.name, found.uid) if found is not None else ("", "")


def _of_object(row: CiliumEndpoint) -> SlimEndpoint:
    status, node_name = row.status, row.annotations.get(NODE_NAME, "")
    return _reduced(
        row.key,
        identity=status.identity.id if status.identity is not None else 0,
        networking=status.networking,
        key=status.encryption.key,
        ports=status.named_ports,
        digest=digest(row.labels, *owner_of(row), node_name, status),
        node_name=node_name,
    )


def _of_slice(row: CiliumEndpointSlice) -> SlimEndpointSlice:
    return SlimEndpointSlice(
        row.name,
        tuple(
            _reduced(
                (row.of_namespace, one.name),
                identity=one.id,
                networking=one.networking,
                key=one.encryption.key,
                ports=one.named_ports,
            )
            for one in row.endpoints
        ),
    )


def _reduced(
    name: Key,
    *,
    identity: int,
    networking: Networking | None,
    key: int,
    ports: tuple[NamedPort, ...] | None,
    digest: int = 0,
    node_name: str = "",
) -> SlimEndpoint:
    valid = 0 < identity < 1 << 32 and 0 <= key < 1 << 8
    return SlimEndpoint(
        (intern(name[0]), name[1]),
        _shared(identity) if valid else 0,
        intern(networking.node) if networking is not None else "",
        " ".join(_prefixes(networking)) if networking is not None else "",
        key if valid else 0,
        ports or (),
        digest,
        intern(node_name),
    )


@lru_cache(maxsize=4096)
def _shared(number: int) -> int:
    """Return one shared int per number, since many pods have the same identity."""
    return number


def _prefixes(networking: Networking) -> Iterator[str]:
    """Yield the host prefixes of all valid addresses."""
    for pair in networking.addressing or ():
        if pair.ipv6:
            try:
                address = IPv6Address(pair.ipv6)
            except AddressValueError:
                continue
            if address.scope_id is None:
                yield f"{address}/128"
        if pair.ipv4:
            try:
                inet_pton(AF_INET, pair.ipv4)
            except (OSError, ValueError):
                continue
            yield f"{pair.ipv4}/32"


SLIM_ENDPOINTS: Final[Kind[Any]] = CILIUM_ENDPOINTS.stored_as(_of_object)
SLIM_ENDPOINT_SLICES: Final[Kind[Any]] = CILIUM_ENDPOINT_SLICES.stored_as(_of_slice)
