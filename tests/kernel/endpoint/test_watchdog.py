"""Kernel state of an endpoint that another program removes is restored while the agent runs."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cells.endpoint import Endpoint
from cells.endpoint import watchdog as endpoint_watchdog
from cells.endpoint.kernel import ifindex_key
from cells.endpoint.watchdog import EndpointFault, EndpointWatchdog
from cells.maps.node_maps import Maps
from cells.maps.records.endpoints import LxcKey
from cells.netlink.links import HostLinks
from cells.node import sysctl
from lifecycle import HealthTree, Hive, invoke
from lifecycle.testing import eventually
from tests.kernel.endpoint.nodes import CELLS, SETTINGS, STATE, add_pod, address_of, needed, pods
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

INTERVAL = {"endpoint-bpf-prog-watchdog-interval": "1s"}


def asked(_watchdog: EndpointWatchdog, _health: HealthTree) -> None:
    """What the tests need of the hive."""


@asynccontextmanager
async def agent(**settings: object) -> AsyncIterator[Hive]:
    given = {**SETTINGS, **{name.replace("_", "-"): value for name, value in settings.items()}}
    cells = (*CELLS, sysctl.cell, endpoint_watchdog.cell)
    async with Hive(*cells, invoke(needed, asked), settings=given).started() as hive:
        yield hive


def run(command: str) -> None:
    assert os.system(command) == 0  # noqa: S605


def filter_of(made: Endpoint, way: str) -> str:
    with os.popen(f"tc filter show dev {made.ifname} {way}") as output:  # noqa: S605
        return output.read()


@pytest.mark.parametrize(
    "command",
    ["tc filter del dev {link} ingress", "tc qdisc del dev {link} clsact"],
)
async def test_a_removed_filter_is_back_at_once(command: str, in_node: None) -> None:
    with pods(2) as [first, second]:
        async with agent(**{"endpoint-bpf-prog-watchdog-interval": "0s"}) as hive:
            one, two = add_pod(hive, 1, first), add_pod(hive, 2, second)
            before = filter_of(one, "ingress")
            assert "cil_from_container" in before
            for made in (one, two):
                run(command.format(link=made.ifname))
            await eventually(
                lambda: (filter_of(one, "ingress"), filter_of(two, "ingress")) == (before, before)
            )
            found = hive.get(EndpointWatchdog).found
            await eventually(lambda: found == {EndpointFault.PROGRAMS: 2})
            await eventually(lambda: level(hive) == "ok")


def level(hive: Hive) -> str:
    (status,) = hive.get(HealthTree).snapshot("endpoint-watchdog.kernel")
    return status.level


def message(hive: Hive) -> str:
    (status,) = hive.get(HealthTree).snapshot("endpoint-watchdog.kernel")
    return status.message


def drop_lxc(hive: Hive, made: Endpoint) -> None:
    hive.get(Maps).lxc.delete(LxcKey(address_of(made)).pack())


def change_lxc(hive: Hive, made: Endpoint) -> None:
    hive.get(Maps).lxc.update(LxcKey(address_of(made)).pack(), bytes(hive.get(Maps).lxc.spec.value_size))


def drop_config(hive: Hive, made: Endpoint) -> None:
    hive.get(Maps).endpoints.delete(ifindex_key(made.ifindex))


def another_program(hive: Hive, made: Endpoint) -> None:
    """As a tool does that replaces filters."""
    pinned = "/sys/fs/bpf/cilium/dispatch/cil_to_container"
    run(f"tc filter replace dev {made.ifname} ingress pref 1 handle 1 bpf da object-pinned {pinned}")


def filter_by_route(hive: Hive, made: Endpoint) -> None:
    Path(f"/proc/sys/net/ipv4/conf/{made.ifname}/rp_filter").write_text("1")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (drop_lxc, EndpointFault.LXC),
        (change_lxc, EndpointFault.LXC),
        (drop_config, EndpointFault.CONFIG),
        (another_program, EndpointFault.PROGRAMS),
        (filter_by_route, EndpointFault.RP_FILTER),
    ],
    ids=["row of the address", "another row", "row of the link", "another program", "reverse path filter"],
)
async def test_damage_without_a_notification_is_mended_by_the_next_check(
    damage: Callable[[Hive, Endpoint], None], fault: EndpointFault, in_node: None
) -> None:
    with pods(1) as [pod]:
        async with agent(**INTERVAL) as hive:
            made = add_pod(hive, 1, pod)
            before = seen(hive, made)
            for _ in range(2):  # the first may be met by a map's own sweep, which is made after the start
                damage(hive, made)
                assert seen(hive, made) != before
                await eventually(lambda: seen(hive, made) == before)
            assert hive.get(EndpointWatchdog).found.keys() == {fault}
            await eventually(lambda: level(hive) == "ok")


def seen(hive: Hive, made: Endpoint) -> tuple[object, ...]:
    maps = hive.get(Maps)
    return (
        maps.lxc.lookup(LxcKey(address_of(made)).pack()),
        maps.endpoints.lookup(ifindex_key(made.ifindex)),
        hive.get(HostLinks).programs(made.ifindex),
        Path(f"/proc/sys/net/ipv4/conf/{made.ifname}/rp_filter").read_text(),
    )


async def test_health_is_degraded_while_an_endpoint_cannot_be_repaired(in_node: None) -> None:
    with pods(1) as [pod]:
        async with agent(**INTERVAL) as hive:
            made = add_pod(hive, 1, pod)
            await eventually(lambda: level(hive) == "ok")
            run(f"mv {STATE} {STATE}.away; touch {STATE}")
            drop_lxc(hive, made)
            await eventually(
                lambda: message(hive).startswith(f"endpoint {made.id}: cilium_lxc; not repaired: ")
            )
            assert level(hive) == "degraded"
            run(f"rm {STATE}; mv {STATE}.away {STATE}")
            drop_lxc(hive, made)
            await eventually(lambda: level(hive) == "ok")


async def test_a_deleted_link_is_not_reported_as_missing_programs(in_node: None) -> None:
    with pods(1) as [pod]:
        async with agent(**INTERVAL) as hive:
            made = add_pod(hive, 1, pod)
            run(f"ip link del {made.ifname}")
            await hive.get(EndpointWatchdog).compare()
            assert hive.get(EndpointWatchdog).found == {}
