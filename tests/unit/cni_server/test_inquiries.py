"""CHECK, STATUS and GC over a real socket and a fake node."""

from __future__ import annotations

import os
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from cells.endpoint import DatapathConfiguration, State
from lifecycle.testing import eventually
from tests.unit.cni_server.fakes import GATEWAY, GATEWAY6, leftover
from tests.unit.cni_server.harness import Harness, Reply

pytestmark = pytest.mark.anyio


async def attached(served: Harness, cid: str = "cid1", **conf: object) -> dict[str, object]:
    """The result of an ADD, as a ``prevResult``."""
    reply = await served.call("ADD", cid, pod=f"pod-of-{cid}", conf=conf)
    result: dict[str, object] = reply.json
    assert reply.code == 0
    return result


async def check(served: Harness, previous: Any, **conf: object) -> Reply:
    return await served.call("CHECK", pod="pod-of-cid1", conf={"prevResult": previous, **conf})


# CHECK


@pytest.mark.parametrize("version", ["0.4.0", "1.0.0", "1.1.0"])
async def test_an_attachment_as_it_was_made_passes(served: Harness, version: str) -> None:
    served.node.gateways = (GATEWAY6, GATEWAY)
    previous = await attached(served, cniVersion=version)
    reply = await check(served, previous, cniVersion=version)
    assert (reply.code, reply.stdout) == (0, b"")


async def test_a_check_of_an_unknown_attachment_fails(served: Harness) -> None:
    previous = await attached(served)
    served.node.book.clear()
    reply = await check(served, previous)
    assert (reply.json["code"], reply.message) == (100, "HealthzFailed")
    assert reply.json["details"] == (
        "failed to retrieve container health: there is no endpoint for CNI attachment ID cid1:eth0"
    )


async def test_a_broken_endpoint_fails_and_one_under_work_passes(served: Harness) -> None:
    previous = await attached(served)
    (number,) = served.node.book
    served.node.shown[number] = State.DISCONNECTED
    reply = await check(served, previous)
    assert reply.json == {
        "cniVersion": "1.0.0",
        "code": 1,
        "msg": "Unhealthy",
        "details": "container is unhealthy in agent",
    }
    for state in (State.RESTORING, State.REGENERATING, State.NOT_READY):
        served.node.shown[number] = state
        assert (await check(served, previous)).code == 0


async def test_a_check_with_a_missing_interface_or_address_fails(served: Harness) -> None:
    previous = await attached(served)
    (link,) = served.node.links.values()
    (address,) = link.addresses
    link.addresses.clear()
    reply = await check(served, previous)
    assert (reply.json["code"], reply.message) == (999, f"expected ip {address}/32 on interface eth0")
    served.node.links.clear()
    assert (await check(served, previous)).message == "cannot find container link eth0"
    served.node.refuse.add("look into pod")
    assert (await check(served, previous)).message.startswith("unable to read addresses of interface eth0: ")


async def test_addresses_of_other_interfaces_are_not_asked_for(served: Harness) -> None:
    previous = await attached(served)
    other = [{"interface": 0, "address": "192.0.2.1/24"}, {"address": "192.0.2.2/24"}]
    assert (await check(served, {**previous, "ips": other})).code == 0


@pytest.mark.parametrize(
    ("previous", "details"),
    [
        (None, "CHECK without a prevResult: the runtime has to pass the result of the ADD"),
        ({"ips": "x"}, "could not parse prevResult: "),
        (
            {"code": 999, "msg": "an error"},
            "result type supports [1.0.0 1.1.0] but unmarshalled CNIVersion is",
        ),
        (
            {
                "interfaces": [{"name": "eth0", "sandbox": "/x"}],
                "ips": [{"interface": 0, "address": "bogus"}],
            },
            "could not parse prevResult: 'bogus' does not appear to be",
        ),
    ],
)
async def test_a_result_that_cannot_be_checked_is_a_wrong_configuration(
    served: Harness, previous: object, details: str
) -> None:
    await attached(served)
    reply = await check(served, previous)
    assert (reply.code, reply.json["code"], reply.message) == (1, 7, "InvalidNetworkConfig")
    assert details in reply.json["details"]


async def test_nulls_of_a_previous_result_are_absent(served: Harness) -> None:
    previous = await attached(served)
    interfaces = [{"name": "lxc1", "mac": None, "sandbox": None}, *previous["interfaces"][1:]]  # type: ignore[index]
    assert (await check(served, {**previous, "interfaces": interfaces, "routes": None})).code == 0


async def test_an_address_with_another_prefix_length_is_another_address(served: Harness) -> None:
    previous = await attached(served)
    first: dict[str, str] = previous["ips"][0]  # type: ignore[index]
    wider = first["address"].replace("/32", "/24")
    reply = await check(served, {**previous, "ips": [{**first, "address": wider}]})
    assert (reply.json["code"], reply.message) == (999, f"expected ip {wider} on interface eth0")


async def test_a_check_with_malformed_arguments_names_them(served: Harness) -> None:
    previous = await attached(served)
    reply = await served.call("CHECK", pod="pod-of-cid1", conf={"prevResult": previous}, CNI_ARGS="A=b")
    assert (reply.json["code"], reply.message) == (7, "InvalidArgs")
    assert reply.json["details"] == 'unable to extract CNI arguments: ARGS: unknown args ["A=b"]'


async def test_the_error_of_a_check_shows_the_configuration_as_it_came(served: Harness) -> None:
    reply = await check(served, {"ips": "x"})
    assert reply.json["details"].startswith('unable to parse CNI configuration "{"cniVersion": "1.0.0", ')


