"""Messages of the protobuf package ``flow``: what Hubble reports of a packet, a request or the agent.

Source: Cilium 1.17, api/v1/flow/flow.proto, with what 1.19 adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from cells.hubble.codec import SharedMessage, Wire, WireMessage
from cells.hubble.enums import (
    AgentEventType,
    AuthType,
    DebugCapturePoint,
    DebugEventType,
    DropReason,
    FlowType,
    FlowVerdict,
    IPVersion,
    L7FlowType,
    LostEventSource,
    SocketTranslationPoint,
    TraceObservationPoint,
    TraceReason,
    TrafficDirection,
    TunnelProtocol,
)


class AnyMessage(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.Any"
    type_url: Annotated[str, Wire(1)] = ""
    value: Annotated[bytes, Wire(2)] = b""


class Flow(WireMessage):
    protobuf: ClassVar[str] = "flow.Flow"
    time: Annotated[int | None, Wire(1, "Timestamp")] = None
    uuid: Annotated[str, Wire(34)] = ""
    verdict: Annotated[int, Wire(2, FlowVerdict)] = 0
    drop_reason: Annotated[int, Wire(3, "uint32")] = 0
    auth_type: Annotated[int, Wire(35, AuthType)] = 0
    ethernet: Annotated[Ethernet | None, Wire(4)] = None
    IP: Annotated[IP | None, Wire(5)] = None
    l4: Annotated[Layer4 | None, Wire(6)] = None
    source: Annotated[FlowEndpoint | None, Wire(8)] = None
    destination: Annotated[FlowEndpoint | None, Wire(9)] = None
    Type: Annotated[int, Wire(10, FlowType)] = 0
    node_name: Annotated[str, Wire(11)] = ""
    node_labels: Annotated[Sequence[str], Wire(37)] = ()
    source_names: Annotated[Sequence[str], Wire(13)] = ()
    destination_names: Annotated[Sequence[str], Wire(14)] = ()
    l7: Annotated[Layer7 | None, Wire(15)] = None
    reply: Annotated[bool, Wire(16)] = False
    event_type: Annotated[CiliumEventType | None, Wire(19)] = None
    source_service: Annotated[FlowService | None, Wire(20)] = None
    destination_service: Annotated[FlowService | None, Wire(21)] = None
    traffic_direction: Annotated[int, Wire(22, TrafficDirection)] = 0
    policy_match_type: Annotated[int, Wire(23, "uint32")] = 0
    trace_observation_point: Annotated[int, Wire(24, TraceObservationPoint)] = 0
    trace_reason: Annotated[int, Wire(36, TraceReason)] = 0
    drop_reason_desc: Annotated[int, Wire(25, DropReason)] = 0
    is_reply: Annotated[bool | None, Wire(26, "BoolValue")] = None
    debug_capture_point: Annotated[int, Wire(27, DebugCapturePoint)] = 0
    interface: Annotated[NetworkInterface | None, Wire(28)] = None
    proxy_port: Annotated[int, Wire(29, "uint32")] = 0
    trace_context: Annotated[TraceContext | None, Wire(30)] = None
    sock_xlate_point: Annotated[int, Wire(31, SocketTranslationPoint)] = 0
    socket_cookie: Annotated[int, Wire(32, "uint64")] = 0
    cgroup_id: Annotated[int, Wire(33, "uint64")] = 0
    Summary: Annotated[str, Wire(100000)] = ""
    extensions: Annotated[AnyMessage | None, Wire(150000)] = None
    egress_allowed_by: Annotated[Sequence[FlowPolicy], Wire(21001)] = ()
    ingress_allowed_by: Annotated[Sequence[FlowPolicy], Wire(21002)] = ()
    egress_denied_by: Annotated[Sequence[FlowPolicy], Wire(21004)] = ()
    ingress_denied_by: Annotated[Sequence[FlowPolicy], Wire(21005)] = ()
    file: Annotated[FileInfo | None, Wire(38)] = None
    tunnel: Annotated[FlowTunnel | None, Wire(39)] = None
    ip_trace_id: Annotated[IPTraceID | None, Wire(40)] = None
    emitter: Annotated[Emitter | None, Wire(41)] = None
    policy_log: Annotated[Sequence[str], Wire(21006)] = ()


class Layer4(SharedMessage):
    protobuf: ClassVar[str] = "flow.Layer4"
    TCP: Annotated[TCP | None, Wire(1, oneof="protocol")] = None
    UDP: Annotated[UDP | None, Wire(2, oneof="protocol")] = None
    ICMPv4: Annotated[ICMPv4 | None, Wire(3, oneof="protocol")] = None
    ICMPv6: Annotated[ICMPv6 | None, Wire(4, oneof="protocol")] = None
    SCTP: Annotated[SCTP | None, Wire(5, oneof="protocol")] = None
    VRRP: Annotated[VRRP | None, Wire(6, oneof="protocol")] = None
    IGMP: Annotated[IGMP | None, Wire(7, oneof="protocol")] = None


class Layer7(WireMessage):
    protobuf: ClassVar[str] = "flow.Layer7"
    type: Annotated[int, Wire(1, L7FlowType)] = 0
    latency_ns: Annotated[int, Wire(2, "uint64")] = 0
    dns: Annotated[DNS | None, Wire(100, oneof="record")] = None
    http: Annotated[HTTP | None, Wire(101, oneof="record")] = None
    kafka: Annotated[Kafka | None, Wire(102, oneof="record")] = None


class TraceContext(WireMessage):
    protobuf: ClassVar[str] = "flow.TraceContext"
    parent: Annotated[TraceParent | None, Wire(1)] = None


class TraceParent(WireMessage):
    protobuf: ClassVar[str] = "flow.TraceParent"
    trace_id: Annotated[str, Wire(1)] = ""


class FlowEndpoint(SharedMessage):
    protobuf: ClassVar[str] = "flow.Endpoint"
    ID: Annotated[int, Wire(1, "uint32")] = 0
    identity: Annotated[int, Wire(2, "uint32")] = 0
    cluster_name: Annotated[str, Wire(7)] = ""
    namespace: Annotated[str, Wire(3)] = ""
    labels: Annotated[Sequence[str], Wire(4)] = ()
    pod_name: Annotated[str, Wire(5)] = ""
    workloads: Annotated[Sequence[Workload], Wire(6)] = ()


class Workload(WireMessage):
    protobuf: ClassVar[str] = "flow.Workload"
    name: Annotated[str, Wire(1)] = ""
    kind: Annotated[str, Wire(2)] = ""


class TCP(WireMessage):
    protobuf: ClassVar[str] = "flow.TCP"
    source_port: Annotated[int, Wire(1, "uint32")] = 0
    destination_port: Annotated[int, Wire(2, "uint32")] = 0
    flags: Annotated[TCPFlags | None, Wire(3)] = None


class IP(SharedMessage):
    protobuf: ClassVar[str] = "flow.IP"
    source: Annotated[str, Wire(1)] = ""
    source_xlated: Annotated[str, Wire(5)] = ""
    destination: Annotated[str, Wire(2)] = ""
    ipVersion: Annotated[int, Wire(3, IPVersion)] = 0  # noqa: N815 - the name in the .proto
    encrypted: Annotated[bool, Wire(4)] = False


class Ethernet(SharedMessage):
    protobuf: ClassVar[str] = "flow.Ethernet"
    source: Annotated[str, Wire(1)] = ""
    destination: Annotated[str, Wire(2)] = ""


class TCPFlags(SharedMessage):
    protobuf: ClassVar[str] = "flow.TCPFlags"
    FIN: Annotated[bool, Wire(1)] = False
    SYN: Annotated[bool, Wire(2)] = False
    RST: Annotated[bool, Wire(3)] = False
    PSH: Annotated[bool, Wire(4)] = False
    ACK: Annotated[bool, Wire(5)] = False
    URG: Annotated[bool, Wire(6)] = False
    ECE: Annotated[bool, Wire(7)] = False
    CWR: Annotated[bool, Wire(8)] = False
    NS: Annotated[bool, Wire(9)] = False


class UDP(WireMessage):
    protobuf: ClassVar[str] = "flow.UDP"
    source_port: Annotated[int, Wire(1, "uint32")] = 0
    destination_port: Annotated[int, Wire(2, "uint32")] = 0


class SCTP(WireMessage):
    protobuf: ClassVar[str] = "flow.SCTP"
    source_port: Annotated[int, Wire(1, "uint32")] = 0
    destination_port: Annotated[int, Wire(2, "uint32")] = 0


class ICMPv4(WireMessage):
    protobuf: ClassVar[str] = "flow.ICMPv4"
    type: Annotated[int, Wire(1, "uint32")] = 0
    code: Annotated[int, Wire(2, "uint32")] = 0


class ICMPv6(WireMessage):
    protobuf: ClassVar[str] = "flow.ICMPv6"
    type: Annotated[int, Wire(1, "uint32")] = 0
    code: Annotated[int, Wire(2, "uint32")] = 0


class FlowPolicy(WireMessage):
    protobuf: ClassVar[str] = "flow.Policy"
    name: Annotated[str, Wire(1)] = ""
    namespace: Annotated[str, Wire(2)] = ""
    labels: Annotated[Sequence[str], Wire(3)] = ()
    revision: Annotated[int, Wire(4, "uint64")] = 0
    kind: Annotated[str, Wire(5)] = ""


class EventTypeFilter(WireMessage):
    protobuf: ClassVar[str] = "flow.EventTypeFilter"
    type: Annotated[int, Wire(1, "int32")] = 0
    match_sub_type: Annotated[bool, Wire(2)] = False
    sub_type: Annotated[int, Wire(3, "int32")] = 0


class CiliumEventType(SharedMessage):
    protobuf: ClassVar[str] = "flow.CiliumEventType"
    type: Annotated[int, Wire(1, "int32")] = 0
    sub_type: Annotated[int, Wire(2, "int32")] = 0


class FlowFilter(WireMessage):
    protobuf: ClassVar[str] = "flow.FlowFilter"
    uuid: Annotated[Sequence[str], Wire(29)] = ()
    source_ip: Annotated[Sequence[str], Wire(1)] = ()
    source_ip_xlated: Annotated[Sequence[str], Wire(34)] = ()
    source_pod: Annotated[Sequence[str], Wire(2)] = ()
    source_fqdn: Annotated[Sequence[str], Wire(7)] = ()
    source_label: Annotated[Sequence[str], Wire(10)] = ()
    source_service: Annotated[Sequence[str], Wire(16)] = ()
    source_workload: Annotated[Sequence[Workload], Wire(26)] = ()
    destination_ip: Annotated[Sequence[str], Wire(3)] = ()
    destination_pod: Annotated[Sequence[str], Wire(4)] = ()
    destination_fqdn: Annotated[Sequence[str], Wire(8)] = ()
    destination_label: Annotated[Sequence[str], Wire(11)] = ()
    destination_service: Annotated[Sequence[str], Wire(17)] = ()
    destination_workload: Annotated[Sequence[Workload], Wire(27)] = ()
    traffic_direction: Annotated[Sequence[int], Wire(30, TrafficDirection)] = ()
    verdict: Annotated[Sequence[int], Wire(5, FlowVerdict)] = ()
    drop_reason_desc: Annotated[Sequence[int], Wire(33, DropReason)] = ()
    interface: Annotated[Sequence[NetworkInterface], Wire(35)] = ()
    event_type: Annotated[Sequence[EventTypeFilter], Wire(6)] = ()
    http_status_code: Annotated[Sequence[str], Wire(9)] = ()
    protocol: Annotated[Sequence[str], Wire(12)] = ()
    source_port: Annotated[Sequence[str], Wire(13)] = ()
    destination_port: Annotated[Sequence[str], Wire(14)] = ()
    reply: Annotated[Sequence[bool], Wire(15)] = ()
    dns_query: Annotated[Sequence[str], Wire(18)] = ()
    source_identity: Annotated[Sequence[int], Wire(19, "uint32")] = ()
    destination_identity: Annotated[Sequence[int], Wire(20, "uint32")] = ()
    http_method: Annotated[Sequence[str], Wire(21)] = ()
    http_path: Annotated[Sequence[str], Wire(22)] = ()
    http_url: Annotated[Sequence[str], Wire(31)] = ()
    http_header: Annotated[Sequence[HTTPHeader], Wire(32)] = ()
    tcp_flags: Annotated[Sequence[TCPFlags], Wire(23)] = ()
    node_name: Annotated[Sequence[str], Wire(24)] = ()
    node_labels: Annotated[Sequence[str], Wire(36)] = ()
    ip_version: Annotated[Sequence[int], Wire(25, IPVersion)] = ()
    trace_id: Annotated[Sequence[str], Wire(28)] = ()
    experimental: Annotated[FlowFilterExperimental | None, Wire(999)] = None
    source_cluster_name: Annotated[Sequence[str], Wire(37)] = ()
    destination_cluster_name: Annotated[Sequence[str], Wire(38)] = ()
    ip_trace_id: Annotated[Sequence[int], Wire(39, "uint64")] = ()


class FlowFilterExperimental(WireMessage):
    protobuf: ClassVar[str] = "flow.FlowFilter.Experimental"
    cel_expression: Annotated[Sequence[str], Wire(1)] = ()


class DNS(WireMessage):
    protobuf: ClassVar[str] = "flow.DNS"
    query: Annotated[str, Wire(1)] = ""
    ips: Annotated[Sequence[str], Wire(2)] = ()
    ttl: Annotated[int, Wire(3, "uint32")] = 0
    cnames: Annotated[Sequence[str], Wire(4)] = ()
    observation_source: Annotated[str, Wire(5)] = ""
    rcode: Annotated[int, Wire(6, "uint32")] = 0
    qtypes: Annotated[Sequence[str], Wire(7)] = ()
    rrtypes: Annotated[Sequence[str], Wire(8)] = ()


class HTTPHeader(WireMessage):
    protobuf: ClassVar[str] = "flow.HTTPHeader"
    key: Annotated[str, Wire(1)] = ""
    value: Annotated[str, Wire(2)] = ""


class HTTP(WireMessage):
    protobuf: ClassVar[str] = "flow.HTTP"
    code: Annotated[int, Wire(1, "uint32")] = 0
    method: Annotated[str, Wire(2)] = ""
    url: Annotated[str, Wire(3)] = ""
    protocol: Annotated[str, Wire(4)] = ""
    headers: Annotated[Sequence[HTTPHeader], Wire(5)] = ()


class Kafka(WireMessage):
    protobuf: ClassVar[str] = "flow.Kafka"
    error_code: Annotated[int, Wire(1, "int32")] = 0
    api_version: Annotated[int, Wire(2, "int32")] = 0
    api_key: Annotated[str, Wire(3)] = ""
    correlation_id: Annotated[int, Wire(4, "int32")] = 0
    topic: Annotated[str, Wire(5)] = ""


class FlowService(SharedMessage):
    protobuf: ClassVar[str] = "flow.Service"
    name: Annotated[str, Wire(1)] = ""
    namespace: Annotated[str, Wire(2)] = ""


class LostEvent(WireMessage):
    protobuf: ClassVar[str] = "flow.LostEvent"
    source: Annotated[int, Wire(1, LostEventSource)] = 0
    num_events_lost: Annotated[int, Wire(2, "uint64")] = 0
    cpu: Annotated[int | None, Wire(3, "Int32Value")] = None
    first: Annotated[int | None, Wire(4, "Timestamp")] = None
    last: Annotated[int | None, Wire(5, "Timestamp")] = None


class AgentEvent(WireMessage):
    protobuf: ClassVar[str] = "flow.AgentEvent"
    type: Annotated[int, Wire(1, AgentEventType)] = 0
    unknown: Annotated[AgentEventUnknown | None, Wire(100, oneof="notification")] = None
    agent_start: Annotated[TimeNotification | None, Wire(101, oneof="notification")] = None
    policy_update: Annotated[PolicyUpdateNotification | None, Wire(102, oneof="notification")] = None
    endpoint_regenerate: Annotated[EndpointRegenNotification | None, Wire(103, oneof="notification")] = None
    endpoint_update: Annotated[EndpointUpdateNotification | None, Wire(104, oneof="notification")] = None
    ipcache_update: Annotated[IPCacheNotification | None, Wire(105, oneof="notification")] = None
    service_upsert: Annotated[ServiceUpsertNotification | None, Wire(106, oneof="notification")] = None
    service_delete: Annotated[ServiceDeleteNotification | None, Wire(107, oneof="notification")] = None


class AgentEventUnknown(WireMessage):
    protobuf: ClassVar[str] = "flow.AgentEventUnknown"
    type: Annotated[str, Wire(1)] = ""
    notification: Annotated[str, Wire(2)] = ""


class TimeNotification(WireMessage):
    protobuf: ClassVar[str] = "flow.TimeNotification"
    time: Annotated[int | None, Wire(1, "Timestamp")] = None


class PolicyUpdateNotification(WireMessage):
    protobuf: ClassVar[str] = "flow.PolicyUpdateNotification"
    labels: Annotated[Sequence[str], Wire(1)] = ()
    revision: Annotated[int, Wire(2, "uint64")] = 0
    rule_count: Annotated[int, Wire(3, "int64")] = 0


class EndpointRegenNotification(WireMessage):
    protobuf: ClassVar[str] = "flow.EndpointRegenNotification"
    id: Annotated[int, Wire(1, "uint64")] = 0
    labels: Annotated[Sequence[str], Wire(2)] = ()
    error: Annotated[str, Wire(3)] = ""


class EndpointUpdateNotification(WireMessage):
    protobuf: ClassVar[str] = "flow.EndpointUpdateNotification"
    id: Annotated[int, Wire(1, "uint64")] = 0
    labels: Annotated[Sequence[str], Wire(2)] = ()
    error: Annotated[str, Wire(3)] = ""
    pod_name: Annotated[str, Wire(4)] = ""
    namespace: Annotated[str, Wire(5)] = ""


class IPCacheNotification(WireMessage):
    protobuf: ClassVar[str] = "flow.IPCacheNotification"
    cidr: Annotated[str, Wire(1)] = ""
    identity: Annotated[int, Wire(2, "uint32")] = 0
    old_identity: Annotated[int | None, Wire(3, "UInt32Value")] = None
    host_ip: Annotated[str, Wire(4)] = ""
    old_host_ip: Annotated[str, Wire(5)] = ""
    encrypt_key: Annotated[int, Wire(6, "uint32")] = 0
    namespace: Annotated[str, Wire(7)] = ""
    pod_name: Annotated[str, Wire(8)] = ""


class ServiceUpsertNotificationAddr(WireMessage):
    protobuf: ClassVar[str] = "flow.ServiceUpsertNotificationAddr"
    ip: Annotated[str, Wire(1)] = ""
    port: Annotated[int, Wire(2, "uint32")] = 0


class ServiceUpsertNotification(WireMessage):
    protobuf: ClassVar[str] = "flow.ServiceUpsertNotification"
    id: Annotated[int, Wire(1, "uint32")] = 0
    frontend_address: Annotated[ServiceUpsertNotificationAddr | None, Wire(2)] = None
    backend_addresses: Annotated[Sequence[ServiceUpsertNotificationAddr], Wire(3)] = ()
    type: Annotated[str, Wire(4)] = ""
    traffic_policy: Annotated[str, Wire(5)] = ""
    name: Annotated[str, Wire(6)] = ""
    namespace: Annotated[str, Wire(7)] = ""
    ext_traffic_policy: Annotated[str, Wire(8)] = ""
    int_traffic_policy: Annotated[str, Wire(9)] = ""


class ServiceDeleteNotification(WireMessage):
    protobuf: ClassVar[str] = "flow.ServiceDeleteNotification"
    id: Annotated[int, Wire(1, "uint32")] = 0


class NetworkInterface(SharedMessage):
    protobuf: ClassVar[str] = "flow.NetworkInterface"
    index: Annotated[int, Wire(1, "uint32")] = 0
    name: Annotated[str, Wire(2)] = ""


class DebugEvent(WireMessage):
    protobuf: ClassVar[str] = "flow.DebugEvent"
    type: Annotated[int, Wire(1, DebugEventType)] = 0
    source: Annotated[FlowEndpoint | None, Wire(2)] = None
    hash: Annotated[int | None, Wire(3, "UInt32Value")] = None
    arg1: Annotated[int | None, Wire(4, "UInt32Value")] = None
    arg2: Annotated[int | None, Wire(5, "UInt32Value")] = None
    arg3: Annotated[int | None, Wire(6, "UInt32Value")] = None
    message: Annotated[str, Wire(7)] = ""
    cpu: Annotated[int | None, Wire(8, "Int32Value")] = None


class FileInfo(WireMessage):
    protobuf: ClassVar[str] = "flow.FileInfo"
    name: Annotated[str, Wire(1)] = ""
    line: Annotated[int, Wire(2, "uint32")] = 0


class FlowTunnel(WireMessage):
    protobuf: ClassVar[str] = "flow.Tunnel"
    protocol: Annotated[int, Wire(1, TunnelProtocol)] = 0
    IP: Annotated[IP | None, Wire(2)] = None
    l4: Annotated[Layer4 | None, Wire(3)] = None


class IPTraceID(WireMessage):
    protobuf: ClassVar[str] = "flow.IPTraceID"
    trace_id: Annotated[int, Wire(1, "uint64")] = 0
    ip_option_type: Annotated[int, Wire(2, "uint32")] = 0


class Emitter(WireMessage):
    protobuf: ClassVar[str] = "flow.Emitter"
    name: Annotated[str, Wire(1)] = ""
    version: Annotated[str, Wire(2)] = ""


class VRRP(WireMessage):
    protobuf: ClassVar[str] = "flow.VRRP"
    type: Annotated[int, Wire(1, "uint32")] = 0
    vrid: Annotated[int, Wire(2, "uint32")] = 0
    priority: Annotated[int, Wire(3, "uint32")] = 0


class IGMP(WireMessage):
    protobuf: ClassVar[str] = "flow.IGMP"
    type: Annotated[int, Wire(1, "uint32")] = 0
    group_address: Annotated[str, Wire(2)] = ""


HubbleEvent = Flow | AgentEvent | DebugEvent | LostEvent
"""What the ring holds."""
