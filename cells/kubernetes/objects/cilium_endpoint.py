"""CiliumEndpoint, CiliumEndpointSlice and CiliumIdentity: who has which address, and what it means.

Needs: nothing.   Gives: the kinds and their parts, CILIUM_ENDPOINTS, CILIUM_ENDPOINT_SLICES,
CILIUM_IDENTITIES.
Source: Cilium 1.17, custom resources of group cilium.io.
"""

from __future__ import annotations

from msgspec import field

from cells.kubernetes.objects.cilium_node import Encryption, Pair
from cells.kubernetes.objects.kind import AGE, Column, Kind
from cells.kubernetes.objects.meta import Object, Wire


class Networking(Wire, frozen=True, gc=False):
    """The addresses of an endpoint, and its node's."""

    addressing: tuple[Pair, ...] | None = None
    node: str = ""


class NamedPort(Wire, frozen=True, gc=False):
    """A port with a name."""

    name: str = ""
    port: int = 0
    protocol: str = ""


class EndpointIdentity(Wire, frozen=True, gc=False):
    """The identity of an endpoint."""

    id: int = 0
    labels: tuple[str, ...] | None = None


class ExternalIdentifiers(Wire, frozen=True, gc=False):
    """What others call an endpoint."""

    cni_attachment_id: str = field(name="cni-attachment-id", default="")
    container_id: str = field(name="container-id", default="")
    k8s_namespace: str = field(name="k8s-namespace", default="")
    k8s_pod_name: str = field(name="k8s-pod-name", default="")
    pod_name: str = field(name="pod-name", default="")


class Enforcement(Wire, frozen=True, gc=False):
    """Of one direction."""

    enforcing: bool = False
    state: str = ""


class EndpointPolicy(Wire, frozen=True, gc=False):
    """Whether policy is enforced."""

    ingress: Enforcement | None = None
    egress: Enforcement | None = None


class CiliumEndpointStatus(Wire, frozen=True, gc=False):
    """Of a CiliumEndpoint."""

    id: int = 0
    state: str = ""
    identity: EndpointIdentity | None = None
    networking: Networking | None = None
    encryption: Encryption = Encryption()
    external_identifiers: ExternalIdentifiers | None = field(name="external-identifiers", default=None)
    named_ports: tuple[NamedPort, ...] | None = field(name="named-ports", default=None)
    policy: EndpointPolicy | None = None


class CiliumEndpoint(Object, frozen=True, gc=False):
    """A pod's endpoint, named as its pod, written by the agent of its node."""

    status: CiliumEndpointStatus = CiliumEndpointStatus()


class CoreEndpoint(Wire, frozen=True, gc=False):
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
