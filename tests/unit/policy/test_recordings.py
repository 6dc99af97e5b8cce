"""Every recorded case of Cilium's policy engine, through this one: same refusals, verdicts and entries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import pytest

from cells.policy.compute import Entry, Key, PolicyConflictError
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.compute.map_state import lookup
from cells.policy.labels import FQDNSelector
from cells.policy.rules import MAX_PORT, PROTOCOLS, SUPPORTED, Direction, PolicyError
from cells.policy.selectors import Selector
from tests.support.counts import Count
from tests.unit.policy.exclusions import Difference, Fault, upstream_faults
from tests.unit.policy.replay import (
    DIRECTIONS,
    PROTOCOL_NUMBERS,
    Case,
    Json,
    by_identity,
    names,
    recorded_entries,
)

AUTH_TYPES = {"disabled": 0, "spire": 1, "test-always-fail": 2}
counts: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _counted(count: Count) -> Iterator[None]:
    counts.clear()
    yield
    count("recordings of the policy engine", counts)


def refused_by_design(case: Case, recorded: Json, error: PolicyError | None) -> bool:
    """Objects that upstream let through by mistake, and this engine refuses."""
    return (
        error is not None
        and recorded["result"] == "accepted"
        and (
            error.reason == "rule cannot have NodeSelector"
            or "ICMP type" in error.reason
            or bool(case.recording.get("bypass_crd_schema"))
        )
    )


def imported(case: Case) -> bool:
    """Import the case's objects, compare each answer; whether this engine took what upstream took."""
    same = True
    for recorded, error in zip(case.recording["expect"]["imports"], case.import_objects(), strict=True):
        if refused_by_design(case, recorded, error):
            same = False
            continue
        if error is None and recorded["result"] == "refused":
            assert [one for one in case.unenforced if one.reason in recorded["error"]], recorded
            continue
        assert (error is None) == (recorded["result"] == "accepted"), (recorded, str(error))
        if error is not None and recorded.get("stage") == "agent-parse" and "error" in recorded:
            texts = {recorded["error"], *recorded.get("error_variants", ())}
            assert str(error) in texts or set(str(error).split()) == set(recorded["error"].split())
        if error is not None:
            assert error.reason
    return same


@pytest.mark.parametrize("name", names())
def test_a_recorded_policy_case_is_reproduced(name: str) -> None:
    case = Case(name)
    if not imported(case):
        counts["with an object refused that upstream accepts by mistake"] += 1
        return
    faults = upstream_faults(case)
    counts["replayed"] += 1
    for fault in faults:
        counts[f"but for one difference: {fault.reason}"] += 1
    for endpoint in case.recording["endpoints"]:
        expected = case.recording["expect"]["endpoints"].get(endpoint["name"])
        if expected is not None:
            compare(case, endpoint, expected, faults)


@pytest.mark.parametrize("name", names())
def test_a_recorded_policy_case_is_reproduced_with_served_features(name: str) -> None:
    """What is not served allows nothing: no packet passes that does not pass in the recording."""
    case = Case(name, SUPPORTED)
    if not imported(case):
        return
    faults = upstream_faults(case)
    for endpoint in case.recording["endpoints"]:
        expected = case.recording["expect"]["endpoints"].get(endpoint["name"])
        if expected is None or (case.unenforced and "policy_error" in expected):
            continue
        compare(case, endpoint, expected, faults)


def compare(case: Case, endpoint: Json, expected: Json, faults: Collection[Fault] = ()) -> None:
    if "policy_error" in expected:
        with pytest.raises(PolicyConflictError) as caught:
            case.entries(endpoint)
        assert str(caught.value) in expected["policy_error_variants"]
        return
    entries = case.entries(endpoint)
    same_verdicts(entries, expected.get("verdicts", ()), faults)
    if faults:
        return
    for direction in DIRECTIONS:
        assert case.policy(endpoint, direction).enforced == expected[f"{direction}_enforced"]
    same_entries(entries, expected["map"])
    for direction in DIRECTIONS:
        same_selectors(case.policy(endpoint, direction), expected["filters"])
    counts["entries"] += len(expected["map"])


def same_verdicts(
    entries: dict[tuple[Direction, Key], Entry], recorded: Json, faults: Collection[Fault]
) -> None:
    directions = {direction: by_identity(entries, direction) for direction in DIRECTIONS}
    for one in recorded:
        for result, identities in one["result"].items():
            for identity in identities:
                protocol = PROTOCOL_NUMBERS[one["protocol"]]
                match = lookup(directions[one["direction"]], identity, protocol, one["port"])
                seen = Difference(one["protocol"], identity, result.split()[0], match.verdict)
                assert seen.recorded == seen.ours or any(fault.explains(seen) for fault in faults), (
                    f"{one['direction']} {one['port']}: {seen}"
                )
                counts["verdicts"] += 1


