"""Services from a folder of manifests to the load-balancing maps, through the cells, over fakes."""

from __future__ import annotations

from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest
import structlog

from cells.observe import metrics
from cells.services import (
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    ServiceType,
)
from cells.services.control import ServedFrontend, ServiceConflict
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import ImplementationDelays, MapFullFrontends, served_frontends
from cells.services.control.target import ServicesTarget
from cells.services.control.watch import ServiceWatch
from cells.services.map_entries import (
    BACKENDS,
    MapKey,
    backend_number,
    reverse_nat_key,
    service_key,
)
from cells.services.model.claims import frontends
from lifecycle import Table
from lifecycle.testing import eventually
from tests.support.ports import free_port
from tests.support.scrape import scraped
from tests.unit.services.agent import SERVICE, SLICE, VIP, FakeServiceMaps, agent, backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "service.yaml").write_text(SERVICE)
    (tmp_path / "slice.yaml").write_text(SLICE)
    return tmp_path


async def test_a_service_is_written_to_the_maps_and_deleted_with_its_object(folder: Path) -> None:
    maps = FakeServiceMaps()
    async with agent(folder, maps) as hive:
        await eventually(lambda: maps.slots() == 2)
        assert maps.backends == {backend("10.0.0.1"), backend("10.0.0.2")}
        (served,) = hive.get(Table[FrontendKey, ServedFrontend]).all()
        assert (served.key, str(served.frontend.service)) == (VIP, "shop/web")
        (folder / "slice.yaml").write_text(SLICE.replace(", {addresses: [10.0.0.2]}", ""))
        await eventually(lambda: maps.backends == {backend("10.0.0.1")})
        (folder / "service.yaml").unlink()
        await eventually(lambda: maps.entries == {})
        assert hive.get(Table[FrontendKey, ServedFrontend]).all() == []


async def test_of_two_services_that_claim_an_address_the_loser_is_reported_until_it_is_served(
    tmp_path: Path,
) -> None:
    """A load balancer's address is shared by TCP and UDP of a port, which this agent does not distinguish."""
    maps = FakeServiceMaps()
    for name, number, protocol in (("tcp", 1, "TCP"), ("udp", 2, "UDP")):
        (tmp_path / f"{name}.yaml").write_text(f"""
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.{number}
  clusterIPs: [10.96.0.{number}]
  ports: [{{port: 53, protocol: {protocol}}}]
status: {{loadBalancer: {{ingress: [{{ip: 203.0.113.9}}]}}}}
""")
    with structlog.testing.capture_logs() as logged:
        async with agent(tmp_path, maps, bpf_lb_proto_diff="false", kube_proxy_replacement="true") as hive:
            conflicts, services = (
                hive.get(Table[FrontendKey, ServiceConflict]),
                hive.get(Table[FrontendKey, ServedFrontend]),
            )
            await eventually(lambda: len(conflicts.all()) == 1)
            (row,) = conflicts.all()
            assert (str(row.frontend), str(row.served)) == ("203.0.113.9:53", "shop/tcp")
            assert [str(one) for one in row.unserved] == ["shop/udp"]
            (line,) = [one for one in logged if one["event"].startswith("addresses of a service are served")]
            assert (line["service"], line["served"]) == ("shop/udp", "shop/tcp")
            assert (line["addresses"], "bpf-lb-proto-diff" in line["reason"]) == ("203.0.113.9:53/ANY", True)
            (tmp_path / "tcp.yaml").unlink()
            await eventually(lambda: conflicts.all() == [])
            await eventually(lambda: {str(one.frontend.service) for one in services.all()} == {"shop/udp"})


async def test_the_next_agent_takes_over_what_the_last_installed(folder: Path) -> None:
    maps = FakeServiceMaps()
    async with agent(folder, maps):
        await eventually(lambda: maps.slots() == 2)
    before = dict(maps.entries)
    (folder / "slice.yaml").write_text(SLICE.replace("10.0.0.2", "10.0.0.3"))
    async with agent(folder, maps):
        await eventually(lambda: maps.backends == {backend("10.0.0.1"), backend("10.0.0.3")})
        assert maps.slots() == 2
        retained = [where for where in before if maps.entries.get(where) == before[where]]
        assert reverse_nat_key(1, 4) in retained
    (folder / "service.yaml").unlink()
    async with agent(folder, maps):
        await eventually(lambda: maps.entries == {})


