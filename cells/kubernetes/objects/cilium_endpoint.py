"""CiliumEndpoint, CiliumEndpointSlice and CiliumIdentity: who has which address, and what it means.

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
    "KNOWN_ENDPOINTS",
    "KNOWN_ENDPOINT_SLICES",
    "NODE_NAME",
    "CiliumEndpoint",
    "CiliumEndpointSlice",
    "CiliumEndpointStatus",
    "CiliumIdentity",
    "CoreEndpoint",
    "KnownEndpoint",
    "KnownEndpointSlice",
    "NamedPort",
    "digest",
    "owner_of",
]


class Networking(ObjectPart, frozen=True, gc=False):
    """The addresses of an endpoint, and its node's."""

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
    """What others call an endpoint."""

    cni_attachment_id: str = field(name="cni-attachment-id", default="")
    container_id: str = field(name="container-id", default="")
    container_name: str = field(name="container-name", default="")
    k8s_namespace: str = field(name="k8s-namespace", default="")
    k8s_pod_name: str = field(name="k8s-pod-name", default="")
    pod_name: str = field(name="pod-name", default="")


class EndpointPolicyDirection(ObjectPart, frozen=True, gc=False):
    """Of one direction."""

    enforcing: bool = False
    state: str = ""


class CiliumEndpointPolicy(ObjectPart, frozen=True, gc=False):
    """Whether policy is enforced."""

    ingress: EndpointPolicyDirection | None = None
    egress: EndpointPolicyDirection | None = None


class CiliumEndpointStatus(ObjectPart, frozen=True, gc=False):
    """Of a CiliumEndpoint."""

    id: int = 0
    state: str = ""
    identity: EndpointIdentity | None = None
    networking: Networking | None = None
    encryption: Encryption = Encryption()
    external_identifiers: ExternalIdentifiers | None = field(name="external-identifiers", default=None)
    named_ports: tuple[NamedPort, ...] | None = field(name="named-ports", default=None)
    policy: CiliumEndpointPolicy | None = None


class CiliumEndpoint(Object, frozen=True, gc=False):
    """A pod's endpoint, named as its pod, written by the agent of its node."""

    status: CiliumEndpointStatus = CiliumEndpointStatus()


class CoreEndpoint(ObjectPart, frozen=True, gc=False):
    """One endpoint in a slice."""

    name: str = ""
    id: int = 0
    """The number of its identity."""
    networking: Networking | None = None
    encryption: Encryption = Encryption()
    named_ports: tuple[NamedPort, ...] | None = field(name="named-ports", default=None)


class CiliumEndpointSlice(Object, frozen=True, gc=False):
    """Endpoints of one namespace, batched by the operator."""

    endpoints: tuple[CoreEndpoint, ...]
    of_namespace: str = field(name="namespace", default="")


class CiliumIdentity(Object, frozen=True, gc=False):
    """An identity: its name is the number, its security labels are what it means."""

    security_labels: dict[str, str] = field(name="security-labels")

    @property
    def number(self) -> int | None:
        """The number; None for a name that is none."""
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


# What an agent keeps of the endpoints of all nodes: of a CiliumEndpoint, or of a slice of them.
#
# Why: a node knows the pods of all others. An object as it is read takes some 1,500 bytes, one of these 300.

NODE_NAME: Final = "network.cilium.io/node-name"
"""An annotation of CiliumEndpoints: the node of the agent that writes it. An admission policy holds it to
the node that the agent's token is bound to."""


class KnownEndpoint(msgspec.Struct, frozen=True, gc=False):
    """The endpoint of a pod."""

    key: Key
    """Namespace and name."""
    identity: int
    """0 while it has none, and where the object has an impossible one."""
    node: str
    """The address of its node."""
    addresses: str
    """Each as the prefix that holds nothing else, with a space in between: ``10.0.1.7/32``.

    As one text, which the ipcache has for a key too where there is but one address: a tuple takes 64 bytes.
    """
    encrypt_key: int = 0
    ports: tuple[NamedPort, ...] = ()
    digest: int = 0
    """Of the whole object, see digest(); 0 for one of a slice."""
    node_name: str = ""
    """The node of the agent that wrote it, by its annotation; empty without one, and for one of a slice."""

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.key[0]

    @property
    def name(self) -> str:
        """Its name."""
        return self.key[1]

    @property
    def endpoints(self) -> tuple[KnownEndpoint]:
        """Itself: what an object of it alone has."""
        return (self,)

    @property
    def prefixes(self) -> list[str]:
        """Its addresses, each as a prefix."""
        return self.addresses.split()

    @property
    def is_reached(self) -> bool:
        """Whether packets can be sent to it, and known by it."""
        return bool(self.identity and self.addresses)


class KnownEndpointSlice(msgspec.Struct, frozen=True, gc=False):
    """The contents of a CiliumEndpointSlice."""

    name: str
    endpoints: tuple[KnownEndpoint, ...]

    @property
    def key(self) -> Key:
        """No namespace, and its name."""
        return "", self.name


def digest(
    labels: Mapping[str, str], pod: str, pod_uid: str, node_name: str, status: CiliumEndpointStatus
) -> int:
    """A number that is the same for what is the same, in this process: owner, node, labels and status."""
    return hash((tuple(sorted(labels.items())), pod, pod_uid, node_name, status)) & (1 << 60) - 1 | 1


def owner_of(row: CiliumEndpoint) -> tuple[str, str]:
    """The pod that an object goes with, and its UID; empty where it has none."""
    found = next((one for one in row.metadata.owner_references or () if one.kind == "Pod"), None)
    return (found.name, found.uid) if found is not None else ("", "")


def _of_object(row: CiliumEndpoint) -> KnownEndpoint:
    status, node_name = row.status, row.annotations.get(NODE_NAME, "")
    return _known(
        row.key,
        identity=status.identity.id if status.identity is not None else 0,
        networking=status.networking,
        key=status.encryption.key,
        ports=status.named_ports,
        digest=digest(row.labels, *owner_of(row), node_name, status),
        node_name=node_name,
    )


def _of_slice(row: CiliumEndpointSlice) -> KnownEndpointSlice:
    return KnownEndpointSlice(
        row.name,
        tuple(
            _known(
                (row.of_namespace, one.name),
                identity=one.id,
                networking=one.networking,
                key=one.encryption.key,
                ports=one.named_ports,
            )
            for one in row.endpoints
        ),
    )


def _known(
    name: Key,
    *,
    identity: int,
    networking: Networking | None,
    key: int,
    ports: tuple[NamedPort, ...] | None,
    digest: int = 0,
    node_name: str = "",
) -> KnownEndpoint:
    possible = 0 < identity < 1 << 32 and 0 <= key < 1 << 8
    return KnownEndpoint(
        (intern(name[0]), name[1]),
        _same(identity) if possible else 0,
        intern(networking.node) if networking is not None else "",
        " ".join(_prefixes(networking)) if networking is not None else "",
        key if possible else 0,
        ports or (),
        digest,
        intern(node_name),
    )


@lru_cache(maxsize=4096)
def _same(number: int) -> int:
    """One number for all that equal it: many pods have one identity."""
    return number


def _prefixes(networking: Networking) -> Iterator[str]:
    """Each address that is one. Of nonsense it is left out."""
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


KNOWN_ENDPOINTS: Final[Kind[Any]] = CILIUM_ENDPOINTS.stored_as(_of_object)
KNOWN_ENDPOINT_SLICES: Final[Kind[Any]] = CILIUM_ENDPOINT_SLICES.stored_as(_of_slice)
