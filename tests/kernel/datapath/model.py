"""The packet path in plain Python: what happens to a packet, and which state it leaves.

To learn the path, read top-down from pod_sends() and host_sends(). The programs in cells/datapath/bpf do the
same to any packet; test_model.py checks that.
"""

import struct
from collections import ChainMap
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

from cells.maps.records.endpoints import PolicyKey
from tests.kernel.datapath.model_conntrack import Conntrack, Key, Status
from tests.kernel.datapath.model_icmp6 import (
    QUOTED,
    QUOTED_TCP,
    advertisement,
    hops_used_up,
    link_local,
    solicited,
)
from tests.kernel.datapath.model_packet import (
    ETHERNET,
    ICMP,
    ICMPV6,
    INVALID,
    IPV4,
    IPV6,
    TCP,
    Address,
    Direction,
    Flow,
    RefusedError,
    answered,
    hop,
    quoted,
    read,
)
from tests.kernel.datapath.model_policy import decide

PASS, DROP, REDIRECT = 0, 2, 7
FORWARDED: Final = 0
INVALID_SOURCE, UNKNOWN_NETWORK, UNKNOWN_TARGET, UNROUTABLE = 132, 139, 150, 151
UNSUPPORTED_LINK, HOPS_EXCEEDED = 166, 196
HOST, WORLD = 1, 2
_ARP, _LOWEST_TYPE = 0x0806, 0x0600
_BROADCAST: Final = b"\xff" * 6
_ARP_REQUEST: Final = struct.pack(">HHBBH", 1, IPV4, 6, 4, 1)
_NEIGHBOUR_SOLICITATION: Final = 135


