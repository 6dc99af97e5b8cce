"""Random endpoint requests: endpoints and kernel state equal a plain model."""

import shutil
import tempfile
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cells.cluster.ipcache.rows import prefix_of
from cells.endpoint import EndpointError, EndpointRequest, RegenerationLevel, State
from cells.endpoint.model import STATUS_LOG_SIZE
from cells.policy import Enforcement
from cells.policy.maps import ALLOW_ALL
from tests.support.examples import scaled
from tests.unit.endpoint.fakes import Node, request

NUMBERS = st.integers(1, 4)
STEPS = ["", "", "", "fill", "put_config", "put_lxc", "put_ipcache", "attach", "release", "drop_lxc"]


@dataclass
class Known:
    """An endpoint as the model has it."""

    request: int
    addresses: tuple[IPv6Address | IPv4Address, ...]
    healthy: bool = True
    enforced: bool = False


class Endpoints(RuleBasedStateMachine):
    """Requests 1 to 4 are made, repeated, removed and regenerated, with a kernel that refuses at times."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.node = Node(self.directory)
        self.node.kernel.pool = list(range(1, 9))
        self.known: dict[int, Known] = {}
        self.enforced = False

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule(number=NUMBERS, families=st.sampled_from(["4", "6", "64"]), refuse=st.sampled_from(STEPS))
    def create(self, number: int, families: str, refuse: str) -> None:
        ipv4 = IPv4Address(f"10.0.1.{number}") if "4" in families else None
        ipv6 = IPv6Address(f"fd00::{number}") if "6" in families else None
        wanted = request(number, ipv4=ipv4, ipv6=ipv6)
        exists = any(one.request == number for one in self.known.values())
        before = dict(self.node.kernel.policies)
        status = self.created(wanted, refuse)
        if exists:
            assert status == 400
        elif status == 500:
            assert refuse in {"fill", "put_config", "put_lxc", "put_ipcache", "attach"}
        if status != 201:
            assert self.node.kernel.policies == before

    def created(self, wanted: EndpointRequest, refuse: str) -> int:
        """Ask for the endpoint; the status of the answer, as the API would give it."""
        self.node.kernel.refuse = refuse
        try:
            made = self.node.create(wanted)
        except EndpointError as error:
            return error.status
        finally:
            self.node.kernel.refuse = ""
        assert made.addresses == wanted.addresses
        self.known[made.id] = Known(int(made.container_id[3:]), made.addresses, enforced=self.enforced)
        return 201

    @rule(number=NUMBERS, refuse=st.sampled_from(["", "drop_lxc", "drop_ipcache", "drop_config"]))
    def delete(self, number: int, refuse: str) -> None:
        for one in self.node.endpoints.by_container(f"cid{number}"):
            self.node.kernel.refuse = refuse
            problems = self.node.endpoints.delete(one)
            assert len(problems) == (1 if refuse else 0)
            self.node.kernel.refuse = ""
            assert self.node.endpoints.delete(one) == ()
            self.sweep(one.id, one.ifindex)
            del self.known[one.id]

    def sweep(self, number: int, ifindex: int) -> None:
        """What a refusing kernel did not remove goes with the next start."""
        kernel = self.node.kernel
        for address in self.known[number].addresses:
            kernel.lxc.pop(address, None)
            kernel.prefixes.rows.pop(prefix_of(address), None)
        kernel.configs.pop(ifindex, None)

    @rule(number=NUMBERS, refuse=st.sampled_from(["", "fill", "put_config"]))
    def enforce(self, number: int, refuse: str) -> None:
        """The policy of one endpoint is applied anew, the node's having changed or not."""
        self.node.kernel.refuse = refuse
        for each, known in self.known.items():
            if known.request == number:
                known.healthy = not self.node.build(each, RegenerationLevel.POLICY)
                assert known.healthy == (not refuse)
                if refuse != "fill":  # then its map has it, whatever else went wrong
                    known.enforced = self.enforced
        self.node.kernel.refuse = ""

    @rule()
    def change_policy(self) -> None:
        self.enforced = not self.enforced
        self.node.policy.enforce(Enforcement.ALWAYS if self.enforced else Enforcement.DEFAULT)

    @invariant()
    def the_list_is_the_models(self) -> None:
        found = {each.id: each for each in self.node.endpoints.all()}
        assert {each: one.addresses for each, one in found.items()} == {
            each: one.addresses for each, one in self.known.items()
        }
        for each, one in found.items():
            known = self.known[each]
            assert one.state is State.READY
            assert (self.node.endpoints.shown_state(one) is State.READY) == known.healthy
            assert self.node.policies.status(each).ingress_enforced == known.enforced
            assert 0 < len(self.node.endpoints.status(each).entries()) <= STATUS_LOG_SIZE

    @invariant()
    def every_name_leads_to_its_endpoint_and_no_other(self) -> None:
        names = {f"ipv{ip.version}:{ip}": each for each, one in self.known.items() for ip in one.addresses}
        names |= {f"container-id:cid{one.request}": each for each, one in self.known.items()}
        for number in range(1, 5):
            for name in (f"ipv4:10.0.1.{number}", f"ipv6:fd00::{number}", f"container-id:cid{number}"):
                found = self.node.endpoints.lookup(name)
                assert (found.id if found else None) == names.get(name)

    @invariant()
    def the_kernel_and_the_disk_hold_what_the_list_states(self) -> None:
        kernel = self.node.kernel
        owners = {ip: each for each, one in self.known.items() for ip in one.addresses}
        assert kernel.lxc == owners
        assert set(kernel.ipcache) == set(owners)
        assert set(kernel.configs.values()) == set(self.known)
        assert self.node.saved == sorted(map(str, self.known))
        for each, one in self.known.items():
            entries = kernel.policies[each].entries
            if one.healthy:
                assert entries == ({} if one.enforced else ALLOW_ALL)


TestEndpoints = pytest.mark.timeout(300)(Endpoints.TestCase)
TestEndpoints.settings = settings(
    max_examples=scaled(60),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
