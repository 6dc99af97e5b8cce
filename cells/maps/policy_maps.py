"""Endpoint ids with their policy maps: handed out in microseconds, because they were made beforehand.

Why: entering a map into hive_policies waits for RCU (15 ms, for one as for twenty); a pod must not.

Every id prepared keeps its map for good: releasing empties it and puts it at the tail of the pool, so that an
id is used again as late as possible.
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


# The policy maps of a stopped agent: which to take over, which to recreate, which to remove.

_PIN = re.compile(r"cilium_policy_(?:v\d+_)?\d+(?:_new)?")  # of a replacement cut short, too
_OWN_CONNTRACK = re.compile(r"cilium_ct(?:_any)?[46]_\d+")
"""Conntrack maps of single endpoints, which Cilium had up to 1.16: we have none."""
_CANONICAL = re.compile(r"cilium_policy_\d{5}")
_index = struct.Struct("<I").pack


class PolicyPins:
    """Pins and array entries of the policy maps. All calls may wait for RCU: not on the event loop."""

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
        """Fresh, empty, unpinned maps for these ids, entered in hive_policies at once."""
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
        """What is there: maps with a pin, of endpoints to be restored; and spare ones, emptied."""
        self._drop_oddly_named()
        active = self._active()
        pinned: list[PolicyMap] = []
        anew: list[PolicyMap] = []
        for endpoint_id in sorted(self._pinned_ids()):
            policy = self._reconciled(endpoint_id, active.pop(endpoint_id, None), anew)
            pinned.append(policy)
        spare: list[PolicyMap] = []
        for endpoint_id, table in sorted(active.items()):
            policy = self._policy(endpoint_id, table)
            if not policy_spec(endpoint_id, self._max_entries).same_as(table.spec):
                table.close()
                policy = self._policy(endpoint_id, create_map(policy_spec(endpoint_id, self._max_entries)))
                anew.append(policy)
            policy.clear()
            spare.append(policy)
        self._enter(anew)
        for policy in pinned:
            policy.reload()
        return pinned, spare

    def sweep(self, known: set[int]) -> None:
        """Remove the pins of maps no endpoint has, of other versions' layouts too.

        One map of another layout makes `cilium-dbg bpf policy get --all` fail altogether.
        """
        wanted = {policy_name(each) for each in known}
        for path in self._directory.iterdir():
            stale = _PIN.fullmatch(path.name) and path.name not in wanted
            if stale or _OWN_CONNTRACK.fullmatch(path.name):
                self._log.info("stale map of an endpoint removed", map=path.name)
                unpin(path)

    def _policy(self, endpoint_id: int, table: Map) -> PolicyMap:
        table.spec = replace(table.spec, voids=endpoint_id)
        return PolicyMap(endpoint_id, table, self._epochs)

    def _reconciled(self, endpoint_id: int, active: Map | None, anew: list[PolicyMap]) -> PolicyMap:
        """The map to go on with, of the one the datapath uses and the one pinned; pinned, and fit for use."""
        path = self._directory / policy_name(endpoint_id)
        table = active
        if table is None:
            table = open_map(path)
        elif not _is_pinned_as(path, table):
            self._log.warning("policy map was pinned by another program, replacing it", map=path.name)
            replace_pin(table.fd, path)
        wanted = policy_spec(endpoint_id, self._max_entries)
        if not wanted.same_as(table.spec):
            table = self._copied(table, wanted)
            replace_pin(table.fd, path)
            active = None
        policy = self._policy(endpoint_id, table)
        if active is None:
            anew.append(policy)
        return policy

    def _copied(self, table: Map, wanted: MapSpec) -> Map:
        """A map as wanted, with the entries of the old one where only its size differs.

        HiveError if they do not fit: part of a policy could allow what the whole denies.
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
            entries_copied=len(entries),
        )
        fresh = create_map(wanted)
        fresh.update_batch(entries)
        table.close()
        return fresh

    def _enter(self, policies: list[PolicyMap]) -> None:
        # One wait for RCU for all of them.
        self._policies.update_batch([(_index(each.endpoint_id), _index(each.map.fd)) for each in policies])

    def _active(self) -> dict[int, Map]:
        """The maps in hive_policies, by endpoint id."""
        found = {}
        for key, value in self._policies.items():
            endpoint_id, map_id = int.from_bytes(key, "little"), int.from_bytes(value, "little")
            found[endpoint_id] = map_by_id(map_id, policy_name(endpoint_id), writable=True)
        return found

    def _pinned_ids(self) -> set[int]:
        names = (path.name for path in self._directory.iterdir())
        ids = {int(name[-5:]) for name in names if _CANONICAL.fullmatch(name)}
        return {each for each in ids if 1 <= each <= ENDPOINT_IDS}

    def _drop_oddly_named(self) -> None:
        """Remove pins without a number of five digits: no endpoint will ever claim them."""
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


LULL: Final = 0.1
"""Seconds that a refill waits if no one needs it, so that it does not compete with a burst of new pods."""


class PoolEmpty(Exception):  # noqa: N818  (a state to wait out, not a fault)
    """No policy map is prepared at the moment: await PolicyMaps.ready() and acquire again."""


class PolicyIdsExhausted(HiveError):  # noqa: N818  (named by what happened)
    """Every endpoint id is in use."""


