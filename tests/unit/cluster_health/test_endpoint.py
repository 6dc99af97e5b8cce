"""The health endpoint is created at the start, and again when it is removed or silent."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from cells.base.addresses import IPAddress
from cells.cluster.identity.numbers import HEALTH
from cells.endpoint import Endpoint, EndpointRequest, Endpoints
from cells.health.endpoint import (
    CONTROLLER,
    INTERVAL,
    UNREACHABLE_TIMEOUT,
    HealthAddresses,
    HealthEndpoint,
    HealthLink,
    HealthNetwork,
)
from cells.health.paths import Outcome
from cells.health.prober import NodeHealthSettings, ProbeTransport
from cells.maps.policy_maps import PolicyMaps
from cells.observe import controllers
from cells.observe.bootstrap import PodsExposed
from cells.observe.controllers import Controllers, ControllerState
from lifecycle import Hive, config, invoke, module, provide
from lifecycle.testing import VirtualClock, fake
from tests.unit.endpoint.fakes import Node

pytestmark = pytest.mark.anyio

ADDRESS = IPv4Address("10.0.1.9")


class FakeLink:
    """One end of a link, which counts what is done with it."""

    def __init__(self, number: int) -> None:
        self.request = EndpointRequest(
            container_name="cilium-health",
            ifname="lxc_health",
            ifindex=number,
            pod_mac=bytes(6),
            host_mac=bytes(6),
            ipv4=ADDRESS,
            reserved=HEALTH,
        )
        self.wrong = ""
        self.done: list[str] = []
        self.changed: Callable[[], object] = list

    def connect(self) -> None:
        self.done.append("connect")

    async def listen(self) -> None:
        self.done.append("listen")

    def watch(self, changed: Callable[[], object]) -> None:
        self.changed = changed

    def fault(self) -> str:
        return self.wrong

    async def close(self) -> None:
        self.done.append("close")


class FakeNetworks:
    """Makes links, unless it refuses."""

    def __init__(self) -> None:
        self.links: list[FakeLink] = []
        self.refusal: OSError | None = None

    async def create(self, addresses: Sequence[IPAddress], port: int) -> HealthLink:
        assert (list(addresses), port) == ([ADDRESS], 4240)
        if self.refusal is not None:
            raise self.refusal
        self.links.append(FakeLink(len(self.links) + 1))
        return self.links[-1]


class OneAddress(HealthAddresses):
    """Claimed already."""

    def __init__(self) -> None:
        """Of no node."""

    def claim(self) -> tuple[IPAddress, ...]:
        return (ADDRESS,)


class NoPool(PolicyMaps):
    """It is never empty here."""

    def __init__(self) -> None:
        """Of no node."""


class Place:
    """A node with a health endpoint, over fakes."""

    def __init__(self, directory: Path) -> None:
        self.node = Node(directory)
        self.network = FakeNetworks()
        self.answer = Outcome(1000)
        self.controllers: Controllers | None = None

    async def http(self, ip: str, port: int) -> Outcome:
        assert (ip, port) == (str(ADDRESS), 4240)
        return self.answer

    @property
    def endpoints(self) -> list[Endpoint]:
        return self.node.endpoints.all()

    @property
    def controller(self) -> ControllerState:
        assert self.controllers is not None
        (found,) = (one for one in self.controllers.all() if one.name == CONTROLLER)
        return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[VirtualClock]:
        """Its clock; the agent's part that is under test runs meanwhile."""

        def addresses() -> HealthAddresses:
            return OneAddress()

        def endpoints() -> Endpoints:
            return self.node.endpoints

        def pool() -> PolicyMaps:
            return NoPool()

        def network() -> HealthNetwork:
            return self.network

        def transport() -> ProbeTransport:
            return fake(ProbeTransport, http=self.http)

        def note(_: HealthEndpoint, found: Controllers) -> None:
            self.controllers = found

        parts = provide(HealthEndpoint, addresses, endpoints, pool, network, transport, PodsExposed)
        cell = module("place", "The health endpoint alone", config(NodeHealthSettings), parts, invoke(note))
        with VirtualClock() as clock:
            hive = Hive(cell, controllers.cell, settings={"enable-health-checking": True})
            async with hive.started():
                await clock.advance(0)
                yield clock


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A node with an agent that is not started yet."""
    return Place(tmp_path)


async def test_the_health_endpoint_has_identity_health_and_its_link_comes_up_when_complete(
    place: Place,
) -> None:
    async with place.running():
        (made,) = place.endpoints
        assert (made.identity, made.labels, made.title) == (HEALTH, ("reserved:health",), "cilium-health")
        assert place.network.links[0].done == ["connect", "listen"]
        assert place.controller.successes == 1
    assert place.network.links[0].done == ["connect", "listen", "close"]
    assert place.node.saved == [str(made.id)]  # from where the next agent takes its addresses


async def test_what_the_kernel_reports_has_it_made_anew_but_not_more_than_once_in_a_second(
    place: Place,
) -> None:
    async with place.running() as clock:
        for count in (1, 2, 3):
            (before,) = place.endpoints
            link = place.network.links[-1]
            link.changed()
            await clock.advance(0.1)
            assert len(place.network.links) == count  # nothing is wrong with it
            link.wrong = "its link lxc_health is missing"
            link.changed()
            await clock.advance(1)
            assert len(place.network.links) == count + 1
            assert link.done[-1] == "close"
            (after,) = place.endpoints
            assert after.created > before.created
        again = place.network.links[-1]
        again.wrong = "its link lxc_health is missing"
        again.changed()
        await clock.advance(0.1)
        assert len(place.network.links) == 4


async def test_an_endpoint_that_was_deleted_comes_back_within_a_minute(place: Place) -> None:
    async with place.running() as clock:
        place.node.endpoints.delete(place.endpoints[0], release_address=False)
        await clock.advance(INTERVAL)
        assert [one.identity for one in place.endpoints] == [HEALTH]


async def test_silence_fails_the_controller_and_ends_with_another_endpoint_after_three_minutes(
    place: Place,
) -> None:
    async with place.running() as clock:
        place.answer = Outcome(failure="no route to host")
        await clock.advance(INTERVAL)
        assert place.controller.last_error == "the health endpoint does not answer: no route to host"
        await clock.advance(UNREACHABLE_TIMEOUT - 2 * INTERVAL)
        assert len(place.network.links) == 1
        await clock.advance(2 * INTERVAL)
        assert len(place.network.links) == 2
        place.answer = Outcome(1000)
        await clock.advance(INTERVAL)
        assert not place.controller.last_error
        assert len(place.network.links) == 2


async def test_silence_after_a_change_in_its_namespace_ends_with_another_endpoint_at_once(
    place: Place,
) -> None:
    async with place.running() as clock:
        await clock.advance(5)
        place.answer = Outcome(failure="no route to host")
        place.network.links[0].changed()
        await clock.advance(1)
        assert len(place.network.links) == 2
        await clock.advance(30)
        assert len(place.network.links) == 2  # the kernel reports nothing more
        place.answer = Outcome(1000)
        await clock.advance(INTERVAL)
        assert not place.controller.last_error


async def test_a_link_that_cannot_be_made_is_tried_again(place: Place) -> None:
    place.network.refusal = OSError(errno.ENOSPC, "No space left on device")
    async with place.running() as clock:
        assert place.endpoints == []
        assert "No space left on device" in place.controller.last_error
        place.network.refusal = None
        await clock.advance(2)
        assert len(place.endpoints) == 1
        assert not place.controller.last_error


async def test_an_endpoint_the_kernel_refuses_leaves_no_link(place: Place) -> None:
    place.node.kernel.refuse = "attach"
    async with place.running():
        assert place.endpoints == []
        assert place.network.links[0].done == ["close"]
