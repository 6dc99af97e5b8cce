"""The policy repository: the rules of all policy objects, by object, and their selection for an endpoint.

Objects are replaced as a whole. Every change of an object increments the revision. Rules that refer to CIDR
groups or services are translated again when those change.

Source: Cilium's pkg/policy/repository.go.
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
from cells.policy.rules.peers import TranslationContext
from cells.policy.rules.translate import translate
from cells.policy.selectors import ALL, IndexKey, Selector

__all__ = ["Repository", "Resolved", "RulesChanged"]


FIRST_REVISION = 1


class Resolved(msgspec.Struct, frozen=True):
    """Enforcement and filters of one direction of endpoints with the same labels."""

    enforced: bool
    filters: tuple[Filter, ...]


class DirectionRules(NamedTuple):
    """The rules that apply to one direction of endpoints with the same labels, and whether it is enforced."""

    enforced: bool
    rules: tuple[Rule, ...]


class RulesChanged(msgspec.Struct, frozen=True, dict=True):
    """A change of the rules: its revision, and the rules that it removed or added."""

    revision: int
    rules: tuple[Rule, ...]

    def concerns(self, labels: LabelSet) -> bool:
        """Whether the change may affect the policy of endpoints with these labels."""
        return any(subject.matches(labels) for subject in self.subjects)

    @cached_property
    def subjects(self) -> frozenset[Selector]:
        """The subject selectors of the changed rules."""
        return frozenset(rule.subject for rule in self.rules)

    @classmethod
    def combined(cls, changes: Iterable[RulesChanged]) -> RulesChanged:
        """Combine at least one change into one, with the last revision."""
        several = list(changes)
        return cls(several[-1].revision, tuple(rule for one in several for rule in one.rules))


class Repository:
    """The rules of policy objects, in the order in which the objects were added."""

    def __init__(self, context: TranslationContext) -> None:
        self._context = context
        self._objects: dict[RuleSource, Mapping[str, Any]] = {}
        self._rules: dict[RuleSource, list[Rule]] = {}
        self._by_subject: dict[Selector, dict[RuleSource, None]] = {}
        self._subjects_by_key: dict[IndexKey | None, dict[Selector, None]] = {}
        """Index of the rules' subjects, by a selector's index keys: many rules have the same subject."""
        self._order: dict[RuleSource, int] = {}
        self._next_position = count()
        self._fqdn_uses: Counter[FQDNSelector] = Counter()
        """Number of rule entries with each FQDN selector."""
        self._selecting_cache: dict[tuple[frozenset[Selector], bool], list[Rule]] = {}
        """Rules by a set of subjects and whether they select nodes: most pods match the same subjects."""
        self.ingested: Counter[tuple[str, str]] = Counter()
        """Number of added and deleted rules, by feature and action; see RuleSpec.features()."""
        self.revision = FIRST_REVISION

    @property
    def rules(self) -> Iterable[Rule]:
        """All rules."""
        return (rule for rules in self._rules.values() for rule in rules)

    @property
    def context(self) -> TranslationContext:
        """The inputs of translation besides the objects: options, CIDR groups, services."""
        return self._context

    @property
    def options(self) -> PolicyOptions:
        """The options that rules are translated with."""
        return self._context.options

    @property
    def name_selectors(self) -> Iterable[FQDNSelector]:
        """The FQDN selectors in rules."""
        return self._fqdn_uses.keys()

    def copy(self) -> Repository:
        """Return an independent copy with the same rules."""
        found = Repository(self._context)
        for source, rules in self._rules.items():
            found._objects[source] = self._objects[source]
            found._replace(source, rules)
        found.revision = self.revision
        return found

    def apply(self, object_: Mapping[str, Any]) -> RulesChanged:
        """Add or replace a policy object.

        Raises PolicyError; then the previous object's rules stay in force.
        """
        rules = translate(object_, self._context)
        source = rules[0].source
        self._count("delete", self.rules_of(source))
        self._count("add", rules)
        self._objects[source] = object_
        return self._replace(source, rules)

    def delete(self, source: RuleSource) -> RulesChanged:
        """Remove an object's rules. The revision is unchanged if there are none."""
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
                del self._subjects_by_key[key][subject]
                if not self._subjects_by_key[key]:
                    del self._subjects_by_key[key]
        if rules:
            self._rules[source] = rules
            self._order.setdefault(source, next(self._next_position))
        else:
            self._rules.pop(source, None)
            self._order.pop(source, None)
        for subject in {rule.subject for rule in rules}:
            self._by_subject.setdefault(subject, {})[source] = None
            for key in subject.index_keys() or (None,):
                self._subjects_by_key.setdefault(key, {})[subject] = None
        self._fqdn_uses.update(_fqdn_selectors(rules))
        for name in _fqdn_selectors(held):
            self._fqdn_uses[name] -= 1
            if not self._fqdn_uses[name]:
                del self._fqdn_uses[name]
        self._selecting_cache.clear()
        self.revision += 1
        return RulesChanged(self.revision, (*held, *rules))

    def is_equivalent(self, context: TranslationContext) -> bool:
        """Whether rules that refer to services translate to the same rules with this context."""
        try:
            return all(
                translate(self._objects[source], context) == rules
                for source, rules in self._rules.items()
                if any(rule.uses_services for rule in rules)
            )
        except PolicyError:
            return False

    def follow(
        self, context: TranslationContext, groups: Set[str] | None = None
    ) -> tuple[RulesChanged, dict[RuleSource, PolicyError]]:
        """Translate again the objects that refer to CIDR groups or services.

        Returns the change, and the errors of objects that cannot be translated: they keep their previous
        rules. With ``groups``, only objects that refer to one of these groups are translated.
        """
        self._context = context
        failed: dict[RuleSource, PolicyError] = {}
        changed: list[Rule] = []
        for source in self.followers(groups):
            try:
                new = translate(self._objects[source], context)
            except PolicyError as error:
                failed[source] = error
            else:
                changed += self._replace(source, new).rules
        return RulesChanged(self.revision, tuple(changed)), failed

    def use(self, options: PolicyOptions) -> RulesChanged:
        """Change the options without translating objects again. Every policy may change."""
        self._context = msgspec.structs.replace(self._context, options=options)
        self.revision += 1
        return RulesChanged(self.revision, tuple(self.rules))

    def sources(self) -> Iterable[RuleSource]:
        """Return the objects with rules in force."""
        return self._rules.keys()

    def followers(self, groups: Set[str] | None = None) -> list[RuleSource]:
        """Return the objects that refer to CIDR groups or services; with ``groups``, to one of these."""

        def depends(rule: Rule) -> bool:
            if groups is None:
                return bool(rule.groups) or rule.uses_services
            return not groups.isdisjoint(rule.groups)

        return [source for source, rules in self._rules.items() if any(map(depends, rules))]

    def object_of(self, source: RuleSource) -> Mapping[str, Any]:
        """Return the object in force of a source."""
        return self._objects[source]

    def rules_of(self, source: RuleSource) -> list[Rule]:
        """Return the rules of a source; empty if it is not in force."""
        return self._rules.get(source, [])

    def prefixes(self) -> set[Prefix]:
        """Return every prefix in rules: each needs an identity."""
        return {prefix for rule in self.rules for prefix in rule.prefixes}

    def selecting(self, labels: LabelSet) -> list[Rule]:
        """Return the rules that select endpoints with these labels, in the order of their objects."""
        is_host = labels.has_reserved("host")
        candidates = {
            subject for key in (None, *labels.index_keys) for subject in self._subjects_by_key.get(key, ())
        }
        subjects = frozenset(subject for subject in candidates if subject.matches(labels))
        found = self._selecting_cache.get((subjects, is_host))
        if found is None:
            sources = {source for subject in subjects for source in self._by_subject[subject]}
            found = self._selecting_cache[subjects, is_host] = [
                rule
                for source in sorted(sources, key=self._order.__getitem__)
                for rule in self._rules[source]
                if rule.selects_nodes == is_host and rule.subject in subjects
            ]
        return found

    def direction_rules(
        self, labels: LabelSet, direction: Direction, selecting: Iterable[Rule]
    ) -> DirectionRules:
        """Return the rules that apply to one direction, of those that select the endpoints.

        If policies select the endpoints but none denies by default, a rule that allows all traffic is added.
        """
        options = self._context.options
        is_host = labels.has_reserved("host")
        if options.enable_policy == "never" or (is_host and not options.enable_host_firewall):
            return DirectionRules(enforced=False, rules=())
        rules = [rule for rule in selecting if rule.of(direction)]
        always = options.enable_policy == "always" or (options.enforces_init and labels.has_reserved("init"))
        if not always and not rules:
            return DirectionRules(enforced=False, rules=())
        if not always and not any(rule.default_deny(direction) for rule in rules):
            rules.append(_ALLOW_ALL[direction])
        return DirectionRules(enforced=True, rules=tuple(rules))

    def resolve(self, labels: LabelSet, direction: Direction) -> Resolved:
        """Return enforcement and filters of one direction of endpoints with these labels.

        Raises PolicyConflictError if two rules contradict each other.
        """
        found = self.direction_rules(labels, direction, self.selecting(labels))
        filters = filters_of(found.rules, direction, self._context.options)
        return Resolved(found.enforced, tuple(filters.values()))


def _fqdn_selectors(rules: Iterable[Rule]) -> Iterator[FQDNSelector]:
    for rule in rules:
        for entry in rule.egress:
            yield from (peer for peer in entry.peers or () if isinstance(peer, FQDNSelector))


def _allow_all(direction: Direction) -> Rule:
    """Return a rule that allows all traffic of a direction.

    It is added if no rule denies by default, so that the redirects of other rules still apply.
    """
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
