"""Routing through the host's stack, as Cilium's settings select it."""

from __future__ import annotations

import pytest

from cells.config.shared import ServiceSettings, service_reach
from cells.datapath.settings import DatapathSettings, HostRouting, host_routing
from lifecycle import Hive, config, invoke, provide

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "Legacy"),
        ({"enable-host-legacy-routing": "false"}, "Legacy"),
        ({"kube-proxy-replacement": "true"}, "BPF"),
        ({"kube-proxy-replacement": "true", "enable-host-legacy-routing": "false"}, "BPF"),
        ({"kube-proxy-replacement": "true", "enable-host-legacy-routing": "true"}, "Legacy"),
    ],
)
async def test_the_stack_is_passed_by_where_kube_proxy_is_replaced(
    settings: dict[str, str], mode: str
) -> None:
    def needed(_: HostRouting) -> None: ...

    provided = provide(service_reach, host_routing)
    parts = config(DatapathSettings), config(ServiceSettings), provided, invoke(needed)
    async with Hive(*parts, settings=settings).started() as hive:
        assert hive.get(HostRouting).mode == mode
