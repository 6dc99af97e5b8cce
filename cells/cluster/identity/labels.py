"""Labels: their text, which of them make an identity, and the digest of a set.

For:    identities, endpoints and the API. Needs: nothing. Gives: Label, parse(), texts(), labels_sha256() …
Source: Cilium 1.17, label sources, the default filter, labelsSHA256. Text form: ``source:key[=value]``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Final

RESERVED: Final = "reserved"
UNSPEC: Final = "unspec"


@dataclass(frozen=True, slots=True, order=True)
class Label:
    """One label. ``str()`` gives its text."""

    source: str
    key: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.key}={self.value}" if self.value else f"{self.source}:{self.key}"


def parse(text: str) -> Label:
    """Label of ``source:key[=value]``; without a source it is ``unspec``. ``$name`` is ``reserved:name``."""
    if text.startswith("$"):
        return Label(RESERVED, text[1:])
    name, _, value = text.partition("=")
    source, colon, key = name.partition(":")
    return Label(source, key, value) if colon and source else Label(UNSPEC, key or source, value)


def texts(labels: Iterable[Label]) -> tuple[str, ...]:
    """The labels' texts, sorted as every list of labels in the API is."""
    return tuple(sorted(map(str, labels)))


@lru_cache(maxsize=1024)
def labels_sha256(labels: tuple[str, ...]) -> str:
    """Hex digest over ``source:key=value;`` of all labels, sorted; the ``=`` is there without a value too."""
    serialised = sorted(f"{label.source}:{label.key}={label.value};" for label in map(parse, labels))
    return sha256("".join(serialised).encode()).hexdigest()


_INCLUDED: Final = tuple(
    (source, re.compile(pattern))
    for source, pattern in (
        (RESERVED, ".*"),
        ("", r"io\.kubernetes\.pod\.namespace"),
        ("", r"io\.cilium\.k8s\.namespace\.labels"),
        ("", r"app\.kubernetes\.io"),
        ("", r"io\.cilium\.k8s\.policy\.cluster"),
    )
)
_IGNORED: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"io\.kubernetes",
        r"kubernetes\.io",
        r"statefulset\.kubernetes\.io/pod-name",
        r"apps\.kubernetes\.io/pod-index",
        r"batch\.kubernetes\.io/job-completion-index",
        r"batch\.kubernetes\.io/controller-uid",
        r".*beta\.kubernetes\.io",
        r"k8s\.io",
        "pod-template-generation",
        "pod-template-hash",
        "controller-revision-hash",
        "controller-uid",
        r"annotation.*",
        "etcd_node",
    )
)


def is_identity_label(label: Label) -> bool:
    """Whether the label counts for the identity, by the default filter.

    It does when nothing ignores it, or when the longest including match is longer than the shortest
    ignoring one. Patterns are anchored at the start of the key.
    """
    return _counts(label.source, label.key)


@lru_cache(maxsize=4096)
def _counts(source: str, key: str) -> bool:
    """The same labels come with every pod of a deployment: matching them anew would be most of the work."""
    ignored = min((found.end() for p in _IGNORED if (found := p.match(key))), default=0)
    if ignored == 0:
        return True
    included = max(
        (found.end() for only, p in _INCLUDED if only in ("", source) and (found := p.match(key))),
        default=0,
    )
    return included > ignored


def split_identity_labels(labels: Iterable[Label]) -> tuple[list[Label], list[Label]]:
    """The labels that make the identity, and the rest, which only informs."""
    identity: list[Label] = []
    info: list[Label] = []
    for label in labels:
        (identity if is_identity_label(label) else info).append(label)
    return identity, info
