"""Network policies, CIDR groups, local redirect policies and egress gateway policies of Cilium.

Source: Cilium 1.17, custom resources of group cilium.io.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from cells.kubernetes.objects.kind import AGE, Column, Condition, Kind, LabelSelector, Object, ObjectPart

__all__ = [
    "CILIUM_CIDR_GROUPS",
    "CILIUM_CLUSTERWIDE_NETWORK_POLICIES",
    "CILIUM_EGRESS_GATEWAYS",
    "CILIUM_LOCAL_REDIRECT_POLICIES",
    "CILIUM_NETWORK_POLICIES",
    "CiliumCIDRGroup",
    "CiliumClusterwideNetworkPolicy",
    "CiliumEgressGatewayPolicy",
    "CiliumLocalRedirectPolicy",
    "CiliumNetworkPolicy",
    "EgressSelector",
    "RedirectPort",
]


_VALID = Column("Valid", ".status.conditions[?(@.type=='Valid')].status")


class PolicyStatus(ObjectPart, frozen=True, gc=False):
    """Whether a policy is valid."""

    conditions: tuple[Condition, ...] | None = None


class CiliumNetworkPolicy(Object, frozen=True, gc=False):
    """A network policy. Its rules stay unparsed; the policy engine parses them."""

    spec: dict[str, Any] | None = None
    specs: tuple[dict[str, Any], ...] | None = None
    status: PolicyStatus = PolicyStatus()

    @property
    def rules(self) -> tuple[dict[str, Any], ...]:
        """``spec`` and ``specs`` as one list."""
        return (*((self.spec,) if self.spec is not None else ()), *(self.specs or ()))


class CiliumClusterwideNetworkPolicy(CiliumNetworkPolicy, frozen=True, gc=False):
    """A cluster-wide policy, which may also select nodes."""


class CIDRGroupSpec(ObjectPart, frozen=True, gc=False):
    """Spec of a CIDR group."""

    external_cidrs: tuple[str, ...] | None = field(name="externalCIDRs", default=None)


class CiliumCIDRGroup(Object, frozen=True, gc=False):
    """CIDRs that policies refer to by the group's name."""

    spec: CIDRGroupSpec


class RedirectPort(ObjectPart, frozen=True, gc=False):
    """A redirected port."""

    port: str
    protocol: str
    name: str = ""


class AddressMatcher(ObjectPart, frozen=True, gc=False):
    """A frontend, selected by address."""

    ip: str
    to_ports: tuple[RedirectPort, ...]


class ServiceMatcher(ObjectPart, frozen=True, gc=False):
    """A frontend, selected by service."""

    namespace: str
    service_name: str
    to_ports: tuple[RedirectPort, ...] | None = None


class RedirectFrontend(ObjectPart, frozen=True, gc=False):
    """The redirected frontend."""

    address_matcher: AddressMatcher | None = None
    service_matcher: ServiceMatcher | None = None


class RedirectBackend(ObjectPart, frozen=True, gc=False):
    """The backends: pods of the same node."""

    local_endpoint_selector: LabelSelector
    to_ports: tuple[RedirectPort, ...]


class LocalRedirectSpec(ObjectPart, frozen=True, gc=False):
    """Spec of a local redirect policy."""

    redirect_frontend: RedirectFrontend
    redirect_backend: RedirectBackend
    description: str = ""
    skip_redirect_from_backend: bool = False


class CiliumLocalRedirectPolicy(Object, frozen=True, gc=False):
    """Redirects traffic of a service or an address to pods of the same node."""

    spec: LocalRedirectSpec | None = None


class EgressGateway(ObjectPart, frozen=True, gc=False):
    """The gateway node, and the source address of its traffic."""

    node_selector: LabelSelector
    interface: str = ""
    egress_ip: str = field(name="egressIP", default="")


class EgressSelector(ObjectPart, frozen=True, gc=False):
    """The endpoints that a policy applies to."""

    pod_selector: LabelSelector | None = None
    namespace_selector: LabelSelector | None = None
    node_selector: LabelSelector | None = None


class EgressGatewaySpec(ObjectPart, frozen=True, gc=False):
    """Spec of an egress gateway policy."""

    destination_cidrs: tuple[str, ...] = field(name="destinationCIDRs")
    egress_gateway: EgressGateway
    selectors: tuple[EgressSelector, ...]
    excluded_cidrs: tuple[str, ...] | None = field(name="excludedCIDRs", default=None)


class CiliumEgressGatewayPolicy(Object, frozen=True, gc=False):
    """Routes traffic of pods out of the cluster through a gateway node."""

    spec: EgressGatewaySpec | None = None


CILIUM_NETWORK_POLICIES = Kind(
    CiliumNetworkPolicy,
    "cilium.io/v2",
    "ciliumnetworkpolicies",
    short=("cnp", "ciliumnp"),
    categories=("cilium", "ciliumpolicy"),
    columns=(AGE, _VALID),
    status=True,
)
CILIUM_CLUSTERWIDE_NETWORK_POLICIES = Kind(
    CiliumClusterwideNetworkPolicy,
    "cilium.io/v2",
    "ciliumclusterwidenetworkpolicies",
    namespaced=False,
    short=("ccnp",),
    categories=("cilium", "ciliumpolicy"),
    columns=(_VALID,),
    status=True,
)
CILIUM_CIDR_GROUPS = Kind(
    CiliumCIDRGroup,
    "cilium.io/v2alpha1",
    "ciliumcidrgroups",
    namespaced=False,
    short=("ccg",),
    categories=("cilium",),
)
CILIUM_LOCAL_REDIRECT_POLICIES = Kind(
    CiliumLocalRedirectPolicy,
    "cilium.io/v2",
    "ciliumlocalredirectpolicies",
    short=("clrp",),
    categories=("cilium", "ciliumpolicy"),
    columns=(AGE,),
)
CILIUM_EGRESS_GATEWAYS = Kind(
    CiliumEgressGatewayPolicy,
    "cilium.io/v2",
    "ciliumegressgatewaypolicies",
    namespaced=False,
    short=("cegp",),
    categories=("cilium", "ciliumpolicy"),
    columns=(AGE,),
)