def same_selectors(policy: DirectionPolicy, recorded: Json) -> None:
    """Compare the selectors of each port; ranges of one port are single ports here."""
    ours: dict[object, list[str]] = {}
    for filter_ in policy.filters:
        end = filter_.port.end or filter_.port.port
        ours[filter_.port.protocol, filter_.port.port, end, filter_.port.name] = as_text(
            peer.as_object() if isinstance(peer, Selector) else named(peer) for peer in filter_.selectors
        )
    theirs: dict[object, list[str]] = {}
    for one in recorded:
        if one["direction"] == policy.direction:
            protocol = PROTOCOLS[one["protocol"].upper()]
            port, name, end = one["port"], one.get("port_name", ""), one.get("end_port", 0)
            whole = port == 0 and end == MAX_PORT
            key = (protocol, port, port if whole else max(port, end), name)
            theirs[key] = as_text(each["selector"] for each in one["selectors"])
    assert ours == theirs


def as_text(selectors: Iterable[object]) -> list[str]:
    return sorted(json.dumps(one, sort_keys=True) for one in selectors)


def named(selector: FQDNSelector) -> dict[str, str]:
    fields = {"matchName": selector.match_name, "matchPattern": selector.match_pattern}
    return {key: value for key, value in fields.items() if value}


def same_entries(entries: dict[tuple[Direction, Key], Entry], recorded: Json) -> None:
    wanted = recorded_entries(recorded)
    for where, entry in wanted.items():
        if where not in entries:
            assert entry["deny"], f"{where} is missing"
            assert denied_more_broadly(where, entries), f"{where} is missing"
    for where in entries.keys() - wanted.keys():
        assert where[1].identity, f"{where} is too much"
        anybody = entries.get((where[0], Key(0, where[1].ports)))
        assert anybody is not None, f"{where} is too much"
        assert anybody.same_effect(entries[where]) or anybody.redirect == entries[where].redirect
    for where in entries.keys() & wanted.keys():
        entry, known = entries[where], wanted[where]
        assert entry.deny == known["deny"]
        assert (entry.redirect.name if entry.redirect else None) == known.get("redirect", {}).get("proxy")
        assert entry.auth_type == AUTH_TYPES[known.get("auth_type", "disabled")]


def denied_more_broadly(where: tuple[Direction, Key], entries: dict[tuple[Direction, Key], Entry]) -> bool:
    """Upstream repeats denies inside wider ones of the same identity, for prefixes inside denied prefixes."""
    direction, key = where
    return any(
        entry.deny and way == direction and other.identity == key.identity and other.ports.covers(key.ports)
        for (way, other), entry in entries.items()
    )


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("steps-")])
def test_a_recorded_series_of_policies_is_reproduced(name: str) -> None:
    case = Case(name)
    assert imported(case)
    steps = case.recording["steps"]
    for step, expected in zip(steps, case.recording["expect"]["steps"][1:], strict=True):
        for one in step.get("apply", ()):
            case.apply(one)
        for one in step.get("delete", ()):
            case.delete(one)
        for added in (*expected.get("identities_added", ()), *expected.get("local_identities_added", ())):
            case.add_identity(added)
        for vanished in (
            *expected.get("identities_deleted", ()),
            *expected.get("local_identities_deleted", ()),
        ):
            case.cache.remove_identity(vanished)
        assert case.repository.revision == expected["revision"]
        for endpoint in case.recording["endpoints"]:
            recorded = expected["endpoints"].get(endpoint["name"])
            if recorded is not None and "map" in recorded:
                same_after_step(case, endpoint, recorded)
        counts["steps"] += 1


def same_after_step(case: Case, endpoint: Json, recorded: Json) -> None:
    """As a whole computation would have it: what upstream leaves behind, or forgets, is not copied."""
    differs = recorded.get("differs_from_full_recomputation", {})
    left_behind = recorded_entries(differs.get("only_incremental", ()))
    wanted = recorded_entries(recorded["map"])
    retained = [one for where, one in wanted.items() if where not in left_behind]
    same_entries(case.entries(endpoint), [*retained, *differs.get("only_full", ())])


def test_every_recording_is_counted() -> None:
    assert len(names()) >= 386