async def test_a_start_with_failing_map_writes_is_retried(folder: Path) -> None:
    """Then the table ``services`` is complete, and what no object asks for is removed."""
    maps = FakeServiceMaps()
    async with agent(folder, maps):
        await eventually(lambda: maps.slots() == 2)
    stray = service_key(FrontendKey(ServiceAddress(ip_address("10.96.0.99"), 80, 6)), 1)
    maps.entries[stray] = bytes(12)
    maps.broken = True
    (folder / "slice.yaml").write_text(SLICE.replace(", {addresses: [10.0.0.2]}", ""))
    async with agent(folder, maps) as hive:
        await eventually(
            lambda: "the map cannot be written" in " ".join(str(one.error) for one in hive.health.snapshot())
        )
        served = hive.get(Table[FrontendKey, ServedFrontend])
        assert not served.initialized
        maps.broken = False
        await eventually(lambda: served.initialized)
        assert (maps.slots(), maps.backends, stray in maps.entries) == (1, {backend("10.0.0.1")}, False)


async def test_without_a_source_of_objects_services_stay_and_a_line_is_logged(folder: Path) -> None:
    maps = FakeServiceMaps()
    async with agent(folder, maps):
        await eventually(lambda: maps.slots() == 2)
    before = dict(maps.entries)
    with structlog.testing.capture_logs() as logged:
        async with agent(None, maps):
            await eventually(lambda: any("no source of objects is set" in line["event"] for line in logged))
            assert maps.entries == before
    async with agent(folder, maps):  # the next one that has a source goes on from there
        (folder / "service.yaml").unlink()
        await eventually(lambda: maps.entries == {})


async def test_service_map_entries_of_a_disabled_family_are_removed(folder: Path) -> None:
    maps = FakeServiceMaps()
    six = FrontendKey(ServiceAddress(ip_address("fd00::10"), 80, 6))
    backend = MapKey(BACKENDS[6], backend_number(9))
    off = [service_key(six, 0), service_key(six, 1), reverse_nat_key(7, 6), backend]
    maps.entries = dict.fromkeys(off, b"\0" * 12)
    async with agent(folder, maps):
        await eventually(lambda: maps.slots() == 2)
        await eventually(lambda: not set(off) & maps.entries.keys())
        assert maps.slots() == 2


async def test_foreign_map_entries_are_corrected() -> None:
    maps, table = FakeServiceMaps(), frontends()
    served = served_frontends()
    target = ServicesTarget(table, LoadBalancer(LoadBalancerOptions(), served), maps, served)
    backends = tuple(Backend(ServiceAddress(ip_address(ip), 8080, 6)) for ip in ("10.0.0.1", "10.0.0.2"))
    frontend = Frontend(VIP, ServiceType.CLUSTER_IP, ServiceName("shop", "web"), backends)
    with table.txn() as rows:
        rows.put(frontend)
    assert await target.observe() == {VIP: frontend}
    wanted = dict(maps.entries)
    del maps.entries[service_key(VIP, 1)]
    maps.entries[service_key(VIP, 0)] = bytes(12)
    maps.entries[service_key(VIP, 9)] = bytes(12)
    assert await target.observe() == {VIP: frontend}
    assert maps.entries == wanted


async def test_a_full_service_map_degrades_health_and_is_retried(folder: Path) -> None:
    maps = FakeServiceMaps()
    maps.full = True
    async with agent(folder, maps) as hive:
        await eventually(
            lambda: (
                "raise bpf-lb-map-max"
                in " ".join(f"{one.message} {one.error}" for one in hive.health.snapshot())
            )
        )
        assert maps.slots() == -1
        map_full = hive.get(MapFullFrontends)
        state, text = map_full.state()
        assert (state, len(map_full)) == ("Warning", 1)
        assert "1 frontend is not served" in text
        maps.full = False
        await eventually(lambda: maps.slots() == 2)
        await eventually(lambda: map_full.state() == ("Ok", ""))
        assert maps.backends == {backend("10.0.0.1"), backend("10.0.0.2")}


