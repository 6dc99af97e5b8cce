"""Policies from a folder of manifests to policy maps and the ipcache, through the cells, over fakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells import kvstore
from cells.cluster.identity.numbers import INIT, INIT_LABELS
from cells.cluster.remote_endpoints import RemoteEndpoint
from cells.clustermesh import tables as mesh_tables
from cells.clustermesh.tables import MeshTables, RemoteAddress
from cells.kubernetes.objects.cilium_endpoint import NamedPort
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy.control.objects import RuleSources
from cells.policy.maps import ALLOW_ALL, RealizedPolicy
from cells.policy.rules import SUPPORTED
from cells.policy.rules.peers import TranslationContext
from cells.policy.rules.translate import translate
from cells.remote.shared import SharedTables, shared_pods
from cells.remote.shared_keys import SharedAddress, SharedPort
from lifecycle import Table, invoke, module, provide
from lifecycle.tables import Initializer
from lifecycle.testing import eventually
from tests.unit.policy.room import CART, FRONTEND, HOST, WEB, Room, room

pytestmark = pytest.mark.anyio

EGRESS = PolicyKey(0, egress=True)


CLOSED = {HOST, PolicyKey(0, egress=False)}
"""Egress is, ingress is not."""


def key_of_web(identity: int) -> PolicyKey:
    """What WEB allows."""
    return PolicyKey(identity, egress=False, protocol=6, port=8080, port_bits=16)


async def test_an_endpoint_without_policies_may_do_everything(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        assert node.entries.keys() == {*ALLOW_ALL, HOST}


@pytest.mark.parametrize("source", [True, False])
async def test_with_a_source_of_labels_an_endpoint_without_labels_is_closed(
    tmp_path: Path, source: bool
) -> None:
    async with room(tmp_path if source else "") as node:
        new = node.policies.acquire()
        node.policies.realize(new, INIT, INIT_LABELS)
        assert node.maps.maps[new].keys() == ({HOST} if source else {*ALLOW_ALL})


async def test_a_policy_file_adds_map_entries_and_its_deletion_removes_them(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        web = PolicyKey(frontend.id, egress=False, protocol=6, port=8080, port_bits=16)
        node.write(WEB)
        await eventually(lambda: node.entries.keys() == {web, HOST, EGRESS})
        assert node.policies.status(node.cart).ingress_enforced
        assert [one.valid for one in node.objects.all()] == [True]
        (node.folder / "policy.yaml").unlink()
        await eventually(lambda: node.entries.keys() == {*ALLOW_ALL, HOST})
        assert node.objects.all() == []


@pytest.mark.parametrize("counts", [True, False])
async def test_a_policy_that_leaves_its_direction_open_does_so_where_that_is_served(
    tmp_path: Path, counts: bool
) -> None:
    (tmp_path / "policy.yaml").write_text(f"{WEB}  enableDefaultDeny: {{ingress: false}}\n")
    given = {"manifests-dir": str(tmp_path), "enable-non-default-deny-policies": counts}
    async with room(tmp_path, given) as node:
        await eventually(lambda: [one.valid for one in node.objects.all()] == [True])
        await eventually(lambda: (node.entries.keys() >= {*ALLOW_ALL}) == counts)


async def test_an_identity_that_comes_gets_its_entries_and_loses_them(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(WEB)
        await eventually(lambda: node.entries.keys() == {HOST, EGRESS})
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        web = PolicyKey(frontend.id, egress=False, protocol=6, port=8080, port_bits=16)
        await eventually(lambda: web in node.entries)
        node.identities.release(frontend.id)
        await eventually(lambda: web not in node.entries)


async def test_an_invalid_policy_update_leaves_the_previous_policy_in_force(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(WEB)
        await eventually(lambda: node.entries.keys() == {HOST, EGRESS})
        node.write(WEB.replace('"8080"', '"70000"'))
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        (refused,) = node.objects.all()
        assert "value out of range" in refused.message
        assert refused.path == "spec.ingress[0].toPorts[0].ports[0]"
        assert node.entries.keys() == {HOST, EGRESS}


GROUP = """
apiVersion: cilium.io/v2alpha1
kind: CiliumCIDRGroup
metadata: {name: corp}
spec: {externalCIDRs: [192.0.2.0/24]}
"""
GROUPED = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cart, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: cart}}
  egress: [{toCIDRSet: [{cidrGroupRef: corp, except: [10.0.0.0/8]}]}]
"""


