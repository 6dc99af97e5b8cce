"""When packets pass by the host's stack: as Cilium's settings say."""

from __future__ import annotations

import pytest

from cells.config.shared import ServiceSettings
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

    parts = config(DatapathSettings), config(ServiceSettings), provide(host_routing), invoke(needed)
    async with Hive(*parts, settings=settings).started() as hive:
        assert hive.get(HostRouting).mode == mode
