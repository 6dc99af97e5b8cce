"""Find errors and rules without effect in a folder of policies, before they are applied.

``hive policy check`` prints the findings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from cells.policy.compute import PolicyConflictError
from cells.policy.compute.policies import DIRECTIONS
from cells.policy.compute.repository import Repository
from cells.policy.explain.cluster import Cluster, FileLine, KnownPod, Located
from cells.policy.rules import PROTOCOLS, Direction, PeerRule, Rule, RuleSource
from cells.policy.rules.schema import RuleSpec
from cells.policy.selectors import NONE, Selector

__all__ = ["Finding", "check"]


Severity = Literal["error", "warning", "note"]


class Finding(msgspec.Struct, frozen=True, order=True):
    """An error, a warning (a rule without effect), or a note, at a line of a file."""

    place: FileLine
    severity: Severity
    text: str

    @property
    def where(self) -> str:
        """``FILE:LINE``."""
        return str(self.place)


def check(cluster: Cluster) -> list[Finding]:
    """Return every finding, sorted by file and line."""
    findings = [Finding(FileLine(one.file, one.line), "error", one.reason) for one in cluster.bad_files]
    findings += [
        Finding(refused.located.at(refused.error.path), "error", str(refused.error))
        for refused in cluster.refused
    ]
    findings += [Finding(located.at(one.path), "error", one.text) for located, one in cluster.unenforced]
    for located in (*cluster.policies.values(), *(one.located for one in cluster.refused)):
        findings += _unknown_fields(located)
    findings += _subjects(cluster)
    findings += _peers(cluster)
    findings += _conflicts(cluster)
    unresolved_ports = set(_port_names(cluster))
    findings += unresolved_ports
    findings += _without_effect(cluster, {one.place for one in unresolved_ports})
    findings += _unselected(cluster)
    return sorted(set(findings))


def _unknown_fields(located: Located) -> Iterator[Finding]:
    """Report unknown fields, which are dropped, so that the rule selects more or less than intended."""
    object_ = located.object
    if object_["kind"] == "NetworkPolicy":
        return
    specs = [("spec", object_.get("spec"))]
    specs += [(f"specs[{index}]", one) for index, one in enumerate(object_.get("specs") or ())]
    for path, spec in specs:
        for unknown, known in _unknown(spec, RuleSpec, path):
            near = get_close_matches(unknown.rpartition(".")[2], known, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            yield Finding(located.at(unknown), "error", f"{unknown} is not a field of a policy{hint}")


def _unknown(value: Any, type_: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    if isinstance(value, Mapping) and isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        fields = {one.encode_name: one.type for one in msgspec.structs.fields(type_)}
        for name, inner in value.items():
            if name in fields:
                yield from _unknown(inner, _struct_in(fields[name]), f"{path}.{name}")
            else:
                yield f"{path}.{name}", list(fields)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unknown(inner, type_, f"{path}[{index}]")


def _struct_in(hint: Any) -> Any:
    """Return the struct that a field's type is or contains, or None."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    for argument in getattr(hint, "__args__", ()):
        found = _struct_in(argument)
        if found is not None:
            return found
    return None


def _subjects(cluster: Cluster) -> Iterator[Finding]:
    for rule in cluster.repository.rules:
        if rule.selects_nodes or any(rule.subject.matches(pod.labels) for pod in cluster.pods.values()):
            continue
        located = cluster.policies[rule.source]
        yield Finding(
            located.at(rule.path), "warning", f"{rule.source} selects no pod{_closest(rule.subject, cluster)}"
        )


def _peers(cluster: Cluster) -> Iterator[Finding]:
    for rule in cluster.repository.rules:
        for direction in DIRECTIONS:
            for entry in rule.of(direction):
                for peer in entry.peers or ():
                    if not isinstance(peer, Selector) or peer == NONE or not _selects_only_pods(peer):
                        continue
                    if any(peer.matches(labels) for labels in cluster.cache.identities.values()):
                        continue
                    yield Finding(
                        cluster.policies[rule.source].at(entry.path),
                        "warning",
                        f"a peer of {rule.source} selects no endpoint{_closest(peer, cluster)}",
                    )


def _selects_only_pods(selector: Selector) -> bool:
    return not selector.has_source("reserved") and not selector.has_source("cidr")


def _closest(selector: Selector, cluster: Cluster) -> str:
    """Return a hint to the label that was probably intended."""
    known: dict[str, set[str]] = {}
    for pod in cluster.pods.values():
        for label in pod.labels:
            known.setdefault(label.key, set()).add(label.value)
    for one in selector.requirements:
        if one.operator not in ("In", "Exists"):
            continue
        if one.key not in known:
            near = get_close_matches(one.key, known, 1, 0.75)
            return f": no pod has the label {one.key}" + (f"; did you mean {near[0]}?" if near else "")
        if one.values and not set(one.values) & known[one.key]:
            near = get_close_matches(one.values[0], known[one.key], 1, 0.6)
            hint = f"; did you mean {one.key}={near[0]}?" if near else ""
            return f": no pod has {one.key}={one.values[0]}{hint}"
    return ": no pod has all of its labels"


