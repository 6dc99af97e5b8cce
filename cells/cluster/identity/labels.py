"""Labels: their text, and the digest of a set.

For:    identities, endpoints and the API. Needs: nothing. Gives: Label, parse(), texts(),
        labels_sha256(), cidr_label().
Source: Cilium 1.17, label sources, labelsSHA256. Text form: ``source:key[=value]``.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network
from typing import Final

import msgspec

RESERVED: Final = "reserved"
UNSPEC: Final = "unspec"
CIDR: Final = "cidr"
"""The source of prefixes' labels."""


class Label(msgspec.Struct, frozen=True, order=True):
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


def _address_text(prefix: IPv4Network | IPv6Network) -> str:
    if prefix.version == 4:
        return str(prefix.network_address)
    mapped = prefix.network_address.ipv4_mapped if isinstance(prefix, IPv6Network) else None
    text = f"::ffff:{mapped}" if mapped is not None else str(prefix.network_address)
    text = text.replace(":", "-")  # a label's key separates its source by a colon
    text = f"0{text}" if text.startswith("-") else text
    return f"{text}0" if text.endswith("-") else text


@lru_cache(maxsize=65536)
def cidr_label(prefix: IPv4Network | IPv6Network) -> str:
    """The key of a prefix's ``cidr:`` label: ``10.0.0.0/8``, ``2001-db8--0/32``, ``0--0/0``."""
    return f"{_address_text(prefix)}/{prefix.prefixlen}"
