"""Explanations of small random clusters match their rules: of a folder, and by an agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, ip_network
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.api.operations.directory import AgentDirectory, AgentServices
from cells.api.operations.ends import AgentEnds, Neighbourhood, OtherNodes, OwnPolicies
from cells.api.operations.explain import ExplainOperations
from cells.api.operations.status import NodeSummary
from cells.cluster.identity.identities import Identities, Identity, NodeAllocator
from cells.cluster.identity.numbers import CLUSTER
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.cluster.nodes.node import INTERNAL_IP, ClusterNode, NodeIP
from cells.config import AgentConfig
from cells.endpoint import Endpoint, Endpoints, State
from cells.kubernetes.objects.core import ENDPOINT_SLICES, PODS, SERVICES, EndpointSlice, Pod, Service
from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.resources import INDEXES
from cells.policy import PolicySettings
from cells.policy.compute.policies import NamedPodPort
from cells.policy.control import PodNetworks, PolicyView, RulePolicy
from cells.policy.control.objects import PodPorts
from cells.policy.explain import Explained, UnanswerableError, explained
from cells.policy.explain.cluster import Cluster, Located
from cells.policy.explain.directory import Directory, parse_destination, source_of, targets_of
from cells.policy.labels import network_labels, prefix_labels
from cells.policy.maps import NodePolicy
from cells.policy.rules import SUPPORTED
from cells.services import FrontendKey, LoadBalancerOptions, ServingNode
from cells.services.control import ServedFrontend
from cells.services.model.backends import backends_of
from cells.services.model.frontends import frontends_of
from hive.endpoint_slices import endpoint_slices
from hive.policy.folder import FolderDirectory
from lifecycle import Table
from lifecycle.testing import fake
from tests.support.examples import scaled
from tests.unit.policy.plain import (
    OUTSIDE,
    STRANGER,
    TCP,
    UDP,
    WEB,
    pod_selectors,
    reads,
    section,
    selects,
)
from tests.unit.policy.plain import (
    PODS as LABELS_OF,
)

Object = dict[str, Any]
Row = TypeVar("Row", bound=Any)

NAMES = {number: f"shop/{''.join(sorted(labels.values()))}" for number, labels in LABELS_OF.items()} | {
    STRANGER: "other/stranger"
}
ADDRESS = {number: f"10.244.{number % 2}.{number % 100 + 1}" for number in NAMES}
"""Odd ones are of node-1, the others of node-0."""
NODES = ("192.168.7.10", "192.168.7.11")
STRANGERS = {"app": "shop"}
NUMBERS = {"TCP": TCP, "UDP": UDP}
ASKED = ((TCP, 80), (TCP, 443), (UDP, 80), (TCP, 81))
V4 = [address for address in OUTSIDE if ":" not in address]


class Offer(NamedTuple):
    """A service: the pods it selects, and the port that its own port 80 leads to."""

    selector: Mapping[str, str]
    target: int | str
    protocol: str
    headless: bool


offers = st.lists(
    st.builds(
        Offer,
        st.sampled_from(({"app": "shop"}, {"tier": "back"}, {"app": "nobody"}, {"app": "cart"})),
        st.sampled_from((80, 81, 443, "web")),
        st.sampled_from(("TCP", "UDP")),
        st.booleans(),
    ),
    max_size=2,
)
spec = st.builds(
    lambda subject, made: {"endpointSelector": subject, **made},
    pod_selectors,
    st.sampled_from(("ingress", "egress")).flatmap(section),
)
# Without IPv6 the whole of it is the world, with the same identity as IPv4.
one_family = spec.filter(lambda one: "::/0" not in str(one))
clusters = st.tuples(st.lists(one_family, min_size=1, max_size=4), offers)


# The cluster as objects


def pods() -> list[Object]:
    port = {"name": "web", "containerPort": WEB, "protocol": "TCP"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "namespace": NAMES[number].partition("/")[0],
                "name": NAMES[number].partition("/")[2],
                "labels": LABELS_OF.get(number, STRANGERS),
            },
            "spec": {
                "nodeName": f"node-{number % 2}",
                "containers": [{"name": "main", "ports": [port]}],
            },
            "status": {"phase": "Running", "podIPs": [{"ip": ADDRESS[number]}]},
        }
        for number in NAMES
    ]


def policies(specs: Sequence[Object]) -> list[Object]:
    return [
        {
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNetworkPolicy",
            "metadata": {"name": f"p{number}", "namespace": "shop"},
            "spec": one,
        }
        for number, one in enumerate(specs)
    ]


def services(offered: Sequence[Offer]) -> list[Object]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"s{number}", "namespace": "shop"},
            "spec": {
                "type": "ClusterIP" if one.headless else "NodePort",
                "selector": dict(one.selector),
                "clusterIP": "None" if one.headless else f"10.96.0.{number + 1}",
                "ports": [
                    {
                        "name": "p",
                        "port": 80,
                        "targetPort": one.target,
                        "protocol": one.protocol,
                        "nodePort": 0 if one.headless else 30000 + number,
                    }
                ],
            },
        }
        for number, one in enumerate(offered)
    ]


# As one reads it


class Plain:
    """The rules, read one by one."""

    def __init__(self, specs: Sequence[Object], offered: Sequence[Offer]) -> None:
        self._specs, self.offered = specs, offered

    def passes(self, of: int | str, direction: str, peer: int | str, packet: tuple[int, int]) -> bool:
        """Whether the policies that select a pod let a packet pass."""
        selecting = [
            one
            for one in self._specs
            if of in LABELS_OF and selects(one["endpointSelector"], LABELS_OF[int(of)])
        ]
        return reads(selecting, direction, peer, packet)

    def way(self, source: int | str, to: int | str, packet: tuple[int, int], here: Sequence[int]) -> str:
        """How a packet fares where these pods are decided about."""
        if source == to:
            return "allowed"
        sides = ((source, "egress", to), (to, "ingress", source))
        decided = [self.passes(of, way, peer, packet) for of, way, peer in sides if of in here]
        if not all(decided):
            return "denied"
        return "elsewhere" if any(of in NAMES and of not in here for of, _, _ in sides) else "allowed"

    def served(self, service: int) -> list[tuple[int, tuple[int, int]]]:
        """The backends of a service, and the packet they get."""
        offer = self.offered[service]
        packet = NUMBERS[offer.protocol], WEB if offer.target == "web" else int(offer.target)
        if offer.target == "web" and offer.protocol == "UDP":
            return []
        return [
            (pod, packet) for pod, labels in LABELS_OF.items() if offer.selector.items() <= labels.items()
        ]


def overall(ways: Sequence[str]) -> str:
    verdicts = set(ways) or {"denied"}
    if "denied" in verdicts:
        return "mixed" if len(verdicts) > 1 else "denied"
    return "elsewhere" if "elsewhere" in verdicts else "allowed"


# As it is explained


def ask(directory: Directory, source: str, destination: str) -> Explained:
    name, asked = parse_destination(destination)
    client = source_of(directory, source)
    targets = targets_of(directory, name, asked, client)
    return explained(client, name, targets, lambda origin: origin.text)


def packets_of(port: str) -> Iterator[tuple[int, int]]:
    """Those of the packets asked of that a way's ports include; none of any other port."""
    text, _, protocol = port.partition("/")
    for packet in ASKED:
        first, _, last = text.partition("-")
        if NUMBERS.get(protocol) == packet[0] and (
            text == "any port" or int(first) <= packet[1] <= int(last or first)
        ):
            yield packet


