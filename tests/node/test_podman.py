"""podman with its CNI backend: our network by its name, containers brought up and down by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hive.lab import agent_process
from hive.lab.kernel import belongings
from hive.lab.node import Lab
from hive.lab.traffic.probe import interfaces
from tests.support.account import agreed
from tests.support.agents import serving
from tests.support.podman import NETWORK, Podman
from tests.support.runtime_place import RuntimePlace
from tests.support.talk import talking, unanswered

pytestmark = pytest.mark.node

SEVERAL = [f"web-{number}" for number in range(6)]


@pytest.fixture
def podman(lab: Lab) -> Iterator[Podman]:
    """A podman inside a node whose agent serves."""
    with RuntimePlace(lab, "podman") as place, Podman(place) as made:
        yield made


def test_containers_come_at_once_work_outlive_agents_and_leave_nothing(lab: Lab, podman: Podman) -> None:
    assert podman.networks() == [NETWORK]
    with lab.open() as node:
        before = node.run(belongings)
        podman.run(*SEVERAL)
        addresses = [podman.address(name) for name in SEVERAL]
        assert sorted(addresses) == sorted(ip for ip, _, _ in agreed(lab).listed.values())
        assert node.run(unanswered, addresses) == []
        with podman.open("web-0") as source, podman.open("web-1") as target:
            assert [link.addresses for link in source.run(interfaces)] == [(f"{addresses[0]}/32",)]
            assert source.run(unanswered, addresses) == []
            with talking(source, target, addresses[1]):
                agent_process.crash(lab)
                serving(lab)
                podman.remove(*SEVERAL[4:])
                podman.run("web-9")
        agent_process.crash(lab)
        podman.remove(*SEVERAL[:4])
        serving(lab)
        assert {ip for ip, _, _ in agreed(lab).listed.values()} == {podman.address("web-9")}
        podman.remove("web-9")
        assert agreed(lab).listed == {}
        assert node.run(belongings).beyond(before) == []
