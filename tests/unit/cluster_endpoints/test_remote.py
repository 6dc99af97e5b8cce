"""Remote pods in the ipcache, by CiliumEndpoints and CiliumEndpointSlices."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from cells import kubernetes
from cells.cluster import identity, ipcache, remote_endpoints
from cells.cluster.identity.identities import Identities
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, IpcacheTarget, Source
from cells.cluster.nodes.node import INTERNAL_IP, ClusterNode, NodeIP
from cells.cluster.remote_endpoints import EndpointObjects, RemoteEndpoint
from cells.config import AgentConfig, AgentSettings, ChainingMode
from cells.endpoint import KubernetesPods
from cells.kubernetes.objects.cilium_endpoint import SLIM_ENDPOINTS, SlimEndpoint
from cells.kubernetes.resources import Resources
from cells.policy import maps as policy_maps
from cells.policy.maps import PolicyComputer, PolicyMapPool
from cells.remote import endpoints
from lifecycle import Cell, Hive, Lifecycle, Member, ReadTable, Table, invoke, provide, replace, supply
from lifecycle.tables import Initializer
from lifecycle.testing import eventually
from tests.unit.cluster_endpoints.remote import HERE, THERE, cep
from tests.unit.ipcache.fakes import FakeIpcacheMap
from tests.unit.policy_maps.fakes import FakeMaps, FakeRules

pytestmark = pytest.mark.anyio


def ces(name: str, *pods: tuple[str, str, int], node: str = THERE) -> dict[str, Any]:
    return {
        "apiVersion": "cilium.io/v2alpha1",
        "kind": "CiliumEndpointSlice",
        "metadata": {"name": name},
        "namespace": "shop",
        "endpoints": [
            {"name": pod, "id": number, "networking": {"addressing": [{"ipv4": ip}], "node": node}}
            for pod, ip, number in pods
        ],
    }


class Room:
    """The cell over a folder of manifests and a map of a dict."""

    def __init__(self, hive: Hive, folder: Path, kernel: FakeIpcacheMap, rules: FakeRules) -> None:
        self.folder, self.kernel, self.rules = folder, kernel, rules
        self.table = hive.get(Table[tuple[str, str], RemoteEndpoint])
        self.ipcache = hive.get(Ipcache)
        self.identities = hive.get(Identities)
        self.health = hive.health
        self.own = hive.get(AgentConfig).node_name
        self.nodes: Table[str, ClusterNode] = hive.get(ReadTable[str, ClusterNode])

    def put_node(self, name: str, address: str = "", *ranges: str) -> None:
        """A node with a range, or another address."""
        addresses = (NodeIP(INTERNAL_IP, ip_address(address)),) if address else ()
        networks = [ip_network(one) for one in ranges]
        row = ClusterNode(
            cluster="default",
            name=name,
            source=Source.KUBERNETES,
            addresses=addresses,
            ipv4_alloc_cidrs=tuple(one for one in networks if one.version == 4),
            ipv6_alloc_cidrs=tuple(one for one in networks if one.version == 6),
        )
        with self.nodes.txn() as rows:
            rows.put(row)

    def claims(self) -> str:
        """What health reports of refused objects."""
        return " ".join(
            one.message for one in self.health.snapshot() if "refused CiliumEndpoints" in one.message
        )

    def write(self, *objects: dict[str, Any], name: str = "objects") -> None:
        new = self.folder / f".{name}"
        new.write_text("---\n".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")
        new.rename(self.folder / f"{name}.yaml")

    def row(self, prefix: str) -> tuple[int, str] | None:
        found = {str(key): value for key, value in self.kernel.rows.items()}.get(prefix)
        return None if found is None else (found.identity, str(found.tunnel_endpoint))


@asynccontextmanager
async def room(
    folder: Path,
    kernel: FakeIpcacheMap | None = None,
    served: EndpointObjects | None = None,
    *more: Cell,
    **options: str,
) -> AsyncIterator[Room]:
    kernel, rules = kernel or FakeIpcacheMap(), FakeRules()
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())

    def nodes() -> ReadTable[str, ClusterNode]:
        table: Table[str, ClusterNode] = Table(
            "nodes",
            key=lambda node: node.full_name,
            indexes={"address": lambda node: tuple(each.ip for each in node.addresses)},
        )
        with table.txn() as rows:
            own = NodeIP(INTERNAL_IP, ip_address(HERE))
            rows.put(ClusterNode(cluster="default", name="one", source=Source.LOCAL, addresses=(own,)))
            other = NodeIP(INTERNAL_IP, ip_address(THERE))
            rows.put(ClusterNode(cluster="default", name="two", source=Source.KUBERNETES, addresses=(other,)))
            rows.put(ClusterNode(cluster="default", name="three", source=Source.KUBERNETES))
        return table

    def needed(_: Table[tuple[str, str], RemoteEndpoint], __: Ipcache, ___: Identities) -> None: ...

    cells = (identity.cell, ipcache.cell, kubernetes.cell, policy_maps.cell, endpoints.cell)
    fakes = (
        replace(PolicyMapPool, FakeMaps()),
        replace(IpcacheTarget, kernel.target),
        replace(PolicyComputer, rules),
    )
    changed = (replace(EndpointObjects, served),) if served is not None else ()
    settings = {"manifests-dir": str(folder), **{key.replace("_", "-"): one for key, one in options.items()}}
    parts = (*cells, *fakes, *changed, *more, provide(nodes, KubernetesPods), supply(known), invoke(needed))
    hive = Hive(*parts, settings=settings)
    async with hive.started():
        yield Room(hive, folder, kernel, rules)


async def test_with_disable_endpoint_crd_no_ciliumendpoint_is_read_or_waited_for(tmp_path: Path) -> None:
    async with room(tmp_path, served=EndpointObjects(served=False)) as one:
        one.write(cep("web", "10.0.2.7", 300))
        await one.table.wait_initialized()
        assert not one.table.all()
        assert one.row("10.0.2.7/32") is None


async def test_a_pod_of_another_node_has_its_identity_by_way_of_its_node(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        one.put_node("three", "192.0.2.3")
        ports: Any = {"named-ports": [{"name": "http", "port": 80, "protocol": "TCP"}]}
        one.write(cep("web", "10.0.2.7", 300, **ports))
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))
        assert one.row("fd00::7/128") == (300, THERE)
        (row,) = one.table.all()
        assert (row.name, row.node, [port.name for port in row.ports]) == ("web", THERE, ["http"])
        one.write(cep("web", "10.0.2.8", 301, node="192.0.2.3"))
        await eventually(lambda: one.row("10.0.2.8/32") == (301, "192.0.2.3"))
        assert one.row("10.0.2.7/32") is None
        one.write()
        await eventually(lambda: one.row("10.0.2.8/32") is None)
        assert len(one.table) == 0


async def test_policies_know_an_identity_before_packets_have_it(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        one.identities.learn(300, ("k8s:app=web",))
        one.write(cep("web", "10.0.2.7", 300))
        await eventually(lambda: one.row("10.0.2.7/32") is not None)
        assert one.rules.known == [300]


async def test_at_a_start_identities_come_before_the_addresses_that_have_them(tmp_path: Path) -> None:
    unread: list[Initializer] = []

    def reading(identities: Identities) -> None:
        unread.append(identities.table.initializer("objects that are still read"))

    listed: list[Table[tuple[str, str], SlimEndpoint]] = []

    def looking(resources: Resources) -> None:
        listed.append(resources.table(SLIM_ENDPOINTS))

    async with room(tmp_path, None, None, invoke(reading), invoke(looking)) as one:
        one.write(cep("web", "10.0.2.7", 300))
        await eventually(lambda: len(listed[0]) == 1)
        await anyio.wait_all_tasks_blocked()
        assert one.row("10.0.2.7/32") is None
        one.identities.learn(300, ("k8s:app=web",))
        unread[0].done()
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))
        assert one.rules.known == [300]


async def test_the_nodes_own_pods_and_nonsense_are_left_out(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        no_identity = cep("new", "10.0.2.9", 0)
        nonsense = cep("odd", "10.0.2.10", 302)
        nonsense["status"]["networking"]["addressing"] = [{"ipv4": "10.0.2.300"}]
        numbers = (cep("minus", "10.0.2.11", -1), cep("big", "10.0.2.12", 1 << 32))
        keys = [cep(f"key{key}", "10.0.2.13", 304, encryption={"key": key}) for key in (256, -1)]
        own = cep("own", "10.0.1.7", 300, node=HERE)
        one.write(own, no_identity, nonsense, *numbers, *keys, cep("web", "10.0.2.7", 303))
        await eventually(lambda: one.row("10.0.2.7/32") == (303, THERE))
        assert {row.name for row in one.table.all()} == {"web"}


@pytest.mark.parametrize("number", [1, 2, 6, 7, (1 << 24) + 5, (2 << 24) + 5])
async def test_an_endpoint_cannot_make_its_address_the_hosts_or_the_api_servers(
    tmp_path: Path, number: int
) -> None:
    async with room(tmp_path) as one:
        one.write(cep("web", "10.0.2.7", number), cep("init", "10.0.2.8", 5), cep("app", "10.0.2.9", 300))
        await eventually(lambda: one.row("10.0.2.9/32") == (300, THERE))
        assert one.row("10.0.2.8/32") == (5, THERE)
        assert one.row("10.0.2.7/32") is None
        one.write(cep("web", "10.0.2.7", 301), name="objects")
        await eventually(lambda: one.row("10.0.2.7/32") == (301, THERE))


async def test_an_address_that_two_claim_is_the_others_when_one_goes(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        one.put_node("three", "192.0.2.3")
        one.write(cep("first", "10.0.2.7", 300))
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))
        one.write(cep("second", "10.0.2.7", 301, node="192.0.2.3"), name="other")
        await eventually(lambda: one.row("10.0.2.7/32") == (301, "192.0.2.3"))
        one.write(name="other")
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))
        (prefix, *_) = one.table.all()[0].prefixes
        own = IpcacheEntry(prefix=prefix, identity=9, source=Source.LOCAL, resource="x")
        one.ipcache.upsert(own)
        assert one.row("fd00::7/128") == (9, "0.0.0.0"), "what this node knows itself is stronger"


async def test_slices_are_read_instead_where_the_operator_makes_them(tmp_path: Path) -> None:
    async with room(tmp_path, enable_cilium_endpoint_slice="true") as one:
        one.write(cep("alone", "10.0.2.1", 300), ces("a", ("web", "10.0.2.7", 300), ("db", "10.0.2.8", 301)))
        await eventually(lambda: one.row("10.0.2.8/32") == (301, THERE))
        assert one.row("10.0.2.1/32") is None
        one.write(ces("a", ("web", "10.0.2.7", 300)), ces("b", ("db", "10.0.2.8", 301)))  # it moves
        one.write(ces("b", ("db", "10.0.2.8", 301)))
        await eventually(lambda: one.row("10.0.2.7/32") is None)
        assert one.row("10.0.2.8/32") == (301, THERE)


async def test_a_slice_is_believed_about_its_nodes_ranges_alone(tmp_path: Path) -> None:
    async with room(tmp_path, enable_cilium_endpoint_slice="true") as one:
        one.put_node("two", THERE, "10.0.2.0/24")
        one.put_node("three", "192.0.2.3", "10.0.3.0/24")
        one.write(
            ces("a", ("web", "10.0.2.7", 300), ("thief", "10.0.3.8", 301), ("outside", "203.0.113.8", 302)),
            ces("b", ("node", "192.0.2.3", 303), ("host", "10.0.2.9", 1), ("api", "10.0.2.10", 7)),
            ces("c", ("away", "10.0.2.11", 304), ("lost", "203.0.113.7", 305), node="198.51.100.9"),
        )
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))
        await eventually(lambda: "and 6 more" in one.claims())
        assert [row.name for row in one.table.all()] == ["web"]
        one.put_node("four", "198.51.100.9")
        await eventually(lambda: one.row("203.0.113.7/32") == (305, "198.51.100.9"))


async def test_leftovers_stay_until_objects_are_known(tmp_path: Path) -> None:
    kernel = FakeIpcacheMap()
    kernel.put({"10.0.2.7/32": 300, "10.0.2.9/32": 301})
    (tmp_path / "broken.yaml").write_text("{", encoding="utf-8")
    async with room(tmp_path, kernel) as one:
        assert "cluster-endpoints" in one.ipcache.table.uninitialized_by
        one.write(cep("web", "10.0.2.7", 300), name="broken")
        await eventually(lambda: one.row("10.0.2.9/32") is None)
        assert one.row("10.0.2.7/32") == (300, THERE)


async def test_a_map_that_refuses_is_tried_again(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        one.kernel.broken = True
        one.write(cep("web", "10.0.2.7", 300))
        await eventually(lambda: one.kernel.writes)
        one.kernel.broken = False
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))


def pod(name: str, *ips: str, node: str = "two", labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "labels": dict(labels or {"app": "web"})},
        "spec": {"nodeName": node, "containers": [{"name": "main"}]},
        "status": {"phase": "Running", "podIPs": [{"ip": ip} for ip in ips]},
    }


def namespace(**labels: str) -> dict[str, Any]:
    metadata = {"name": "shop", "labels": labels}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


async def test_pods_of_other_nodes_are_known_by_their_manifests(tmp_path: Path) -> None:
    async with room(tmp_path) as one:

        def labels(prefix: str) -> tuple[str, ...]:
            row = one.row(prefix)
            known = one.identities.get(row[0]) if row is not None else None
            return known.labels if known is not None else ()

        one.write(pod("web", "10.0.2.7", "fd00::7"), pod("own", "10.0.1.7", node=str(one.own)))
        await eventually(lambda: "k8s:app=web" in labels("10.0.2.7/32"))
        assert "k8s:io.kubernetes.pod.namespace=shop" in labels("10.0.2.7/32")
        assert one.row("fd00::7/128") == one.row("10.0.2.7/32")
        number = (one.row("10.0.2.7/32") or (0, ""))[0]
        assert one.rules.known == [number], "policies know it before packets have it"
        assert one.row("10.0.1.7/32") is None
        one.write(pod("web", "10.0.2.7", labels={"app": "shop"}), namespace(team="a"))
        await eventually(lambda: "k8s:app=shop" in labels("10.0.2.7/32"))
        await eventually(
            lambda: "k8s:io.cilium.k8s.namespace.labels.team=a" in labels("10.0.2.7/32"),
        )
        assert one.row("fd00::7/128") is None
        assert one.identities.get(number) is None, "nobody has its labels any more"
        one.write(pod("web", "10.0.2.7"), cep("web", "10.0.2.7", 300))
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))
        one.write(pod("web", "10.0.2.7") | {"status": {"phase": "Succeeded", "podIPs": [{"ip": "10.0.2.7"}]}})
        await eventually(lambda: one.row("10.0.2.7/32") is None)


async def test_an_identity_goes_with_its_pod_though_the_kernel_refused_the_address_before(
    tmp_path: Path,
) -> None:
    kernel = FakeIpcacheMap()
    async with room(tmp_path, kernel) as one:
        await one.table.wait_initialized()
        kernel.broken = True
        tried = len(kernel.writes)
        one.write(pod("web", "10.0.2.7"))
        await eventually(lambda: len(kernel.writes) > tried + 1, within=30)
        kernel.broken = False
        await eventually(lambda: one.row("10.0.2.7/32") is not None, within=30)
        number = (one.row("10.0.2.7/32") or (0, ""))[0]
        one.write(namespace())
        await eventually(lambda: one.row("10.0.2.7/32") is None)
        assert one.identities.get(number) is None


async def test_health_names_remote_pods_that_are_not_known(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        one.write(pod("web", "10.0.2.7"), pod("late"))
        wanted = (
            "1 pods of other nodes are known from manifests; 1 have no address in status.podIPs: policies"
            " by labels do not select them; there is no Pod of three: policies by labels do not select pods"
            " there"
        )
        await eventually(lambda: any(row.message == wanted for row in one.health.snapshot()))


async def test_an_endpoint_takes_no_address_of_a_node_and_none_of_another_nodes_range(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        one.put_node("two", THERE, "10.0.2.0/24", "fd00::/64")
        one.put_node("three", "192.0.2.3", "10.0.3.0/24")
        one.write(
            cep("web", "10.0.2.7", 300),
            cep("thief", "10.0.3.8", 301),  # of the range of node three
            cep("node", "192.0.2.3", 302),
            cep("own", HERE, 303),
            cep("stranger", "10.0.3.9", 304, node="198.51.100.9"),
        )
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))
        assert [row.name for row in one.table.all()] == ["web"]
        assert all(one.row(f"{ip}/32") is None for ip in ("10.0.3.8", "192.0.2.3", HERE, "10.0.3.9"))


async def test_an_object_that_names_its_writer_has_that_nodes_address_and_ranges(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        one.put_node("two", THERE, "10.0.2.0/24", "fd00::/64")
        one.put_node("three", "192.0.2.3", "10.0.3.0/24")
        one.write(
            cep("web", "10.0.2.7", 300, written_by="two"),
            cep("forged", "10.0.3.7", 301, node="192.0.2.3", written_by="two"),
            cep("outside", "203.0.113.8", 302, written_by="two"),
            cep("elsewhere", "203.0.113.9", 303, node="203.0.113.1", written_by="two"),
        )
        await eventually(lambda: one.row("10.0.2.7/32") == (300, THERE))
        assert [row.name for row in one.table.all()] == ["web"]


async def test_an_endpoint_is_believed_once_its_node_is_known(tmp_path: Path) -> None:
    async with room(tmp_path) as one:
        one.write(
            cep("new", "10.0.4.7", 300, node="192.0.2.4", written_by="four"), cep("web", "10.0.2.7", 301)
        )
        await eventually(lambda: one.row("10.0.2.7/32") == (301, THERE))
        assert one.row("10.0.4.7/32") is None
        await eventually(
            lambda: "refused CiliumEndpoints: shop/new: its node four is not known" in one.claims()
        )
        one.put_node("four", "192.0.2.4", "10.0.4.0/24")
        await eventually(lambda: not one.claims())
        await eventually(lambda: one.row("10.0.4.7/32") == (300, "192.0.2.4"))
        one.put_node("four", "192.0.2.4", "10.0.5.0/24")
        await eventually(lambda: one.row("10.0.4.7/32") is None)
        assert {row.name for row in one.table.all()} == {"web"}


async def test_with_another_plugins_addresses_ranges_do_not_count(tmp_path: Path) -> None:
    def chained() -> Member[ChainingMode]:
        return ChainingMode("aws-cni")

    async with room(tmp_path, None, None, provide(chained)) as one:
        one.put_node("two", THERE, "10.0.2.0/24")
        one.put_node("three", "192.0.2.3", "10.0.3.0/24")
        one.write(cep("web", "10.0.3.7", 300, written_by="two"), cep("node", "192.0.2.3", 301))
        await eventually(lambda: one.row("10.0.3.7/32") == (300, THERE))
        assert one.row("192.0.2.3/32") is None


async def test_a_node_that_joins_or_moves_has_endpoints_checked_again_that_are_on_it_or_in_its_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    wrong_identity = remote_endpoints._wrong_identity

    def counted(endpoint: RemoteEndpoint) -> str:
        checked.append(endpoint.name)
        return wrong_identity(endpoint)

    monkeypatch.setattr(remote_endpoints, "_wrong_identity", counted)
    async with room(tmp_path) as one:
        one.put_node("three", "192.0.2.3")
        many = [cep(f"web-{number}", f"10.0.2.{number}", 300) for number in range(1, 100)]
        other = cep("other", "10.0.3.107", 301, node="192.0.2.3")
        one.put_node("two", THERE, "10.0.2.0/24")
        one.write(*many, other)
        await eventually(lambda: len(one.table.all()) == 100)
        checked.clear()
        one.put_node("four", "192.0.2.4", "10.0.4.0/24")
        one.put_node("three", "192.0.2.3", "10.0.4.128/25")
        await eventually(lambda: one.row("10.0.3.107/32") is None)
        assert set(checked) == {"other"}
        one.put_node("three", "192.0.2.3", "10.0.3.0/24")
        await eventually(lambda: one.row("10.0.3.107/32") == (301, "192.0.2.3"))
        one.put_node("five", "10.0.2.9")
        await eventually(lambda: one.row("10.0.2.9/32") is None)
        assert set(checked) == {"other", "web-9"}


async def test_many_big_slices_leave_the_event_loop_to_others_in_between(tmp_path: Path) -> None:
    """At the start, and when all of them change at once; a change of a node looks at them as well."""
    slices = {
        at: [(f"web-{at}-{number}", f"10.{at}.1.{number}", 300) for number in range(100)] for at in range(20)
    }

    async def largest(count: int) -> int:
        """How many endpoints others see change at once, until so many have."""
        sizes: list[int] = []
        async for batch in watch:
            sizes.append(len(batch))
            if sum(sizes) >= count:
                break
        return max(sizes)

    async with room(tmp_path, served=EndpointObjects(slices=True)) as one:
        watch = one.table.changes()
        one.write(*(ces(f"ces-{at}", *pods) for at, pods in slices.items()))
        assert await largest(2000) <= 200
        one.write(
            *(ces(f"ces-{at}", *((name, ip, 301) for name, ip, _ in pods)) for at, pods in slices.items())
        )
        assert await largest(2000) <= 200
        one.put_node("two", "192.0.2.9")  # not where they are any more
        assert await largest(2000) <= 200
        assert len(one.table) == 0
