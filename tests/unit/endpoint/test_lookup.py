"""Endpoint lookup by every kind of id."""

from pathlib import Path

import pytest

from cells.endpoint import EndpointError
from tests.unit.endpoint.fakes import Node, request


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.create(request(container_name="pause"))
    return node


@pytest.mark.parametrize(
    "id_text",
    [
        "1",
        "cilium-local:1",
        "cilium-local:0x1",
        "01",
        "container-id:cid1",
        "cni-attachment-id:cid1:eth0",
        "container-name:pause",
        "pod-name:default/web-1",
        "pod-name:default:web-1",
        "cep-name:default/web-1",
        "ipv4:10.0.1.1",
    ],
)
def test_every_name_finds_the_endpoint(node: Node, id_text: str) -> None:
    found = node.endpoints.lookup(id_text)
    assert found is not None
    assert found.id == 1


@pytest.mark.parametrize(
    "id_text", ["2", "container-id:cid2", "ipv4:10.0.1.2", "ipv6:fd00::1", "docker-endpoint:x"]
)
def test_unknown_endpoints_are_not_found(node: Node, id_text: str) -> None:
    assert node.endpoints.lookup(id_text) is None


@pytest.mark.parametrize(
    ("id_text", "text"),
    [
        ("foo:1", 'unknown endpoint ID prefix "foo"'),
        ("70000", "endpoint id too large: 70000"),
        ("9999999", "endpoint id too large: 9999999"),
        ("-1", "invalid numeric cilium id: -1 is negative"),
        ("abc", 'invalid numeric cilium id: "abc" is not a number'),
        ("cilium-global:1", "endpoint IDs with prefix cilium-global are not supported"),
        ("ipv4:10.0.1", 'invalid IPv4 address "10.0.1"'),
    ],
)
def test_ids_that_cannot_be_understood_are_refused(node: Node, id_text: str, text: str) -> None:
    with pytest.raises(EndpointError) as caught:
        node.endpoints.lookup(id_text)
    assert (caught.value.status, caught.value.text) == (400, text)


def test_with_disable_legacy_identifiers_container_and_pod_names_are_not_registered(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.create(request(disable_legacy_identifiers=True))
    assert node.endpoints.lookup("container-id:cid1") is None
    assert node.endpoints.lookup("pod-name:default/web-1") is None
    assert node.endpoints.lookup("cep-name:default/web-1-eth0") is not None
    assert node.endpoints.by_attachment("cid1", "eth0") is not None


def test_a_container_may_have_several_endpoints(node: Node) -> None:
    node.create(request(2, container_id="cid1", container_ifname="net1"))
    assert [endpoint.id for endpoint in node.endpoints.by_container("cid1")] == [1, 2]
    assert node.endpoints.by_attachment("cid1", "net1") is not None
    for endpoint in node.endpoints.by_container("cid1"):
        node.endpoints.delete(endpoint)
    assert node.endpoints.by_container("cid1") == []
    assert node.table.by("name").values() == node.table.by("container").values() == []
