"""A hive as a process: signals, exit codes, standard error, logging, and the cost of imports."""

import errno
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from lifecycle import HiveError, UsageError, configure_logging, exit_code, explain
from lifecycle.hive.signals import ONE_REQUEST

ROOT = Path(__file__).resolve().parents[3]

DAEMON = """
import sys
import anyio
from lifecycle import *

configure_logging("info", "logfmt")

class Port(Settings, frozen=True):
    port: int = 80
    def validate(self):
        if self.port > 65535:
            raise ValueError(f"port {self.port}: expected 1 to 65535")

class Server:
    def __init__(self, port: Port, lifecycle: Lifecycle, shutdown: Shutdown, jobs: Jobs) -> None:
        self.shutdown, self.jobs = shutdown, jobs
        DO_CONSTRUCT
        lifecycle.append(Hook("listen", self.start, self.stop))
    async def start(self):
        DO_START
        print("up", flush=True)
    async def job(self):
        DO_JOB
    async def stop(self):
        DO_STOP
        print("down", flush=True)

cell = module("server", "Server", config(Port), provide(Server), invoke(Server))
sys.exit(anyio.run(Hive(cell, settings=Sources(sys.argv[1:]), name="daemon", OPTIONS).run))
"""


def daemon(
    *argv: str,
    start: str = "pass",
    stop: str = "pass",
    job: str = "pass",
    construct: str = "pass",
    options: str = "",
) -> "subprocess.Popen[str]":
    source = DAEMON.replace("DO_START", start).replace("DO_STOP", stop).replace("DO_JOB", job)
    source = source.replace("DO_CONSTRUCT", construct)
    source = source.replace(", OPTIONS", f", {options}" if options else "")
    return subprocess.Popen(
        [sys.executable, "-c", source, *argv],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_in_order(number: signal.Signals) -> None:
    with daemon() as process:
        assert line(process) == "up"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (out.strip(), process.returncode) == ("down", 0)
    assert "msg=stopped module=daemon" in err


def test_a_second_signal_ends_at_once() -> None:
    with daemon(stop="print('stopping', flush=True); await anyio.sleep_forever()") as process:
        assert line(process) == "up"
        process.terminate()
        assert line(process) == "stopping"
        later(ONE_REQUEST)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 1)
    assert "daemon: second signal, leaving at once" in err


def later(seconds: float) -> None:
    """Wait until so much time has passed: what is under test is what time makes of it."""
    threading.Event().wait(seconds)


def test_signals_that_come_at_once_are_one_request() -> None:
    """A terminal that is closed and a supervisor each send one; each asks once."""
    send = "os = __import__('os'); [os.kill(os.getpid(), number) for number in (15, 1, 2)]"
    with daemon(start=f"print('starting', flush=True); {send}; await anyio.sleep_forever()") as process:
        assert line(process) == "starting"
        out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 0)
    assert "second signal" not in err


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """As nohup has it."""
    with daemon(
        construct="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        start="import os; os.kill(os.getpid(), 1)",
    ) as process:
        assert line(process) == "up"
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert (out.strip(), process.returncode) == ("down", 0)


def test_a_forked_child_ends_as_if_no_hive_ran() -> None:
    fork = """
        import os, signal, time
        ready, tell = os.pipe()
        if not (child := os.fork()):
            os.write(tell, b".")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    with daemon(start=fork.strip()) as process:
        assert line(process) == str(-signal.SIGTERM)
        assert line(process) == "up"
        process.terminate()
        assert process.communicate(timeout=60)[0].strip() == "down"


STUCK = """
import threading, time
from lifecycle import *

async def stop(): print("down", flush=True)
def stuck(): time.sleep(3600)
def build(lifecycle: Lifecycle, shutdown: Shutdown, jobs: Jobs) -> None:
    async def job():
        threading.Thread(target=stuck, name="reader").start()
        shutdown.request()
    jobs.one_shot("start", job)
    lifecycle.append(Hook("down", stop=stop))

