"""IPsec's states, policies and routes, compared with recordings of Cilium; settings that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Network, ip_address, ip_interface, ip_network
from typing import Any

import pytest
from msgspec.structs import replace

from cells.base.addresses import Family
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.datapath.datapath import TUNNEL_LINKS
from cells.encryption.ipsec.keys import (
    IpsecKeyError,
    IpsecSettings,
    KeyRing,
    cluster_pod_networks,
    incompatible_settings,
)
from cells.encryption.ipsec.plan import IpsecMode, IpsecPlan, IpsecPlanner, XfrmTarget, wanted_routes
from cells.netlink.network import FwmarkRuleRow, TableRoute
from cells.netlink.xfrm import Direction, XfrmMark, XfrmPolicy, XfrmState
from cells.node.devices import Device
from cells.tunnel.settings import RouteMtu
from hive.inspect.source import hive_of
from lifecycle import BatchError
from lifecycle.testing import fake
from tests.support.recordings import recordings
from tests.unit.encryption.fakes import FakeXfrm

pytestmark = pytest.mark.anyio


def recorded(kind: str) -> list[dict[str, Any]]:
    files = sorted(recordings("ipsec").glob("*.json"))
    return [each for each in map(json.loads, (file.read_text() for file in files)) if each["kind"] == kind]


SUBNETS = {
    Family.IPV4: (ip_network("10.0.0.0/16"), ip_network("10.1.0.0/16")),
    Family.IPV6: (ip_network("fd00::/48"),),
}
INTERFACE = {Family.IPV4: ip_address("192.168.1.1"), Family.IPV6: ip_address("fd01::1")}
LOCAL: dict[str, Any] = {
    "name": "local",
    "local": True,
    "internal_ips": ["192.168.1.1", "fd01::1"],
    "cilium_internal_ips": ["10.0.1.1", "fd00::1:1"],
    "ipv4_alloc_cidr": "10.0.1.0/24",
    "ipv6_alloc_cidr": "fd00:0:0:1::/96",
    "boot_id": "11111111-1111-4111-8111-111111111111",
}
BETTER = {
    "router_ip_changes_tunnel": ("states of the old address go: Cilium's refuse the new ones", 2, 4),
    "cidr_changes_native": ("the policy of the old range goes", 0, 1),
    "no_cidr_native": ("packets are blocked before the other node has a range", 2, 0),
    "no_esp_tunnel": ("policies for what comes need no state; the agent refuses to start there", 4, 0),
    "disable_native": ("policies that block go too", 0, 2),
    "disable_tunnel": ("policies that block go too", 0, 2),
    "flush_native": ("all is removed, until the next comparison", 0, 2),
    "flush_tunnel": ("all is removed, until the next comparison", 0, 2),
}
"""Recordings with other results: the reason, and how many objects are added and missing over all events."""


def mode_of(config: dict[str, Any]) -> IpsecMode:
    on = {Family.IPV4: config["enable-ipv4"], Family.IPV6: config["enable-ipv6"]}
    subnets = config.get("subnet_mode", False)
    return IpsecMode(
        families=tuple(family for family in Family if on[family]),
        tunnel=config["routing-mode"] == "tunnel",
        subnets=SUBNETS if subnets else {},
        interface=INTERFACE if subnets else {},
        between_routers=config.get("use-cilium-internal-ip-for-ipsec", False),
        endpoint_routes=config.get("enable-endpoint-routes", False),
    )


def node_of(recorded_node: dict[str, Any]) -> ClusterNode:
    addresses = [NodeIP(INTERNAL_IP, ip_address(each)) for each in recorded_node["internal_ips"] or ()]
    addresses += [
        NodeIP(CILIUM_INTERNAL_IP, ip_address(each)) for each in recorded_node["cilium_internal_ips"] or ()
    ]
    ranges = {
        f"{family}_alloc_cidrs": (ip_network(recorded_node[f"{family}_alloc_cidr"]),)
        for family in ("ipv4", "ipv6")
        if recorded_node.get(f"{family}_alloc_cidr")
    }
    return ClusterNode(
        cluster="default",
        name=recorded_node["name"],
        source=Source.LOCAL if recorded_node.get("local") else Source.CUSTOM_RESOURCE,
        addresses=tuple(addresses),
        boot_id=recorded_node["boot_id"],
        **ranges,  # type: ignore[arg-type]  # ranges alone
    )


def state_text(state: XfrmState) -> dict[str, Any]:
    found: dict[str, Any] = {
        "src": str(state.source),
        "dst": str(state.destination),
        "spi": state.spi,
        "mark": str(state.mark),
        "output_mark": str(state.output_mark),
        "proto": "esp",
        "mode": "tunnel",
        "esn": state.extended,
        "replay_window": 1024,
        "reqid": 1,
    }
    for name in ("aead", "auth", "crypt"):
        if (one := getattr(state, name)) is not None:
            found[name] = {"name": one.name, "key_hex": one.key.octets.hex(), "icv_len": one.icv_bits}
    return found


def policy_text(policy: XfrmPolicy) -> dict[str, Any]:
    return {
        "action": "block" if policy.block else "allow",
        "dir": policy.direction.name.lower(),
        "src": str(policy.source),
        "dst": str(policy.destination),
        "mark": str(policy.mark) if policy.mark else None,
        "priority": policy.priority,
        "templates": [
            {
                "src": str(one.source or "<nil>"),
                "dst": str(one.destination or "<nil>"),
                "spi": one.spi,
                "reqid": one.request,
                "optional": int(one.optional),
                "mode": "tunnel",
                "proto": "esp",
            }
            for one in policy.templates
        ],
    }


class Replay:
    """Replays recorded events: each changes the input, then XFRM is reconciled with the plan."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.mode = mode_of(config)
        self.planner = IpsecPlanner(self.mode)
        self.kernel = FakeXfrm(esp=not config.get("kernel_without_esp"))
        self.now = 0.0
        self.ring = KeyRing(300.0, lambda: self.now)
        self.local = node_of(LOCAL)
        self.others: dict[str, ClusterNode] = {}
        self.numbers: dict[str, int] = {}
        self.on = False
        """Whether a node is known, including this one; nothing is planned before."""
        self.planned = IpsecPlan((), ())
        self.target = XfrmTarget(self.kernel, self.ring, lambda: self.planned)

    async def event(self, event: dict[str, Any]) -> str:
        node, fault = event.get("node", {}), ""
        match event["op"]:
            case "load_keys":
                try:
                    self.ring.load(event["key_file_text"])
                except IpsecKeyError as error:
                    fault = str(error)
                return fault  # Cilium changes nothing until it validates nodes
            case "stale_key_timer":
                self.now += go_seconds(event["age"])
            case "node_delete":
                self.others.pop(node["name"])
            case "node_add" | "node_update" | "node_validate":
                self.on = True
                if not node.get("local"):
                    self.others[node["name"]] = node_of(node)
                    self.numbers[f"default/{node['name']}"] = node["node_id_given"]
            case "state_vanishes":
                self.kernel.held_states = {
                    one.key: one
                    for one in self.kernel.held_states.values()
                    if state_text(one) in event["states_after"]
                }
                return fault
            case "disable_ipsec" | "flush_all":
                self.on = False
        if (key := self.ring.current) is not None:
            self.planned = (
                self.planner.plan(self.local, self.others.values(), self.numbers, key)
                if self.on
                else IpsecPlan((), ())
            )
            await self.reconcile()
        return fault

    async def reconcile(self) -> None:
        rows: dict[Any, Any] = {one.key: one for one in self.planned.objects}
        there = await self.target.observe()
        work = {k: row for k, row in rows.items() if k not in there or not self.target.matches(row, there[k])}
        with suppress(BatchError):
            await self.target.put(work)
        await self.target.drop([k for k in there if k not in rows])