class Check(NamedTuple):
    """Asks everything that can be asked, by name and by address, and compares."""

    directory: Directory
    plain: Plain
    here: Sequence[int]
    """Pods that are decided about where it is asked."""

    def everything(self) -> None:
        names: dict[int | str, str] = dict(NAMES.items()) | {address: address for address in V4}
        for source in self.here:
            for to, name in names.items():
                self.one_port(source, to, {name, ADDRESS.get(to, name)} if isinstance(to, int) else {name})
                self.every_port(source, to, name)
            for number in range(len(self.plain.offered)):
                self.service(source, number)
        for address in V4:
            for to in self.here:
                self.one_port(address, to, {NAMES[to]})

    def one_port(self, source: int | str, to: int | str, texts: Iterable[str]) -> None:
        name = NAMES.get(source, source) if isinstance(source, int) else source
        for packet, wanted in self.ways(source, to).items():
            for text in texts:
                found = ask(self.directory, str(name), f"{text}:{port_text(packet)}")
                assert found.verdict == wanted, (name, text, packet, found)

    def every_port(self, source: int, to: int | str, name: str) -> None:
        found = ask(self.directory, NAMES[source], name)
        listed = {packet: way.verdict for way in found.ways for packet in packets_of(way.port)}
        rest = next((way.verdict for way in found.ways if way.port in ("any other port", "any port")), None)
        for packet, wanted in self.ways(source, to).items():
            assert listed.get(packet, rest) == wanted, (NAMES[source], name, packet, found)

    def service(self, source: int, number: int) -> None:
        offer, served = self.plain.offered[number], self.plain.served(number)
        wanted = overall([self.plain.way(source, to, packet, self.here) for to, packet in served])
        texts = [f"svc/shop/s{number}:p", f"shop/s{number}", f"s{number}.shop.svc.cluster.local"]
        if not offer.headless:
            texts += [f"shop/s{number}:80", f"10.96.0.{number + 1}:80/{offer.protocol}"]
        for text in texts if served or not offer.headless else ():
            found = ask(self.directory, NAMES[source], text)
            assert found.verdict == wanted, (NAMES[source], text, offer, found)

    def ways(self, source: int | str, to: int | str) -> dict[tuple[int, int], str]:
        return {packet: self.plain.way(source, to, packet, self.here) for packet in ASKED}


