"""Endpoint state transitions, the status log, and their API form."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.endpoint import Code, State, StatusLog, displayed, health_of
from cells.endpoint.model import STATUS_LOG_SIZE, Subject, TransitionOutcome, transition
from tests.unit.endpoint.fakes import Node, request

# Cilium 1.17's table of transitions
TABLE = """
"" : waiting-for-identity restoring
waiting-for-identity : ready disconnecting invalid
ready : waiting-for-identity disconnecting waiting-to-regenerate restoring
disconnecting : disconnected
waiting-to-regenerate : disconnecting restoring
regenerating : waiting-for-identity disconnecting waiting-to-regenerate restoring
restoring : disconnecting restoring
"""
ALLOWED = {
    (State(old.strip().strip('"')), State(new))
    for line in TABLE.strip().splitlines()
    for old, news in [line.split(" : ")]
    for new in news.split()
}
BUILDER = {
    (State.WAITING_TO_REGENERATE, State.REGENERATING),
    (State.RESTORING, State.REGENERATING),
    (State.REGENERATING, State.READY),
}
states = st.sampled_from(State)


@given(states, states)
def test_exactly_the_documented_transitions_are_accepted(old: State, new: State) -> None:
    assert (transition(old, new) is TransitionOutcome.ACCEPTED) == ((old, new) in ALLOWED)
    assert (transition(old, new, builder=True) is TransitionOutcome.ACCEPTED) == ((old, new) in BUILDER)


@given(st.lists(st.tuples(states, st.booleans())))
def test_final_states_have_no_transition(path: list[tuple[State, bool]]) -> None:
    state = State.NEW
    for wanted, builder in path:
        was = state
        if transition(state, wanted, builder=builder) is TransitionOutcome.ACCEPTED:
            state = wanted
        if was in {State.DISCONNECTED, State.INVALID}:
            assert state is was
        assert state is not State.NOT_READY


def test_a_transition_to_the_current_state_is_refused_silently(tmp_path: Path) -> None:
    node = Node(tmp_path)
    endpoint = node.create(request())
    registry = node.endpoints._registry
    assert registry.set_state(endpoint.id, State.WAITING_TO_REGENERATE, "first")
    before = len(node.endpoints.status(endpoint.id).entries())
    assert not registry.set_state(endpoint.id, State.WAITING_TO_REGENERATE, "again")
    assert len(node.endpoints.status(endpoint.id).entries()) == before


def test_a_skipped_transition_is_in_the_log_and_changes_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    endpoint = node.create(request())
    assert not node.endpoints._registry.set_state(endpoint.id, State.INVALID, "just so")
    newest = node.endpoints.status(endpoint.id).newest
    assert newest is not None
    assert newest.code is Code.WARNING
    assert newest.message == "Skipped invalid state transition to invalid due to: just so"
    assert node.endpoints.get(endpoint.id) == endpoint


def test_the_log_keeps_the_newest_entries() -> None:
    log = StatusLog()
    for number in range(STATUS_LOG_SIZE + 10):
        log.add(Code.OK, Subject.OTHER, str(number), State.READY)
    entries = log.entries()
    assert len(entries) == 256
    assert (entries[0].message, entries[-1].message) == ("265", "10")


def test_a_failure_shows_until_the_same_subject_goes_well() -> None:
    log = StatusLog()
    log.add(Code.FAILURE, Subject.BPF, "boom", State.REGENERATING)
    log.add(Code.OK, Subject.OTHER, "fine", State.READY)
    assert displayed(State.READY, log) is State.NOT_READY
    assert displayed(State.REGENERATING, log) is State.REGENERATING
    log.add(Code.OK, Subject.BPF, "built", State.READY)
    assert displayed(State.READY, log) is State.READY


@pytest.mark.parametrize(
    ("state", "overall", "bpf", "policy", "connected"),
    [
        (State.REGENERATING, "Pending", "Pending", "Pending", True),
        (State.WAITING_FOR_IDENTITY, "Disabled", "Disabled", "Bootstrap", True),
        (State.NOT_READY, "Warning", "Warning", "Warning", True),
        (State.READY, "OK", "OK", "OK", True),
        (State.RESTORING, "Disabled", "Disabled", "Disabled", False),
        (State.DISCONNECTED, "Disabled", "Disabled", "Disabled", False),
    ],
)
def test_health_follows_from_the_state(
    state: State, overall: str, bpf: str, policy: str, connected: bool
) -> None:
    health = health_of(state)
    assert (health.overall, health.bpf, health.policy, health.connected) == (overall, bpf, policy, connected)
