"""The checks of ``hive check`` and ``hive lab check``: tests in order, and the meaning of failures.

Every node is tested as client and server: with a pod of its own, and with one of the next node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from hive.check.objects import OPEN, SHUT, policies, server_name
from hive.check.probe import Try
from hive.check.run import (
    FAMILIES,
    Check,
    Place,
    PlannedTry,
    Result,
    Role,
    Run,
    SkippedError,
    ip_version,
    place_title,
    shown_address,
)


def _agents(run: Run, result: Result) -> None:
    result.tries = len(run.wanted)
    result.failures = [f"node {node}: {run.facts.without_agent[node]}" for node in _agentless(run)]


def _agentless(run: Run) -> list[str]:
    return [node for node in run.wanted if node in run.facts.without_agent]


def _pods(run: Run, result: Result) -> None:
    able = [node for node in run.wanted if node not in run.facts.without_agent]
    if not able:
        raise SkippedError("no node has a ready agent")
    if len(able) < len(run.wanted):
        result.note = f"without {', '.join(_agentless(run))}, where no agent is ready"
    places, failed = run.site.start(able)
    result.tries = len(able)
    result.failures = [f"node {node}: {why}" for node, why in sorted(failed.items())]
    run.places = {(one.node, one.role): one for one in places}
    run.nodes = tuple(node for node in able if node not in failed)
    pods = [one for one in places if one.role in {"client", "server"} and one.node in run.nodes]
    run.versions = tuple(v for v in FAMILIES if pods and all(one.address(v) for one in pods))


def _pods_same_node(run: Run, result: Result) -> None:
    _reach(run, result, run.pairs(remote=False))


def _pods_other_node(run: Run, result: Result) -> None:
    if len(run.wanted) < 2:
        raise SkippedError("there is one node")
    if len(run.nodes) == 1:
        raise SkippedError("pods run on one node only")
    _reach(run, result, run.pairs(local=False))


def _reach(run: Run, result: Result, pairs: Iterable[tuple[str, str]]) -> None:
    for one in run.run_tries(result, run.between(("client", "server"), pairs, ("tcp", "udp"))):
        back = one.path._replace(sender=one.path.receiver, receiver=one.path.sender)
        run.broken |= {one.path, back}


def _mtu(run: Run, result: Result) -> None:
    run.run_tries(result, run.between(("client", "server"), run.pairs(), ("mtu", "bulk")))


def _service(run: Run, result: Result) -> None:
    services = run.site.services()
    planned = []
    for sender, receiver in run.pairs():
        one, server = run.place(sender, "client"), run.place(receiver, "server")
        service = services[receiver]
        for address in service.addresses:
            if ip_version(address) in run.versions:
                where = shown_address(address, service.port, "tcp")
                about = f"{place_title(one)} → service of {server.name}, {where}"
                what = run.make_try("tcp", address, service.port)
                planned.append(PlannedTry(one, receiver, about, what, server.name))
    run.run_tries(result, planned)


def _node_port(run: Run, result: Result) -> None:
    """Each server by the node port of its own node and of the client's node; also from outside."""
    services = run.site.services()
    planned = []
    for sender, receiver in run.pairs():
        server, port = run.place(receiver, "server"), services[receiver].node_port
        for place in (run.place(sender, "client"), *_outside_places(run)):
            for node in dict.fromkeys((sender, receiver)):
                host = run.place(node, "host")
                for version in sorted({ip_version(one) for one in services[receiver].addresses}):
                    if port and (address := host.address(version)):
                        spot = shown_address(address, port, "tcp")
                        about = f"{place_title(place)} → node port of {server.name} at {node}, {spot}"
                        what = run.make_try("tcp", address, port)
                        if place.role == "outside":  # it enters at the node and is forwarded
                            planned.append(
                                PlannedTry(place._replace(node=node), receiver, about, what, server.name)
                            )
                        else:
                            planned.append(PlannedTry(place, receiver, about, what, server.name, node))
    run.run_tries(result, planned)


def _outside_places(run: Run) -> list[Place]:
    return [one for one in run.places.values() if one.role == "outside"]


def _dns(run: Run, result: Result) -> None:
    services = run.site.services()
    planned = []
    for node in run.nodes:
        client = run.place(node, "client")
        name = f"{server_name(node)}.{run.site.namespace}.svc"
        planned.append(PlannedTry(client, node, f"{place_title(client)}: {name}", run.make_try("name", name)))
    for one in planned:
        wanted = set(services[one.place.node].addresses)
        answers = run.site.ask({one.place: [one.request]})[one.place]
        result.tries += 1
        found = set(answers[0].who.split())
        if not answers[0].ok:
            result.failures.append(f"{one.title}: {answers[0].why}")
        elif not found or not found <= wanted:
            result.failures.append(f"{one.title}: is {answers[0].who}, expected {' '.join(sorted(wanted))}")


def _host(run: Run, result: Result) -> None:
    to_nodes = run.between(("client", "host"), run.pairs(), port=run.site.host_port)
    to_pods = run.between(("host", "server"), run.pairs())
    failed = run.run_tries(result, [*to_nodes, *to_pods])
    run.broken |= {one.path._replace(of="nodes") for one in failed if one.place.role == "client"}