async def test_of_a_chained_attachment_only_the_health_is_checked(served: Harness) -> None:
    previous = await attached(served)
    served.node.links.clear()
    chained: dict[str, object] = {"name": "mynet", "chaining-mode": "generic-veth"}
    assert (await check(served, previous, **chained)).code == 0
    assert (await check(served, None, **chained)).code == 0
    reply = await check(served, previous, **{"chaining-mode": "none"})
    assert (reply.json["code"], reply.message) == (999, "invalid chaining-mode none")


# STATUS


async def status(served: Harness) -> Reply:
    return await served.call("STATUS", "", pod=None, conf={"cniVersion": "1.1.0"})


async def test_a_status_of_a_ready_agent_succeeds(served: Harness) -> None:
    reply = await status(served)
    assert (reply.code, reply.stdout) == (0, b"")


async def test_an_agent_without_a_router_cannot_add_pods(served: Harness) -> None:
    served.node.gateways = ()
    reply = await status(served)
    assert reply.json == {
        "cniVersion": "1.1.0",
        "code": 50,
        "msg": "DaemonHealthzFailed",
        "details": "Cilium agent cannot add pods: the router has no addresses",
    }


async def test_an_agent_that_cannot_write_its_state_cannot_add_pods(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    reply = await status(served)
    assert reply.json["code"] == 50
    assert reply.json["details"].endswith(f"state directory {served.folder} cannot be written")


async def test_an_agent_that_cannot_make_policy_maps_cannot_add_pods(served: Harness) -> None:
    served.node.policy_maps = 0
    served.node.refuse.add("wait for a policy map")
    reply = await status(served)
    assert reply.json["code"] == 50
    assert reply.json["details"].endswith("no policy map for another endpoint: out of memory")


async def test_an_agent_that_makes_no_policy_maps_for_long_cannot_add_pods(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cni.server._STATUS_SECONDS", 0.01)
    served.node.policy_maps, served.node.may_refill = 0, anyio.Event()
    reply = await status(served)
    assert reply.json["details"].endswith("no policy map can be prepared")


async def test_a_full_range_does_not_make_the_node_unready(served: Harness) -> None:
    served.node.refuse.add("allocate")
    assert (await served.call("ADD")).code == 1
    assert (await status(served)).code == 0


# GC


async def collect(served: Harness, *valid: tuple[str, str], **conf: object) -> Reply:
    listed = [{"containerID": cid, "ifname": ifname} for cid, ifname in valid]
    given = {"cniVersion": "1.1.0", "cni.dev/valid-attachments": listed, **conf}
    return await served.call("GC", "", pod=None, conf=given)


def containers(served: Harness) -> list[str]:
    return sorted(endpoint.container_id for endpoint in served.node.all())


async def test_cni_gc_deletes_forgotten_attachments_with_link_and_address(served: Harness) -> None:
    for cid in ("cid1", "cid2", "cid3"):
        await attached(served, cid)
    reply = await collect(served, ("cid2", "eth0"), ("cid3", "net1"), ("unknown", "eth0"))
    assert (reply.code, reply.stdout) == (0, b"")
    assert containers(served) == ["cid2"]
    await eventually(lambda: len(served.node.links) == len(served.node.addresses) == 1)
    assert (await collect(served, ("cid2", "eth0"))).code == 0
    assert containers(served) == ["cid2"]


async def test_other_networks_unknown_ones_and_chained_attachments_stay(served: Harness) -> None:
    for cid in ("ours", "chained", "unknown"):
        await attached(served, cid)
    await attached(served, "theirs", name="other-net")
    for number, endpoint in served.node.book.items():
        if endpoint.container_id == "chained":
            chained = DatapathConfiguration(external_ipam=True, require_arp_passthrough=True)
            served.node.book[number] = replace(endpoint, datapath=chained)
        if endpoint.container_id == "unknown":
            served.node.book[number] = replace(endpoint, network="")
    assert (await collect(served)).code == 0
    assert containers(served) == ["chained", "theirs", "unknown"]


async def test_an_empty_list_of_go_is_an_empty_list(served: Harness) -> None:
    await attached(served)
    assert (await collect(served, **{"cni.dev/valid-attachments": None})).code == 0
    await eventually(served.node.clean)


async def test_without_a_list_nothing_is_removed(served: Harness) -> None:
    await attached(served)
    reply = await served.call("GC", "", pod=None, conf={"cniVersion": "1.1.0"})
    assert (reply.json["code"], reply.code) == (7, 1)
    assert reply.message.startswith("network configuration cilium: cni.dev/valid-attachments is missing: ")
    assert containers(served) == ["cid1"]


async def test_a_list_that_is_none_is_undecodable(served: Harness) -> None:
    await attached(served)
    reply = await collect(served, **{"cni.dev/valid-attachments": [{"containerID": 5}]})
    assert reply.json["code"] == 6
    assert containers(served) == ["cid1"]


async def test_an_attachment_with_a_call_under_way_stays(served: Harness) -> None:
    await attached(served, "cid1")
    await attached(served, "cid2")
    leftover(served.node, "cid1", served.pod("pod-of-net1"), ifname="net1")
    served.node.policy_maps, served.node.may_refill = 0, anyio.Event()
    client = await served.begin("ADD", "cid1", pod="pod-of-net1", CNI_IFNAME="net2")
    await eventually(lambda: "wait for a policy map" in served.node.steps)
    assert (await collect(served)).code == 0
    assert containers(served) == ["cid1"]
    served.node.may_refill.set()
    assert (await client.reply()).code == 0
