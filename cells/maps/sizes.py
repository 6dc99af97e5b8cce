"""How many entries the maps hold: by their options, or by a share of the node's memory.

For:    Maps and PolicyMaps. Needs: the options, the size of memory. Gives: MapSettings, MapSizes.
Names, defaults, limits and the rule of shares are Cilium's.
"""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from lifecycle import Formerly, Settings, refuse

LOWEST: Final = 1 << 10
HIGHEST: Final = 1 << 24
POLICY_LOWEST: Final = 1 << 8
POLICY_HIGHEST: Final = 1 << 16
ENDPOINT_IDS: Final = 4095
"""Endpoint ids are 1 to 4095: the indexes of hive_policies."""

MAGLEV_SIZES: Final = (251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 131071)
"""Of lookup tables: primes."""

LB_KINDS: Final = (
    *("bpf_lb_service_map_max", "bpf_lb_service_backend_map_max", "bpf_lb_rev_nat_map_max"),
    *("bpf_lb_affinity_map_max", "bpf_lb_source_range_map_max", "bpf_lb_maglev_map_max"),
)
"""Settings of one kind of the maps of services each."""

CT_TCP: Final = 524288
CT_ANY: Final = 262144
NAT: Final = 524288
SOCK_REV: Final = 262144

# Bytes of one entry, key and value, in the IPv6 variants: the shares count them whether IPv6 is on or not,
# and count neighbours though that map does not exist.
_CT_ENTRY = 38 + 56
_NAT_ENTRY = 38 + 56
_NEIGHBOUR_ENTRY = 16 + 8
_SOCK_REV_ENTRY = 32 + 20
_DEFAULT_BYTES = (
    (CT_TCP + CT_ANY) * _CT_ENTRY + NAT * (_NAT_ENTRY + _NEIGHBOUR_ENTRY) + SOCK_REV * _SOCK_REV_ENTRY
)


