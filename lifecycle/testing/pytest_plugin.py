"""A plugin for pytest: hives in tests without boilerplate, and tests in many orders.

    async def test_a_beat(hive: HiveStarter) -> None:
        running = await hive(beat, settings={"every": 1.0})

    @pytest.mark.seeds(50)
    async def test_it_in_fifty_orders(hive: HiveStarter) -> None: ...

An asynchronous test that takes `hive` needs no other plugin: it runs in a loop of its own, or in that of
anyio's plugin where the test uses that. With ``seeds`` it runs in simulations, in virtual time.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lifecycle.testing.simulation import simulate
from lifecycle.testing.starter import HiveStarter

__all__ = ["hive"]

PATIENCE = "1.0"
SETTLE = 1.0
"""Seconds of virtual time in which waiting tasks end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for the seed to replay and the time that late closers have."""
    text = "run tests with the marker seeds with this one only"
    parser.getgroup("hive").addoption("--hive-seed", type=int, default=None, help=text)
    text = "seconds in which what a test with the fixture hive has left open may still be closed"
    parser.addini("hive_patience", text, default=PATIENCE)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and check the patience."""
    config.addinivalue_line("markers", "seeds(count): run in so many orders, each made up from a seed")
    try:
        _patience(config)
    except ValueError:
        raise pytest.UsageError("hive_patience: expected seconds, such as 1.0") from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate a test for each seed."""
    if (mark := metafunc.definition.get_closest_marker("seeds")) is None:
        return
    count = mark.args[0] if len(mark.args) == 1 else None
    asks = "hive" in metafunc.fixturenames and inspect.iscoroutinefunction(metafunc.function)
    if not asks or type(count) is not int or count < 1:
        text = "expected seeds(count), of 1 or more, on an asynchronous test with the fixture hive"
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {text}")
    chosen = metafunc.config.getoption("--hive-seed")
    seeds = range(count) if chosen is None else [chosen]
    metafunc.parametrize("_hive_seed", seeds, ids=[f"seed{seed}" for seed in seeds], indirect=True)


@pytest.fixture
def _hive_seed(request: pytest.FixtureRequest) -> int | None:
    """The seed of this run; None for tests in real time."""
    return getattr(request, "param", None)


@pytest.fixture
def hive(request: pytest.FixtureRequest, _hive_seed: int | None) -> HiveStarter:
    """Starts hives: ``running = await hive(*cells, settings={...})``. They stop when the test ends."""
    return HiveStarter(0.0 if _hive_seed is not None else _patience(request.config))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a test that takes `hive`, then stop the hives and check for leaks."""
    starter, test = pyfuncitem.funcargs.get("hive"), pyfuncitem.obj
    if not isinstance(starter, HiveStarter) or not inspect.iscoroutinefunction(test):
        return None
    seed = pyfuncitem.funcargs.get("_hive_seed")
    body = _around(starter, test, SETTLE if seed is not None else 0.0)
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    if isinstance(seed, int):
        try:
            simulate(lambda world: world.run(lambda: body(**arguments)), seed)
        except BaseException as error:
            error.add_note(f"to replay it alone: pytest --hive-seed={seed} '{pyfuncitem.nodeid}'")
            raise
        return True
    if "anyio_backend" in pyfuncitem.fixturenames:
        pyfuncitem.obj = body
        return None
    with asyncio.Runner() as runner:
        runner.run(body(**arguments))
    return True


def _around(
    starter: HiveStarter, test: Callable[..., Coroutine[Any, Any, None]], settle: float
) -> Callable[..., Coroutine[Any, Any, None]]:
    async def body(**arguments: object) -> None:
        async with starter.around(settle=settle):
            await test(**arguments)

    return body


def _patience(config: pytest.Config) -> float:
    return float(config.getini("hive_patience"))
