"""Attributes and sizes of the node's maps, and the options that set them.

Names and layouts of the cilium_* maps are public: bpftool and cilium-dbg open them by path and refuse other
sizes. Maps opens or creates the maps by these specs.
"""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from cells.maps.map import EVERY_FLOW, NO_PREALLOC, MapSpec, MapType
from cells.maps.records.cluster import (
    L2_RESPONDER_VALUE,
    EgressKey,
    EgressValue,
    IpcacheKey,
    IpcacheValue,
    L2ResponderKey,
    NodeKey,
    NodeValue,
    TunnelConfig,
    TunnelKey,
    TunnelValue,
)
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue, NodeConfig, PolicyEntry, PolicyKey
from cells.maps.records.flows import (
    CT4_KEY,
    CT6_KEY,
    FRAGMENT4_KEY,
    FRAGMENT6_KEY,
    NAT4_ENTRY,
    NAT6_ENTRY,
    NEIGHBOUR,
    CtEntry,
    DeviceConfig,
    EncryptionConfig,
    FragmentPorts,
    MetricsKey,
    MetricsValue,
    NodePortConfig,
    SockConfig,
)
from lifecycle import Settings
from lifecycle.settings import RenamedFrom

__all__ = ["MapSettings", "MapSizing", "map_sizing"]


# Map sizes: from their options, or from a share of the node's memory.

MIN_ENTRIES: Final = 1 << 10
MAX_ENTRIES: Final = 1 << 24
POLICY_MIN_ENTRIES: Final = 1 << 8
POLICY_MAX_ENTRIES: Final = 1 << 16
ENDPOINT_IDS: Final = 4095
"""Endpoint ids are 1 to 4095: the indexes of hive_policies."""

MAGLEV_SIZES: Final = (251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 131071)
"""Allowed sizes of Maglev tables: primes."""

Entries = Annotated[int, Meta(ge=MIN_ENTRIES, le=MAX_ENTRIES)]
ServiceEntries = Annotated[int, Meta(ge=0, le=MAX_ENTRIES)]

CT_TCP: Final = 524288
CT_ANY: Final = 262144
NAT: Final = 524288
SOCK_REV: Final = 262144

# Bytes of one entry, key and value, of the IPv6 maps. As in Cilium, the shares count these even without IPv6,
# and count neighbour entries even if that map is not used.
_CT_ENTRY = 38 + 56
_NAT_ENTRY = 38 + 56
_NEIGHBOUR_ENTRY = 16 + 8
_SOCK_REV_ENTRY = 32 + 20
_DEFAULT_BYTES = (
    (CT_TCP + CT_ANY) * _CT_ENTRY + NAT * (_NAT_ENTRY + _NEIGHBOUR_ENTRY) + SOCK_REV * _SOCK_REV_ENTRY
)


class MapSettings(Settings, frozen=True):
    """Settings of the maps cell."""

    bpf_map_dynamic_size_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0025
    """Share of the node's memory for maps that grow with traffic; 0: their default sizes."""

    bpf_ct_global_tcp_max: Annotated[Entries | None, RenamedFrom("ct-global-max-entries-tcp")] = None
    """Entries of the TCP conntrack map; unset: by bpf-map-dynamic-size-ratio."""

    bpf_ct_global_any_max: Annotated[Entries | None, RenamedFrom("ct-global-max-entries-other")] = None
    """Entries of the conntrack map of other protocols; unset: by the ratio."""

    bpf_nat_global_max: Entries | None = None
    """Entries of the NAT map, two per flow (at most as many as of the conntrack maps); unset: by ratio."""

    bpf_policy_map_max: Annotated[int, Meta(ge=POLICY_MIN_ENTRIES)] = 16384
    """Entries of each endpoint's policy map (more than 65536 is 65536)."""

    bpf_lb_map_max: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)] = 65536
    """Entries of each map of services: frontends and their backends, reverse NAT, affinity, ranges."""

    bpf_lb_service_map_max: ServiceEntries = 0
    """Entries of the maps of frontends and their backend slots; 0: bpf-lb-map-max."""

    bpf_lb_service_backend_map_max: ServiceEntries = 0
    """Entries of the maps of backends; 0: bpf-lb-map-max."""

    bpf_lb_rev_nat_map_max: ServiceEntries = 0
    """Entries of the reverse NAT maps, which hold frontends by index; 0: bpf-lb-map-max."""

    bpf_lb_affinity_map_max: ServiceEntries = 0
    """Entries of the session affinity maps; 0: bpf-lb-map-max."""

    bpf_lb_source_range_map_max: ServiceEntries = 0
    """Entries of the maps of source ranges; 0: bpf-lb-map-max."""

    bpf_lb_maglev_map_max: ServiceEntries = 0
    """Services with Maglev tables, per family; 0: bpf-lb-map-max."""

    bpf_neigh_global_max: Entries | None = None
    """Entries of the neighbour maps of external clients; unset: as many as the NAT maps."""

    bpf_sock_rev_map_max: Entries | None = None
    """Entries of the map of sockets connected to services; unset: by the ratio."""

    bpf_lb_maglev_table_size: int = 16381
    """Size of each Maglev table, one of Cilium's primes; take over 100 per backend."""

    bpf_fragments_map_max: Annotated[int, Meta(ge=256, le=65536)] = 8192
    """Entries of each family's map of fragmented datagrams."""

    egress_gateway_policy_map_max: Annotated[int, Meta(ge=2, le=MAX_ENTRIES)] = 16384
    """Entries of the egress gateway map: selected pods times destination CIDRs."""

    preallocate_bpf_maps: bool = False
    """Preallocate the memory of hash maps."""

    policy_map_pool: Annotated[int, Meta(ge=1, le=ENDPOINT_IDS)] = 64
    """Policy maps created ahead for new pods (1 to 4095), as creating one takes 15 ms."""

    def faults(self) -> Iterator[str]:
        if self.bpf_lb_maglev_table_size not in MAGLEV_SIZES:
            sizes_text = ", ".join(map(str, MAGLEV_SIZES))
            yield f"bpf-lb-maglev-table-size={self.bpf_lb_maglev_table_size}: expected one of {sizes_text}"
        nat, tcp, other = (
            self.bpf_nat_global_max,
            self.bpf_ct_global_tcp_max,
            self.bpf_ct_global_any_max,
        )
        if (
            nat is None or nat == NAT or tcp is None or other is None
        ):  # sizes() lowers the default, as Cilium does
            return
        if nat > tcp + other:
            yield (
                f"bpf-nat-global-max={nat}: expected at most {tcp + other}, the sum of"
                " bpf-ct-global-tcp-max and bpf-ct-global-any-max"
            )