def port_text(packet: tuple[int, int]) -> str:
    return f"{packet[1]}/{'TCP' if packet[0] == TCP else 'UDP'}"


@settings(deadline=None, max_examples=scaled(15))
@given(clusters)
def test_what_is_explained_of_a_folder_is_what_the_rules_say(
    made: tuple[list[Object], list[Offer]],
) -> None:
    specs, offered = made
    objects = [*pods(), *policies(specs), *services(offered)]
    folder = Cluster([Located(one, "all.yaml", {}) for one in objects], SUPPORTED)
    assert not folder.refused
    Check(FolderDirectory(folder), Plain(specs, offered), list(NAMES)).everything()


@settings(deadline=None, max_examples=scaled(15))
@given(clusters)
def test_what_an_agent_explains_is_what_the_rules_say(made: tuple[list[Object], list[Offer]]) -> None:
    specs, offered = made
    Check(agent(specs, offered), Plain(specs, offered), [one for one in NAMES if one % 2]).everything()


SHOP = Offer({"app": "shop"}, 80, "TCP", headless=False)


def test_what_this_node_does_not_decide_is_of_another() -> None:
    """The cart is here, the shops are not: node-0 has one of them."""
    directory = agent([], [SHOP])
    here, there = NAMES[1001], NAMES[1002]
    found = ask(directory, here, f"{there}:80")
    assert (found.verdict, found.headline) == ("elsewhere", "egress allowed here, ingress decided on node-0")
    found = ask(directory, there, f"{here}:80")
    assert found.headline == "ingress allowed here, egress decided on node-0"
    for address in NODES:  # nothing here serves node ports: kube-proxy does, or the other node
        found = ask(directory, here, f"{address}:30000")
        assert found.verdict == "elsewhere", address
        assert found.headline.endswith("ingress decided on the node of a backend of service shop/s0")
        assert ask(directory, here, f"{address}:30001").verdict == "allowed"
    found = ask(directory, here, "10.244.0.200:80")
    assert found.headline == "egress allowed here, ingress decided on node-0"
    assert found.ways[0].note == "the address is in the range of node-0, and this node knows no pod there"


