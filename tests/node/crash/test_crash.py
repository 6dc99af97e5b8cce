"""The agent killed before each changing call, and after the last: no partial state remains."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hive.lab import agent_process
from hive.lab.demo.upgrade import second_build
from hive.lab.node import Lab, create, destroy, exclusive, wait_exited
from tests.support.account import agreed
from tests.support.agents import invoke, serving
from tests.support.crash.drill import POINTS, SEED, SURVIVORS, Drill, chosen

pytestmark = [pytest.mark.node, pytest.mark.timeout(300 if POINTS else 3600)]


@pytest.fixture
def drill(node: Lab, tmp_path: Path) -> Iterator[Drill]:
    drill = Drill(node, tmp_path)
    yield drill
    drill.close()


@contextmanager
def naming_point(lab: Lab, point: int, calls: list[str]) -> Iterator[None]:
    """Name the point in what goes wrong."""
    try:
        yield
    except BaseException as error:
        call = calls[point - 1] if point <= len(calls) else "at rest"
        error.add_note(f"killed before {call}\n{agent_process.log_end(lab)}")
        raise


def test_an_agent_killed_at_any_call_of_its_first_start_recovers(drill: Drill) -> None:
    calls = drill.record_start()
    serving(drill.lab)
    drill.keep_in_mind()
    for number in chosen("first start", 1, len(calls)):
        with exclusive():  # a start is a first one in a new node only
            destroy(drill.lab)
            create(drill.lab)
        with naming_point(drill.lab, number, calls):
            drill.cut_start(number, len(calls))
            serving(drill.lab)
            drill.whole()


def test_a_point_that_is_not_reached_fails(drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.crash.drill.WITHIN", 2.0)
    drill.record_start()
    with pytest.raises(AssertionError, match=r"not killed: it rests after \d+ calls, before its point 1000"):
        drill.cut_start(1000, 1000)
    drill.start()
    drill.cut_after(1000)
    agent_process.terminate(drill.lab)
    with pytest.raises(AssertionError, match=r"ended after \d+ calls, before its point"):
        drill.expect_cut()


def starts(drill: Drill, what: str, *settings: str, between: bool) -> None:
    """Cut starts with these settings; ``between`` them, an agent with none serves."""
    serving(drill.lab)
    drill.keep_in_mind()
    agent_process.crash(drill.lab)
    calls = drill.record_start(*settings)
    if between:
        serving(drill.lab)
        drill.whole()
        agent_process.crash(drill.lab)
        calls = drill.record_start(*settings)
    serving(drill.lab)
    for number in chosen(what, 1, len(calls)):
        with naming_point(drill.lab, number, calls):
            agent_process.crash(drill.lab)
            drill.cut_start(number, len(calls), *settings)
            serving(drill.lab)
            drill.whole()
    agent_process.crash(drill.lab)


def test_an_agent_killed_at_any_call_of_restore_recovers(drill: Drill) -> None:
    with drill.survivors():
        starts(drill, "restore", between=False)


def test_an_agent_killed_at_any_call_of_an_upgrade_recovers(drill: Drill) -> None:
    """Another build of the datapath, and another size of a map with rows that move: there, and back again."""
    build = f"--datapath-object={second_build(drill.lab)}"
    with drill.survivors():
        starts(drill, "upgrade", build, "--bpf-ct-global-any-max=70000", between=True)


def test_an_agent_killed_at_any_call_of_its_stop_recovers(drill: Drill) -> None:
    def stop() -> None:
        pid = agent_process.running(drill.lab)
        assert pid is not None
        os.kill(pid, signal.SIGTERM)

    def stopped() -> None:
        pid = agent_process.running(drill.lab)
        assert pid is None or wait_exited(pid, 60), agent_process.log_end(drill.lab)
        agent_process.crash(drill.lab)

    with drill.survivors():
        before = drill.start()
        drill.keep_in_mind()
        stop()
        stopped()
        calls = drill.counted_lines[before:]
        for number in chosen("shutdown", 1, len(calls)):
            with naming_point(drill.lab, number, calls):
                drill.start()
                if number <= len(calls):
                    drill.cut_after(number)
                stop()
                if number <= len(calls):
                    drill.expect_cut()
                stopped()
                serving(drill.lab)
                drill.whole()
                agent_process.crash(drill.lab)


def test_an_agent_killed_at_any_call_of_an_add_recovers(drill: Drill) -> None:
    adds(drill, "ADD", drill.start)


def test_an_agent_killed_again_during_recovery_recovers(drill: Drill) -> None:
    """Its successor is killed as well, while it clears away what the first one left."""
    chance = random.Random(f"{SEED} recovery")  # noqa: S311 (the same points each time)

    def recover() -> None:
        calls = len(plain)
        drill.cut_start(chance.randint(1, calls * 9 // 10), calls)  # of another past: it may make fewer
        drill.start()

    serving(drill.lab)
    agent_process.crash(drill.lab)
    plain = drill.record_start()
    adds(drill, "ADD and recovery", recover)


def adds(drill: Drill, what: str, recover: Callable[[], object]) -> None:
    """Cut ADDs, and look at what there is once ``recover`` has brought an agent back."""
    lab = drill.lab
    lab.hold_pod("cut")
    with drill.survivors():
        before = drill.start()
        drill.keep_in_mind()
        assert invoke(lab, "cut", "ADD").code == 0
        calls = drill.counted_lines[before : drill.made]
        assert invoke(lab, "cut", "DEL").code == 0
        for number in chosen(what, 1, len(calls)):
            with naming_point(lab, number, calls):
                if number <= len(calls):
                    drill.cut_after(number)
                done = invoke(lab, "cut", "ADD")
                if number <= len(calls):
                    drill.expect_cut()
                agent_process.crash(lab)
                recover()
                if done.code == 0:
                    drill.whole(done.json["ips"][0]["address"].partition("/")[0])
                else:  # the runtime got an error: there is a whole pod, or none
                    listed = {ip for ip, _, _ in agreed(lab).listed.values()}
                    assert len(listed) <= SURVIVORS + 1
                    drill.whole(*listed)
                assert invoke(lab, "cut", "DEL").code == 0
                drill.whole()
                again = invoke(lab, "cut", "ADD")
                assert again.code == 0, again
                assert invoke(lab, "cut", "DEL").code == 0


def test_an_agent_killed_at_any_call_of_a_delete_recovers(drill: Drill) -> None:
    lab = drill.lab
    lab.hold_pod("cut")
    with drill.survivors():
        drill.start()
        drill.keep_in_mind()
        assert invoke(lab, "cut", "ADD").code == 0
        before = drill.made
        assert invoke(lab, "cut", "DEL").code == 0
        calls = drill.counted_lines[before : drill.made]
        for number in chosen("DEL", 1, len(calls)):
            with naming_point(lab, number, calls):
                assert invoke(lab, "cut", "ADD").code == 0
                if number <= len(calls):
                    drill.cut_after(number)
                done = invoke(lab, "cut", "DEL")
                if number <= len(calls):
                    drill.expect_cut()
                agent_process.crash(lab)
                drill.start()
                if done.code != 0:
                    assert invoke(lab, "cut", "DEL").code == 0
                drill.whole()


def test_an_agent_killed_at_any_call_of_the_delete_queue_recovers(drill: Drill) -> None:
    """Deletes queued while no agent was there, its successor killed while it does them."""
    lab = drill.lab
    namespaces = {"first": "/run/netns/first", "second": None}
    """The plugin gets one only: it removes its link, and leaves the other to the agent."""
    for pod in namespaces:
        lab.hold_pod(pod)

    def queue() -> None:
        for pod in namespaces:
            assert invoke(lab, pod, "ADD").code == 0
        agent_process.crash(lab)
        for pod, namespace in namespaces.items():
            assert invoke(lab, pod, "DEL", CNI_NETNS=namespace).code == 0

    def record() -> list[str]:
        queue()
        calls = drill.record_start()
        serving(lab)
        return calls

    with drill.survivors():
        serving(lab)
        drill.keep_in_mind()
        record()  # the first time, spare maps are made anew
        calls = record()
        (begins,) = (number for number, call in enumerate(calls, 1) if call.endswith("deleteQueue/lockfile"))
        for number in chosen("queue", begins, len(calls)):
            with naming_point(lab, number, calls):
                queue()
                drill.cut_start(number, len(calls))
                serving(lab)
                drill.whole()
        agent_process.crash(lab)