class MapSizes(msgspec.Struct, frozen=True):
    """Number of entries of each map."""

    ct_tcp: int
    ct_any: int
    policy: int
    nat: int = 4096
    fragments: int = 8192
    lb_services: int = 65536
    lb_backends: int = 65536
    lb_reverse_nat: int = 65536
    lb_affinity: int = 65536
    lb_source_ranges: int = 65536
    lb_maglev: int = 65536
    neighbours: int = 4096
    maglev: int = 16381
    sock_rev: int = 65536
    egress_gateway: int = 16384


class MapSizing(msgspec.Struct, frozen=True):
    """Sizes that the status API reports."""

    dynamic_ratio: float
    """Share of the node's memory for maps that grow with traffic."""
    maglev_table: int
    """Entries of each service's Maglev table."""


def map_sizing(settings: MapSettings) -> MapSizing:
    return MapSizing(settings.bpf_map_dynamic_size_ratio, settings.bpf_lb_maglev_table_size)


def sizes(settings: MapSettings, memory: int) -> MapSizes:
    """Return the map sizes on a node with ``memory`` bytes. Options that are set take precedence."""
    budget = int(memory * settings.bpf_map_dynamic_size_ratio)

    def size(option: int | None, default: int, least: int) -> int:
        if option is not None:
            return option
        if not settings.bpf_map_dynamic_size_ratio:
            return default
        return min(max(default * budget // _DEFAULT_BYTES, least), MAX_ENTRIES)

    tcp = size(settings.bpf_ct_global_tcp_max, CT_TCP, 131072)
    other = size(settings.bpf_ct_global_any_max, CT_ANY, 65536)
    nat = size(settings.bpf_nat_global_max, NAT, 131072)
    # A translated flow has two NAT entries, and at most two conntrack entries (one for its ICMP errors).
    nat = nat if nat <= tcp + other else (tcp + other) * 2 // 3
    return MapSizes(
        ct_tcp=tcp,
        ct_any=other,
        nat=nat,
        neighbours=settings.bpf_neigh_global_max or nat,
        policy=min(settings.bpf_policy_map_max, POLICY_MAX_ENTRIES),
        fragments=settings.bpf_fragments_map_max,
        lb_services=settings.bpf_lb_service_map_max or settings.bpf_lb_map_max,
        lb_backends=settings.bpf_lb_service_backend_map_max or settings.bpf_lb_map_max,
        lb_reverse_nat=settings.bpf_lb_rev_nat_map_max or settings.bpf_lb_map_max,
        lb_affinity=settings.bpf_lb_affinity_map_max or settings.bpf_lb_map_max,
        lb_source_ranges=settings.bpf_lb_source_range_map_max or settings.bpf_lb_map_max,
        lb_maglev=settings.bpf_lb_maglev_map_max or settings.bpf_lb_map_max,
        maglev=settings.bpf_lb_maglev_table_size,
        sock_rev=size(settings.bpf_sock_rev_map_max, SOCK_REV, 65536),
        egress_gateway=settings.egress_gateway_policy_map_max,
    )


SKIP_LB_ENTRIES: Final = 100
"""Entries of the cilium_skip_lb maps; only local redirect policies fill them."""
_POLICY_PREFIX: Final = "cilium_policy_"


ALWAYS: Final = frozenset(
    {
        *("lxc", "ipcache", "ct4_tcp", "ct4_any", "ct6_tcp", "ct6_any", "fragments4", "fragments6"),
        *(
            "metrics",
            "events",
            "endpoints",
            "node",
            "links",
            "epoch",
            "policies",
            "nodes",
            "devices",
            "encryption",
            "encrypt_state",
        ),
        *("sock", "nodeport", "tunnel", "runtime_config", "entry", "l3_entry", "xdp_entry"),
    }
)
"""Maps that every node uses (those of a family only if pods have it); other cells request more with use()."""


def family_of(attribute: str) -> int:
    """Return the address family of a Maps attribute, 4 or 6; 0 for both or none."""
    return next((family for family in (4, 6) if str(family) in attribute), 0)


def policy_name(endpoint_id: int) -> str:
    """Return the name and pin of an endpoint's policy map."""
    return f"{_POLICY_PREFIX}{endpoint_id:05d}"


def policy_spec(endpoint_id: int, max_entries: int) -> MapSpec:
    """Return the attributes of an endpoint's policy map, in the layout of Cilium 1.16 and 1.17."""
    return MapSpec(
        policy_name(endpoint_id), MapType.LPM_TRIE, PolicyKey.SIZE, PolicyEntry.SIZE, max_entries, NO_PREALLOC
    )


def map_specs(sizes: MapSizes, *, preallocate: bool, cpus: int) -> dict[str, MapSpec]:
    """Return the attributes of all maps that the programs use, by attribute name in Maps."""
    hashed = 0 if preallocate else NO_PREALLOC
    of_policies = policy_spec(0, sizes.policy)
    of_maglev = MapSpec("cilium_lb_maglev_inner", MapType.ARRAY, 4, 4 * sizes.maglev, 1)
    flow, ports = CtEntry.SIZE, FragmentPorts.SIZE
    ipcache, metrics = (IpcacheKey.SIZE, IpcacheValue.SIZE), (MetricsKey.SIZE, MetricsValue.SIZE)
    endpoint = EndpointConfig.SIZE
    return {
        "lxc": MapSpec(
            "cilium_lxc", MapType.HASH, LxcKey.SIZE, LxcValue.SIZE, 65535, hashed, invalidates=EVERY_FLOW
        ),
        "ipcache": MapSpec(
            "cilium_ipcache", MapType.LPM_TRIE, *ipcache, 512000, NO_PREALLOC, invalidates=EVERY_FLOW
        ),
        "policy_prefixes": MapSpec(
            "hive_policy_prefixes",
            MapType.LPM_TRIE,
            IpcacheKey.SIZE,
            4,
            512000,
            NO_PREALLOC,
            invalidates=EVERY_FLOW,
        ),
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
        # Whatever preallocate is: `cilium-dbg bpf metrics list` unpins a map with other attributes.
        "metrics": MapSpec("cilium_metrics", MapType.PERCPU_HASH, *metrics, 1024, NO_PREALLOC),
        "events": MapSpec("cilium_events", MapType.PERF_EVENT_ARRAY, 4, 4, cpus),
        "endpoints": MapSpec(
            "hive_endpoints",
            MapType.HASH,
            4,
            endpoint,
            ENDPOINT_IDS + 1,
            hashed,
            invalidates=EndpointConfig.id_in,
        ),
        "node": MapSpec("hive_node", MapType.ARRAY, 4, NodeConfig.SIZE, 1, invalidates=EVERY_FLOW),
        "links": MapSpec("hive_links", MapType.PERCPU_ARRAY, 4, 72, 256),
        "passage": MapSpec("hive_passage", MapType.PERCPU_ARRAY, 4, 176, 1),
        "epoch": MapSpec("hive_epoch", MapType.ARRAY, 4, 8, 65536),
        "policies": MapSpec(
            "hive_policies", MapType.ARRAY_OF_MAPS, 4, 4, ENDPOINT_IDS + 1, inner=of_policies
        ),
        "services4": MapSpec(
            "cilium_lb4_services_v2", MapType.HASH, 12, 12, sizes.lb_services, hashed, invalidates=EVERY_FLOW
        ),
        "services6": MapSpec(
            "cilium_lb6_services_v2", MapType.HASH, 24, 12, sizes.lb_services, hashed, invalidates=EVERY_FLOW
        ),
        "backends4": MapSpec("cilium_lb4_backends_v3", MapType.HASH, 4, 12, sizes.lb_backends, hashed),
        "backends6": MapSpec("cilium_lb6_backends_v3", MapType.HASH, 4, 24, sizes.lb_backends, hashed),
        "reverse_nat4": MapSpec("cilium_lb4_reverse_nat", MapType.HASH, 2, 6, sizes.lb_reverse_nat, hashed),
        "reverse_nat6": MapSpec("cilium_lb6_reverse_nat", MapType.HASH, 2, 18, sizes.lb_reverse_nat, hashed),
        "affinity4": MapSpec("cilium_lb4_affinity", MapType.LRU_HASH, 16, 16, sizes.lb_affinity),
        "affinity6": MapSpec("cilium_lb6_affinity", MapType.LRU_HASH, 24, 16, sizes.lb_affinity),
        "affinity_match": MapSpec("cilium_lb_affinity_match", MapType.HASH, 8, 1, sizes.lb_affinity, hashed),
        "reverse_sk4": MapSpec("cilium_lb4_reverse_sk", MapType.LRU_HASH, 16, 8, sizes.sock_rev),
        "reverse_sk6": MapSpec("cilium_lb6_reverse_sk", MapType.LRU_HASH, 32, 20, sizes.sock_rev),
        "skip_lb4": MapSpec(
            "cilium_skip_lb4", MapType.HASH, 16, 1, SKIP_LB_ENTRIES, NO_PREALLOC, invalidates=EVERY_FLOW
        ),
        "skip_lb6": MapSpec(
            "cilium_skip_lb6", MapType.HASH, 32, 1, SKIP_LB_ENTRIES, NO_PREALLOC, invalidates=EVERY_FLOW
        ),
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
        "tunnel": MapSpec("hive_tunnel", MapType.ARRAY, 4, TunnelConfig.SIZE, 1, invalidates=EVERY_FLOW),
        "tunnels": MapSpec(
            "cilium_tunnel_map",
            MapType.HASH,
            TunnelKey.SIZE,
            TunnelValue.SIZE,
            65536,
            hashed,
            invalidates=EVERY_FLOW,
        ),
        "nodes": MapSpec(
            "cilium_node_map_v2", MapType.HASH, NodeKey.SIZE, NodeValue.SIZE, 16384, NO_PREALLOC
        ),
        "snat4": MapSpec("cilium_snat_v4_external", MapType.LRU_HASH, CT4_KEY, NAT4_ENTRY, sizes.nat),
        "snat6": MapSpec("cilium_snat_v6_external", MapType.LRU_HASH, CT6_KEY, NAT6_ENTRY, sizes.nat),
        "ipmasq4": MapSpec("cilium_ipmasq_v4", MapType.LPM_TRIE, 8, 1, 16384, NO_PREALLOC),
        "ipmasq6": MapSpec("cilium_ipmasq_v6", MapType.LPM_TRIE, 20, 1, 16384, NO_PREALLOC),
        "devices": MapSpec("hive_devices", MapType.HASH, 4, DeviceConfig.SIZE, 256, NO_PREALLOC),
        "encrypt_state": MapSpec("cilium_encrypt_state", MapType.ARRAY, 4, 1, 1),
        "pod_networks": MapSpec(
            "hive_pod_networks", MapType.LPM_TRIE, IpcacheKey.SIZE, 1, 65536, NO_PREALLOC
        ),
        "encryption": MapSpec("hive_encryption", MapType.ARRAY, 4, EncryptionConfig.SIZE, 1),
        "encryption_paths": MapSpec(
            "hive_encryption_paths", MapType.LPM_TRIE, IpcacheKey.SIZE, 4, 65536, NO_PREALLOC
        ),
        "l2_responder4": MapSpec(
            *("cilium_l2_responder_v4", MapType.HASH, L2ResponderKey.SIZE, L2_RESPONDER_VALUE.size),
            *(4096, NO_PREALLOC),
        ),
        "egress_gateway4": MapSpec(
            *("cilium_egress_gw_policy_v4", MapType.LPM_TRIE, EgressKey.SIZE, EgressValue.SIZE),
            *(sizes.egress_gateway, NO_PREALLOC),
            invalidates=EVERY_FLOW,
        ),
        "runtime_config": MapSpec("cilium_runtime_config", MapType.ARRAY, 4, 8, 256),
        "entry": MapSpec("hive_entry", MapType.PROG_ARRAY, 4, 4, 8),
        "l3_entry": MapSpec("hive_l3_entry", MapType.PROG_ARRAY, 4, 4, 2),
        "xdp_entry": MapSpec("hive_xdp_entry", MapType.PROG_ARRAY, 4, 4, 1),
    }
