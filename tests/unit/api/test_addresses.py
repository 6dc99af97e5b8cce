"""Address requests over a socket: one family or both, allocation, reservation, release."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from lifecycle.testing import eventually
from tests.unit.api.node import ROUTER, ROUTER6, running_node
from tests.unit.api.pods import request_body

pytestmark = pytest.mark.anyio


async def test_addresses_are_allocated_and_released_one_by_one(tmp_path: Path) -> None:
    async with running_node(tmp_path, cidr="10.0.1.0/30") as node:
        taken = await node.ask("POST", "/v1/ipam/10.0.1.1?owner=me&pool=default")
        assert (taken.status, taken.raw) == (200, b"")
        twice = await node.ask("POST", "/v1/ipam/10.0.1.1?owner=me&pool=default")
        assert (twice.status, twice.body) == (500, "provided IP is already allocated")
        poolless = await node.ask("POST", "/v1/ipam/10.0.1.2?owner=me")
        assert poolless.status == 500
        assert "pool name must be provided" in poolless.body
        assert (await node.ask("POST", "/v1/ipam/nonsense?pool=default")).status == 500

        lease = await node.ask("POST", "/v1/ipam?family=IPV4")
        assert lease.body["ipv4"] == {"ip": "10.0.1.2"}
        full = await node.ask("POST", "/v1/ipam")
        assert (full.status, full.body) == (502, "range is full")

        no_pool = await node.ask("DELETE", "/v1/ipam/10.0.1.2")
        assert (no_pool.status, no_pool.body) == (500, "no IPAM pool provided for IP release of 10.0.1.2")
        assert (await node.ask("DELETE", "/v1/ipam/10.0.1.2?pool=default")).status == 200
        assert (await node.ask("DELETE", "/v1/ipam/10.0.1.2?pool=default")).status == 200
        bad = await node.ask("DELETE", "/v1/ipam/nonsense?pool=default")
        assert (bad.status, bad.raw) == (400, b"")


async def test_the_routers_address_is_not_given_away(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        got = await node.ask("DELETE", f"/v1/ipam/{ROUTER}?pool=default")
        assert (got.status, got.body) == (500, "IP is in use by router")
        assert node.ipam.owner(ROUTER) == "router"


async def test_allocation_of_a_disabled_family_is_refused(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        assert (await node.ask("POST", "/v1/ipam?family=ipv6")).status == 502
        unknown = await node.ask("POST", "/v1/ipam?family=ipx")
        assert (unknown.status, unknown.body["code"]) == (422, 606)
        assert node.given() == set()


async def test_two_families_are_allocated_used_and_freed_together(tmp_path: Path) -> None:
    async with running_node(tmp_path, cidr6="fd00:1::/112") as node:
        lease = await node.ask("POST", "/v1/ipam?owner=default%2Fweb-0", headers={"Expiration": "true"})
        address = lease.body["address"]
        assert lease.body["ipv6"]["ip"] == address["ipv6"]
        assert lease.body["host-addressing"]["ipv6"]["ip"] == "fd00:1::5"
        body = request_body(address["ipv4"], lease.body["ipv4"]["expiration-uuid"])
        body["addressing"] |= {
            "ipv6": address["ipv6"],
            "ipv6-pool-name": "default",
            "ipv6-expiration-uuid": lease.body["ipv6"]["expiration-uuid"],
        }
        made = await node.ask("PUT", "/v1/endpoint/cilium-local:0", body)
        assert made.status == 201, made.raw
        assert made.body["status"]["networking"]["addressing"] == [
            {**address, "ipv4-pool-name": "default", "ipv6-pool-name": "default"}
        ]
        assert node.ipam.next_expiration() is None
        found = await node.ask("GET", f"/v1/endpoint/ipv6:{address['ipv6']}")
        assert (found.status, found.body["id"]) == (200, 1)
        used = await node.ask("DELETE", f"/v1/ipam/{address['ipv6']}?pool=default")
        assert (used.status, used.body) == (500, "IP is in use by endpoint 1")
        twice = await node.ask("PUT", "/v1/endpoint/cilium-local:0", body | {"container-id": "cid2"})
        assert (twice.status, twice.body) == (400, f"IP ipv6:{address['ipv6']} is already in use")
        status = await node.ask("GET", "/v1/healthz")
        assert set(status.body["ipam"]["ipv6"]) == {str(ROUTER6), address["ipv6"]}
        assert (await node.ask("DELETE", "/v1/endpoint", {"container-id": "cid1"})).status == 200
        assert node.given() == set()


async def test_without_a_free_address_of_one_family_none_is_taken(tmp_path: Path) -> None:
    async with running_node(tmp_path, cidr="10.0.1.0/31", cidr6="fd00:1::/112") as node:
        assert (await node.ask("POST", "/v1/ipam?family=ipv4")).status == 201
        assert (await node.ask("POST", "/v1/ipam")).status == 201
        full = await node.ask("POST", "/v1/ipam")
        assert (full.status, full.body) == (502, "range is full")
        assert len(node.given()) == 3
        alone = await node.ask("POST", "/v1/ipam?family=ipv6")
        assert list(alone.body["address"]) == ["ipv6", "ipv6-pool-name"]


async def test_an_address_is_used_again_only_when_its_old_flows_are_forgotten(tmp_path: Path) -> None:
    answers: list[int] = []

    async with running_node(tmp_path) as node, anyio.create_task_group() as tasks:

        async def put(container: str) -> None:
            body = request_body("10.0.1.77", container=container)
            answers.append((await node.ask("PUT", "/v1/endpoint/cilium-local:0", body)).status)

        await put("cid1")
        node.kernel.may_forget = anyio.Event()
        assert (await node.ask("DELETE", "/v1/endpoint", {"container-id": "cid1"})).status == 200
        tasks.start_soon(put, "cid2")
        for _ in range(20):  # the later ones overtake it
            assert (await node.ask("GET", "/v1/config")).status == 200
        assert answers == [201]
        node.kernel.may_forget.set()
        await eventually(lambda: len(answers) == 2)
    assert answers == [201, 201]
