"""A shell for a running hive: sends commands to its admin socket, with completion and history."""

import contextlib
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from lifecycle.admin.server import CONFIRM, END, FAILED
from lifecycle.errors import HiveError

__all__ = ["shell"]

_OK, _FAILURE, _INTERRUPTED = 0, 1, 130
_LEAVE = frozenset({"exit", "quit"})
_REMEMBERED = 1000


def shell(path: Path, words: Sequence[str], name: str, timeout: float = 5.0) -> int:
    """Run the words as one command or, without any, the lines of standard input. Returns the exit code.

    On a terminal, lines are edited, completed with the tabulator and remembered from one shell to the next;
    ^C ends a command, ^D the shell. Otherwise, the first command that fails ends it. `timeout` is that of the
    connection, in seconds. Raises HiveError, one line, if no server answers.
    """
    if words:
        with _Connection(path, timeout) as connection:
            return _OK if connection.run(_line(words)) else _FAILURE
    if not sys.stdin.isatty():
        with _Connection(path, timeout) as connection:
            lines = (line.strip() for line in sys.stdin)
            return _OK if all(connection.run(line) for line in lines if line) else _FAILURE
    return _interactive(path, name, timeout)


def _interactive(path: Path, name: str, timeout: float) -> int:
    with _Connection(path, timeout) as connection, _remembering(name, connection):
        while True:
            try:
                line = input(f"{name}> ").strip()
            except EOFError:
                print()  # noqa: T201  # the terminal's next line is not ours
                return _OK
            except KeyboardInterrupt:
                print()  # noqa: T201
                continue
            if line in _LEAVE:
                return _OK
            try:
                connection.run(line)
            except KeyboardInterrupt:
                connection.open()  # the server ends the command of the old connection
                print()  # noqa: T201


class _Connection:
    """A connection to the socket; commands and answers alternate."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lines: Iterator[str] = iter(())

    def __enter__(self) -> "_Connection":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def open(self) -> None:
        """Connect, again if necessary. Raises HiveError."""
        self._socket.close()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(self._timeout)
        try:
            self._socket.connect(str(self._path))
        except OSError as error:
            self._socket.close()
            raise HiveError(_refused(error, self._path)) from error
        self._socket.settimeout(None)
        self._lines = iter(self._socket.makefile(encoding="utf-8", errors="replace"))
        list(self.ask("#marks"))

    def run(self, line: str) -> bool:
        """Print the output of a command as it arrives. Returns whether the command succeeded.

        On a terminal, tables are as wide as it is, and a command that needs confirmation asks the user first.
        """
        if sys.stdout.isatty():
            list(self.ask(f"#width {shutil.get_terminal_size().columns}"))
        for text in self.ask(line):
            if text == FAILED:
                return False
            if text == CONFIRM:
                return _confirmed() and self.run(f"{line} --yes")
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        return True

    def ask(self, line: str) -> Iterator[str]:
        """Yield the lines of an answer, and FAILED at the end of a failure. Raises HiveError."""
        try:
            self._socket.sendall(f"{line}\n".encode())
            for text in self._lines:
                printed = text.rstrip("\n")
                if printed != END:
                    yield printed
                if printed in {CONFIRM, END, FAILED}:
                    return
        except OSError as error:
            raise HiveError(f"{self._path}: the connection broke off: {error.strerror or error}") from error
        raise HiveError(f"{self._path}: the connection was closed: did the process stop?")


@contextlib.contextmanager
def _remembering(name: str, connection: _Connection) -> Iterator[None]:
    """History and completion, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    history = state / "hive" / f"{name}.history"
    with contextlib.suppress(OSError):  # it does not exist yet, or is not readable
        readline.read_history_file(history)
    _complete(readline, connection)
    try:
        yield
    finally:
        readline.set_completer(None)
        readline.set_history_length(_REMEMBERED)
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


def _complete(readline: ModuleType, connection: _Connection) -> None:
    completions: list[str] = []

    def next_word(_: str, number: int) -> str | None:
        nonlocal completions
        if number == 0:
            line = readline.get_line_buffer()[: readline.get_endidx()]
            try:
                answer = list(connection.ask(f"#complete {line}"))
            except HiveError:
                answer = []
            completions = [
                word if word.endswith("=") else f"{word} " for word in answer if word not in {CONFIRM, FAILED}
            ]
        return completions[number] if number < len(completions) else None

    readline.set_completer(next_word)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input("Go on? [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        return False


def _line(words: Sequence[str]) -> str:
    """Words as one line of the shell's language, in which single quotes are doubled inside quotes."""
    quoted = ("'" + word.replace("'", "''") + "'" if shlex.quote(word) != word else word for word in words)
    return words[0] if len(words) == 1 else " ".join(quoted)


def _refused(error: OSError, path: Path) -> str:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return f"nothing listens on {path}: start the process, or name its --socket"
    if isinstance(error, PermissionError):
        return f"permission denied on {path}: run this as the user that runs the process"
    return f"cannot connect to {path}: {error.strerror or error}"
