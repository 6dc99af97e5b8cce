"""Security identities: a number for each set of labels, by which the datapath identifies senders of packets.

Controller: label sets in, the table ``identities`` out. Numbers that this node allocates are saved in
            local_allocator_state.json. Numbers in the kernel's maps are not allocated to other labels.
Why:        numbers may have to be agreed with other nodes, so allocation may wait for the ClusterAllocator.
            Without one, this node allocates them.
"""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from cells.base.labels import (
    IdentitySettings,
    Label,
    LabelFilter,
    agent_namespace,
    configured_filter,
    parse,
    texts,
)
from cells.base.metrics import Collector, MetricFamily, gauge
from cells.cluster.identity.identities import (
    ClusterAllocator,
    Identities,
    Identity,
    IdentityAllocator,
    Labels,
    NodeAllocator,
    identity_table,
)
from cells.cluster.identity.numbers import (
    ClusterNumbers,
    Scope,
    scope_for,
    scope_of,
    well_known_identities,
)
from cells.config import AgentConfig
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from lifecycle import Change, Hook, Jobs, Lifecycle, Logger, Member, Table, config, module, provide
from lifecycle.settings import read_regular

__all__ = ["KernelNumbers", "cell"]


# This node's own identities, preserved over a restart: prefixes and names have the numbers they had before.
#
# Reconciler: the table ``identities`` in, local_allocator_state.json out.
# Why:        the datapath still uses these numbers, so none may be reused before all claims are known.
# Source:     Cilium 1.17, the local identity allocator's checkpoint, in its format.

FILE: Final = "local_allocator_state.json"
DEBOUNCE: Final = 1.0
"""Seconds within which changes are written together."""


OF_THIS_NODE: Final = {Scope.LOCAL, Scope.REMOTE_NODE}
"""Scopes of numbers that this node allocates."""
_NUMBER: Final = struct.Struct("<I")
"""The numeric identity at the beginning of values of the ipcache and of the CIDR policy map."""


class _Label(msgspec.Struct):
    key: str
    value: str = ""
    source: str = ""


class _Identity(msgspec.Struct):
    id: int
    labels: dict[str, _Label]


_DECODER: Final = msgspec.json.Decoder(list[_Identity])


def read_checkpoint(path: Path, log: Logger) -> dict[Labels, int]:
    """Read saved numbers by labels; log and ignore invalid entries."""
    try:
        found = _DECODER.decode(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        log.warning("saved local identities not read, they get new numbers", path=str(path), error=str(error))
        return {}
    numbers: dict[Labels, int] = {}
    for one in found:
        labels = texts(Label(label.source, label.key, label.value) for label in one.labels.values())
        if (scope := scope_of(one.id)) in OF_THIS_NODE and scope is scope_for(labels):
            numbers[labels] = one.id
    return numbers


def write_checkpoint(path: Path, identities: Iterable[Identity]) -> None:
    """Write numbers by labels atomically. Raises OSError."""
    rows = [
        _Identity(
            one.id,
            {label.key: _Label(label.key, label.value, label.source) for label in map(parse, one.labels)},
        )
        for one in identities
    ]
    fresh = path.with_suffix(".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(rows))
    fresh.replace(path)


class KernelNumbers:
    """Numbers in maps of the kernel that an earlier agent wrote and may not have saved.

    Why: an agent that is killed within a second of allocating a number leaves it in the maps alone, and so
         does a pod that is deleted while no agent runs. If such a number was allocated to other labels,
         packets of the old labels would have the rights of the new ones, or the reverse.
    """

    def __init__(
        self, maps: Maps | None, policy_maps: PolicyMaps | None, cluster: ClusterAllocator | None
    ) -> None:
        self._scopes = OF_THIS_NODE | ({Scope.CLUSTER} if cluster is None else set())
        self._maps = maps
        self._policy_maps = policy_maps

    def read(self) -> Collection[int]:
        """Read this node's numbers from the ipcache, the CIDR policy map and policy maps. Raises OSError."""
        found: set[int] = set()
        if self._maps is not None:
            of_networks = [self._maps.ipcache]
            if self._maps.uses("policy_prefixes"):
                of_networks.append(self._maps.policy_prefixes)
            found.update(*(_NUMBER.unpack_from(value) for table in of_networks for _, value in table.items()))
        if self._policy_maps is not None:
            found.update(key.identity for each in self._policy_maps.all() for key in each.held)
        return [number for number in found if scope_of(number) in self._scopes]


class Checkpoint:
    """Restores numbers at the start, and saves them after every change."""

    def __init__(
        self,
        identities: Identities,
        folder: Path,
        kernel: KernelNumbers,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._identities = identities
        self._kernel = kernel
        self._path = folder / FILE
        self._log = log
        self._written: dict[int, Identity] = {}
        lifecycle.append(Hook("restore local identities", self._restore, self._write))
        self._soon = jobs.timer("checkpoint", self._write, math.inf, debounce=DEBOUNCE).trigger
        jobs.observe("local identities", identities.table.changes, self._schedule_write)

    async def _restore(self) -> None:
        restored = read_checkpoint(self._path, self._log)
        self._identities.restore_local(restored)
        for number in self._kernel.read():
            self._identities.hold(number)
        if restored:
            self._log.info("Restored local identities", identities=len(restored))

    async def _schedule_write(self, changes: list[Change[int, Identity]]) -> None:
        if any(scope_of(change.key) in OF_THIS_NODE for change in changes):
            self._soon()

    async def _write(self) -> None:
        """Write numbers in use, and restored ones that may still be requested.

        Raises OSError; the job retries.
        """
        wanted = {one.id: one for one in self._identities.local()}
        if wanted != self._written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self._path, wanted.values())
            self._written = wanted


# Identities as Cilium's metrics.
#
# Source: Cilium 1.17, cilium_identity*.


def families(identities: Identities) -> Iterator[MetricFamily]:
    """Return metrics: the number of identities by type, and the sources of their labels."""
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


def identities(settings: IdentitySettings, agent: AgentConfig) -> Table[int, Identity]:
    """Provide the table ``identities``."""
    if not settings.enable_well_known_identities:
        return identity_table()
    return identity_table(well_known_identities(agent.cluster_name, settings.k8s_namespace))


def known_identities(
    table: Table[int, Identity],
    cluster: IdentityAllocator,
    keep: LabelFilter,
    agent: AgentConfig,
    kernel: KernelNumbers,
    *,
    lifecycle: Lifecycle,
    jobs: Jobs,
    log: Logger,
) -> Identities:
    """Provide the identities of this node, with restored numbers for those that it allocates."""
    found = Identities(table, cluster, keep)
    Checkpoint(found, agent.state, kernel, lifecycle=lifecycle, jobs=jobs, log=log)
    return found


def allocator(cluster: ClusterAllocator | None, agent: AgentConfig) -> IdentityAllocator:
    """Provide the allocator of pod identities: the cluster's, or this node's."""
    return cluster or NodeAllocator(ClusterNumbers.of_agent(agent).allocatable)


def identity_metrics(identities: Identities) -> Member[Collector]:
    """Contribute metrics of identities."""

    async def collect() -> Iterable[MetricFamily]:

        return families(identities)

    return Collector("identity", collect)


cell = module(
    "identity",
    "Security identities of sets of labels",
    config(IdentitySettings),
    provide(identities, allocator, configured_filter, KernelNumbers, known_identities),
    provide(identity_metrics, agent_namespace),
)
