"""Messages of Hubble's Observer and Peer services, and the relay's node status events.

Source: Cilium 1.17, api/v1/observer/observer.proto, peer/peer.proto and relay/relay.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, ClassVar

from cells.hubble.codec import Wire, WireMessage
from cells.hubble.flow import AgentEvent, AnyMessage, DebugEvent, Flow, FlowFilter, LostEvent


class NodeState(IntEnum):
    UNKNOWN_NODE_STATE = 0
    NODE_CONNECTED = 1
    NODE_UNAVAILABLE = 2
    NODE_GONE = 3
    NODE_ERROR = 4


class ChangeNotificationType(IntEnum):
    UNKNOWN = 0
    PEER_ADDED = 1
    PEER_DELETED = 2
    PEER_UPDATED = 3


class NodeStatusEvent(WireMessage):
    protobuf: ClassVar[str] = "relay.NodeStatusEvent"
    state_change: Annotated[int, Wire(1, NodeState)] = 0
    node_names: Annotated[Sequence[str], Wire(2)] = ()
    message: Annotated[str, Wire(3)] = ""


class NotifyRequest(WireMessage):
    protobuf: ClassVar[str] = "peer.NotifyRequest"


class ChangeNotification(WireMessage):
    protobuf: ClassVar[str] = "peer.ChangeNotification"
    name: Annotated[str, Wire(1)] = ""
    address: Annotated[str, Wire(2)] = ""
    type: Annotated[int, Wire(3, ChangeNotificationType)] = 0
    tls: Annotated[PeerTLS | None, Wire(4)] = None


class PeerTLS(WireMessage):
    protobuf: ClassVar[str] = "peer.TLS"
    server_name: Annotated[str, Wire(1)] = ""


class ServerStatusRequest(WireMessage):
    protobuf: ClassVar[str] = "observer.ServerStatusRequest"


class ServerStatusResponse(WireMessage):
    protobuf: ClassVar[str] = "observer.ServerStatusResponse"
    num_flows: Annotated[int, Wire(1, "uint64")] = 0
    max_flows: Annotated[int, Wire(2, "uint64")] = 0
    seen_flows: Annotated[int, Wire(3, "uint64")] = 0
    uptime_ns: Annotated[int, Wire(4, "uint64")] = 0
    num_connected_nodes: Annotated[int | None, Wire(5, "UInt32Value")] = None
    num_unavailable_nodes: Annotated[int | None, Wire(6, "UInt32Value")] = None
    unavailable_nodes: Annotated[Sequence[str], Wire(7)] = ()
    version: Annotated[str, Wire(8)] = ""
    flows_rate: Annotated[float, Wire(9)] = 0.0


class GetFlowsRequest(WireMessage):
    protobuf: ClassVar[str] = "observer.GetFlowsRequest"
    number: Annotated[int, Wire(1, "uint64")] = 0
    first: Annotated[bool, Wire(9)] = False
    follow: Annotated[bool, Wire(3)] = False
    blacklist: Annotated[Sequence[FlowFilter], Wire(5)] = ()
    whitelist: Annotated[Sequence[FlowFilter], Wire(6)] = ()
    since: Annotated[int | None, Wire(7, "Timestamp")] = None
    until: Annotated[int | None, Wire(8, "Timestamp")] = None
    field_mask: Annotated[Sequence[str] | None, Wire(10, "FieldMask")] = None
    experimental: Annotated[GetFlowsExperimental | None, Wire(999)] = None
    extensions: Annotated[AnyMessage | None, Wire(150000)] = None


class GetFlowsExperimental(WireMessage):
    protobuf: ClassVar[str] = "observer.GetFlowsRequest.Experimental"
    field_mask: Annotated[Sequence[str] | None, Wire(1, "FieldMask")] = None


class GetFlowsResponse(WireMessage):
    protobuf: ClassVar[str] = "observer.GetFlowsResponse"
    flow: Annotated[Flow | None, Wire(1, oneof="response_types")] = None
    node_status: Annotated[NodeStatusEvent | None, Wire(2, oneof="response_types")] = None
    lost_events: Annotated[LostEvent | None, Wire(3, oneof="response_types")] = None
    node_name: Annotated[str, Wire(1000)] = ""
    time: Annotated[int | None, Wire(1001, "Timestamp")] = None


class GetAgentEventsRequest(WireMessage):
    protobuf: ClassVar[str] = "observer.GetAgentEventsRequest"
    number: Annotated[int, Wire(1, "uint64")] = 0
    first: Annotated[bool, Wire(9)] = False
    follow: Annotated[bool, Wire(2)] = False
    since: Annotated[int | None, Wire(7, "Timestamp")] = None
    until: Annotated[int | None, Wire(8, "Timestamp")] = None


class GetAgentEventsResponse(WireMessage):
    protobuf: ClassVar[str] = "observer.GetAgentEventsResponse"
    agent_event: Annotated[AgentEvent | None, Wire(1)] = None
    node_name: Annotated[str, Wire(1000)] = ""
    time: Annotated[int | None, Wire(1001, "Timestamp")] = None


class GetDebugEventsRequest(WireMessage):
    protobuf: ClassVar[str] = "observer.GetDebugEventsRequest"
    number: Annotated[int, Wire(1, "uint64")] = 0
    first: Annotated[bool, Wire(9)] = False
    follow: Annotated[bool, Wire(2)] = False
    since: Annotated[int | None, Wire(7, "Timestamp")] = None
    until: Annotated[int | None, Wire(8, "Timestamp")] = None


class GetDebugEventsResponse(WireMessage):
    protobuf: ClassVar[str] = "observer.GetDebugEventsResponse"
    debug_event: Annotated[DebugEvent | None, Wire(1)] = None
    node_name: Annotated[str, Wire(1000)] = ""
    time: Annotated[int | None, Wire(1001, "Timestamp")] = None


class GetNodesRequest(WireMessage):
    protobuf: ClassVar[str] = "observer.GetNodesRequest"


class GetNodesResponse(WireMessage):
    protobuf: ClassVar[str] = "observer.GetNodesResponse"
    nodes: Annotated[Sequence[ObservedNode], Wire(1)] = ()


class ObservedNode(WireMessage):
    protobuf: ClassVar[str] = "observer.Node"
    name: Annotated[str, Wire(1)] = ""
    version: Annotated[str, Wire(2)] = ""
    address: Annotated[str, Wire(3)] = ""
    state: Annotated[int, Wire(4, NodeState)] = 0
    tls: Annotated[NodeTLS | None, Wire(5)] = None
    uptime_ns: Annotated[int, Wire(6, "uint64")] = 0
    num_flows: Annotated[int, Wire(7, "uint64")] = 0
    max_flows: Annotated[int, Wire(8, "uint64")] = 0
    seen_flows: Annotated[int, Wire(9, "uint64")] = 0


class NodeTLS(WireMessage):
    protobuf: ClassVar[str] = "observer.TLS"
    enabled: Annotated[bool, Wire(1)] = False
    server_name: Annotated[str, Wire(2)] = ""


class GetNamespacesRequest(WireMessage):
    protobuf: ClassVar[str] = "observer.GetNamespacesRequest"


class GetNamespacesResponse(WireMessage):
    protobuf: ClassVar[str] = "observer.GetNamespacesResponse"
    namespaces: Annotated[Sequence[ObservedNamespace], Wire(1)] = ()


class ObservedNamespace(WireMessage):
    protobuf: ClassVar[str] = "observer.Namespace"
    cluster: Annotated[str, Wire(1)] = ""
    namespace: Annotated[str, Wire(2)] = ""


class ExportEvent(WireMessage):
    protobuf: ClassVar[str] = "observer.ExportEvent"
    flow: Annotated[Flow | None, Wire(1, oneof="response_types")] = None
    node_status: Annotated[NodeStatusEvent | None, Wire(2, oneof="response_types")] = None
    lost_events: Annotated[LostEvent | None, Wire(3, oneof="response_types")] = None
    agent_event: Annotated[AgentEvent | None, Wire(4, oneof="response_types")] = None
    debug_event: Annotated[DebugEvent | None, Wire(5, oneof="response_types")] = None
    node_name: Annotated[str, Wire(1000)] = ""
    time: Annotated[int | None, Wire(1001, "Timestamp")] = None