def go_seconds(text: str) -> float:
    minutes, _, seconds = text.rpartition("m")
    return 60 * float(minutes or 0) + float(seconds.removesuffix("s"))


def everything(states: Iterable[dict[str, Any]], policies: Iterable[dict[str, Any]]) -> set[str]:
    return {json.dumps(one, sort_keys=True) for one in (*states, *policies)}


async def test_states_and_policies_are_those_recorded() -> None:
    cases = recorded("xfrm")
    assert len(cases) == 36
    differences, compared = {}, 0
    for case in cases:
        replay, more, fewer = Replay(case["config"]), 0, 0
        for number, event in enumerate(case["events"]):
            where = f"{case['name']}, event {number} ({event['op']})"
            fault = await replay.event(event)
            assert fault == (event.get("error", "") if event["op"] == "load_keys" else ""), where
            ours = everything(
                map(state_text, replay.kernel.held_states.values()),
                map(policy_text, replay.kernel.held_policies.values()),
            )
            theirs = everything(event["states_after"], event["policies_after"])
            extra, missing = ours - theirs, theirs - ours
            if case["name"] not in BETTER:
                assert (extra, missing) == (set(), set()), where
            more, fewer = more + len(extra), fewer + len(missing)
            compared += len(theirs)
        if more or fewer:
            differences[case["name"]] = (more, fewer)
    assert differences == {name: (more, fewer) for name, (_, more, fewer) in BETTER.items()}
    assert compared > 1000


