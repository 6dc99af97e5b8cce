"""The whole agent on a node of its own: in order whatever siblings do, and clean whichever hook fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from cells.agent import agent
from cells.api import Api
from cells.cni_config import CniConfig
from cells.cni_server import CniServer, DeleteQueue
from cells.config import AgentConfig
from cells.datapath import Datapath
from cells.devices import Device
from cells.endpoint import Endpoint, Endpoints
from cells.endpoint_restore import ExposedEndpoints, OldEndpoints, RestoredEndpoints
from cells.health import HealthServer
from cells.host_ip_sync import HostIPSync
from cells.ipam import Ipam
from cells.maps import Maps, PolicyMaps
from cells.netlink import HostLinks
from cells.router import Router
from lifecycle import Hive, Table
from lifecycle.testing import Recorder, fail_each_hook, started
from tests.kernel.endpoint.nodes import SETTINGS as SMALL
from tests.kernel.endpoint.nodes import add_pod
from tests.support.namespaces import in_node, new_netns

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

CONFLIST = Path("/run/cilium/net.d/05-cilium.conflist")
SETTINGS = {**SMALL, "state-dir": "/run/cilium", "write-cni-conf-when-ready": str(CONFLIST)}

ORDER: tuple[tuple[object, object], ...] = (
    # the node is claimed before anything of it is touched
    (AgentConfig, Maps),
    (AgentConfig, OldEndpoints),
    (AgentConfig, Datapath),
    # newDaemon 8 < 13, 30: what restore reads and writes is open
    (Maps, PolicyMaps),
    (Maps, RestoredEndpoints),
    (PolicyMaps, RestoredEndpoints),
    (OldEndpoints, RestoredEndpoints),
    # 27 < 29 < 30 < 31: the range, then the addresses of old endpoints, then new ones, the router's first
    (Table[Device], Ipam),
    (Ipam, RestoredEndpoints),
    (RestoredEndpoints, Router),
    (RestoredEndpoints, ExposedEndpoints),
    # the programs are there before anything is attached to them
    (Maps, Datapath),
    (Datapath, Router),
    (Datapath, ExposedEndpoints),
    # 39 after 8 and 31
    (Maps, HostIPSync),
    (Router, HostIPSync),
    # before the API: endpoints of before in the list, queued deletions done, the node's addresses in the maps
    (ExposedEndpoints, DeleteQueue),
    (DeleteQueue, Api),
    (DeleteQueue, CniServer),
    (Router, Api),
    (Router, CniServer),
    (HostIPSync, Api),
    (HostIPSync, CniServer),
    # pods may come once all of that serves; probes succeed last
    (Api, CniConfig),
    (CniServer, CniConfig),
    (CniConfig, HealthServer),
    (HostIPSync, HealthServer),
    # what serves pods does so over an open netlink socket
    (HostLinks, CniServer),
)


@asynccontextmanager
async def pod_added() -> AsyncIterator[Endpoint]:
    """A pod that an agent has added before it stopped."""
    with new_netns() as pod:
        async with Hive(agent, settings=SETTINGS).started() as hive:
            added = add_pod(hive, 1, pod)
        yield added


async def test_the_facts_of_the_start_hold_in_any_order_of_siblings(in_node: None) -> None:
    async with pod_added() as pod:
        for seed in range(6):
            recorder = Recorder(seed)
            async with recorder.started(agent, settings=SETTINGS) as hive:
                recorder.assert_before(*ORDER)
                assert [one.id for one in hive.get(Endpoints).all()] == [pod.id]
            recorder.assert_clean()


@pytest.mark.timeout(300)
async def test_whichever_hook_fails_the_agent_ends_cleanly_and_the_pod_lives_on(in_node: None) -> None:
    async with pod_added() as pod:
        with structlog.testing.capture_logs():  # errors by the hundred
            failed = await fail_each_hook(agent, settings=SETTINGS)
        modules = {one.module for one in failed}
        assert modules == {
            f"agent.{name}"
            for name in (
                *("config", "netlink", "maps", "devices", "datapath", "ipam", "router", "endpoint"),
                *("endpoint-restore", "host-ip-sync", "cni-server", "cni-config", "api", "health"),
            )
        }
        async with started(agent, settings=SETTINGS) as hive:
            (restored,) = hive.get(Endpoints).all()
            assert (restored.id, restored.ipv4, restored.identity) == (pod.id, pod.ipv4, pod.identity)
