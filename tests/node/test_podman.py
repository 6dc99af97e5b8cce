"""Containers started and stopped without a kubelet, attached to our network by its name.

By podman with its CNI backend in Debian 12; from Debian 13 on, where podman has none, by ctr of containerd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hive.lab import agent_process
from hive.lab.kernel import pod_resources
from hive.lab.node import Lab
from hive.lab.traffic.probe import interfaces
from tests.support.account import agreed
from tests.support.agents import serving
from tests.support.counts import Count
from tests.support.ctr import Ctr
from tests.support.podman import NETWORK, WITHOUT_CNI, Podman, installed_version
from tests.support.runtime_place import RuntimePlace
from tests.support.traffic import lossless_traffic, unanswered

pytestmark = pytest.mark.node

SEVERAL = [f"web-{number}" for number in range(6)]


@pytest.fixture
def runtime(lab: Lab, count: Count) -> Iterator[Podman | Ctr]:
    """The runtime inside a node with a serving agent; the run's summary names it."""
    version = installed_version()
    with RuntimePlace(lab, "runtime") as place, ExitStack() as stack:
        if version[0] < WITHOUT_CNI:
            count("runtime of containers without a kubelet", {"podman, by its CNI backend": 1})
            yield stack.enter_context(Podman(place))
        else:
            why = f"ctr: podman {version[0]} is built without CNI"
            count("runtime of containers without a kubelet", {why: 1})
            yield stack.enter_context(Ctr(lab, place))


def test_containers_come_at_once_work_outlive_agents_and_leave_nothing(
    lab: Lab, runtime: Podman | Ctr
) -> None:
    with lab.open() as node:
        before = node.run(pod_resources)
        runtime.run(*SEVERAL)
        addresses = [runtime.address(name) for name in SEVERAL]
        assert {runtime.network(name) for name in SEVERAL} == {NETWORK}
        assert sorted(addresses) == sorted(ip for ip, _, _ in agreed(lab).listed.values())
        assert node.run(unanswered, addresses) == []
        with runtime.open("web-0") as source, runtime.open("web-1") as target:
            assert [link.addresses for link in source.run(interfaces)] == [(f"{addresses[0]}/32",)]
            assert source.run(unanswered, addresses) == []
            with lossless_traffic(source, target, addresses[1]):
                agent_process.crash(lab)
                serving(lab)
                runtime.remove(*SEVERAL[4:])
                runtime.run("web-9")
        agent_process.crash(lab)
        runtime.remove(*SEVERAL[:4])
        serving(lab)
        assert {ip for ip, _, _ in agreed(lab).listed.values()} == {runtime.address("web-9")}
        runtime.remove("web-9")
        assert agreed(lab).listed == {}
        assert node.run(pod_resources).added_since(before) == []
