"""What every tier uses: fixtures, the order of tests, a place of their own, and a look at what they leave."""

import gc
import logging
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from lifecycle.process.logs import log_level, set_log_level
from tests.support import counts, machine
from tests.support.counts import count
from tests.support.examples import scaled
from tests.support.order import shuffled
from tests.support.progress import Progress

__all__ = ["count"]

# A busy machine is not a fault of the tested code.
settings.register_profile(
    "hive", max_examples=scaled(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hive")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in a shell's background. What the tests start would inherit it, and not be interruptible either.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # By nohup, which goes on: a handler is not inherited, as ignoring is.
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An agent that a test runs to its end here leaves signals as a process has them that ends.

    It does not end the process some seconds later, as it would its own.
    """
    monkeypatch.setattr("lifecycle.hive.signals.bound_end", lambda name, code: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """A hive that a test runs here sets up the process's logs: the next test has them as they were."""
    configured, config, level = structlog.is_configured(), structlog.get_config(), log_level()
    handlers = list(logging.getLogger().handlers)
    yield
    if configured:
        structlog.configure(**config)
    else:
        structlog.reset_defaults()
    if log_level() != level:
        set_log_level(level)
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def anyio_backend() -> str:
    """All async tests run on asyncio, as the agent does."""
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of our own."""
    group = parser.getgroup("hive")
    group.addoption("--shuffle", action="store_true", help="run unit tests in an order made up from --seed")
    group.addoption("--seed", type=int, default=None, help="of --shuffle; one is drawn and shown otherwise")


_FOLDER = pytest.StashKey[Path]()
_WATCH = pytest.StashKey[machine.Watch]()
_LEFT = pytest.StashKey[list[str]]()


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _only_distributes(config: pytest.Config) -> bool:
    """Whether other processes run the tests."""
    return not _is_worker(config) and config.getoption("dist", "no") != "no"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed, make the folder of temporary files, and show how far the tests are."""
    if _is_worker(config):
        config.option.seed = config.workerinput["seed"]  # type: ignore[attr-defined]  # xdist's
    elif config.option.shuffle and config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(10**6)
    config.stash[_FOLDER] = machine.temporary_folder()
    config.stash[_LEFT] = []


def pytest_report_header(config: pytest.Config) -> str | None:
    """How to repeat the order."""
    return f"shuffled: --shuffle --seed={config.option.seed}" if config.option.shuffle else None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Move into a place of our own, and look at it as it is before the tests."""
    config = session.config
    if (terminal := config.pluginmanager.get_plugin("terminalreporter")) is not None and not _is_worker(
        config
    ):
        config.pluginmanager.register(Progress(terminal, threaded=_only_distributes(config)), "progress")
    if not _only_distributes(config) and not config.option.collectonly:
        machine.enter()
        config.stash[_WATCH] = machine.Watch()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep what collecting makes, half a gigabyte with the recordings, out of every later look for garbage.

    Tests of leaks ask for a whole collection each, which would take a second of it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order of this run."""
    if config.option.shuffle:
        items[:] = shuffled(items, config.option.seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Look at the machine after the tests of each file, and keep what they cached out of collections.

    Tests of leaks and of the benchmarks ask for whole collections: these look at the objects of one file.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        item.config.stash[_WATCH].look(item.nodeid.split("::")[0])
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes have one order."""
    node.workerinput["seed"] = node.config.option.seed


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect what the tests of a process left."""
    node.config.stash[_LEFT] += getattr(node, "workeroutput", {}).get("left", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when the tests left something, and remove what it used itself."""
    config = session.config
    left = config.stash[_LEFT]
    if (watch := config.stash.get(_WATCH, None)) is not None:
        left += watch.left()
    if _is_worker(config):
        config.workeroutput["left"] = left  # type: ignore[attr-defined]  # xdist's
    elif left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        machine.remove(config.stash[_FOLDER])


_SECOND = {"crash", "image", "lab", "matrix"}
"""Folders of the node tier that run beside the others."""
_THIRD = "test_r"
"""From which file on those of tests/node/agent run in the third line: all three take equally long."""


def _line(folder: str, file: str) -> str:
    """Which of the node tier's lines a file belongs to; the files of one run one after another."""
    if folder in _SECOND:
        return "second"
    return "first" if folder == "agent" and file < _THIRD else "third"


class _Spread(LoadFileScheduling):  # type: ignore[misc]
    """The tests of a file stay together; whole agents run at most three at a time, and one browser.

    What one test of the chart has rendered, those of other files compare, too.
    """

    def _split_scope(self, nodeid: str) -> str:
        tests, tier, folder, *below = nodeid.split("/")
        if tier == "node":
            return f"{tests}/node/{_line(folder, below[0] if below else '')}"
        if folder == "deploy" and below[0].startswith("test_chart"):
            return f"{tests}/{tier}/{folder}/test_chart"
        return f"{tests}/{tier}" if tier == "browser" else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Spread:
    """How tests are spread over processes, if they are."""
    return _Spread(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report what the tests have counted, and what they left."""
    if left := config.stash[_LEFT]:
        terminalreporter.section("left on the machine", red=True)
        for line in left:
            terminalreporter.line(line)
    if (folder := config.stash[_FOLDER]).exists():
        terminalreporter.line(f"files of these tests: {folder}")
    reports = [each for kind in terminalreporter.stats.values() for each in kind]
    counted = list(counts.lines(each for each in reports if isinstance(each, pytest.TestReport)))
    if counted:
        terminalreporter.section("recordings")
        for line in counted:
            terminalreporter.line(line)
