"""Pods' links in real namespaces."""

import ctypes
import errno
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_interface,
)
from pathlib import Path

import anyio
import pytest

from cells.maps.bpf import buffer, command, program_info
from cells.netlink.connection import NetlinkError, open_socket
from cells.netlink.links import HostLinks, programs_of
from cells.netlink.messages import IPAddress, IPNetwork, VethPair
from cells.netlink.namespaces import PodLink
from cells.netlink.rows import LinkInfo, LinkPrograms
from lifecycle import NotStartedError
from tests.kernel.netlink.host_links import HOST_MAC, POD_MAC, host_links
from tests.support.namespaces import Namespaces, in_node, inside, new_netns

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


def pair(number: int, netns_fd: int | None, pod_name: str = "eth0") -> VethPair:
    return VethPair(f"lxc{number:012x}", HOST_MAC, pod_name, POD_MAC, 1450, netns_fd)


@asynccontextmanager
async def pods(count: int) -> AsyncIterator[list[Namespaces]]:
    made = [new_netns() for _ in range(count)]
    try:
        yield made
    finally:
        for pod in made:
            pod.close()


def in_pod(pod: Namespaces) -> int:
    """A netlink socket of the pod, as the plugin hands over."""
    with inside(pod):
        return open_socket()


def link_of(pod: Namespaces, name: str) -> LinkInfo | None:
    """A link as the pod sees it."""

    async def look() -> LinkInfo | None:
        async with host_links() as links:
            return links.find(name)

    found: LinkInfo | None = pod.run(anyio.run, look)
    return found