NODE_LINK, HOST_LINK = 1, 2
ROUTES_BETTER = {
    "cidr_changes_native": ("routes to a range that the node has no more go", 0, 2),
    "no_boot_id_native": ("routes do not wait for the boot ID: packets are blocked", 2, 0),
    "no_router_ip_tunnel": ("nor for the address of the router", 2, 0),
    "disable_native": ("routes of IPv6 go too", 0, 2),
    "disable_tunnel": ("routes of IPv6 go too", 0, 2),
}
"""Recordings with other routes: the reason, and how many are added and missing over all events."""


def link(ifindex: int, name: str, *addresses: str) -> Device:
    return Device(ifindex, name, "", bytes(6), 1500, True, tuple(map(ip_interface, addresses)))


def row_text(row: FwmarkRuleRow | TableRoute) -> str:
    """Format a route or rule as in recordings."""
    if isinstance(row, FwmarkRuleRow):
        return f"1: from all fwmark {row.rule.mark:#x}/{row.rule.mask:#x} lookup {row.rule.table}"
    six = row.destination.version == 6
    words = ["local" if row.local else "unicast", str(row.destination), "dev"]
    words += [{NODE_LINK: "eth0x", HOST_LINK: "cilium_host"}[row.ifindex], "proto kernel scope"]
    words += ["host" if row.local and not six else "global", *["metric 1024"] * six]
    words += [f"mtu {row.mtu}"] * bool(row.mtu) + ["pref medium"] * six
    return " ".join(words)


def test_routes_and_rules_are_those_recorded() -> None:
    cases = [each for each in recorded("xfrm") if not each["config"].get("subnet_mode")]  # not implemented
    assert len(cases) == 30
    differences, compared = {}, 0
    for case in cases:
        more, fewer = 0, 0
        config = case["config"]
        mode = mode_of(config)
        name = TUNNEL_LINKS["vxlan"] if mode.tunnel else "eth0x"
        links = [link(NODE_LINK, name, "192.168.1.1/24", "fd01::1/64"), link(HOST_LINK, "cilium_host")]
        nodes: dict[str, ClusterNode] = {}
        on = False
        for number, event in enumerate(case["events"]):
            node = event.get("node", {})
            on = (on or event["op"] == "configure") and event["op"] != "disable_ipsec"
            if event["op"] == "node_delete":
                del nodes[node["name"]]
            elif node:
                nodes[node["name"]] = node_of(node)
            mtu = fake(RouteMtu, tunnelled=mode.tunnel, tunnel_link=name, encrypted=lambda: 1500)
            rows = wanted_routes(
                nodes.values(), links, mode.families, mtu, endpoint_routes=mode.endpoint_routes
            )
            ours = sorted(map(row_text, rows.values())) if on else []
            theirs = sorted(event["table_200_after"] + event["rules_priority_1_after"])
            if case["name"] not in ROUTES_BETTER:
                assert ours == theirs, f"{case['name']}, event {number} ({event['op']})"
            more += len(set(ours) - set(theirs))
            fewer += len(set(theirs) - set(ours))
            compared += len(theirs)
        if more or fewer:
            differences[case["name"]] = (more, fewer)
    assert differences == {name: (more, fewer) for name, (_, more, fewer) in ROUTES_BETTER.items()}
    assert compared > 500


KEY = "3 rfc4106(gcm(aes)) 44434241343332312423222114131211f4f3f2f1 128"