async def test_with_session_affinity_clients_stay_with_their_backend(folder: Path) -> None:
    (folder / "service.yaml").write_text(SERVICE + "  sessionAffinity: ClientIP\n")
    for asked, matches in (("true", 2), ("false", 0)):
        maps = FakeServiceMaps()
        async with agent(folder, maps, enable_session_affinity=asked):
            await eventually(lambda: maps.slots() == 2)  # noqa: B023  # of this round
            assert sum("affinity_match" in where.map for where in maps.entries) == matches


async def test_addresses_of_terminating_endpoints_are_counted_each_time_they_come(tmp_path: Path) -> None:
    port = free_port()
    ends = "conditions: {ready: false, serving: true, terminating: true}"
    some = SLICE.replace("{addresses: [10.0.0.1]}", f"{{addresses: [10.0.0.1], {ends}}}")
    both = some.replace("{addresses: [10.0.0.2]}", f"{{addresses: [10.0.0.2], {ends}}}")
    (tmp_path / "service.yaml").write_text(SERVICE)
    (tmp_path / "slice.yaml").write_text(SLICE)
    given = {"prometheus_serve_addr": f":{port}"}
    async with agent(tmp_path, FakeServiceMaps(), [metrics.cell], **given) as hive:
        served = hive.get(Table[FrontendKey, ServedFrontend])
        for number, text in enumerate((SLICE, some, both)):
            (tmp_path / "slice.yaml").write_text(text)
            await eventually(partial(has_terminating, served, number))
        found = await scraped(port)
    assert found["cilium_k8s_terminating_endpoints_events_total"] == {(): 3}


def has_terminating(served: Table[FrontendKey, ServedFrontend], number: int) -> bool:
    """Whether so many backends of the one frontend terminate."""
    states = [one.state for row in served.all() for one in row.frontend.backends]
    return len(states) == 2 and states.count(BackendState.TERMINATING) == number


DELAY = "cilium_service_implementation_delay"


async def test_changes_of_services_are_timed_until_the_maps_have_them(folder: Path) -> None:
    """Those found at the start are not, nor those that change nothing; a full map takes as long as it is."""
    port, maps = free_port(), FakeServiceMaps()
    async with agent(folder, maps, [metrics.cell], prometheus_serve_addr=f":{port}") as hive:
        await eventually(lambda: maps.slots() == 2)
        assert DELAY + "_count" not in await scraped(port)
        (folder / "service.yaml").write_text(SERVICE.replace("name: web,", "labels: {a: b}, name: web,"))
        events = hive.get(ServiceWatch).events
        await eventually(lambda: events["update"] == 1)
        (folder / "slice.yaml").write_text(SLICE.replace(", {addresses: [10.0.0.2]}", ""))
        await eventually(lambda: maps.slots() == 1)
        timed = await scraped(port)
        maps.broken = True
        (folder / "slice.yaml").write_text(SLICE)
        delays = hive.get(ImplementationDelays)
        await eventually(lambda: delays.pending == 1)
        waiting = await scraped(port)
        maps.broken = False
        await eventually(lambda: maps.slots() == 2 and not delays.pending)
        (folder / "service.yaml").unlink()
        await eventually(lambda: maps.slots() == -1 and not delays.pending)
        found = await scraped(port)
    updated, deleted = ("service-updated",), ("service-deleted",)
    assert timed[DELAY + "_count"] == waiting[DELAY + "_count"] == {updated: 1}
    assert found[DELAY + "_count"] == {updated: 2, deleted: 1}
    assert 0 < timed[DELAY + "_sum"][updated] < found[DELAY + "_sum"][updated] < 60
