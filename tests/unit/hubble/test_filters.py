"""Flow filters match as in Cilium's Hubble."""

from __future__ import annotations

from typing import Any

import pytest

from cells.hubble.codec import WireMessage, from_json
from cells.hubble.filters import InvalidFilter, compile_filters
from cells.hubble.flow import (
    DNS,
    HTTP,
    AgentEvent,
    DebugEvent,
    Flow,
    FlowFilter,
    HubbleEvent,
    Layer7,
    LostEvent,
)
from tests.unit.hubble.recordings import recorded, recording

TYPES: dict[str, type[WireMessage]] = {
    "flow": Flow,
    "agent_event": AgentEvent,
    "debug_event": DebugEvent,
    "lost_event": LostEvent,
}


def _events() -> dict[str, HubbleEvent]:
    found: dict[str, HubbleEvent] = {}
    for row in recording("filters")["events"]:
        kind = next(name for name in row if name in TYPES)
        event = from_json(TYPES[kind], row[kind])
        assert isinstance(event, HubbleEvent)
        found[row["id"]] = event
    return found


@pytest.fixture(scope="module")
def events() -> dict[str, HubbleEvent]:
    return _events()


OTHER_WORDS = {"cel/flow.verdict", "cel/"}
"""Expressions that Google's C++ library refuses in other words than its Go library."""


@pytest.mark.parametrize("case", recorded("filters"), ids=lambda case: case["name"])
def test_a_filter_lets_through_what_is_recorded(case: dict[str, Any], events: dict[str, HubbleEvent]) -> None:
    allow, deny = (
        [from_json(FlowFilter, each) for each in case.get(name) or ()] for name in ("allow", "deny")
    )
    if "error" in case:
        with pytest.raises(InvalidFilter) as caught:
            compile_filters(allow, deny)
        assert str(caught.value) == case["error"] or case["name"] in OTHER_WORDS
        return
    passes = compile_filters(allow, deny)
    assert [name for name, event in events.items() if passes(event)] == case["match"]


def test_a_pattern_of_python_alone_is_refused() -> None:
    with pytest.raises(InvalidFilter, match="invalid DNS query filter: failed to compile regexp"):
        compile_filters([FlowFilter(dns_query=("(?=a)b",))], [])


def test_a_costly_pattern_ends() -> None:
    slow = FlowFilter(dns_query=("(a*)*b",), destination_fqdn=("*a*a*a*a*a*a*a*a*b",))
    name = "a" * 4000
    passes = compile_filters([slow], [])
    assert not passes(Flow(destination_names=(name,), l7=Layer7(dns=DNS(query=name))))


@pytest.mark.parametrize(
    ("url", "matches"),
    [("/a%2Fb?%zz", True), ("http://web/a/b", True), ("/a/b%zz", False), ("/a/b%4", False)],
)
def test_a_path_that_is_not_escaped_validly_matches_no_filter(url: str, matches: bool) -> None:
    passes = compile_filters([FlowFilter(http_path=("^/a/b",))], [])
    assert passes(Flow(l7=Layer7(http=HTTP(url=url)))) is matches


@pytest.mark.parametrize(
    ("selector", "where"),
    [
        ("app in (a,-x)", "values[1][any.app]"),
        ("k8s:app=web_", "values[0][k8s.app]"),
        ("app!=.", "values[0][any.app]"),
    ],
)
def test_an_invalid_label_value_is_refused_with_its_place(selector: str, where: str) -> None:
    with pytest.raises(InvalidFilter) as caught:
        compile_filters([FlowFilter(source_label=(selector,))], [])
    assert str(caught.value).startswith(
        f"invalid source label filter: unable to parse requirement: {where}: Invalid value: "
    )