@pytest.mark.parametrize(
    ("source", "destination", "why"),
    [
        (NAMES[1002], NAMES[1004], "neither end is an endpoint of this node: ask the agent of node-0"),
        (NAMES[1001], "10.0.0.0/8", "10.0.0.0/8 is a network: give an address in it"),
        (
            NAMES[1001],
            "a.example.org",
            "a.example.org is neither a pod nor a name that pods of this node have asked",
        ),
        (NAMES[1001], "shop/s0:81", "service shop/s0 has no port 81 (it has: p 80/TCP)"),
        (NAMES[1001], f"{NAMES[1002]}:http", "has no port named http (it has: web)"),
        ("shop/s0", NAMES[1001], "shop/s0 is a service, which opens no connections"),
        (NAMES[1001], "shop/shopfrnt", "did you mean "),
    ],
)
def test_what_cannot_be_answered_is_one_line(source: str, destination: str, why: str) -> None:
    directory = agent([], [SHOP])
    with pytest.raises(UnanswerableError) as refused:
        answer(directory, source, destination)
    assert why in str(refused.value)


def answer(directory: AgentDirectory, source: str, destination: str) -> Explained:
    """As the API answers."""
    name, asked = parse_destination(destination)
    client = source_of(directory, source)
    return ExplainOperations(None, directory).explain(
        client, name, targets_of(directory, name, asked, client)
    )


# An agent of node-1, with tables as its cells fill them


def agent(specs: Sequence[Object], offered: Sequence[Offer]) -> AgentDirectory:
    ports = fake(PodPorts, of=lambda pod: frozenset({NamedPodPort("web", TCP, WEB)}))
    rules = RulePolicy(NodePolicy(PolicySettings()), SUPPORTED, None, ports)
    rules.follow_ports({NamedPodPort("web", TCP, WEB)})
    identities = [Identity(number, labels(number)) for number in NAMES]
    rules.update_identities(identities)
    for one in policies(specs):
        rules.apply(one)
    prefixes = [(prefix, (1 << 24) + n) for n, prefix in enumerate(rules.prefixes, 1) if prefix.prefixlen]
    cidrs = [
        Identity(number, tuple(sorted(map(str, prefix_labels(prefix, dual_stack=False)))))
        for prefix, number in prefixes
    ]
    rules.update_identities(cidrs)
    here = []
    for number in NAMES:
        if number % 2:
            namespace, _, name = NAMES[number].partition("/")
            rules.compute(number, number, labels(number), (namespace, name))
            here.append(endpoint(number))
    claims = [
        entry("0.0.0.0/0", 2),
        entry(f"{NODES[0]}/32", 6),
        entry(f"{NODES[1]}/32", 1),
        *(entry(str(prefix), number) for prefix, number in prefixes),
        *(entry(f"{ADDRESS[number]}/32", number) for number in NAMES),
    ]
    rows = [PODS.convert(one) for one in pods()]
    nodes = filled(
        Table[str, ClusterNode](
            "nodes",
            key=lambda one: one.full_name,
            indexes={"address": lambda one: tuple(each.ip for each in one.addresses)},
        ),
        [node(0, Source.KUBERNETES), node(1, Source.LOCAL)],
    )
    known = filled(Table[int, Identity]("identities", key=lambda one: one.id), [*identities, *cidrs])
    ends = AgentEnds(
        OwnPolicies(PolicyView(rules, None), None, fake(NodeSummary, audited=lambda: False)),
        fake(Endpoints, all=lambda: here),
        Identities(known, NodeAllocator(CLUSTER)),
        filled(Table[str, IpcacheEntry]("ipcache", key=lambda one: one.prefix), claims),
        Neighbourhood(None, None),
        OtherNodes(table(Pod, PODS, rows), None, None, nodes),
        fake(AgentConfig, node_name="node-1"),
    )
    service_rows = [SERVICES.convert(one) for one in services(offered)]
    slices = [
        ENDPOINT_SLICES.convert(each)
        for one in services(offered)
        for each in endpoint_slices(one, pods(), "test")
    ]
    served = [
        ServedFrontend(number, frontend)
        for number, frontend in enumerate(
            frontend
            for service in service_rows
            for frontend in frontends_of(
                service,
                backends_of([one for one in slices if one.service == service.name], OPTIONS),
                ServingNode("node-1"),
                OPTIONS,
            )
        )
    ]
    return AgentDirectory(
        ends,
        AgentServices(
            filled(Table[FrontendKey, ServedFrontend]("services", key=lambda one: one.key), served),
            table(Service, SERVICES, service_rows),
            table(EndpointSlice, ENDPOINT_SLICES, slices),
            OPTIONS,
            None,
            ends,
        ),
    )


