"""containerd creates and removes pods through our plugin, as a kubelet requests it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab import agent_process
from hive.lab.demo.upgrade import second_build
from hive.lab.kernel import bpf_objects, pod_resources
from hive.lab.node import Lab
from hive.lab.traffic.probe import interfaces
from tests.support.account import agreed
from tests.support.agents import serving
from tests.support.containerd import Containerd, uid_of
from tests.support.runtime_place import RuntimePlace
from tests.support.traffic import lossless_traffic, unanswered

pytestmark = pytest.mark.node

MANY = [f"web-{number}" for number in range(20)]
MAC = "02:00:00:00:00:09"


@pytest.fixture
def runtime(lab: Lab) -> Iterator[Containerd]:
    """A containerd inside a node with a serving agent."""
    with containerd(lab) as made:
        yield made


@contextmanager
def containerd(lab: Lab) -> Iterator[Containerd]:
    with RuntimePlace(lab, "containerd") as place, Containerd(place) as made:
        made.wait_for_network()
        yield made


@contextmanager
def nothing_left(lab: Lab) -> Iterator[None]:
    """After the block the node has no pod, and of links, rows, pins and files what it had before."""
    with lab.open() as node:
        before = node.run(pod_resources)
        yield
        assert agreed(lab).listed == {}
        assert node.run(pod_resources).added_since(before) == []


def saved() -> dict[str, dict[str, Any]]:
    """The states on disk, by the pods' names."""
    found = [json.loads(path.read_bytes()) for path in Path("/run/cilium/state").glob("*/ep_config.json")]
    return {state["K8sPodName"]: state for state in found}


def test_twenty_pods_at_once_are_added_work_and_are_deleted(lab: Lab, runtime: Containerd) -> None:
    with nothing_left(lab), lab.open() as node:
        sandboxes = dict(zip(MANY, runtime.run(*MANY), strict=True))
        addresses = {name: runtime.address(sandbox) for name, sandbox in sandboxes.items()}
        assert sorted(addresses.values()) == sorted(ip for ip, _, _ in agreed(lab).listed.values())
        named = {one["status"]["external-identifiers"]["k8s-pod-name"]: one for one in node.run(endpoints)}
        states = node.run(saved)
        assert named.keys() == states.keys() == sandboxes.keys()
        for name, sandbox in sandboxes.items():
            assert named[name]["status"]["networking"]["addressing"][0]["ipv4"] == addresses[name]
            assert named[name]["status"]["external-identifiers"] == {
                "cni-attachment-id": f"{sandbox}:eth0",
                "container-id": sandbox,
                "k8s-namespace": "default",
                "k8s-pod-name": name,
                "pod-name": f"default/{name}",
            }
            assert states[name]["K8sUID"] == uid_of(name)
        assert node.run(unanswered, list(addresses.values())) == []
        with runtime.open(sandboxes["web-7"]) as pod:
            assert pod.run(unanswered, list(addresses.values())) == []
        runtime.remove(*sandboxes.values())


def endpoints() -> Any:
    return ask("/v1/endpoint")


def test_pods_talk_on_while_agents_die_and_another_build_comes(lab: Lab, runtime: Containerd) -> None:
    other = f"--datapath-object={second_build(lab)}"
    with nothing_left(lab), lab.open() as node:
        first, second = runtime.run("web-0", "web-1")
        entries = [set(node.run(bpf_objects).entries.values())]
        with (
            runtime.open(first) as source,
            runtime.open(second) as target,
            lossless_traffic(source, target, runtime.address(second)),
        ):
            for settings in ([], [other], []):  # as it was, upgraded, and back
                agent_process.crash(lab)
                serving(lab, *settings)
                (third,) = runtime.run("web-2")
                with runtime.open(third) as pod:
                    assert pod.run(unanswered, [runtime.address(first), runtime.address(second)]) == []
                runtime.remove(third)
                entries.append(set(node.run(bpf_objects).entries.values()))
        as_it_was, upgraded = entries[:2], entries[2]
        assert not upgraded & (as_it_was[0] | as_it_was[1] | entries[3])
        runtime.remove(first, second)


def test_pods_deleted_without_an_agent_are_removed_when_one_serves(lab: Lab, runtime: Containerd) -> None:
    with nothing_left(lab), lab.open() as node:
        sandboxes = runtime.run(*MANY)
        agent_process.crash(lab)
        runtime.remove(*sandboxes)
        assert len(node.run(queued)) == len(MANY)
        serving(lab)
    again = runtime.run("web-0")
    with lab.open() as node:
        assert node.run(unanswered, [runtime.address(one) for one in again]) == []


def queued() -> list[Path]:
    """The deletes that wait for an agent."""
    return list(Path("/run/cilium/deleteQueue").glob("*.delete"))


def test_a_pod_may_name_its_mac_address_by_annotation(node: Lab) -> None:
    serving(node, "--cni-mac-addr-mode=deterministic")
    with containerd(node) as runtime:
        (sandbox,) = runtime.run("web-0", annotations={"cni.cilium.io/mac-address": MAC})
        with runtime.open(sandbox) as pod:
            assert [link.mac for link in pod.run(interfaces)] == [MAC]