class PolicyMaps:
    """The pool of endpoint ids. All but the coroutines are synchronous and for the event loop only."""

    def __init__(
        self, maps: Maps, settings: MapSettings, lifecycle: Lifecycle, jobs: Jobs, log: Logger
    ) -> None:
        self._maps = maps
        self._settings = settings
        self._directory = maps.directory
        self._base = str(maps.directory)
        self._log = log
        self._pins: PolicyPins | None = None
        self._spare: deque[PolicyMap] = deque()
        self._unclaimed: dict[int, PolicyMap] = {}
        self._used: dict[int, PolicyMap] = {}
        self._pinned: set[int] = set()
        """Unclaimed ones with maps that are known to be pinned where they should."""
        self._untouched: deque[int] = deque(range(1, ENDPOINT_IDS + 1))
        self._waiting = 0
        self._low = self._filled = anyio.Event()
        self._failure: BpfError | None = None
        lifecycle.append(Hook("prepare the policy maps", self._start, self._stop))
        jobs.one_shot("top up the policy maps", self._top_up)

    def acquire(self) -> PolicyMap:
        """A free endpoint id with its empty map, now pinned. Never blocks: one system call.

        Raises PoolEmpty when none is prepared, PolicyIdsExhausted when all ids are in use, BpfError when the
        map cannot be pinned.
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
        """Wait until acquire() would succeed; raises HiveError when it will not."""
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
        """As PolicyMap.replace() for several; ids of maps of which it could not be done, and why.

        The flows of all are evaluated again after all have been written: one call instead of one for each.
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
        """Take back an id nothing refers to any more: empty and unpin its map. Harmless if repeated."""
        if self._used.pop(policy.endpoint_id, None) is None:
            return
        unpin(self._directory / policy_name(policy.endpoint_id))
        policy.clear()
        self._spare.append(policy)

    async def prepare(self, ids: Collection[int]) -> None:
        """Make sure these ids of endpoints to be restored can be adopted without waiting."""
        untouched = set(self._untouched)  # looking through the deque for each id took 5 ms for 250
        missing = [each for each in ids if each in untouched]
        for policy in await self._create(missing):
            self._unclaimed[policy.endpoint_id] = policy

    def adopt(self, endpoint_id: int) -> PolicyMap:
        """The id and map an endpoint had before a restart, with the entries it had; pinned.

        Waits for RCU if the map is lost and :meth:`prepare` did not know the id. HiveError if the id is
        out of range or in use.
        """
        if not 1 <= endpoint_id <= ENDPOINT_IDS:
            raise HiveError(f"endpoint id {endpoint_id} cannot be restored: ids are 1 to {ENDPOINT_IDS}")
        if endpoint_id in self._used:
            raise HiveError(f"endpoint id {endpoint_id} cannot be restored: another endpoint has it already")
        policy = self._unclaimed.pop(endpoint_id, None) or self._taken_from_spare(endpoint_id)
        if policy is None:
            if endpoint_id not in self._untouched:
                raise HiveError(f"endpoint id {endpoint_id} cannot be restored: making its map failed before")
            self._untouched.remove(endpoint_id)
            (policy,) = self._started().create([endpoint_id])
        self._used[endpoint_id] = policy  # also if pinning fails: the pod may run, so the id stays taken
        if endpoint_id in self._pinned:
            self._pinned.discard(endpoint_id)  # restoring saw to it a moment ago: 5 ms less for 250
        else:
            self._pin(policy)
        return policy

    def all(self) -> list[PolicyMap]:
        """Every open policy map, in use or in reserve."""
        return [*self._used.values(), *self._unclaimed.values(), *self._spare]

    @property
    def used(self) -> Collection[PolicyMap]:
        """Those of endpoints: they are pinned."""
        return self._used.values()

    async def sweep(self) -> None:
        """Once every endpoint is restored: recycle what none adopted, remove stale pins of other layouts."""
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
        self._pins = PolicyPins(self._maps.policies, self._directory, most, self._log, self._maps.epochs)
        self._low, self._filled = anyio.Event(), anyio.Event()
        pinned, spare = await to_thread.run_sync(self._pins.restore)
        self._unclaimed = {policy.endpoint_id: policy for policy in pinned}
        self._pinned = set(self._unclaimed)
        self._spare.extend(spare)
        there = self._unclaimed.keys() | {policy.endpoint_id for policy in spare}
        self._untouched = deque(filterfalse(there.__contains__, range(1, ENDPOINT_IDS + 1)))
        await self._fill()

    async def _stop(self) -> None:
        for policy in self.all():
            policy.map.close()  # they live on in hive_policies
        self._spare.clear()
        self._unclaimed.clear()
        self._used.clear()

    async def _top_up(self) -> None:
        while True:
            await self._low.wait()
            if not self._waiting:
                await anyio.sleep(LULL)
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
        self._spare.extend(await self._create(list(islice(self._untouched, max(short, 0)))))

    async def _create(self, ids: list[int]) -> list[PolicyMap]:
        if not ids:
            return []
        for each in ids:
            self._untouched.remove(each)
        try:
            return await to_thread.run_sync(self._started().create, ids)
        except BaseException:
            self._untouched.extendleft(reversed(ids))
            raise

    def _taken_from_spare(self, endpoint_id: int) -> PolicyMap | None:
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
            replace_pin(
                policy.map.fd, self._directory / name
            )  # what it had before a restart, or what a stranger put there

    def _why_empty(self) -> Exception:
        self._started()
        if self._untouched or self._spare:
            return PoolEmpty("no policy map is prepared at the moment")
        return PolicyIdsExhausted(
            f"all {ENDPOINT_IDS} endpoint ids of this node are in use: delete pods first"
        )

    def _started(self) -> PolicyPins:
        if self._pins is None:
            raise NotStartedError(
                "PolicyMaps was used before the hook 'prepare the policy maps' ran: depend on it"
            )
        return self._pins
