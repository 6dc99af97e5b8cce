"""HTTP rules for pods with another plugin's links, also on one bridge."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.proxy.envoy import end_envoy
from hive.lab import agent_process
from hive.lab.node import Lab
from tests.node.agent.manifests import pod, write
from tests.node.chaining.chained import BRIDGE, chained, network
from tests.support.chain import Chain
from tests.support.requests import PUBLIC, Shop, answering, policy
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def test_requests_between_pods_of_a_bridge_are_read(node: Lab, tmp_path: Path) -> None:
    network(node, BRIDGE)
    write(tmp_path, "pods", pod("client", {"app": "client"}), pod("server", {"app": "server"}))
    pid = chained(node, f"--manifests-dir={tmp_path}")
    chain = Chain.written(node)
    seller, client = chain.add("server").attached, chain.add("client").attached
    try:
        with node.open_pod("server") as there, node.open_pod("client") as here, answering(there):
            place = Shop(node, pid, client, seller, here, tmp_path)
            eventually(lambda: place.get("/secret").status == 200)
            place.rule(policy(PUBLIC))
            eventually(lambda: place.get("/secret").status == 403)
            assert place.get("/public/1") == (200, client.ipv4)
            place.rule(policy(PUBLIC), policy({"headers": ["X-Shop: 1"]}, direction="egress", name="out"))
            eventually(lambda: place.get("/public/1").status == 403)
            assert place.get("/public/1", **{"X-Shop": "1"}) == (200, client.ipv4)
            place.rule(policy(PUBLIC, direction="egress"))
            eventually(lambda: place.get("/public/1") == (200, client.ipv4))
            assert place.get("/secret").status == 403
    finally:
        try:
            agent_process.crash(node)
        finally:
            with node.open() as host:
                host.run(end_envoy, Path("/var/run/cilium"))
