"""The pool of endpoint ids and their policy maps, created in advance for fast pod ADDs.

Entering a map into hive_policies waits for RCU (15 ms, for one as for twenty), so a pod must not wait for it.
An id keeps its map forever: releasing it empties the map and puts it at the tail of the pool, so that ids are
reused as late as possible.
"""

import errno
import re
import struct
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import filterfalse, islice
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread
from msgspec.structs import replace

from cells.maps.bpf import BpfError, pin, replace_pin, unpin
from cells.maps.map import Epochs, Map, MapSpec, create_map, map_by_id, open_map
from cells.maps.node_maps import Maps
from cells.maps.policy_map import PolicyMap
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.specs import ENDPOINT_IDS, MapSettings, policy_name, policy_spec, sizes
from lifecycle import HiveError, Hook, Jobs, Lifecycle, Logger, NotStartedError

__all__ = ["PolicyIdsExhausted", "PolicyMaps", "PoolEmpty"]


# Policy maps of an earlier agent: taken over, migrated to another size, or removed.

_PIN = re.compile(r"cilium_policy_(?:v\d+_)?\d+(?:_new)?")  # also of an interrupted replacement
_OWN_CONNTRACK = re.compile(r"cilium_ct(?:_any)?[46]_\d+")
"""Per-endpoint conntrack maps of Cilium up to 1.16; the agent has none."""
_CANONICAL = re.compile(r"cilium_policy_\d{5}")
_index = struct.Struct("<I").pack


