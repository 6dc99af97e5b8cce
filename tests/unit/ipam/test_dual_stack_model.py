"""Random dual-stack requests assign both families or none, and equal plain sets."""

from ipaddress import IPv4Network, IPv6Network, ip_address

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.node.ipam.allocator import EXPIRATION, Allocator
from cells.node.ipam.ranges import IpamError
from tests.support.examples import scaled
from tests.unit.ipam.clock import FakeClock

families = st.sampled_from([None, Family.IPV6, Family.IPV4])


class DualStackMachine(RuleBasedStateMachine):
    """The model: who has what, and until when without confirmation."""

    @initialize(bits4=st.integers(28, 32), bits6=st.integers(124, 128))
    def start(self, bits4: int, bits6: int) -> None:
        self.networks: dict[Family, IPNetwork] = {
            Family.IPV6: IPv6Network(("fd00::", bits6)),
            Family.IPV4: IPv4Network(("10.0.1.0", bits4)),
        }
        self.sizes = {
            family: network.num_addresses - 2 if network.num_addresses > 2 else network.num_addresses
            for family, network in self.networks.items()
        }
        self.clock = FakeClock()
        self.ipam = Allocator("default", self.clock)
        self.ipam.use(*self.networks.values())
        self.taken: dict[IPAddress, float | None] = {}

    def left(self, family: Family) -> int:
        return self.sizes[family] - sum(Family.of(ip) is family for ip in self.taken)

    @rule(family=families, expiring=st.booleans())
    def allocate(self, family: Family | None, expiring: bool) -> None:
        asked = [Family.IPV6, Family.IPV4] if family is None else [family]
        allocate = self.ipam.allocate_next_expiring if expiring else self.ipam.allocate_next
        if any(self.left(each) == 0 for each in asked):
            with pytest.raises(IpamError, match="range is full"):
                allocate("default/web", family=family)
            return
        got = allocate("default/web", family=family)
        assert [Family.of(each.ip) for each in got] == asked
        assert not {each.ip for each in got} & self.taken.keys()
        self.taken |= {each.ip: self.clock.time + EXPIRATION if expiring else None for each in got}

    @rule(which=st.integers(0, 30))
    def release(self, which: int) -> None:
        for ip in sorted(self.taken, key=str)[which : which + 1]:
            self.ipam.release(ip, "default")
            del self.taken[ip]

    @rule(seconds=st.sampled_from([1.0, EXPIRATION / 2]))
    def time_passes(self, seconds: float) -> None:
        self.clock.time += seconds
        due = {ip for ip, at in self.taken.items() if at is not None and at <= self.clock.time}
        assert {lost.ip for lost in self.ipam.release_expired()} == due
        for ip in due:
            del self.taken[ip]

    @invariant()
    def agrees_with_the_model(self) -> None:
        if hasattr(self, "ipam"):
            assert {ip_address(text) for text in self.ipam.dump()} == self.taken.keys()


TestDualStackModel = DualStackMachine.TestCase
TestDualStackModel.settings = settings(max_examples=scaled(40), stateful_step_count=40, deadline=None)
