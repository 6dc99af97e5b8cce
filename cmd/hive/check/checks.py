"""The checks of ``hive check`` and ``hive lab check``: what is tried, in order, and what a failure means.

Every node is tried as sender and receiver once: with a pod of its own, and with one of the next node. What
pods cannot reach of each other is left out of later checks, so that one fault fails one check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final, Literal, NamedTuple, Protocol

from hive.check.objects import OPEN, SHUT, policies, server_name
from hive.check.probe import Answer, Kind, Try

Role = Literal["client", "server", "host", "outside"]
State = Literal["passed", "failed", "skipped"]
WITHIN: Final = 10.0
"""Seconds for which a check tries, before it fails."""
FAMILIES: Final = {4: "IPv4", 6: "IPv6"}
PAGE: Final = "Does the cluster work?"
"""The title of the documentation's page that has a section about each check."""


class Place(NamedTuple):
    """Where the probe runs: a pod of a node, the node itself, or outside."""

    name: str
    node: str
    role: Role
    addresses: tuple[str, ...]

    def address(self, version: int) -> str:
        """Its address of a family, empty without one."""
        return next((one for one in self.addresses if ip_address(one).version == version), "")


class Facts(NamedTuple):
    """What is known before anything is tried."""

    cluster: str
    """Where it is."""
    nodes: tuple[str, ...]
    without_agent: Mapping[str, str]
    """Nodes where no agent is ready, and why."""
    routing: str
    """``native`` or the protocol of the tunnel."""


class Service(NamedTuple):
    """A service in front of one server."""

    addresses: tuple[str, ...]
    port: int
    node_port: int


class Site(Protocol):
    """A cluster that checks run at."""

    namespace: str
    host_port: int
    untried: dict[str, str]
    """Checks that cannot be tried here, and why."""

    def facts(self) -> Facts:
        """Look around. Raises click.ClickException."""

    def start(self, nodes: Sequence[str]) -> tuple[list[Place], dict[str, str]]:
        """Make namespace and pods; the places there are, and nodes where pods did not start, and why."""

    def ask(self, tries: Mapping[Place, Sequence[Try]]) -> Mapping[Place, Sequence[Answer]]:
        """Try from several places at once."""

    def services(self) -> Mapping[str, Service]:
        """The service of each node's server."""

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Create objects of the namespace. Raises click.ClickException."""

    def remove(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Remove them; those that are not there are fine. Raises click.ClickException."""


class Path(NamedTuple):
    """Between pods of two nodes, or from pods of one to the other itself."""

    sender: str
    receiver: str
    version: int
    of: Literal["pods", "nodes"]

    def __str__(self) -> str:
        to = f"node {self.receiver}" if self.of == "nodes" else self.receiver
        return f"{self.sender} → {to} ({FAMILIES.get(self.version, 'by name')})"


class Asked(NamedTuple):
    """One try, from where, and what a person reads of it."""

    place: Place
    to_node: str
    about: str
    what: Try
    who: str = ""
    """Who has to answer, if that matters."""
    by: str = ""
    """The node by which it goes, of a node port."""

    @property
    def path(self) -> Path:
        """The nodes it goes from and to."""
        return Path(self.place.node, self.to_node, _version(self.what["to"]), "pods")

    @property
    def paths(self) -> tuple[Path, ...]:
        """All that has to work for it."""
        return (self.path, self.path._replace(receiver=self.by, of="nodes")) if self.by else (self.path,)


