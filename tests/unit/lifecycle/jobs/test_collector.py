"""The garbage collector pauses where long work asks for it, and goes on as before."""

from __future__ import annotations

import gc

import pytest

from lifecycle.jobs import collector_paused


def test_the_collector_runs_again_after_the_outermost_block_even_when_it_raises() -> None:
    assert gc.isenabled()
    with collector_paused():
        with pytest.raises(ZeroDivisionError), collector_paused():
            1 / 0  # noqa: B018
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