main(Hive(invoke(build), name="daemon"), ["run"])
"""


@pytest.mark.parametrize("ask", [True, False])
def test_a_thread_that_runs_on_does_not_keep_a_process_that_has_stopped(ask: bool) -> None:
    with program(STUCK) as process:
        assert line(process) == "down"
        assert process.stderr is not None
        if ask:
            while "msg=stopped" not in (found := process.stderr.readline()):
                assert found
            process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.splitlines()[-1] == "daemon: leaving with thread 'reader' in stuck at <string>:6"


def test_a_request_and_one_signal_are_not_two_signals(tmp_path: Path) -> None:
    """The hive was asked to end from inside, and takes its time; the first signal is the first."""
    marker = tmp_path / "seen"
    with daemon(
        start="self.shutdown.request()",
        stop="print('stopping', flush=True)\n"
        f"        while not __import__('os').path.exists({str(marker)!r}): await anyio.sleep(0.01)",
    ) as process:
        assert line(process) == "up"
        assert line(process) == "stopping"
        process.terminate()
        assert process.stderr is not None
        while "once more to leave at once" not in (spoken := process.stderr.readline()):
            assert spoken, "it has ended"
        marker.touch()
        out, _ = process.communicate(timeout=60)
    assert (out.strip(), process.returncode) == ("down", 0)


@pytest.mark.parametrize("blocking", ["__import__('time').sleep(60)", "[None for _ in iter(int, 1)]"])
@pytest.mark.parametrize("where", ["start", "stop", "constructor"])
def test_a_second_signal_ends_code_that_blocks_the_loop(where: str, blocking: str) -> None:
    block = f"print('blocked', flush=True); {blocking}"
    with daemon(
        start=block if where == "start" else "pass",
        stop=block if where == "stop" else "pass",
        construct=block if where == "constructor" else "pass",
    ) as process:
        if where == "stop":
            assert line(process) == "up"
            process.terminate()
        assert line(process) == "blocked"
        later(ONE_REQUEST)
        process.send_signal(signal.SIGINT)  # of one number, two that come at once are one
        if where != "stop":
            with pytest.raises(subprocess.TimeoutExpired):  # one asks it to end, which it cannot yet
                process.wait(2 * ONE_REQUEST)
            process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "daemon: second signal, leaving at once"


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("sys.exit(3)", 3, "daemon: hook 'listen' (server) called sys.exit(3)"),
        ("sys.exit('no licence')", 1, "daemon: no licence"),
        ("raise KeyboardInterrupt", 130, "daemon: hook 'listen' (server) was interrupted"),
    ],
)
def test_a_hook_that_exits_ends_the_process_with_its_code(call: str, code: int, message: str) -> None:
    with daemon(start=call) as process:
        out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", code)
    assert err.splitlines()[-1] == message


def test_a_job_that_exits_well_ends_the_process_in_order() -> None:
    with daemon(start="self.jobs.one_shot('job', self.job)", job="sys.exit()") as process:
        out, err = process.communicate(timeout=60)
    assert (out.split(), process.returncode) == (["up", "down"], 0)
    assert "job 'job' called sys.exit(0)" in err


TWO = """
import anyio
from lifecycle import *
from lifecycle import Hive

def hive(name):
    def build(lifecycle: Lifecycle):
        async def start(): print("up", flush=True)
        async def stop(): print("down", name, flush=True)
        lifecycle.append(Hook("hook", start, stop))
    return Hive(invoke(build), name=name)

async def main():
    codes = []
    async def run(one): codes.append(await one.run())
    async with anyio.create_task_group() as group:
        group.start_soon(run, hive("a"))
        group.start_soon(run, hive("b"))
    print(codes, flush=True)