@pytest.mark.parametrize("order", [("group", "policy"), ("policy", "group"), ("both",)])
async def test_an_exception_outside_its_group_closes_the_rule_in_any_order(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    texts = {"group": GROUP, "policy": GROUPED, "both": f"{GROUP}---{GROUPED}"}
    async with room(tmp_path) as node:
        for name in order:
            node.write(texts[name], f"{name}.yaml")
            if name == "policy" and "group" in order[1:]:
                await eventually(lambda: [one.valid for one in node.objects.all()] == [True])
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        (found,) = node.objects.all()
        assert found.path == "spec.egress[0]"
        assert found.message == (
            "allow CIDR prefix 192.0.2.0/24 does not contain exclude CIDR prefix 10.0.0.0/8;"
            " until it is corrected, it allows nothing"
        )
        await eventually(lambda: node.entries.keys() == CLOSED)


async def test_a_network_of_a_group_that_cannot_be_read_leaves_out_nothing_else(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        plain = GROUPED.replace(", except: [10.0.0.0/8]", "")
        node.write(f"{GROUP.replace('192.0.2.0/24', '10.0.0.0/99, 192.0.2.0/24')}---{plain}")
        await eventually(lambda: "192.0.2.0/24" in node.kernel.identities)
        assert node.policy.missing == ""


async def test_a_group_that_is_mended_opens_its_rule_and_not_what_is_refused_since(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(f"{GROUP}---{GROUPED}")
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        node.write(GROUP.replace("192.0.2.0/24", "10.0.0.0/7"), "policy.yaml")
        node.write(GROUPED, "grouped.yaml")
        await eventually(lambda: [one.valid for one in node.objects.all()] == [True])
        await eventually(lambda: "11.0.0.0/8" in node.kernel.identities)
        assert node.health("rules") == []
        node.write(f"{GROUPED}  ingress: [{{toPorts: [{{{UNREADABLE}}}]}}]\n", "grouped.yaml")
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        node.write(GROUP.replace("192.0.2.0/24", "10.0.0.0/6"), "policy.yaml")
        await eventually(lambda: "8.0.0.0/7" in node.kernel.identities)
        assert [one.valid for one in node.objects.all()] == [False]


UNREADABLE = "ports: [{port: '70000', protocol: TCP}]"


@pytest.mark.parametrize(
    ("rule", "denied", "path"),
    [
        (
            f"{{fromEndpoints: [{{matchLabels: {{app: frontend}}}}], toPorts: [{{{UNREADABLE}}}]}}",
            "peer",
            "toPorts[0].ports[0]",
        ),
        (f"{{toPorts: [{{{UNREADABLE}}}]}}", "all", "toPorts[0].ports[0]"),
        ("{fromGroups: [{aws: {region: r}}]}", "all", "fromGroups"),
        ("{fromEndpoints: [{matchLabels: {app: frontend}}], fromCIDR: [192.0.2.0/24]}", "peer", ""),
    ],
)
async def test_a_deny_rule_that_cannot_be_read_denies_all_it_could_mean(
    tmp_path: Path, rule: str, denied: str, path: str
) -> None:
    async with room(tmp_path) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        node.write(f"{WEB}  ingressDeny: [{rule}]\n")
        key = PolicyKey(frontend.id if denied == "peer" else 0, egress=False)
        await eventually(lambda: key in node.entries and node.entries[key].deny)
        await eventually(lambda: bool(node.objects.all()))
        (found,) = node.objects.all()
        assert (found.valid, found.path) == (not path, f"spec.ingressDeny[0].{path}" if path else "")
        if path:
            assert found.message.endswith(
                "; until it is corrected, it denies everything that it might select"
            )
            assert [one.level for one in node.health("rules")] == ["degraded"]
        node.write(WEB)
        await eventually(lambda: node.entries.keys() == {HOST, EGRESS, key_of_web(frontend.id)})
        await eventually(lambda: node.health("rules") == [])


async def test_a_rule_that_is_not_served_allows_nothing_and_the_rest_of_its_object_holds(
    tmp_path: Path,
) -> None:
    kafka = "{toPorts: [{ports: [{port: '9092', protocol: TCP}], rules: {kafka: [{topic: a}]}}]}"
    async with room(tmp_path, proxy=10001) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        node.write(f"{WEB}    - {kafka}\n  egressDeny: [{{toPorts: [{{ports: [{{port: '25'}}]}}]}}]\n")
        await eventually(lambda: key_of_web(frontend.id) in node.entries)
        assert {(key.port, key.egress) for key in node.entries if key.port} == {(8080, False), (25, True)}
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        (found,) = node.objects.all()
        assert found.path == "spec.ingress[1].toPorts[0].rules.kafka"
        assert found.message.endswith("; until it is corrected, it allows nothing")


@pytest.mark.parametrize("mode", ["required", "test-always-fail"])
async def test_who_would_have_to_authenticate_is_denied_also_where_another_rule_allows(
    tmp_path: Path, mode: str
) -> None:
    async with room(tmp_path) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        asked = "{fromEndpoints: [{matchLabels: {app: frontend}}], authentication: {mode: " + mode + "}}"
        node.write(f"{WEB}    - {asked}\n")
        key = PolicyKey(frontend.id, egress=False)
        await eventually(lambda: key in node.entries and node.entries[key].deny)
        assert all(one.deny for key, one in node.entries.items() if key.identity == frontend.id)


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ("{toPorts: [{ports: [{port: '53'}], rules: {dns: [{matchPattern: '*'}]}}]}", "toPorts[0].rules.dns"),
        ("{toFQDNs: [{matchName: example.org}]}", "toFQDNs"),
    ],
)
async def test_names_in_a_policy_of_the_node_itself_are_refused_by_their_field(
    tmp_path: Path, rule: str, path: str
) -> None:
    head = "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {name: host}\n"
    async with room(tmp_path, proxy=10001) as node:
        node.write(f"{head}spec: {{nodeSelector: {{}}, egress: [{rule}]}}\n")
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        (refused,) = node.objects.all()
        assert refused.path == f"spec.egress[0].{path}"
        assert "does not serve the node itself" in refused.message


def test_a_node_is_not_closed_by_what_is_not_served_but_its_deny_rules_hold() -> None:
    spec = {
        "nodeSelector": {},
        "egress": [{"toFQDNs": [{"matchName": "example.org"}]}, {"toEntities": ["cluster"]}],
        "egressDeny": [{"toCIDR": ["192.0.2.0/24"]}],
    }
    host = {"kind": "CiliumClusterwideNetworkPolicy", "metadata": {"name": "host"}, "spec": spec}
    (rule,) = translate(host, TranslationContext(SUPPORTED))
    assert not rule.egress_default_deny
    assert [one.deny for one in rule.egress] == [True]
    assert [one.text.rpartition("; ")[2] for one in rule.unenforced] == [
        "until it is corrected, it leaves nodes open"
    ]


async def test_what_needs_a_proxy_is_refused_by_name(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(
            WEB.replace("ingress:", "egress:").replace(
                "fromEndpoints: [{matchLabels: {app: frontend}}]", "toFQDNs: [{matchName: a.example}]"
            )
        )
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        assert "DNS proxy" in node.objects.all()[0].message


async def test_a_prefix_has_entries_before_packets_get_its_identity(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(WEB.replace("fromEndpoints: [{matchLabels: {app: frontend}}]", "fromCIDR: [192.0.2.0/24]"))
        await eventually(lambda: "192.0.2.0/24" in node.kernel.identities)
        number = node.kernel.identities["192.0.2.0/24"]
        assert PolicyKey(number, egress=False, protocol=6, port=8080, port_bits=16) in node.entries
        (node.folder / "policy.yaml").unlink()
        await eventually(lambda: node.entries.keys() == {*ALLOW_ALL, HOST})
        assert node.kernel.identities == {}


async def test_at_a_start_maps_know_identities_before_packets_have_them(tmp_path: Path) -> None:
    held: list[Initializer] = []
    earlier = PolicyKey(77, egress=True, protocol=6, port=443, port_bits=16)

    def restoring(realized: Table[int, RealizedPolicy]) -> None:
        held.append(realized.initializer("restored endpoints"))

    web = WEB.replace("fromEndpoints: [{matchLabels: {app: frontend}}]", "fromCIDR: [192.0.2.0/24]")
    (tmp_path / "policy.yaml").write_text(web)
    async with room(tmp_path, None, invoke(restoring)) as node:
        node.maps.maps[7] = {earlier: PolicyEntry()}
        node.policies.adopt(7)
        await node.hive.get(RuleSources).known()
        found = node.identities.acquire_now(CART)
        assert found is not None
        node.policies.realize(7, found.id, CART)
        ports = {key.port for key in node.maps.maps[7]}
        assert ports == {0, 8080, 443}, "what is new is there, and what is over still is"
        assert node.policies.status(7).revision == 0
        assert node.kernel.identities == {}
        held[0].done()
        await eventually(lambda: node.policies.status(7).revision == node.policies.revision)
        number = node.kernel.identities["192.0.2.0/24"]
        assert number in {key.identity for key in node.maps.maps[7]}
        assert earlier not in node.maps.maps[7]


SERVICES = """
apiVersion: v1
kind: Service
metadata: {name: database, namespace: shop}
spec: {clusterIP: 10.96.0.9, ports: [{port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: database-1, namespace: shop, labels: {kubernetes.io/service-name: database}}
addressType: IPv4
endpoints: [{addresses: [192.0.2.7]}]
ports: [{port: 5432}]
"""
TO_SERVICES = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: to-database, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: cart}}
  egress: [{toServices: [{k8sService: {serviceName: database, namespace: shop}}]}]
"""


async def test_a_service_without_selector_is_its_backends_addresses_as_they_change(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(TO_SERVICES)
        await eventually(lambda: EGRESS not in node.entries)
        node.write(SERVICES, "services.yaml")
        await eventually(lambda: "192.0.2.7/32" in node.kernel.identities)
        assert PolicyKey(node.kernel.identities["192.0.2.7/32"], egress=True) in node.entries
        node.write(SERVICES.replace("192.0.2.7", "192.0.2.8"), "services.yaml")
        await eventually(lambda: "192.0.2.8/32" in node.kernel.identities)
        await eventually(lambda: "192.0.2.7/32" not in node.kernel.identities)
        revision = node.policy.revision
        other = SERVICES.replace("192.0.2.7", "192.0.2.9").replace("database", "other")
        node.write(other, "other.yaml")
        node.write(WEB)
        await eventually(lambda: [one.name for one in node.objects.all()] == ["cart"])
        assert node.policy.revision == revision + 2  # one policy less, one more, and nothing for services


async def test_an_unrelated_policy_raises_the_revision_and_regenerates_no_endpoint(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(WEB.replace("{app: cart}", "{app: another}"))
        await eventually(lambda: node.policies.status(node.cart).revision == node.policy.revision == 2)
        assert node.regenerated == []
        assert node.entries.keys() == {*ALLOW_ALL, HOST}


def named(port: int, *, name: str = "cart", host_network: bool = False) -> str:
    """A pod with a container port named ``web``."""
    return f"""
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: shop}}
spec:
  hostNetwork: {str(host_network).lower()}
  containers: [{{name: it, ports: [{{name: web, containerPort: {port}}}, {{containerPort: 1}}]}}]
