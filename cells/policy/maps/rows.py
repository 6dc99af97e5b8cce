"""Rows of desired and realized policies, and the interfaces of policy computation and policy maps."""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, Protocol

import msgspec

from cells.cluster.identity.identities import Identity
from cells.cluster.identity.numbers import HOST
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from lifecycle import Named

PolicyEntries = Mapping[PolicyKey, PolicyEntry]
"""The entries of both directions: the direction is part of the key."""

ALLOW_ALL: Final[PolicyEntries] = {
    PolicyKey(identity=0, egress=False): PolicyEntry(),
    PolicyKey(identity=0, egress=True): PolicyEntry(),
}
"""Entries of an endpoint without enforcement: they allow all peers, in both directions."""

ALLOW_LOCALHOST: Final[PolicyEntries] = {PolicyKey(identity=HOST, egress=False): PolicyEntry()}
"""The entry that allows ingress from the node itself."""


class EndpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``endpoint-policies``: the desired policy of an endpoint."""

    endpoint_id: int
    revision: int
    """Revision of the rules from which it was computed."""
    ingress_enforced: bool
    """Whether ingress is denied unless ``entries`` allow it."""
    egress_enforced: bool
    """Whether egress is denied unless ``entries`` allow it."""
    entries: PolicyEntries


class RealizedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``endpoint-policies-realized``: the contents of an endpoint's policy map."""

    endpoint_id: int
    revision: int = 0
    """Latest revision of the rules that is in the map and acknowledged by proxies; 0: none yet."""
    written: int = 0
    """Revision of the rules that was last written to the map completely."""
    ingress_enforced: bool = False
    egress_enforced: bool = False
    entries: int = 0
    """Number of entries in the map."""
    error: str = ""
    """Why the map differs from the desired policy; empty if it does not."""


class OutdatedPolicy(msgspec.Struct, frozen=True):
    """A row of the table ``endpoint-policies-outdated``: an endpoint that must be regenerated.

    The row is deleted once the policy map has the policy.
    """

    endpoint_id: int
    revision: int
    """Revision of the rules that the endpoint must follow."""
    reason: str
    """Shown in the endpoint's log."""


def enforced_directions(policy: EndpointPolicy | RealizedPolicy, *, audited: bool = False) -> str:
    """Return the enforced directions as in the API: ``none``, ``ingress``, ``egress`` or ``both``.

    With the prefix ``audit-`` if denied packets are forwarded nevertheless.
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


# The interfaces of the policy cell: the computation of policies, and the policy maps.

PodKey = tuple[str, str]
"""Namespace and name of a pod."""
NO_POD: Final[PodKey] = ("", "")


class PolicyComputer(Protocol):
    """Computes the policies of endpoints.

    EndpointPolicies calls it when an endpoint is created or regenerated, or when its identity changes. For
    every other change of a policy, the computer calls EndpointPolicies.change().
    """

    @property
    def missing(self) -> str:
        """The sources that are not read yet; until then rules must not be applied. Empty if none."""
        ...

    def acknowledged(self, endpoint_id: int) -> bool:
        """Whether proxies have acknowledged the endpoint's rules.

        The computer calls EndpointPolicies.follow_proxies() when a proxy acknowledges more.
        """
        ...

    @property
    def revision(self) -> int:
        """Revision of the rules; incremented with every change."""
        ...

    def compute(
        self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD
    ) -> EndpointPolicy:
        """Compute the policy of an endpoint from its identity and the identity's labels.

        ``pod`` is the endpoint's pod, for rules that name its ports. Synchronous, because an ADD waits for
        it. Raises HiveError if rules contradict each other; then the endpoint keeps its current policy.
        """
        ...

    def update_identities(self, identities: Iterable[Identity]) -> list[EndpointPolicy]:
        """Add identities, or change their labels; return the policies that change."""
        ...

    def forget(self, endpoint_id: int) -> None:
        """Drop the state of a removed endpoint; a no-op if it is unknown."""
        ...


RuleComputer = Annotated[PolicyComputer, Named("rules")]
"""The computer that applies rules as well as the node's enforcement mode, if a cell provides one."""


class KnownRules(Protocol):
    """Whether rules and identities are read. Until they are, policies of the previous run stay in force."""

    @property
    def missing(self) -> str:
        """The sources that are not read yet; empty if none."""
        ...

    async def known(self) -> None:
        """Wait until the initial rules and identities are processed."""
        ...


class PolicyMapPool(Protocol):
    """Endpoint ids with their policy maps. Every call is synchronous and raises OSError or HiveError."""

    def acquire(self) -> int:
        """Return a free endpoint id. Its policy map is empty, so nothing is allowed.

        Raises PoolEmpty if no map is prepared yet, PolicyIdsExhausted if all ids are in use.
        """
        ...

    def adopt(self, endpoint_id: int) -> PolicyEntries:
        """Reserve the id and policy map of a restored endpoint; return the map's entries."""
        ...

    def write(self, endpoint_id: int, entries: PolicyEntries) -> None:
        """Replace the map's entries by difference: first denies, then allows, then deletions."""
        ...

    def write_all(self, wanted: Mapping[int, PolicyEntries]) -> dict[int, OSError]:
        """Do write() for several maps at once; return the error of each map that failed."""
        ...

    def held(self, endpoint_id: int) -> PolicyEntries:
        """The map's entries as last written or read; after a failed write, a part of the desired ones."""
        ...

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        """Compare the whole map with ``entries`` and correct it. Returns how many entries differed."""
        ...

    def release(self, endpoint_id: int) -> None:
        """Return the id and the emptied map to the pool; a no-op if they are already released."""
        ...
