"""The order of the agent's start according to its graph, without a start or privileges."""

from __future__ import annotations

import re

import msgspec
import pytest

from cells.agent import agent
from lifecycle import Hive
from lifecycle.graph import Graph
from lifecycle.hints.keys import type_name
from tests.support.agent_order import ORDER

each_fact = pytest.mark.parametrize(
    ("first", "then"), ORDER, ids=[f"{type_name(first)}-{type_name(then)}" for first, then in ORDER]
)


@pytest.fixture(scope="module")
def graph() -> Graph:
    """The agent's graph."""
    return Hive(agent).graph()


def hooks_of(graph: Graph, kind: object) -> set[str]:
    """The hooks of what provides a type."""
    one_of = re.compile(rf"(?:^|, | and ){re.escape(type_name(kind))}(?:$|, | and )")
    owners = {one.id for one in graph.constructors if one_of.search(one.provides)}
    return {hook.id for hook in graph.hooks if hook.constructor in owners}


def waits_for(graph: Graph, hook: str) -> set[str]:
    """Every hook that must have started before this one begins."""
    after = {one.id: one.after for one in graph.hooks}
    found: set[str] = set()
    pending = [hook]
    while pending:
        new = set(after[pending.pop()]) - found
        found |= new
        pending += new
    return found


def follows(graph: Graph, first: object, then: object) -> bool:
    """Whether every hook of the second type waits for all hooks of the first, which both have some."""
    before, after = hooks_of(graph, first), hooks_of(graph, then)
    assert before, f"{type_name(first)} has no hook"
    assert after, f"{type_name(then)} has no hook"
    return all(before <= waits_for(graph, hook) for hook in after)


@each_fact
def test_the_fact_follows_from_what_needs_what(graph: Graph, first: object, then: object) -> None:
    assert follows(graph, first, then)


@each_fact
def test_the_fact_is_missed_where_nothing_sees_to_it(graph: Graph, first: object, then: object) -> None:
    hasty = hooks_of(graph, then)
    hooks = [msgspec.structs.replace(hook, after=()) if hook.id in hasty else hook for hook in graph.hooks]
    assert not follows(msgspec.structs.replace(graph, hooks=hooks), first, then)
