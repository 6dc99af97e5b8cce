"""Wire types of the REST API: Cilium's models, limited to what this agent has."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import field


class Model(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="kebab", gc=False):
    """Base of all wire types: immutable, kebab-case keys, zero values omitted."""


class Problem(Model, frozen=True):
    """Why the framework refused a request before its operation ran, as go-openapi writes it."""

    code: int
    message: str


def _one_of(*words: str) -> msgspec.Meta:
    """The values of a text, for the document only: requests are checked by their operations."""
    return msgspec.Meta(extra_json_schema={"enum": list(words)})


Error = Annotated[str, msgspec.Meta(description="What went wrong.")]
Time = Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339."""
Health = Annotated[str, _one_of("OK", "Bootstrap", "Pending", "Warning", "Failure", "Disabled")]
StateText = Literal[
    "waiting-for-identity",
    "not-ready",
    "waiting-to-regenerate",
    "regenerating",
    "restoring",
    "ready",
    "disconnecting",
    "disconnected",
    "invalid",
]
State = Annotated[str, _one_of(*get_args(StateText))]


# --- addresses -------------------------------------------------------------------------------------


class NodeAddressingElement(Model, frozen=True):
    """One address family of the node: the router's address and the pod CIDR."""

    enabled: bool = False
    ip: str = ""
    alloc_range: str = ""


class NodeAddressing(Model, frozen=True):
    """The node's addressing; a disabled family has no key."""

    ipv4: NodeAddressingElement | None = None
    ipv6: NodeAddressingElement | None = None


class AddressPair(Model, frozen=True):
    """The addresses of one endpoint, without prefix length (requests may have one)."""

    ipv4: str = ""
    ipv4_pool_name: str = ""
    ipv4_expiration_uuid: str = ""
    ipv6: str = ""
    ipv6_pool_name: str = ""
    ipv6_expiration_uuid: str = ""


class IPAMAddressResponse(Model, frozen=True):
    """One allocated address; the plugin reads this object if ``address`` has the family."""

    ip: str = ""
    gateway: str = ""
    expiration_uuid: str = ""


class IPAMResponse(Model, frozen=True):
    """The answer to POST /ipam."""

    address: AddressPair
    host_addressing: NodeAddressing
    ipv4: IPAMAddressResponse | None = None
    ipv6: IPAMAddressResponse | None = None


# --- configuration ---------------------------------------------------------------------------------


class DaemonConfigurationSpec(Model, frozen=True):
    """The options that PATCH /config can change."""

    options: dict[str, str] | None = None
    policy_enforcement: Annotated[str, _one_of("default", "always", "never")] = ""


class KVStoreConfiguration(Model, frozen=True):
    """The key-value store in use; empty if there is none."""

    type: str = ""
    options: dict[str, str] | None = None


class MasqueradeProtocols(Model, frozen=True):
    """Address families that are masqueraded on the way out of the cluster."""

    ipv4: bool = False
    ipv6: bool = False


class MonitorStatus(Model, frozen=True):
    """The perf rings of datapath events: one with ``npages`` pages for each CPU."""

    cpus: int = 0
    npages: int = 0
    pagesize: int = 0
    lost: int = 0
    unknown: int = 0


class DaemonConfigurationStatus(Model, frozen=True):
    """The configuration in force, as the plugin and ``cilium-dbg config`` read it. MTUs in bytes."""

    addressing: NodeAddressing | None = None
    realized: DaemonConfigurationSpec | None = None
    immutable: dict[str, str] | None = None
    daemon_configuration_map: dict[str, object] | None = field(default=None, name="daemonConfigurationMap")
    kvstore_configuration: KVStoreConfiguration | None = field(default=None, name="kvstoreConfiguration")
    datapath_mode: str = field(default="", name="datapathMode")
    device_mtu: int = field(default=0, name="deviceMTU")
    route_mtu: int = field(default=0, name="routeMTU")
    ipam_mode: str = ""
    masquerade: bool = False
    masquerade_protocols: MasqueradeProtocols | None = field(default=None, name="masqueradeProtocols")
    ip_local_reserved_ports: str = field(default="", name="ipLocalReservedPorts")
    gso_max_size: int = field(default=0, name="GSOMaxSize")
    gro_max_size: int = field(default=0, name="GROMaxSize")
    gso_ipv4_max_size: int = field(default=0, name="GSOIPv4MaxSize")
    gro_ipv4_max_size: int = field(default=0, name="GROIPv4MaxSize")
    enable_route_mtu_for_cni_chaining: bool = field(default=False, name="enableRouteMTUForCNIChaining")
    node_monitor: MonitorStatus | None = field(default=None, name="nodeMonitor")
    k8s_configuration: str = ""
    k8s_endpoint: str = ""