@dataclass
class Result:
    """How a check went."""

    name: str
    title: str
    state: State = "passed"
    tries: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    note: str = ""
    """Why it is skipped, or what it left out."""
    what_to_do: str = ""
    see: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the output."""

    name: str
    title: str
    """With ``{routing}`` where that matters."""
    do: str
    """What to do when it fails."""
    run: Callable[[Run, Result], None]

    @property
    def see(self) -> str:
        """The part of the documentation about it."""
        return f'"{PAGE}" in the documentation, section {self.name}'


class _SkipError(Exception):
    """There is nothing to try."""


class Run:
    """One run over a site."""

    def __init__(self, site: Site, *, outside: str = "", within: float = WITHIN) -> None:
        self.site = site
        self.outside = outside
        self.within = within
        self.facts = site.facts()
        self.wanted = self.facts.nodes
        self.places: dict[tuple[str, Role], Place] = {}
        self.nodes: tuple[str, ...] = ()
        """Those where the pods run."""
        self.versions: tuple[int, ...] = ()
        """Families that all pods have."""
        self.broken: set[Path] = set()
        """What earlier checks found: later ones leave it out."""

    def results(self, names: Sequence[str]) -> Iterator[Result]:
        """Run these checks; each result as it comes. Raises click.ClickException."""
        for check in CHECKS:
            if check.name not in names:
                continue
            result = Result(check.name, check.title.format(routing=self.facts.routing))
            began = time.monotonic()
            try:
                self._run(check, result)
            except _SkipError as error:
                result.state, result.note = "skipped", str(error)
            result.seconds = round(time.monotonic() - began, 3)
            yield result

    def _run(self, check: Check, result: Result) -> None:
        """Raises _SkipError, click.ClickException."""
        if why := self.site.untried.get(check.name):
            raise _SkipError(why)
        if check.name not in NEEDED and not self.nodes:
            raise _SkipError("no pods run: see above")
        check.run(self, result)
        if result.failures:
            result.state, result.what_to_do, result.see = "failed", check.do, check.see

    # ---- what checks are made of

    def place(self, node: str, role: Role) -> Place:
        """A place of a node."""
        return self.places[node, role]

    def pairs(self, *, local: bool = True, remote: bool = True) -> Iterator[tuple[str, str]]:
        """Senders' and receivers' nodes: each with itself, each with the next."""
        for number, node in enumerate(self.nodes):
            if local:
                yield node, node
            if remote and len(self.nodes) > 1:
                yield node, self.nodes[(number + 1) % len(self.nodes)]

    def between(
        self,
        roles: tuple[Role, Role],
        pairs: Iterable[tuple[str, str]],
        kinds: Sequence[Kind] = ("tcp",),
        *,
        port: int = OPEN,
        answers: bool = True,
    ) -> Iterator[Asked]:
        """Tries of every kind and family from one place to another."""
        for sender, receiver in pairs:
            one, other = self.place(sender, roles[0]), self.place(receiver, roles[1])
            for version in self.versions:
                if address := other.address(version):
                    for kind in kinds:
                        what = self.what(kind, address, port, answers=answers)
                        about = f"{_title(one)} → {_title(other)}, {_spot(address, port, kind)}"
                        yield Asked(one, receiver, about, what, other.name if answers else "")

    def what(self, kind: Kind, to: str, port: int = 0, *, answers: bool = True) -> Try:
        """One try, for as long as a check may take."""
        return Try(kind=kind, to=to, port=port, answers=answers, within=self.within)

    def ask(self, result: Result, asked: Iterable[Asked]) -> list[Asked]:
        """Try all that is not known to be broken; what went wrong, which the result gets, too.

        Raises _SkipError where nothing is left to try.
        """
        asked = list(asked)
        wanted = [one for one in asked if self.broken.isdisjoint(one.paths)]
        left = sorted({str(path) for one in asked for path in self.broken.intersection(one.paths)})
        if left:
            result.note = f"without {', '.join(left)}, which fails above"
        if not wanted:
            raise _SkipError(result.note or "there is nothing of the kind to try")
        tries: dict[Place, list[Asked]] = {}
        for one in wanted:
            tries.setdefault(one.place, []).append(one)
        answers = self.site.ask({place: [one.what for one in each] for place, each in tries.items()})
        failed = []
        for place, each in tries.items():
            for one, answer in zip(each, answers[place], strict=True):
                result.tries += 1
                if why := _wrong(one, answer):
                    result.failures.append(f"{one.about}: {why}")
                    failed.append(one)
        return failed


def _wrong(asked: Asked, answer: Answer) -> str:
    if not answer.ok:
        return answer.why
    if asked.who and asked.what["kind"] in {"tcp", "udp", "bulk"} and answer.who != asked.who:
        return f"{answer.who or 'another program'} answers instead of {asked.who}"
    return ""


def _version(to: str) -> int:
    try:
        return ip_address(to).version
    except ValueError:  # a name
        return 0


def _title(place: Place) -> str:
    if place.role == "outside":
        return "outside"
    return f"node {place.node}" if place.role == "host" else place.name


def _spot(address: str, port: int, kind: Kind) -> str:
    if not port:
        return address
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{where} over {'UDP' if kind in {'udp', 'mtu'} else 'TCP'}"


# The checks


def _agents(run: Run, result: Result) -> None:
    result.tries = len(run.wanted)
    result.failures = [f"node {node}: {run.facts.without_agent[node]}" for node in _agentless(run)]


def _agentless(run: Run) -> list[str]:
    return [node for node in run.wanted if node in run.facts.without_agent]


def _pods(run: Run, result: Result) -> None:
    able = [node for node in run.wanted if node not in run.facts.without_agent]
    if not able:
        raise _SkipError("no node has a ready agent")
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
        raise _SkipError("there is one node")
    if len(run.nodes) == 1:
        raise _SkipError("pods run on one node only")
    _reach(run, result, run.pairs(local=False))


def _reach(run: Run, result: Result, pairs: Iterable[tuple[str, str]]) -> None:
    for one in run.ask(result, run.between(("client", "server"), pairs, ("tcp", "udp"))):
        back = one.path._replace(sender=one.path.receiver, receiver=one.path.sender)
        run.broken |= {one.path, back}


def _mtu(run: Run, result: Result) -> None:
    run.ask(result, run.between(("client", "server"), run.pairs(), ("mtu", "bulk")))


def _service(run: Run, result: Result) -> None:
    services = run.site.services()
    asked = []
    for sender, receiver in run.pairs():
        one, server = run.place(sender, "client"), run.place(receiver, "server")
        service = services[receiver]
        for address in service.addresses:
            if _version(address) in run.versions:
                about = f"{_title(one)} → service of {server.name}, {_spot(address, service.port, 'tcp')}"
                what = run.what("tcp", address, service.port)
                asked.append(Asked(one, receiver, about, what, server.name))
    run.ask(result, asked)


def _node_port(run: Run, result: Result) -> None:
    """Each server by the node port of its own node and of the node that asks; also from outside."""
    services = run.site.services()
    asked = []
    for sender, receiver in run.pairs():
        server, port = run.place(receiver, "server"), services[receiver].node_port
        for place in (run.place(sender, "client"), *_outsiders(run)):
            for node in dict.fromkeys((sender, receiver)):
                host = run.place(node, "host")
                for version in sorted({_version(one) for one in services[receiver].addresses}):
                    if port and (address := host.address(version)):
                        spot = _spot(address, port, "tcp")
                        about = f"{_title(place)} → node port of {server.name} at {node}, {spot}"
                        what = run.what("tcp", address, port)
                        if place.role == "outside":  # it enters at the node, and goes on from there
                            asked.append(Asked(place._replace(node=node), receiver, about, what, server.name))
                        else:
                            asked.append(Asked(place, receiver, about, what, server.name, node))
    run.ask(result, asked)


def _outsiders(run: Run) -> list[Place]:
    return [one for one in run.places.values() if one.role == "outside"]


def _dns(run: Run, result: Result) -> None:
    services = run.site.services()
    asked = []
    for node in run.nodes:
        client = run.place(node, "client")
        name = f"{server_name(node)}.{run.site.namespace}.svc"
        asked.append(Asked(client, node, f"{_title(client)}: {name}", run.what("name", name)))
    for one in asked:
        wanted = set(services[one.place.node].addresses)
        answers = run.site.ask({one.place: [one.what]})[one.place]
        result.tries += 1
        found = set(answers[0].who.split())
        if not answers[0].ok:
            result.failures.append(f"{one.about}: {answers[0].why}")
        elif not found or not found <= wanted:
            result.failures.append(f"{one.about}: is {answers[0].who}, expected {' '.join(sorted(wanted))}")


def _host(run: Run, result: Result) -> None:
    to_nodes = run.between(("client", "host"), run.pairs(), port=run.site.host_port)
    to_pods = run.between(("host", "server"), run.pairs())
    failed = run.ask(result, [*to_nodes, *to_pods])
    run.broken |= {one.path._replace(of="nodes") for one in failed if one.place.role == "client"}


def _outside(run: Run, result: Result) -> None:
    asked = []
    for node in run.nodes:
        client = run.place(node, "client")
        for place in _outsiders(run):
            for version in run.versions:
                if address := place.address(version):
                    about = f"{_title(client)} → outside, {_spot(address, OPEN, 'tcp')}"
                    what = run.what("tcp", address, OPEN)
                    asked.append(Asked(client, node, about, what, place.name))
        if run.outside:
            host, port = outside_of(run.outside)
            about = f"{_title(client)} → outside, {_spot(host, port, 'connect')}"
            asked.append(Asked(client, node, about, run.what("connect", host, port)))
    if not asked:
        raise _SkipError("give an address to try: --outside ADDRESS:PORT")
    run.ask(result, asked)


def outside_of(text: str) -> tuple[str, int]:
    """``ADDRESS``, ``ADDRESS:PORT``, ``[ADDRESS]:PORT`` or with a name; without a port it is 443.

    Raises ValueError.
    """
    host, port = text, "443"
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":") or "443"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    wrong = ":" in host and not _version(host)
    if wrong or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: expected ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT")
    return host, int(port)


def _policy(kind: str, direction: str) -> Callable[[Run, Result], None]:
    """The check of one kind of policy and one direction: what it allows passes, and nothing else."""

    def run_policy(run: Run, result: Result) -> None:
        allowed = list(run.between(("client", "server"), run.pairs()))
        port_denied = _denied(run, ("client", "server"), run.pairs(), SHUT)
        if direction == "ingress":  # a server is not a client
            denied = [*port_denied, *_denied(run, ("server", "server"), run.pairs(local=False), OPEN)]
        else:
            denied = [*port_denied, *_denied(run, ("client", "host"), run.pairs(), run.site.host_port)]
        open_before = [_expecting(one, answers=True) for one in denied]
        if run.ask(result, open_before):
            result.failures.append("so the policy could not be tried")
            return
        objects = policies(kind, direction, run.site.namespace)
        try:
            run.site.apply(objects)
            run.ask(result, denied)
            run.ask(result, allowed)
        finally:
            run.site.remove(objects)

    return run_policy


def _denied(
    run: Run, roles: tuple[Role, Role], pairs: Iterable[tuple[str, str]], port: int
) -> Iterator[Asked]:
    for one in run.between(roles, pairs, port=port, answers=False):
        yield one._replace(about=f"{one.about}, denied by the policy")


def _expecting(one: Asked, *, answers: bool) -> Asked:
    about = one.about.replace("denied by the policy", "before the policy")
    return one._replace(about=about, what=Try(**{**one.what, "answers": answers}))


CHECKS: Final = (
    Check(
        "agents",
        "an agent is ready on every node",
        "look at the agent's pod and its log: kubectl -n kube-system describe pod -l k8s-app=cilium",
        _agents,
    ),
    Check(
        "pods",
        "pods start on every node",
        "look at the pod's events, and at the agent of its node: hive status",
        _pods,
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
"""In the order they run: each needs what is above it."""
NAMES: Final = tuple(check.name for check in CHECKS)
NEEDED: Final = ("agents", "pods")
"""Checks that run whatever is chosen."""
