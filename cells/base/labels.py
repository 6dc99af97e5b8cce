"""Labels: parsing, digests, the labels of pods and CIDRs, and the filter of identity labels.

In:     text; labels of pods and namespaces; the settings labels and label-prefix-file.
Out:    Label values, labelsSHA256, and LabelFilter, which selects the labels that make identities.
Source: Cilium 1.17, pkg/labels and pkg/labelsfilter.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from lifecycle import Hook, Lifecycle, Logger, Settings, UsageError
from lifecycle.settings import read_regular

__all__ = [
    "CIDR",
    "CLUSTER",
    "DEFAULT_FILTER",
    "RESERVED",
    "AgentNamespace",
    "IdentitySettings",
    "Label",
    "LabelFilter",
    "agent_namespace",
    "cidr_label",
    "configured_filter",
    "labels_sha256",
    "parse",
    "pod_labels",
    "texts",
]


RESERVED: Final = "reserved"
UNSPEC: Final = "unspec"
CIDR: Final = "cidr"
"""The source of labels of prefixes."""


class Label(msgspec.Struct, frozen=True, order=True):
    """A label; ``str()`` returns its text form."""

    source: str
    key: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.key}={self.value}" if self.value else f"{self.source}:{self.key}"


def parse(text: str) -> Label:
    """Parse ``source:key[=value]``; the default source is ``unspec``; ``$name`` is ``reserved:name``."""
    if text.startswith("$"):
        return Label(RESERVED, text[1:])
    name, _, value = text.partition("=")
    source, colon, key = name.partition(":")
    return Label(source, key, value) if colon and source else Label(UNSPEC, key or source, value)


def texts(labels: Iterable[Label]) -> tuple[str, ...]:
    """Return the text forms of labels, sorted as in the API's lists."""
    return tuple(sorted(map(str, labels)))


@lru_cache(maxsize=1024)
def labels_sha256(labels: tuple[str, ...]) -> str:
    """Return the hex SHA-256 of all ``source:key=value;``, sorted; ``=`` is included without a value, too."""
    serialised = sorted(f"{label.source}:{label.key}={label.value};" for label in map(parse, labels))
    return sha256("".join(serialised).encode()).hexdigest()


def _address_text(prefix: IPv4Network | IPv6Network) -> str:
    if prefix.version == 4:
        return str(prefix.network_address)
    mapped = prefix.network_address.ipv4_mapped if isinstance(prefix, IPv6Network) else None
    text = f"::ffff:{mapped}" if mapped is not None else str(prefix.network_address)
    text = text.replace(":", "-")  # a colon separates source and key
    text = f"0{text}" if text.startswith("-") else text
    return f"{text}0" if text.endswith("-") else text


@lru_cache(maxsize=65536)
def cidr_label(prefix: IPv4Network | IPv6Network) -> str:
    """Return the key of a prefix's ``cidr:`` label: ``10.0.0.0/8``, ``2001-db8--0/32``, ``0--0/0``."""
    return f"{_address_text(prefix)}/{prefix.prefixlen}"


# Labels of pods.
#
# Source: Cilium 1.17, labels derived from pods and their namespaces.

NAMESPACE: Final = "io.kubernetes.pod.namespace"
NAMESPACE_LABELS: Final = "io.cilium.k8s.namespace.labels"
SERVICE_ACCOUNT: Final = "io.cilium.k8s.policy.serviceaccount"
CLUSTER: Final = "io.cilium.k8s.policy.cluster"
_DERIVED: Final = frozenset({NAMESPACE, SERVICE_ACCOUNT, CLUSTER})
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"


def pod_labels(
    own: Mapping[str, str],
    *,
    namespace: str,
    namespace_labels: Mapping[str, str],
    service_account: str,
    cluster: str,
) -> Iterator[Label]:
    """Yield all labels of a pod, before the filter of identity labels.

    A pod's own labels with reserved keys (namespace, service account, cluster) are dropped: users who create
    pods must not choose the policies that apply to them. The API server labels every namespace with its name.
    """
    for key, value in own.items():
        if key not in _DERIVED and not key.startswith(f"{NAMESPACE_LABELS}."):
            yield Label("k8s", key, value)
    for key, value in ({_NAMESPACE_NAME: namespace} | dict(namespace_labels)).items():
        yield Label("k8s", f"{NAMESPACE_LABELS}.{key}", value)
    yield Label("k8s", NAMESPACE, namespace)
    yield Label("k8s", CLUSTER, cluster)
    if service_account:
        yield Label("k8s", SERVICE_ACCOUNT, service_account)


# The filter of identity labels: the default rules, or those of ``labels`` and ``label-prefix-file``.
#
# Source: Cilium 1.17, label prefixes: a rule is ``[!][source:]regular expression``, anchored at the start.

VERSION: Final = 1
"""The supported version of label prefix files."""


class LabelRule(msgspec.Struct, frozen=True):
    """A rule of the filter: matching labels are included, or with ``ignored`` excluded."""

    pattern: re.Pattern[str]
    source: str = ""
    """The source that labels must have; empty for any."""
    ignored: bool = False

    def __str__(self) -> str:
        return f"{'!' * self.ignored}{self.source + ':' if self.source else ''}{self.pattern.pattern}"

    def matched(self, source: str, key: str) -> int:
        """Return the length of the match at the start of the key; 0 without a match."""
        if self.source not in ("", source):
            return 0
        found = self.pattern.match(key)
        return found.end() if found else 0