class PolicyMapPins:
    """Pins and hive_policies entries of the policy maps. Calls may wait for RCU: use a worker thread."""

    def __init__(
        self,
        policies: Map,
        directory: Path,
        max_entries: int,
        log: Logger,
        epochs: Epochs,
    ) -> None:
        self._policies = policies
        self._directory = directory
        self._max_entries = max_entries
        self._log = log
        self._epochs = epochs

    def create(self, ids: Iterable[int]) -> list[PolicyMap]:
        """Create empty, unpinned maps for these ids and enter them into hive_policies."""
        made: list[PolicyMap] = []
        try:
            for each in ids:
                made.append(self._policy(each, create_map(policy_spec(each, self._max_entries))))  # noqa: PERF401
            self._enter(made)
        except BaseException:
            for policy in made:
                policy.map.close()
            raise
        return made

    def restore(self) -> tuple[list[PolicyMap], list[PolicyMap]]:
        """Take over an earlier agent's maps; return the pinned ones, and the others, emptied."""
        self._unpin_misnamed()
        active = self._entered()
        pinned: list[PolicyMap] = []
        to_enter: list[PolicyMap] = []
        for endpoint_id in sorted(self._pinned_ids()):
            policy = self._adopted(endpoint_id, active.pop(endpoint_id, None), to_enter)
            pinned.append(policy)
        spare: list[PolicyMap] = []
        for endpoint_id, table in sorted(active.items()):
            policy = self._policy(endpoint_id, table)
            if not policy_spec(endpoint_id, self._max_entries).same_as(table.spec):
                table.close()
                policy = self._policy(endpoint_id, create_map(policy_spec(endpoint_id, self._max_entries)))
                to_enter.append(policy)
            policy.clear()
            spare.append(policy)
        self._enter(to_enter)
        for policy in pinned:
            policy.reload()
        return pinned, spare

    def sweep(self, known: set[int]) -> None:
        """Remove pins of policy maps without an endpoint, including those of other versions' layouts.

        One map of another layout makes `cilium-dbg bpf policy get --all` fail altogether.
        """
        wanted = {policy_name(each) for each in known}
        for path in self._directory.iterdir():
            stale = _PIN.fullmatch(path.name) and path.name not in wanted
            if stale or _OWN_CONNTRACK.fullmatch(path.name):
                self._log.info("stale map of an endpoint removed", map=path.name)
                unpin(path)

    def _policy(self, endpoint_id: int, table: Map) -> PolicyMap:
        table.spec = replace(table.spec, invalidates=endpoint_id)
        return PolicyMap(endpoint_id, table, self._epochs)

    def _adopted(self, endpoint_id: int, active: Map | None, to_enter: list[PolicyMap]) -> PolicyMap:
        """Return the map that hive_policies has, or else the pinned one; pin and migrate it if needed."""
        path = self._directory / policy_name(endpoint_id)
        table = active
        if table is None:
            table = open_map(path)
        elif not _is_pinned_as(path, table):
            self._log.warning("policy map was pinned by another program, replacing it", map=path.name)
            replace_pin(table.fd, path)
        wanted = policy_spec(endpoint_id, self._max_entries)
        if not wanted.same_as(table.spec):
            table = self._migrated(table, wanted)
            replace_pin(table.fd, path)
            active = None
        policy = self._policy(endpoint_id, table)
        if active is None:
            to_enter.append(policy)
        return policy

    def _migrated(self, table: Map, wanted: MapSpec) -> Map:
        """Create a map with these attributes, and copy the entries if only the size differs.

        Raises HiveError if they do not fit: part of a policy could allow what the whole denies.
        """
        entries = []
        if (table.spec.key_size, table.spec.value_size) == (wanted.key_size, wanted.value_size):
            entries = list(table.items())
        if len(entries) > wanted.max_entries:
            raise HiveError(
                f"bpf-policy-map-max={wanted.max_entries}: {wanted.name} has {len(entries)} entries; "
                f"leave it at {table.spec.max_entries}"
            )
        self._log.warning(
            "policy map does not fit, creating it again",
            map=wanted.name,
            old=str(table.spec),
            new=str(wanted),
            entries_migrated=len(entries),
        )
        fresh = create_map(wanted)
        fresh.update_batch(entries)
        table.close()
        return fresh

    def _enter(self, policies: list[PolicyMap]) -> None:
        # One batch: a single wait for RCU for all of them.
        self._policies.update_batch([(_index(each.endpoint_id), _index(each.map.fd)) for each in policies])

    def _entered(self) -> dict[int, Map]:
        """Open the maps in hive_policies, by endpoint id."""
        found = {}
        for key, value in self._policies.items():
            endpoint_id, map_id = int.from_bytes(key, "little"), int.from_bytes(value, "little")
            found[endpoint_id] = map_by_id(map_id, policy_name(endpoint_id), writable=True)
        return found

    def _pinned_ids(self) -> set[int]:
        names = (path.name for path in self._directory.iterdir())
        ids = {int(name[-5:]) for name in names if _CANONICAL.fullmatch(name)}
        return {each for each in ids if 1 <= each <= ENDPOINT_IDS}

    def _unpin_misnamed(self) -> None:
        """Remove pins without a number of five digits: no endpoint can own them."""
        for path in self._directory.iterdir():
            number = path.name.removeprefix("cilium_policy_")
            if number != path.name and number.isdecimal() and path.name != policy_name(int(number)):
                self._log.info("stale policy map removed", map=path.name)
                unpin(path)


def _is_pinned_as(path: Path, table: Map) -> bool:
    try:
        with open_map(path) as pinned:
            return pinned.id == table.id
    except BpfError:
        return False


REFILL_DELAY: Final = 0.1
"""Seconds before a refill that no caller waits for, so that it does not compete with a burst of new pods."""


class PoolEmpty(Exception):  # noqa: N818  (a state to wait out, not a fault)
    """Raised when the pool has no free policy map now: await PolicyMaps.ready() and acquire again."""


class PolicyIdsExhausted(HiveError):  # noqa: N818  (named by what happened)
    """Raised when all endpoint ids are in use."""