OPTIONS = LoadBalancerOptions()


def labels(number: int) -> tuple[str, ...]:
    """The security labels of a pod."""
    own = LABELS_OF.get(number, STRANGERS)
    namespace = NAMES[number].partition("/")[0]
    found = (
        "k8s:io.cilium.k8s.policy.cluster=default",
        f"k8s:io.kubernetes.pod.namespace={namespace}",
        *(f"k8s:{key}={value}" for key, value in own.items()),
    )
    return tuple(sorted(found))


def endpoint(number: int) -> Endpoint:
    namespace, _, name = NAMES[number].partition("/")
    return Endpoint(
        id=number,
        container_id=name,
        container_ifname="eth0",
        ifname="lxc",
        ifindex=7,
        pod_mac=b"",
        host_mac=b"",
        ipv4=IPv4Address(ADDRESS[number]),
        pool="",
        identity=number,
        labels=labels(number),
        pod_name=name,
        pod_namespace=namespace,
        pod_uid="",
        netns_cookie=0,
        state=State.READY,
        created=0.0,
    )


def entry(prefix: str, identity: int) -> IpcacheEntry:
    return IpcacheEntry(prefix=prefix, identity=identity, source=Source.LOCAL, resource="test")


def node(number: int, source: Source) -> ClusterNode:
    return ClusterNode(
        cluster="default",
        name=f"node-{number}",
        source=source,
        addresses=(NodeIP(INTERNAL_IP, IPv4Address(NODES[number])),),
        ipv4_alloc_cidrs=(IPv4Network(f"10.244.{number}.0/24"),),
    )


def table(row: type[Row], kind: Kind[Any], rows: Iterable[Row]) -> Table[tuple[str, str], Row]:
    """A table of objects, as the agent has it."""
    made: Table[tuple[str, str], Row] = Table(
        kind.table, key=lambda one: one.key, indexes=INDEXES.get(kind.qualified)
    )
    return filled(made, rows)


def filled(made: Table[Any, Any], rows: Iterable[Any]) -> Table[Any, Any]:
    with made.txn() as txn:
        txn.replace_all(rows)
    return made


def test_a_matrix_asks_by_networks_where_these_select_pods() -> None:
    """Pods of one identity fare otherwise where their addresses are in different networks."""
    number, cidr = 1001, ip_network("10.244.0.0/24")
    network = Identity(77, tuple(map(str, network_labels(cidr))))
    networks = fake(PodNetworks, matched=True, around=lambda address: network if address in cidr else None)
    claims = [("10.244.1.7", number), ("10.244.0.7", number), ("10.244.0.8", number), ("10.244.0.9", 1002)]
    known = [Identity(one, labels(one)) for one in (number, 1002)]
    ends = AgentEnds(
        OwnPolicies(None, None, fake(NodeSummary, audited=lambda: False)),
        fake(Endpoints, all=lambda: [endpoint(number)]),
        Identities(
            filled(Table[int, Identity]("identities", key=lambda one: one.id), known), NodeAllocator(CLUSTER)
        ),
        filled(
            Table[str, IpcacheEntry]("ipcache", key=lambda one: one.prefix),
            [entry("10.244.0.0/24", number), *(entry(f"{address}/32", one) for address, one in claims)],
        ),
        Neighbourhood(None, networks),
        OtherNodes(table(Pod, PODS, []), None, None, None),
        fake(AgentConfig, node_name="node-1"),
    )
    found = {(one.query, tuple(near.identity for near in one.end.around)) for one in ends.known_pods()}
    assert found == {(f"pod/{NAMES[number]}", (0,)), ("10.244.0.7", (77,)), ("10.244.0.9", (77,))}
