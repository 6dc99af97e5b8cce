"""The policy maps of a stopped agent: which to take over, which to recreate, which to remove.

For:    PolicyMaps, in a worker thread. Needs: hive_policies, the directory of pins. Gives: PolicyPins.
"""

import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from cells.maps.bpf.map import Map, MapSpec, create_map, map_by_id, open_map
from cells.maps.bpf.syscall import BpfError, replace_pin, unpin
from cells.maps.policy.policy_map import PolicyMap
from cells.maps.sizes import ENDPOINT_IDS
from cells.maps.specs import policy_name, policy_spec
from lifecycle import HiveError, Logger

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
        changed: Callable[[int], object],
    ) -> None:
        self._policies = policies
        self._directory = directory
        self._max_entries = max_entries
        self._log = log
        self._changed = changed

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
        return PolicyMap(endpoint_id, table, self._changed)

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
            found[endpoint_id] = map_by_id(map_id, policy_name(endpoint_id))
        return found

    def _pinned_ids(self) -> set[int]:
        names = (path.name for path in self._directory.iterdir())
        ids = {int(name[-5:]) for name in names if _CANONICAL.fullmatch(name)}
        return {each for each in ids if 1 <= each <= ENDPOINT_IDS}

    def _drop_oddly_named(self) -> None:
        """Remove pins whose number is not written with five digits: no endpoint will ever claim them."""
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