"""


def far(name: str, port: int) -> RemoteEndpoint:
    """A pod of another node with such a port."""
    return RemoteEndpoint(
        key=("shop", name),
        identity=4321,
        node="192.0.2.9",
        addresses="10.9.0.1/32",
        ports=(NamedPort("web", port, "TCP"),),
    )


def ports_of(node: Room, *, egress: bool) -> set[int]:
    return {key.port for key in node.entries if key.egress is egress and key.port}


BY_NAME = WEB.replace('"8080"', "web")
BY_NAME_OUT = BY_NAME.replace("ingress:", "egress:").replace("fromEndpoints", "toEndpoints")


async def test_a_port_by_name_is_the_pods_own_and_follows_it(tmp_path: Path) -> None:
    (tmp_path / "cart.yaml").write_text(named(8080), encoding="utf-8")
    (tmp_path / "policy.yaml").write_text(BY_NAME, encoding="utf-8")
    async with room(tmp_path) as node:
        assert node.identities.acquire_now(FRONTEND) is not None
        node.write(named(9000, name="other"), "other.yaml")
        await eventually(lambda: ports_of(node, egress=False) == {8080})
        node.write(named(8081), "cart.yaml")
        await eventually(lambda: ports_of(node, egress=False) == {8081})
        (node.folder / "cart.yaml").unlink()
        await eventually(lambda: node.entries.keys() == {HOST, EGRESS})


async def test_a_new_endpoint_has_its_named_ports_at_once(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        node.write(BY_NAME + "---" + named(8080, name="late"))
        await eventually(lambda: node.policies.status(node.cart).ingress_enforced)
        cart = node.identities.acquire_now(CART)
        assert cart is not None
        late = node.policies.acquire()
        node.policies.realize(late, cart.id, CART, ("shop", "late"))
        assert (
            PolicyKey(frontend.id, egress=False, protocol=6, port=8080, port_bits=16) in node.maps.maps[late]
        )
        assert ports_of(node, egress=False) == set(), "that of the same identity names no port"


async def test_a_port_by_name_at_egress_is_what_the_clusters_pods_call_so(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        assert node.identities.acquire_now(FRONTEND) is not None
        node.write(BY_NAME_OUT)
        await eventually(lambda: node.policies.status(node.cart).egress_enforced)
        node.write(named(7000, name="in-host-network", host_network=True), "host.yaml")
        node.write(named(8080, name="near"), "near.yaml")
        await eventually(lambda: ports_of(node, egress=True) == {8080})
        for row, ports in ((far("a", 8080), {8080}), (far("b", 9090), set()), (far("b", 8080), {8080})):
            with node.remote.txn() as rows:
                rows.put(row)
            await eventually(lambda ports=ports: ports_of(node, egress=True) == ports)  # type: ignore[misc]
        (node.folder / "near.yaml").unlink()
        with node.remote.txn() as rows:
            rows.delete(("shop", "b"))
            rows.put(far("a", 8081))
        await eventually(lambda: ports_of(node, egress=True) == {8081})


async def test_a_port_by_name_may_be_that_of_pods_in_the_kvstore_and_in_other_clusters(
    tmp_path: Path,
) -> None:
    shared = module("shared", "Pods in the kvstore", provide(SharedTables, shared_pods))
    async with room(tmp_path, None, kvstore.cell, shared, mesh_tables.cell) as node:
        assert node.identities.acquire_now(FRONTEND) is not None
        node.write(BY_NAME_OUT)
        await eventually(lambda: node.policies.status(node.cart).egress_enforced)
        clusters, pods = node.hive.get(MeshTables).addresses, node.hive.get(SharedTables).addresses
        clusters.put(
            RemoteAddress(
                cluster="east", name="10.2.0.5", prefix="10.2.0.5/32", identity=131172, node="192.0.2.2",
                ports=(NamedPort("web", 8080, "TCP"),),
            )
        )  # fmt: skip
        await eventually(lambda: ports_of(node, egress=True) == {8080})
        pods.put(
            SharedAddress(
                address="10.0.0.9", prefix="10.0.0.9/32", identity=300, node="192.0.2.3", value="",
                ports=(SharedPort("web", 9090, "TCP"),),
            )
        )  # fmt: skip
        await eventually(lambda: ports_of(node, egress=True) == set(), within=10)
        clusters.delete(("east", "10.2.0.5"))
        await eventually(lambda: ports_of(node, egress=True) == {9090})
