"""Ports of proxy redirects: stable over restarts, and never the DNS proxy's."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from cells.config import AgentConfig, AgentSettings
from cells.policy.control import L7Proxy
from cells.proxy.dns.port import ProxyPort
from cells.proxy.dns.settings import DNSPortSettings
from cells.proxy.envoy.ports import EnvoyProgram, RedirectPorts
from cells.proxy.envoy.resources import EnvoyProgramSettings
from lifecycle import Hive, Lifecycle, config, invoke, provide, supply

pytestmark = pytest.mark.anyio


async def ports(folder: Path, dns: int, *redirects: str) -> list[int]:
    """What an agent gives redirects, with this setting of tofqdns-proxy-port."""
    agent = AgentConfig(AgentSettings(state_dir=folder), Lifecycle("test"), structlog.get_logger())
    hive = Hive(
        config(DNSPortSettings, EnvoyProgramSettings),
        provide(ProxyPort, EnvoyProgram, RedirectPorts),
        invoke(RedirectPorts),
        supply(agent),
        supply(L7Proxy(enabled=True)),
        settings={"tofqdns-proxy-port": str(dns), "external-envoy-proxy": "true"},
    )
    async with hive.started():
        given = hive.get(RedirectPorts)
        return [given.port(name) for name in redirects]


async def test_redirects_keep_their_ports_but_one_that_the_dns_proxy_has_now(tmp_path: Path) -> None:
    first, second = await ports(tmp_path, 9999, "first", "second")
    assert await ports(tmp_path, 9998, "second", "first") == [second, first]
    other, same = await ports(tmp_path, first, "first", "second")
    assert other not in {0, first, second}
    assert same == second
    assert await ports(tmp_path, first, "first") == [other]
