"""Identities as Cilium's metrics.

For:    Metrics. Needs: Identities. Gives: families().
Source: Cilium 1.17, cilium_identity*.
"""

from collections import Counter
from collections.abc import Iterator

from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import Scope, scope_of
from cells.observe.metrics import Family, gauge


def families(identities: Identities) -> Iterator[Family]:
    """How many there are, and where their labels come from."""
    known = identities.all()
    counted = Counter(scope_of(identity.id).value for identity in known)
    yield gauge(
        "cilium_identity",
        "Number of identities currently allocated",
        dict.fromkeys((Scope.RESERVED.value, Scope.CLUSTER.value), 0) | counted,
        "type",
    )
    sources = ({label.partition(":")[0] for label in identity.labels} for identity in known)
    yield gauge(
        "cilium_identity_label_sources",
        "Number of identities which contain at least one label of the given label source",
        Counter(source for each in sources for source in each),
        "source",
    )
