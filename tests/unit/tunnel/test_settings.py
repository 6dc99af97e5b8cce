"""Settings of the tunnel, and the settings derived from them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from cells.maps.records.cluster import TUNNEL_OVER_IPV6, TunnelConfig
from cells.tunnel.kernel import TunnelDevice, TunnelFacts, TunnelPrograms, wanted
from cells.tunnel.settings import TunnelSettings
from lifecycle import Hive, SettingsError, Sources, config


def refused(directory: Path, **values: str) -> list[str]:
    for name, value in values.items():
        (directory / name.replace("_", "-")).write_text(value)
    try:
        Hive(config(TunnelSettings), settings=Sources(config_dir=directory)).check()
    except SettingsError as error:
        return [fault.text for fault in error.faults]
    return []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tunnel_protocol": "gre"}, "vxlan, geneve"),
        ({"tunnel_protocol": "geneve", "tunnel_source_port_range": "10-20"}, "expected 0-0, or"),
        ({"underlay_protocol": "auto"}, "underlay-protocol"),
        (
            {"underlay_protocol": "ipv6", "enable_ipv4_egress_gateway": "true"},
            "egress gateways are reached over IPv4",
        ),
        ({"tunnel_port": "70000"}, "expected a UDP port"),
        ({"tunnel_source_port_range": "9-1"}, "expected ports"),
        ({"tunnel_source_port_range": "all"}, "expected LOW-HIGH"),
    ],
)
def test_inconsistent_tunnel_settings_are_refused_by_name(
    tmp_path: Path, values: dict[str, str], message: str
) -> None:
    assert any(message in line for line in refused(tmp_path, **values))


def test_the_charts_values_are_accepted(tmp_path: Path) -> None:
    chart = {"routing_mode": "tunnel", "tunnel_protocol": "vxlan", "tunnel_source_port_range": "0-0"}
    assert refused(tmp_path, **chart) == []


def test_geneve_has_its_own_device_and_port() -> None:
    for chosen, port in ((0, 6081), (9000, 9000)):
        settings = TunnelSettings(tunnel_protocol="geneve", tunnel_port=chosen)
        device = wanted(settings, 1500, 1450, None, ())["device"]
        assert device == TunnelDevice("geneve", port, (0, 0), 1500)
        assert (settings.link, settings.port, settings.overhead) == ("cilium_geneve", port, 50)


def test_in_native_mode_no_tunnel_is_created() -> None:
    assert wanted(TunnelSettings(routing_mode="native"), 1500, 1500, None, ()) == {}


def test_the_address_others_know_is_the_source_if_it_is_on_a_device() -> None:
    settings = TunnelSettings(routing_mode="tunnel", tunnel_port=9000, tunnel_source_port_range="10-20")
    own = IPv4Address("192.0.2.1")
    for local, source in (([own], own), ([], IPv4Address(0))):
        assert list(wanted(settings, 1500, 1450, own, local).values()) == [
            TunnelDevice("vxlan", 9000, (10, 20), 1500),
            TunnelPrograms(),
            TunnelFacts(1450, 9000, source),
        ]


def test_over_ipv6_the_source_is_of_it_and_packets_inside_are_shorter() -> None:
    settings, own = TunnelSettings(underlay_protocol="ipv6"), IPv6Address("2001:db8::1")
    assert (TunnelSettings().overhead, settings.overhead) == (50, 70)
    assert TunnelSettings(underlay_protocol="ipv6", routing_mode="native").overhead == 0
    for local, source in (([own], own), ([IPv4Address("192.0.2.1")], IPv6Address(0))):
        facts = wanted(settings, 1500, 1430, own, local)["facts"]
        assert facts == TunnelFacts(1430, 8472, source, TUNNEL_OVER_IPV6)
        tunnel_config = TunnelConfig(7, 1430, 8472, source, TUNNEL_OVER_IPV6)
        assert TunnelConfig.unpack(tunnel_config.pack()) == tunnel_config
