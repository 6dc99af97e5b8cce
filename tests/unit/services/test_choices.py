"""Service options by annotation, and services with ports for any protocol."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.datapath.settings import DatapathSettings, service_programs
from cells.kubernetes.objects.core import HEADLESS, EndpointSlice, Service
from cells.services import (
    EXPOSURE_LABEL,
    Backend,
    Frontend,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceType,
    ServingNode,
)
from cells.services.model.claims import unsupported_parts
from cells.services.model.frontends import NODE_SELECTOR, faults_of, frontends_of, may_differ
from cells.services.node_ports import ForwardingSettings, NodePortMode
from cells.tunnel.settings import PodTunnel
from tests.support.catalog import LoneCatalog
from tests.unit.fuzz.inputs import bounded

NODE = ServingNode("here", node_port_addresses=(IPv4Address("192.0.2.7"),))
MODE = "service.cilium.io/forwarding-mode"


def frontends(
    annotations: dict[str, str] | None = None,
    protocols: tuple[str, ...] = ("TCP", "UDP", "SCTP"),
    **options: Any,
) -> list[Frontend]:
    """Of a service that has a port in each protocol."""
    ports = [
        {"name": protocol.lower(), "port": 53, "nodePort": 30053, "protocol": protocol}
        for protocol in protocols
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
        ("dsr", {}, {6: False, 17: False, 132: False}),
        ("dsr", {"bpf_lb_mode_annotation": True}, {6: True, 17: True, 132: True}),
        ("", {"bpf_lb_mode_annotation": True}, {6: False, 17: False, 132: False}),
        ("", {"bpf_lb_mode_annotation": True, "bpf_lb_mode": "hybrid"}, {6: True, 17: False, 132: False}),
        ("snat", {"bpf_lb_mode_annotation": True, "bpf_lb_mode": "dsr"}, {6: False, 17: False, 132: False}),
        ("DSR", {"bpf_lb_mode_annotation": True}, {6: True, 17: True, 132: True}),
        ("fast", {"bpf_lb_mode_annotation": True, "bpf_lb_mode": "dsr"}, {6: True, 17: True, 132: True}),
    ],
)
def test_a_service_chooses_how_its_backends_are_reached(
    annotation: str, options: dict[str, Any], wanted: dict[int, bool]
) -> None:
    assert direct(annotation, **options) == wanted


@pytest.mark.parametrize(
    ("protocols", "annotation", "wanted"),
    [
        (("TCP",), "", True),
        (("UDP",), "", False),
        (("TCP", "UDP"), "", False),
        (("UDP",), "dsr", True),
    ],
)
def test_frontends_of_any_protocol_are_answered_directly_where_all_their_protocols_are(
    protocols: tuple[str, ...], annotation: str, wanted: bool
) -> None:
    hybrid = {"bpf_lb_mode_annotation": True, "bpf_lb_mode": "hybrid", "bpf_lb_proto_diff": False}
    found = frontends({MODE: annotation} if annotation else None, protocols, **hybrid)
    assert {one.direct for one in found if one.type is ServiceType.NODE_PORT} == {wanted}


TYPES = "service.cilium.io/type"


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("NodePort", {ServiceType.NODE_PORT}),
        ("NodePort, ClusterIP", {ServiceType.NODE_PORT, ServiceType.CLUSTER_IP}),
        ("LoadBalancer", set()),
        ("nodeport", {ServiceType.NODE_PORT, ServiceType.CLUSTER_IP}),
        ("", {ServiceType.NODE_PORT, ServiceType.CLUSTER_IP}),
    ],
)
def test_a_service_chooses_its_frontends_and_has_all_where_it_names_none(
    text: str, types: set[ServiceType]
) -> None:
    assert {one.type for one in frontends({TYPES: text})} == types


def on(labels: dict[str, str], *, label: str = "", **annotations: str) -> bool:
    """Whether a node with these labels has the service."""
    named = {f"service.cilium.io/{name.replace('_', '-')}": text for name, text in annotations.items()}
    service = msgspec.convert(
        {
            "metadata": {
                "name": "web",
                "annotations": named,
                "labels": {EXPOSURE_LABEL: label} if label else {},
            },
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
        },
        Service,
    )
    node = ServingNode("here", exposure=labels.get(EXPOSURE_LABEL, ""), labels=labels)
    return bool(frontends_of(service, {}, node, LoadBalancerOptions()))


BEEFY = {EXPOSURE_LABEL: "beefy", "disk": "ssd"}


def test_a_service_is_on_the_nodes_that_it_names() -> None:
    assert on(BEEFY, node="beefy")
    assert not on({}, node="beefy")
    assert on(BEEFY, label="beefy")
    assert not on(BEEFY, node="slow", label="beefy")
    for selector in (
        "disk=ssd",
        "disk==ssd,!gpu",
        "disk in (ssd, nvme)",
        "disk",
        "gpu!=a",
        "gpu notin (a)",
        "",
    ):
        assert on(BEEFY, node_selector=selector, node="slow")
    for selector in (
        "disk=hdd",
        "gpu",
        "!disk",
        "disk in (hdd)",
        "disk notin (ssd)",
        "=",
        "a b",
        "disk=ssd,,",
        "disk=ssd,",
        "disk=ssd,gpu notin ()",
        "-gpu!=a",
    ):
        assert not on(BEEFY, node_selector=selector, node="beefy")


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        (None, 10800),
        ({}, 10800),
        ({"clientIP": {}}, 10800),
        ({"clientIP": {"timeoutSeconds": 0}}, 10800),
        ({"clientIP": {"timeoutSeconds": -1}}, 10800),
        ({"clientIP": {"timeoutSeconds": 1}}, 1),
        ({"clientIP": {"timeoutSeconds": 86401}}, 86400),
    ],
)
def test_session_affinity_without_a_timeout_lasts_three_hours(
    config: dict[str, Any] | None, seconds: int
) -> None:
    service = msgspec.convert(
        {
            "metadata": {"name": "cart"},
            "spec": {
                "clusterIP": "10.96.0.1",
                "ports": [{"port": 80}],
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": config,
            },
        },
        Service,
    )
    (found,) = frontends_of(service, {}, NODE, LoadBalancerOptions())
    assert found.affinity_timeout == seconds


def faults(texts: dict[str, str], spec: dict[str, Any] | None = None, **options: Any) -> dict[str, str]:
    """The faults reported of the annotations of a service, by name."""
    metadata = {"name": "web", "annotations": {f"service.cilium.io/{k}": v for k, v in texts.items()}}
    service = msgspec.convert({"metadata": metadata, "spec": spec or {}}, Service)
    return {k.partition("/")[2]: v for k, v in faults_of(service, LoadBalancerOptions(**options))}


def test_service_annotations_without_effect_are_reported() -> None:
    texts = {
        "type": "nodeport", "lb-algorithm": "fast", "forwarding-mode": "dsr", "src-ranges-policy": "Deny",
        "node-selector": "a b", "lb-l7": "enabled", "proxy-delegation": "none", "global": "false",
        "lb-algorthm": "maglev", "node": "beefy", "weight": "3", "affinity": "local",
    }  # fmt: skip
    spec = {"type": "NodePort", "loadBalancerSourceRanges": ["10.0.0.0/8"]}
    wrong = {"type", "lb-algorithm", "node-selector", "lb-l7", "lb-algorthm", "weight"}
    off = faults(texts, spec)
    assert off.keys() == wrong | {"forwarding-mode"}
    assert off["lb-algorithm"] == "bpf-lb-algorithm-annotation is off"
    assert off["forwarding-mode"] == "bpf-lb-mode-annotation is off"
    assert "expected one of forwarding-mode, lb-algorithm, node, node-selector" in off["lb-algorthm"]
    may = faults(texts, spec, bpf_lb_algorithm_annotation=True, bpf_lb_mode_annotation=True)
    assert may.keys() == wrong
    assert may["lb-algorithm"] == "'fast': expected random or maglev"
    assert faults({"global": "True"})["global"].startswith("no remote clusters are followed")


@pytest.mark.parametrize(
    ("annotation", "spec", "options", "message"),
    [
        (("lb-algorithm", "maglev"), {}, {}, "no address of the service is served to clients outside"),
        (("forwarding-mode", "dsr"), {"type": "NodePort"}, {"enable_node_port": False}, "no address of the"),
        (("lb-algorithm", "Maglev"), {"externalIPs": ["192.0.2.9"]}, {}, ""),
        (("lb-algorithm", "maglev"), {}, {"bpf_lb_external_clusterip": True}, ""),
        (("src-ranges-policy", "deny"), {"type": "LoadBalancer"}, {}, "has no loadBalancerSourceRanges"),
        (
            ("src-ranges-policy", "deny"),
            {"loadBalancerSourceRanges": ["10.0.0.0/8"]},
            {"enable_svc_source_range_check": False},
            "enable-svc-source-range-check is off",
        ),
        (("src-ranges-policy", "allow"), {}, {}, ""),
        (("type", "LoadBalancer"), {"type": "NodePort"}, {}, "type NodePort has no such address"),
        (("type", "LoadBalancer,NodePort"), {"type": "NodePort"}, {}, ""),
    ],
)
def test_an_annotation_without_a_matching_service_type_is_reported(
    annotation: tuple[str, str], spec: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    may = {"bpf_lb_algorithm_annotation": True, "bpf_lb_mode_annotation": True}
    found = faults(dict([annotation]), spec, **may, **options).get(annotation[0], "")
    assert message in found
    assert bool(message) == bool(found)


@pytest.mark.parametrize(
    ("port", "options", "reasons"),
    [
        ({"targetPort": 80}, {}, ["enable-sctp is off"]),
        ({"targetPort": 80}, {"enable_sctp": True}, []),
        ({"targetPort": "sip"}, {"enable_sctp": True}, []),
        ({"targetPort": 8080}, {"enable_sctp": True}, ["80: SCTP keeps its port, and the target's is 8080"]),
        ({"nodePort": 30080}, {"enable_sctp": True}, ["30080: SCTP keeps its port, and the target's is 80"]),
        ({"nodePort": 30080}, {"enable_sctp": True, "enable_node_port": False}, []),
        ({"protocol": "TCP", "targetPort": 8080}, {}, []),
        ({"protocol": "tcp"}, {}, ["'tcp': expected TCP, UDP or SCTP"]),
        ({"protocol": "UDP", "nodePort": 99999}, {}, ["99999: expected a port"]),
    ],
)
def test_unserved_service_ports_are_reported(
    port: dict[str, Any], options: dict[str, Any], reasons: list[str]
) -> None:
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80, "protocol": "SCTP"} | port]}
    service = msgspec.convert({"metadata": {"name": "web"}, "spec": spec}, Service)
    found = list(unsupported_parts(service, LoadBalancerOptions(**options)))
    assert [part for part, _ in found] == ["port 80"] * len(reasons)
    assert all(reason.startswith(text) for (_, reason), text in zip(found, reasons, strict=True))


def test_invalid_service_addresses_and_ranges_are_reported() -> None:
    spec = {
        "type": "LoadBalancer", "clusterIP": "10.96.0.1", "externalIPs": ["1.2.3", "192.0.2.1"],
        "loadBalancerSourceRanges": ["10.0.0.0/33", "10.0.0.0/8"],
    }  # fmt: skip
    service = msgspec.convert({"metadata": {"name": "web"}, "spec": spec}, Service)
    assert dict(unsupported_parts(service, LoadBalancerOptions())) == {
        "externalIPs": "'1.2.3': expected an IP address",
        "loadBalancerSourceRanges": "'10.0.0.0/33': expected an IP network: left out",
    }


@pytest.mark.parametrize(
    ("ranges", "policy", "wanted"),
    [
        (["10.0.0.0/8", "nonsense"], "allow", ("10.0.0.0/8",)),
        (["nonsense", "10.0.0.0/33"], "allow", ("0.0.0.0/32",)),
        (["nonsense"], "deny", ()),
        ([], "allow", ()),
    ],
)
def test_a_service_with_only_invalid_source_ranges_admits_no_client(
    ranges: list[str], policy: str, wanted: tuple[str, ...]
) -> None:
    service = msgspec.convert(
        {
            "metadata": {"name": "web", "annotations": {"service.cilium.io/src-ranges-policy": policy}},
            "spec": {
                "type": "LoadBalancer",
                "clusterIP": "10.96.0.1",
                "ports": [{"port": 80}],
                "loadBalancerSourceRanges": ranges,
            },
            "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}, {"ip": "2001:db8::1"}]}},
        },
        Service,
    )
    found = frontends_of(service, {}, NODE, LoadBalancerOptions())
    balancers = [one for one in found if one.type is ServiceType.LOAD_BALANCER]
    assert [one.source_ranges for one in balancers] == [wanted] * 2


@pytest.mark.parametrize(
    ("options", "checked"),
    [
        ({}, {"load-balancer"}),
        (
            {"bpf_lb_source_range_all_types": True},
            {"cluster-ip", "load-balancer", "external-ips", "node-port"},
        ),
        ({"bpf_lb_source_range_all_types": True, "enable_svc_source_range_check": False}, set()),
    ],
)
@pytest.mark.parametrize("policy", ["allow", "deny"])
def test_which_addresses_are_closed_outside_the_source_ranges(
    options: dict[str, Any], checked: set[str], policy: str
) -> None:
    service = msgspec.convert(
        {
            "metadata": {"name": "web", "annotations": {"service.cilium.io/src-ranges-policy": policy}},
            "spec": {
                "type": "LoadBalancer",
                "clusterIP": "10.96.0.1",
                "externalIPs": ["203.0.113.2"],
                "externalTrafficPolicy": "Local",
                "ports": [{"port": 80, "nodePort": 30080}],
                "loadBalancerSourceRanges": ["10.0.0.0/8"],
            },
            "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}},
        },
        Service,
    )
    found = frontends_of(service, {}, NODE, LoadBalancerOptions(**options))
    assert len(found) == 8  # the last two types of each scope, node ports by the wildcard too
    for one in found:
        ranges = ("10.0.0.0/8",) if NAMES[one.type] in checked else ()
        assert (one.source_ranges, one.source_ranges_deny) == (ranges, bool(ranges) and policy == "deny")


NAMES = {
    ServiceType.CLUSTER_IP: "cluster-ip",
    ServiceType.LOAD_BALANCER: "load-balancer",
    ServiceType.EXTERNAL_IPS: "external-ips",
    ServiceType.NODE_PORT: "node-port",
}


def test_either_switch_lets_services_choose_the_mode_but_not_through_a_tunnel() -> None:
    def choose(*, tunnelled: bool, **settings: Any) -> bool:
        programs = service_programs(DatapathSettings())
        mode = NodePortMode(ForwardingSettings(**settings), programs, PodTunnel(tunnelled))
        return mode.services_choose_forwarding

    assert choose(bpf_lb_algorithm_annotation=True, tunnelled=False)
    assert not choose(bpf_lb_algorithm_annotation=True, tunnelled=True)
    assert choose(bpf_lb_mode_annotation=True, tunnelled=False)
    assert not choose(tunnelled=False)


def test_an_address_of_a_load_balancer_that_is_a_proxy_is_left_to_it() -> None:
    ingress = [{"ip": "203.0.113.1"}, {"ip": "203.0.113.2", "ipMode": "VIP"}]
    ingress += [{"ip": "203.0.113.3", "ipMode": "Proxy"}, {"hostname": "lb.example.org"}]
    service = msgspec.convert(
        {
            "metadata": {"name": "web"},
            "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
            "status": {"loadBalancer": {"ingress": ingress}},
        },
        Service,
    )
    found = frontends_of(service, {}, NODE, LoadBalancerOptions())
    served = {str(one.key.address.ip) for one in found if one.type is ServiceType.LOAD_BALANCER}
    assert served == {"203.0.113.1", "203.0.113.2"}


def test_services_of_others_and_slices_of_other_clusters_are_left_alone() -> None:
    proxy = "service.kubernetes.io/service-proxy-name"

    def served(labels: dict[str, str], of_slice: dict[str, str] | None = None, **options: Any) -> int:
        """How many backends; -1 without a frontend."""
        catalog = LoneCatalog(LoadBalancerOptions(**options), ServingNode("here"))
        service = {
            "metadata": {"name": "web", "namespace": "shop", "labels": labels},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
        }
        slice_ = {
            "metadata": {
                "name": "web-1",
                "namespace": "shop",
                "labels": {"kubernetes.io/service-name": "web"} | (of_slice or {}),
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"]}],
            "ports": [{"port": 8080}],
        }
        catalog.upsert_service(msgspec.convert(service, Service))
        catalog.upsert_slice(msgspec.convert(slice_, EndpointSlice))
        found = [len(one.backends) for one in catalog.frontends.all()]
        return found[-1] if found else -1

    assert served({}) == 1
    assert served({proxy: "other"}) == -1
    assert served({}, k8s_service_proxy_name="other") == -1
    assert served({proxy: "other"}, k8s_service_proxy_name="other") == 1
    assert served({proxy: ""}) == -1
    assert served({HEADLESS: ""}) == -1
    assert served({HEADLESS: ""}, k8s_service_proxy_name="other") == -1
    managed = "endpointslice.kubernetes.io/managed-by"
    assert served({}, {managed: "endpointslice-mesh-controller.cilium.io"}) == 0
    assert served({}, {HEADLESS: ""}) == 0


def test_labels_that_come_and_go_take_frontends_and_backends_away_and_bring_them_back() -> None:
    catalog = LoneCatalog(LoadBalancerOptions(), ServingNode("here"))

    def served() -> dict[str, int]:
        """How many backends, by frontend."""
        return {str(one.key): len(one.backends) for one in catalog.frontends.all()}

    def service(**labels: str) -> Service:
        metadata = {"name": "web", "namespace": "shop", "labels": labels}
        spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
        return msgspec.convert({"metadata": metadata, "spec": spec}, Service)

    def slice_(**labels: str) -> EndpointSlice:
        of = {"kubernetes.io/service-name": "web"} | labels
        body = {
            "metadata": {"name": "web-1", "namespace": "shop", "labels": of},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"]}],
            "ports": [{"port": 8080}],
        }
        return msgspec.convert(body, EndpointSlice)

    web = "10.96.0.1:80"
    catalog.upsert_service(service())
    assert served() == {web: 0}
    catalog.upsert_slice(slice_())
    assert served() == {web: 1}
    for label in (HEADLESS, "service.kubernetes.io/service-proxy-name"):
        catalog.upsert_service(service(**{label: "x"}))
        assert served() == {}
        catalog.upsert_slice(slice_(**{label: "x"}))
        assert served() == {}
        catalog.upsert_service(service())
        assert served() == {web: 0 if label == HEADLESS else 1}
        catalog.upsert_slice(slice_())
        assert served() == {web: 1}


def test_cluster_addresses_are_never_answered_directly() -> None:
    found = frontends({MODE: "dsr"}, bpf_lb_mode_annotation=True)
    assert {one.direct for one in found if one.type is ServiceType.CLUSTER_IP} == {False}


def test_a_service_of_an_unknown_type_is_served_as_a_cluster_address_and_reported() -> None:
    service = msgspec.convert(
        {
            "metadata": {"name": "web"},
            "spec": {
                "type": "NodePorts",
                "clusterIP": "10.96.0.1",
                "ports": [{"port": 80, "nodePort": 30080}],
            },
        },
        Service,
    )
    options = LoadBalancerOptions()
    assert [one.type for one in frontends_of(service, {}, NODE, options)] == [ServiceType.CLUSTER_IP]
    ((part, reason),) = unsupported_parts(service, options)
    assert part == "type"
    assert reason.startswith("'NodePorts': expected one of ClusterIP,")


def test_a_port_that_another_one_hides_is_reported() -> None:
    def reported(*targets: int, proto_diff: bool) -> list[tuple[str, str]]:
        ports = [
            {"name": protocol, "port": 53, "protocol": protocol, "targetPort": target}
            for protocol, target in zip(("TCP", "UDP"), targets, strict=True)
        ]
        service = msgspec.convert(
            {"metadata": {"name": "dns"}, "spec": {"clusterIP": "10.96.0.1", "ports": ports}}, Service
        )
        return list(unsupported_parts(service, LoadBalancerOptions(bpf_lb_proto_diff=proto_diff)))

    assert reported(53, 5353, proto_diff=True) == []
    assert reported(53, 53, proto_diff=False) == []
    reason = "bpf-lb-proto-diff is off: UDP is served as TCP is, by its target"
    assert reported(53, 5353, proto_diff=False) == [("port 53", reason)]


def test_without_telling_protocols_apart_a_port_is_one_frontend() -> None:
    assert {one.key.address.protocol for one in frontends()} == {6, 17, 132}
    assert [one.key.address.protocol for one in frontends(bpf_lb_proto_diff=False)] == [0, 0, 0]


nodes = st.builds(
    ServingNode,
    st.just("here"),
    zone=st.sampled_from(["", "a", "b"]),
    exposure=st.sampled_from(["", "front"]),
    node_port_addresses=st.sampled_from([(), (IPv4Address("192.0.2.7"),)]),
    labels=st.sampled_from([None, {"disk": "ssd"}]),
)


@bounded(300)
@given(
    nodes,
    nodes,
    st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]),
    st.sampled_from([{}, {EXPOSURE_LABEL: "front"}, {NODE_SELECTOR: "disk=ssd"}]),
    st.booleans(),
)
def test_a_changed_node_changes_no_service_that_is_left_out(
    old: ServingNode, new: ServingNode, type_: str, annotations: dict[str, str], topology: bool
) -> None:
    options = LoadBalancerOptions(enable_service_topology=topology)
    ports = [{"port": 80, "nodePort": 30080}]
    spec = {"type": type_, "clusterIP": "10.96.0.1", "externalIPs": ["203.0.113.1"], "ports": ports}
    service = msgspec.convert(
        {"metadata": {"name": "web", "annotations": annotations}, "spec": spec}, Service
    )
    addresses = (ServiceAddress(IPv4Address(f"10.0.0.{at}"), 8080, 6) for at in (1, 2))
    backends = {
        "": tuple(Backend(ip, hinted_zones=(zone,)) for ip, zone in zip(addresses, "ab", strict=True))
    }
    before, after = (frontends_of(service, backends, one, options) for one in (old, new))
    assert before == after or may_differ(service, old, new, options)
