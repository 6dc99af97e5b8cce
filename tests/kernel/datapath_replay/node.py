"""Fills maps from a recording and runs our programs on its packet."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Self

from cells.datapath.generation import load
from cells.datapath.libbpf import LoadedObject
from cells.datapath.programs import ENTRIES, L3_ENTRIES, XDP_ENTRIES
from cells.datapath.settings import PACKAGED_OBJECTS, DatapathSettings, ProgramSettings
from cells.maps.bpf import test_run
from cells.maps.map import Map, create_map
from cells.maps.records.cluster import (
    TUNNEL_GATEWAYS,
    TUNNEL_NOT_FOR_PODS,
    NodeKey,
    NodeValue,
    TunnelConfig,
)
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue, NodeConfig, PolicyEntry, PolicyKey
from cells.maps.records.flows import (
    DEVICE_MASQUERADE_IPV4,
    DEVICE_MASQUERADE_IPV6,
    DEVICE_REMOTE_NODES,
    DEVICE_XDP,
    NODEPORT_DSR_TCP,
    NODEPORT_ON,
    NODEPORT_XDP,
    DeviceConfig,
    MetricsKey,
    NodePortConfig,
)
from cells.maps.specs import MapSizes, map_specs, policy_spec
from lifecycle import Duration
from tests.kernel.datapath_overlay.recorder import Recorder, Redirected, Route, Tunnelled, recorded_object
from tests.kernel.datapath_replay.recordings import (
    FIRST_DROP_REASON,
    LAST_RX_AT,
    LAST_TX_AT,
    LIFETIME_AT,
    Json,
    Recording,
)
from tests.kernel.datapath_replay.rules import is_gateway_translation, program_of

CONNTRACK = ("cilium_ct4_global", "cilium_ct_any4_global", "cilium_ct6_global", "cilium_ct_any6_global")
SERVICES = (
    *(f"cilium_lb{version}_{table}" for version in (4, 6) for table in ("services_v2", "backends_v3")),
    *("cilium_lb4_reverse_nat", "cilium_lb6_reverse_nat", "cilium_lb_affinity_match"),
    *("cilium_lb4_source_range", "cilium_lb6_source_range", "cilium_skip_lb4", "cilium_skip_lb6"),
)
NEIGHBOURS = ("cilium_nodeport_neigh4", "cilium_nodeport_neigh6")
AFFINITY = ("cilium_lb4_affinity", "cilium_lb6_affinity")
TUNNELS = ("cilium_tunnel_map", "cilium_node_map_v2")
NAT = ("cilium_snat_v4_external", "cilium_snat_v6_external")
FILLED = (
    *(*CONNTRACK, *NAT, *SERVICES, *AFFINITY, *TUNNELS, *NEIGHBOURS),
    *("cilium_ipv4_frag_datagrams", "cilium_lxc", "cilium_ipcache", "cilium_egress_gw_policy_v4"),
)
TUNNEL_IFINDEX, ROUTE_MTU = 77, 1450
EMPTIED = (*FILLED, "cilium_ipv6_frag_datagrams", "cilium_metrics", "hive_endpoints", "hive_devices")
_GATEWAYS = "ENABLE_EGRESS_GATEWAY"
ANY_SOURCE = 2  # ENDPOINT_ANY_SOURCE
MARK_AT, CONTROL_BLOCK_AT = 8, 48  # in struct __sk_buff
ALLOW_ALL = (PolicyKey(0, egress=False), PolicyKey(0, egress=True))


@dataclass(frozen=True)
class Replayed:
    """The result of our program."""

    verdict: int
    packet: bytes
    mark: int
    drop_reasons: set[tuple[int, int]]
    tables: dict[str, dict[bytes, bytes]]
    now: int
    """Seconds since boot when the packet was passed in."""
    tunnelled: Tunnelled | None
    """The tunnel key that was set."""
    redirected: Redirected | None
    """The target of the redirect, where it is recorded."""


class Node:
    """The maps of one node, refilled for each recording."""

    def __init__(self) -> None:
        sizes = MapSizes(ct_tcp=4096, ct_any=4096, policy=256)
        specs = map_specs(sizes, preallocate=False, cpus=os.cpu_count() or 1)
        self._maps: dict[str, Map] = {spec.name: create_map(spec) for spec in specs.values()}
        self._policies: list[Map] = []
        self._loaded: dict[tuple[DatapathSettings, str], LoadedObject] = {}
        self._recorder = Recorder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for loaded in self._loaded.values():
            loaded.close()
        for table in (*self._maps.values(), *self._policies, self._recorder.map):
            table.close()

    def replay(self, recording: Recording) -> Replayed:
        """Fill the maps, run the program on the packet, read the maps."""
        program = self._load(recording).programs()[program_of(recording)]
        now = int(time.monotonic())
        self._fill(recording, now)
        self._recorder.nothing(route(recording))
        for node, vni in tunnel_senders(recording):
            self._recorder.comes_from(node, vni, route(recording))
            self._maps["cilium_node_map_v2"].update(NodeKey(ip_address(node)).pack(), NodeValue(1).pack())
        packet, xdp = recording.packet, recording.hook == "xdp"
        run = test_run(program, packet, ctx_in=driver_context(packet) if xdp else context(recording))
        counted = [MetricsKey.unpack(key) for key, _ in self._maps["cilium_metrics"].items()]
        return Replayed(
            run.retval,
            run.packet[metadata_size(run.ctx_out) if xdp else 0 :],
            0 if xdp else struct.unpack_from("<I", run.ctx_out, MARK_AT)[0],
            {(each.reason, each.direction) for each in counted if each.reason >= FIRST_DROP_REASON},
            {name: dict(self._maps[name].items()) for name in FILLED},
            now,
            self._recorder.tunnelled,
            self._recorder.redirected,
        )

    def _load(self, recording: Recording) -> LoadedObject:
        """Load the object; with recorded routes or tunnel keys, the one that replays these."""
        chosen, hook = settings(recording), recording.hook
        recorded = bool(recording.switches & {"TUNNEL_MODE", _GATEWAYS}) or hook in {
            "from-netdev",
            "to-netdev",
            "xdp",
        }
        kind = ("recorded_xdp" if hook == "xdp" else "recorded") if recorded else ""
        if recording.l3:
            kind = "recorded_l3"
        if (chosen, kind) not in self._loaded:
            data = recorded_object(kind) if kind else (PACKAGED_OBJECTS / "datapath.o").read_bytes()
            tables = [*self._maps.values(), self._recorder.map]
            entries = L3_ENTRIES if recording.l3 else XDP_ENTRIES if hook == "xdp" else ENTRIES
            self._loaded[chosen, kind], _ = load(
                data, "datapath.o", tables, 1, chosen, programs=entries.keys()
            )
        return self._loaded[chosen, kind]

    def _fill(self, recording: Recording, now: int) -> None:
        for name in EMPTIED:
            self._maps[name].clear()
        for name in FILLED:
            for key, value, decoded in recording.before(name):
                if name in CONNTRACK:
                    value = with_times(value, decoded, now)  # noqa: PLW2901
                if name in AFFINITY:
                    value = struct.pack("<Q", now) + value[8:]  # noqa: PLW2901
                self._maps[name].update(key, value)
        keys = [value for _, value, _ in recording.before("cilium_encrypt_state")]
        self._maps["cilium_encrypt_state"].update(bytes(4), keys[0] if keys else b"\0")
        self._report_device(recording)
        if recording.hook == "snat-step":
            return
        self._report_node(recording)
        if recording.hook == "xdp":  # no endpoint is at a device
            return
        self._report_endpoint(recording)
        self._begin_epochs(recording)

    def _report_node(self, recording: Recording) -> None:
        constants = recording.constants
        ipv4, ipv6 = ("ENABLE_IPV4" in recording.switches, "ENABLE_IPV6" in recording.switches)
        router = IPv4Address(constants.get("IPV4_GATEWAY", "0.0.0.0") if ipv4 else "0.0.0.0")
        router6 = IPv6Address(constants["ROUTER_IP"] if ipv6 else "::")
        host, net = mac(constants["HOST_IFINDEX_MAC"]), mac(constants["CILIUM_NET_MAC"])
        row = NodeConfig(
            *(router, 1, host, 1, net, IPv4Network("10.245.0.0/16"), 0),
            *(router6, IPv6Network("beef::/64"), 0),
        )
        self._maps["hive_node"].update(bytes(4), row.pack())
        serves = NODEPORT_ON * ("ENABLE_NODEPORT" in recording.switches)
        serves |= NODEPORT_DSR_TCP * ("ENABLE_DSR" in recording.switches)
        serves |= NODEPORT_XDP * (recording.hook == "xdp")
        direct = IPv4Address(constants.get("IPV4_DIRECT_ROUTING", 0))
        direct6 = ipv6_reported(constants.get("IPV6_DIRECT_ROUTING", "::"))
        self._maps["hive_nodeport"].update(bytes(4), NodePortConfig(serves, direct, direct6).pack())
        tunnel = TunnelConfig()
        if _GATEWAYS in recording.switches:
            tunnel = TunnelConfig(
                TUNNEL_IFINDEX,
                ROUTE_MTU,
                constants["TUNNEL_PORT"],
                flags=TUNNEL_GATEWAYS | TUNNEL_NOT_FOR_PODS,
            )
        elif "TUNNEL_MODE" in recording.switches | constants.keys():
            tunnel = TunnelConfig(TUNNEL_IFINDEX, ROUTE_MTU, constants["TUNNEL_PORT"])
        self._maps["hive_tunnel"].update(bytes(4), tunnel.pack())

    def _report_device(self, recording: Recording) -> None:
        """Write the native device of the packet, and for a NAT step the pod that sent it."""
        constants, step = recording.constants, recording.hook == "snat-step"
        ipv4 = constants["snat_target_address"] if step else "0.0.0.0"
        gateways = _GATEWAYS in recording.switches
        on = {
            DEVICE_MASQUERADE_IPV4: step or ("ENABLE_MASQUERADE_IPV4" in recording.switches and not gateways),
            DEVICE_MASQUERADE_IPV6: "ENABLE_MASQUERADE_IPV6" in recording.switches,
            DEVICE_REMOTE_NODES: "TUNNEL_MODE" in constants,
            DEVICE_XDP: recording.hook == "xdp",
        }
        row = DeviceConfig(
            recording.packet[:6],
            IPv4Address(ipv4),
            IPv6Address(constants.get("IPV6_MASQUERADE", "::")),
            flags=sum(flag for flag, holds in on.items() if holds),
        )
        others = {route(recording).ifindex} - {constants.get("NATIVE_DEV_IFINDEX")}
        for ifindex in {1} | others:
            self._maps["hive_devices"].update(struct.pack("<I", ifindex), row.pack())
        if (step or gateways) and program_of(recording) == "hive_to_device":
            pod = LxcValue(7, 7, bytes(6), bytes(6), 1000 * step)
            source = IPv4Address(recording.packet[26:30])
            self._maps["cilium_lxc"].update(LxcKey(source).pack(), pod.pack())

    def _report_endpoint(self, recording: Recording) -> None:
        """Write the link's endpoint with its recorded policy; all others allow everything."""
        constants = recording.constants
        for policy in self._policies:
            policy.close()
        open_to_all = {key.pack(): PolicyEntry().pack(key) for key in ALLOW_ALL}
        contents = dict.fromkeys(destinations(recording), open_to_all)
        if "LXC_ID" in constants:
            own = int(constants["LXC_ID"])
            anything = 0 if "ENABLE_SIP_VERIFICATION" in recording.switches else ANY_SOURCE
            row = EndpointConfig(
                *(IPv4Address(constants["LXC_IPV4"]), own, int(constants["SECLABEL"])),
                *(mac(constants["THIS_INTERFACE_MAC"]), recording.packet[6:12], anything),
                IPv6Address(constants["LXC_IP"]),
                netns_cookie=constants.get("ENDPOINT_NETNS_COOKIE", 0),
            )
            self._maps["hive_endpoints"].update(struct.pack("<I", 1), row.pack())
            contents[own] = {key: value for key, value, _ in recording.before("cilium_policy_<endpoint>")}
        self._policies = [self._give_policy(number, rows) for number, rows in contents.items()]

    def _give_policy(self, endpoint: int, rows: dict[bytes, bytes]) -> Map:
        policy = create_map(policy_spec(endpoint, 256))
        for key, value in rows.items():
            policy.update(key, value)
        self._maps["hive_policies"].update(struct.pack("<I", endpoint), struct.pack("<I", policy.fd))
        return policy

    def _begin_epochs(self, recording: Recording) -> None:
        """Invalidate all verdicts that the programs cached in the recording before."""
        epochs = self._maps["hive_epoch"]
        for number in (0, int(recording.constants.get("LXC_ID", 0)), *destinations(recording)):
            key = struct.pack("<I", number)
            (epoch,) = struct.unpack("<Q", epochs.lookup(key) or bytes(8))
            epochs.update(key, struct.pack("<Q", epoch + 1))


