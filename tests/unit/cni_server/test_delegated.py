"""Pods with addresses of another IPAM plugin, on the agent's side of cni.sock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cni_server.fakes import GATEWAY6, FakeNode
from tests.unit.cni_server.harness import Harness, harness

pytestmark = pytest.mark.anyio

ADDRESSES_WISHED = 2
CONF: dict[str, object] = {"ipam": {"type": "host-local"}}
GIVEN: dict[str, Any] = {"cniVersion": "1.0.0", "ips": [{"address": "10.77.0.5/16", "gateway": "10.77.0.1"}]}


@pytest.fixture
async def delegating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """A CNI server of an agent that leaves addresses to another plugin."""
    monkeypatch.setattr("cells.cni.server.netns_cookie", FakeNode().cookie)
    async with harness(tmp_path, delegated=True) as made:
        yield made


async def test_an_add_asks_the_plugin_for_addresses_first_and_changes_nothing(delegating: Harness) -> None:
    reply = await delegating.call("ADD", conf=CONF)
    assert reply.patch == ADDRESSES_WISHED
    assert "delegated-plugin" in reply.message
    assert delegating.node.clean()


async def test_a_pod_has_the_address_it_was_given_as_its_own(delegating: Harness) -> None:
    reply = await delegating.call("ADD", conf=CONF, addresses=GIVEN)
    assert (reply.code, reply.patch) == (0, 0)
    assert [each["address"] for each in reply.json["ips"]] == ["10.77.0.5/32"]
    (endpoint,) = delegating.node.book.values()
    assert endpoint.addresses == (ip_address("10.77.0.5"),)
    assert endpoint.datapath.external_ipam
    assert not endpoint.datapath.is_chained
    assert not delegating.node.addresses

    # The link is ours, the address is not; the plugin may give it to others once this is answered.
    assert (await delegating.call("DEL", conf=CONF)).code == 0
    assert delegating.node.clean()


async def test_an_old_result_and_one_of_both_families(delegating: Harness) -> None:
    old = {"cniVersion": "0.2.0", "ip4": {"ip": "10.77.0.6/16"}}
    reply = await delegating.call("ADD", "old", pod="old", conf=CONF, addresses=old)
    assert [each["address"] for each in reply.json["ips"]] == ["10.77.0.6/32"]

    delegating.node.gateways = (GATEWAY6, *delegating.node.gateways)
    both = {"ips": [{"address": "10.77.0.7/16"}, {"address": "fd00:77::7/64"}, {"address": "10.9.9.9/16"}]}
    reply = await delegating.call("ADD", "both", pod="both", conf=CONF, addresses=both)
    assert [each["address"] for each in reply.json["ips"]] == ["fd00:77::7/128", "10.77.0.7/32"]


@pytest.mark.parametrize(
    ("given", "spoken"),
    [
        ({"ips": []}, "IPAM did provide neither IPv4 nor IPv6 address"),
        ({"ips": [{"address": "fd00::1/64"}]}, "IPAM did provide neither IPv4 nor IPv6 address"),
        (
            {"ips": [{"address": "nonsense"}]},
            "could not interpret delegated IPAM result for CNI version 1.0.0",
        ),
        (["no object"], "could not interpret delegated IPAM result for CNI version 1.0.0"),
    ],
)
async def test_a_result_without_an_address_for_this_node_is_refused(
    delegating: Harness, given: object, spoken: str
) -> None:
    reply = await delegating.call("ADD", conf=CONF, addresses=given)
    assert reply.message.startswith(spoken)
    assert delegating.node.clean()


async def test_a_pod_that_cannot_be_reached_is_taken_back(delegating: Harness) -> None:
    delegating.node.refuse = {"route"}
    reply = await delegating.call("ADD", conf=CONF, addresses=GIVEN)
    assert (reply.code, reply.patch) == (1, 0)
    assert delegating.node.clean()


async def test_a_plugin_named_to_an_agent_with_addresses_of_its_own_is_refused(served: Harness) -> None:
    reply = await served.call("ADD", conf=CONF)
    assert reply.patch == 0
    assert "ipam.type=host-local, and the agent's ipam is not delegated-plugin" in reply.message
    assert served.node.clean()
