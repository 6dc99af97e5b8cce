"""``hive bpf lb list`` shows services as the maps have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from cells.services.model import BackendState, ServiceFlag
from hive.maps.bpf import command
from tests.kernel.datapath_services.services import VIP, VIP6, Backend
from tests.kernel.sockets.place import serving
from tests.support.cgroups import cgroup
from tests.support.namespaces import in_node

__all__ = ["cgroup", "in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]


def shown(*options: str) -> list[str]:
    done = CliRunner().invoke(command, ["lb", "list", *options])
    assert done.exit_code == 0, done.output
    return [" ".join(line.split()) for line in done.output.splitlines()]


async def test_services_are_shown_with_their_backends(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "10.0.0.1"), Backend(2, "10.0.0.2")], protocol=6)
        flags = ServiceFlag.NODE_PORT | ServiceFlag.AFFINITY | ServiceFlag.EXT_LOCAL_SCOPE
        ends = Backend(3, "fd00::3", state=BackendState.TERMINATING)
        node.services.serve(VIP6, [ends], number=2, scope=1, flags=flags, timeout=60)
        assert shown() == [
            "SERVICE SLOT BACKEND ID FLAGS",
            "10.96.0.10:80/TCP 0 2 backends 1 ClusterIP",
            "10.96.0.10:80/TCP 1 10.0.0.1:8080 1",
            "10.96.0.10:80/TCP 2 10.0.0.2:8080 1",
            "[fd00:96::10]:80/i 0 0 backends 2 NodePort, Local, sessionAffinity, non-routable",
        ]
        assert shown("--frontends")[1] == "10.96.0.10:80/TCP 0 0 2 0 1 0x0040"
        assert shown("--backends")[1:] == [
            "1 10.0.0.1:8080 active",
            "2 10.0.0.2:8080 active",
            "3 [fd00::3]:8080 terminating",
        ]
        assert shown("--revnat")[1:] == ["1 10.96.0.10:80", "2 [fd00:96::10]:80"]
        assert shown("--source-ranges") == []
