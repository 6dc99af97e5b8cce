"""EndpointSlices and addresses that the lab assigns to services, as a cluster would."""

from __future__ import annotations

from typing import Any

from hive.endpoint_slices import endpoint_slices
from hive.lab.cluster.manifests import with_defaults

Object = dict[str, Any]


def service(**spec: Any) -> Object:
    return {"kind": "Service", "metadata": {"name": "web", "namespace": "shop"}, "spec": spec}


def pod(name: str, *ips: str, http: int = 0, namespace: str = "shop", **status: Any) -> Object:
    ports = [{"name": "http", "containerPort": http}] if http else []
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "web"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "ports": ports}]},
        "status": {"phase": "Running", "podIPs": [{"ip": ip} for ip in ips], **status},
    }


def shown(slices: list[Object]) -> list[tuple[str, list[int], list[str]]]:
    return [
        (
            one["addressType"],
            [port["port"] for port in one["ports"]],
            [each["addresses"][0] for each in one["endpoints"]],
        )
        for one in slices
    ]


def test_slices_have_the_pods_that_are_selected_by_family_and_by_what_ports_mean() -> None:
    made = endpoint_slices(
        service(selector={"app": "web"}, ports=[{"port": 80, "targetPort": "http"}]),
        [
            pod("a", "10.0.0.1", "fd00::1", http=8080),
            pod("b", "10.0.0.2", http=8081),
            pod("other", "10.0.0.3", namespace="other", http=8080),
            pod("over", "10.0.0.4", http=8080, phase="Succeeded"),
            pod("late"),
        ],
        "test",
    )
    assert shown(made) == [
        ("IPv4", [8080], ["10.0.0.1"]),
        ("IPv4", [8081], ["10.0.0.2"]),
        ("IPv6", [8080], ["fd00::1"]),
    ]
    assert [one["metadata"]["name"] for one in made] == ["web-0", "web-1", "web-2"]


def test_a_service_has_only_addresses_of_its_families_and_pods_that_are_ready_are_marked() -> None:
    not_ready: Object = {"conditions": [{"type": "Ready", "status": "False"}]}
    pods = [pod("a", "10.0.0.1", "fd00::1"), pod("b", "10.0.0.2", **not_ready)]
    (made,) = endpoint_slices(
        service(clusterIP="10.96.0.1", selector={"app": "web"}, ports=[{"port": 80}]), pods, "test"
    )
    assert [each["conditions"]["ready"] for each in made["endpoints"]] == [True, False]
    assert [each["nodeName"] for each in made["endpoints"]] == ["n1", "n1"]


def test_without_pods_a_slice_is_empty_and_without_a_selector_there_is_none() -> None:
    (empty,) = endpoint_slices(service(selector={"app": "x"}, ports=[{"port": 80}]), [], "test")
    assert empty["endpoints"] == []
    assert endpoint_slices(service(ports=[{"port": 80}]), [pod("a", "10.0.0.1")], "test") == []
    external = service(type="ExternalName", externalName="a.example", selector={"app": "web"})
    assert endpoint_slices(external, [pod("a", "10.0.0.1")], "test") == []


def test_services_get_free_addresses_and_node_ports_once() -> None:
    wanted = [
        service(type="NodePort", ports=[{"port": 80}, {"port": 81, "nodePort": 30001}]),
        {**service(clusterIP="None"), "metadata": {"name": "headless"}},
        {**service(clusterIP="10.96.0.1"), "metadata": {"name": "own"}},
    ]
    made = with_defaults(wanted, [])
    assert made[0]["spec"]["clusterIP"] == "10.96.0.2"
    assert [port["nodePort"] for port in made[0]["spec"]["ports"]] == [30000, 30001]
    assert made[1:] == wanted[1:]
    assert with_defaults(wanted, made) == made, "the same, when applied again"
