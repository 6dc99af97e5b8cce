"""What endpoints ask of pods' objects.

For:   Endpoints.   Needs: nothing.   Gives: PodMetadata, PodName.
"""

from typing import NamedTuple, Protocol

from cells.cluster.identity import Label


class PodName(NamedTuple):
    """Which pod is meant."""

    namespace: str
    name: str
    uid: str = ""
    """Another pod may have had the name; empty when whoever asks cannot tell."""


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
        """Wait for them, no longer than is sensible; None when there is no such pod, or nobody can tell."""
        ...
