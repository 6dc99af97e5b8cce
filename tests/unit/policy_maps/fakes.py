"""Policy maps and rules in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from cells.cluster.identity.identities import Identity
from cells.maps.policy_maps import PoolEmpty
from cells.policy.maps import (
    NO_POD,
    EndpointPolicy,
    PodKey,
    PolicyEntries,
)
from lifecycle import HiveError
from tests.support.policy_maps import write_singly


@dataclass
class FakeMaps:
    """PolicyMapPool over dicts."""

    maps: dict[int, PolicyEntries] = field(default_factory=dict)
    writes: list[int] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    room: int = 9
    ids: int = 3
    batches: list[int] = field(default_factory=list)
    """The number of maps in each call."""

    def acquire(self) -> int:
        number = len(self.maps) + 1
        if number > self.ids:
            raise PoolEmpty("none")
        self.maps[number] = {}
        return number

    def adopt(self, endpoint_id: int) -> PolicyEntries:
        return self.maps.setdefault(endpoint_id, {})

    def write(self, endpoint_id: int, entries: PolicyEntries) -> None:
        self.writes.append(endpoint_id)
        if endpoint_id in self.broken or len(entries) > self.room:
            raise OSError(28, "update map: No space left on device")
        self.maps[endpoint_id] = entries

    def write_all(self, wanted: Mapping[int, PolicyEntries]) -> dict[int, OSError]:
        self.batches.append(len(wanted))
        return write_singly(self.write, wanted)

    def held(self, endpoint_id: int) -> PolicyEntries:
        return self.maps[endpoint_id]

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        wrong = len(self.maps[endpoint_id].keys() ^ entries.keys())
        self.maps[endpoint_id] = entries
        return wrong

    def release(self, endpoint_id: int) -> None:
        self.maps.pop(endpoint_id, None)


@dataclass
class FakeRules:
    """A PolicyComputer with one result for all endpoints."""

    revision: int = 1
    entries: PolicyEntries = field(default_factory=dict)
    conflict: str = ""
    known: list[int] = field(default_factory=list)
    following: list[EndpointPolicy] = field(default_factory=list)
    """Changes that an identity causes in other policies."""
    living: set[int] = field(default_factory=set)
    missing: str = ""
    behind: set[int] = field(default_factory=set)
    """Endpoints with proxies that are not up to date."""

    def acknowledged(self, endpoint_id: int) -> bool:
        return endpoint_id not in self.behind

    def forget(self, endpoint_id: int) -> None:
        self.living.discard(endpoint_id)

    def compute(
        self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD
    ) -> EndpointPolicy:
        self.living.add(endpoint_id)
        if self.conflict:
            raise HiveError(self.conflict)
        return wanted(endpoint_id, self.revision, self.entries)

    def update_identities(self, identities: Iterable[Identity]) -> list[EndpointPolicy]:
        self.known += [one.id for one in identities]
        return self.following


def wanted(endpoint_id: int, revision: int, entries: PolicyEntries) -> EndpointPolicy:
    return EndpointPolicy(
        endpoint_id=endpoint_id,
        revision=revision,
        ingress_enforced=True,
        egress_enforced=False,
        entries=entries,
    )