def _port_names(cluster: Cluster) -> Iterator[Finding]:
    """Report port names that resolve to no port: no pod has the name, or pods use it for several ports."""
    for rule in cluster.repository.rules:
        if rule.selects_nodes:
            continue
        for direction in DIRECTIONS:
            pods = [
                pod
                for pod in cluster.pods.values()
                if direction == "egress" or rule.subject.matches(pod.labels)
            ]
            for entry in rule.of(direction) if pods else ():
                named: dict[str, set[int]] = {}
                for range_ in (range_ for ports in entry.ports or () for range_ in ports.ranges):
                    if range_.name:
                        named.setdefault(range_.name, set()).add(range_.protocol)
                for name, protocols in named.items():
                    text = _port_name_error(name, protocols, direction, pods)
                    if text:
                        place = cluster.policies[rule.source].at(entry.path)
                        yield Finding(
                            place, "warning", f"a named port of {rule.source} matches no port: {text}"
                        )


def _port_name_error(name: str, protocols: set[int], direction: Direction, pods: Sequence[KnownPod]) -> str:
    """Return why a port name resolves to no port of these pods; empty if it resolves."""
    place = "it selects" if direction == "ingress" else "of the folder"
    known = {port for pod in pods for port in pod.ports}
    having = [port for port in known if port.name == name]
    if not having:
        near = get_close_matches(name, sorted({port.name for port in known}), 1, 0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"no pod {place} has a port named {name}{hint}"
    matching = [port for port in having if port.protocol in protocols]
    if not matching:
        has = ", ".join(_protocols(port.protocol for port in having))
        return f"pods have a {has} port named {name}, but none for {'/'.join(_protocols(protocols))}"
    numbers = {
        protocol: {port.port for port in matching if port.protocol == protocol} for protocol in protocols
    }
    if direction == "egress" and all(len(some) != 1 for some in numbers.values()):
        several = ", ".join(str(number) for number in sorted({port.port for port in matching}))
        return f"pods have several ports named {name} ({several})"
    return ""


def _protocols(protocols: Iterable[int]) -> list[str]:
    """Return the protocols' names as in rules, without duplicates."""
    names = {number: name for name, number in PROTOCOLS.items()}
    return sorted({names[one] for one in protocols})


def _conflicts(cluster: Cluster) -> Iterator[Finding]:
    for pod in cluster.pods.values():
        for direction in DIRECTIONS:
            try:
                cluster.policy(pod, direction)
            except PolicyConflictError as conflict:
                text = f"the {direction} rules for {pod.name} contradict each other: {conflict}"
                yield Finding(pod.located.at("metadata"), "error", text)


def _without_effect(cluster: Cluster, reported: Collection[FileLine]) -> Iterator[Finding]:
    """Report entries without effect on any packet: other entries allow as much, or a deny precedes them.

    Entries in ``reported`` already have a finding.
    """
    for source, located in cluster.policies.items():
        rules = [rule for rule in cluster.repository.rules if rule.source == source]
        for number, rule in enumerate(rules):
            pods = [pod for pod in cluster.pods.values() if rule.subject.matches(pod.labels)]
            for direction in DIRECTIONS:
                for index, entry in enumerate(rule.of(direction)):
                    if (
                        pods
                        and located.at(entry.path) not in reported
                        and _selects(cluster, entry)
                        and not _has_effect(cluster, pods, source, number, direction, index)
                    ):
                        yield Finding(
                            located.at(entry.path),
                            "warning",
                            f"this rule of {source} has no effect: other rules decide everything it selects",
                        )


def _selects(cluster: Cluster, entry: PeerRule) -> bool:
    """Whether an entry selects peers; an entry that only enforces the direction does not."""
    if entry.peers is None:
        return entry.ports is not None
    known = cluster.cache.identities.values()
    return any(peer.matches(labels) for peer in entry.peers for labels in known)


def _has_effect(
    cluster: Cluster, pods: list[KnownPod], source: RuleSource, number: int, direction: Direction, index: int
) -> bool:
    without = _RepositoryWithout(cluster.repository, source, number, direction, index)
    for pod in pods:
        try:
            whole = cluster.policy(pod, direction).entries()
            left = cluster.policy(pod, direction, without).entries()
        except PolicyConflictError:
            return True
        if whole.keys() != left.keys() or any(not whole[key].same_effect(left[key]) for key in left):
            return True
    return False


class _RepositoryWithout(Repository):
    """A view of a repository without one entry of one rule."""

    def __init__(
        self, repository: Repository, source: RuleSource, number: int, direction: Direction, index: int
    ) -> None:
        super().__init__(repository.context)
        self._whole = repository
        self._left_out = (source, number, direction, index)

    def selecting(self, labels: Any) -> list[Rule]:
        """Return the selecting rules, the affected one without its entry."""
        source, number, direction, index = self._left_out
        found: list[Rule] = []
        seen = 0
        for rule in self._whole.selecting(labels):
            is_affected = rule.source == source and seen == number
            seen += rule.source == source
            found.append(_without(rule, direction, index) if is_affected else rule)
        return found


def _without(rule: Rule, direction: Direction, index: int) -> Rule:
    """Return the rule with one entry that selects no peer; the direction stays enforced."""
    entries = rule.of(direction)
    no_peer = msgspec.structs.replace(entries[index], peers=(), ports=None)
    return msgspec.structs.replace(rule, **{direction: (*entries[:index], no_peer, *entries[index + 1 :])})


def _unselected(cluster: Cluster) -> Iterator[Finding]:
    for pod in cluster.pods.values():
        open_ = [one for one in DIRECTIONS if not cluster.repository.resolve(pod.labels, one).enforced]
        if len(open_) == len(DIRECTIONS):
            text = f"no policy selects {pod.name}: all connections from and to it are allowed"
        elif open_:
            text = f"no policy applies to {open_[0]} of {pod.name}: that direction is open"
        else:
            continue
        yield Finding(pod.located.at("metadata"), "note", text)
