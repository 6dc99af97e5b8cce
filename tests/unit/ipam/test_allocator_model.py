"""Random requests leave the allocator equal to a plain dictionary of owners."""

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cells.node.ipam.allocator import EXPIRATION, Allocator
from cells.node.ipam.ranges import IpamError
from tests.support.examples import scaled
from tests.unit.ipam.clock import FakeClock

offsets = st.integers(0, 15)
POOL = "default"


class AllocatorMachine(RuleBasedStateMachine):
    """The model: owners, exclusions and deadlines, each a dictionary."""

    @initialize(bits=st.integers(28, 32))
    def start(self, bits: int) -> None:
        self.network = IPv4Network(("10.0.1.0", bits))
        self.hosts = set(self.network.hosts())
        self.clock = FakeClock()
        self.ipam = Allocator(POOL, self.clock)
        self.ipam.use(self.network)
        self.owners: dict[IPv4Address, str] = {}
        self.excluded: dict[IPv4Address, str] = {}
        self.timers: dict[IPv4Address, tuple[str, float]] = {}
        self.count = 0

    def address(self, offset: int) -> IPv4Address:
        return self.network.network_address + offset

    @rule(expiring=st.booleans())
    def allocate_next(self, expiring: bool) -> None:
        self.count += 1
        owner = f"default/pod-{self.count}"
        free = self.hosts - self.owners.keys() - self.excluded.keys()
        allocate_next = self.ipam.allocate_next_expiring if expiring else self.ipam.allocate_next
        if not free:
            with pytest.raises(IpamError, match="range is full"):
                allocate_next(owner)
            for ip in self.hosts & self.excluded.keys() - self.owners.keys():
                self.owners[ip] = f"{self.excluded[ip]} (excluded)"  # looking for a free one, it met them all
            return
        (got,) = allocate_next(owner)
        assert isinstance(got.ip, IPv4Address)
        assert got.ip in free
        self.owners[got.ip] = owner
        if expiring:
            self.timers[got.ip] = got.expiration_uuid, self.clock.time + EXPIRATION
        for ip in self.excluded:
            if ip not in self.owners and self.ipam.owner(ip) is not None:
                self.owners[ip] = f"{self.excluded[ip]} (excluded)"

    @rule(offset=offsets)
    def allocate(self, offset: int) -> None:
        ip = self.address(offset)
        allowed = ip in self.hosts and ip not in self.excluded and ip not in self.owners
        try:
            self.ipam.allocate(ip, "restored", POOL)
        except IpamError:
            assert not allowed
        else:
            assert allowed
            self.owners[ip] = "restored"

    @rule(offset=offsets)
    def release(self, offset: int) -> None:
        ip = self.address(offset)
        self.ipam.release(ip, POOL)
        self.owners.pop(ip, None)
        self.timers.pop(ip, None)

    @rule(offset=offsets)
    def exclude(self, offset: int) -> None:
        ip = self.address(offset)
        self.ipam.exclude(ip, "node-ip")
        self.excluded[ip] = "node-ip"

    @rule(offset=offsets, right=st.booleans())
    def stop_expiration(self, offset: int, right: bool) -> None:
        ip = self.address(offset)
        token = self.timers[ip][0] if right and ip in self.timers else "wrong"
        try:
            self.ipam.stop_expiration(ip, POOL, token)
        except IpamError:
            assert not right or ip not in self.timers
        else:
            del self.timers[ip]

    @rule(seconds=st.sampled_from([1.0, EXPIRATION / 3, EXPIRATION]))
    def time_passes(self, seconds: float) -> None:
        self.clock.time += seconds
        due = {ip for ip, (_, deadline) in self.timers.items() if deadline <= self.clock.time}
        assert {lost.ip for lost in self.ipam.release_expired()} == due
        for ip in due:
            del self.owners[ip], self.timers[ip]

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "ipam"):
            return
        assert self.ipam.dump() == {str(ip): owner for ip, owner in self.owners.items()}
        capacity = max(self.network.num_addresses - 2, 0)
        assert self.ipam.status() == f"IPv4: {len(self.owners)}/{capacity} allocated from {self.network}, "


TestAllocatorModel = AllocatorMachine.TestCase
TestAllocatorModel.settings = settings(max_examples=scaled(60), stateful_step_count=40, deadline=None)
