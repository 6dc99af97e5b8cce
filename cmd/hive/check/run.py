"""A run of checks: the places of probes, their tries, and the result of each check.

Paths that are known to be broken are left out of later checks, so that one fault fails one check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final, Literal, NamedTuple, Protocol

from hive.check.objects import OPEN
from hive.check.probe import Answer, Kind, Try

Role = Literal["client", "server", "host", "outside"]
State = Literal["passed", "failed", "skipped"]
WITHIN: Final = 10.0
"""Seconds for which a check tries before it fails."""
FAMILIES: Final = {4: "IPv4", 6: "IPv6"}
PAGE: Final = "Does the cluster work?"
"""Title of the documentation's page with a section about each check."""


class Place(NamedTuple):
    """A place of the probe: a pod of a node, the node itself, or an external host."""

    name: str
    node: str
    role: Role
    addresses: tuple[str, ...]

    def address(self, version: int) -> str:
        """Return its address of a family; empty without one."""
        return next((one for one in self.addresses if ip_address(one).version == version), "")


class Facts(NamedTuple):
    """The properties of the site before any check."""

    cluster: str
    """The address of the cluster."""
    nodes: tuple[str, ...]
    without_agent: Mapping[str, str]
    """Nodes without a ready agent -> reason."""
    routing: str
    """``native`` or the protocol of the tunnel."""


class Service(NamedTuple):
    """A service with one server as its backend."""

    addresses: tuple[str, ...]
    port: int
    node_port: int


class Site(Protocol):
    """A cluster in which checks run."""

    namespace: str
    host_port: int
    untried: dict[str, str]
    """Checks that cannot run here -> reason."""

    def facts(self) -> Facts:
        """Return the properties of the site. Raises click.ClickException."""

    def start(self, nodes: Sequence[str]) -> tuple[list[Place], dict[str, str]]:
        """Create namespace and pods; return the places, and nodes with pods that did not start, with the
        reason.
        """

    def ask(self, tries: Mapping[Place, Sequence[Try]]) -> Mapping[Place, Sequence[Answer]]:
        """Run tries from several places in parallel."""

    def services(self) -> Mapping[str, Service]:
        """Return the service of each node's server."""

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Create objects in the namespace. Raises click.ClickException."""

    def remove(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Delete objects, ignoring missing ones. Raises click.ClickException."""


class Path(NamedTuple):
    """A path between pods of two nodes, or from pods of a node to another node itself."""

    sender: str
    receiver: str
    version: int
    of: Literal["pods", "nodes"]

    def __str__(self) -> str:
        to = f"node {self.receiver}" if self.of == "nodes" else self.receiver
        return f"{self.sender} → {to} ({FAMILIES.get(self.version, 'by name')})"


class PlannedTry(NamedTuple):
    """A try with its source, its title in failures, and the server that must answer."""

    place: Place
    to_node: str
    title: str
    request: Try
    server: str = ""
    """The name of the server that must answer; empty if any may."""
    node_port_node: str = ""
    """The node of the node port, if the try uses one."""

    @property
    def path(self) -> Path:
        """The nodes of source and destination."""
        return Path(self.place.node, self.to_node, ip_version(self.request["to"]), "pods")

    @property
    def paths(self) -> tuple[Path, ...]:
        """All paths that must work for it."""
        return (
            (self.path, self.path._replace(receiver=self.node_port_node, of="nodes"))
            if self.node_port_node
            else (self.path,)
        )


@dataclass
class Result:
    """The result of a check."""

    name: str
    title: str
    state: State = "passed"
    tries: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    note: str = ""
    """Why it was skipped, or what it left out."""
    what_to_do: str = ""
    see: str = ""


@dataclass(frozen=True)
class Check:
    """A check, one line of the output."""

    name: str
    title: str
    """Its title; ``{routing}`` is replaced."""
    do: str
    """What to do if it fails."""
    run: Callable[[Run, Result], None]
    needed: bool = False
    """Whether it always runs."""

    @property
    def see(self) -> str:
        """The section of the documentation about it."""
        return f'"{PAGE}" in the documentation, section {self.name}'


class SkippedError(Exception):
    """The check has nothing to test."""