class DaemonConfiguration(Model, frozen=True):
    """The answer to GET /config."""

    spec: DaemonConfigurationSpec
    status: DaemonConfigurationStatus


# --- controllers ----------------------------------------------------------------------------------


class ControllerCounts(Model, frozen=True):
    """Results of a controller's runs; times are RFC 3339 with milliseconds, in the year 1 for never."""

    last_success_timestamp: Time = ""
    last_failure_timestamp: Time = ""
    success_count: int = 0
    failure_count: int = 0
    consecutive_failure_count: int = 0
    last_failure_msg: str = ""


class ControllerConfiguration(Model, frozen=True):
    """When a controller runs again; durations as text."""

    error_retry: bool = False
    error_retry_base: str = ""
    interval: str = ""


class ControllerStatus(Model, frozen=True):
    """A controller: named work that is repeated, or retried until it succeeds."""

    name: str = ""
    uuid: str = ""
    configuration: ControllerConfiguration | None = None
    status: ControllerCounts | None = None


# --- endpoints -------------------------------------------------------------------------------------


class EndpointDatapathConfiguration(Model, frozen=True):
    """The datapath configuration that the plugin requests for an endpoint."""

    require_arp_passthrough: bool = False
    require_egress_prog: bool = False
    external_ipam: bool = False
    require_routing: bool | None = None
    install_endpoint_route: bool = False
    disable_sip_verification: bool = False


class EndpointChangeRequest(Model, frozen=True):
    """The body of PUT /endpoint/{id}; the id in the path is ignored."""

    state: StateText
    id: int = 0
    container_id: str = ""
    container_name: str = ""
    container_interface_name: str = ""
    interface_name: str = ""
    interface_index: int = 0
    parent_interface_index: int = 0
    mac: str = ""
    host_mac: str = ""
    addressing: AddressPair | None = None
    labels: list[str] = field(default_factory=list)
    k8s_pod_name: str = ""
    k8s_namespace: str = ""
    k8s_uid: str = ""
    netns_cookie: str = ""
    sync_build_endpoint: bool = False
    disable_legacy_identifiers: bool = False
    datapath_configuration: EndpointDatapathConfiguration | None = None
    properties: dict[str, object] = field(default_factory=dict)


class EndpointBatchDeleteRequest(Model, frozen=True):
    """The body of DELETE /endpoint."""

    container_id: str = ""


class LabelConfigurationSpec(Model, frozen=True):
    """The labels that a user has added to an endpoint."""

    user: list[str] = field(default_factory=list)


class EndpointConfigurationSpec(Model, frozen=True):
    """An endpoint's own options."""

    options: dict[str, str] | None = None
    label_configuration: LabelConfigurationSpec | None = None


class EndpointConfigurationStatus(Model, frozen=True):
    """The answer to GET /endpoint/{id}/config."""

    realized: EndpointConfigurationSpec
    immutable: dict[str, str] | None = None


class LabelConfigurationStatus(Model, frozen=True):
    """An endpoint's labels, each list sorted."""

    realized: LabelConfigurationSpec
    security_relevant: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    disabled: list[str] = field(default_factory=list)


class LabelConfiguration(Model, frozen=True):
    """The answer to GET /endpoint/{id}/labels."""

    spec: LabelConfigurationSpec
    status: LabelConfigurationStatus


class EndpointIdentifiers(Model, frozen=True):
    """The identifiers of an endpoint; ``pod-name`` is ``namespace/name``, or ``/`` without a pod."""

    cni_attachment_id: str = ""
    container_id: str = ""
    container_name: str = ""
    pod_name: str = ""
    k8s_pod_name: str = ""
    k8s_namespace: str = ""


