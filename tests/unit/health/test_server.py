"""The probe port: 200 or 503, nothing else, and one line if it is in use."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from cells.config import AgentConfig
from cells.observe import controllers, health
from lifecycle import Hive, StartError, supply
from tests.support.ports import free_port
from tests.support.settings import refused

pytestmark = pytest.mark.anyio


@pytest.fixture
def port() -> int:
    """A TCP port that is free now."""
    return free_port()


class Place(AgentConfig):
    """Where a node's directories are; nothing is claimed."""

    globals_dir = state = Path("/")

    def __init__(self, *, ipv4: bool = True, ipv6: bool = False) -> None:
        self.ipv4, self.ipv6 = ipv4, ipv6


@asynccontextmanager
async def running(port: int, *, ipv4: bool = True, ipv6: bool = False) -> AsyncIterator[Hive]:
    """A hive of the health cell."""
    ready = supply(health.AgentReady())
    place = supply(Place(ipv4=ipv4, ipv6=ipv6), AgentConfig)
    cells = health.cell, controllers.cell, ready, place
    async with Hive(*cells, settings={"agent-health-port": port}).started() as hive:
        yield hive


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
async def test_a_healthy_agent_answers_200_without_a_body(method: str, port: int) -> None:
    async with running(port), aiohttp.ClientSession() as session:
        headers = {"brief": "false", "require-k8s-connectivity": "nonsense"}
        async with session.request(method, f"http://127.0.0.1:{port}/healthz", headers=headers) as got:
            assert (got.status, await got.read()) == (200, b"")


async def test_an_agent_that_cannot_serve_pods_answers_503(port: int) -> None:
    async with running(port) as hive, aiohttp.ClientSession() as session:
        for level, status in (("degraded", 503), ("ok", 200)):
            hive.health.report("agent.cni-config", level, "")  # type: ignore[arg-type]
            async with session.get(f"http://127.0.0.1:{port}/healthz") as got:
                assert (got.status, await got.read()) == (status, b"")


async def test_other_paths_of_the_health_port_are_404(port: int) -> None:
    address = f"http://127.0.0.1:{port}/"
    async with running(port), aiohttp.ClientSession() as session, session.get(address) as got:
        assert got.status == 404


async def test_it_listens_on_loopback_only_and_not_after_the_stop(port: int) -> None:
    async with running(port):
        with pytest.raises(ConnectionRefusedError), socket.socket() as client:
            client.connect(("127.0.0.2", port))
    with pytest.raises(ConnectionRefusedError), socket.socket() as client:
        client.connect(("127.0.0.1", port))


@pytest.mark.parametrize(("ipv4", "ipv6"), [(True, True), (False, True)])
async def test_it_listens_on_the_loopback_address_of_each_family(ipv4: bool, ipv6: bool, port: int) -> None:
    async with running(port, ipv4=ipv4, ipv6=ipv6), aiohttp.ClientSession() as session:
        async with session.get(f"http://[::1]:{port}/healthz") as got:
            assert got.status == 200
        if ipv4:
            async with session.get(f"http://127.0.0.1:{port}/healthz") as got:
                assert got.status == 200
        else:
            with pytest.raises(ConnectionRefusedError), socket.socket() as client:
                client.connect(("127.0.0.1", port))


async def test_one_family_that_is_taken_leaves_the_other_alone(port: int) -> None:
    with socket.create_server(("::1", port), family=socket.AF_INET6), pytest.raises(StartError) as refused:
        async with running(port, ipv6=True):
            pass
    assert str(refused.value.exceptions[0]).startswith(f"agent-health-port: ::1:{port} cannot be served")
    with pytest.raises(ConnectionRefusedError), socket.socket() as client:
        client.connect(("127.0.0.1", port))


async def test_a_used_port_is_reported_in_one_line(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(StartError) as refused:
            async with running(port):
                pass
    message = str(refused.value.exceptions[0])
    assert message.startswith(
        f"agent-health-port: 127.0.0.1:{port} cannot be served (Address already in use): "
    )
    assert "\n" not in message


@pytest.mark.parametrize("number", [0, -1, 65536])
def test_an_invalid_port_is_refused(number: int) -> None:
    text = refused(health.HealthServerSettings, agent_health_port=number)
    assert text.endswith("expected at least 1, at most 65535")