def tunnel_senders(recording: Recording) -> Iterator[tuple[str, int]]:
    """Return the node and identity that the packet's tunnel key names."""
    for came in recording.data["result"]["tunnel_keys"]:
        if came["call"] == "get_tunnel_key":
            yield came["remote_ipv4_host_order"], came["vni"]
    if is_gateway_translation(recording):
        yield recording.constants["CLIENT_NODE_IP"], 0


def context(recording: Recording) -> bytes:
    """Return a struct __sk_buff. Its control block is set only for encrypted packets' senders."""
    fields = bytearray(192)
    struct.pack_into("<I", fields, MARK_AT, recording.mark)
    if "ENABLE_IPSEC" in recording.switches:
        block = [int(each, 16) for each in recording.data["input"]["ctx"]["cb"]]
        struct.pack_into("<5I", fields, CONTROL_BLOCK_AT, *block)
    return bytes(fields)


def driver_context(packet: bytes) -> bytes:
    """Return a struct xdp_md, received on loopback."""
    return struct.pack("<6I", 0, len(packet), 0, 1, 0, 0)


def metadata_size(context: bytes) -> int:
    """Return the length of the metadata in front of the packet."""
    data, _, meta = struct.unpack_from("<3I", context)
    return int(data - meta)


def settings(recording: Recording) -> DatapathSettings:
    """Return the settings compiled into the recorded programs, where ours have them."""

    if recording.hook == "snat-step":
        return DatapathSettings(enable_sctp=True)

    def seconds(name: str) -> Duration:
        return Duration(recording.constants[name])

    answers = "SERVICE_NO_BACKEND_RESPONSE" in recording.switches
    return ProgramSettings(
        marks_for_xfrm="ENABLE_IPSEC" in recording.switches,
        bpf_ct_timeout_regular_tcp=seconds("CT_CONNECTION_LIFETIME_TCP"),
        bpf_ct_timeout_regular_any=seconds("CT_CONNECTION_LIFETIME_NONTCP"),
        bpf_ct_timeout_regular_tcp_syn=seconds("CT_SYN_TIMEOUT"),
        bpf_ct_timeout_regular_tcp_fin=seconds("CT_CLOSE_TIMEOUT"),
        bpf_ct_timeout_service_tcp=seconds("CT_SERVICE_LIFETIME_TCP"),
        bpf_ct_timeout_service_any=seconds("CT_SERVICE_LIFETIME_NONTCP"),
        bpf_ct_timeout_service_tcp_grace=seconds("CT_SERVICE_CLOSE_REBALANCE"),
        ipv4_service_loopback_address=IPv4Address(recording.constants.get("IPV4_LOOPBACK", "0.0.0.0")),
        service_no_backend_response="reject" if answers else "drop",
        enable_sctp="ENABLE_SCTP" in recording.switches,
        enable_host_legacy_routing="ENABLE_HOST_ROUTING" not in recording.switches,
    )


