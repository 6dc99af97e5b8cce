"""How large the maps are."""

import pytest

from cells.maps.map import NO_PREALLOC, MapType
from cells.maps.specs import MapSettings, map_specs, policy_spec, sizes
from tests.support.settings import refused

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "tcp", "other"),
    [
        (512 << 20, 131072, 65536),
        (8 * GIB, 131072, 65536),
        (30 * GIB, 282563, 141281),
        (1 << 60, 1 << 24, 1 << 24),
    ],
)
def test_conntrack_grows_with_memory_between_its_limits(memory: int, tcp: int, other: int) -> None:
    got = sizes(MapSettings(), memory)
    assert (got.ct_tcp, got.ct_any) == (tcp, other)


def test_a_budget_is_shared_as_on_a_node_of_the_field() -> None:
    got = sizes(MapSettings(bpf_map_dynamic_size_ratio=1), 41561487)  # bytes, as its agent logged
    assert (got.ct_tcp, got.ct_any) == (145829, 72914)


def test_an_option_that_is_set_counts_for_that_map_only() -> None:
    got = sizes(MapSettings(bpf_ct_global_tcp_max=2000), 30 * GIB)
    assert (got.ct_tcp, got.ct_any) == (2000, 141281)


def test_without_a_ratio_the_defaults_hold() -> None:
    got = sizes(MapSettings(bpf_map_dynamic_size_ratio=0), 30 * GIB)
    assert (got.ct_tcp, got.ct_any, got.policy) == (524288, 262144, 16384)


def test_fragments_are_remembered_for_each_family() -> None:
    specs = map_specs(sizes(MapSettings(bpf_fragments_map_max=256), GIB), preallocate=False, cpus=2)
    assert [specs[name].max_entries for name in ("fragments4", "fragments6")] == [256, 256]


@pytest.mark.parametrize(
    ("option", "maps"),
    [
        ("bpf_lb_service_map_max", {"services4", "services6"}),
        ("bpf_lb_service_backend_map_max", {"backends4", "backends6"}),
        ("bpf_lb_rev_nat_map_max", {"reverse_nat4", "reverse_nat6"}),
        ("bpf_lb_affinity_map_max", {"affinity4", "affinity6", "affinity_match"}),
        ("bpf_lb_source_range_map_max", {"source_range4", "source_range6"}),
        ("bpf_lb_maglev_map_max", {"maglev4", "maglev6"}),
        ("bpf_neigh_global_max", {"nodeport_neighbours4", "nodeport_neighbours6"}),
    ],
)
def test_a_kind_of_maps_has_a_size_of_its_own_where_one_is_set(option: str, maps: set[str]) -> None:
    usual = map_specs(sizes(MapSettings(bpf_lb_map_max=3000), GIB), preallocate=False, cpus=2)
    given = MapSettings(bpf_lb_map_max=3000, **{option: 2000})  # type: ignore[arg-type]  # all of them are int
    specs = map_specs(sizes(given, GIB), preallocate=False, cpus=2)
    assert {name for name, spec in specs.items() if spec != usual[name]} == maps
    assert {specs[name].max_entries for name in maps} == {2000}


def test_cilium_s_default_of_the_nat_map_is_lowered_to_what_fits_the_conntrack_maps() -> None:
    given = MapSettings(bpf_nat_global_max=524288, bpf_ct_global_tcp_max=3000, bpf_ct_global_any_max=3000)
    assert not list(given.faults())
    assert sizes(given, GIB).nat == 4000


def test_policy_maps_are_capped() -> None:
    assert sizes(MapSettings(bpf_policy_map_max=100_000), GIB).policy == 65536


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("bpf_map_dynamic_size_ratio", 1.5, "at least 0, at most 1"),
        ("bpf_map_dynamic_size_ratio", -0.1, "at least 0, at most 1"),
        ("bpf_ct_global_tcp_max", 1023, "at least 1024, at most 16777216"),
        ("bpf_ct_global_any_max", 1 << 25, "at least 1024, at most 16777216"),
        ("bpf_nat_global_max", 1023, "at least 1024, at most 16777216"),
        ("bpf_policy_map_max", 255, "at least 256"),
        ("bpf_fragments_map_max", 255, "at least 256, at most 65536"),
        ("bpf_fragments_map_max", 65537, "at least 256, at most 65536"),
        ("bpf_lb_map_max", 0, "at least 1, at most 16777216"),
        ("bpf_lb_maglev_map_max", -1, "at least 0, at most 16777216"),
        ("egress_gateway_policy_map_max", 1, "at least 2, at most 16777216"),
        ("policy_map_pool", 0, "at least 1, at most 4095"),
    ],
)
def test_sizes_outside_the_limits_are_refused_by_name(field: str, value: float, expected: str) -> None:
    text = refused(MapSettings, **{field: value})
    assert text == f"{field.replace('_', '-')}={value}: expected {expected}"


@pytest.mark.parametrize(("preallocate", "flags"), [(False, NO_PREALLOC), (True, 0)])
def test_metrics_are_what_their_destructive_reader_expects(preallocate: bool, flags: int) -> None:
    specs = map_specs(sizes(MapSettings(), GIB), preallocate=preallocate, cpus=2)
    metrics = specs["metrics"]
    assert (metrics.name, metrics.type) == ("cilium_metrics", MapType.PERCPU_HASH)
    assert (metrics.key_size, metrics.value_size, metrics.max_entries, metrics.flags) == (8, 16, 1024, 1)
    assert specs["lxc"].flags == flags
    assert specs["ipcache"].flags == policy_spec(1, 256).flags == NO_PREALLOC


def test_policy_maps_are_named_with_five_digits() -> None:
    assert policy_spec(7, 256).name == "cilium_policy_00007"