def _outside(run: Run, result: Result) -> None:
    planned = []
    for node in run.nodes:
        client = run.place(node, "client")
        for place in _outside_places(run):
            for version in run.versions:
                if address := place.address(version):
                    about = f"{place_title(client)} → outside, {shown_address(address, OPEN, 'tcp')}"
                    what = run.make_try("tcp", address, OPEN)
                    planned.append(PlannedTry(client, node, about, what, place.name))
        if run.outside:
            host, port = outside_of(run.outside)
            about = f"{place_title(client)} → outside, {shown_address(host, port, 'connect')}"
            planned.append(PlannedTry(client, node, about, run.make_try("connect", host, port)))
    if not planned:
        raise SkippedError("give an address to try: --outside ADDRESS:PORT")
    run.run_tries(result, planned)


def outside_of(text: str) -> tuple[str, int]:
    """Parse ``ADDRESS``, ``ADDRESS:PORT``, ``[ADDRESS]:PORT`` or a name; the default port is 443.

    Raises ValueError.
    """
    host, port = text, "443"
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":") or "443"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    wrong = ":" in host and not ip_version(host)
    if wrong or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: expected ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT")
    return host, int(port)


def _policy(kind: str, direction: str) -> Callable[[Run, Result], None]:
    """Return the check of one kind of policy and one direction: only allowed connections pass."""

    def run_policy(run: Run, result: Result) -> None:
        allowed = list(run.between(("client", "server"), run.pairs()))
        port_denied = _denied(run, ("client", "server"), run.pairs(), SHUT)
        if direction == "ingress":  # a server is not a client
            denied = [*port_denied, *_denied(run, ("server", "server"), run.pairs(local=False), OPEN)]
        else:
            denied = [*port_denied, *_denied(run, ("client", "host"), run.pairs(), run.site.host_port)]
        open_before = [_expecting(one, answers=True) for one in denied]
        if run.run_tries(result, open_before):
            result.failures.append("so the policy could not be tried")
            return
        objects = policies(kind, direction, run.site.namespace)
        try:
            run.site.apply(objects)
            run.run_tries(result, denied)
            run.run_tries(result, allowed)
        finally:
            run.site.remove(objects)

    return run_policy


def _denied(
    run: Run, roles: tuple[Role, Role], pairs: Iterable[tuple[str, str]], port: int
) -> Iterator[PlannedTry]:
    for one in run.between(roles, pairs, port=port, answers=False):
        yield one._replace(title=f"{one.title}, denied by the policy")


def _expecting(one: PlannedTry, *, answers: bool) -> PlannedTry:
    about = one.title.replace("denied by the policy", "before the policy")
    return one._replace(title=about, request=Try(**{**one.request, "answers": answers}))


CHECKS: Final = (
    Check(
        "agents",
        "an agent is ready on every node",
        "look at the agent's pod and its log: kubectl -n kube-system describe pod -l k8s-app=cilium",
        _agents,
        needed=True,
    ),
    Check(
        "pods",
        "pods start on every node",
        "look at the pod's events, and at the agent of its node: hive status",
        _pods,
        needed=True,
    ),
    Check(
        "pods-same-node",
        "pod to pod on the same node",
        "see why packets are dropped there: hive monitor -t drop",
        _pods_same_node,
    ),
    Check(
        "pods-other-node",
        "pod to pod on another node ({routing})",
        "see which nodes reach each other (hive health), then routes or the tunnel's port, and firewalls",
        _pods_other_node,
    ),
    Check(
        "mtu",
        "the largest packets, and a bulk transfer",
        "set mtu (hive config get mtu) to what the network between nodes carries, less what a tunnel adds",
        _mtu,
    ),
    Check(
        "host",
        "pods to nodes, and nodes to pods",
        "look for policies that select nodes or hosts, and for the node's firewall: hive monitor -t drop",
        _host,
    ),
    Check(
        "service",
        "cluster addresses of services",
        "see what the node has of the service: hive service list",
        _service,
    ),
    Check(
        "node-port",
        "node ports of services",
        "see whether node ports are served (hive status --verbose), and the firewall before the nodes",
        _node_port,
    ),
    Check(
        "dns",
        "names of services",
        "look at the DNS server's pods, and whether a policy denies them: hive fqdn cache list",
        _dns,
    ),
    *(
        Check(
            f"{word}policy-{direction}",
            f"{kind}: {direction} allowed and denied",
            "see what the agent has made of policies: hive policy list, hive policy explain FROM TO",
            _policy(kind, direction),
        )
        for word, kind in (("", "NetworkPolicy"), ("cilium-", "CiliumNetworkPolicy"))
        for direction in ("ingress", "egress")
    ),
    Check(
        "outside",
        "pods to what is outside",
        "see masquerading (hive status), the node's own way there, and policies: hive monitor -t drop",
        _outside,
    ),
)
"""The checks in order: each depends on those above it."""
NAMES: Final = tuple(check.name for check in CHECKS)
NEEDED: Final = tuple(check.name for check in CHECKS if check.needed)
"""Checks that always run."""