def ipv6_reported(text: str) -> IPv6Address:
    """Parse an IPv6 address; some are recorded by their first six bytes, in the form of a MAC."""
    cut = text.count(":") == 5 and "::" not in text
    return IPv6Address(mac(text).ljust(16, b"\0")) if cut else IPv6Address(text)


def route(recording: Recording) -> Route:
    """Return the result of the route lookup for the packet."""
    lookups = recording.data["result"]["fib_lookups"]
    if not lookups:
        return Route()
    answer = lookups[0]["answer"]
    next_hop = ip_address(answer["dst"]).packed.ljust(16, b"\0")
    return Route(answer["return_code"], answer["ifindex"], mac(answer["smac"]), mac(answer["dmac"]), next_hop)


def destinations(recording: Recording) -> Iterator[int]:
    """Return the node's endpoints other than the link's."""
    own = int(recording.constants.get("LXC_ID", 0))
    for _, value, _ in recording.before("cilium_lxc"):
        row = LxcValue.unpack(value)
        if not row.is_host and row.endpoint_id != own:
            yield row.endpoint_id


def with_times(value: bytes, decoded: Json, now: int) -> bytes:
    """Return a conntrack entry with times relative to this ``now``."""
    entry = bytearray(value)
    fields = decoded["value"]
    for at, field in (
        (LIFETIME_AT, "lifetime"),
        (LAST_TX_AT, "last_tx_report"),
        (LAST_RX_AT, "last_rx_report"),
    ):
        struct.pack_into("<I", entry, at, clock(fields[field], now))
    return bytes(entry)


def clock(moment: int | str, now: int) -> int:
    """Convert ``now+60`` and the like to seconds since boot."""
    if isinstance(moment, int):
        return moment
    return now + int(moment.removeprefix("now") or 0)


def mac(text: str) -> bytes:
    """Return the six bytes of a MAC."""
    return bytes.fromhex(text.replace(":", ""))