class MapSettings(Settings, frozen=True):
    """Settings of the maps cell."""

    bpf_map_dynamic_size_ratio: float = 0.0025
    """Share of the node's memory (at most 1) for maps that grow with traffic; 0: their default sizes."""

    bpf_ct_global_tcp_max: Annotated[int | None, Formerly("ct-global-max-entries-tcp")] = None
    """Entries of the TCP conntrack map (1024 to 16777216); unset: by bpf-map-dynamic-size-ratio."""

    bpf_ct_global_any_max: Annotated[int | None, Formerly("ct-global-max-entries-other")] = None
    """Entries of the conntrack map of other protocols (1024 to 16777216); unset: by the ratio."""

    bpf_nat_global_max: int | None = None
    """Entries of the NAT map, two per flow (from 1024 to the size of the conntrack maps); unset: by ratio."""

    bpf_policy_map_max: int = 16384
    """Entries of each endpoint's policy map (at least 256; more than 65536 is 65536)."""

    bpf_lb_map_max: int = 65536
    """Entries of each map of services: frontends and their backends, reverse NAT, affinity, ranges."""

    bpf_lb_service_map_max: int = 0
    """Entries of the maps of frontends and their slots; 0: bpf-lb-map-max, as with the following."""

    bpf_lb_service_backend_map_max: int = 0
    """Entries of the maps of backends."""

    bpf_lb_rev_nat_map_max: int = 0
    """Entries of the maps of the addresses that answers come from."""

    bpf_lb_affinity_map_max: int = 0
    """Entries of the maps of clients that stay with a backend, and of the backends they may stay with."""

    bpf_lb_source_range_map_max: int = 0
    """Entries of the maps of source ranges."""

    bpf_lb_maglev_map_max: int = 0
    """Services with lookup tables, of each family."""

    bpf_neigh_global_max: int | None = None
    """Entries of the maps of neighbours that services' clients are behind (1024 to 16777216); unset: as many
    as of NAT."""

    bpf_sock_rev_map_max: int | None = None
    """Entries of the map of sockets that talk to services (1024 to 16777216); unset: by the ratio."""

    bpf_lb_maglev_table_size: int = 16381
    """Size of each Maglev table, one of Cilium's primes; take over 100 per backend."""

    bpf_fragments_map_max: int = 8192
    """Entries of each family's map of fragmented datagrams (256 to 65536)."""

    preallocate_bpf_maps: bool = False
    """Preallocate the memory of hash maps."""

    policy_map_pool: int = 64
    """Policy maps created ahead for new pods (1 to 4095), as creating one takes 15 ms."""

    def validate(self) -> None:
        """Refuse sizes outside the limits."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        ratio = self.bpf_map_dynamic_size_ratio
        if not 0 <= ratio <= 1:
            yield f"bpf-map-dynamic-size-ratio={ratio:g}: expected a share of memory, 0 to 1"
        flows = {
            "bpf-ct-global-tcp-max": self.bpf_ct_global_tcp_max,
            "bpf-ct-global-any-max": self.bpf_ct_global_any_max,
            "bpf-sock-rev-map-max": self.bpf_sock_rev_map_max,
            "bpf-neigh-global-max": self.bpf_neigh_global_max,
        }
        for name, value in flows.items():
            if value is not None and not LOWEST <= value <= HIGHEST:
                yield f"{name}={value}: expected {LOWEST} to {HIGHEST} entries"
        yield from self._wrong_nat()
        if self.bpf_policy_map_max < POLICY_LOWEST:
            yield f"bpf-policy-map-max={self.bpf_policy_map_max}: expected at least {POLICY_LOWEST}"
        if not 1 << 8 <= self.bpf_fragments_map_max <= 1 << 16:
            yield f"bpf-fragments-map-max={self.bpf_fragments_map_max}: expected 256 to 65536 entries"
        yield from self._wrong_services()
        if self.bpf_lb_maglev_table_size not in MAGLEV_SIZES:
            sizes_text = ", ".join(map(str, MAGLEV_SIZES))
            yield f"bpf-lb-maglev-table-size={self.bpf_lb_maglev_table_size}: expected one of {sizes_text}"
        if not 1 <= self.policy_map_pool <= ENDPOINT_IDS:
            yield f"policy-map-pool={self.policy_map_pool}: expected 1 to {ENDPOINT_IDS}"

    def _wrong_services(self) -> Iterator[str]:
        if not 1 <= self.bpf_lb_map_max <= HIGHEST:
            yield f"bpf-lb-map-max={self.bpf_lb_map_max}: expected 1 to {HIGHEST} entries"
        for field in LB_KINDS:
            if not 0 <= (value := getattr(self, field)) <= HIGHEST:
                yield f"{field.replace('_', '-')}={value}: expected 0, or 1 to {HIGHEST} entries"

    def _wrong_nat(self) -> Iterator[str]:
        nat, tcp, other = (
            self.bpf_nat_global_max,
            self.bpf_ct_global_tcp_max,
            self.bpf_ct_global_any_max,
        )
        if nat is None:
            return
        if not LOWEST <= nat <= HIGHEST:
            yield f"bpf-nat-global-max={nat}: expected {LOWEST} to {HIGHEST} entries"
        elif tcp is not None and other is not None and nat > tcp + other:
            yield (
                f"bpf-nat-global-max={nat}: expected at most {tcp + other}, the sum of"
                " bpf-ct-global-tcp-max and bpf-ct-global-any-max"
            )


class MapSizes(msgspec.Struct, frozen=True):
    """The entries each map gets."""

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


def sizes(settings: MapSettings, memory: int) -> MapSizes:
    """The sizes on a node with ``memory`` bytes. An option that is set counts as it is."""
    budget = int(memory * settings.bpf_map_dynamic_size_ratio)

    def size(option: int | None, default: int, least: int) -> int:
        if option is not None:
            return option
        if not settings.bpf_map_dynamic_size_ratio:
            return default
        return min(max(default * budget // _DEFAULT_BYTES, least), HIGHEST)

    tcp = size(settings.bpf_ct_global_tcp_max, CT_TCP, 131072)
    other = size(settings.bpf_ct_global_any_max, CT_ANY, 65536)
    nat = size(settings.bpf_nat_global_max, NAT, 131072)
    # A translated flow has two entries here, and at most one and one of its errors there.
    nat = nat if nat <= tcp + other else (tcp + other) * 2 // 3
    return MapSizes(
        ct_tcp=tcp,
        ct_any=other,
        nat=nat,
        neighbours=settings.bpf_neigh_global_max or nat,
        policy=min(settings.bpf_policy_map_max, POLICY_HIGHEST),
        fragments=settings.bpf_fragments_map_max,
        lb_services=settings.bpf_lb_service_map_max or settings.bpf_lb_map_max,
        lb_backends=settings.bpf_lb_service_backend_map_max or settings.bpf_lb_map_max,
        lb_reverse_nat=settings.bpf_lb_rev_nat_map_max or settings.bpf_lb_map_max,
        lb_affinity=settings.bpf_lb_affinity_map_max or settings.bpf_lb_map_max,
        lb_source_ranges=settings.bpf_lb_source_range_map_max or settings.bpf_lb_map_max,
        lb_maglev=settings.bpf_lb_maglev_map_max or settings.bpf_lb_map_max,
        maglev=settings.bpf_lb_maglev_table_size,
        sock_rev=size(settings.bpf_sock_rev_map_max, SOCK_REV, 65536),
    )
