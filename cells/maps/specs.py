"""What each map of the node is. Names and layouts of the cilium_* maps are public: bpftool and cilium-dbg
open them by path and refuse other sizes.

For:    Maps. Needs: MapSizes. Gives: map_specs(), policy_spec(), family_of(), ALWAYS.
"""

from typing import Final

from cells.maps.bpf.map import NO_PREALLOC, MapSpec, MapType
from cells.maps.records.announcements import L2_RESPONDER_VALUE, L2ResponderKey
from cells.maps.records.config import EndpointConfig, NodeConfig
from cells.maps.records.conntrack import (
    CT4_KEY,
    CT6_KEY,
    FRAGMENT4_KEY,
    FRAGMENT6_KEY,
    CtEntry,
    FragmentPorts,
)
from cells.maps.records.ipcache import IpcacheKey, IpcacheValue
from cells.maps.records.lxc import LxcKey, LxcValue
from cells.maps.records.metrics import MetricsKey, MetricsValue
from cells.maps.records.nat import NAT4_ENTRY, NAT6_ENTRY, DeviceConfig
from cells.maps.records.nodeport import NEIGHBOUR, NodePortConfig
from cells.maps.records.policy import PolicyEntry, PolicyKey
from cells.maps.records.sock import SockConfig
from cells.maps.records.tunnel import NodeKey, NodeValue, TunnelConfig, TunnelKey, TunnelValue
from cells.maps.sizes import ENDPOINT_IDS, MapSizes

SKIPPED: Final = 100
"""Entries of the maps of sockets that no policy redirects."""
_POLICY_PREFIX: Final = "cilium_policy_"


ALWAYS: Final = frozenset(
    {
        *("lxc", "ipcache", "ct4_tcp", "ct4_any", "ct6_tcp", "ct6_any", "fragments4", "fragments6"),
        *("metrics", "events", "endpoints", "node", "links", "epoch", "policies", "nodes", "devices"),
        *("sock", "nodeport", "tunnel", "runtime_config", "entry", "l3_entry", "xdp_entry"),
    }
)
"""Maps of every node, those of a family only where pods have it; cells that need others ask for them."""


def family_of(attribute: str) -> int:
    """The family whose addresses a map of Maps has, 4 or 6; 0 if both or none."""
    return next((family for family in (4, 6) if str(family) in attribute), 0)


def policy_name(endpoint_id: int) -> str:
    """Name and pin of an endpoint's policy map."""
    return f"{_POLICY_PREFIX}{endpoint_id:05d}"


def policy_spec(endpoint_id: int, max_entries: int) -> MapSpec:
    """An endpoint's policy map, the layout of Cilium 1.16 and 1.17."""
    return MapSpec(
        policy_name(endpoint_id), MapType.LPM_TRIE, PolicyKey.SIZE, PolicyEntry.SIZE, max_entries, NO_PREALLOC
    )


