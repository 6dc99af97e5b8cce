"""Every rule in force, by the object it comes from, and the policy of an endpoint made from them.

Objects are replaced whole. The revision rises with every change of an object; translations that follow CIDR
groups or services are made again when those change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, get_args

import msgspec

from cells.policy.compute.endpoint_policy import Filter, filters_of
from cells.policy.labels import FQDNSelector, LabelSet, Prefix
from cells.policy.rules import Direction, PeerRule, PolicyError, PolicyOptions, Rule, RuleSource
from cells.policy.rules.peers import World
from cells.policy.rules.translate import translate
from cells.policy.selectors import ALL, IndexKey, Selector

__all__ = ["Repository", "Resolved", "RulesChanged"]


FIRST_REVISION = 1


class Resolved(msgspec.Struct, frozen=True):
    """What rules say of one direction of the endpoints with some labels."""

    enforced: bool
    filters: tuple[Filter, ...]


class Speaking(NamedTuple):
    """The rules that decide a direction of the endpoints with some labels."""

    enforced: bool
    rules: tuple[Rule, ...]


class RulesChanged(msgspec.Struct, frozen=True, dict=True):
    """A change of the rules: the revision it made, and the rules that went or came."""

    revision: int
    rules: tuple[Rule, ...]

    def concerns(self, labels: LabelSet) -> bool:
        """Whether endpoints with these labels may have another policy now."""
        return any(subject.matches(labels) for subject in self.subjects)

    @cached_property
    def subjects(self) -> frozenset[Selector]:
        """The endpoints that the rules select."""
        return frozenset(rule.subject for rule in self.rules)

    @classmethod
    def all_of(cls, changes: Iterable[RulesChanged]) -> RulesChanged:
        """Several changes as one, at the last one's revision. There is at least one."""
        several = list(changes)
        return cls(several[-1].revision, tuple(rule for one in several for rule in one.rules))


