"""The edges of the policy cell: who computes policies, and the policy maps.

For:    EndpointPolicies. Needs: nothing. Gives: PolicyComputer, PodKey, RuleComputer, KnownRules,
        PolicyMapPool.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, Protocol

from cells.cluster.identity import Identity
from cells.policy.maps.rows import EndpointPolicy, PolicyEntries
from lifecycle import Named

PodKey = tuple[str, str]
"""Namespace and name of a pod."""
NO_POD: Final[PodKey] = ("", "")


class PolicyComputer(Protocol):
    """Says what an endpoint may do.

    It is asked when an endpoint is made, regenerated, or gets another identity. What changes in between for
    endpoints that exist it tells by EndpointPolicies.change().
    """

    @property
    def revision(self) -> int:
        """Of the rules; grows with every change."""
        ...

    def compute(
        self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD
    ) -> EndpointPolicy:
        """What the endpoint with this identity may do now; ``labels`` are those the identity stands for.

        ``pod`` is whose endpoint it is: policies may name its ports. Synchronous: an ADD waits for it. Raises
        HiveError when rules contradict each other: it keeps the policy it has.
        """
        ...

    def know(self, identities: Iterable[Identity]) -> list[EndpointPolicy]:
        """These identities are about to be used: the policies that change by them."""
        ...

    def forget(self, endpoint_id: int) -> None:
        """The endpoint is no more; an unknown one is fine."""
        ...


RuleComputer = Annotated[PolicyComputer, Named("rules")]
"""The computer that knows rules, if a cell provides one; it knows the node's mode, too."""


class KnownRules(Protocol):
    """Whether what policies follow from is known: until then, those from before a restart stay in force."""

    @property
    def missing(self) -> str:
        """What is to be known yet; empty when nothing is."""
        ...

    async def known(self) -> None:
        """Return once all rules and identities that there were at the start have been taken in."""
        ...


class PolicyMapPool(Protocol):
    """Endpoint numbers with their policy maps. All calls are synchronous and raise OSError or HiveError."""

    def acquire(self) -> int:
        """A free number with an empty policy map, in which nothing is allowed.

        Raises PoolEmpty when none is prepared at the moment, PolicyIdsExhausted when there are none left.
        """
        ...

    def adopt(self, endpoint_id: int) -> PolicyEntries:
        """Take over the number and policy map an endpoint had before a restart; what the map has."""
        ...

    def write(self, endpoint_id: int, entries: PolicyEntries) -> None:
        """Make the map these entries: denies first, then allows, then deletions. What is right stays."""
        ...

    def write_all(self, wanted: Mapping[int, PolicyEntries]) -> dict[int, OSError]:
        """The same for several maps, in less time; of which maps it could not be done, and why."""
        ...

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        """Compare the whole map with these entries, and put it right; how many were wrong."""
        ...

    def release(self, endpoint_id: int) -> None:
        """Give number and map back, emptied. Twice does nothing."""
        ...
