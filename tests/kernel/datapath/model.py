"""The packet walk in plain Python: what becomes of a packet, and what is remembered of it.

Needs: model_packet, model_conntrack, model_policy.   Gives: Model, ModelPod, Walk.
Read it to learn the walk, top-down from pod_sends() and host_sends(). The programs in cells/datapath/bpf do
the same to any packet; test_model.py checks that.
"""

import struct
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from cells.maps import PolicyKey
from tests.kernel.datapath.model_conntrack import Conntrack, Status
from tests.kernel.datapath.model_packet import INVALID, Direction, Flow, RefusedError, hop_ipv4, read_ipv4
from tests.kernel.datapath.model_policy import decide

PASS, DROP, REDIRECT = 0, 2, 7
FORWARDED: Final = 0
INVALID_SOURCE, UNKNOWN_NETWORK, UNROUTABLE, UNSUPPORTED_LINK, HOPS_EXCEEDED = 132, 139, 151, 166, 196
HOST, WORLD = 1, 2
_IPV4, _ARP, _LOWEST_TYPE = 0x0800, 0x0806, 0x0600
_BROADCAST: Final = b"\xff" * 6
_ARP_REQUEST: Final = struct.pack(">HHBBH", 1, _IPV4, 6, 4, 1)


@dataclass(slots=True)
class ModelPod:
    """A pod of the node."""

    ip: IPv4Address
    identity: int
    mac: bytes
    host_mac: bytes
    rules: dict[PolicyKey, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Walk:
    """What became of a frame: the action, the frame as it goes on, and the count it left in the metrics."""

    action: int
    frame: bytes
    counted: tuple[int, int] | None = None
    """Reason and direction. Nothing is counted twice, ARP and what stays with the host not at all."""


class DroppedError(Exception):
    """Ends the walk with a reason."""

    def __init__(self, reason: int, direction: Direction) -> None:
        super().__init__(reason, direction)
        self.cause = (reason, int(direction))


class Model:
    """A node with pods, addresses of its own, and a world whose identities it may know."""

    def __init__(self, pods: list[ModelPod], own: set[IPv4Address], net_mac: bytes) -> None:
        self.pods = {pod.ip: pod for pod in pods}
        self.own = own
        self.net_mac = net_mac
        self.identities: dict[IPv4Network, int] = {}
        self.conntrack = Conntrack()

    def pod_sends(self, pod: ModelPod, frame: bytes, now: int) -> Walk:
        """A pod's frame enters the host's end of its link."""
        try:
            return self._pod_sends(pod, frame, now)
        except DroppedError as dropped:
            return Walk(DROP, frame, dropped.cause)

    def _pod_sends(self, pod: ModelPod, frame: bytes, now: int) -> Walk:
        kind = ether_type(frame)
        if kind == _IPV4:
            return self._pod_sends_ipv4(pod, frame, now)
        if kind == _ARP:
            return answer_arp(pod, frame)
        reason = UNSUPPORTED_LINK if kind < _LOWEST_TYPE else UNKNOWN_NETWORK
        raise DroppedError(reason, Direction.EGRESS)

    def _pod_sends_ipv4(self, pod: ModelPod, frame: bytes, now: int) -> Walk:
        try:
            flow = read_ipv4(frame)
        except RefusedError as refused:
            stranger = refused.source not in {None, pod.ip}
            raise DroppedError(INVALID_SOURCE if stranger else refused.reason, Direction.EGRESS) from None
        if flow.source != pod.ip:
            raise DroppedError(INVALID_SOURCE, Direction.EGRESS)
        peer = self._identity(flow.destination)
        self._check(pod, flow, Direction.EGRESS, peer, pod.identity, now)
        receiver = self._pod(flow)
        if receiver is None:
            return Walk(PASS, frame, (FORWARDED, int(Direction.EGRESS)))
        return self._deliver(receiver, flow, frame, pod.identity, Direction.EGRESS, now)

    def host_sends(self, frame: bytes, now: int) -> Walk:
        """The host's frame leaves through cilium_host, where its routes lead for pods."""
        try:
            return self._host_sends(frame, now)
        except DroppedError as dropped:
            return Walk(DROP, frame, dropped.cause)

    def _host_sends(self, frame: bytes, now: int) -> Walk:
        to_net = Walk(PASS, self.net_mac + frame[6:])
        if ether_type(frame) != _IPV4:
            return to_net
        try:
            flow = read_ipv4(frame)
        except RefusedError as refused:
            raise DroppedError(refused.reason, Direction.INGRESS) from None
        if flow.destination in self.own:
            return to_net
        receiver = self._pod(flow)
        if receiver is None:  # handed back, the stack would send it here again
            raise DroppedError(UNROUTABLE, Direction.INGRESS)
        return self._deliver(receiver, flow, frame, self._identity(flow.source), Direction.INGRESS, now)

    def _deliver(
        self, pod: ModelPod, flow: Flow, frame: bytes, sender: int, way: Direction, now: int
    ) -> Walk:
        if flow.hops <= 1:
            raise DroppedError(HOPS_EXCEEDED, way)
        self._check(pod, flow, Direction.INGRESS, sender, sender, now)
        passed = hop_ipv4(frame, pod.host_mac, pod.mac)
        return Walk(REDIRECT, passed, (FORWARDED, int(Direction.INGRESS)))

    def _check(
        self, pod: ModelPod, flow: Flow, direction: Direction, peer: int, source: int, now: int
    ) -> None:
        """Whether the pod may send or receive this. Answers need no policy; all else, each packet anew."""
        status = self.conntrack.look_up(flow, direction, now)
        if status in {Status.REPLY, Status.RELATED}:
            return
        refused = decide(pod.rules, flow, direction, peer)
        if refused is not None:
            raise DroppedError(refused, direction)
        if status is Status.NEW:
            self.conntrack.create(flow, direction, source, now)

    def _pod(self, flow: Flow) -> ModelPod | None:
        assert isinstance(flow.destination, IPv4Address)
        return self.pods.get(flow.destination)

    def _identity(self, ip: object) -> int:
        """Whose an address is: the node's records first, then the longest known prefix, else the world's."""
        assert isinstance(ip, IPv4Address)
        if ip in self.own:
            return HOST
        if ip in self.pods:
            return self.pods[ip].identity
        known = [network for network in self.identities if ip in network]
        return self.identities[max(known, key=lambda network: network.prefixlen)] if known else WORLD


def ether_type(frame: bytes) -> int:
    """The type field, or the length of an 802.3 frame."""
    return int.from_bytes(frame[12:14], "big")


def answer_arp(pod: ModelPod, frame: bytes) -> Walk:
    """Everything a pod asks for is behind its link, but itself; what is no question is for the host."""
    if len(frame) < 42:
        raise DroppedError(INVALID, Direction.EGRESS)
    to, message = frame[:6], frame[14:42]
    asker_mac, asker_ip, target_ip = message[8:14], message[14:18], message[24:28]
    asks = message[:8] == _ARP_REQUEST and target_ip != pod.ip.packed
    if not asks or to not in {_BROADCAST, pod.host_mac}:
        return Walk(PASS, frame)
    reply = _ARP_REQUEST[:6] + b"\0\2" + pod.host_mac + target_ip + asker_mac + asker_ip
    return Walk(REDIRECT, asker_mac + pod.host_mac + frame[12:14] + reply + frame[42:])
