"""The node's health endpoint: it responds, is recreated after any removal, and retains its address."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from cells.agent import agent
from cells.cluster.identity.numbers import HEALTH
from cells.cluster.nodes.local import LocalNodeStore
from cells.endpoint import Endpoint, Endpoints
from cells.health.endpoint import CONTROLLER
from cells.health.prober import SocketTransport
from cells.netlink.links import HostLinks
from cells.node.ipam import Ipam
from cells.observe.controllers import Controllers
from lifecycle import Hive
from lifecycle.testing import eventually
from tests.kernel.endpoint.nodes import DUAL
from tests.kernel.endpoint.nodes import SETTINGS as SMALL
from tests.support.namespaces import Namespaces, in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

SETTINGS: Final = {**SMALL, **DUAL, "state-dir": "/run/cilium", "enable-health-checking": True}
OUTSIDE: Final = ("ip link delete lxc_health", "ip link set lxc_health down")
MTU: Final = "ip link set lxc_health mtu 1300"
INSIDE: Final = (
    "ip -4 address flush dev cilium",
    "ip -6 address flush dev cilium scope global",
    "ip link delete cilium",
    "ip route flush table main",
)


def health_endpoint(hive: Hive) -> Endpoint | None:
    """The one there is; None while it is made."""
    return next((one for one in hive.get(Endpoints).all() if one.identity == HEALTH), None)


def found_in(hive: Hive) -> Endpoint:
    """The one there is."""
    found = health_endpoint(hive)
    assert found is not None
    return found


async def answers(hive: Hive) -> bool:
    """Whether each of its addresses answers both kinds of probes."""
    found = health_endpoint(hive)
    if found is None or len(found.addresses) != 2:
        return False
    transport = SocketTransport()
    transport.open()
    try:
        for ip in map(str, found.addresses):
            if (await transport.http(ip, 4240)).failure or (await transport.icmp(ip, 3)).failure:
                return False
    finally:
        transport.close()
    return True


def replaced(hive: Hive, before: Endpoint | None) -> bool:
    """Whether another one is there, and the controller that made it has had its answer."""
    now = health_endpoint(hive)
    (controller,) = (one for one in hive.get(Controllers).all() if one.name == CONTROLLER)
    answered = controller.last_success or 0.0
    return now is not None and (before is None or now.created > before.created) and answered > now.created


def open_networks() -> dict[str, Path]:
    """The network namespaces that this process has a descriptor of."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            place = str(link.readlink())
        except OSError:  # the one of the listing
            continue
        if place.startswith("net:["):
            found[place] = link
    return found


def inside(before: Collection[str]) -> Namespaces:
    """The endpoint's namespace: no name leads there, but the agent's descriptor; not one of ``before``."""
    own = str(Path("/proc/thread-self/ns/net").readlink())
    (made,) = (link for place, link in open_networks().items() if place not in {own, *before})
    return Namespaces.open(made)


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


async def test_the_health_endpoint_answers_recovers_and_keeps_its_addresses(in_node: None) -> None:
    others = open_networks().keys()
    async with Hive(agent, settings=SETTINGS).started() as hive:
        await eventually(partial(replaced, hive, None))
        assert await answers(hive)
        first = found_in(hive)
        published = {row.ip for row in hive.get(LocalNodeStore).health.all()}
        assert published == set(first.addresses)
        (node,) = hive.get(LocalNodeStore).table.all()
        assert set(node.health) == published
        assert {hive.get(Ipam).owner(ip) for ip in published} == {"health"}
        for damage in (*OUTSIDE, *INSIDE):
            before = found_in(hive)
            if damage in OUTSIDE:
                shell(damage)
            else:
                with inside(others) as namespace:
                    namespace.run(shell, damage)
            await eventually(partial(replaced, hive, before))
            assert await answers(hive), damage
            assert found_in(hive).addresses == first.addresses, damage
        before = found_in(hive)
        shell(MTU)
        assert hive.get(Controllers).trigger(CONTROLLER)  # as in a minute: the kernel reports it outside only
        await eventually(partial(replaced, hive, before))
        hive.get(Endpoints).delete(before := found_in(hive))  # as over the API: its addresses are free
        assert hive.get(Controllers).trigger(CONTROLLER)
        await eventually(partial(replaced, hive, before))
        assert await answers(hive)
        assert {hive.get(Ipam).owner(ip) for ip in found_in(hive).addresses} == {"health"}
    async with Hive(agent, settings=SETTINGS).started() as hive:
        await eventually(partial(replaced, hive, None))
        assert await answers(hive)
        assert found_in(hive).addresses == first.addresses
    without = {**SETTINGS, "enable-endpoint-health-checking": False}
    async with Hive(agent, settings=without).started() as hive:
        assert health_endpoint(hive) is None
        assert not hive.get(LocalNodeStore).health.all()
        assert hive.get(HostLinks).find("lxc_health") is None