class Repository:
    """Rules by object, in the order in which the objects came."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._objects: dict[RuleSource, Mapping[str, Any]] = {}
        self._rules: dict[RuleSource, list[Rule]] = {}
        self._by_subject: dict[Selector, dict[RuleSource, None]] = {}
        self._by_key: dict[IndexKey | None, dict[Selector, None]] = {}
        """Subjects of rules, by what they may be found by: many rules have the same."""
        self._order: dict[RuleSource, int] = {}
        self._places = count()
        self._names: Counter[FQDNSelector] = Counter()
        """How many entries of rules have each selector of names."""
        self._selecting: dict[tuple[frozenset[Selector], bool], list[Rule]] = {}
        """The rules with any of these subjects, for the node or for pods: most pods share theirs."""
        self.ingested: Counter[tuple[str, str]] = Counter()
        """Rules that were added and deleted, by feature and action: see RuleSpec.features()."""
        self.revision = FIRST_REVISION

    @property
    def rules(self) -> Iterable[Rule]:
        """All rules."""
        return (rule for rules in self._rules.values() for rule in rules)

    @property
    def world(self) -> World:
        """What translations depend on beside the objects."""
        return self._world

    @property
    def options(self) -> PolicyOptions:
        """The options that the rules are translated with."""
        return self._world.options

    @property
    def name_selectors(self) -> Iterable[FQDNSelector]:
        """The selectors of names that rules have."""
        return self._names.keys()

    def copy(self) -> Repository:
        """Another with the same rules, which changes for itself."""
        found = Repository(self._world)
        for source, rules in self._rules.items():
            found._objects[source] = self._objects[source]
            found._replace(source, rules)
        found.revision = self.revision
        return found

    def apply(self, object_: Mapping[str, Any]) -> RulesChanged:
        """Put an object in force in place of the one of its name.

        Raises PolicyError; then the name's earlier rules stay in force.
        """
        rules = translate(object_, self._world)
        source = rules[0].source
        self._count("delete", self.rules_of(source))
        self._count("add", rules)
        self._objects[source] = object_
        return self._replace(source, rules)

    def delete(self, source: RuleSource) -> RulesChanged:
        """Take an object's rules out of force; the revision does not change if there were none."""
        if source not in self._rules:
            return RulesChanged(self.revision, ())
        del self._objects[source]
        self._count("delete", self.rules_of(source))
        return self._replace(source, [])

    def _count(self, action: str, rules: Iterable[Rule]) -> None:
        self.ingested.update((feature, action) for rule in rules for feature in rule.features)

    def _replace(self, source: RuleSource, rules: list[Rule]) -> RulesChanged:
        held = self._rules.get(source, [])
        for subject in {rule.subject for rule in held}:
            sources = self._by_subject[subject]
            del sources[source]
            if sources:
                continue
            del self._by_subject[subject]
            for key in subject.index_keys() or (None,):
                del self._by_key[key][subject]
                if not self._by_key[key]:
                    del self._by_key[key]
        if rules:
            self._rules[source] = rules
            self._order.setdefault(source, next(self._places))
        else:
            self._rules.pop(source, None)
            self._order.pop(source, None)
        for subject in {rule.subject for rule in rules}:
            self._by_subject.setdefault(subject, {})[source] = None
            for key in subject.index_keys() or (None,):
                self._by_key.setdefault(key, {})[subject] = None
        self._names.update(_names(rules))
        for name in _names(held):
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]
        self._selecting.clear()
        self.revision += 1
        return RulesChanged(self.revision, (*held, *rules))

    def is_equivalent(self, world: World) -> bool:
        """Whether rules that name services mean the same with this world as with the one they follow."""
        try:
            return all(
                translate(self._objects[source], world) == rules
                for source, rules in self._rules.items()
                if any(rule.uses_services for rule in rules)
            )
        except PolicyError:
            return False

    def follow(
        self, world: World, groups: Set[str] | None = None
    ) -> tuple[RulesChanged, dict[RuleSource, PolicyError]]:
        """Translate anew what depends on CIDR groups or services; the objects that cannot be, with why.

        Those stay with their earlier rules. With ``groups`` only these have changed.
        """
        self._world = world
        failed: dict[RuleSource, PolicyError] = {}
        changed: list[Rule] = []
        for source in self.followers(groups):
            try:
                new = translate(self._objects[source], world)
            except PolicyError as error:
                failed[source] = error
            else:
                changed += self._replace(source, new).rules
        return RulesChanged(self.revision, tuple(changed)), failed

    def use(self, options: PolicyOptions) -> RulesChanged:
        """Go by other options from now on: every policy may change. Objects are not translated anew."""
        self._world = msgspec.structs.replace(self._world, options=options)
        self.revision += 1
        return RulesChanged(self.revision, tuple(self.rules))

    def sources(self) -> Iterable[RuleSource]:
        """The objects with rules in force."""
        return self._rules.keys()

    def followers(self, groups: Set[str] | None = None) -> list[RuleSource]:
        """The objects with rules that follow CIDR groups or services; with ``groups``, one of these."""

        def follows(rule: Rule) -> bool:
            if groups is None:
                return bool(rule.groups) or rule.uses_services
            return not groups.isdisjoint(rule.groups)

        return [source for source, rules in self._rules.items() if any(map(follows, rules))]

    def object_of(self, source: RuleSource) -> Mapping[str, Any]:
        """The object that is in force by this name."""
        return self._objects[source]

    def rules_of(self, source: RuleSource) -> list[Rule]:
        """Its rules; none where it is not in force."""
        return self._rules.get(source, [])

    def prefixes(self) -> set[Prefix]:
        """Every prefix that a rule names: each needs an identity."""
        return {prefix for rule in self.rules for prefix in rule.prefixes}

    def selecting(self, labels: LabelSet) -> list[Rule]:
        """The rules that select endpoints with these labels, in the order of their objects."""
        is_host = labels.has_reserved("host")
        candidates = {subject for key in (None, *labels.index_keys) for subject in self._by_key.get(key, ())}
        subjects = frozenset(subject for subject in candidates if subject.matches(labels))
        found = self._selecting.get((subjects, is_host))
        if found is None:
            sources = {source for subject in subjects for source in self._by_subject[subject]}
            found = self._selecting[subjects, is_host] = [
                rule
                for source in sorted(sources, key=self._order.__getitem__)
                for rule in self._rules[source]
                if rule.selects_nodes == is_host and rule.subject in subjects
            ]
        return found

    def speaking(self, labels: LabelSet, direction: Direction, selecting: Iterable[Rule]) -> Speaking:
        """The rules that decide a direction, out of those that select the endpoints with these labels."""
        options = self._world.options
        is_host = labels.has_reserved("host")
        if options.enable_policy == "never" or (is_host and not options.enable_host_firewall):
            return Speaking(enforced=False, rules=())
        rules = [rule for rule in selecting if rule.of(direction)]
        always = options.enable_policy == "always" or (options.enforces_init and labels.has_reserved("init"))
        if not always and not rules:
            return Speaking(enforced=False, rules=())
        if not always and not any(rule.default_deny(direction) for rule in rules):
            rules.append(_ALLOW_ALL[direction])
        return Speaking(enforced=True, rules=tuple(rules))

    def resolve(self, labels: LabelSet, direction: Direction) -> Resolved:
        """What the rules say of a direction of the endpoints with these labels.

        Raises PolicyConflictError when two of the rules cannot both hold.
        """
        speaking = self.speaking(labels, direction, self.selecting(labels))
        filters = filters_of(speaking.rules, direction, self._world.options)
        return Resolved(speaking.enforced, tuple(filters.values()))


def _names(rules: Iterable[Rule]) -> Iterator[FQDNSelector]:
    for rule in rules:
        for entry in rule.egress:
            yield from (peer for peer in entry.peers or () if isinstance(peer, FQDNSelector))


def _allow_all(direction: Direction) -> Rule:
    """Keeps a direction open if its rules do not deny by default, so that their proxies still serve."""
    entry = (PeerRule(path="", peers=(ALL,), ports=None),)
    return Rule(
        source=RuleSource("", "", f"allow-any-{direction}"),
        subject=ALL,
        selects_nodes=False,
        ingress=entry if direction == "ingress" else (),
        egress=entry if direction == "egress" else (),
        ingress_default_deny=False,
        egress_default_deny=False,
        labels=(),
        path="",
    )


_ALLOW_ALL = {direction: _allow_all(direction) for direction in get_args(Direction)}
