"""Services and states of backends set manually: PUT and DELETE of /service/{id}, as cilium-dbg sends them."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cells.api.models.node import ServiceRequest
from cells.api.operations.services import ServiceOperations, requested
from cells.api.wire import FrameworkError
from cells.services import (
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    ServiceAddress,
    ServiceName,
    ServiceType,
)
from cells.services.control import manual
from cells.services.control.tables import ServedFrontend
from cells.services.map_entries import backend_value
from lifecycle import Hive, Table, invoke, provide
from lifecycle.http import Refusal, Request
from lifecycle.testing import eventually
from tests.support.steps import counted_steps
from tests.unit.conformance.recordings import load
from tests.unit.services.agent import SERVICE, SLICE, FakeServiceMaps, agent, backend

pytestmark = pytest.mark.anyio

RECORDED = ("service_get", "service_update", "service_update_new", "service_delete")
OPERATIONS = (provide(ServiceOperations), invoke(ServiceOperations))
OWN = "10.96.0.1:443"
API_SERVER = {
    "service.yaml": SERVICE.replace("10.96.0.10", "10.96.0.1")
    .replace("name: web", "name: kubernetes")
    .replace("port: 80", "port: 443"),
    "slice.yaml": SLICE.replace(
        "{addresses: [10.0.0.1]}, {addresses: [10.0.0.2]}", "{addresses: [192.0.2.10]}"
    )
    .replace("service-name: web", "service-name: kubernetes")
    .replace("port: 8080", "port: 6443"),
}


class Client:
    """Asks the operations on services."""

    def __init__(self, hive: Hive) -> None:
        self._routes = {(one.method, one.path): one for one in hive.get(ServiceOperations).routes()}
        self.served = hive.get(Table[FrontendKey, ServedFrontend])

    async def __call__(self, method: str, number: int | None = None, body: Any = None) -> tuple[int, Any]:
        """Status and body."""
        path = "/v1/service" if number is None else "/v1/service/{id}"
        route = self._routes[method, path]
        peer, _ = socket.socketpair()
        with peer, _:
            request = Request(
                method, path, {}, json.dumps(body).encode(), peer, match_info={"id": str(number)}
            )
            try:
                answer = await route.operation(request)
            except Refusal as error:
                answer = route.refusal(error)
        assert isinstance(answer.body, bytes)
        return answer.status, json.loads(answer.body) if answer.body else None

    async def backends(self) -> dict[str, dict[str, str]]:
        """Of each frontend: states by address, as the client sees them."""
        _, found = await self("GET")
        return {
            "{ip}:{port}".format(**one["spec"]["frontend-address"]): {
                each["ip"]: each["state"] for each in one["spec"].get("backend-addresses", ())
            }
            for one in found
        }


@asynccontextmanager
async def served(folder: Path, maps: FakeServiceMaps) -> AsyncIterator[Client]:
    """An agent with one service in the maps."""
    async with agent(folder, maps, operations=OPERATIONS) as hive:
        client = Client(hive)
        await eventually(lambda: any("services_v2" in where.map for where in maps.entries))
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "service.yaml").write_text(SERVICE)
    (tmp_path / "slice.yaml").write_text(SLICE)
    return tmp_path


def states(**addresses: str) -> dict[str, Any]:
    """What ``cilium-dbg service update --states`` sends."""
    return {
        "updateServices": True,
        "frontend-address": {"ip": "0.0.0.0", "port": 1},
        "backend-addresses": [
            {"ip": ip.replace("_", "."), "port": 8080, "state": state, "weight": 100}
            for ip, state in addresses.items()
        ],
    }


def made(number: int, *backends: str, ip: str = "198.51.100.7") -> dict[str, Any]:
    return {
        "id": number,
        "frontend-address": {"ip": ip, "port": 80, "protocol": "tcp"},
        "backend-addresses": [{"ip": each, "port": 8080, "weight": 100} for each in backends],
        "flags": {"type": "LoadBalancer"},
    }


@pytest.mark.parametrize("name", RECORDED)
async def test_a_recorded_call_is_answered_as_recorded(name: str, tmp_path: Path) -> None:
    for file, text in API_SERVER.items():
        (tmp_path / file).write_text(text.replace("namespace: shop", "namespace: default"))
    async with served(tmp_path, FakeServiceMaps()) as client:
        for exchange in deepcopy(load(f"dbg/{name}"))["exchanges"]:
            request, recorded = exchange["request"], exchange["response"]
            number = int(request["path"].rpartition("/")[2])
            status, body = await client(request["method"], number, request.get("body"))
            assert status == recorded["status"]
            if "body" in recorded:  # but that there are no other clusters with backends of lower preference
                spec = recorded["body"]["spec"]
                for one in spec["backend-addresses"]:
                    one.pop("preferred", None), one.pop("nodeName", None)
                assert body["spec"] == spec | {"flags": body["spec"]["flags"]}
                assert body["spec"]["flags"].items() <= spec["flags"].items()
        left = (await client.backends()).keys()
        assert (OWN in left) == (name != "service_delete")


async def test_a_manual_service_is_served_and_deleted(folder: Path) -> None:
    maps = FakeServiceMaps()
    async with served(folder, maps) as client:
        assert await client("PUT", 700, made(700, "10.0.0.7")) == (201, None)
        assert backend("10.0.0.7") in maps.backends
        assert (await client("GET", 700))[0] == 200
        assert await client("PUT", 700, made(700, "10.0.0.8")) == (200, None)
        assert backend("10.0.0.8") in maps.backends
        assert backend("10.0.0.7") not in maps.backends
        assert await client("DELETE", 700) == (200, None)
        assert await client("DELETE", 700) == (404, None)
        assert (await client.backends()).keys() == {"10.96.0.10:80"}


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (made(0, "10.0.0.7"), 500, "invalid service ID 0"),
        (made(0, ip="ten"), 500, "invalid service ID 0"),
        (made(70000, "10.0.0.7"), 500, "service ID 70000 exceeds the maximum limit of 65535"),
        (states(**{"10_0_0_1": "maintenance"}) | {"id": 1}, 500, "is already registered to"),
        (made(1, "10.0.0.7"), 500, "is already registered to"),
        (made(9, "10.0.0.7", ip="10.96.0.10"), 460, "please use that ID instead of 9"),
        (made(9, "fd00::7"), 500, "NAT46/64 is disabled"),
        (made(9, "ten"), 461, "invalid IP address 'ten'"),
        (made(9, ip="ten"), 460, "invalid IP address 'ten'"),
        (states(**{"10_0_0_1": "asleep"}), 461, "invalid backend state [asleep]"),
    ],
)
async def test_an_unserviceable_manual_service_is_refused_and_changes_nothing(
    folder: Path, body: Any, status: int, text: str
) -> None:
    maps = FakeServiceMaps()
    async with served(folder, maps) as client:
        await eventually(lambda: maps.slots() == 2)
        before = dict(maps.entries)
        got, message = await client("PUT", body.get("id", 0), body)
        assert got == status
        assert text in message
        assert maps.entries == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"frontend-address": {"ip": "198.51.100.7", "port": 65536}},
        {"backend-addresses": [{"ip": "10.0.0.7", "port": -1}]},
        {"flags": {"healthCheckNodePort": 70000}},
    ],
)
def test_a_port_of_more_than_16_bits_is_an_invalid_body(wrong: Any) -> None:
    body = msgspec.convert(made(700, "10.0.0.7") | wrong, ServiceRequest)
    with pytest.raises(FrameworkError, match="expected 0 to 65535") as raised:
        requested(body)
    assert raised.value.status == 400


async def test_a_manual_service_has_a_health_check_port(folder: Path) -> None:
    body = made(700, "10.0.0.7")
    body["flags"] |= {"extTrafficPolicy": "Local", "healthCheckNodePort": 32100}
    async with served(folder, FakeServiceMaps()) as client:
        assert await client("PUT", 700, body) == (201, None)
        _, found = await client("GET", 700)
        assert found["spec"]["flags"]["healthCheckNodePort"] == 32100
        assert [one.frontend.answered_port for one in client.served.all() if one.id == 700] == [32100]


async def test_a_backend_in_maintenance_gets_no_new_connections_until_it_is_active(folder: Path) -> None:
    maps = FakeServiceMaps()
    async with served(folder, maps) as client:
        await eventually(lambda: maps.slots() == 2)
        assert await client("PUT", 0, states(**{"10_0_0_1": "maintenance"})) == (200, None)
        assert maps.slots() == 1
        assert (
            backend_value(ServiceAddress(ip_address("10.0.0.1"), 8080, 6), BackendState.MAINTENANCE)
            in maps.backends
        )
        (folder / "slice.yaml").write_text(SLICE.replace("]}]", "]}, {addresses: [10.0.0.3]}]"))
        await eventually(lambda: maps.slots() == 2)
        assert (await client.backends())["10.96.0.10:80"]["10.0.0.1"] == "maintenance"
        assert (await client("PUT", 0, states(**{"10_0_0_1": "quarantined"})))[0] == 501
        assert await client("PUT", 0, states(**{"10_0_0_1": "active"})) == (200, None)
        assert maps.slots() == 3


async def test_a_manual_backend_state_is_deleted_with_the_backend(folder: Path) -> None:
    maps = FakeServiceMaps()
    async with served(folder, maps) as client:
        await client("PUT", 0, states(**{"10_0_0_1": "quarantined"}))
        (folder / "slice.yaml").write_text(SLICE.replace("{addresses: [10.0.0.1]}, ", ""))
        await eventually(lambda: maps.backends == {backend("10.0.0.2")})
        (folder / "slice.yaml").write_text(SLICE)
        await eventually(lambda: maps.slots() == 2)


async def test_an_object_has_the_last_word_of_its_service(folder: Path) -> None:
    maps = FakeServiceMaps()
    async with served(folder, maps) as client:
        await eventually(lambda: maps.slots() == 2)
        assert await client("DELETE", 1) == (200, None)
        assert maps.slots() == -1
        (folder / "slice.yaml").write_text(SLICE.replace("10.0.0.2", "10.0.0.3"))
        await eventually(lambda: maps.backends == {backend("10.0.0.1"), backend("10.0.0.3")})


async def test_a_manual_service_that_does_not_fit_the_maps_is_refused_and_the_previous_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manual, "WRITE_TIMEOUT", 0.2)
    maps = FakeServiceMaps()
    async with served(folder, maps) as client:
        await eventually(lambda: maps.slots() == 2)
        maps.full = True
        status, text = await client("PUT", 700, made(700, "10.0.0.7"))
        assert (status, "is not in the maps after" in text) == (500, True)
        assert maps.slots() == 2
        maps.full = False  # what had no room may get in until the frontend is withdrawn
        await eventually(lambda: [str(one.key.address.ip) for one in client.served.all()] == ["10.96.0.10"])


async def test_without_a_source_of_objects_manual_services_are_refused(tmp_path: Path) -> None:
    async with agent(None, FakeServiceMaps(), operations=OPERATIONS) as hive:
        status, text = await Client(hive)("PUT", 700, made(700, "10.0.0.7"))
    assert (status, "no source of objects is set" in text) == (501, True)


def test_states_of_many_backends_are_checked_in_a_few_times_the_steps_of_one() -> None:
    addresses = [ServiceAddress(ip_address("10.0.0.1") + at, 8080, 6) for at in range(5000)]
    served = [
        ServedFrontend(
            number,
            Frontend(
                FrontendKey(ServiceAddress(ip_address("10.96.0.1") + number, 80, 6)),
                ServiceType.CLUSTER_IP,
                ServiceName("shop", f"web-{number}"),
                tuple(Backend(one) for one in addresses[10 * number : 10 * number + 10]),
            ),
        )
        for number in range(500)
    ]

    def steps(count: int) -> int:
        asked = [
            Backend(ServiceAddress(one.ip, one.port), BackendState.MAINTENANCE) for one in addresses[:count]
        ]
        with counted_steps() as executed:
            found = manual.check_states(asked, served)
        assert [one.address for one in found] == addresses[:count]
        return executed.lines

    assert steps(100) < 5 * steps(1)
