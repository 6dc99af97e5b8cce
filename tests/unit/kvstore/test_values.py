"""Values of keys, as Cilium's agents write and read them."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, ip_address, ip_network

import pytest

from cells.cluster.identity.numbers import ClusterNumbers
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.clustermesh.keys import RemoteValues
from cells.kubernetes.objects.cilium_endpoint import NamedPort
from cells.kvstore.model import IPS
from cells.remote.shared_keys import SharedPort, address_keys, node_key, read_address, read_node
from tests.unit.ciliumendpoint.endpoints import endpoint

CILIUMS_NODE = {
    "Name": "runtime1",
    "Cluster": "default",
    "IPAddresses": [
        {"Type": "InternalIP", "IP": "10.0.2.15"},
        {"Type": "CiliumInternalIP", "IP": "10.11.0.1"},
    ],
    "IPv4AllocCIDR": {"IP": "10.11.0.0", "Mask": "//8AAA=="},
    "IPv4SecondaryAllocCIDRs": None,
    "IPv6AllocCIDR": {"IP": "f00d::a0f:0:0:0", "Mask": "//////////////////8AAA=="},
    "IPv6SecondaryAllocCIDRs": None,
    "IPv4HealthIP": "10.11.0.9",
    "IPv6HealthIP": "",
    "ClusterID": 0,
    "Source": "local",
    "EncryptionKey": 0,
    "Labels": {"zone": "a"},
    "Annotations": None,
    "NodeIdentity": 1,
    "WireguardPubKey": "",
    "BootID": "b",
    "SomethingNew": {"of": "a later version"},
}


def test_a_node_of_ciliums_is_read() -> None:
    node = read_node("default/runtime1", json.dumps(CILIUMS_NODE).encode())
    assert node is not None
    assert node.source is Source.KVSTORE
    assert [(each.type, str(each.ip)) for each in node.addresses] == [
        ("InternalIP", "10.0.2.15"),
        ("CiliumInternalIP", "10.11.0.1"),
    ]
    assert node.ipv4_alloc_cidrs == (ip_network("10.11.0.0/16"),)
    assert node.ipv6_alloc_cidrs == (ip_network("f00d::a0f:0:0:0/112"),)
    assert node.health == (IPv4Address("10.11.0.9"),)


def test_a_node_is_read_as_it_was_written() -> None:
    node = ClusterNode(
        cluster="default",
        name="n1",
        source=Source.KVSTORE,
        addresses=(
            NodeIP(INTERNAL_IP, ip_address("192.0.2.1")),
            NodeIP(CILIUM_INTERNAL_IP, ip_address("fd00::1")),
        ),
        ipv4_alloc_cidrs=(ip_network("10.1.0.0/24"), ip_network("10.2.0.0/24")),
        ipv6_alloc_cidrs=(ip_network("fd00::/112"),),
        labels={"a": "b"},
        boot_id="x",
    )
    key = node_key(node, 3)
    assert key.key == "cilium/state/nodes/v1/default/n1"
    assert json.loads(key.value)["IPv4AllocCIDR"] == {"IP": "10.1.0.0", "Mask": "////AA=="}
    assert json.loads(key.value)["ClusterID"] == 3
    assert read_node("default/n1", key.value.encode()) == node


def test_an_invalid_node_value_is_none() -> None:
    assert read_node("default/n1", b"{") is None
    assert read_node("default/n1", b'{"Name":"n1","Cluster":"default","BootID":"\xff"}') is None
    assert read_node("default/n1", b'{"Name":"n1","Cluster":"default","NodeIdentity":-1}') is None
    assert read_node("default/n1", json.dumps(CILIUMS_NODE).encode()) is None, "another one's name"
    for wrong in (
        {"IPAddresses": [{"Type": "InternalIP", "IP": "10.0.2"}]},
        {"IPv4HealthIP": "10.11.0.9/32"},
        {"IPv6IngressIP": "x"},
    ):
        assert read_node("default/runtime1", json.dumps(CILIUMS_NODE | wrong).encode()) is None, wrong
    odd = CILIUMS_NODE | {"Name": "n1", "IPv4AllocCIDR": {"IP": "10.0.0.0", "Mask": "AP8A/w=="}}
    node = read_node("default/n1", json.dumps(odd).encode())
    assert node is not None
    assert not node.ipv4_alloc_cidrs


def test_an_address_of_ciliums_is_read() -> None:
    value = (
        b'{"IP":"10.11.0.7","Mask":null,"HostIP":"192.0.2.2","ID":26655,"Key":3,"Metadata":'
        b'"cilium-global:default:runtime1:26655","K8sNamespace":"default","K8sPodName":"web",'
        b'"NamedPorts":[{"Name":"http","Port":80,"Protocol":"TCP"}]}'
    )
    found = read_address("10.11.0.7", value)
    assert found is not None
    claim = found.claim
    assert (str(claim.prefix), claim.identity, claim.encrypt_key) == ("10.11.0.7/32", 26655, 3)
    assert (claim.source, str(claim.tunnel_endpoint)) == (Source.KVSTORE, "192.0.2.2")
    assert (found.namespace, found.pod, found.ports) == ("default", "web", (SharedPort("http", 80, "TCP"),))


def test_an_invalid_address_value_is_none() -> None:
    good = b'{"IP":"10.0.0.1","ID":300}'
    assert read_address("10.0.0.1", good) is not None
    for key, value in (
        ("10.0.0.1", b"{"),
        ("web", good),
        ("10.0.0.2", good),
        ("10.0.0.1", b'{"IP":"10.0.0.1"}'),
        ("10.0.0.1", b'{"IP":"10.0.0.1","ID":300,"X":"\xff"}'),
        ("10.0.0.1", b'{"IP":"10.0.0.1","ID":300,"X":' + b"[" * 100000),
        ("10.0.0.1", b'{"IP":"10.0.0.1","ID":-1}'),
        ("10.0.0.1", b'{"IP":"10.0.0.1","ID":4294967296}'),
        ("10.0.0.1", b'{"IP":"10.0.0.1","ID":300,"Key":256}'),
        ("10.0.0.1", b'{"IP":"10.0.0.1","ID":300,"HostIP":"n1"}'),
    ):
        assert read_address(key, value) is None, (key, value[:50])


def test_values_of_remote_clusters_are_read_as_by_gos_decoder() -> None:
    """A value with a wrong number or address is invalid; the last valid one then stays."""
    values = RemoteValues("east", 2, ClusterNumbers(1))
    origin = {"cluster": "east", "clusterID": 2, "namespace": "shop", "name": "web"}

    def with_port(port: int) -> bytes:
        backends = {"10.2.0.5": {"http": {"Port": port, "Protocol": "TCP"}}}
        return json.dumps(origin | {"backends": backends}).encode()

    assert values.service("shop/web", with_port(65535)).backends["10.2.0.5"]["http"].port == 65535
    for port in (65536, -1):
        with pytest.raises(ValueError, match="Expected `int`"):
            values.service("shop/web", with_port(port))
    ports = b'"NamedPorts":[{"Name":"http","Port":80,"Protocol":"TCP"}]'
    found = values.address("10.2.0.5", b'{"IP":"10.2.0.5","ID":131172,%s}' % ports)
    assert found.ports == (NamedPort("http", 80, "TCP"),)
    assert values.address("10.2.0.5", b'{"IP":"10.2.0.5","ID":300,%s}' % ports).ports == ()
    with pytest.raises(ValueError, match="invalid IP address: 'n1'"):
        values.address("10.2.0.5", b'{"IP":"10.2.0.5","ID":131172,"HostIP":"n1"}')
    node = {
        "Name": "n1",
        "Cluster": "east",
        "ClusterID": 2,
        "IPAddresses": [{"Type": "InternalIP", "IP": "n1"}],
    }
    with pytest.raises(ValueError, match="invalid IP address: 'n1'"):
        values.node("n1", json.dumps(node).encode())


def test_a_network_of_ciliums_is_read() -> None:
    value = b'{"IP":"10.0.0.0","Mask":"/wAAAA==","HostIP":"192.0.2.2","ID":300}'
    found = read_address("10.0.0.0/8", value)
    assert found is not None
    assert found.prefix == "10.0.0.0/8"


def test_an_endpoint_has_a_key_for_each_address() -> None:
    row = endpoint(identity=300)
    keys = list(address_keys(row, "n1", ip_address("192.0.2.1"), [], 0))
    assert [key.key for key in keys] == [f"{IPS}{ip}" for ip in row.addresses]
    value = json.loads(keys[-1].value)
    assert (value["ID"], value["HostIP"], value["Mask"]) == (300, "192.0.2.1", None)
    assert value["Metadata"] == f"cilium-global:default:n1:{row.id}"
