"""The BPF maps of the node, pinned where Cilium's tools look for them; and the pool of policy maps.

It opens or makes the maps, and keeps them pinned; other cells fill them.
Needs:  AgentConfig, MapSettings.   Gives: Maps, PolicyMaps, and the layouts and calls to use them with.
Why:    pinned maps outlive the agent, so a restart takes them over and loses no flow. Of one whose layout or
        size differs the entries are taken over into a new one, or the start refuses; programs loaded earlier
        keep the old one until they are reloaded.

Settings: bpf-map-dynamic-size-ratio, bpf-ct-global-tcp-max, bpf-ct-global-any-max, bpf-policy-map-max,
bpf-nat-global-max, bpf-sock-rev-map-max, bpf-fragments-map-max, preallocate-bpf-maps, policy-map-pool.
"""

from collections.abc import Iterable

import anyio

from cells.maps.bpf.links import (
    LinkInfo,
    attach_cgroup,
    link_info,
    linked_device,
    open_link,
    replace_program,
)
from cells.maps.bpf.links import detach as detach_link
from cells.maps.bpf.map import (
    ANY,
    EXIST,
    NO_PREALLOC,
    NOEXIST,
    Map,
    MapSpec,
    MapType,
    create_map,
    map_by_id,
    open_map,
    possible_cpus,
)
from cells.maps.bpf.map_log import MapChange, MapLog
from cells.maps.bpf.programs import (
    ProgramInfo,
    TestRun,
    open_program,
    program_by_id,
    program_info,
    program_name,
    run_program,
    test_run,
)
from cells.maps.bpf.syscall import BpfError, pin, replace_pin, unpin, unpin_unfinished
from cells.maps.epochs import Epochs
from cells.maps.node_maps import Maps
from cells.maps.policy.entries import EntryChanges, PolicyEntryMap
from cells.maps.policy.policy_map import PolicyMap
from cells.maps.policy.policy_maps import PolicyIdsExhausted, PolicyMaps, PoolEmpty
from cells.maps.records.announcements import AGENT_LIVENESS, L2_RESPONDER_VALUE, L2ResponderKey
from cells.maps.records.config import (
    ENDPOINT_ANY_SOURCE,
    ENDPOINT_FLAGS,
    ENDPOINT_PASSES_NEIGHBOURS,
    ENDPOINT_REQUIRE_EGRESS_PROG,
    ENDPOINT_ROUTED_BY_HOST,
    NODE_AUDITS_HOST,
    NODE_AUDITS_POLICY,
    NODE_EVENTS,
    NODE_NOTIFY_DROP,
    NODE_NOTIFY_POLICY_VERDICT,
    NODE_NOTIFY_SOCK,
    NODE_NOTIFY_TRACE,
    EndpointConfig,
    NodeConfig,
    flags_text,
)
from cells.maps.records.conntrack import CT_IN, CT_OUT, CT_RELATED, CT_SERVICE, CtEntry, CtKey, FragmentPorts
from cells.maps.records.ipcache import IpcacheKey, IpcacheValue, ipcache_key, ipcache_prefix
from cells.maps.records.lxc import LXC_HOST, LxcKey, LxcValue
from cells.maps.records.metrics import METRIC_EGRESS, METRIC_INGRESS, METRIC_SERVICE, MetricsKey, MetricsValue
from cells.maps.records.nat import (
    DEVICE_FLAGS,
    DEVICE_IP_MASQ,
    DEVICE_MASQUERADE_IPV4,
    DEVICE_MASQUERADE_IPV6,
    DEVICE_PROXIES,
    DEVICE_REMOTE_NODES,
    DEVICE_XDP,
    DeviceConfig,
    NatEntry,
)
from cells.maps.records.nodeport import (
    NODEPORT_DSR_CHOSEN,
    NODEPORT_DSR_OTHER,
    NODEPORT_DSR_TCP,
    NODEPORT_MAGLEV,
    NODEPORT_ON,
    NODEPORT_XDP,
    NodePortConfig,
)
from cells.maps.records.policy import PolicyEntry, PolicyKey
from cells.maps.records.sock import (
    SOCK_BIND_PROTECTION,
    SOCK_HOST_ONLY,
    SOCK_REJECTS,
    SOCK_TRUSTS_EXTERNAL_IP,
    ReverseSk,
    ReverseSkKey,
    SkipLbKey,
    SockConfig,
)
from cells.maps.records.text import row_text
from cells.maps.records.tunnel import (
    TUNNEL_OWN_IDENTITIES,
    NodeKey,
    NodeValue,
    TunnelConfig,
    TunnelKey,
    TunnelValue,
)
from cells.maps.sizes import MapSettings
from cells.maps.watchdog import MapWatchdog
from cells.observe.metrics import Collector, Family, counter
from lifecycle import Member, config, invoke, module, provide

