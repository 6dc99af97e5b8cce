"""Node port connections under random events of clients and backends, against a plain model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.packet import Packet

from cells.services import BackendState, ServiceFlag
from tests.kernel.datapath.packets import from_pod
from tests.kernel.datapath.world import REDIRECT, A, B, Pod
from tests.kernel.datapath_nodeport.world import (
    CLIENT,
    CLIENT_MAC,
    DIRECT,
    ELSEWHERE,
    HOP,
    NODE_PORT,
    OWN_MAC,
    SERVICE,
    NodePortWorld,
    segment,
)
from tests.kernel.datapath_services.packets import ends, intact
from tests.kernel.datapath_services.services import TARGET, Backend, ServiceModel
from tests.support.examples import scaled

pytestmark = pytest.mark.kernel

PODS: dict[int, Pod] = {1: A, 2: B}
"""Backends by number that are here; 3 and 4 are elsewhere."""
NUMBERS = (1, 2, 3, 4)
SYN, NOT_SYN = "S", "A"


@dataclass
class Model(ServiceModel):
    """Also the port that each connection has elsewhere."""

    ports: dict[tuple[str, int, int], int] = field(default_factory=dict)


class Node:
    """The programs, and the model of them."""

    def __init__(self, world: NodePortWorld, version: int) -> None:
        world.reset()
        self.world = world
        self.version = version
        self.model = Model()
        self.client, self.service = CLIENT[version], SERVICE[version]
        self.backends_change({})

    def address(self, number: int) -> str:
        pod = PODS.get(number)
        if pod is None:
            return ELSEWHERE[self.version].format(number)
        return pod.ip if self.version == 4 else pod.ip6

    def backends_change(self, states: dict[int, BackendState]) -> None:
        """As the agent does: the new ones first, then the service, then those that are removed."""
        wanted = [Backend(number, self.address(number), state=state) for number, state in states.items()]
        flags = ServiceFlag.ROUTABLE | ServiceFlag.NODE_PORT
        self.world.services.serve(self.service, wanted, port=NODE_PORT, flags=flags)
        for number in self.model.backends.keys() - states.keys():
            self.world.services.remove_backend(Backend(number, self.address(number)))
        self.model.backends = states

    def client_sends(self, kind: str, sport: int, flags: str) -> None:
        connection = kind, sport
        allowed = self.model.serves(connection, begins=kind == "tcp" and flags == SYN)
        sent = segment(kind, self.client, self.service, sport, NODE_PORT, flags)
        outcome = self.world.client_sends(sent)
        assert outcome.action == REDIRECT
        if not allowed:  # answered that there is no backend
            assert (outcome.packet.src, outcome.packet.dst) == (OWN_MAC, CLIENT_MAC)
            return
        assert intact(outcome.packet)
        source, from_port, destination, port = ends(outcome.packet)
        assert port == TARGET
        (number,) = (each for each in allowed if self.address(each) == destination)
        self.model.served[connection] = number
        if number in PODS:
            assert (source, from_port) == (self.client, sport)
            assert outcome.packet.dst == PODS[number].mac
            self.pod_answers(kind, sport, PODS[number])
            return
        assert source == DIRECT[self.version]
        assert outcome.packet.dst == HOP
        assert self.model.ports.setdefault((kind, sport, number), from_port) == from_port
        others = [key for key, value in self.model.ports.items() if value == from_port]
        assert [key for key in others if key[0] == kind and key[2] == number] == [(kind, sport, number)]
        self.node_answers(kind, sport, number, from_port)

    def pod_answers(self, kind: str, sport: int, pod: Pod) -> None:
        answer = segment(kind, self.address(pod.id - 9), self.client, TARGET, sport, NOT_SYN)
        self.reaches_client(self.world.pod_sends(pod, from_pod(pod) / answer).packet, sport)

    def node_answers(self, kind: str, sport: int, number: int, port: int) -> None:
        answer = segment(kind, self.address(number), DIRECT[self.version], TARGET, port, NOT_SYN)
        self.reaches_client(self.world.comes_back(answer).packet, sport)

    def reaches_client(self, packet: Packet, sport: int) -> None:
        assert ends(packet) == (self.service, NODE_PORT, self.client, sport)
        assert intact(packet)
        assert packet.dst == HOP


states = st.sampled_from((BackendState.ACTIVE, BackendState.ACTIVE, BackendState.TERMINATING))
changes = st.dictionaries(st.sampled_from(NUMBERS), states, max_size=4)
packets = st.tuples(
    st.sampled_from(("tcp", "udp")),
    st.sampled_from((20000, 33000, 33001)),
    st.sampled_from((SYN, NOT_SYN, NOT_SYN)),
)


@given(
    version=st.sampled_from((4, 6)),
    steps=st.lists(st.one_of(packets, packets, packets, changes), max_size=30),
)
@settings(
    max_examples=scaled(40),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_connections_to_services_match_the_model(
    loaded_world: NodePortWorld, version: int, steps: list[tuple[str, int, str] | dict[int, BackendState]]
) -> None:
    node = Node(loaded_world, version)
    node.backends_change({1: BackendState.ACTIVE, 3: BackendState.ACTIVE})
    for step in steps:
        if isinstance(step, dict):
            node.backends_change(step)
        else:
            node.client_sends(*step)
