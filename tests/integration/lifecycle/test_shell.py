"""The shell of a hive's command: one command, several from a pipe, and a terminal."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import running

DEADLINE = 30.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a hive that runs, with its command."""
    folder = tmp_path_factory.mktemp("daemon")
    with running(folder):
        yield folder


def shell(daemon: Path, *words: str, lines: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "shop.py", "shell", *words],
        cwd=daemon,
        input=lines,
        stdin=subprocess.DEVNULL if lines is None else None,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def test_one_command_prints_its_output_and_exits_with_its_code(daemon: Path) -> None:
    ran = shell(daemon, "db/show", "--columns=number", "orders")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "NUMBER\n", "")
    assert shell(daemon, "log/level").stdout == "info\n"
    assert shell(daemon, "echo", "it's", "a b").stdout == "it's a b\n"
    assert shell(daemon, "db/show orders").returncode == 0
    ran = shell(daemon, "db/show", "order")
    assert (ran.returncode, ran.stdout) == (1, "no table is named order; did you mean orders?\n")


def test_lines_of_a_pipe_are_run_up_to_the_first_that_fails(daemon: Path) -> None:
    ran = shell(daemon, lines="echo one\n\nshop/deliver\n")
    assert (ran.returncode, ran.stdout) == (0, "one\ndelivered\n")
    ran = shell(daemon, lines="echo one\nech two\necho three\n")
    assert (ran.returncode, ran.stdout) == (1, "one\nech: no such command; did you mean echo?\n")


def test_a_socket_without_a_server_is_reported_in_one_line(daemon: Path) -> None:
    ran = shell(daemon, "--socket=/nowhere.sock", "db")
    assert (ran.returncode, ran.stderr) == (
        1,
        "store: nothing listens on /nowhere.sock: start the process, or name its --socket\n",
    )


class Terminal:
    """A terminal with a shell in it."""

    def __init__(self, daemon: Path, home: Path, columns: int = 200) -> None:
        self._master, slave = pty.openpty()
        self._text = ""
        self._process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "shop.py", "shell"],  # where ^C is a signal
            cwd=daemon,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "XDG_STATE_HOME": str(home), "TERM": "dumb", "COLUMNS": str(columns)},
        )
        os.close(slave)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, text: str) -> str:
        """What was shown up to, and with, this text."""
        while text not in self._text:
            try:
                part = os.read(self._master, 4096)
            except OSError as error:
                raise AssertionError(f"the shell ended before it showed {text!r}: {self._text}") from error
            self._text += part.decode(errors="replace")
        shown, _, self._text = self._text.partition(text)
        return shown + text

    def end(self) -> int:
        """Type ^D; the exit code."""
        self.type("\x04")
        with contextlib.suppress(OSError):
            while os.read(self._master, 4096):
                pass
        os.close(self._master)
        return self._process.wait(DEADLINE)


def test_at_a_terminal_lines_are_completed_remembered_and_interrupted(daemon: Path, tmp_path: Path) -> None:
    terminal = Terminal(daemon, tmp_path)
    terminal.until("store> ")
    terminal.type("shop/de\t\n")
    assert "delivered" in terminal.until("delivered\r\nstore> ")
    terminal.type("db/show order\n")
    terminal.until("did you mean orders?\r\nstore> ")
    terminal.type("db/watch customers\n")
    terminal.until("db/watch customers\r\n")
    terminal.type("\x03")
    terminal.until("store> ")
    terminal.type("echo after\n")
    terminal.until("\nafter\r\nstore> ")
    assert terminal.end() == 0

    again = Terminal(daemon, tmp_path)
    again.until("store> ")
    again.type("\x1b[A\n")  # the last line again
    again.until("\nafter\r\nstore> ")
    assert again.end() == 0


def test_tables_are_as_wide_as_the_terminal(daemon: Path, tmp_path: Path) -> None:
    wide = shell(daemon, "hive/jobs").stdout.splitlines()
    assert max(map(len, wide)) > 40
    terminal = Terminal(daemon, tmp_path, columns=40)
    terminal.until("store> ")
    terminal.type("hive/jobs\n")
    *lines, _ = terminal.until("store> ").splitlines()[1:]
    assert max(map(len, lines)) <= 40
    assert "not shown: " in "".join(lines)
    assert terminal.end() == 0


def test_a_stop_is_confirmed_at_a_terminal_and_with_a_flag_elsewhere(daemon: Path, tmp_path: Path) -> None:
    ran = shell(daemon, "hive/disable", "spare")
    assert (ran.returncode, ran.stdout.splitlines()[0]) == (1, "this stops 1 module: spare")
    terminal = Terminal(daemon, tmp_path)
    terminal.until("store> ")
    for answer, then in (("n", "store> "), ("y", "stopped: spare\r\nstore> ")):
        terminal.type("hive/disable spare\n")
        terminal.until("Go on? [y/N] ")
        terminal.type(f"{answer}\n")
        terminal.until(then)
    assert terminal.end() == 0
    ran = shell(daemon, "hive/enable", "spare")
    assert (ran.returncode, ran.stdout) == (0, "started: spare\n")
    assert shell(daemon, "hive/disable", "--yes", "spare").stdout == "stopped: spare\n"
