"""CHECK, STATUS, GC and chosen MAC addresses with a real agent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cells.maps.map import open_map
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue
from cells.netlink.rows import mac_text
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.node import Lab
from tests.support.account import GLOBALS, agreed
from tests.support.agents import Ended, invoke, serving

pytestmark = pytest.mark.node

DUAL = ("--enable-ipv6=true", "--ipv6-range=fd00:5::/112")
ANNOTATIONS = {"io.kubernetes.cri.pod-annotations": {"cni.cilium.io/mac-address": "02:00:00:00:00:09"}}


def conf(lab: Lab, **keys: object) -> dict[str, object]:
    """The agent's network configuration in version 1.1.0, with more keys."""
    written: dict[str, object] = json.loads(pods.network_configuration(lab))
    return {**written, "cniVersion": "1.1.0", **keys}


def inquire(lab: Lab, command: str, **keys: object) -> Ended:
    """STATUS or GC, which are of no pod."""
    nothing = dict.fromkeys(("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"))
    return invoke(lab, "any", command, conf(lab, **keys), **nothing)


def test_an_attachment_is_checked_in_the_pod_and_in_the_agent(node: Lab) -> None:
    serving(node, *DUAL)
    node.hold_pod("pod")
    added = invoke(node, "pod", "ADD", conf(node))
    previous = conf(node, prevResult=added.json)
    assert invoke(node, "pod", "CHECK", previous).code == 0
    with node.open_pod("pod") as pod:
        for ip in added.json["ips"]:
            pod.run(remove_address, ip["address"])
            refused = invoke(node, "pod", "CHECK", previous)
            assert refused.json["msg"] == f"expected ip {ip['address']} on interface eth0"
            pod.run(put_address, ip["address"])
            assert invoke(node, "pod", "CHECK", previous).code == 0
    assert invoke(node, "pod", "DEL").code == 0
    assert invoke(node, "pod", "CHECK", previous).json["code"] == 100


def remove_address(address: str) -> None:
    change_address("delete", address)


def put_address(address: str) -> None:
    change_address("add", address)


def change_address(command: str, address: str) -> None:
    """Add or remove an address of eth0."""
    from pyroute2 import IPRoute

    ip, _, length = address.partition("/")
    with IPRoute() as netlink:
        (index,) = netlink.link_lookup(ifname="eth0")
        netlink.addr(command, index=index, address=ip, prefixlen=int(length))


def test_the_status_is_that_of_the_agent(lab: Lab) -> None:
    status = inquire(lab, "STATUS")
    assert (status.code, status.stdout) == (0, "")
    agent_process.crash(lab)
    status = inquire(lab, "STATUS")
    assert (status.code, status.json["code"], status.json["msg"]) == (1, 50, "DaemonDown")


def test_cni_gc_removes_forgotten_attachments_also_after_a_restart(lab: Lab) -> None:
    for pod in ("kept", "forgotten", "elsewhere"):
        lab.hold_pod(pod)
        changes = {"name": "other-net"} if pod == "elsewhere" else {}
        assert invoke(lab, pod, "ADD", conf(lab, **changes)).code == 0
    agent_process.crash(lab)
    serving(lab)
    valid = [{"containerID": pods.container_id(lab, "kept"), "ifname": "eth0"}]
    done = inquire(lab, "GC", **{"cni.dev/valid-attachments": valid})
    assert (done.code, done.stdout) == (0, "")
    assert len(agreed(lab).listed) == 2
    containers = {each["status"]["external-identifiers"]["container-id"] for each in endpoints(lab)}
    assert containers == {pods.container_id(lab, pod) for pod in ("kept", "elsewhere")}


def endpoints(lab: Lab) -> list[Any]:
    with lab.open() as node:
        return list(node.run(ask, "/v1/endpoint"))


MACS: tuple[tuple[dict[str, object], str], ...] = (
    ({"macAddrMode": "deterministic"}, "52:84:2a:fe:62:3a"),
    ({"fixedMac": "AA:BB:CC:00:00:02", "macAddrMode": "deterministic"}, "aa:bb:cc:00:00:02"),
    ({"prefixMacMap": {"w": "aa:bb:cc:00:00:03", "web": "aa:bb:cc:00:00:04"}}, "aa:bb:cc:00:00:04"),
    ({"fixedMac": "aa:bb:cc:00:00:02", "runtimeConfig": ANNOTATIONS}, "02:00:00:00:00:09"),
)
"""Keys of the network configuration, and the address that a pod called web-0 gets by them."""


def test_a_chosen_mac_address_is_the_same_everywhere(lab: Lab) -> None:
    for keys, mac in MACS:
        lab.hold_pod("web-0")
        result = invoke(lab, "web-0", "ADD", conf(lab, **keys)).json
        (endpoint,) = endpoints(lab)
        networking = endpoint["status"]["networking"]
        with lab.open_pod("web-0") as pod, lab.open() as node:
            macs = {
                "result": result["interfaces"][1]["mac"],
                "endpoint": networking["mac"],
                "link": pod.run(address_of, "eth0"),
                "cilium_lxc": node.run(
                    mac_in_maps, result["ips"][0]["address"], networking["interface-index"]
                ),
            }
            host = {result["interfaces"][0]["mac"], networking["host-mac"]}
            host.add(node.run(address_of, networking["interface-name"]))
        assert macs == dict.fromkeys(macs, mac), keys
        assert len(host) == 1, keys
        assert (host == {"52:d4:d5:f3:05:0d"}) == ("macAddrMode" in keys), keys
        assert invoke(lab, "web-0", "DEL").code == 0, keys
        lab.release_pod("web-0")


def address_of(name: str) -> str:
    """MAC address of a link."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        (link,) = netlink.get_links(ifname=name)
        return str(link.get("address"))


def mac_in_maps(address: str, ifindex: int) -> str:
    """The content of cilium_lxc; hive_endpoints has to have the same."""
    from ipaddress import ip_interface

    lxc, ours = open_map(GLOBALS / "cilium_lxc"), open_map(GLOBALS / "hive_endpoints")
    key = LxcKey(ip_interface(address).ip).pack()
    row = lxc.lookup(key)
    own = ours.lookup(ifindex.to_bytes(4, "little"))
    assert row is not None
    assert own is not None
    mac = LxcValue.unpack(row).mac
    assert EndpointConfig.unpack(own).pod_mac == mac
    return mac_text(mac)
