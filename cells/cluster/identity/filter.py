"""Which labels make identities: the default rules, or those of ``labels`` and ``label-prefix-file``.

For:    endpoints. Needs: Label. Gives: LabelFilter, DEFAULT_FILTER, parse_rule(), read_rules().
Source: Cilium 1.17, label prefixes: a rule is ``[!][source:]regular expression``, anchored at the start.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cells.cluster.identity.labels import RESERVED, Label
from lifecycle import UsageError
from lifecycle.settings import read_regular

VERSION: Final = 1
"""Of label prefix files."""


class Rule(NamedTuple):
    """Labels that count for identities, or with ``ignored`` that do not."""

    pattern: re.Pattern[str]
    source: str = ""
    """Of the labels it is about; empty for any."""
    ignored: bool = False

    def __str__(self) -> str:
        return f"{'!' * self.ignored}{self.source + ':' if self.source else ''}{self.pattern.pattern}"

    def matched(self, source: str, key: str) -> int:
        """How many characters of the key it matches."""
        if self.source not in ("", source):
            return 0
        found = self.pattern.match(key)
        return found.end() if found else 0


def parse_rule(text: str) -> Rule:
    """The rule of ``[!][source:]regex``, or ``source:!regex``. Raises ValueError of one line."""
    ignored = text.startswith("!")
    source, colon, pattern = text.removeprefix("!").partition(":")
    if not colon or not re.fullmatch(r"[a-z][a-z0-9-]*", source):
        source, pattern = "", text.removeprefix("!")
    ignored |= pattern.startswith("!")
    return make_rule(pattern.removeprefix("!"), source, ignored=ignored)


def make_rule(pattern: str, source: str, *, ignored: bool) -> Rule:
    """A rule. Raises ValueError of one line."""
    if not pattern:
        raise ValueError("expected a regular expression for keys of labels, [!][source:]expression")
    try:
        return Rule(re.compile(pattern), source, ignored)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"expected a regular expression for keys of labels: {error}") from error


class _Prefix(msgspec.Struct):
    prefix: str
    source: str
    invert: bool = False
    invalid: bool = False


class _File(msgspec.Struct, rename="kebab"):
    version: int
    valid_prefixes: list[_Prefix]


def read_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a label prefix file, JSON. Raises UsageError."""
    expected = f'expected {{"version": {VERSION}, "valid-prefixes": [{{"prefix", "source", "invert"}}]}}'
    try:
        return tuple(_rules(msgspec.json.decode(read_regular(path), type=_File)))
    except OSError as error:
        raise UsageError(f"label-prefix-file={path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise UsageError(f"label-prefix-file={path}: {error}; {expected}") from error


def _rules(found: _File) -> Iterator[Rule]:
    if found.version != VERSION:
        raise ValueError(f"version {found.version}")
    for one in found.valid_prefixes:
        if not one.source:
            raise ValueError(f"prefix {one.prefix}: no source")
        yield make_rule(one.prefix, one.source, ignored=one.invert or one.invalid)


DEFAULT_RULES: Final = tuple(
    parse_rule(text)
    for text in (
        "reserved:.*",
        r"io\.kubernetes\.pod\.namespace",
        r"io\.cilium\.k8s\.namespace\.labels",
        r"app\.kubernetes\.io",
        r"io\.cilium\.k8s\.policy\.cluster",
        r"!io\.kubernetes",
        r"!kubernetes\.io",
        r"!statefulset\.kubernetes\.io/pod-name",
        r"!apps\.kubernetes\.io/pod-index",
        r"!batch\.kubernetes\.io/job-completion-index",
        r"!batch\.kubernetes\.io/controller-uid",
        r"!.*beta\.kubernetes\.io",
        r"!k8s\.io",
        "!pod-template-generation",
        "!pod-template-hash",
        "!controller-revision-hash",
        "!controller-uid",
        "!annotation.*",
        "!etcd_node",
    )
)


class LabelFilter:
    """Tells labels that make the identity from those that only inform."""

    def __init__(self, rules: Iterable[Rule] = DEFAULT_RULES, *, only_included: bool = False) -> None:
        """With ``only_included`` a label that no rule is about does not count."""
        self.use(rules, only_included=only_included)

    def use(self, rules: Iterable[Rule], *, only_included: bool) -> None:
        """Go by these rules from now on."""
        self.rules = tuple(rules)
        self.only_included = only_included
        # Every pod of a deployment has the same labels: matching them again would be most of the work.
        self._counts = lru_cache(maxsize=4096)(self._decide)

    def counts(self, label: Label) -> bool:
        """Whether the label counts for the identity.

        It does when the longest including match is longer than the shortest ignoring one, or when nothing
        ignores it, unless rules of the user name what is included.
        """
        return self._counts(label.source, label.key)

    def split(self, labels: Iterable[Label]) -> tuple[list[Label], list[Label]]:
        """The labels that make the identity, and the rest."""
        identity: list[Label] = []
        info: list[Label] = []
        for label in labels:
            (identity if self.counts(label) else info).append(label)
        return identity, info

    @property
    def keeps_reserved(self) -> bool:
        """Whether reserved labels count, without which nothing works."""
        return self.counts(Label(RESERVED, "host"))

    def _decide(self, source: str, key: str) -> bool:
        ignored = min((n for one in self.rules if one.ignored and (n := one.matched(source, key))), default=0)
        included = max((one.matched(source, key) for one in self.rules if not one.ignored), default=0)
        return (not self.only_included and not ignored) or included > ignored


DEFAULT_FILTER: Final = LabelFilter()
"""By the default rules."""