__all__ = [
    "AGENT_LIVENESS",
    "ANY",
    "CT_IN",
    "CT_OUT",
    "CT_RELATED",
    "CT_SERVICE",
    "DEVICE_FLAGS",
    "DEVICE_IP_MASQ",
    "DEVICE_MASQUERADE_IPV4",
    "DEVICE_MASQUERADE_IPV6",
    "DEVICE_PROXIES",
    "DEVICE_REMOTE_NODES",
    "DEVICE_XDP",
    "ENDPOINT_ANY_SOURCE",
    "ENDPOINT_FLAGS",
    "ENDPOINT_PASSES_NEIGHBOURS",
    "ENDPOINT_REQUIRE_EGRESS_PROG",
    "ENDPOINT_ROUTED_BY_HOST",
    "EXIST",
    "L2_RESPONDER_VALUE",
    "LXC_HOST",
    "METRIC_EGRESS",
    "METRIC_INGRESS",
    "METRIC_SERVICE",
    "NODEPORT_DSR_CHOSEN",
    "NODEPORT_DSR_OTHER",
    "NODEPORT_DSR_TCP",
    "NODEPORT_MAGLEV",
    "NODEPORT_ON",
    "NODEPORT_XDP",
    "NODE_AUDITS_HOST",
    "NODE_AUDITS_POLICY",
    "NODE_EVENTS",
    "NODE_NOTIFY_DROP",
    "NODE_NOTIFY_POLICY_VERDICT",
    "NODE_NOTIFY_SOCK",
    "NODE_NOTIFY_TRACE",
    "NOEXIST",
    "NO_PREALLOC",
    "SOCK_BIND_PROTECTION",
    "SOCK_HOST_ONLY",
    "SOCK_REJECTS",
    "SOCK_TRUSTS_EXTERNAL_IP",
    "TUNNEL_OWN_IDENTITIES",
    "BpfError",
    "CtEntry",
    "CtKey",
    "DeviceConfig",
    "EndpointConfig",
    "EntryChanges",
    "Epochs",
    "FragmentPorts",
    "IpcacheKey",
    "IpcacheValue",
    "L2ResponderKey",
    "LinkInfo",
    "LxcKey",
    "LxcValue",
    "Map",
    "MapChange",
    "MapLog",
    "MapSettings",
    "MapSpec",
    "MapType",
    "MapWatchdog",
    "Maps",
    "MetricsKey",
    "MetricsValue",
    "NatEntry",
    "NodeConfig",
    "NodeKey",
    "NodePortConfig",
    "NodeValue",
    "PolicyEntry",
    "PolicyEntryMap",
    "PolicyIdsExhausted",
    "PolicyKey",
    "PolicyMap",
    "PolicyMaps",
    "PoolEmpty",
    "ProgramInfo",
    "ReverseSk",
    "ReverseSkKey",
    "SkipLbKey",
    "SockConfig",
    "TestRun",
    "TunnelConfig",
    "TunnelKey",
    "TunnelValue",
    "attach_cgroup",
    "cell",
    "create_map",
    "detach_link",
    "flags_text",
    "ipcache_key",
    "ipcache_prefix",
    "link_info",
    "linked_device",
    "map_by_id",
    "open_link",
    "open_map",
    "open_program",
    "pin",
    "possible_cpus",
    "program_by_id",
    "program_info",
    "program_name",
    "replace_pin",
    "replace_program",
    "row_text",
    "run_program",
    "test_run",
    "unpin",
    "unpin_unfinished",
    "watchdog_cell",
]


def map_metrics(maps: Maps, policies: PolicyMaps) -> Member[Collector]:
    """Maps as metrics."""
    one = anyio.CapacityLimiter(1)

    async def collect() -> Iterable[Family]:
        from cells.maps.metrics import families

        return await families(maps, policies, one)

    return Collector("maps", collect)


def watchdog_metrics(watchdog: MapWatchdog) -> Member[Collector]:
    """What the watchdog found, as a metric."""

    async def collect() -> Iterable[Family]:
        text = "Pins and policy maps that someone else removed."
        return [counter("hive_map_watchdog_faults_total", text, dict(watchdog.found), "what")]

    return Collector("map-watchdog", collect)


cell = module(
    "maps",
    "BPF maps and the pool of policy maps",
    config(MapSettings),
    provide(Maps, PolicyMaps, map_metrics),
)


watchdog_cell = module(
    "map-watchdog",
    "Repairs the pins of the maps",
    provide(MapWatchdog, watchdog_metrics),
    invoke(MapWatchdog),
)
"""For an agent with endpoints: who uses the maps alone has its own idea of policy maps."""
