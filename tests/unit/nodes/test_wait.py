"""The agent's wait for its own pod CIDRs, and the contents of the node table."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from cells.base.addresses import Family
from cells.cluster.nodes.node import ClusterNode
from lifecycle import ReadTable, StartError
from lifecycle.testing import eventually
from tests.unit.nodes.objects import agent, named, ranges

__all__ = ["named"]

pytestmark = pytest.mark.anyio


OWN = """
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {zone: a}}
spec: {podCIDRs: [10.1.0.0/24, 'fd00:1::/112']}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
"""
OTHER = """
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: n2}
spec:
  addresses: [{type: InternalIP, ip: 192.0.2.2}, {type: CiliumInternalIP, ip: 10.2.0.1}]
  ipam: {podCIDRs: [10.2.0.0/24, 10.3.0.0/24]}
"""


async def test_the_range_of_the_node_object_is_what_the_agent_gets(tmp_path: Path) -> None:
    (tmp_path / "n1.yaml").write_text(OWN)
    async with agent(tmp_path, ipam="kubernetes").started() as hive:
        assert ranges(hive) == {"ipv4": ["10.1.0.0/24"]}


async def test_a_start_waits_for_the_pod_cidr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hive = agent(tmp_path, ipam="kubernetes")
    async with anyio.create_task_group() as tasks:
        done = anyio.Event()
        over = anyio.Event()

        async def run() -> None:
            async with hive.started():
                done.set()
                await over.wait()

        tasks.start_soon(run)
        printed: list[str] = []

        def seen(text: str) -> bool:
            printed.extend(capsys.readouterr())  # where the log goes is for whole processes to say
            return text in "".join(printed)

        await eventually(lambda: seen("there is no Node object of this name"))
        (tmp_path / "n1.yaml").write_text(OWN.replace("10.1.0.0/24", "10.1.0"))
        await eventually(lambda: seen("required IPv4 PodCIDR not available"))
        assert seen("Invalid PodCIDR value for node")
        assert not done.is_set()
        (tmp_path / "n1.yaml").write_text(OWN)
        with anyio.fail_after(30):
            await done.wait()
        assert ranges(hive) == {"ipv4": ["10.1.0.0/24"]}
        over.set()


async def test_in_cluster_pool_mode_the_range_comes_from_a_ciliumnode_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "n1.yaml").write_text(OWN)
    async with agent(tmp_path).started() as hive:
        assert ranges(hive) == {}
    (tmp_path / "cn.yaml").write_text(OTHER.replace("n2", "n1"))
    async with agent(tmp_path).started() as hive:
        assert ranges(hive) == {"ipv4": ["10.2.0.0/24", "10.3.0.0/24"]}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ipam": "kubernetes"}, "ipam=kubernetes"),
        ({"k8s_require_ipv4_pod_cidr": "true"}, "k8s-require-ipv4-pod-cidr"),
    ],
)
async def test_a_start_without_a_source_of_the_pod_cidr_is_refused(
    settings: dict[str, str], named: str
) -> None:
    with pytest.raises(StartError, match=f"{named}: no source for this node's range"):
        async with agent(None, **settings).started():
            pass


async def test_a_range_that_is_set_is_not_waited_for(tmp_path: Path) -> None:
    async with agent(tmp_path, ipam="kubernetes", ipv4_range="10.1.0.0/24").started() as hive:
        assert ranges(hive) == {}


UNPRIVILEGED = "http://127.0.0.1:1"


async def test_a_server_that_is_away_is_not_waited_for_where_nothing_depends_on_it() -> None:
    with anyio.fail_after(30):
        async with agent(
            None, k8s_api_server=UNPRIVILEGED, ipam="cluster-pool", ipv4_range="10.1.0.0/24"
        ).started():
            pass
    with anyio.fail_after(30):
        async with agent(
            None, k8s_api_server=UNPRIVILEGED, ipam="kubernetes", ipv4_range="10.1.0.0/24"
        ).started():
            pass


async def test_a_restarted_agent_goes_on_with_the_range_it_was_assigned(tmp_path: Path) -> None:
    retained = tmp_path / "pod-ranges.json"
    retained.write_text('{"ipv4": "10.1.0.0/24", "assigned": ["ipv4"]}')
    with anyio.fail_after(30):
        async with agent(
            None, state_dir=tmp_path, k8s_api_server=UNPRIVILEGED, ipam="kubernetes"
        ).started() as hive:
            assert ranges(hive) == {}, "what is told later is followed"
    retained.write_text('{"ipv4": "10.1.0.0/24"}')
    with anyio.move_on_after(0.5) as waiting:
        async with agent(None, state_dir=tmp_path, k8s_api_server=UNPRIVILEGED, ipam="kubernetes").started():
            pass
    assert waiting.cancelled_caught, "a range that was chosen here is none that Kubernetes knows of"


async def test_the_table_holds_this_node_and_the_others_and_follows(tmp_path: Path) -> None:
    (tmp_path / "n1.yaml").write_text(OWN)
    (tmp_path / "n2.yaml").write_text(OTHER)
    async with agent(tmp_path, ipam="kubernetes").started() as hive:
        table = hive.get(ReadTable[str, ClusterNode])
        await table.wait_initialized()
        own = table.get("default/n1")
        other = table.get("default/n2")
        assert own is not None
        assert other is not None
        assert own.local
        assert str(own.router_ip(Family.IPV4)) == "10.1.0.9"
        assert own.labels == {"zone": "a"}
        assert [str(each) for each in own.all_cidrs()] == ["10.1.0.0/24"]
        assert (other.source, str(other.router_ip(Family.IPV4))) == ("custom-resource", "10.2.0.1")
        assert [str(each) for each in other.all_cidrs()] == ["10.2.0.0/24", "10.3.0.0/24"]
        (tmp_path / "n2.yaml").write_text(OTHER.replace("192.0.2.2", "192.0.2.3"))
        with anyio.fail_after(30):
            await table.wait_for("default/n2", lambda row: str(row.node_ip(Family.IPV4)) == "192.0.2.3")
        (tmp_path / "n2.yaml").unlink()
        with anyio.fail_after(30):
            await table.wait_removed("default/n2")
