"""The table of docs/operate/without-kube-proxy.md: the backends that traffic policies select."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cells.kubernetes.objects.core import EndpointSlice, Service
from cells.services import (
    EXTERNAL,
    INTERNAL,
    Backend,
    Frontend,
    IPAddress,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceType,
    ServingNode,
    parse_address,
)
from cells.services.model.backends import backends_of, selectable
from cells.services.model.frontends import frontends_of
from tests.unit.services.documented import table

HERE, THERE = "10.0.0.1", "10.0.1.1"
NODE_IP, BALANCER = "192.0.2.7", "192.0.2.80"


def address(text: str) -> IPAddress:
    found = parse_address(text)
    assert found is not None
    return found


def served(external: str, internal: str, **options: Any) -> list[Frontend]:
    service = msgspec.convert(
        {
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {
                "type": "LoadBalancer",
                "clusterIP": "10.96.0.1",
                "clusterIPs": ["10.96.0.1"],
                "externalTrafficPolicy": external,
                "internalTrafficPolicy": internal,
                "ports": [{"name": "http", "port": 80, "nodePort": 30080, "protocol": "TCP"}],
            },
            "status": {"loadBalancer": {"ingress": [{"ip": BALANCER}]}},
        },
        Service,
    )
    backends = tuple(
        Backend(ServiceAddress(address(ip), 8080, 6), node=name)
        for ip, name in ((HERE, "here"), (THERE, "there"))
    )
    node = ServingNode("here", node_port_addresses=(address(NODE_IP),))
    return frontends_of(service, {"http": backends}, node, LoadBalancerOptions(**options))


def selected(frontends: list[Frontend], *types: ServiceType, inside: bool) -> set[str]:
    """In a word, at frontends of these types, as the datapath looks them up."""
    found = set()
    for one in frontends:
        scope = INTERNAL if inside and one.two_scopes else EXTERNAL
        if one.type in types and one.key.scope == scope:
            ips = {str(each.address.ip) for each in one.backends}
            found.add({frozenset({HERE, THERE}): "any", frozenset({HERE}): "local"}[frozenset(ips)])
    return found


@pytest.mark.parametrize("row", table(), ids=lambda row: "-".join(row[:2]))
def test_a_traffic_policy_combination_selects_its_backends(row: list[str]) -> None:
    external, internal, outside, inside, cluster = row
    frontends = served(external, internal)
    north = ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER
    assert selected(frontends, *north, inside=False) == {outside}
    assert selected(frontends, *north, inside=True) == {inside}
    assert selected(frontends, ServiceType.CLUSTER_IP, inside=True) == {cluster}


def test_every_traffic_policy_combination_is_tested() -> None:
    assert len({tuple(row[:2]) for row in table()}) == 4


@pytest.mark.parametrize("external", ["Cluster", "Local"])
def test_with_the_setting_off_an_internal_policy_of_local_counts_for_nothing(external: str) -> None:
    assert served(external, "Local", enable_internal_traffic_policy=False) == served(external, "Cluster")


def test_a_terminating_endpoint_without_hints_leaves_traffic_in_its_zone() -> None:
    options = LoadBalancerOptions(enable_service_topology=True)
    endpoints = [
        {"addresses": ["10.0.0.1"], "hints": {"forZones": [{"name": "a"}]}},
        {"addresses": ["10.0.0.2"], "hints": {"forZones": [{"name": "b"}]}},
        {"addresses": ["10.0.0.3"], "conditions": {"ready": False, "serving": True, "terminating": True}},
    ]
    named = {"metadata": {"name": "web"}}
    slice_ = named | {"addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 8080}]}
    backends = backends_of([msgspec.convert(slice_, EndpointSlice)], options)
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    service = msgspec.convert(named | {"spec": spec}, Service)
    (frontend,) = frontends_of(service, backends, ServingNode("here", zone="a"), options)
    chosen, others = selectable(frontend.backends)
    assert [str(one.address.ip) for one in chosen] == ["10.0.0.1"]
    assert [str(one.address.ip) for one in others] == ["10.0.0.3"]
