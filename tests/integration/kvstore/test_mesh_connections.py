"""Connections to remote clusters: lost, changed, removed; and which of them a start waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.integration.kvstore.meshed import Mesh, mesh, until
from tests.support.etcd import Etcd
from tests.support.ports import free_port
from tests.unit.ipcache.fakes import FakeIpcacheMap

pytestmark = pytest.mark.anyio

POD, PREFIX, NUMBER = "10.2.0.5", "10.2.0.5/32", 2 << 16 | 300


def announce(etcd: Etcd, cluster: str = "east", number: int = 2, most: int = 255) -> None:
    etcd.put(
        f"cilium/cluster-config/{cluster}",
        f'{{"id":{number},"capabilities":{{"maxConnectedClusters":{most}}}}}',
    )


def address(etcd: Etcd, ip: str = POD, number: int = NUMBER) -> None:
    etcd.put(f"cilium/state/ip/v1/default/{ip}", f'{{"IP":"{ip}","HostIP":"192.0.2.7","ID":{number}}}')


def known(found: Mesh) -> set[str]:
    return set(found.addresses())


async def test_a_configuration_that_goes_while_there_is_no_answer_leaves_nothing(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with mesh(tmp_path, etcd) as found:
        found.configure("east", f"http://127.0.0.1:{free_port()}")
        await until(lambda: "Waiting for initial connection" in found.row("east").status)
        await until(lambda: "east" in found.tables.clusters)
        await found.remove("east")
        announce(etcd)
        address(etcd)
        await found.connect("east")
        await until(lambda: known(found) == {POD})


async def test_a_configuration_that_comes_back_at_once_is_connected_to_again(
    etcd: Etcd, tmp_path: Path
) -> None:
    announce(etcd)
    for number in range(300):
        address(etcd, f"10.2.{number // 250}.{number % 250 + 1}")
    async with mesh(tmp_path, etcd) as found:
        await found.connect("east")
        await until(lambda: len(known(found)) == 300)
        for _ in range(3):
            (found.directory / "east").unlink()
            found.configure("east", found.relay("east").url)
        await found.remove("east")
        await until(lambda: not known(found))
        await found.connect("east")
        await found.ready("east")
        await until(lambda: len(known(found)) == 300)


async def test_changed_contents_connect_to_the_other_etcd_and_compare(etcd: Etcd, tmp_path: Path) -> None:
    other = Etcd(tmp_path / "other")
    other.start()
    try:
        for one in (etcd, other):
            announce(one)
        address(etcd)
        address(etcd, "10.2.0.6")
        address(other, "10.2.0.6")
        async with mesh(tmp_path, etcd) as found:
            await found.connect("east")
            await until(lambda: known(found) == {POD, "10.2.0.6"})
            found.configure("east", other.url)
            await until(lambda: known(found) == {"10.2.0.6"})
            await found.ready("east")
            assert found.row("east").failures == 0, "nothing was lost"
    finally:
        other.kill()


async def test_an_etcd_that_restarts_is_read_again_and_counts_as_a_failure(
    etcd: Etcd, tmp_path: Path
) -> None:
    announce(etcd)
    address(etcd)
    async with mesh(tmp_path, etcd) as found:
        await found.connect("east")
        await found.ready("east")
        await until(lambda: known(found) == {POD})
        etcd.restart()
        etcd.delete(f"cilium/state/ip/v1/default/{POD}")
        address(etcd, "10.2.0.9")
        await until(lambda: known(found) == {"10.2.0.9"})
        await found.ready("east")
        assert found.row("east").failures > 0
        assert found.row("east").last_failure > 0


async def test_history_that_was_compacted_while_away_is_read_anew(etcd: Etcd, tmp_path: Path) -> None:
    announce(etcd)
    address(etcd)
    async with mesh(tmp_path, etcd) as found:
        await found.connect("east")
        await until(lambda: known(found) == {POD})
        await found.disconnect("east")
        assert known(found) == {POD}
        etcd.delete(f"cilium/state/ip/v1/default/{POD}")
        address(etcd, "10.2.0.9")
        etcd.compact()
        await found.connect("east")
        await until(lambda: known(found) == {"10.2.0.9"})


async def test_an_own_name_and_invalid_names_are_not_connected_to(etcd: Etcd, tmp_path: Path) -> None:
    announce(etcd)
    with capture_logs() as logs:
        async with mesh(tmp_path, etcd) as found:
            for name in ("home", "East", "a.b"):
                found.configure(name, etcd.url)
            await found.connect("east")
            await found.ready("east")
            assert {row.name for row in found.tables.clusters.all()} == {"east"}
            assert {row.name for row in found.tables.files.all()} == {"home", "East", "a.b", "east"}
    refused = {one["cluster"] for one in logs if one["event"] == "Cannot connect to remote cluster"}
    assert refused == {"East", "a.b"}


async def test_nodes_and_services_wait_for_a_cluster_of_the_start_and_no_longer_than_the_timeout(
    etcd: Etcd, tmp_path: Path
) -> None:
    dead = {"east": f"http://127.0.0.1:{free_port()}"}
    with capture_logs() as logs:
        async with mesh(tmp_path, etcd, before=dead, clustermesh_sync_timeout="2s") as found:
            assert not found.tables.nodes.initialized
            assert not found.services.initialized
            await until(lambda: found.tables.nodes.initialized)
            await until(lambda: found.services.initialized)
    warned = [one for one in logs if one["event"].startswith("Failed waiting for clustermesh")]
    assert [one["clusters"] for one in warned] == [["east"]]


async def test_what_an_earlier_agent_left_stays_until_the_cluster_has_been_read(
    etcd: Etcd, tmp_path: Path
) -> None:
    kernel = FakeIpcacheMap()
    kernel.put({PREFIX: NUMBER, "10.2.0.6/32": NUMBER})
    port = free_port()
    async with mesh(tmp_path, etcd, before={"east": f"http://127.0.0.1:{port}"}, kernel=kernel) as found:
        await until(lambda: "refused" in found.row("east").status)
        assert set(kernel.rows) == {PREFIX, "10.2.0.6/32"}
        announce(etcd)
        address(etcd)
        found.configure("east", etcd.url)
        await until(lambda: set(kernel.rows) == {PREFIX})
        assert known(found) == {POD}


async def test_a_cluster_that_is_removed_is_not_waited_for(etcd: Etcd, tmp_path: Path) -> None:
    dead = {"east": f"http://127.0.0.1:{free_port()}"}
    async with mesh(tmp_path, etcd, before=dead, clustermesh_sync_timeout="1h") as found:
        await until(lambda: "east" in found.tables.clusters)
        assert not found.tables.nodes.initialized
        await found.remove("east")
        await until(lambda: found.tables.nodes.initialized)


async def test_of_511_clusters_identities_have_15_bits(etcd: Etcd, tmp_path: Path) -> None:
    announce(etcd, number=300, most=511)
    first = 300 << 15
    for number in (first - 1, first, first + 32767, first + 32768):
        labels = f"k8s:n={number};k8s:io.cilium.k8s.policy.cluster=east;"
        etcd.put(f"cilium/state/identities/v1/id/{number}", labels)
    async with mesh(tmp_path, etcd, most=511) as found:
        await found.connect("east")
        await found.ready("east")
        await until(lambda: found.labels().keys() == {first, first + 32767})
        announce(etcd, "west", number=301)
        await found.connect("west")
        await until(
            lambda: "mismatched MaxConnectedClusters; local=511, remote=255" in found.row("west").status
        )


SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: clustermesh-apiserver, namespace: kube-system}
spec: {clusterIP: 127.0.0.1, clusterIPs: [127.0.0.1], ports: [{port: 2379}]}
"""


async def test_an_endpoint_that_names_a_service_is_reached_by_its_cluster_ip(
    etcd: Etcd, tmp_path: Path
) -> None:
    announce(etcd)
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "service.yaml").write_text(SERVICE)
    async with mesh(tmp_path, etcd, manifests_dir=str(manifests)) as found:
        found.configure("east", f"http://clustermesh-apiserver.kube-system.svc:{etcd.port}")
        await found.ready("east")
        assert f"ID: {0:x}" not in found.row("east").status


async def test_the_row_of_a_cluster_has_its_state_in_the_words_of_cilium(etcd: Etcd, tmp_path: Path) -> None:
    announce(etcd)
    async with mesh(tmp_path, etcd) as found:
        await found.connect("east")
        await found.ready("east")
        row: Any = found.row("east")
        url = found.relay("east").url
        head = f"etcd: 1/1 connected, leases=0, lock leases=0, has-quorum=true: {url} - 3."
        assert row.status.startswith(head)
        assert int(row.status.rpartition(", ID: ")[2], 16)
        assert (row.config.required, row.config.retrieved, row.config.cluster_id) == (True, True, 2)
