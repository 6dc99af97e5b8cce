"""cilium_host and cilium_net: created, repaired, and unchanged when correct."""

import pytest
import structlog
from msgspec.structs import replace

from cells.netlink.rows import LinkInfo
from cells.node.router_kernel import Macs, ensure_pair
from lifecycle import Logger
from tests.unit.router.fakes import HOST, NET, FakeLinks

pytestmark = pytest.mark.anyio


@pytest.fixture
def log() -> Logger:
    logger: Logger = structlog.get_logger()
    return logger


async def test_the_pair_is_created_up_and_without_arp(log: Logger) -> None:
    links = FakeLinks()
    pair = await ensure_pair(links, 1450, log)
    assert links.done == ["create", "set cilium_host 1450", "set cilium_net 1450"]
    assert (pair.host.ifindex, pair.net.ifindex) == (12, 13)
    assert pair.host.mac != pair.net.mac


async def test_a_pair_that_is_right_is_not_touched(log: Logger) -> None:
    links = FakeLinks(HOST, NET)
    pair = await ensure_pair(links, 1500, log)
    assert links.done == []
    assert (pair.host, pair.net) == (HOST, NET)


async def test_a_pair_that_differs_is_changed_in_place(log: Logger) -> None:
    for wrong in (replace(HOST, up=False), replace(HOST, arp=True), replace(HOST, tx_queue_length=500)):
        links = FakeLinks(wrong, NET)
        await ensure_pair(links, 1500, log)
        assert links.done == ["set cilium_host 1500"]


@pytest.mark.parametrize(
    ("links", "deleted"),
    [
        ((HOST,), ["cilium_host"]),
        ((NET,), ["cilium_net"]),
        ((replace(HOST, kind="dummy", peer_ifindex=0), NET), ["cilium_host", "cilium_net"]),
        ((replace(HOST, peer_ifindex=9), NET), ["cilium_host", "cilium_net"]),
        ((replace(HOST, link_netnsid=0), NET), ["cilium_host", "cilium_net"]),
    ],
    ids=["net missing", "host missing", "no veth", "other peers", "peer in another namespace"],
)
async def test_links_that_are_not_a_veth_pair_are_replaced(
    links: tuple[LinkInfo, ...], deleted: list[str], log: Logger
) -> None:
    fake = FakeLinks(*links)
    pair = await ensure_pair(fake, 1500, log)
    assert fake.done[: len(deleted) + 1] == [*(f"delete {name}" for name in deleted), "create"]
    assert pair.host.ifindex == 12


async def test_a_pair_made_anew_may_have_the_macs_of_the_one_before(log: Logger) -> None:
    links = FakeLinks()
    pair = await ensure_pair(links, 1500, log, Macs(b"host..", b"net..."))
    assert (pair.host.mac, pair.net.mac) == (b"host..", b"net...")