class PolicyMaps:
    """The pool of endpoint ids with their policy maps. For the event loop only."""

    def __init__(
        self, maps: Maps, settings: MapSettings, lifecycle: Lifecycle, jobs: Jobs, log: Logger
    ) -> None:
        self._maps = maps
        self._settings = settings
        self._directory = maps.directory
        self._base = str(maps.directory)
        self._log = log
        self._pins: PolicyMapPins | None = None
        self._spare: deque[PolicyMap] = deque()
        self._unclaimed: dict[int, PolicyMap] = {}
        self._used: dict[int, PolicyMap] = {}
        self._pinned: set[int] = set()
        """Ids in _unclaimed with correct pins."""
        self._uncreated: deque[int] = deque(range(1, ENDPOINT_IDS + 1))
        self._waiting = 0
        self._low = self._filled = anyio.Event()
        self._failure: BpfError | None = None
        lifecycle.append(Hook("prepare the policy maps", self._start, self._stop))
        jobs.one_shot("top up the policy maps", self._refill)

    def acquire(self) -> PolicyMap:
        """Return a free endpoint id with its empty map, and pin it; one system call, never blocks.

        Raises PoolEmpty if no map is prepared, PolicyIdsExhausted if all ids are in use, BpfError if the map
        cannot be pinned.
        """
        if not self._spare:
            raise self._why_empty()
        policy = self._spare.popleft()
        try:
            self._pin(policy)
        except BaseException:
            self._spare.append(policy)
            raise
        self._used[policy.endpoint_id] = policy
        if len(self._spare) < self._settings.policy_map_pool // 2:
            self._low.set()
        return policy

    async def ready(self) -> None:
        """Wait until acquire() can succeed. Raises HiveError if maps cannot be created."""
        while not self._spare:
            if not isinstance(why := self._why_empty(), PoolEmpty):
                raise why
            self._waiting += 1
            self._low.set()
            try:
                await self._filled.wait()
            finally:
                self._waiting -= 1
            if not self._spare and self._failure is not None:
                raise HiveError(f"no policy map for another endpoint: {self._failure}") from self._failure

    def replace_all(
        self, wanted: Iterable[tuple[PolicyMap, Mapping[PolicyKey, PolicyEntry]]]
    ) -> dict[int, OSError]:
        """Call PolicyMap.replace() for several maps; return the errors by endpoint id.

        The policy epochs advance once, after all writes.
        """
        failed: dict[int, OSError] = {}
        tried: list[int] = []
        try:
            with self._maps.epochs:
                for policy, entries in wanted:
                    tried.append(policy.endpoint_id)
                    try:
                        policy.replace(entries)
                    except BpfError as error:
                        failed[policy.endpoint_id] = error
        except BpfError as error:
            failed |= dict.fromkeys(tried, error)
        return failed

    def release(self, policy: PolicyMap) -> None:
        """Return an unused id to the pool: unpin and empty its map. Idempotent."""
        if self._used.pop(policy.endpoint_id, None) is None:
            return
        unpin(self._directory / policy_name(policy.endpoint_id))
        policy.clear()
        self._spare.append(policy)

    async def prepare(self, ids: Collection[int]) -> None:
        """Create the missing maps of these restored endpoints, so that adopt() need not wait."""
        uncreated = set(self._uncreated)  # searching the deque for each id took 5 ms for 250
        missing = [each for each in ids if each in uncreated]
        for policy in await self._create(missing):
            self._unclaimed[policy.endpoint_id] = policy

    def adopt(self, endpoint_id: int) -> PolicyMap:
        """Take the id and map that an endpoint had before a restart, with its entries, and pin it.

        Waits for RCU if the map is lost and was not created by :meth:`prepare`. Raises HiveError if the id is
        out of range or in use.
        """
        if not 1 <= endpoint_id <= ENDPOINT_IDS:
            raise HiveError(f"endpoint id {endpoint_id} cannot be restored: ids are 1 to {ENDPOINT_IDS}")
        if endpoint_id in self._used:
            raise HiveError(f"endpoint id {endpoint_id} cannot be restored: another endpoint has it already")
        policy = self._unclaimed.pop(endpoint_id, None) or self._take_spare(endpoint_id)
        if policy is None:
            if endpoint_id not in self._uncreated:
                raise HiveError(f"endpoint id {endpoint_id} cannot be restored: creating its map failed")
            self._uncreated.remove(endpoint_id)
            (policy,) = self._started().create([endpoint_id])
        self._used[endpoint_id] = policy  # also if pinning fails: the pod may run, so the id stays in use
        if endpoint_id in self._pinned:
            self._pinned.discard(endpoint_id)  # _start() has just checked the pin: saves 5 ms for 250
        else:
            self._pin(policy)
        return policy

    def all(self) -> list[PolicyMap]:
        """Return all open policy maps, in use or spare."""
        return [*self._used.values(), *self._unclaimed.values(), *self._spare]

    @property
    def used(self) -> Collection[PolicyMap]:
        """The policy maps of endpoints, which are pinned."""
        return self._used.values()

    async def sweep(self) -> None:
        """After all endpoints are restored: recycle maps that none adopted, and remove stale pins."""
        pins = self._started()
        leftover = list(self._unclaimed.values())
        self._unclaimed.clear()
        self._pinned.clear()
        await to_thread.run_sync(partial(pins.sweep, set(self._used)))
        for policy in leftover:
            policy.clear()
        self._spare.extend(leftover)

    async def _start(self) -> None:
        most = sizes(self._settings, 0).policy
        self._pins = PolicyMapPins(self._maps.policies, self._directory, most, self._log, self._maps.epochs)
        self._low, self._filled = anyio.Event(), anyio.Event()
        pinned, spare = await to_thread.run_sync(self._pins.restore)
        self._unclaimed = {policy.endpoint_id: policy for policy in pinned}
        self._pinned = set(self._unclaimed)
        self._spare.extend(spare)
        there = self._unclaimed.keys() | {policy.endpoint_id for policy in spare}
        self._uncreated = deque(filterfalse(there.__contains__, range(1, ENDPOINT_IDS + 1)))
        await self._fill()

    async def _stop(self) -> None:
        for policy in self.all():
            policy.map.close()  # hive_policies keeps the maps
        self._spare.clear()
        self._unclaimed.clear()
        self._used.clear()

    async def _refill(self) -> None:
        while True:
            await self._low.wait()
            if not self._waiting:
                await anyio.sleep(REFILL_DELAY)
            self._low = anyio.Event()
            try:
                await self._fill()
                self._failure = None
            except BpfError as error:
                self._failure = error
                raise  # the job is retried and reported; waiters are woken below
            finally:
                filled, self._filled = self._filled, anyio.Event()
                filled.set()

    async def _fill(self) -> None:
        short = self._settings.policy_map_pool + self._waiting - len(self._spare)
        self._spare.extend(await self._create(list(islice(self._uncreated, max(short, 0)))))

    async def _create(self, ids: list[int]) -> list[PolicyMap]:
        if not ids:
            return []
        for each in ids:
            self._uncreated.remove(each)
        try:
            return await to_thread.run_sync(self._started().create, ids)
        except BaseException:
            self._uncreated.extendleft(reversed(ids))
            raise

    def _take_spare(self, endpoint_id: int) -> PolicyMap | None:
        found = next((policy for policy in self._spare if policy.endpoint_id == endpoint_id), None)
        if found is not None:
            self._spare.remove(found)
        return found

    def _pin(self, policy: PolicyMap) -> None:
        name = policy_name(policy.endpoint_id)
        try:
            pin(policy.map.fd, f"{self._base}/{name}")
        except BpfError as error:
            if error.errno != errno.EEXIST:
                raise
            replace_pin(policy.map.fd, self._directory / name)  # of an earlier agent, or foreign

    def _why_empty(self) -> Exception:
        self._started()
        if self._uncreated or self._spare:
            return PoolEmpty("no policy map is prepared at the moment")
        return PolicyIdsExhausted(
            f"all {ENDPOINT_IDS} endpoint ids of this node are in use: delete pods first"
        )

    def _started(self) -> PolicyMapPins:
        if self._pins is None:
            raise NotStartedError(
                "PolicyMaps was used before the hook 'prepare the policy maps' ran: depend on it"
            )
        return self._pins