class Run:
    """One run on a site."""

    def __init__(self, site: Site, *, outside: str = "", within: float = WITHIN) -> None:
        self.site = site
        self.outside = outside
        self.within = within
        self.facts = site.facts()
        self.wanted = self.facts.nodes
        self.places: dict[tuple[str, Role], Place] = {}
        self.nodes: tuple[str, ...] = ()
        """The nodes with running pods."""
        self.versions: tuple[int, ...] = ()
        """The IP families that all pods have."""
        self.broken: set[Path] = set()
        """Paths that earlier checks found broken; later ones leave them out."""

    def results(self, checks: Iterable[Check]) -> Iterator[Result]:
        """Run these checks in order; yield each result. Raises click.ClickException."""
        for check in checks:
            result = Result(check.name, check.title.format(routing=self.facts.routing))
            began = time.monotonic()
            try:
                self._run(check, result)
            except SkippedError as error:
                result.state, result.note = "skipped", str(error)
            result.seconds = round(time.monotonic() - began, 3)
            yield result

    def _run(self, check: Check, result: Result) -> None:
        """Run a check. Raises SkippedError, click.ClickException."""
        if why := self.site.untried.get(check.name):
            raise SkippedError(why)
        if not check.needed and not self.nodes:
            raise SkippedError("no pods run: see above")
        check.run(self, result)
        if result.failures:
            result.state, result.what_to_do, result.see = "failed", check.do, check.see

    # ---- what checks are made of

    def place(self, node: str, role: Role) -> Place:
        """Return a place of a node."""
        return self.places[node, role]

    def pairs(self, *, local: bool = True, remote: bool = True) -> Iterator[tuple[str, str]]:
        """Return pairs of source and destination nodes: each with itself, each with the next."""
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
    ) -> Iterator[PlannedTry]:
        """Return tries of every kind and family from one place to another."""
        for sender, receiver in pairs:
            one, other = self.place(sender, roles[0]), self.place(receiver, roles[1])
            for version in self.versions:
                if address := other.address(version):
                    for kind in kinds:
                        what = self.make_try(kind, address, port, answers=answers)
                        about = (
                            f"{place_title(one)} → {place_title(other)}, {shown_address(address, port, kind)}"
                        )
                        yield PlannedTry(one, receiver, about, what, other.name if answers else "")

    def make_try(self, kind: Kind, to: str, port: int = 0, *, answers: bool = True) -> Try:
        """Return a try with the check's timeout."""
        return Try(kind=kind, to=to, port=port, answers=answers, within=self.within)

    def run_tries(self, result: Result, planned: Iterable[PlannedTry]) -> list[PlannedTry]:
        """Run tries, except those on broken paths; add failures to the result, and return them.

        Raises SkippedError if no try remains.
        """
        planned = list(planned)
        wanted = [one for one in planned if self.broken.isdisjoint(one.paths)]
        left = sorted({str(path) for one in planned for path in self.broken.intersection(one.paths)})
        if left:
            result.note = f"without {', '.join(left)}, which fails above"
        if not wanted:
            raise SkippedError(result.note or "there is nothing of the kind to try")
        tries: dict[Place, list[PlannedTry]] = {}
        for one in wanted:
            tries.setdefault(one.place, []).append(one)
        answers = self.site.ask({place: [one.request for one in each] for place, each in tries.items()})
        failed = []
        for place, each in tries.items():
            for one, answer in zip(each, answers[place], strict=True):
                result.tries += 1
                if why := _fault(one, answer):
                    result.failures.append(f"{one.title}: {why}")
                    failed.append(one)
        return failed


def _fault(planned: PlannedTry, answer: Answer) -> str:
    if not answer.ok:
        return answer.why
    if planned.server and planned.request["kind"] in {"tcp", "udp", "bulk"} and answer.who != planned.server:
        return f"{answer.who or 'another program'} answers instead of {planned.server}"
    return ""


def ip_version(to: str) -> int:
    """Return 4 or 6; 0 for a name."""
    try:
        return ip_address(to).version
    except ValueError:  # a name
        return 0


def place_title(place: Place) -> str:
    """Return the place's name in failures."""
    if place.role == "outside":
        return "outside"
    return f"node {place.node}" if place.role == "host" else place.name


def shown_address(address: str, port: int, kind: Kind) -> str:
    """Return the destination as failures name it."""
    if not port:
        return address
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{where} over {'UDP' if kind in {'udp', 'mtu'} else 'TCP'}"
