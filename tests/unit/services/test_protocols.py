"""Restarts with and without protocol differentiation: services have no gap."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from cells.services import (
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    ServiceType,
)
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import served_frontends
from cells.services.control.target import ServicesTarget
from cells.services.map_entries import Batch, read
from cells.services.model.claims import frontends
from tests.unit.services.agent import FakeServiceMaps

pytestmark = pytest.mark.anyio
COUNT = 300
"""More services than are written at once."""


class Kernel(FakeServiceMaps):
    """Maps that note the least number of addresses that have been served."""

    def __init__(self) -> None:
        super().__init__()
        self.least = 0

    def write(self, batch: Batch) -> None:
        super().write(batch)
        self.least = min(self.least, len(self._served()))

    def _served(self) -> set[bytes]:
        return {where.key[:6] for where in self.entries if where.map == "cilium_lb4_services_v2"}


def service(number: int, protocol: int, state: BackendState) -> Frontend:
    key = FrontendKey(ServiceAddress(ip_address(f"10.96.{number >> 8}.{number & 255}"), 80, protocol))
    backends = (
        Backend(ServiceAddress(ip_address("10.0.0.1"), 8080, protocol)),
        Backend(ServiceAddress(ip_address(f"10.1.{number >> 8}.{number & 255}"), 8080, protocol), state),
    )
    return Frontend(key, ServiceType.CLUSTER_IP, ServiceName("shop", f"s{number}"), backends)


def target(kernel: Kernel, protocol: int, second: BackendState) -> ServicesTarget:
    """An agent's services, each with two backends."""
    table, served = frontends(), served_frontends()
    with table.txn() as rows:
        rows.replace_all(service(number, protocol, second) for number in range(COUNT))
    options = LoadBalancerOptions(bpf_lb_proto_diff=protocol != 0)
    return ServicesTarget(table, LoadBalancer(options, served), kernel, served)


@pytest.mark.parametrize(("before", "after"), [(0, 6), (6, 0)])
async def test_services_are_served_while_an_agent_takes_over_from_one_with_other_keys(
    before: int, after: int
) -> None:
    kernel = Kernel()
    await target(kernel, before, BackendState.ACTIVE).observe()
    kernel.least = COUNT
    await target(kernel, after, BackendState.ACTIVE).observe()
    assert kernel.least == COUNT
    found = read(await kernel.dump(), (4, 6))
    assert {one.frontend.key.address.protocol for one in found.frontends} == {after}
    assert len(found.frontends) == COUNT
    assert {backend.address.protocol for backend in found.backends.values()} == {after}


async def test_a_backend_that_was_taken_out_of_use_stays_so() -> None:
    kernel = Kernel()
    await target(kernel, 0, BackendState.MAINTENANCE).observe()
    await target(kernel, 6, BackendState.ACTIVE).observe()
    found = read(await kernel.dump(), (4, 6))
    states = {str(one.address.ip): one.state for one in found.backends.values()}
    assert states.pop("10.0.0.1") is BackendState.ACTIVE
    assert set(states.values()) == {BackendState.MAINTENANCE}


@pytest.mark.parametrize("protocol", [0, 6])
async def test_a_start_with_empty_maps_creates_no_address_without_protocol_per_service(
    protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = target(Kernel(), protocol, BackendState.ACTIVE)
    created = []
    read_address = ServiceAddress.read

    def read_and_count(raw: bytes) -> ServiceAddress:
        created.append(raw)
        return read_address(raw)

    monkeypatch.setattr(ServiceAddress, "read", read_and_count)
    assert len(await own.observe()) == COUNT
    assert created == []
