"""Copies of the settings on disk, as Cilium's agent keeps them: of this start, and of the two before.

For:    ConfigDrift. Needs: AgentConfig, the settings in force. Gives: write_copies().
Source: Cilium 1.17, the files agent-runtime-config.json and viper-agent-config.yaml in its state directory.
        cilium-dbg reads the first while no agent answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cells.config import AgentConfig
from lifecycle import Setting

RUNTIME_CONFIG: Final = "agent-runtime-config"
GIVEN_CONFIG: Final = "viper-agent-config"
FIELDS: Final = {
    "cluster-id": "ClusterID",
    "cluster-name": "ClusterName",
    "datapath-mode": "DatapathMode",
    "enable-bpf-masquerade": "EnableBPFMasquerade",
    "enable-cilium-network-policy": "EnableCiliumNetworkPolicy",
    "enable-endpoint-health-checking": "EnableEndpointHealthChecking",
    "enable-health-checking": "EnableHealthChecking",
    "enable-host-firewall": "EnableHostFirewall",
    "enable-icmp-rules": "EnableICMPRules",
    "enable-ipsec": "EnableIPSec",
    "enable-ipv4-egress-gateway": "EnableIPv4EgressGateway",
    "enable-k8s-networkpolicy": "EnableK8sNetworkPolicy",
    "enable-l7-proxy": "EnableL7Proxy",
    "enable-local-redirect-policy": "EnableLocalRedirectPolicy",
    "enable-policy": "EnablePolicy",
    "encrypt-node": "EncryptNode",
    "identity-allocation-mode": "IdentityAllocationMode",
    "ipam": "IPAM",
    "monitor-aggregation": "MonitorAggregation",
    "routing-mode": "RoutingMode",
}
"""Settings, and the fields of Cilium's DaemonConfig by which cilium-cli detects features."""
KTIME: Final = 0
"""Cilium's number for the clock of the conntrack maps: seconds since boot."""
_GENERATIONS: Final = 3


def write_copies(config: AgentConfig, settings: Iterable[Setting]) -> None:
    """Write both files, moving the former ones on. Raises OSError."""
    settings = list(settings)
    given = {one.option.name: one.text for one in settings if one.origin != "default"}
    _rotate(config.state, RUNTIME_CONFIG, "json", _text(runtime_config(config, settings)))
    # JSON of texts is YAML, too: no library is loaded for it
    _rotate(config.state, GIVEN_CONFIG, "yaml", _text(given))


def runtime_config(config: AgentConfig, settings: Iterable[Setting]) -> dict[str, object]:
    """Under Cilium's names what its tools may ask; under ``Settings`` every setting as text."""
    fields = {
        FIELDS[one.option.name]: one.value if isinstance(one.value, bool | int) else one.text
        for one in settings
        if one.option.name in FIELDS
    }
    return {
        **fields,
        "ClockSource": KTIME,
        "EnableIPv4": config.ipv4,
        "EnableIPv6": config.ipv6,
        "RunDir": str(config.state_dir),
        "Settings": {one.option.name: one.text for one in settings},
        "SocketPath": str(config.api_socket),
        "StateDir": str(config.state),
    }


def _text(values: dict[str, object] | dict[str, str]) -> str:
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def _rotate(directory: Path, name: str, suffix: str, text: str) -> None:
    """Write ``name.suffix``, the former ones being ``name-1.suffix`` and ``name-2.suffix``."""
    paths = [directory / f"{name}{f'-{n}' if n else ''}.{suffix}" for n in range(_GENERATIONS)]
    fresh = directory / f".{name}.new"
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o600)
    for older, newer in zip(reversed(paths), reversed(paths[:-1]), strict=False):
        if newer.exists():
            newer.replace(older)
    fresh.replace(paths[0])
