"""A run of checks: where the probe can run, what is asked of it there, and what came of each check.

What pods cannot reach of each other is left out of later checks, so that one fault fails one check.
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
        return Path(self.place.node, self.to_node, ip_version(self.what["to"]), "pods")

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
    needed: bool = False
    """It runs whatever is chosen."""

    @property
    def see(self) -> str:
        """The part of the documentation about it."""
        return f'"{PAGE}" in the documentation, section {self.name}'


class SkippedError(Exception):
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

    def results(self, checks: Iterable[Check]) -> Iterator[Result]:
        """Run these checks in order; each result as it comes. Raises click.ClickException."""
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
        """Raises SkippedError, click.ClickException."""
        if why := self.site.untried.get(check.name):
            raise SkippedError(why)
        if not check.needed and not self.nodes:
            raise SkippedError("no pods run: see above")
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
                        about = (
                            f"{place_title(one)} → {place_title(other)}, {shown_address(address, port, kind)}"
                        )
                        yield Asked(one, receiver, about, what, other.name if answers else "")

    def what(self, kind: Kind, to: str, port: int = 0, *, answers: bool = True) -> Try:
        """One try, for as long as a check may take."""
        return Try(kind=kind, to=to, port=port, answers=answers, within=self.within)

    def ask(self, result: Result, asked: Iterable[Asked]) -> list[Asked]:
        """Try all that is not known to be broken; what went wrong, which the result gets, too.

        Raises SkippedError where nothing is left to try.
        """
        asked = list(asked)
        wanted = [one for one in asked if self.broken.isdisjoint(one.paths)]
        left = sorted({str(path) for one in asked for path in self.broken.intersection(one.paths)})
        if left:
            result.note = f"without {', '.join(left)}, which fails above"
        if not wanted:
            raise SkippedError(result.note or "there is nothing of the kind to try")
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


def ip_version(to: str) -> int:
    """4 or 6; 0 for a name."""
    try:
        return ip_address(to).version
    except ValueError:  # a name
        return 0


def place_title(place: Place) -> str:
    """As failures name it."""
    if place.role == "outside":
        return "outside"
    return f"node {place.node}" if place.role == "host" else place.name


def shown_address(address: str, port: int, kind: Kind) -> str:
    """As failures name what is tried there."""
    if not port:
        return address
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{where} over {'UDP' if kind in {'udp', 'mtu'} else 'TCP'}"
