"""The whole agent on a node: ordered start in any order of siblings, clean stop after any failed hook."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from cells.agent import agent
from cells.endpoint import Endpoint, Endpoints
from lifecycle import Hive
from lifecycle.testing import Recorder, fail_each_hook, started
from tests.kernel.endpoint.nodes import SETTINGS as SMALL
from tests.kernel.endpoint.nodes import add_pod
from tests.support.agent_order import ORDER
from tests.support.namespaces import in_node, new_netns
from tests.support.points import EVERY, each_module, seeds

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

CONFLIST = Path("/run/cilium/net.d/05-cilium.conflist")
SETTINGS = {**SMALL, "state-dir": "/run/cilium", "write-cni-conf-when-ready": str(CONFLIST)}


@asynccontextmanager
async def pod_added() -> AsyncIterator[Endpoint]:
    """A pod that an agent has added before it stopped."""
    with new_netns() as pod:
        async with Hive(agent, settings=SETTINGS).started() as hive:
            added = add_pod(hive, 1, pod)
        yield added


async def test_the_facts_of_the_start_hold_in_any_order_of_siblings(in_node: None) -> None:
    async with pod_added() as pod:
        for seed in seeds(6):
            recorder = Recorder(seed)
            async with recorder.started(agent, settings=SETTINGS) as hive:
                recorder.assert_before(*ORDER)
                assert [one.id for one in hive.get(Endpoints).all()] == [pod.id]
            recorder.assert_clean()


@pytest.mark.timeout(
    3600 if EVERY else 600
)  # each start loads all programs; every hook in every way in a soak
async def test_whichever_hook_fails_the_agent_ends_cleanly_and_the_pod_lives_on(in_node: None) -> None:
    async with pod_added() as pod:
        with structlog.testing.capture_logs():  # errors by the hundred
            failed = await fail_each_hook(agent, settings=SETTINGS, within=60, only=each_module())
        hooks = Hive(agent, settings=SETTINGS).graph().hooks
        assert {one.module for one in failed} == {hook.module for hook in hooks}
        async with started(agent, settings=SETTINGS) as hive:
            (restored,) = hive.get(Endpoints).all()
            assert (restored.id, restored.ipv4, restored.identity) == (pod.id, pod.ipv4, pod.identity)
