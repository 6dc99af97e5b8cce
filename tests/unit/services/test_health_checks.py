"""Health check responses for load balancers: services' own ports, and kube-proxy's."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any, NamedTuple

import aiohttp
import anyio
import pytest
import structlog

from cells.config import AgentConfig, AgentSettings
from cells.observe.health import AgentStatus, StatusCollector
from cells.services import (
    EXTERNAL,
    INTERNAL,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    ServiceAddress,
    ServiceName,
    ServiceType,
    health_checks,
)
from cells.services.control import ServedFrontend
from cells.services.control.tables import served_frontends
from cells.services.health_checks import HealthCheckSettings, Healthz, go_time
from lifecycle import Hive, Lifecycle, Table, invoke, provide, replace, supply
from lifecycle.http import Request
from lifecycle.testing import eventually, fake
from tests.support.ports import free_port
from tests.unit.services.replay import load

pytestmark = pytest.mark.anyio


@pytest.fixture
def port() -> int:
    """One that is not in use."""
    return free_port()


def served(
    port: int, *states: BackendState, number: int = 1, name: str = "web", scope: int = EXTERNAL
) -> ServedFrontend:
    backends = [
        Backend(ServiceAddress(ip_address(f"10.0.0.{at}"), 80, 6), state=state)
        for at, state in enumerate(states, 1)
    ]
    key = FrontendKey(ServiceAddress(ip_address(f"203.0.113.{number}"), 80, 6), scope)
    return ServedFrontend(
        number,
        Frontend(
            *(key, ServiceType.LOAD_BALANCER, ServiceName("shop", name), tuple(backends)),
            ext_local=True,
            health_check_node_port=port,
        ),
    )


def hive(state: str = "Ok", **settings: str) -> Hive:
    status = AgentStatus(state, "", (), None)  # type: ignore[arg-type]  # one of State
    return Hive(
        health_checks.cell,
        supply(AgentConfig(AgentSettings(enable_ipv6=True), Lifecycle("test"), structlog.get_logger())),
        provide(served_frontends, StatusCollector),
        replace(StatusCollector, fake(StatusCollector, status=lambda: status)),
        invoke(need),
        settings={name.replace("_", "-"): value for name, value in settings.items()},
    )


def need(_: Table[FrontendKey, ServedFrontend]) -> None:
    """Have the table."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: Any


async def ask(port: int, path: str = "/", host: str = "127.0.0.1") -> Answer | None:
    """None without a listener."""
    async with aiohttp.ClientSession() as client:
        try:
            async with client.get(f"http://{host}:{port}{path}") as answer:
                return Answer(answer.status, dict(answer.headers), await answer.json(content_type=None))
        except aiohttp.ClientConnectorError:
            return None


async def settled(port: int, status: int | None) -> Answer | None:
    """The first answer with that status. Who asks as the port closes is cut off: no answer yet."""
    while True:
        with suppress(aiohttp.ClientConnectionError):
            answer = await ask(port)
            if (answer.status if answer is not None else None) == status:
                return answer
        await anyio.sleep(0.01)


async def test_a_service_is_answered_for_at_its_own_port(port: int) -> None:
    running = hive()
    async with running.started():
        table = running.get(Table[FrontendKey, ServedFrontend])
        with anyio.fail_after(30):
            with table.txn() as rows:
                rows.put(served(port, BackendState.ACTIVE, BackendState.ACTIVE, BackendState.TERMINATING))
            answer = await settled(port, 200)
            assert answer is not None
            assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == "2"
            assert answer.body == {"service": {"namespace": "shop", "name": "web"}, "localEndpoints": 2}
            assert await ask(port, host="[::1]") is not None
            with table.txn() as rows:
                rows.put(served(port))
            await settled(port, 503)
            with table.txn() as rows:
                rows.replace_all([])
            await settled(port, None)


