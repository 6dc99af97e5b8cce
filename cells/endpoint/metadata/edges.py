"""What endpoints need from pods' objects.

For:   Endpoints.   Needs: nothing.   Gives: PodMetadata, PodName.
"""

from typing import NamedTuple, Protocol

from cells.cluster.identity import Label


class PodName(NamedTuple):
    """Which pod is meant."""

    namespace: str
    name: str
    uid: str = ""
    """Tells pods of the same name apart; empty if unknown."""


class PodMetadata(Protocol):
    """The labels of pods, from wherever objects come."""

    @property
    def cluster(self) -> str:
        """The name of the cluster, which is on every pod."""
        ...

    @property
    def followed(self) -> bool:
        """Whether there is a source of objects; else an endpoint has the labels its request brings."""
        ...

    def lookup(self, pod: PodName) -> list[Label] | None:
        """Every label of the pod; None while it is not known."""
        ...

    async def resolve(self, pod: PodName) -> list[Label] | None:
        """Wait for them for a limited time; None if there is no such pod, or no source answers."""
        ...
