"""An endpoint is removed when its namespace ends without a DEL; all others stay."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cells.endpoint import Endpoint, Endpoints
from cells.endpoint import gc as endpoint_gc
from cells.endpoint.gc import EndpointGC
from cells.maps.policy_maps import PolicyMaps
from cells.node.ipam import Ipam
from lifecycle import HealthTree, Hive, invoke
from lifecycle.testing import eventually
from tests.kernel.endpoint.nodes import CELLS, SETTINGS, STATE, add_pod, needed, pods
from tests.support.namespaces import in_node, new_netns

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


def asked(_gc: EndpointGC, _health: HealthTree, _policies: PolicyMaps) -> None:
    """What the tests need of the hive."""


@asynccontextmanager
async def agent(interval: str) -> AsyncIterator[Hive]:
    settings = {**SETTINGS, "endpoint-gc-interval": interval}
    async with Hive(*CELLS, endpoint_gc.cell, invoke(needed, asked), settings=settings).started() as hive:
        yield hive


def left_of(hive: Hive, made: Endpoint) -> tuple[bool, bool, bool, bool]:
    """Whether there is the endpoint, its state, its address's owner, its policy map."""
    return (
        hive.get(Endpoints).get(made.id) is not None,
        (STATE / str(made.id)).exists(),
        str(made.ipv4) in hive.get(Ipam).dump(),
        made.id in {policy.endpoint_id for policy in hive.get(PolicyMaps).used},
    )


async def test_an_endpoint_without_its_namespace_is_removed_and_others_stay(in_node: None) -> None:
    with pods(1) as [stays]:
        async with agent("1s") as hive:
            retained = add_pod(hive, 1, stays)
            ends = new_netns()
            vanished = add_pod(hive, 2, ends)
            ends.close()
            await eventually(lambda: left_of(hive, vanished) == (False, False, False, False), within=30)
            assert left_of(hive, retained) == (True, True, True, True)


async def test_a_missing_endpoint_is_marked_by_one_pass_and_removed_by_the_next(in_node: None) -> None:
    with pods(1) as [stays]:
        async with agent("0s") as hive:
            retained = add_pod(hive, 1, stays)
            ends = new_netns()
            vanished = add_pod(hive, 2, ends)
            gc = hive.get(EndpointGC)
            await gc.collect()
            ends.close()
            await eventually(lambda: missing(vanished))
            await gc.collect()
            assert left_of(hive, vanished) == (True, True, True, True)
            (status,) = hive.get(HealthTree).snapshot("endpoint-gc.gc")
            assert status.message == f"endpoints without a link: {vanished.id}; the next run removes them"
            await gc.collect()
            assert left_of(hive, vanished) == (False, False, False, False)
            assert left_of(hive, retained) == (True, True, True, True)


def missing(made: Endpoint) -> bool:
    return bool(endpoint_gc.LinkPresence().missing([made]))
