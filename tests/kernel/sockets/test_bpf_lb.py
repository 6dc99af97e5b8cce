"""``hive bpf lb list`` shows the services in the maps."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from cells.maps.map import create_map
from cells.services import BackendState, ServiceFlag
from hive.maps.bpf import command
from tests.kernel.datapath_services.services import VIP, VIP6, Backend
from tests.kernel.sockets.place import serving
from tests.support.cgroups import cgroup
from tests.support.namespaces import in_node
from tests.unit.hive.stub_agent import stub_agent

__all__ = ["cgroup", "in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]


def shown(*options: str, what: tuple[str, ...] = ("list",)) -> list[str]:
    done = CliRunner().invoke(command, ["lb", *what, *options])
    assert done.exit_code == 0, done.output
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


WEB = {
    "frontend-address": {"ip": "10.96.0.10"},
    "flags": {"type": "ClusterIP", "name": "web", "namespace": "shop"},
}
POD = {"cidr": "10.0.0.1/32", "identity": 300, "metadata": {"namespace": "shop", "name": "web-0"}}
NAMES = {
    "/v1/ip": (200, [POD]),
    "/v1/service": (200, [{"spec": WEB}]),
    "/v1/cluster/nodes": (200, {}),
}


async def test_services_are_shown_with_their_backends(in_node: None, cgroup: Path, tmp_path: Path) -> None:
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
        with stub_agent(tmp_path, NAMES) as agent:
            named = shown("--socket", str(agent.socket))
        assert named[:3] == [
            "SERVICE SLOT BACKEND NAME ID FLAGS",
            "10.96.0.10:80/TCP 0 2 backends shop/web 1 ClusterIP",
            "10.96.0.10:80/TCP 1 10.0.0.1:8080 shop/web-0 1",
        ]
        assert shown("--frontends")[1] == "10.96.0.10:80/TCP 0 0 2 0 1 0x0040"
        assert shown("--backends")[1:] == [
            "1 10.0.0.1:8080 active",
            "2 10.0.0.2:8080 active",
            "3 [fd00::3]:8080 terminating",
        ]
        assert shown("--revnat")[1:] == ["1 10.96.0.10:80", "2 [fd00:96::10]:80"]
        assert shown("--source-ranges") == []


async def test_look_up_tables_are_shown(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup, bpf_lb_maglev_table_size="251") as node:
        assert shown(what=("maglev", "list")) == []
        numbers = [1, 2, 3] * 83 + [1, 2]
        for key, outer in ((5, node.maps.maglev4), (6, node.maps.maglev6)):
            assert outer.spec.inner is not None
            with create_map(outer.spec.inner) as inner:
                inner.update(bytes(4), struct.pack("<251I", *numbers))
                outer.update(key.to_bytes(2, "big"), struct.pack("<I", inner.fd))
        table = f"[{' '.join(map(str, numbers))}]"
        assert shown(what=("maglev", "list")) == ["SVC ID LOOKUP TABLE", f"[5]/v4 {table}", f"[6]/v6 {table}"]
        assert shown("6", what=("maglev", "get")) == ["SVC ID LOOKUP TABLE", f"[6]/v6 {table}"]
        done = CliRunner().invoke(command, ["lb", "maglev", "get", "7"])
        assert (done.exit_code, done.output.split(":")[1].split(";")[0]) == (
            1,
            " service 7 has no lookup table",
        )
