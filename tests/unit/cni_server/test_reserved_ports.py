"""Local ports reserved in new pods."""

from __future__ import annotations

import pytest

from cells.cluster.encryption import EncryptionKey
from cells.cni import ReservedPorts, ReservedPortSettings
from cells.config import ChainingMode
from cells.policy.control import L7Proxy
from cells.proxy.dns import DNSProxySettings, QuerySource, TransparentProxy
from cells.tunnel.settings import PodTunnel, TunnelSettings, pod_tunnel
from lifecycle import Table

VXLAN = TunnelSettings()
NATIVE = TunnelSettings(routing_mode="native")
WIREGUARD = EncryptionKey(255, "a public key")
IPSEC = EncryptionKey(3, overhead=77)


def ports(
    wanted: str = "auto",
    tunnel: PodTunnel = pod_tunnel(VXLAN),  # noqa: B008  # immutable
    key: EncryptionKey | None = None,
    *,
    transparent: bool | None = None,
    mode: str = "none",
    l7: bool = True,
) -> str:
    """What is reserved under these settings."""
    queries = QuerySource(
        DNSProxySettings(dnsproxy_enable_transparent_mode=transparent),
        [ChainingMode(mode)],
        Table[str, TransparentProxy]("transparent-proxies", key=lambda row: row.name),
        L7Proxy(l7),
    )
    keys: Table[str, EncryptionKey] = Table("encryption-key", key=lambda row: row.wireguard)
    if key is not None:
        keys.put(key)
    return ReservedPorts(
        ReservedPortSettings(container_ip_local_reserved_ports=wanted), queries, tunnel, keys
    )()


@pytest.mark.parametrize(
    ("tunnel", "key", "found"),
    [
        (VXLAN, None, "8472"),
        (TunnelSettings(tunnel_protocol="geneve"), None, "6081"),
        (TunnelSettings(tunnel_port=9999), None, "9999"),
        (NATIVE, None, ""),
        (TunnelSettings(routing_mode="native", enable_ipv4_egress_gateway=True), None, "8472"),
        (NATIVE, WIREGUARD, "51871"),
        (VXLAN, WIREGUARD, "51871,8472"),
        (VXLAN, IPSEC, "8472"),
    ],
)
def test_the_ports_of_tunnel_and_wireguard_are_reserved_where_there_are_some(
    tunnel: TunnelSettings, key: EncryptionKey | None, found: str
) -> None:
    assert ports(tunnel=pod_tunnel(tunnel), key=key) == found


def test_no_ports_are_reserved_when_no_query_leaves_from_a_pods_address() -> None:
    assert ports(transparent=False) == ""
    assert ports(mode="flannel") == ""
    assert ports(mode="flannel", transparent=True) == "8472"
    assert ports(l7=False) == ""


@pytest.mark.parametrize("wanted", ["", "53", "8472,51871", "1-1024,30000-32767"])
def test_ports_that_are_set_are_reserved_whatever_runs(wanted: str) -> None:
    assert list(ReservedPortSettings(container_ip_local_reserved_ports=wanted).faults()) == []
    assert ports(wanted, key=WIREGUARD, transparent=False) == wanted


@pytest.mark.parametrize("wanted", ["Auto", "8472,", "8472, 51871", "1-2-3", "0", "70000", "30-20", "8472-"])
def test_what_the_kernel_would_not_take_for_ports_is_refused(wanted: str) -> None:
    (fault,) = ReservedPortSettings(container_ip_local_reserved_ports=wanted).faults()
    assert fault == (
        f"container-ip-local-reserved-ports={wanted}: expected auto, or ports and ranges from 1 to 65535,"
        " separated by commas"
    )
