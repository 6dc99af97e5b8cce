"""Tunnel devices of either protocol: changes, and a kernel without support."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from cells.base.addresses import Family
from cells.datapath.datapath import Datapath
from cells.maps.records.cluster import TunnelConfig
from cells.netlink.connection import NetlinkError
from cells.netlink.overlay import FoundOverlay
from cells.node.sysctl import Sysctls
from cells.tunnel.kernel import TunnelDevice, TunnelFacts, TunnelKernel, TunnelMaps, TunnelNetwork, wanted
from cells.tunnel.settings import TunnelSettings
from lifecycle import BatchError, Logger
from lifecycle.testing import fake

pytestmark = pytest.mark.anyio

VXLAN, GENEVE = TunnelSettings(), TunnelSettings(tunnel_protocol="geneve")


class Node:
    """A kernel with devices of these kinds, and agents that come one after another."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.links: dict[str, FoundOverlay] = {}
        self.attached: set[int] = set()
        self.facts = TunnelConfig()
        self.made = 0
        self.sysctls: dict[str, str] = {}

    async def find(self, name: str) -> FoundOverlay | None:
        return self.links.get(name)

    async def create(self, device: TunnelDevice) -> None:
        if device.protocol not in self.kinds:
            raise NetlinkError(errno.EOPNOTSUPP, f"create {device.name}: Unknown device type")
        self.made += 1
        self.add(device.name, device.protocol, device.port, up=False)

    def add(self, name: str, kind: str, port: int, *, up: bool) -> None:
        self.links[name] = FoundOverlay(100 + self.made, kind, up, 1500, port, (0, 0), metadata=True)

    async def set_up(self, ifindex: int, name: str, mtu: int) -> None:
        link = self.links[name]
        others = [one for one in self.links.values() if one.up and one is not link]
        if any(one.port == link.port for one in others):
            raise NetlinkError(errno.EADDRINUSE, f"set up {name}")
        assert link.ifindex in self.attached, "what arrives would pass without programs"
        self.links[name] = FoundOverlay(
            link.ifindex, link.kind, True, mtu, link.port, link.source_ports, link.metadata
        )

    async def delete(self, ifindex: int) -> None:
        self.links = {name: one for name, one in self.links.items() if one.ifindex != ifindex}

    def set_facts(self, facts: TunnelConfig) -> None:
        self.facts = facts

    def kernel(self, settings: TunnelSettings) -> TunnelKernel:
        links = fake(
            TunnelNetwork, find=self.find, create=self.create, set_up=self.set_up, delete=self.delete
        )
        programs = fake(Datapath, attach_tunnel=self.attached.add, serves_tunnel=self.attached.__contains__)
        maps = fake(TunnelMaps, facts=lambda: self.facts, set_facts=self.set_facts)
        sysctls = fake(Sysctls, enforce=self.sysctls.update, read=self.sysctls.get)
        return TunnelKernel(settings, links, programs, maps, sysctls, fake(Logger, info=log, warning=log))

    async def start(self, settings: TunnelSettings) -> None:
        """As an agent's reconciler does: what differs is put, then what is not wanted is dropped."""
        kernel = self.kernel(settings)
        rows, there = wanted(settings, 1500, 1450, None, ()), await kernel.observe()
        await kernel.put({key: row for key, row in rows.items() if there.get(key) != row})
        await kernel.drop([key for key in there if key not in rows])
        assert dict(await kernel.observe()) == rows

    @property
    def names(self) -> Sequence[str]:
        return [*self.links]


def log(_: str, **__: object) -> None:
    """Nothing of it is looked at."""


@pytest.mark.parametrize("port", [0, 7777])
async def test_a_node_changes_from_one_protocol_to_the_other_and_back(port: int) -> None:
    """Also where both have one port, which only one of them can have at a time."""
    node = Node("vxlan", "geneve")
    for protocol, name in (("vxlan", "cilium_vxlan"), ("geneve", "cilium_geneve")) * 2:
        settings = TunnelSettings(tunnel_protocol=protocol, tunnel_port=port)  # type: ignore[arg-type]
        await node.start(settings)
        made = node.made
        await node.start(settings)  # which changes nothing
        assert (node.names, node.made) == ([name], made)
        assert (node.facts.ifindex, node.facts.port) == (node.links[name].ifindex, settings.port)
    await node.start(TunnelSettings(routing_mode="native"))
    assert (node.names, node.facts) == ([], TunnelConfig())


async def test_a_kernel_without_geneve_refuses_it_by_name_and_keeps_the_tunnel_it_has() -> None:
    node = Node("vxlan")
    await node.start(VXLAN)
    before = node.links, node.facts
    with pytest.raises(BatchError) as refused:
        await node.start(GENEVE)
    assert str(refused.value.failures["device"]) == (
        "tunnel-protocol=geneve: this kernel has no such devices (CONFIG_GENEVE): load its module geneve,"
        " or set tunnel-protocol=vxlan on all nodes"
    )
    assert (node.links, node.facts) == before
    await node.start(VXLAN)


async def test_a_device_that_a_killed_agent_left_down_gets_its_programs_before_it_comes_up() -> None:
    node = Node("vxlan")
    node.add("cilium_vxlan", "vxlan", VXLAN.port, up=False)
    await node.start(VXLAN)  # set_up() sees to it
    assert node.links["cilium_vxlan"].up


async def test_reverse_path_filtering_of_the_tunnel_is_off_after_a_restart_too() -> None:
    node = Node("vxlan")
    await node.start(VXLAN)
    setting = "net/ipv4/conf/cilium_vxlan/rp_filter"
    assert node.sysctls[setting] == "0"
    node.sysctls[setting] = "1"
    await node.start(VXLAN)
    assert node.sysctls[setting] == "0"


@pytest.mark.parametrize("settings", [VXLAN, GENEVE], ids=["vxlan", "geneve"])
async def test_foreign_links_with_tunnel_names_are_deleted(settings: TunnelSettings) -> None:
    node = Node("vxlan", "geneve")
    await node.start(settings)
    facts = node.facts
    for name in ("cilium_vxlan", "cilium_geneve"):
        node.made += 1
        node.add(name, "dummy", 0, up=True)
        await node.start(settings)
        assert node.names == [settings.link]
    assert isinstance(wanted(settings, 1500, 1450, None, ())["facts"], TunnelFacts)
    assert node.facts.port == facts.port
    assert settings.underlay is Family.IPV4
