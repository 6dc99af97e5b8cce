"""A function run in a forked child behaves like a call: results, errors, time-outs."""

import gc
import os
import resource
import time
from pathlib import Path

import pytest

from hive.lab.children import Child, ChildDiedError, Stop, run_child

MANY = 1100
"""More than select(2) takes."""


def test_the_result_of_a_child_process_is_returned() -> None:
    assert run_child(divmod, 17, 5) == (3, 2)


def test_the_child_is_another_process() -> None:
    assert run_child(os.getpid) != os.getpid()


def test_an_error_is_raised_here_with_the_childs_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_child(divmod, 1, 0)
    assert "in a child process" in caught.value.__notes__[0]


def test_a_result_that_cannot_be_pickled_raises_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="cannot be handed to the parent"):
        run_child(lambda: lambda: None)


def test_a_child_that_dies_is_reported() -> None:
    with pytest.raises(ChildDiedError):
        run_child(os._exit, 3)


def test_an_overdue_child_is_killed() -> None:
    child = Child(lambda stop: time.sleep(30))
    pid = child.pid
    with pytest.raises(TimeoutError):
        child.result(within=0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_child_processes_run_until_each_is_finished() -> None:
    def wait_for_stop(stop: Stop) -> str:
        assert stop.wait(30)
        return "finished"

    first = Child(wait_for_stop)
    second = Child(wait_for_stop)
    assert first.finish(within=30) == "finished"
    assert second.finish(within=30) == "finished"


def test_a_process_with_thousands_of_descriptors_waits_for_its_child() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MANY + 100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MANY + 100, hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        opened += [os.dup(opened[0]) for _ in range(MANY)]
        child = Child(lambda stop: stop.wait(30))
        assert child.finish(within=30)
    finally:
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptor_is_left_open() -> None:
    gc.collect()  # what earlier tests have left does not go meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    run_child(os.getpid)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
