"""All services at once, as at a start: the maps equal a plain model, in any mix of modes."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cells.kubernetes.objects.core import EndpointSlice, Service
from cells.services import (
    DEFAULT_SEED,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    Seed,
    ServiceAddress,
    ServiceName,
    ServiceType,
    ServingNode,
)
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import served_frontends
from cells.services.control.target import ServicesTarget
from cells.services.maglev import MaglevTables
from cells.services.map_entries import ALGORITHMS, service_flags
from cells.services.model.backends import backends_of
from lifecycle.admin.plain import plain
from tests.support.catalog import LoneCatalog
from tests.unit.fuzz.inputs import bounded
from tests.unit.services.agent import FakeServiceMaps
from tests.unit.services.replay import finished

NODE = ServingNode("node-1", "zone-a", node_port_addresses=(ip_address("192.0.2.7"), ip_address("fd00:7::7")))
TABLE_SIZE = 251
EMPTY = msgspec.convert({"metadata": {"namespace": "shop", "name": "none"}}, EndpointSlice)

options = st.builds(
    LoadBalancerOptions,
    bpf_lb_algorithm=st.sampled_from(["random", "maglev"]),
    bpf_lb_algorithm_annotation=st.booleans(),
    bpf_lb_mode=st.sampled_from(["snat", "dsr", "hybrid"]),
    bpf_lb_mode_annotation=st.booleans(),
    bpf_lb_external_clusterip=st.booleans(),
    bpf_lb_source_range_all_types=st.booleans(),
    enable_session_affinity=st.booleans(),
    enable_service_topology=st.booleans(),
    enable_node_port=st.booleans(),
    enable_ipv6=st.booleans(),
    bpf_lb_proto_diff=st.booleans(),
)
policies = st.sampled_from(["Cluster", "Cluster", "Local"])
services = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["ClusterIP", "ClusterIP", "NodePort", "LoadBalancer"]),
        "families": st.sampled_from([(4,), (4,), (6,), (4, 6)]),
        "affinity": st.booleans(),
        "ranges": st.sampled_from([(), ("10.0.0.0/8",), ("198.51.100.0/24", "2001:db8::/32")]),
        "notes": st.dictionaries(
            st.sampled_from(["lb-algorithm", "forwarding-mode", "src-ranges-policy"]),
            st.sampled_from(["maglev", "random", "dsr", "snat", "deny"]),
        ),
        "policies": st.tuples(policies, policies),
        "ports": st.sampled_from([("http",), ("http",), ("http", "metrics")]),
        "shared": st.booleans(),
        "external": st.booleans(),
    }
)
endpoints = st.fixed_dictionaries(
    {
        "host": st.integers(1, 250),
        "ready": st.sampled_from([None, True, True, True, False]),
        "terminating": st.booleans(),
        "node": st.sampled_from([None, "node-1", "node-2"]),
        "zones": st.sampled_from([None, None, ("zone-a",), ("zone-b",), ("zone-a", "zone-b")]),
    }
)
all_of = st.lists(st.tuples(services, st.lists(endpoints, max_size=12)), min_size=2, max_size=12)


def service_of(number: int, given_: Mapping[str, Any]) -> Service:
    ips = [f"10.96.0.{number}" if family == 4 else f"fd00:96::{number:x}" for family in given_["families"]]
    outside, inside = given_["policies"]
    types = [{"name": name, "port": 80 + at, "protocol": "TCP"} for at, name in enumerate(given_["ports"])]
    if given_["type"] != "ClusterIP":
        types = [each | {"nodePort": 30000 + 10 * number + at} for at, each in enumerate(types)]
    balancers = [{"ip": f"203.0.113.{number}"}] if given_["type"] == "LoadBalancer" else []
    spec = {
        "type": given_["type"],
        "clusterIP": ips[0],
        "clusterIPs": ips,
        "ports": types,
        "sessionAffinity": "ClientIP" if given_["affinity"] else "None",
        "loadBalancerSourceRanges": given_["ranges"],
        "externalIPs": [f"198.51.100.{number}"] if given_["external"] else [],
        "externalTrafficPolicy": outside,
        "internalTrafficPolicy": inside,
    }
    notes = {f"service.cilium.io/{name}": text for name, text in given_["notes"].items()}
    metadata = {"namespace": "shop", "name": f"s{number}", "annotations": notes}
    status = {"loadBalancer": {"ingress": balancers}}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, Service)


def slices_of(
    number: int, given_: Mapping[str, Any], some: Sequence[Mapping[str, Any]]
) -> list[EndpointSlice]:
    """One for each family; services that share have some backends of the first one."""
    net = 0 if given_["shared"] else number
    return [
        msgspec.convert(
            {
                "metadata": {
                    "namespace": "shop",
                    "name": f"s{number}-{family}",
                    "labels": {"kubernetes.io/service-name": f"s{number}"},
                },
                "addressType": f"IPv{family}",
                "endpoints": [
                    {
                        "addresses": [
                            f"10.1.{net}.{one['host']}" if family == 4 else f"fd01::{net}:{one['host']:x}"
                        ],
                        "conditions": {
                            "ready": one["ready"],
                            "serving": True,
                            "terminating": one["terminating"],
                        },
                        "nodeName": one["node"],
                        "hints": one["zones"] and {"forZones": [{"name": zone} for zone in one["zones"]]},
                    }
                    for one in some
                ],
                "ports": [{"name": name, "port": 8080, "protocol": "TCP"} for name in given_["ports"][:1]]
                + [{"name": name, "port": 9090, "protocol": "TCP"} for name in given_["ports"][1:]],
            },
            EndpointSlice,
        )
        for family in given_["families"]
    ]


class Held(NamedTuple):
    """What maps have of a frontend, with addresses in place of numbers."""

    chosen: int
    """How many slots are chosen from."""
    used: frozenset[bytes]
    """The backends of these, and as many as there are preferred or active ones."""
    others: frozenset[bytes]
    master: bytes
    """The rest of slot 0: flags, and what a client stays for."""
    translation: bytes
    stays_with: frozenset[bytes]
    clients: frozenset[bytes]
    table: frozenset[bytes]


def model(frontend: Frontend, given_: LoadBalancerOptions) -> Held:
    """What the datapath needs of a frontend, from its definition alone."""

    def states(*wanted: BackendState) -> list[Backend]:
        return [one for one in frontend.backends if one.state in wanted]

    active = states(BackendState.ACTIVE) or states(BackendState.TERMINATING)
    used = frozenset(one.address[1:] for one in active)
    every = frozenset(one.address[1:] for one in frontend.backends)
    affinity = frontend.affinity_timeout
    outside = frontend.type is not ServiceType.CLUSTER_IP or given_.bpf_lb_external_clusterip
    wildcard = frontend.type is ServiceType.NODE_PORT and frontend.key.address.is_wildcard
    maglev = (frontend.algorithm or given_.bpf_lb_algorithm) == "maglev" and outside and not wildcard
    flags = service_flags(frontend, affinity=bool(affinity))
    nets = [ip_network(text) for text in frontend.source_ranges]
    return Held(
        chosen=len(used),
        used=used,
        others=every - used,
        master=struct.pack("<IH", affinity | ALGORITHMS[frontend.algorithm] << 24, flags),
        translation=frontend.key.address[1:-1],
        stays_with=every if affinity and given_.enable_session_affinity else frozenset(),
        clients=frozenset(
            bytes([net.prefixlen]) + net.network_address.packed
            for net in nets
            if net.version == frontend.key.address.version
        ),
        table=used if maglev and given_.maglev else frozenset(),
    )


def held(maps: FakeServiceMaps, key: FrontendKey) -> Held:
    """The same, read from the maps. Raises KeyError for what leads nowhere."""
    by_map: dict[str, dict[bytes, bytes]] = {}
    for where, value in maps.entries.items():
        by_map.setdefault(where.map, {})[where.key] = value
    family = key.address[0]
    length = 4 if family == 4 else 16
    backends = {
        number: value[: length + 3]
        for number, value in by_map.get(f"cilium_lb{family}_backends_v3", {}).items()
    }
    head, end = key.address[1:-1], bytes([key.address[-1], key.scope, 0, 0])
    slots = by_map[f"cilium_lb{family}_services_v2"]
    master = slots[head + b"\0\0" + end]
    union, count, number, flags, quarantined = struct.unpack("<IH2sHH", master)
    own = [slots[head + struct.pack("<H", slot) + end] for slot in range(1, count + quarantined + 1)]
    assert head + struct.pack("<H", count + quarantined + 1) + end not in slots
    assert all(value[4:8] == b"\0\0" + number for value in own)
    assert [value[8:10] != b"\0\0" for value in own] == [False] * count + [True] * quarantined
    of_table = by_map.get(f"cilium_lb{family}_maglev", {}).get(number, b"")
    return Held(
        chosen=count,
        used=frozenset(backends[value[:4]] for value in own[:count]),
        others=frozenset(backends[value[:4]] for value in own[count:]),
        master=struct.pack("<IH", union, flags),
        translation=by_map[f"cilium_lb{family}_reverse_nat"][number],
        stays_with=frozenset(
            backends[key[:4]] for key in by_map.get("cilium_lb_affinity_match", {}) if key[4:6] == number
        ),
        clients=frozenset(
            bytes([key[0] - 32]) + key[8:]
            for key in by_map.get(f"cilium_lb{family}_source_range", {})
            if key[4:6] == number
        ),
        table=frozenset(backends[struct.pack("<I", one)] for (one,) in struct.iter_unpack("<I", of_table)),
    )


@bounded(200)
@given(options, all_of)
def test_all_services_at_once_are_in_the_maps_as_a_plain_model_has_each(
    given_: LoadBalancerOptions, every: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]
) -> None:
    catalog = LoneCatalog(given_, NODE)
    with catalog.changes:
        for number, (service, some) in enumerate(every, 1):
            for slice_ in slices_of(number, service, some):
                catalog.upsert_slice(slice_)
            catalog.upsert_service(service_of(number, service))
    maps, served = FakeServiceMaps(), served_frontends()
    balancer = LoadBalancer(given_, served, MaglevTables(TABLE_SIZE, Seed.parse(DEFAULT_SEED)))
    target = ServicesTarget(catalog.frontends, balancer, maps, served)
    finished(target.observe())
    frontends = catalog.frontends.all()
    assert {one.key: held(maps, one.key) for one in frontends} == {
        one.key: model(one, given_) for one in frontends
    }
    needed = {one.address for frontend in frontends for one in frontend.backends}
    assert Counter(value[:-5] for value in maps.backends) == Counter(one[1:] for one in needed)
    finished(target.drop([one.key for one in frontends]))
    assert maps.entries == {}


@bounded(300)
@given(options, services, st.lists(endpoints, max_size=12))
def test_the_backends_of_one_slice_are_those_of_slices_one_by_one(
    given_: LoadBalancerOptions, service: Mapping[str, Any], some: list[Mapping[str, Any]]
) -> None:
    """A service's only slice is read as columns; beside an empty one, endpoint by endpoint."""
    whole = slices_of(1, service, some)[0]
    columns, rows = backends_of([whole], given_), backends_of([whole, EMPTY], given_)
    assert {name: tuple(some) for name, some in columns.items()} == rows
    assert columns == rows
    for name, backends in columns.items():
        assert list(backends) == [backends[at] for at in range(len(backends))]
        assert hash(backends) == hash(rows[name])
        assert plain(frontend_of(backends)) == plain(frontend_of(rows[name]))
        assert msgspec.structs.replace(frontend_of(backends), backends=rows[name]) == frontend_of(backends)


def frontend_of(backends: Sequence[Backend]) -> Frontend:
    key = FrontendKey(ServiceAddress(ip_address("10.96.0.1"), 80, 6))
    return Frontend(key, ServiceType.CLUSTER_IP, ServiceName("shop", "s1"), backends)
