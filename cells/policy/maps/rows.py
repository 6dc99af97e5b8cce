"""What an endpoint may do, as it is wanted and as its policy map has it."""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, Protocol

import msgspec

from cells.cluster.identity.identities import Identity
from cells.cluster.identity.numbers import HOST
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from lifecycle import Named

PolicyEntries = Mapping[PolicyKey, PolicyEntry]
"""Of both directions; a key has its direction."""

ALLOW_ALL: Final[PolicyEntries] = {
    PolicyKey(identity=0, egress=False): PolicyEntry(),
    PolicyKey(identity=0, egress=True): PolicyEntry(),
}
"""What an endpoint may do where nothing is enforced: everything, in both directions."""

ALLOW_LOCALHOST: Final[PolicyEntries] = {PolicyKey(identity=HOST, egress=False): PolicyEntry()}
"""The node itself may reach the endpoint."""


class EndpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``endpoint-policies``: what an endpoint may do by all that is known."""

    endpoint_id: int
    revision: int
    """Of the rules it was computed from."""
    ingress_enforced: bool
    """Whether only what ``entries`` allow may come in."""
    egress_enforced: bool
    """Whether only what ``entries`` allow may go out."""
    entries: PolicyEntries


class RealizedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``endpoint-policies-realized``: what its policy map has."""

    endpoint_id: int
    revision: int = 0
    """Of the rules that the map has and proxies have acknowledged; 0: none yet."""
    written: int = 0
    """Of the rules the map was last made right for."""
    ingress_enforced: bool = False
    egress_enforced: bool = False
    entries: int = 0
    """How many the map has."""
    error: str = ""
    """Why the map is not as wanted; empty when it is."""


class OutdatedPolicy(msgspec.Struct, frozen=True):
    """A row of the table ``endpoint-policies-outdated``: an endpoint that is to be regenerated.

    It leaves the table once the policy map has the policy.
    """

    endpoint_id: int
    revision: int
    """Of the rules that it is to follow."""
    reason: str
    """For the endpoint's log."""


def enforced_directions(policy: EndpointPolicy | RealizedPolicy, *, audited: bool = False) -> str:
    """``none``, ``ingress``, ``egress`` or ``both``, as the API and metrics have it.

    ``audit-both`` and the like where what is refused is let through.
    """
    match policy.ingress_enforced, policy.egress_enforced:
        case True, True:
            enforced = "both"
        case True, False:
            enforced = "ingress"
        case False, True:
            enforced = "egress"
        case _:
            return "none"
    return f"audit-{enforced}" if audited else enforced


# The edges of the policy cell: who computes policies, and the policy maps.

PodKey = tuple[str, str]
"""Namespace and name of a pod."""
NO_POD: Final[PodKey] = ("", "")


class PolicyComputer(Protocol):
    """Computes what an endpoint may do.

    It is asked when an endpoint is made, regenerated, or gets another identity. What changes in between for
    endpoints that exist it calls EndpointPolicies.change().
    """

    @property
    def missing(self) -> str:
        """What must be known before policies follow from the rules; empty when nothing is missing."""
        ...

    def acknowledged(self, endpoint_id: int) -> bool:
        """Whether proxies follow the endpoint's rules; when more do, EndpointPolicies.follow_proxies()."""
        ...

    @property
    def revision(self) -> int:
        """Of the rules; grows with every change."""
        ...

    def compute(
        self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD
    ) -> EndpointPolicy:
        """What the endpoint with this identity may do now; ``labels`` are those the identity stands for.

        ``pod`` is the endpoint's pod: policies may name its ports. Synchronous: an ADD waits for it. Raises
        HiveError when rules contradict each other: it keeps the policy it has.
        """
        ...

    def update_identities(self, identities: Iterable[Identity]) -> list[EndpointPolicy]:
        """These identities are about to be used: the policies that change by them."""
        ...

    def forget(self, endpoint_id: int) -> None:
        """The endpoint is removed; an unknown one is fine."""
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

    def held(self, endpoint_id: int) -> PolicyEntries:
        """What the map has, as it was last written or read: after a refusal, a part of what was wanted."""
        ...

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        """Compare the whole map with these entries, and put it right; how many were wrong."""
        ...

    def release(self, endpoint_id: int) -> None:
        """Give number and map back, emptied. Twice does nothing."""
        ...