LAST_LINE
"""


def program(source: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_two_hives_in_one_process_both_get_the_signal() -> None:
    with program(TWO.replace("LAST_LINE", "anyio.run(main)")) as process:
        assert [line(process), line(process)] == ["up", "up"]
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[0, 0]", "down a", "down b"]


def test_a_run_outside_the_main_thread_is_refused() -> None:
    last = "import threading; threading.Thread(target=lambda: anyio.run(hive('a').run)).start()"
    with program(TWO.replace("LAST_LINE", last)) as process:
        _, err = process.communicate(timeout=60)
    assert err.splitlines()[-1] == (
        "RuntimeError: a: run() handles signals, which only the main thread can; "
        "in another one use `async with hive.started()`"
    )


def test_uvloop_runs_a_hive() -> None:
    last = "anyio.run(main, backend_options={'use_uvloop': True})"
    with program(TWO.replace("LAST_LINE", last)) as process:
        assert [line(process), line(process)] == ["up", "up"]
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[0, 0]", "down a", "down b"]


def test_trio_is_refused_in_one_line() -> None:
    with program(TWO.replace("LAST_LINE", "anyio.run(hive('a').run, backend='trio')")) as process:
        _, err = process.communicate(timeout=60)
    assert (
        err.splitlines()[-1] == "RuntimeError: a: a hive runs on asyncio: anyio.run(..., backend='asyncio')"
    )


def test_a_stop_stuck_in_a_thread_ends_with_the_budget_by_name() -> None:
    stop = "print('stopping', flush=True); await anyio.to_thread.run_sync(__import__('time').sleep, 60)"
    with daemon(stop=stop, options="stop_timeout=0.05, stop_budget=0.1") as process:
        assert line(process) == "up"
        process.terminate()
        assert line(process) == "stopping"
        out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 1)
    assert "hook 'listen' (server) did not stop within 0.05 s; pending hooks:" in err
    assert err.splitlines()[-1] == "daemon: leaving with hook 'listen' (server) running"


def test_a_signal_while_starting_rolls_back_and_exits_0() -> None:
    with daemon(start="print('starting', flush=True); await anyio.sleep_forever()") as process:
        assert line(process) == "starting"
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("argv", "start", "code", "message"),
    [
        (["--prot=1"], "pass", 2, "daemon: --prot: no such setting; did you mean --port?"),
        (["--port=70000"], "pass", 2, "daemon: port 70000: expected 1 to 65535 (from flag --port)"),
        ([], "raise UsageError('no privileges: run as root')", 2, "daemon: no privileges: run as root"),
        ([], "raise HiveError('/run/x.sock is taken')", 1, "daemon: /run/x.sock is taken"),
        ([], "self.shutdown.request(HiveError('lost the lock'))", 1, "daemon: lost the lock"),
    ],
)
def test_mistakes_are_one_clear_line_and_an_exit_code(
    argv: list[str], start: str, code: int, message: str
) -> None:
    with daemon(*argv, start=start) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.splitlines()[-1] == message
    assert "Traceback" not in err


def test_our_own_bugs_come_with_a_traceback() -> None:
    with daemon(start="{}['key']") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "KeyError: 'key'" in err
    assert "Traceback" in err
    assert "hook 'listen' (server) failed to start" in err


def test_a_fatal_job_ends_the_process_in_order_with_its_code() -> None:
    with daemon(
        start="self.jobs.one_shot('job', self.job, fatal=True)", job="raise UsageError('no')"
    ) as process:
        out, err = process.communicate(timeout=60)
    assert (out.split(), process.returncode) == (["up", "down"], 2)
    assert err.splitlines()[-1] == "daemon: no"


def test_exit_codes_and_texts_of_errors() -> None:
    group = ExceptionGroup("several", [HiveError("first"), UsageError("second")])
    assert [exit_code(error) for error in (UsageError("x"), HiveError("x"), OSError("x"), group)] == [
        2,
        1,
        1,
        1,
    ]
    assert explain(group) == "first\nsecond"
    assert explain(ExceptionGroup("mixed", [HiveError("first"), KeyError("bug")])) is None


@pytest.fixture
def _logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers = [
        handler for handler in logging.getLogger().handlers if type(handler).__name__ != "_ToStructlog"
    ]


@pytest.mark.usefixtures("_logging")
def test_logs_are_structured_lines() -> None:
    out = io.StringIO()
    configure_logging("info", "json", out)
    structlog.get_logger(module="agent.ipam").info("allocated", ip="10.0.0.1", pool=None)
    structlog.get_logger().debug("not shown")
    logging.getLogger("aiohttp").warning("lost %s", "it")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["msg"], first["level"], first["module"], first["ip"]) == (
        "allocated",
        "info",
        "agent.ipam",
        "10.0.0.1",
    )
    assert (second["msg"], second["module"], second["level"]) == ("lost it", "aiohttp", "warning")


@pytest.mark.usefixtures("_logging")
def test_logs_off_a_terminal_are_logfmt_and_on_one_text() -> None:
    out = io.StringIO()
    configure_logging("debug", "auto", out)
    structlog.get_logger(module="agent").debug("pod added", endpoint=12)
    assert out.getvalue().partition(" ")[2] == 'level=debug msg="pod added" module=agent endpoint=12\n'
    text = io.StringIO()
    configure_logging("debug", "text", text)
    structlog.get_logger(module="agent").info("pod added", endpoint=12)
    assert "pod added" in text.getvalue()
    assert "endpoint=12" in text.getvalue()


@pytest.mark.usefixtures("_logging")
def test_logs_follow_standard_error_when_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("info", "logfmt")
    logger = structlog.get_logger()
    for text in ("first", "second"):
        replaced = io.StringIO()
        monkeypatch.setattr(sys, "stderr", replaced)
        logger.info(text)
        assert f"msg={text}" in replaced.getvalue()
        replaced.close()


@pytest.mark.usefixtures("_logging")
def test_a_log_line_that_cannot_be_written_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    configure_logging("info", "logfmt")
    structlog.get_logger().info("lost")


def test_unknown_levels_and_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="log level 'loud': expected one of debug, info"):
        configure_logging("loud")
    with pytest.raises(ValueError, match="log format 'xml': expected one of auto, text, logfmt, json"):
        configure_logging("info", "xml")  # type: ignore[arg-type]  # the mistake under test


def test_importing_lifecycle_loads_no_heavy_module() -> None:
    program = "import sys, lifecycle; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    unwanted = {
        "rich",
        "pyroute2",
        "aiohttp",
        "click",
        "cells",
        "hive",
        "cffi",
        "difflib",
        "pydantic_settings",
    }
    assert unwanted & set(done.stdout.split()) == set()


def test_lifecycle_imports_only_its_declared_libraries() -> None:
    allowed = {"lifecycle", "dependency_injector", "anyio", "structlog", "yaml", "msgspec", "immutables"}
    for path in (ROOT / "lifecycle").glob("*.py"):
        import ast

        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in allowed | set(sys.stdlib_module_names), f"{path.name} imports {name}"
