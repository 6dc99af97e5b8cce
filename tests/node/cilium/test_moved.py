"""A node with running pods migrates from Cilium's agent to ours without disruption."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from hive.lab import agent_process, pods
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.support.account import agreed
from tests.support.agents import serving
from tests.support.cilium_node import make_cilium
from tests.support.traffic import lossless_traffic

pytestmark = pytest.mark.node


def _name(links: Mapping[str, tuple[int, str]]) -> None:
    with IPRoute() as ip:
        for index, alias in links.values():
            ip.link("set", index=index, ifalias=alias)


@pytest.mark.parametrize("tcx", [True, False], ids=["tcx", "filters"])
def test_pods_of_cilium_talk_on_and_are_served_by_our_agent(lab: Lab, *, tcx: bool) -> None:
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    before = agreed(lab).listed
    with lab.open() as node, lab.open_pod("first") as source, lab.open_pod("second") as target:
        agent_process.crash(lab)
        with make_cilium(lab, tcx=tcx) as left, lossless_traffic(source, target, second.ipv4):
            assert all(node.run(os.path.exists, path) for path in [*left.links, *left.calls])
            serving(lab)
            named = {link: (index, f"hive endpoint {number}") for number, (_, link, index) in before.items()}
            node.run(partial(_name, named))  # Cilium does not, and nothing needs it
            assert agreed(lab).listed == before, "numbers, addresses and links stay"
            assert {path for path in [*left.links, *left.calls] if node.run(os.path.exists, path)} == set()
        assert bool(left.links) == tcx
        assert not node.run(os.path.exists, Path("/sys/fs/bpf/cilium/endpoints"))
        # What forwards now is ours alone: the maps of Cilium were removed with the block above.
        assert source.run(ping, second.ipv4, 3) != []
        assert source.run(ping, first.gateway, 3) != []
    pods.delete(lab, "second")
    third = pods.add(lab, "third")
    with lab.open_pod("third") as namespaces:
        assert namespaces.run(ping, first.ipv4, 3) != []
    assert {ip for ip, _, _ in agreed(lab).listed.values()} == {first.ipv4, third.ipv4}
    assert "Cilium's programs detached" in (lab.directory / "agent.log").read_text()