def map_specs(sizes: MapSizes, *, preallocate: bool, cpus: int) -> dict[str, MapSpec]:
    """All maps that the programs know, by the attribute of Maps that holds them."""
    hashed = 0 if preallocate else NO_PREALLOC
    of_policies = policy_spec(0, sizes.policy)
    of_maglev = MapSpec("cilium_lb_maglev_inner", MapType.ARRAY, 4, 4 * sizes.maglev, 1)
    flow, ports = CtEntry.SIZE, FragmentPorts.SIZE
    ipcache, metrics = (IpcacheKey.SIZE, IpcacheValue.SIZE), (MetricsKey.SIZE, MetricsValue.SIZE)
    endpoint = EndpointConfig.SIZE
    return {
        "lxc": MapSpec("cilium_lxc", MapType.HASH, LxcKey.SIZE, LxcValue.SIZE, 65535, hashed),
        "ipcache": MapSpec("cilium_ipcache", MapType.LPM_TRIE, *ipcache, 512000, NO_PREALLOC),
        "ct4_tcp": MapSpec("cilium_ct4_global", MapType.LRU_HASH, CT4_KEY, flow, sizes.ct_tcp),
        "ct4_any": MapSpec("cilium_ct_any4_global", MapType.LRU_HASH, CT4_KEY, flow, sizes.ct_any),
        "ct6_tcp": MapSpec("cilium_ct6_global", MapType.LRU_HASH, CT6_KEY, flow, sizes.ct_tcp),
        "ct6_any": MapSpec("cilium_ct_any6_global", MapType.LRU_HASH, CT6_KEY, flow, sizes.ct_any),
        "fragments4": MapSpec(
            "cilium_ipv4_frag_datagrams", MapType.LRU_HASH, FRAGMENT4_KEY, ports, sizes.fragments
        ),
        "fragments6": MapSpec(
            "cilium_ipv6_frag_datagrams", MapType.LRU_HASH, FRAGMENT6_KEY, ports, sizes.fragments
        ),
        # Whatever preallocate says: `cilium-dbg bpf metrics list` unpins every map but exactly this one.
        "metrics": MapSpec("cilium_metrics", MapType.PERCPU_HASH, *metrics, 1024, NO_PREALLOC),
        "events": MapSpec("cilium_events", MapType.PERF_EVENT_ARRAY, 4, 4, cpus),
        "endpoints": MapSpec("hive_endpoints", MapType.HASH, 4, endpoint, ENDPOINT_IDS + 1, hashed),
        "node": MapSpec("hive_node", MapType.ARRAY, 4, NodeConfig.SIZE, 1),
        "links": MapSpec("hive_links", MapType.PERCPU_ARRAY, 4, 72, 256),
        "epoch": MapSpec("hive_epoch", MapType.ARRAY, 4, 8, 65536),
        "policies": MapSpec(
            "hive_policies", MapType.ARRAY_OF_MAPS, 4, 4, ENDPOINT_IDS + 1, inner=of_policies
        ),
        "services4": MapSpec("cilium_lb4_services_v2", MapType.HASH, 12, 12, sizes.lb_services, hashed),
        "services6": MapSpec("cilium_lb6_services_v2", MapType.HASH, 24, 12, sizes.lb_services, hashed),
        "backends4": MapSpec("cilium_lb4_backends_v3", MapType.HASH, 4, 12, sizes.lb_backends, hashed),
        "backends6": MapSpec("cilium_lb6_backends_v3", MapType.HASH, 4, 24, sizes.lb_backends, hashed),
        "reverse_nat4": MapSpec("cilium_lb4_reverse_nat", MapType.HASH, 2, 6, sizes.lb_reverse_nat, hashed),
        "reverse_nat6": MapSpec("cilium_lb6_reverse_nat", MapType.HASH, 2, 18, sizes.lb_reverse_nat, hashed),
        "affinity4": MapSpec("cilium_lb4_affinity", MapType.LRU_HASH, 16, 16, sizes.lb_affinity),
        "affinity6": MapSpec("cilium_lb6_affinity", MapType.LRU_HASH, 24, 16, sizes.lb_affinity),
        "affinity_match": MapSpec("cilium_lb_affinity_match", MapType.HASH, 8, 1, sizes.lb_affinity, hashed),
        "reverse_sk4": MapSpec("cilium_lb4_reverse_sk", MapType.LRU_HASH, 16, 8, sizes.sock_rev),
        "reverse_sk6": MapSpec("cilium_lb6_reverse_sk", MapType.LRU_HASH, 32, 20, sizes.sock_rev),
        "skip_lb4": MapSpec("cilium_skip_lb4", MapType.HASH, 16, 1, SKIPPED, NO_PREALLOC),
        "skip_lb6": MapSpec("cilium_skip_lb6", MapType.HASH, 32, 1, SKIPPED, NO_PREALLOC),
        "sock": MapSpec("hive_sock", MapType.ARRAY, 4, SockConfig.SIZE, 1),
        "source_range4": MapSpec(
            "cilium_lb4_source_range", MapType.LPM_TRIE, 12, 1, sizes.lb_source_ranges, NO_PREALLOC
        ),
        "source_range6": MapSpec(
            "cilium_lb6_source_range", MapType.LPM_TRIE, 24, 1, sizes.lb_source_ranges, NO_PREALLOC
        ),
        "maglev4": MapSpec(
            "cilium_lb4_maglev", MapType.HASH_OF_MAPS, 2, 4, sizes.lb_maglev, NO_PREALLOC, of_maglev
        ),
        "maglev6": MapSpec(
            "cilium_lb6_maglev", MapType.HASH_OF_MAPS, 2, 4, sizes.lb_maglev, NO_PREALLOC, of_maglev
        ),
        "nodeport": MapSpec("hive_nodeport", MapType.ARRAY, 4, NodePortConfig.SIZE, 1),
        "nodeport_neighbours4": MapSpec(
            "cilium_nodeport_neigh4", MapType.LRU_HASH, 4, NEIGHBOUR, sizes.neighbours
        ),
        "nodeport_neighbours6": MapSpec(
            "cilium_nodeport_neigh6", MapType.LRU_HASH, 16, NEIGHBOUR, sizes.neighbours
        ),
        "tunnel": MapSpec("hive_tunnel", MapType.ARRAY, 4, TunnelConfig.SIZE, 1),
        "tunnels": MapSpec(
            "cilium_tunnel_map", MapType.HASH, TunnelKey.SIZE, TunnelValue.SIZE, 65536, hashed
        ),
        "nodes": MapSpec(
            "cilium_node_map_v2", MapType.HASH, NodeKey.SIZE, NodeValue.SIZE, 16384, NO_PREALLOC
        ),
        "snat4": MapSpec("cilium_snat_v4_external", MapType.LRU_HASH, CT4_KEY, NAT4_ENTRY, sizes.nat),
        "snat6": MapSpec("cilium_snat_v6_external", MapType.LRU_HASH, CT6_KEY, NAT6_ENTRY, sizes.nat),
        "ipmasq4": MapSpec("cilium_ipmasq_v4", MapType.LPM_TRIE, 8, 1, 16384, NO_PREALLOC),
        "ipmasq6": MapSpec("cilium_ipmasq_v6", MapType.LPM_TRIE, 20, 1, 16384, NO_PREALLOC),
        "devices": MapSpec("hive_devices", MapType.HASH, 4, DeviceConfig.SIZE, 256, NO_PREALLOC),
        "l2_responder4": MapSpec(
            *("cilium_l2_responder_v4", MapType.HASH, L2ResponderKey.SIZE, L2_RESPONDER_VALUE.size),
            *(4096, NO_PREALLOC),
        ),
        "runtime_config": MapSpec("cilium_runtime_config", MapType.ARRAY, 4, 8, 256),
        "entry": MapSpec("hive_entry", MapType.PROG_ARRAY, 4, 4, 8),
        "l3_entry": MapSpec("hive_l3_entry", MapType.PROG_ARRAY, 4, 4, 2),
        "xdp_entry": MapSpec("hive_xdp_entry", MapType.PROG_ARRAY, 4, 4, 1),
    }