class IdentityModel(Model, frozen=True):
    """A security identity: its number, its sorted labels and their SHA-256."""

    id: int = 0
    labels: list[str] = field(default_factory=list)
    labels_sha256: str = field(default="", name="labelsSHA256")


class EndpointNetworking(Model, frozen=True):
    """An endpoint's addresses and links; exactly one address pair."""

    addressing: list[AddressPair] = field(default_factory=list)
    host_addressing: NodeAddressing | None = None
    host_mac: str = ""
    mac: str = ""
    interface_name: str = ""
    interface_index: int = 0
    container_interface_name: str = ""


class PolicyRule(Model, frozen=True, omit_defaults=False):
    """The filter of one port, as JSON in a text, and the labels of the rules that it is derived from."""

    rule: str
    derived_from_rules: list[list[str]]
    rules_by_selector: dict[str, list[list[str]]]


class L4Policy(Model, frozen=True, omit_defaults=False):
    """Filters of ports, by direction."""

    ingress: list[PolicyRule] = field(default_factory=list)
    egress: list[PolicyRule] = field(default_factory=list)


class EndpointPolicyModel(Model, frozen=True):
    """The policy of an endpoint. Lists of identities have only those that may, or may not, use every port."""

    id: int = 0
    policy_revision: int = 0
    policy_enabled: Annotated[
        str,
        _one_of("none", "ingress", "egress", "both", "audit-ingress", "audit-egress", "audit-both"),
    ] = ""
    build: int = 0
    allowed_ingress_identities: list[int] = field(default_factory=list)
    denied_ingress_identities: list[int] = field(default_factory=list)
    allowed_egress_identities: list[int] = field(default_factory=list)
    denied_egress_identities: list[int] = field(default_factory=list)
    l4: L4Policy = L4Policy()
    cidr_policy: L4Policy = L4Policy()


class MessageForwardingStatistics(Model, frozen=True):
    """Number of messages received, and of each outcome."""

    received: int = 0
    forwarded: int = 0
    denied: int = 0
    error: int = 0


class RequestResponseStatistics(Model, frozen=True):
    """Counts of both directions."""

    requests: MessageForwardingStatistics
    responses: MessageForwardingStatistics


class ProxyStatistics(Model, frozen=True):
    """Messages that passed a proxy, by port and direction."""

    protocol: str
    """Layer 7 protocol."""
    port: int
    location: Annotated[str, _one_of("ingress", "egress")]
    allocated_proxy_port: int
    statistics: RequestResponseStatistics


class EndpointPolicyStatus(Model, frozen=True):
    """The desired and the realized policy."""

    spec: EndpointPolicyModel
    realized: EndpointPolicyModel
    proxy_policy_revision: int = 0
    proxy_statistics: list[ProxyStatistics] = field(default_factory=list)


class EndpointStatusChange(Model, frozen=True):
    """One line of an endpoint's log; the time is RFC 3339."""

    code: str = ""
    message: str = ""
    state: State = ""
    timestamp: Time = ""


class EndpointHealth(Model, frozen=True):
    """The answer to GET /endpoint/{id}/healthz."""

    overall_health: Health = field(default="", name="overallHealth")
    bpf: Health = ""
    policy: Health = ""
    connected: bool = False


class EndpointStatus(Model, frozen=True):
    """The status of an endpoint; clients dereference it without a check."""

    state: State
    external_identifiers: EndpointIdentifiers | None = None
    identity: IdentityModel | None = None
    labels: LabelConfigurationStatus | None = None
    realized: EndpointConfigurationSpec | None = None
    networking: EndpointNetworking | None = None
    policy: EndpointPolicyStatus | None = None
    health: EndpointHealth | None = None
    controllers: list[ControllerStatus] = field(default_factory=list)
    log: list[EndpointStatusChange] = field(default_factory=list)


class EndpointModel(Model, frozen=True):
    """An endpoint, as PUT returns and GET lists it."""

    id: int
    status: EndpointStatus
    spec: EndpointConfigurationSpec | None = None


# --- metrics ---------------------------------------------------------------------------------------


class Metric(Model, frozen=True):
    """One series of a metric."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)