@dataclass(slots=True)
class ModelPod:
    """A pod of the node."""

    ip: IPv4Address
    ip6: IPv6Address
    identity: int
    mac: bytes
    host_mac: bytes
    rules: dict[PolicyKey, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Walk:
    """The result for a frame: the action, the outgoing frame, and its count in the metrics."""

    action: int
    frame: bytes
    counted: tuple[int, int] | None = None
    """Reason and direction. Nothing is counted twice; ARP and packets for the host are not counted."""


class DroppedError(Exception):
    """Ends the processing of a packet with a drop reason."""

    def __init__(self, reason: int, direction: Direction) -> None:
        super().__init__(reason, direction)
        self.cause = (reason, int(direction))


class Model:
    """A node with pods, its own addresses, and networks outside, with identities for some of them."""

    def __init__(self, pods: list[ModelPod], own: set[Address], router6: IPv6Address, net_mac: bytes) -> None:
        self.pods: dict[Address, ModelPod] = {pod.ip: pod for pod in pods} | {pod.ip6: pod for pod in pods}
        self.own = own
        self.router6 = router6
        self.net_mac = net_mac
        self.identities: dict[IPv4Network | IPv6Network, int] = {}
        self.fragments: dict[tuple[Address, Address, int, int], tuple[int, int]] = {}
        self.conntrack = Conntrack()

    def pod_sends(self, pod: ModelPod, frame: bytes, now: int) -> Walk:
        """Process a pod's frame at the host's end of its link."""
        try:
            return self._pod_sends(pod, frame, now)
        except DroppedError as dropped:
            return Walk(DROP, frame, dropped.cause)

    def _pod_sends(self, pod: ModelPod, frame: bytes, now: int) -> Walk:
        kind = ether_type(frame)
        if kind in {IPV4, IPV6}:
            return self._pod_sends_ip(pod, frame, now)
        if kind == _ARP:
            return answer_arp(pod, frame)
        reason = UNSUPPORTED_LINK if kind < _LOWEST_TYPE else UNKNOWN_NETWORK
        raise DroppedError(reason, Direction.EGRESS)

    def _pod_sends_ip(self, pod: ModelPod, frame: bytes, now: int) -> Walk:
        noted: dict[tuple[Address, Address, int, int], tuple[int, int]] = {}
        try:
            flow = read(frame, ChainMap(noted, self.fragments))
        except RefusedError as refused:
            stranger = refused.source not in {None, pod.ip, pod.ip6}
            raise DroppedError(INVALID_SOURCE if stranger else refused.reason, Direction.EGRESS) from None
        own = flow.source in {pod.ip, pod.ip6}
        solicits = (flow.protocol, flow.policy_port) == (ICMPV6, _NEIGHBOUR_SOLICITATION)
        local = flow.source.is_link_local or flow.source.is_unspecified
        if not own and not (solicits and local and not noted):
            raise DroppedError(INVALID_SOURCE, Direction.EGRESS)
        self.fragments |= noted
        if solicits:
            return self._answer_neighbour(pod, flow, frame)
        status = self.conntrack.look_up(flow, Direction.EGRESS, now)
        receiver = self.pods.get(flow.destination)
        peer = self._identity(flow.destination)
        self._policy(status, pod, flow, Direction.EGRESS, peer, pod.identity, now)
        if flow.hops <= 1 and (receiver is not None or self._leaves_as_ipv6(flow)):
            quoted = QUOTED_TCP if flow.protocol == TCP and flow.plain else QUOTED
            if flow.source.version == 4 or len(frame) < ETHERNET + quoted:
                raise DroppedError(HOPS_EXCEEDED, Direction.EGRESS)
            return Walk(REDIRECT, hops_used_up(frame, pod.host_mac, self.router6, pod.ip6, quoted))
        if receiver is None:
            return Walk(PASS, frame, (FORWARDED, int(Direction.EGRESS)))
        return self._deliver(receiver, flow, frame, pod.identity, now)

    def _leaves_as_ipv6(self, flow: Flow) -> bool:
        """Return whether an IPv6 packet, but no error, leaves the node: the host answers IPv4 senders."""
        goes = flow.destination
        routed = not (goes in self.own or goes.is_link_local or goes.is_multicast)
        return goes.version == 6 and routed and not flow.related

    def _answer_neighbour(self, pod: ModelPod, flow: Flow, frame: bytes) -> Walk:
        """Answer for the gateway and the node's pods; the node's own addresses answer themselves."""
        target = solicited(frame)
        if flow.hops != 255 or not flow.plain or target is None:
            raise DroppedError(INVALID, Direction.EGRESS)
        goes = flow.destination
        if not (goes == target or goes.is_link_local or goes.is_multicast):
            raise DroppedError(INVALID, Direction.EGRESS)
        known = flow.source in {pod.ip6, IPv6Address("::"), link_local(pod.mac)}
        if target == pod.ip6 or target.is_link_local or target.is_multicast:
            if not known:
                raise DroppedError(INVALID_SOURCE, Direction.EGRESS)
            return Walk(PASS, frame)
        if target == self.router6:
            return Walk(REDIRECT, advertisement(frame, target, pod.host_mac, self.router6, router=True))
        if target in self.own and known:
            return Walk(PASS, frame)
        if target not in self.pods and target not in self.own:
            raise DroppedError(UNKNOWN_TARGET, Direction.EGRESS)
        return Walk(REDIRECT, advertisement(frame, target, pod.host_mac, self.router6, router=False))

    def host_sends(self, frame: bytes, now: int) -> Walk:
        """Process a frame that the host routes to a pod through cilium_host."""
        try:
            return self._host_sends(frame, now)
        except DroppedError as dropped:
            return Walk(DROP, frame, dropped.cause)

    def _host_sends(self, frame: bytes, now: int) -> Walk:
        to_net = Walk(PASS, self.net_mac + frame[6:])
        if ether_type(frame) not in {IPV4, IPV6}:
            return to_net
        try:
            flow = read(frame, self.fragments)
        except RefusedError as refused:
            if refused.reason != INVALID and for_neighbours(frame):
                return to_net
            raise DroppedError(refused.reason, Direction.INGRESS) from None
        if flow.destination in self.own or for_neighbours(frame):
            return to_net
        receiver = self.pods.get(flow.destination)
        if receiver is None:  # handed back, the stack would send it here again
            raise DroppedError(UNROUTABLE, Direction.INGRESS)
        if flow.hops <= 1:
            raise DroppedError(HOPS_EXCEEDED, Direction.INGRESS)
        return self._deliver(receiver, flow, frame, self._identity(flow.source), now)

    def _deliver(self, pod: ModelPod, flow: Flow, frame: bytes, sender: int, now: int) -> Walk:
        status = self.conntrack.look_up(flow, Direction.INGRESS, now)
        self._policy(status, pod, flow, Direction.INGRESS, sender, sender, now)
        return Walk(REDIRECT, hop(frame, pod.host_mac, pod.mac), (FORWARDED, int(Direction.INGRESS)))

    def _policy(
        self,
        status: Status,
        pod: ModelPod,
        flow: Flow,
        direction: Direction,
        peer: int,
        source: int,
        now: int,
    ) -> None:
        """Raise unless policy allows the packet; for a reply, policy must still allow the flow's start."""
        if status is Status.RELATED:
            self._decide_error(pod, flow, direction, peer, now)
            return
        if status is Status.REPLY:
            self._decide_answered(pod, flow, direction, peer)
            return
        refused = decide(pod.rules, flow, direction, peer)
        if refused is not None:
            raise DroppedError(refused, direction)
        if status is Status.NEW:
            self.conntrack.create(flow, direction, source, now)
        elif direction is Direction.INGRESS and self.conntrack.found is not None:
            self.conntrack.found.source_identity = source

    def _decide_answered(self, pod: ModelPod, flow: Flow, direction: Direction, peer: int) -> None:
        """Decide whether policy still allows the flow that this packet answers, with this peer."""
        entry = self.conntrack.found
        if direction is Direction.EGRESS and entry is not None:
            peer = entry.source_identity
        began = Direction.INGRESS if direction is Direction.EGRESS else Direction.EGRESS
        refused = decide(pod.rules, answered(flow), began, peer)
        if refused is not None:
            self.conntrack.not_prolonged()
            raise DroppedError(refused, direction)

    def _decide_error(self, pod: ModelPod, flow: Flow, direction: Direction, peer: int, now: int) -> None:
        """Decide whether policy allows the flow that the error quotes; else check the error itself."""
        about = quoted(flow)
        if about is not None and (about.source, about.destination) == (flow.destination, flow.source):
            back = Direction.INGRESS if direction is Direction.EGRESS else Direction.EGRESS
            began = self.conntrack.alive(Key.started_by(about, back), now)
            answers = self.conntrack.alive(Key.answered_by(about, back), now)
            if began is not None:
                asker = began.source_identity if back is Direction.INGRESS else peer
                if decide(pod.rules, about, back, asker) is None:
                    return
            elif answers is not None:
                asker = answers.source_identity if direction is Direction.INGRESS else peer
                port = about.policy_port if about.protocol in {ICMP, ICMPV6} else about.sport
                if decide(pod.rules, replace(about, policy_port=port), direction, asker) is None:
                    return
        refused = decide(pod.rules, flow, direction, peer)
        if refused is not None:
            self.conntrack.not_prolonged()
            raise DroppedError(refused, direction)

    def _identity(self, ip: Address) -> int:
        """Return the identity of an address: node's records first, then longest prefix, else world."""
        if ip in self.own:
            return HOST
        if ip in self.pods:
            return self.pods[ip].identity
        known = [network for network in self.identities if ip in network]
        return self.identities[max(known, key=lambda network: network.prefixlen)] if known else WORLD


def ether_type(frame: bytes) -> int:
    """Return the type field, or the length of an 802.3 frame."""
    return int.from_bytes(frame[12:14], "big")


def for_neighbours(frame: bytes) -> bool:
    """Return whether an IPv6 destination is multicast or link-local."""
    if ether_type(frame) != IPV6 or len(frame) < 54:
        return False
    to = IPv6Address(frame[38:54])
    return to.is_link_local or to.is_multicast


def answer_arp(pod: ModelPod, frame: bytes) -> Walk:
    """Answer ARP for every address but the pod's own; other packets go to the host."""
    if len(frame) < 42:
        raise DroppedError(INVALID, Direction.EGRESS)
    to, message = frame[:6], frame[14:42]
    asker_mac, asker_ip, target_ip = message[8:14], message[14:18], message[24:28]
    asks = message[:8] == _ARP_REQUEST and target_ip != pod.ip.packed
    if not asks or to not in {_BROADCAST, pod.host_mac}:
        return Walk(PASS, frame)
    reply = _ARP_REQUEST[:6] + b"\0\2" + pod.host_mac + target_ip + asker_mac + asker_ip
    return Walk(REDIRECT, asker_mac + pod.host_mac + frame[12:14] + reply + frame[42:])
