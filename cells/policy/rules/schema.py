"""The ``spec`` of Cilium's policies as types: decodes and checks what the CRD's schema does.

An absent list is None and restricts nothing; an empty list selects nothing. Unknown fields are dropped, as
the API server prunes them. ``msgspec.convert`` raises ValidationError with the path in the object.

Source: CiliumNetworkPolicy, CiliumClusterwideNetworkPolicy cilium.io/v2; CiliumCIDRGroup v2alpha1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field, structs

from cells.policy.labels import parse_prefix

__all__ = ["HTTPRule", "ServiceReference"]


LabelValue = Annotated[str, Meta(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")]
GroupName = Annotated[
    str, Meta(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
]
# The CRD has ``^([-a-zA-Z0-9_]+[.]?)+$``: the same names, but refusing one takes Python exponential time.
DNSName = Annotated[str, Meta(pattern=r"^[-a-zA-Z0-9_]+([.][-a-zA-Z0-9_]+)*[.]?$")]
DNSPattern = Annotated[str, Meta(pattern=r"^[-a-zA-Z0-9_*]+([.][-a-zA-Z0-9_*]+)*[.]?$")]
PortText = Annotated[str, Meta(min_length=1, max_length=63)]
EndPort = Annotated[int, Meta(ge=0, le=65535)]
NonEmpty = Annotated[str, Meta(min_length=1)]
AtMost40 = Meta(max_length=40)
Entity = Literal[
    "all",
    "world",
    "world-ipv4",
    "world-ipv6",
    "cluster",
    "host",
    "init",
    "ingress",
    "unmanaged",
    "remote-node",
    "health",
    "none",
    "kube-apiserver",
]
Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]
Protocol = Literal["TCP", "UDP", "SCTP", "ANY"]


def one_of(owner: Struct, *names: str) -> None:
    """Require exactly one of the fields. Raises ValueError, which msgspec reports with its path."""
    given = [name for name in names if getattr(owner, name) is not None]
    if len(given) != 1:
        wanted = ", ".join(one.encode_name for one in structs.fields(owner) if one.name in names)
        raise ValueError(f"exactly one of {wanted} must be given, not {len(given)}")


def _is_cidr(text: str) -> None:
    try:
        parse_prefix(text)
    except ValueError:
        raise ValueError(f"must be of type cidr: {text!r}") from None


class PolicyPart(Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """Base of all parts of a spec: immutable, in camel case on the wire."""


class Expression(PolicyPart, frozen=True, gc=False):
    """One entry of ``matchExpressions``."""

    key: str
    operator: Operator
    values: tuple[str, ...] | None = None


class EndpointSelector(PolicyPart, frozen=True):
    """A Kubernetes LabelSelector; a key's prefix names the label's source."""

    match_labels: Mapping[str, LabelValue] | None = None
    match_expressions: tuple[Expression, ...] | None = None


class PortProtocol(PolicyPart, frozen=True, gc=False):
    """A port by number or name, with its protocol, and the end of a range."""

    port: PortText
    protocol: Protocol = "ANY"
    end_port: EndPort = 0


class Secret(PolicyPart, frozen=True, gc=False):
    """A reference to a secret."""

    name: str
    namespace: str = ""


class TLSContext(PolicyPart, frozen=True, gc=False):
    """A secret, and the keys in it of CA, certificate and private key."""

    secret: Secret
    trusted_ca: str = field(default="", name="trustedCA")
    certificate: str = ""
    private_key: str = ""


class HeaderMatch(PolicyPart, frozen=True, gc=False):
    """A header and its required value; ``mismatch`` is the action if the value differs."""

    name: NonEmpty
    mismatch: Literal["LOG", "ADD", "DELETE", "REPLACE"] | None = None
    secret: Secret | None = None
    value: str = ""


class HTTPRule(PolicyPart, frozen=True, gc=False):
    """An HTTP request: every given field must match; path, method and host are regular expressions."""

    path: str = ""
    method: str = ""
    host: str = ""
    headers: tuple[str, ...] = ()
    header_matches: tuple[HeaderMatch, ...] = ()


class KafkaRule(PolicyPart, frozen=True, gc=False):
    """A Kafka request that is allowed."""

    role: Literal["produce", "consume"] | None = None
    api_key: str = ""
    api_version: str = ""
    client_id: str = field(default="", name="clientID")
    topic: Annotated[str, Meta(max_length=255)] = ""


class DNSRule(PolicyPart, frozen=True, gc=False):
    """A DNS name, or pattern, that may be queried."""

    match_name: DNSName | None = None
    match_pattern: DNSPattern | None = None

    def __post_init__(self) -> None:
        one_of(self, "match_name", "match_pattern")


class FQDN(DNSRule, frozen=True, gc=False):
    """A DNS name, or pattern; the subject may reach its addresses."""


class L7Rules(PolicyPart, frozen=True, gc=False):
    """L7 rules of one protocol."""

    http: tuple[HTTPRule, ...] | None = None
    kafka: tuple[KafkaRule, ...] | None = None
    dns: tuple[DNSRule, ...] | None = None
    l7proto: str | None = field(default=None, name="l7proto")
    l7: tuple[Mapping[str, str], ...] | None = None

    def __post_init__(self) -> None:
        one_of(self, "http", "kafka", "dns", "l7proto")

    @property
    def empty(self) -> bool:
        """Whether there are no rules, so that no proxy is needed."""
        return not (self.http or self.kafka or self.dns or (self.l7proto and self.l7))

    @property
    def parser(self) -> str:
        """The name of the L7 protocol; empty without rules."""
        if self.empty:
            return ""
        return "http" if self.http else "kafka" if self.kafka else "dns" if self.dns else self.l7proto or ""


class EnvoyConfig(PolicyPart, frozen=True, gc=False):
    """The resource that defines a listener."""

    name: NonEmpty
    kind: Literal["CiliumEnvoyConfig", "CiliumClusterwideEnvoyConfig"] = "CiliumEnvoyConfig"


class Listener(PolicyPart, frozen=True, gc=False):
    """An Envoy listener that the traffic is redirected to."""

    envoy_config: EnvoyConfig
    name: NonEmpty
    priority: Annotated[int, Meta(ge=1, le=100)] | None = None


class PortRule(PolicyPart, frozen=True, gc=False):
    """Ports, and the L7 rules, listener, server names or TLS settings of their traffic."""

    ports: tuple[PortProtocol, ...] | None = None
    rules: L7Rules | None = None
    listener: Listener | None = None
    server_names: tuple[str, ...] | None = None
    terminating_tls: TLSContext | None = field(default=None, name="terminatingTLS")
    originating_tls: TLSContext | None = field(default=None, name="originatingTLS")

    def features(self) -> Iterator[str]:
        """Yield the features above the ports, as RuleSpec.features()."""
        if self.rules is not None:
            if self.rules.dns:
                yield "dns_policies"
            if self.rules.http:
                yield "http_policies"
                if any(one.header_matches for one in self.rules.http):
                    yield "http_header_matches_policies"
            if self.rules.l7 or self.rules.kafka:
                yield "other_l7_policies"
        if self.originating_tls is not None or self.terminating_tls is not None:
            yield "tls_inspection_policies"
        if self.server_names:
            yield "sni_allow_list_policies"


class ICMPField(PolicyPart, frozen=True, gc=False):
    """An ICMP message type, by number or name."""

    type: int | str
    family: Literal["IPv4", "IPv6"] = "IPv4"


class ICMPRule(PolicyPart, frozen=True, gc=False):
    """ICMP message types."""

    fields: Annotated[tuple[ICMPField, ...], AtMost40] | None = None


class CIDRRule(PolicyPart, frozen=True, gc=False):
    """A prefix, or all prefixes of a CIDR group, except ``excepted``."""

    cidr: str | None = None
    cidr_group_ref: GroupName | None = None
    excepted: tuple[str, ...] = field(default=(), name="except")

    def __post_init__(self) -> None:
        one_of(self, "cidr", "cidr_group_ref")
        for text in (*filter(None, (self.cidr,)), *self.excepted):
            _is_cidr(text)
        if self.cidr == "":
            _is_cidr("")


class Authentication(PolicyPart, frozen=True, gc=False):
    """The mode of mutual authentication."""

    mode: Literal["disabled", "required", "test-always-fail"]


class K8sService(PolicyPart, frozen=True, gc=False):
    """A service by name; without a namespace, in every namespace."""

    service_name: str = ""
    namespace: str = ""


class K8sServiceSelector(PolicyPart, frozen=True, gc=False):
    """Services by their labels."""

    selector: EndpointSelector
    namespace: str = ""


class ServiceReference(PolicyPart, frozen=True, gc=False):
    """Services, by name or by labels."""

    k8s_service: K8sService | None = None
    k8s_service_selector: K8sServiceSelector | None = None


class Group(PolicyPart, frozen=True, gc=False):
    """Instances of a cloud provider."""

    aws: Mapping[str, Any] | None = None


class Common(PolicyPart, frozen=True, gc=False):
    """Fields of ingress, ingressDeny, egress and egressDeny rules."""

    to_ports: tuple[PortRule, ...] | None = None
    icmps: tuple[ICMPRule, ...] | None = None
    authentication: Authentication | None = None

    @property
    def demands_authentication(self) -> bool:
        """Whether the rule requires mutual authentication."""
        return self.authentication is not None and self.authentication.mode != "disabled"


class IngressRule(Common, frozen=True, gc=False):
    """Peers that may (ingress) or may not (ingressDeny) reach the subject."""

    from_endpoints: tuple[EndpointSelector, ...] | None = None
    from_requires: tuple[EndpointSelector, ...] | None = None
    from_cidr: tuple[str, ...] | None = field(default=None, name="fromCIDR")
    from_cidr_set: tuple[CIDRRule, ...] | None = field(default=None, name="fromCIDRSet")
    from_entities: tuple[Entity, ...] | None = None
    from_groups: tuple[Group, ...] | None = None
    from_nodes: tuple[EndpointSelector, ...] | None = None

    def __post_init__(self) -> None:
        for text in self.from_cidr or ():
            _is_cidr(text)

    def peer_features(self) -> Iterator[str]:
        """Yield the features of the peers, as RuleSpec.features()."""
        if any(one.cidr_group_ref for one in self.from_cidr_set or ()):
            yield "ingress_cidr_group_policies"
        if self.from_nodes:
            yield "host_network_policies"
        endpoints, networks = self.from_endpoints or self.from_requires, self.from_cidr or self.from_cidr_set
        if endpoints or networks or self.from_entities or self.from_groups or self.from_nodes:
            yield "l3_policies"


class EgressRule(Common, frozen=True, gc=False):
    """Peers that the subject may (egress) or may not (egressDeny) reach."""

    to_endpoints: tuple[EndpointSelector, ...] | None = None
    to_requires: tuple[EndpointSelector, ...] | None = None
    to_cidr: tuple[str, ...] | None = field(default=None, name="toCIDR")
    to_cidr_set: tuple[CIDRRule, ...] | None = field(default=None, name="toCIDRSet")
    to_entities: tuple[Entity, ...] | None = None
    to_groups: tuple[Group, ...] | None = None
    to_nodes: tuple[EndpointSelector, ...] | None = None
    to_services: tuple[ServiceReference, ...] | None = None
    to_fqdns: tuple[FQDN, ...] | None = field(default=None, name="toFQDNs")

    def __post_init__(self) -> None:
        for text in self.to_cidr or ():
            _is_cidr(text)

    def peer_features(self) -> Iterator[str]:
        """Yield the features of the peers, as RuleSpec.features()."""
        if self.to_fqdns:
            yield "fqdn_policies"
        if self.to_nodes:
            yield "host_network_policies"
        endpoints, networks = self.to_endpoints or self.to_requires, self.to_cidr or self.to_cidr_set
        if endpoints or networks or self.to_entities or self.to_groups or self.to_nodes:
            yield "l3_policies"


class DefaultDeny(PolicyPart, frozen=True, gc=False):
    """Whether the rule denies other traffic of a direction; None: if it has entries for the direction."""

    ingress: bool | None = None
    egress: bool | None = None


class RuleLabel(PolicyPart, frozen=True, gc=False):
    """A label that the author gave the rule."""

    key: str
    value: str = ""
    source: str = ""


class RuleSpec(PolicyPart, frozen=True, gc=False):
    """One rule: its subject, and the entries for ingress and egress."""

    endpoint_selector: EndpointSelector | None = None
    node_selector: EndpointSelector | None = None
    ingress: tuple[IngressRule, ...] | None = None
    ingress_deny: tuple[IngressRule, ...] | None = None
    egress: tuple[EgressRule, ...] | None = None
    egress_deny: tuple[EgressRule, ...] | None = None
    enable_default_deny: DefaultDeny | None = None
    labels: tuple[RuleLabel, ...] = ()
    description: str = ""

    def __post_init__(self) -> None:
        one_of(self, "endpoint_selector", "node_selector")

    def features(self) -> Iterator[str]:
        """Yield the rule's features by names of metrics (``..._policies_total``), some repeatedly.

        Source: Cilium 1.17, pkg/metrics/features/policy.go. There ``non_defaultdeny`` counts rules that deny
        by default, here those that do not.
        """
        deny = self.enable_default_deny
        if deny is not None and False in (deny.ingress, deny.egress):
            yield "non_defaultdeny_policies"
        for place, rule in self.parts():
            yield from rule.peer_features()
            if "Deny[" in place:
                yield "deny_policies"
                continue
            if rule.authentication is not None:
                yield "mutual_auth_policies"
            for port in rule.to_ports or ():
                yield from port.features()

    def parts(self) -> Iterator[tuple[str, IngressRule | EgressRule]]:
        """Yield the rule's entries with their paths in the spec.

        ``egressDeny`` has no ``toFQDNs`` in Cilium, so they are dropped as other unknown fields are.
        """
        egress_deny = tuple(structs.replace(one, to_fqdns=None) for one in self.egress_deny or ())
        directions: tuple[tuple[str, tuple[IngressRule | EgressRule, ...] | None], ...] = (
            ("ingress", self.ingress),
            ("ingressDeny", self.ingress_deny),
            ("egress", self.egress),
            ("egressDeny", egress_deny),
        )
        for name, rules in directions:
            for index, rule in enumerate(rules or ()):
                yield f"{name}[{index}]", rule