async def test_a_replaced_key_stays_for_its_duration_also_after_a_restart() -> None:
    case = next(each for each in recorded("xfrm") if each["name"] == "basic_tunnel_v4")
    first = Replay(case["config"])
    for event in case["events"]:
        await first.event(event)
    before = set(first.kernel.held_states)
    second = Replay(case["config"])
    second.kernel = first.kernel
    second.target = XfrmTarget(second.kernel, second.ring, lambda: second.planned)
    second.ring.load(KEY.replace("3 ", "4 ", 1))
    added = [event for event in case["events"] if event.get("node", {}).get("name") == "n3"]
    await second.event(added[0])
    assert len(second.kernel.held_states) == 2 * len(before)
    assert before < set(second.kernel.held_states)
    assert second.ring.next_expiry() == 300.0
    second.now = 301.0
    await second.event(added[0])
    assert len(second.kernel.held_states) == len(before)
    assert not before & set(second.kernel.held_states)


async def test_foreign_states_and_policies_stay() -> None:
    replay = Replay({"enable-ipv4": True, "enable-ipv6": False, "routing-mode": "native"})
    everywhere = ip_network("0.0.0.0/0")
    theirs = [
        XfrmPolicy(
            direction=Direction.OUT, source=everywhere, destination=ip_network("10.0.0.0/8"), mark=mark
        )
        for mark in (None, XfrmMark(0x100, 0xF00))
    ]
    await replay.kernel.set_policies(theirs)
    replay.ring.load(KEY)
    await replay.event({"op": "disable_ipsec"})
    assert await replay.kernel.policies() == theirs


NATIVE = IPv4Network("10.0.0.0/9")
SERVED = {
    "enable-ipv4": True,
    "enable-ipv6": False,
    "ipv4-native-routing-cidr": NATIVE,
    "ipv6-native-routing-cidr": None,
    "enable-wireguard": False,
    "enable-host-firewall": False,
    "enable-ipv4-egress-gateway": False,
    "ipam": "cluster-pool",
    "local-router-ipv4": "",
    "local-router-ipv6": "",
    "cni-chaining-mode": "none",
    "cni-chaining-target": "",
    "routing-mode": "tunnel",
    "enable-l7-proxy": True,
    "dnsproxy-enable-transparent-mode": None,
}
REFUSED_VALUES = (
    ("enable-ipv4", False),
    ("enable-wireguard", True),
    ("enable-host-firewall", True),
    ("enable-ipv4-egress-gateway", True),
    ("ipam", "multi-pool"),
    ("ipam", "delegated-plugin"),
    ("local-router-ipv4", "10.0.0.1"),
    ("local-router-ipv6", "fd00::1"),
    ("cni-chaining-mode", "flannel"),
    ("cni-chaining-target", "other"),
    ("routing-mode", "native"),
    ("dnsproxy-enable-transparent-mode", False),
)


def test_settings_by_which_packets_would_leave_in_clear_are_refused_by_name() -> None:
    options = {one.name for one in hive_of(None, ()).options()}
    assert options >= SERVED.keys()
    settings = IpsecSettings(enable_ipsec=True, ipsec_key_file="/etc/ipsec/keys")
    assert list(incompatible_settings(SERVED, settings)) == []
    for name, value in REFUSED_VALUES:
        (text,) = incompatible_settings(SERVED | {name: value}, settings)
        assert name in text
    without = {"enable-l7-proxy": False}
    for name, value in REFUSED_VALUES[-2:]:
        assert list(incompatible_settings(SERVED | without | {name: value}, settings)) == []
    asks = SERVED | {"dnsproxy-enable-transparent-mode": False}
    skips = replace(settings, dnsproxy_insecure_skip_transparent_mode_check=True)
    assert list(incompatible_settings(asks, skips)) == []


def test_networks_of_pods_are_needed_of_each_family() -> None:
    pools = IpsecSettings(cluster_pool_ipv4_cidr=(IPv4Network("10.0.0.0/8"), IPv4Network("172.30.0.0/16")))
    both = SERVED | {"enable-ipv6": True}
    (text,) = incompatible_settings(both, pools)
    assert text.startswith("ipv6-native-routing-cidr: unset")
    assert cluster_pod_networks(SERVED, pools, Family.IPV4) == pools.cluster_pool_ipv4_cidr
    assert cluster_pod_networks(SERVED, IpsecSettings(), Family.IPV4) == (NATIVE,)
    other = SERVED | {"ipam": "kubernetes"}
    assert cluster_pod_networks(other, pools, Family.IPV4) == (NATIVE,)
    (text,) = incompatible_settings(other | {"ipv4-native-routing-cidr": None}, pools)
    assert text.startswith("ipv4-native-routing-cidr: unset")
