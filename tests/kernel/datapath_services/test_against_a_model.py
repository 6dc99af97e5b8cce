"""Service connections under random events of clients and backends, against a plain model."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cells.services import BackendState, ServiceFlag
from tests.kernel.datapath.packets import from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import OK, REDIRECT, A, World
from tests.kernel.datapath_services.packets import ends, intact
from tests.kernel.datapath_services.services import PORT, TARGET, VIP, VIP6, Backend, ServiceModel, Services
from tests.support.examples import scaled

pytestmark = pytest.mark.kernel

SPORTS = (30000, 30001, 30002)
NUMBERS = (1, 2, 3, 4)
SYN, NOT_SYN = "S", "A"


class Pair:
    """The programs, and the model of them."""

    def __init__(self, world: World, version: int) -> None:
        world.reset()
        self.world = world
        self.services = Services(world.maps)
        self.model = ServiceModel()
        self.vip, self.client = (VIP, A.ip) if version == 4 else (VIP6, A.ip6)
        self.address = "203.0.113.{}" if version == 4 else "2001:db8::{}"
        self.services.serve(self.vip, [], flags=ServiceFlag.ROUTABLE)

    def backends_change(self, states: dict[int, BackendState]) -> None:
        """As the agent does: the new ones first, then the service, then those that are removed."""
        wanted = [
            Backend(number, self.address.format(number), state=state) for number, state in states.items()
        ]
        self.services.serve(self.vip, wanted)
        for number in self.model.backends.keys() - states.keys():
            self.services.remove_backend(Backend(number, self.address.format(number)))
        self.model.backends = states

    def client_sends(self, kind: str, sport: int, flags: str) -> None:
        connection = kind, sport
        if kind == "tcp":
            packet = tcp(self.client, self.vip, flags, sport=sport, dport=PORT)
        else:
            packet = udp(self.client, self.vip, sport=sport, dport=PORT)
        allowed = self.model.serves(connection, begins=kind == "tcp" and flags == SYN)
        outcome = self.world.pod_sends(A, from_pod(A) / packet)
        if not allowed:
            assert (outcome.action, outcome.counted) == (REDIRECT, {})  # answered that there is no backend
            return
        assert outcome.action == OK
        assert intact(outcome.packet)
        source, from_port, destination, port = ends(outcome.packet)
        assert (source, from_port, port) == (self.client, sport, TARGET)
        (number,) = (each for each in allowed if self.address.format(each) == destination)
        self.model.served[connection] = number
        self.backend_answers(kind, sport, number)

    def backend_answers(self, kind: str, sport: int, number: int) -> None:
        backend = self.address.format(number)
        if kind == "tcp":
            packet = tcp(backend, self.client, "A", sport=TARGET, dport=sport)
        else:
            packet = udp(backend, self.client, sport=TARGET, dport=sport)
        outcome = self.world.host_sends(from_host() / packet)
        assert outcome.action == REDIRECT
        assert ends(outcome.packet) == (self.vip, PORT, self.client, sport)
        assert intact(outcome.packet)


states = st.sampled_from((BackendState.ACTIVE, BackendState.ACTIVE, BackendState.TERMINATING))
changes = st.dictionaries(st.sampled_from(NUMBERS), states, max_size=4)
packets = st.tuples(
    st.sampled_from(("tcp", "udp")), st.sampled_from(SPORTS), st.sampled_from((SYN, NOT_SYN, NOT_SYN))
)


@given(
    version=st.sampled_from((4, 6)),
    steps=st.lists(st.one_of(packets, packets, packets, changes), max_size=40),
)
@settings(
    max_examples=scaled(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_connections_to_services_match_the_model(
    loaded_world: World, version: int, steps: list[tuple[str, int, str] | dict[int, BackendState]]
) -> None:
    pair = Pair(loaded_world, version)
    pair.backends_change({1: BackendState.ACTIVE, 2: BackendState.ACTIVE})
    for step in steps:
        if isinstance(step, dict):
            pair.backends_change(step)
        else:
            pair.client_sends(*step)