async def test_of_two_services_with_one_health_check_port_the_first_is_answered_for(port: int) -> None:
    running = hive()
    async with running.started():
        with running.get(Table[FrontendKey, ServedFrontend]).txn() as rows:
            rows.put(served(port, BackendState.ACTIVE, BackendState.ACTIVE, number=2, name="late"))
            rows.put(served(port, BackendState.ACTIVE, number=1, name="early"))
        with anyio.fail_after(30):
            answer = await settled(port, 200)
        assert answer is not None
        assert answer.body == {"service": {"namespace": "shop", "name": "early"}, "localEndpoints": 1}


async def test_a_service_that_is_served_to_clients_inside_alone_holds_up_no_health_check_port(
    port: int,
) -> None:
    """The address for clients outside may come later, or not fit into the maps."""
    running, other = hive(), free_port()
    async with running.started():
        table = running.get(Table[FrontendKey, ServedFrontend])
        table.put(served(other, BackendState.ACTIVE, number=2, scope=INTERNAL))
        table.put(served(port, BackendState.ACTIVE))
        with anyio.fail_after(30):
            await settled(port, 200)
        assert await ask(other) is None


async def test_a_used_health_check_port_is_retried(port: int) -> None:
    running = hive()
    async with running.started():
        with socket.create_server(("", port)) as taken:
            with running.get(Table[FrontendKey, ServedFrontend]).txn() as rows:
                rows.put(served(port))

            def is_reported() -> bool:
                found = running.health.snapshot("service-health-checks")
                return any(
                    f"port {port} cannot be answered" in (each.error or each.message) for each in found
                )

            await eventually(is_reported)
            taken.close()
        with anyio.fail_after(30):
            await settled(port, 503)


async def test_with_enable_health_check_nodeport_off_no_server_listens(port: int) -> None:
    running = hive(enable_health_check_nodeport="false")
    async with running.started():
        with running.get(Table[FrontendKey, ServedFrontend]).txn() as rows:
            rows.put(served(port))
        await anyio.wait_all_tasks_blocked()
        assert await ask(port) is None


async def test_kube_proxys_healthz_is_served_where_it_was(port: int) -> None:
    async with hive(kube_proxy_replacement_healthz_bind_address=f"127.0.0.1:{port}").started():
        answer = await ask(port, "/healthz")
        assert answer is not None
        assert answer.status == 200
        assert set(answer.body) == {"lastUpdated", "currentTime"}
    async with hive("Failure", kube_proxy_replacement_healthz_bind_address=f"127.0.0.1:{port}").started():
        answer = await ask(port, "/healthz")
        assert answer is not None
        assert answer.status == 503


@pytest.mark.parametrize("text", ["10256", "0.0.0.0", "0.0.0.0:http", "[::]:70000"])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an address and a port"):
        HealthCheckSettings(kube_proxy_replacement_healthz_bind_address=text).validate()


@pytest.mark.parametrize(
    "case", load("kube_proxy_healthz")["cases"], ids=lambda case: str(case["agent_state"])
)
async def test_health_check_answers_are_as_recorded(case: Any) -> None:
    """Both times were made long before; an agent that became healthy at last reports when."""
    moments = [datetime(2024, 8, 23, 19, 24, 52, 123456, UTC), datetime(2024, 8, 23, 20, 0, 1, tzinfo=UTC)]
    well = case["agent_state"] not in {"Warning", "Failure"}
    answers = Healthz(lambda: well, lambda: moments.pop(0) if len(moments) > 1 else moments[0])
    with socket.socket() as peer:
        answer = await answers.answer(Request("GET", case["path"], {}, b"", peer))
    assert isinstance(answer.body, bytes)
    headers = answer.headers | {"Content-Type": answer.content_type}
    body = case["body"].replace("52.123456789", "52.123456")  # Python counts microseconds
    assert (answer.status, answer.body.decode(), headers) == (case["status"], body, case["headers"])


def test_times_have_no_zeros_at_the_end() -> None:
    moment = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert go_time(moment) == "2024-01-02 03:04:05 +0000 UTC"
    assert go_time(moment + timedelta(milliseconds=250)) == "2024-01-02 03:04:05.25 +0000 UTC"
