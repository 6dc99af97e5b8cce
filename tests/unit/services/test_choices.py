"""What a service chooses by annotation, and services whose ports are for any protocol."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

import msgspec
import pytest

from cells.kubernetes import Service
from cells.services.model import Frontend, LoadBalancerOptions, Node, ServiceType, frontends_of

NODE = Node("here", node_port_addresses=(IPv4Address("192.0.2.7"),))
MODE = "service.cilium.io/forwarding-mode"


def frontends(annotations: dict[str, str] | None = None, **options: Any) -> list[Frontend]:
    """Of a service that has a port in TCP and in UDP."""
    ports = [
        {"name": name, "port": 53, "nodePort": 30053, "protocol": protocol}
        for name, protocol in (("stream", "TCP"), ("datagram", "UDP"))
    ]
    service = msgspec.convert(
        {
            "metadata": {"name": "dns", "namespace": "shop", "annotations": annotations or {}},
            "spec": {
                "type": "NodePort",
                "clusterIP": "10.96.0.1",
                "clusterIPs": ["10.96.0.1"],
                "ports": ports,
            },
        },
        Service,
    )
    return frontends_of(service, {}, NODE, LoadBalancerOptions(**options))


def direct(annotation: str, **options: Any) -> dict[int, bool]:
    """Whether node ports are answered directly, by protocol."""
    found = frontends({MODE: annotation} if annotation else None, **options)
    return {one.key.address.protocol: one.direct for one in found if one.type is ServiceType.NODE_PORT}


@pytest.mark.parametrize(
    ("annotation", "options", "wanted"),
    [
        ("dsr", {}, {6: False, 17: False}),
        ("dsr", {"bpf_lb_mode_annotation": True}, {6: True, 17: True}),
        ("", {"bpf_lb_mode_annotation": True}, {6: False, 17: False}),
        ("", {"bpf_lb_mode_annotation": True, "bpf_lb_mode": "hybrid"}, {6: True, 17: False}),
        ("snat", {"bpf_lb_mode_annotation": True, "bpf_lb_mode": "dsr"}, {6: False, 17: False}),
        ("fast", {"bpf_lb_mode_annotation": True, "bpf_lb_mode": "dsr"}, {6: True, 17: True}),
    ],
)
def test_a_service_chooses_how_its_backends_are_reached(
    annotation: str, options: dict[str, Any], wanted: dict[int, bool]
) -> None:
    assert direct(annotation, **options) == wanted


def test_cluster_addresses_are_never_answered_directly() -> None:
    found = frontends({MODE: "dsr"}, bpf_lb_mode_annotation=True)
    assert {one.direct for one in found if one.type is ServiceType.CLUSTER_IP} == {False}


def test_without_telling_protocols_apart_a_port_is_one_frontend() -> None:
    assert {one.key.address.protocol for one in frontends()} == {6, 17}
    assert [one.key.address.protocol for one in frontends(bpf_lb_proto_diff=False)] == [0, 0, 0]
