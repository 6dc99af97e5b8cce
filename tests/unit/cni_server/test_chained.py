"""ADD after another plugin: its link gets an endpoint and is not owned; DEL and GC leave it."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from msgspec.structs import replace

from cells.cni.protocol import RESERVES_PORTS
from cells.endpoint import DatapathConfiguration
from lifecycle.testing import eventually
from tests.unit.cni_server.fakes import GATEWAY, GATEWAY6, MTU, OthersLink, others_link
from tests.unit.cni_server.harness import Harness, Reply

pytestmark = pytest.mark.anyio

POD_IP, POD_IP6 = IPv4Address("10.22.0.7"), IPv6Address("fd00:22::7")
PREVIOUS = {
    "cniVersion": "1.0.0",
    "interfaces": [
        {"name": "cni0", "mac": "02:00:00:00:00:09"},
        {"name": "vethhost0", "mac": "00:00:00:00:00:02"},
        {"name": "eth0", "mac": "00:00:00:00:00:01", "sandbox": "/var/run/netns/pod1"},
    ],
    "ips": [{"interface": 2, "address": "10.22.0.7/16", "gateway": "10.22.0.1"}],
    "routes": [{"dst": "0.0.0.0/0"}],
    "dns": {},
}
ANNOTATION: dict[str, object] = {
    "io.kubernetes.cri.pod-annotations": {"cni.cilium.io/mac-address": "0a:00:00:00:00:77"}
}


@pytest.fixture
def link(served: Harness) -> OthersLink:
    """What the plugin before us has made in pod1."""
    return others_link(served.node, served.pod("pod1"), POD_IP)


async def add(served: Harness, **conf: object) -> Reply:
    given = {"name": "mynet", "chaining-mode": "generic-veth", "prevResult": PREVIOUS, **conf}
    return await served.call("ADD", conf=given, CNI_ARGS="K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0")


async def test_the_link_gets_an_endpoint_and_nothing_else_is_done(served: Harness, link: OthersLink) -> None:
    reply = await add(served)
    assert reply.code == 0
    (endpoint,) = served.node.all()
    assert (endpoint.ifname, endpoint.ifindex) == ("vethhost0", link.host.ifindex)
    assert (endpoint.pod_mac, endpoint.host_mac) == (link.inner.mac, link.host.mac)
    assert (endpoint.addresses, endpoint.pool, endpoint.netns_cookie) == ((POD_IP,), "", 0)
    assert (endpoint.network, endpoint.title) == ("mynet", "default/web-0")
    assert endpoint.datapath == DatapathConfiguration(
        external_ipam=True, require_arp_passthrough=True, require_egress_prog=True, require_routing=False
    )
    assert served.node.steps == ["list links of pod", "create endpoint"]


@pytest.mark.parametrize("version", ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"])
async def test_the_result_is_the_one_before_in_the_version_asked_for(
    served: Harness, link: OthersLink, version: str
) -> None:
    reply = await add(served, cniVersion=version)
    expected = {**PREVIOUS, "cniVersion": version}
    if version >= "1":
        del expected["dns"]
    assert reply.json == expected


@pytest.mark.parametrize(
    "conf",
    [
        {"name": "azure", "chaining-mode": ""},
        {"name": "flannel", "chaining-mode": ""},
        {"chaining-mode": "aws-cni"},
        {"chaining-mode": "azure", "ipam": {"type": "host-local"}},
        {"chaining-mode": "flannel"},
    ],
)
async def test_every_mode_does_the_same_and_a_networks_name_may_say_it(
    served: Harness, link: OthersLink, conf: dict[str, object]
) -> None:
    assert (await add(served, **conf)).code == 0
    assert [endpoint.ifname for endpoint in served.node.all()] == ["vethhost0"]


async def test_without_a_previous_result_there_is_no_chain(served: Harness, link: OthersLink) -> None:
    assert (await add(served, prevResult=None)).code == 0
    (endpoint,) = served.node.all()
    assert endpoint.ifname.startswith("lxc")
    assert (await served.call("DEL", conf={"chaining-mode": "generic-veth"})).code == 0
    await eventually(served.node.clean)


async def test_the_link_the_runtime_names_goes_before_the_first(served: Harness) -> None:
    pod = served.pod("pod1")
    others_link(served.node, pod, ip_address("10.99.0.1"), name="net0")
    wanted = others_link(served.node, pod, POD_IP)
    assert (await add(served)).code == 0
    assert [endpoint.ifindex for endpoint in served.node.all()] == [wanted.host.ifindex]


async def test_a_link_of_any_name_will_do_where_there_is_no_other(served: Harness) -> None:
    pod = served.pod("pod1")
    tunnel = others_link(served.node, pod, ip_address("10.99.0.1"))
    tunnel.inner = replace(tunnel.inner, kind="ipip")
    wanted = others_link(served.node, pod, POD_IP, name="net0")
    assert (await add(served)).code == 0
    assert [endpoint.ifindex for endpoint in served.node.all()] == [wanted.host.ifindex]


async def test_both_families_count_where_the_node_has_both(served: Harness) -> None:
    served.node.gateways = (GATEWAY6, GATEWAY)
    local = ip_address("fe80::1")
    others_link(served.node, served.pod("pod1"), local, POD_IP6, POD_IP, ip_address("10.22.0.8"))
    assert (await add(served)).code == 0
    assert [endpoint.addresses for endpoint in served.node.all()] == [(POD_IP6, POD_IP)]


async def test_an_address_of_a_family_that_is_off_is_none(served: Harness) -> None:
    others_link(served.node, served.pod("pod1"), POD_IP6, ip_address("fe80::1"))
    reply = await add(served)
    assert (reply.json["code"], reply.message) == (999, "unable to determine IP address of the container")
    assert not served.node.all()


async def test_a_pod_without_a_link_is_refused(served: Harness) -> None:
    served.pod("pod1")
    reply = await add(served)
    assert (reply.json["code"], reply.message) == (999, "no link found inside container")


@pytest.mark.parametrize("change", [{"link_netnsid": None}, {"peer_ifindex": 999}, {"ifindex": 3}])
async def test_a_chained_link_without_a_peer_on_the_node_is_refused(
    served: Harness, link: OthersLink, change: dict[str, int | None]
) -> None:
    link.inner = replace(link.inner, **change)
    reply = await add(served)
    assert reply.message == "unable to determine name of veth pair on the host side"
    assert not served.node.all()


@pytest.mark.parametrize("conf", [{"enable-route-mtu": True}, {}])
async def test_routes_get_our_mtu_only_when_that_is_wanted(
    served: Harness, link: OthersLink, conf: dict[str, object]
) -> None:
    assert (await add(served, **conf)).code == 0
    assert link.route_mtu == (MTU if conf else 1500)


async def test_an_annotated_mac_address_is_set_and_returned(served: Harness, link: OthersLink) -> None:
    reply = await add(served, runtimeConfig=ANNOTATION)
    assert link.inner.mac.hex(":") == "0a:00:00:00:00:77"
    assert [each["mac"] for each in reply.json["interfaces"]][2] == "0a:00:00:00:00:77"
    assert [endpoint.pod_mac for endpoint in served.node.all()] == [link.inner.mac]


async def test_a_refused_endpoint_leaves_the_link_as_it_was(served: Harness, link: OthersLink) -> None:
    served.node.refuse.add("create endpoint")
    before = link.inner
    reply = await add(served, runtimeConfig=ANNOTATION)
    assert (reply.json["code"], reply.message) == (999, "unable to create endpoint: build failed")
    assert link.inner == before
    assert not served.node.all()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("list links of pod", "unable to read the link of the chained plugin: list links: "),
        ("set MTU of routes", "unable to read the link of the chained plugin: set route 0.0.0.0/0: "),
        ("set MAC address 0a:00:00:00:00:77", "unable to set MAC address on interface eth0: "),
    ],
)
async def test_a_refusal_of_the_kernel_is_reported(
    served: Harness, link: OthersLink, step: str, message: str
) -> None:
    served.node.refuse.add(step)
    reply = await add(served, runtimeConfig=ANNOTATION, **{"enable-route-mtu": True})
    assert reply.message.startswith(message)
    assert link.inner.mac.hex(":") == "00:00:00:00:00:01"
    assert not served.node.all()


async def test_a_chained_add_waits_for_a_policy_map(served: Harness, link: OthersLink) -> None:
    served.node.policy_maps = 0
    assert (await add(served, runtimeConfig=ANNOTATION)).code == 0
    assert link.inner.mac.hex(":") == "0a:00:00:00:00:77"


async def test_no_ports_are_reserved_behind_another_plugin(served: Harness, link: OthersLink) -> None:
    served.reserved_ports = "8472"
    given: dict[str, object] = {"name": "mynet", "chaining-mode": "generic-veth", "prevResult": PREVIOUS}
    reply = await served.call("ADD", conf=given, flags=RESERVES_PORTS)
    assert (reply.code, reply.patch) == (0, 0)


async def test_a_second_add_is_refused(served: Harness, link: OthersLink) -> None:
    assert (await add(served)).code == 0
    reply = await add(served)
    assert "endpoint for CNI attachment ID cid1:eth0 already exists" in reply.message
    assert len(served.node.all()) == 1


async def test_a_delete_takes_the_endpoint_and_leaves_the_link(served: Harness, link: OthersLink) -> None:
    assert (await add(served)).code == 0
    served.node.steps.clear()
    for _ in range(2):
        reply = await served.call("DEL", conf={"name": "mynet", "chaining-mode": "generic-veth"})
        assert (reply.code, reply.stdout) == (0, b"")
    assert not served.node.all()
    assert served.node.steps == ["delete endpoint"]


async def test_a_check_asks_for_health_alone(served: Harness, link: OthersLink) -> None:
    assert (await add(served)).code == 0
    conf: dict[str, object] = {"name": "mynet", "chaining-mode": "generic-veth", "prevResult": PREVIOUS}
    assert (await served.call("CHECK", conf=conf)).code == 0
    await served.call("DEL", conf=conf)
    assert (await served.call("CHECK", conf=conf)).json["code"] == 100


async def test_cni_gc_leaves_chained_attachments(served: Harness, link: OthersLink) -> None:
    assert (await add(served)).code == 0
    conf: dict[str, object] = {"name": "mynet", "cniVersion": "1.1.0", "cni.dev/valid-attachments": []}
    assert (await served.call("GC", pod=None, conf=conf)).code == 0
    assert len(served.node.all()) == 1


async def test_the_mac_address_that_the_pods_object_asks_for_is_set_and_returned(
    served: Harness, link: OthersLink
) -> None:
    served.node.annotated_mac = bytes.fromhex("0a0000000077")
    reply = await add(served)
    assert (reply.code, link.inner.mac.hex(":")) == (0, "0a:00:00:00:00:77")
    assert [one["mac"] for one in reply.json["interfaces"]][-1] == "0a:00:00:00:00:77"


async def test_an_add_that_fails_later_gives_the_link_its_mac_address_back(
    served: Harness, link: OthersLink
) -> None:
    before, served.node.annotated_mac = link.inner.mac, bytes.fromhex("0a0000000077")
    served.node.refuse = {"set MAC address 0a:00:00:00:00:77"}
    reply = await add(served)
    assert reply.message.startswith("unable to set MAC address on interface eth0: ")
    assert (link.inner.mac, served.node.all()) == (before, [])
