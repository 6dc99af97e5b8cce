"""The gRPC services of a node's Hubble: Observer, Peer, health and reflection.

``FlowObserver`` implements ObservedFlows; HubbleServer serves the methods.

Source: Cilium 1.17, api/v1 (observer, peer), pkg/hubble/peer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Final, Protocol, TypeVar

import msgspec

from cells.cluster.nodes.node import EXTERNAL_IP, INTERNAL_IP, ClusterNode
from cells.hubble.codec import InvalidFieldMask, WireMessage, encode
from cells.hubble.filters import InvalidFilter
from cells.hubble.observer import InvalidRequest, InvalidTime
from cells.hubble.rpc.messages import (
    HEALTH_METHODS,
    Answers,
    Method,
    RpcCode,
    RpcError,
    decoded,
    server_streaming,
    unary,
)
from cells.hubble.rpc.observer import (
    ChangeNotification,
    ChangeNotificationType,
    GetAgentEventsRequest,
    GetDebugEventsRequest,
    GetFlowsRequest,
    GetNamespacesResponse,
    PeerTLS,
    ServerStatusResponse,
)
from cells.hubble.rpc.reflection import reflection_methods
from lifecycle import Change, ReadTable

OBSERVER: Final = "observer.Observer"
PEER: Final = "peer.Peer"
SERVER_NAME: Final = "hubble-grpc.cilium.io"

_Request = TypeVar("_Request", bound=WireMessage)


class ObservedFlows(Protocol):
    """Interface of the Observer service to the events; implemented by FlowObserver."""

    def get_flows(self, request: GetFlowsRequest) -> AsyncGenerator[list[bytes]]:
        """Yield batches of encoded GetFlowsResponses.

        Raises InvalidRequest, InvalidFilter, InvalidTime and InvalidFieldMask.
        """

    def get_agent_events(self, request: GetAgentEventsRequest) -> AsyncGenerator[list[bytes]]:
        """Yield batches of encoded GetAgentEventsResponses. Raises InvalidRequest and InvalidTime."""

    def get_debug_events(self, request: GetDebugEventsRequest) -> AsyncGenerator[list[bytes]]:
        """Yield batches of encoded GetDebugEventsResponses. Raises InvalidRequest and InvalidTime."""

    def server_status(self) -> ServerStatusResponse:
        """Return number of flows, capacity of the ring, uptime, version and flow rate."""

    def namespaces(self) -> GetNamespacesResponse:
        """Return the namespaces in flows of the last hour."""


class PeerSettings(msgspec.Struct, frozen=True):
    """Settings of the Peer service, which announces nodes to relays."""

    port: int = 0
    """The port of Hubble on all nodes; 0 if unknown."""
    prefer_ipv6: bool = False
    tls: bool = True


class Peers:
    """Converts changes of nodes to ChangeNotifications for one subscriber."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings
        self._known: dict[object, ChangeNotification] = {}

    def notifications(self, batch: Iterable[Change[str, ClusterNode]]) -> Iterator[ChangeNotification]:
        """Return the notifications for a batch of changes."""
        for change in batch:
            old = self._known.pop(change.key, None)
            if change.row is None:
                if old is not None:
                    yield msgspec.structs.replace(old, type=ChangeNotificationType.PEER_DELETED)
                continue
            new = self._known[change.key] = self._announced(change.row)
            if old is None:
                yield new
            elif old.name != new.name:
                yield msgspec.structs.replace(old, type=ChangeNotificationType.PEER_DELETED)
                yield new
            elif old.address != new.address:
                yield msgspec.structs.replace(new, type=ChangeNotificationType.PEER_UPDATED)

    def _announced(self, node: ClusterNode) -> ChangeNotification:
        cluster = node.cluster or "default"
        tls = None
        if self._settings.tls:
            tls = PeerTLS(server_name=server_name(node.name, cluster) if node.name else "")
        name = node.name if cluster == "default" else f"{cluster}/{node.name}"
        return ChangeNotification(
            name=name, address=self._address(node), type=ChangeNotificationType.PEER_ADDED, tls=tls
        )

    def _address(self, node: ClusterNode) -> str:
        address = _node_address(node, 6) if self._settings.prefer_ipv6 else _node_address(node, 4)
        if address is None and not self._settings.prefer_ipv6:
            address = _node_address(node, 6)
        if address is None or not self._settings.port:
            return str(address or "")
        return (
            f"[{address}]:{self._settings.port}"
            if ":" in str(address)
            else f"{address}:{self._settings.port}"
        )


def server_name(node: str, cluster: str) -> str:
    """Return the TLS server name of a node's Hubble."""
    return f"{node.replace('.', '-')}.{(cluster or 'default').replace('.', '-')}.{SERVER_NAME}"


def _node_address(node: ClusterNode, version: int) -> object:
    for kind in (INTERNAL_IP, EXTERNAL_IP):
        for each in node.addresses:
            if each.type == kind and each.ip.version == version:
                return each.ip
    return None


def hubble_methods(
    flows: ObservedFlows, nodes: ReadTable[str, ClusterNode], peers: PeerSettings
) -> list[Method]:
    """Return all methods of a node's Hubble."""

    async def status(_request: bytes) -> bytes:
        return encode(flows.server_status())

    async def namespaces(_request: bytes) -> bytes:
        return encode(flows.namespaces())

    async def absent(_request: bytes) -> bytes:
        raise RpcError(RpcCode.UNIMPLEMENTED, "GetNodes not implemented")

    async def notify(_request: bytes) -> Answers:
        subscriber = Peers(peers)
        async for batch in nodes.changes():
            if found := [encode(one) for one in subscriber.notifications(batch)]:
                yield found

    methods = [
        server_streaming(OBSERVER, "GetFlows", _observed(GetFlowsRequest, flows.get_flows)),
        server_streaming(
            OBSERVER, "GetAgentEvents", _observed(GetAgentEventsRequest, flows.get_agent_events)
        ),
        server_streaming(
            OBSERVER, "GetDebugEvents", _observed(GetDebugEventsRequest, flows.get_debug_events)
        ),
        unary(OBSERVER, "GetNodes", absent),
        unary(OBSERVER, "GetNamespaces", namespaces),
        unary(OBSERVER, "ServerStatus", status),
        server_streaming(PEER, "Notify", notify),
        *HEALTH_METHODS,
    ]
    return [*methods, *reflection_methods(method.service for method in methods)]


def _observed(
    kind: type[_Request], call: Callable[[_Request], AsyncGenerator[list[bytes]]]
) -> Callable[[bytes], Answers]:
    async def answer(data: bytes) -> Answers:
        try:
            batches = call(decoded(kind, data))
            try:
                async for batch in batches:
                    yield batch
            finally:
                await batches.aclose()
        except InvalidRequest as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, str(error)) from error
        except (InvalidFilter, InvalidFieldMask, InvalidTime) as error:
            raise RpcError(RpcCode.UNKNOWN, str(error)) from error

    return answer
