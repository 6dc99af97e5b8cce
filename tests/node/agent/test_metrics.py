"""Metrics of a real agent: pods' traffic, one line for bad settings, no listener unless configured."""

from __future__ import annotations

import http.client
import socket
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hive.lab.node import Lab
from tests.node.agent.ports import listening
from tests.support.agents import invoke, run_agent, serving, terminated
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def ask(path: str = "/metrics", port: int = 9962) -> tuple[int, str]:
    """Status and text of a scrape, from inside the node."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def scrape(lab: Lab) -> Samples:
    """Every sample of the node's agent."""
    with lab.open() as node:
        status, text = node.run(ask)
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one(samples: Samples, name: str, **labels: str) -> float:
    """The value of a series, 0 where there is none."""
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def send(target: str, count: int) -> None:
    """Send datagrams to a pod that does not listen."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(count):
            sender.sendto(bytes(100), (target, 7))


def test_traffic_of_pods_is_counted_in_metrics(node: Lab) -> None:
    serving(node, "--prometheus-serve-addr=:9962", "--metrics=+cilium_statedb_table_objects")
    before = scrape(node)
    for pod in ("a", "b"):
        node.hold_pod(pod)
    target: Any = [invoke(node, pod, "ADD").json for pod in ("a", "b")][1]
    address = target["ips"][0]["address"].partition("/")[0]
    with node.open_pod("a") as pod_a:
        pod_a.run(partial(send, address, 20))
    after = scrape(node)
    assert one(after, "cilium_endpoint") == 2
    assert one(after, "cilium_statedb_table_objects", table="endpoints") == 2
    moved = {"action": "allocate", "family": "ipv4"}
    name = "cilium_ipam_events_total"
    assert one(after, name, **moved) - one(before, name, **moved) == 2
    forwarded = sum(value for (name, _), value in after.items() if name == "cilium_forward_count_total")
    assert forwarded >= 20
    assert one(after, "cilium_agent_bootstrap_seconds_count", scope="overall", outcome="success") == 1
    assert one(after, "cilium_process_resident_memory_bytes") > 10**7
    assert one(after, "cilium_errors_warnings_total", level="error", subsystem="metrics") == 0
    for pod in ("a", "b"):
        assert invoke(node, pod, "DEL").code == 0
    vanished = {"action": "release", "family": "ipv4"}
    eventually(lambda: one(scrape(node), "cilium_ipam_events_total", **vanished) == 2)
    assert one(scrape(node), "cilium_endpoint") == 0


def test_nothing_listens_unless_asked_and_nothing_after_the_stop(node: Lab) -> None:
    pid = serving(node)
    with node.open() as inside, pytest.raises(ConnectionRefusedError):
        inside.run(ask)
    assert terminated(node, pid) == 0
    pid = serving(node, "--prometheus-serve-addr=127.0.0.1:9962")
    scrape(node)
    assert terminated(node, pid) == 0
    with node.open() as inside, pytest.raises(ConnectionRefusedError):
        inside.run(ask)


def test_a_wrong_address_is_one_line(node: Lab) -> None:
    ended = run_agent(node, "--prometheus-serve-addr=9962")
    assert ended.code == 2
    assert ended.line == (
        "hive: --prometheus-serve-addr=9962: expected host:port or :port, with a TCP port, 1 to 65535"
    )


def test_an_address_that_cannot_be_had_is_one_line_and_the_node_is_free_again(node: Lab) -> None:
    with listening(node, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 9962)):
        ended = run_agent(node, "--prometheus-serve-addr=:9962")
        assert (ended.code, ended.line) == (1, refused(":9962", "Address already in use"))
    ended = run_agent(node, "--prometheus-serve-addr=192.0.2.77:9962")
    assert (ended.code, ended.line) == (1, refused("192.0.2.77:9962", "Cannot assign requested address"))
    serving(node, "--prometheus-serve-addr=[::]:9962")


def refused(address: str, why: str) -> str:
    """The agent's error for an address it cannot serve."""
    return (
        f"hive: prometheus-serve-addr: {address} cannot be served ({why}): "
        "stop what listens there, or choose another address"
    )
