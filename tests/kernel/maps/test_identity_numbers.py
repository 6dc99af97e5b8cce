"""Unsaved identity numbers of an earlier agent in kernel maps are not reused for other labels."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path

import pytest

from cells import config, maps
from cells.cluster import identity
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import scope_of
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from lifecycle import Hive, invoke
from tests.kernel.maps.nodes import SMALL
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

NETWORK = ip_network("192.0.2.0/24")
A, B = (("cidr:192.0.2.0/24", "reserved:world"), ("cidr:203.0.113.0/24", "reserved:world"))
POD_A, POD_B = (("k8s:app=a",), ("k8s:app=b",))
NODE_A, NODE_B = (("k8s:zone=a", "reserved:remote-node"), ("k8s:zone=b", "reserved:remote-node"))


def needs(maps: Maps, _: Identities) -> None:
    """Cells in which policies select pods by prefixes, too."""
    maps.use("policy_prefixes")


@asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[Hive]:
    settings = {**SMALL, "state-dir": str(folder)}
    cells = (config.cell, maps.cell, identity.cell, invoke(needs))
    async with Hive(*cells, settings=settings).started() as hive:
        yield hive


async def number(hive: Hive, labels: tuple[str, ...]) -> int:
    return (await hive.get(Identities).acquire(labels)).id


@pytest.mark.parametrize("where", ["ipcache", "policy_prefixes", "policy map"])
@pytest.mark.parametrize(
    ("old", "new"), [(A, B), (NODE_A, NODE_B), (POD_A, POD_B)], ids=["prefixes", "nodes", "pods"]
)
async def test_a_number_left_in_a_map_is_given_to_no_other_labels(
    in_node: None, tmp_path: Path, where: str, old: tuple[str, ...], new: tuple[str, ...]
) -> None:
    async with agent(tmp_path) as hive:
        left = await number(hive, old)
        if where == "policy map":
            hive.get(PolicyMaps).acquire().replace({PolicyKey(left, egress=False): PolicyEntry()})
        else:
            value = IpcacheValue(left).pack() if where == "ipcache" else left.to_bytes(4, "little")
            getattr(hive.get(Maps), where).update(IpcacheKey.of(NETWORK).pack(), value)
    # As an agent leaves it that is killed before it saves the number.
    (tmp_path / "state" / identity.FILE).unlink(missing_ok=True)
    async with agent(tmp_path) as hive:
        given = await number(hive, new)
        assert given != left
        assert scope_of(given) is scope_of(left)


async def test_labels_that_were_saved_keep_the_number_that_the_maps_have(
    in_node: None, tmp_path: Path
) -> None:
    async with agent(tmp_path) as hive:
        left = await number(hive, A)
        hive.get(Maps).ipcache.update(IpcacheKey.of(NETWORK).pack(), IpcacheValue(left).pack())
    async with agent(tmp_path) as hive:
        assert await number(hive, B) != left
        assert await number(hive, A) == left