def parse_rule(text: str) -> LabelRule:
    """Parse ``[!][source:]regex`` or ``source:!regex``. Raises ValueError with a message of one line."""
    ignored = text.startswith("!")
    source, colon, pattern = text.removeprefix("!").partition(":")
    if not colon or not re.fullmatch(r"[a-z][a-z0-9-]*", source):
        source, pattern = "", text.removeprefix("!")
    ignored |= pattern.startswith("!")
    return make_rule(pattern.removeprefix("!"), source, ignored=ignored)


def make_rule(pattern: str, source: str, *, ignored: bool) -> LabelRule:
    """Compile a rule. Raises ValueError with a message of one line."""
    if not pattern:
        raise ValueError("expected a regular expression for keys of labels, [!][source:]expression")
    try:
        return LabelRule(re.compile(pattern), source, ignored)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"expected a regular expression for keys of labels: {error}") from error


class _Prefix(msgspec.Struct):
    prefix: str
    source: str
    invert: bool = False
    invalid: bool = False


class _LabelPrefixFile(msgspec.Struct, rename="kebab"):
    version: int
    valid_prefixes: list[_Prefix]


def read_rules(path: Path) -> tuple[LabelRule, ...]:
    """Read the rules of a label prefix file (JSON). Raises UsageError."""
    expected = f'expected {{"version": {VERSION}, "valid-prefixes": [{{"prefix", "source", "invert"}}]}}'
    try:
        return tuple(_rules(msgspec.json.decode(read_regular(path), type=_LabelPrefixFile)))
    except OSError as error:
        raise UsageError(f"label-prefix-file={path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise UsageError(f"label-prefix-file={path}: {error}; {expected}") from error


def _rules(found: _LabelPrefixFile) -> Iterator[LabelRule]:
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
    """Selects the labels that make identities; all others are informational."""

    def __init__(self, rules: Iterable[LabelRule] = DEFAULT_RULES, *, only_included: bool = False) -> None:
        """With ``only_included``, labels that match no rule are excluded."""
        self.use(rules, only_included=only_included)

    def use(self, rules: Iterable[LabelRule], *, only_included: bool) -> None:
        """Replace the rules."""
        self.rules = tuple(rules)
        self.only_included = only_included
        # The pods of a deployment have the same labels: matching them again would dominate the cost.
        self._counts = lru_cache(maxsize=4096)(self._decide)

    def counts(self, label: Label) -> bool:
        """Whether the label is part of identities.

        It is included if the longest including match is longer than the shortest ignoring one, or if no rule
        ignores it and the user has configured no including rules.
        """
        return self._counts(label.source, label.key)

    def split(self, labels: Iterable[Label]) -> tuple[list[Label], list[Label]]:
        """Return the identity labels and the informational labels."""
        identity: list[Label] = []
        info: list[Label] = []
        for label in labels:
            (identity if self.counts(label) else info).append(label)
        return identity, info

    @property
    def keeps_reserved(self) -> bool:
        """Whether reserved labels are included, which every node needs."""
        return self.counts(Label(RESERVED, "host"))

    def _decide(self, source: str, key: str) -> bool:
        ignored = min((n for one in self.rules if one.ignored and (n := one.matched(source, key))), default=0)
        included = max((one.matched(source, key) for one in self.rules if not one.ignored), default=0)
        return (not self.only_included and not ignored) or included > ignored


DEFAULT_FILTER: Final = LabelFilter()
"""The filter with the default rules."""


# Settings of identity labels.

SHOWN: Final = 100
"""Maximum length of a rule in error messages."""


class IdentitySettings(Settings, frozen=True):
    """Which labels make up identities."""

    labels: str = ""
    """Rules for labels that make up identities, added to the default ones: [!][source:]regex, separated by
    spaces or commas. If any rule includes labels, only included labels count."""

    label_prefix_file: str = ""
    """JSON file with rules that replace the default ones."""

    enable_well_known_identities: bool = False
    """Give the cluster's DNS servers and Cilium's pods fixed identities, 100 to 115."""

    k8s_namespace: str = ""
    """Namespace of Cilium's own pods, for well-known identities and the Leases of announced services; empty:
    default."""

    def faults(self) -> Iterator[str]:
        for text in self.rules():
            try:
                parse_rule(text)
            except ValueError as error:
                yield f"labels={text if len(text) <= SHOWN else f'{text[:SHOWN]}...'}: {error}"
        if self.label_prefix_file and not PurePosixPath(self.label_prefix_file).is_absolute():
            yield f"label-prefix-file={self.label_prefix_file[:SHOWN]}: expected an absolute path, or nothing"

    def rules(self) -> list[str]:
        """The rules in ``labels``, unparsed."""
        return [text for text in re.split(r"[,\s]+", self.labels) if text]


class AgentNamespace(msgspec.Struct, frozen=True):
    """The namespace of the agents' own pods and Leases."""

    name: str


def agent_namespace(settings: IdentitySettings) -> AgentNamespace:
    """Provide the namespace from the settings."""
    return AgentNamespace(settings.k8s_namespace or "default")


def configured_filter(settings: IdentitySettings, *, lifecycle: Lifecycle, log: Logger) -> LabelFilter:
    """Provide the filter from the settings; a start hook reads the file."""
    added = [parse_rule(text) for text in settings.rules()]
    chosen = LabelFilter()

    async def read() -> None:
        path = settings.label_prefix_file
        base: tuple[LabelRule, ...] = read_rules(Path(path)) if path else DEFAULT_RULES
        included = [one for one in (*added, *(base if path else ())) if not one.ignored]
        chosen.use((*base, *added), only_included=bool(included))
        if not chosen.keeps_reserved:
            log.error(
                "labels for identities exclude reserved:.*, which every node needs",
                path=path,
            )
        if path or added:
            log.info("rules for labels of identities", rules=[str(one) for one in chosen.rules])

    lifecycle.append(Hook("read label rules", read))
    return chosen
