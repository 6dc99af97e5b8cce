"""What sources have told of objects, as Cilium's metrics.

Needs: nothing.   Gives: ObjectEvents, families.
Source: Cilium 1.17, cilium_kubernetes_events_received_total and cilium_kubernetes_events_total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cells.kubernetes.objects import Object
from cells.observe.metrics import Family, counter


class ObjectEvents:
    """Counts objects that came, changed or went, by their kind."""

    def __init__(self) -> None:
        self.received: Counter[tuple[str, str, str, str]] = Counter()
        """(kind, action, valid, equal) -> how many."""
        self.processed: Counter[tuple[str, str, str]] = Counter()
        """(kind, action, status) -> how many."""

    def changed(self, kind: str, old: Object | None, new: Object | None) -> None:
        """A row is about to be put, or deleted where ``new`` is None."""
        if new is None:
            if old is None:
                return
            action, equal = "delete", "false"
        elif old is None:
            action, equal = "create", "false"
        else:
            action, equal = "update", "true" if old == new else "false"
        self.received[kind, action, "true", equal] += 1
        self.processed[kind, action, "success"] += 1

    def unreadable(self, kind: str, count: int) -> None:
        """So many objects could not be read."""
        if count:
            self.received[kind, "update", "false", "false"] += count
            self.processed[kind, "update", "failed"] += count


def families(events: ObjectEvents) -> Iterator[Family]:
    """Events as metrics."""
    yield counter(
        "cilium_kubernetes_events_received_total",
        "Number of Kubernetes events received labeled by scope, action, valid data and equality",
        dict(events.received),
        "scope action valid equal",
    )
    yield counter(
        "cilium_kubernetes_events_total",
        "Number of Kubernetes events processed labeled by scope, action and execution result",
        dict(events.processed),
        "scope action status",
    )
