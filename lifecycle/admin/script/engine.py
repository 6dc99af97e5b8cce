"""Runs commands: a script from its first line to its last, or the lines of a shell one by one.

Source: cilium/hive's script engine: sections begin at lines with ``#``; ``*`` runs the whole section again
        until its command succeeds, ``!`` expects a failure, ``?`` does not mind one.
"""

from collections.abc import Iterable, Mapping, Sequence

from lifecycle.admin.script.command import Command, CommandError, State, StopScript
from lifecycle.admin.script.words import Line, expand, read, unfinished
from lifecycle.errors import HiveError, explain, suggestion
from lifecycle.hints import place_of

__all__ = ["Engine", "ScriptError"]

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
"""Seconds between two tries of a section."""


class ScriptError(Exception):
    """A command of a script had an unexpected result. The text has the line and the output."""


class Engine:
    """Commands by name."""

    def __init__(self, commands: Iterable[Command], *, within: float = 5.0) -> None:
        self.commands: Mapping[str, Command] = _by_name(commands)
        self._within = within
        """Seconds within which a repeated section must succeed."""

    async def line(self, state: State, text: str) -> None:
        """Run one line, as a shell does. Raises CommandError, StopScript."""
        try:
            line = read(text)
        except ValueError as error:
            raise CommandError(str(error)) from None
        if line is not None:
            await self._run(state, line)

    async def script(self, state: State, text: str, name: str = "script") -> None:
        """Run a whole script. Raises ScriptError, with file and line."""
        section: list[Line] = []
        for number, written in enumerate(text.splitlines(), start=1):
            if written.startswith("#"):
                section = []
                continue
            try:
                line = read(written, number)
            except ValueError as error:
                raise ScriptError(f"{name}:{number}: {written.strip()}: {error}") from None
            if line is None:
                continue
            if self.is_endless(line.text):
                raise ScriptError(f"{name}:{number}: {line.text}: it has no end, so it is for shells only")
            section.append(line)
            try:
                if line.retried:
                    await self._retried(state, section)
                else:
                    await self._run(state, line)
            except StopScript:
                return
            except CommandError as error:
                raise ScriptError(_message(name, line, error, state)) from None

    def complete(self, text: str) -> list[str]:
        """Completions of a line: whole words that replace its last one."""
        words, beginning = unfinished(text)
        if not words:
            return [name for name in self.commands if name.startswith(beginning)]
        if (command := self.commands.get(words[0])) is None:
            return []
        if beginning.startswith("-"):
            return _flags(command, beginning)
        arguments = [word for word in words[1:] if not word.startswith("-")]
        if words[0] == "help" and not arguments:
            return [name for name in self.commands if name.startswith(beginning)]
        candidates = command.complete(arguments, beginning) if command.complete else ()
        return [word for word in candidates if word.startswith(beginning)]

    def is_endless(self, text: str) -> bool:
        """Whether the line calls a command that runs until the caller stops it."""
        command = self.called(text)
        return command is not None and command.endless

    def called(self, text: str) -> Command | None:
        """Return the command that the line calls; None if there is none of that name."""
        words, word = unfinished(f"{text} ")
        return self.commands.get(words[0] if words else word)

    async def _retried(self, state: State, section: Sequence[Line]) -> None:
        """Run the last line and, until its result is as expected, repeat the whole section."""
        until, pause = state.now() + self._within, FIRST_PAUSE
        again: Sequence[Line] = section[-1:]
        while True:
            try:
                for line in again:
                    await self._run(state, line)
            except CommandError as error:
                if state.now() >= until:
                    text = f"{error}\n(tried again for {self._within:g} s)"
                    raise CommandError(text) from error
            else:
                return
            await state.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            again = section

    async def _run(self, state: State, line: Line) -> None:
        name, *words = (expand(word, state.variables) for word in line.words)
        if name in self.commands and _asks_for_help(words):
            name, words = "help", [name]
        command = self.commands.get(name)
        if command is None:  # an error even if the line expects a failure
            raise CommandError(f"{name}: no such command{suggestion(name, self.commands)}")
        arguments = command.arguments(words)
        failure: CommandError | None = None
        state.take()
        try:
            await command.run(state, arguments)
        except CommandError as error:
            failure = error
        except StopScript:
            raise
        except Exception as error:
            if (text := explain(error)) is None:
                raise
            failure = CommandError(text)
        printed, checks = state.take(), command.name in _LOOK_BACK
        if not checks:  # commands that check the previous output keep it
            state.stdout, state.stderr = printed, f"{failure}\n" if failure else ""
        if failure is not None and line.expected == "success":
            raise failure
        if failure is None and line.expected == "failure":
            raise CommandError(f"{name}: it succeeded, and was expected to fail")


_LOOK_BACK = frozenset({"cmp", "grep", "stderr", "stdout"})


def _asks_for_help(words: Sequence[str]) -> bool:
    before = words[: words.index("--")] if "--" in words else words
    return not {"-h", "-help", "--help"}.isdisjoint(before)


def _by_name(commands: Iterable[Command]) -> dict[str, Command]:
    """Sorted by name. Raises HiveError for a repeated name or one that cannot be typed."""
    by_name: dict[str, Command] = {}
    for command in sorted(commands, key=lambda command: command.name):
        place = place_of(command.run)
        if command.name.split() != [command.name]:
            raise HiveError(
                f"command {command.name!r} at {place}: expected a name without blanks, such as db/show"
            )
        if (earlier := by_name.get(command.name)) is not None:
            raise HiveError(
                f"command {command.name} at {place}: there is one of this name at {place_of(earlier.run)}"
            )
        by_name[command.name] = command
    return by_name


def _message(name: str, line: Line, error: CommandError, state: State) -> str:
    text = f"{name}:{line.number}: {line.text}\n{error}"
    printed = f"{state.stdout}{state.stderr}".rstrip("\n")
    return f"{text}\nprinted before:\n{printed}" if printed and printed not in text else text


def _flags(command: Command, beginning: str) -> list[str]:
    name, equals, value = beginning.lstrip("-").partition("=")
    if equals:
        choices = next((flag.choices for flag in command.flags if flag.name == name), ())
        return [f"--{name}={choice}" for choice in choices if choice.startswith(value)]
    flags = (f"--{flag.name}{'' if flag.kind == 'switch' else '='}" for flag in command.flags)
    return [flag for flag in flags if flag.startswith(f"--{name}")]