async def test_a_pair_is_created_with_its_peer_in_the_pod(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        host = links.find("lxc000000000001")
        assert host is not None
        assert (host.ifindex, host.peer_ifindex) == (created.host_ifindex, created.pod_ifindex)
        assert (host.mac, host.mtu, host.kind, host.up) == (HOST_MAC, 1450, "veth", False)
        assert (host.tx_queue_length, host.group, host.alias) == (1000, 0, "")
        assert host.link_netnsid is not None
        peer = link_of(pod, "eth0")
        assert peer is not None
        assert (peer.ifindex, peer.mac, peer.mtu, peer.tx_queue_length) == (
            created.pod_ifindex,
            POD_MAC,
            1450,
            1000,
        )


async def test_a_name_that_is_taken_is_eexist_and_changes_nothing(in_node: None) -> None:
    async with host_links() as links, pods(2) as [one, two]:
        links.create_veth(pair(1, one.net))
        before = links.links()
        with pytest.raises(
            NetlinkError, match="create veth lxc000000000001 with peer eth0: File exists"
        ) as caught:
            links.create_veth(pair(1, two.net))
        assert caught.value.errno == errno.EEXIST
        with pytest.raises(NetlinkError) as caught:
            links.create_veth(pair(2, one.net))
        assert caught.value.errno == errno.EEXIST
        assert links.links() == before


async def test_a_veth_pair_created_ahead_is_the_one_returned(in_node: None) -> None:
    async with host_links() as links, pods(2) as [one, two]:
        links.start_create_veth(pair(1, one.net))
        with pytest.raises(NetlinkError) as caught:
            links.start_create_veth(pair(2, two.net))
        assert caught.value.errno == errno.EBUSY
        other = links.create_veth(pair(2, two.net))
        made = links.finish_create_veth()
        found = {link.name: (link.ifindex, link.peer_ifindex) for link in links.links()}
        assert found["lxc000000000001"] == (made.host_ifindex, made.pod_ifindex)
        assert found["lxc000000000002"] == (other.host_ifindex, other.pod_ifindex)


async def test_the_error_of_a_veth_pair_created_ahead_is_raised_when_it_is_fetched(in_node: None) -> None:
    async with host_links() as links, pods(2) as [one, two]:
        links.create_veth(pair(1, one.net))
        for wanted in (pair(1, two.net), pair(2, one.net)):
            links.start_create_veth(wanted)
            with pytest.raises(NetlinkError, match=r"create veth .* File exists") as caught:
                links.finish_create_veth()
            assert caught.value.errno == errno.EEXIST
        links.start_create_veth(pair(2, two.net))
        assert links.finish_create_veth().host_ifindex > 0


async def test_a_veth_pair_created_ahead_and_never_fetched_stays_after_the_stop(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        links.start_create_veth(pair(1, pod.net))
        await anyio.lowlevel.checkpoint()
    async with host_links() as links:
        with pytest.raises(NetlinkError, match="no request"):
            links.finish_create_veth()


async def test_activation_sets_alias_up_and_turns_the_reverse_path_filter_off(in_node: None) -> None:
    set_reverse_path_filter("default", "2")
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        assert reverse_path_filter("lxc000000000001") == "2"
        links.activate(created.host_ifindex, "hive endpoint 7")
        host = links.find("lxc000000000001")
        assert host is not None
        assert (host.up, host.alias) == (True, "hive endpoint 7")
        assert reverse_path_filter("lxc000000000001") == "0"


def reverse_path_filter(device: str) -> str:
    return Path(f"/proc/sys/net/ipv4/conf/{device}/rp_filter").read_text(encoding="ascii").strip()


def set_reverse_path_filter(device: str, value: str) -> None:
    Path(f"/proc/sys/net/ipv4/conf/{device}/rp_filter").write_text(value, encoding="ascii")


async def test_a_pod_gets_its_address_and_routes(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        fd = in_pod(pod)
        link = PodLink(fd)
        arguments = (created.pod_ifindex, "eth0", [IPv4Address("10.0.1.7")], [IPv4Address("10.0.1.5")], 1400)
        link.configure(*arguments)
        addresses, routes = pod.run(pod_network)
        assert addresses == ["10.0.1.7/32"]
        assert routes == [("0.0.0.0/0", "10.0.1.5", 0, 1400), ("10.0.1.5/32", None, 253, None)]
        with pytest.raises(NetlinkError, match=r"add address 10.0.1.7/32 to eth0: File exists"):
            link.configure(*arguments)
        os.close(fd)


async def test_a_pod_gets_addresses_and_routes_of_both_families(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        fd = in_pod(pod)
        addresses: list[IPv4Address | IPv6Address] = [IPv6Address("fd00::7"), IPv4Address("10.0.1.7")]
        gateways: list[IPv4Address | IPv6Address] = [IPv6Address("fd00::5"), IPv4Address("10.0.1.5")]
        PodLink(fd).configure(created.pod_ifindex, "eth0", addresses, gateways, 1400)
        assert pod.run(pod_network)[0] == ["10.0.1.7/32"]
        given, routes = pod.run(pod_network6)
        assert given == [("fd00::7/128", True)]
        assert routes == {("::/0", "fd00::5", 1400), ("fd00::5/128", None, None)}
        os.close(fd)


def pod_network6() -> tuple[list[tuple[str, bool]], set[tuple[str, str | None, int | None]]]:
    """Global IPv6 addresses, whether without duplicate detection, and the routes asked for."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        addresses = [
            (f"{row.get_attr('IFA_ADDRESS')}/{row['prefixlen']}", bool(row["flags"] & 0x02))
            for row in ip.get_addr(family=10, scope=0)
        ]
        routes = {
            (
                f"{row.get_attr('RTA_DST', '::')}/{row['dst_len']}",
                row.get_attr("RTA_GATEWAY"),
                row.get_nested("RTA_METRICS", "RTAX_MTU"),
            )
            for row in ip.get_routes(family=10, table=254)
            if row["dst_len"] == 0 or row.get_attr("RTA_DST") == "fd00::5"
        }
    return addresses, routes


def pod_network() -> tuple[list[str], list[tuple[str, str | None, int, int | None]]]:
    """Addresses and main-table routes of the namespace, as pyroute2 reads them."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        addresses = [f"{row.get_attr('IFA_LOCAL')}/{row['prefixlen']}" for row in ip.get_addr(family=2)]
        routes = [
            (
                f"{row.get_attr('RTA_DST', '0.0.0.0')}/{row['dst_len']}",
                row.get_attr("RTA_GATEWAY"),
                row["scope"],
                row.get_nested("RTA_METRICS", "RTAX_MTU"),
            )
            for row in ip.get_routes(family=2, table=254)
        ]
    return addresses, sorted(routes)


async def test_addresses_of_a_pod_are_read_by_the_name_of_its_link(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        fd = in_pod(pod)
        link, addresses = PodLink(fd), (IPv6Address("fd00::7"), IPv4Address("10.0.1.7"))
        assert link.addresses("eth0") == frozenset()
        gateways = (IPv6Address("fd00::5"), IPv4Address("10.0.1.5"))
        link.configure(created.pod_ifindex, "eth0", addresses, gateways, 1400)
        found = link.addresses("eth0")
        assert found is not None
        assert {ip for ip in found if not ip.is_link_local} == {ip_interface(ip) for ip in addresses}
        assert link.addresses("net1") is None
        os.close(fd)


async def test_both_ends_of_a_pair_are_found_from_the_pod(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        fd = in_pod(pod)
        (inner,) = [link for link in PodLink(fd).links() if link.kind == "veth"]
        assert (inner.name, inner.ifindex) == ("eth0", created.pod_ifindex)
        host = links.at(inner.peer_ifindex)
        assert host is not None
        assert (host.name, host.peer_ifindex) == (pair(1, None).host_name, inner.ifindex)
        assert links.at(999) is None
        os.close(fd)


async def test_a_running_pod_gets_another_mac_and_mtu_of_routes(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        fd = in_pod(pod)
        link, ifindex, mac = PodLink(fd), created.pod_ifindex, bytes.fromhex("0a0000000077")
        addresses = (IPv6Address("fd00::7"), IPv4Address("10.0.1.7"))
        link.configure(ifindex, "eth0", addresses, (IPv6Address("fd00::5"), IPv4Address("10.0.1.5")), 1400)
        assert [ip for ip in link.addresses_of(ifindex) if not ip.is_link_local] == [
            IPv4Address("10.0.1.7"),
            IPv6Address("fd00::7"),
        ]
        link.set_mac(ifindex, "eth0", mac)
        before = pod.run(pod_network), pod.run(pod_network6)
        for _ in range(2):
            link.set_route_mtu(1300)
        after = pod.run(pod_network), pod.run(pod_network6)
        assert [(*row[:3], 1300) for row in before[0][1]] == after[0][1]
        assert {(*row[:2], 1300) for row in before[1][1]} == after[1][1]
        found = link_of(pod, "eth0")
        assert found is not None
        assert found.mac == mac
        os.close(fd)


async def test_a_link_gets_another_mtu_with_those_of_its_routes_that_have_one(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        fd = in_pod(pod)
        link, ifindex = PodLink(fd), created.pod_ifindex
        gateways = (IPv6Address("fd00::5"), IPv4Address("10.0.1.5"))
        link.configure(ifindex, "eth0", (IPv6Address("fd00::7"), IPv4Address("10.0.1.7")), gateways, 1450)
        before = pod.run(pod_network)[1], pod.run(pod_network6)[1]
        for _ in range(2):
            link.resize(ifindex, 1400, 1350)
        after = pod.run(pod_network)[1], pod.run(pod_network6)[1]
        for rows, others in zip(before, after, strict=True):
            assert {(*row[:-1], 1350 if row[-1] == 1450 else row[-1]) for row in rows} == set(others)
        found = link_of(pod, "eth0")
        assert found is not None
        assert found.mtu == 1400
        host = links.find(pair(1, None).host_name)
        assert host is not None
        links.set_mtu(host.ifindex, 1400)
        assert (resized := links.at(host.ifindex)) is not None
        assert (host.mtu, resized.mtu) == (1450, 1400)
        os.close(fd)


async def test_an_old_link_in_the_pod_can_be_deleted_by_name(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        fd = in_pod(pod)
        link = PodLink(fd)
        assert link.delete("eth0") is False
        links.create_veth(pair(1, pod.net))
        assert link.delete("eth0") is True
        assert links.find("lxc000000000001") is None
        os.close(fd)


async def test_programs_are_attached_and_replaced(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        first, second = program(b"first"), program(b"second")
        links.attach_clsact(created.host_ifindex, first, second, "cil_in", "cil_out")
        assert await filters(created.host_ifindex) == [
            ("ingress", 1, 1, "cil_in"),
            ("egress", 1, 1, "cil_out"),
        ]
        links.attach_clsact(created.host_ifindex, second, None, "cil_new")
        assert await filters(created.host_ifindex) == [
            ("ingress", 1, 1, "cil_new"),
            ("egress", 1, 1, "cil_out"),
        ]
        links.attach_clsact(created.host_ifindex, second, None, "cil_new")
        assert len(await filters(created.host_ifindex)) == 2


async def test_the_programs_of_links_can_be_read(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        index = links.create_veth(pair(1, pod.net)).host_ifindex
        assert links.programs(index) == LinkPrograms(0, 0)
        first, second = program(b"first"), program(b"second")
        links.attach_clsact(index, first, second, "cil_in", "cil_out")
        attached = LinkPrograms(program_info(first).id, program_info(second).id)
        assert links.programs(index) == attached
        assert programs_of([index, 4711]) == {index: attached, 4711: LinkPrograms(0, 0)}
        run("tc filter del dev lxc000000000001 ingress")
        assert links.programs(index) == LinkPrograms(0, attached.egress)
        run("tc qdisc del dev lxc000000000001 clsact")
        assert links.programs(index) == LinkPrograms(0, 0)


async def test_a_bad_program_is_refused_by_name(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        created = links.create_veth(pair(1, pod.net))
        with pytest.raises(NetlinkError, match=f"attach cil_x to link {created.host_ifindex}: "):
            links.attach_clsact(created.host_ifindex, 0, None, "cil_x")


def run(command: str) -> None:
    assert os.system(command) == 0  # noqa: S605


def program(name: bytes) -> int:
    """A tc program that lets everything through."""
    code, licence = buffer(struct.pack("<Q", 0xB7) + struct.pack("<Q", 0x95)), buffer(b"GPL\0")
    at_code, at_licence = ctypes.addressof(code), ctypes.addressof(licence)
    fields = struct.pack("<IIQQIIQII16s", 3, 2, at_code, at_licence, 0, 0, 0, 0, 0, name)
    return command(5, buffer(fields), "load", "program")


async def filters(ifindex: int) -> list[tuple[str, int, int, str]]:
    """(direction, handle, priority, name) of the link's filters, as pyroute2 reads them."""
    from pyroute2 import AsyncIPRoute

    found = []
    async with AsyncIPRoute() as ip:
        for direction, parent in (("ingress", 0xFFFFFFF2), ("egress", 0xFFFFFFF3)):
            async for row in await ip.get_filters(index=ifindex, parent=parent):
                options = row.get_attr("TCA_OPTIONS")
                if options is not None and options.get_attr("TCA_BPF_NAME"):
                    assert options.get_attr("TCA_BPF_FLAGS") == 1
                    name = options.get_attr("TCA_BPF_NAME")
                    found.append((direction, row["handle"], row["info"] >> 16, name))
    return found


async def test_links_are_reaped_together_and_others_stay(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        made = [links.create_veth(pair(i, pod.net, f"eth{i}")).host_ifindex for i in range(20)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(links.reap, made[:5])
            tasks.start_soon(links.reap, made[5:6])
            for ifindex in made[6:15]:
                tasks.start_soon(links.reap, [ifindex])
        assert {link.ifindex for link in links.links() if link.kind == "veth"} == set(made[15:])
        assert {link.group for link in links.links()} == {0}


async def test_deleting_a_missing_link_succeeds(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        made = [links.create_veth(pair(i, pod.net, f"eth{i}")).host_ifindex for i in range(2)]
        await links.reap(made)
        await links.reap(made)
        await links.reap([made[0]])
        await links.reap([])


async def test_a_link_that_cannot_be_deleted_does_not_keep_the_others(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        made = links.create_veth(pair(1, pod.net)).host_ifindex
        with pytest.raises(NetlinkError, match="delete link 1: Operation not supported"):
            await links.reap([1, made])
        assert [link.name for link in links.links()] == ["lo"]


async def test_a_caller_that_is_cancelled_does_not_stop_the_deletion(in_node: None) -> None:
    async with host_links() as links, pods(1) as [pod]:
        made = links.create_veth(pair(1, pod.net)).host_ifindex
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(links.reap, [made])
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await links.reap([made])
        assert links.find("lxc000000000001") is None


async def test_what_was_handed_in_is_deleted_before_the_hook_stops(in_node: None) -> None:
    async with pods(1) as [pod], anyio.create_task_group() as tasks:
        async with host_links() as links:
            made = [links.create_veth(pair(i, pod.net, f"eth{i}")).host_ifindex for i in range(3)]
            for ifindex in made:
                tasks.start_soon(links.reap, [ifindex])
            await anyio.lowlevel.checkpoint()
        async with host_links() as links:
            assert [link.name for link in links.links()] == ["lo"]


async def test_addresses_of_a_link_are_listed(in_node: None) -> None:
    async with host_links() as links:
        assert links.addresses() == {1: [IPv4Interface("127.0.0.1/8"), IPv6Interface("::1/128")]}


async def test_addresses_and_routes_of_both_families_are_set_twice_and_removed(in_node: None) -> None:
    both: list[tuple[IPAddress, IPNetwork]] = [
        (IPv6Address("fd00::5"), IPv6Network("fd00::/112")),
        (IPv4Address("10.0.1.5"), IPv4Network("10.0.1.0/24")),
    ]
    async with host_links() as links:
        made = links.create_veth(VethPair("router", HOST_MAC, "net", POD_MAC, 1500, None))
        for name, index in (("router", made.host_ifindex), ("net", made.pod_ifindex)):
            links.set_device(index, name, 1500)
        for gateway, network in both:
            links.add_address(made.host_ifindex, "router", gateway)
            for _ in range(2):
                if gateway.version == 4:
                    links.set_route(made.host_ifindex, IPv4Network(str(gateway)), None, None)
                via = gateway if gateway.version == 4 else None
                links.set_route(made.host_ifindex, network, via, gateway)
        held = links.addresses()[made.host_ifindex]
        assert [str(each) for each in held if not each.is_link_local] == ["10.0.1.5/32", "fd00::5/128"]
        routed = await links.routes(made.host_ifindex)
        assert {
            (str(each.destination), str(each.gateway), str(each.source), each.by_kernel)
            for each in routed
            if not each.destination.is_link_local
        } == {
            ("10.0.1.0/24", "10.0.1.5", "10.0.1.5", False),
            ("10.0.1.5/32", "None", "None", False),
            ("fd00::/112", "None", "fd00::5", False),
            ("fd00::5/128", "None", "None", True),
        }
        for _ in range(2):
            links.remove_address(made.host_ifindex, "router", IPv6Interface("fd00::5"))
            links.remove_route(made.host_ifindex, IPv6Network("fd00::/112"))
        left = [each.destination for each in await links.routes(made.host_ifindex)]
        assert sorted(str(each) for each in left if not each.is_link_local) == ["10.0.1.0/24", "10.0.1.5/32"]


def test_use_before_the_start_hook_raises_an_error() -> None:
    class Hooks:
        def enter(self, name: str, factory: Callable[[], object]) -> None: ...

    with pytest.raises(NotStartedError, match="its hook has not started"):
        HostLinks(Hooks()).links()  # type: ignore[arg-type]
