"""The command line of a hive.

Example::

    if __name__ == "__main__":
        main(Hive(heart, name="heart"), version="1.0")
"""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import anyio

from lifecycle.command import completion, help_page
from lifecycle.command.checking import check_all, check_graph, faulty
from lifecycle.errors import GraphError, HiveError, SettingsError, UsageError, suggestion
from lifecycle.graph import circles, views
from lifecycle.hive.hive import Hive
from lifecycle.process.logs import configure_logging

__all__ = ["COMMANDS", "main", "run_command"]

COMMANDS: dict[str, str] = {
    "run": "Run until a signal ends it; the default command.",
    "check": "Check that it could run with these settings; starts nothing: check [--graph] [--json].",
    "inspect": f"Show what it is made of: inspect [{'|'.join(views.VIEWS)}] [NAME].",
    "shell": "Talk to one that runs, by its admin socket: shell [--socket=PATH] [COMMAND...].",
    "completion": f"Print what makes a shell complete this: completion {'|'.join(completion.SHELLS)}.",
}
"""Commands, which come before the settings."""

_OK, _FOUND, _INTERRUPTED = 0, 1, 130
_SOCKET = "--socket="
_GRAPH, _JSON = "--graph", "--json"
"""Flags of check; --json also of inspect. A setting of that name comes first."""


def main(hive: Hive, argv: Sequence[str] | None = None, *, version: str = "") -> NoReturn:
    """Run the command line and exit the process with 0, 1 for a failure, 2 for wrong usage or settings.

    Without a command, the hive runs. Flags are its settings, in addition to variables with its prefix and the
    files of its own Sources. ``--help`` lists all of them, ``--version`` prints `version` if it is set,
    ``--strict`` refuses unknown keys. Logs go to standard error, unless configure_logging() was called
    before.
    """
    sys.exit(run_command(hive, sys.argv[1:] if argv is None else argv, os.environ, version=version))


def run_command(hive: Hive, argv: Sequence[str], env: Mapping[str, str], *, version: str = "") -> int:
    """As main(). Returns the exit code."""
    command, rest = (argv[0], list(argv[1:])) if argv and argv[0] in COMMANDS else ("run", list(argv))
    try:
        return _run(hive, command, rest, env, version)
    except HiveError as error:
        if command == "check" and _JSON in _own_flags(hive, rest):
            _print(faulty(hive, error).json())
            return error.exit_code
        return _failed(hive, error)
    except KeyboardInterrupt:
        _report(hive, "interrupted")
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe has closed it
        # avoids an error message at Python's exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK


def _failed(hive: Hive, error: HiveError) -> int:
    """Print a line for each fault. Returns the exit code."""
    if isinstance(error, SettingsError):
        for fault in error.faults:
            late = fault.text.startswith(tuple(f"{command}: not expected here" for command in COMMANDS))
            _report(hive, f"{fault.text}; a command comes first" if late else fault.text)
    else:
        _report(hive, str(error))
    return error.exit_code


def _own_flags(hive: Hive, words: Sequence[str]) -> set[str]:
    """Flags of the command, as opposed to settings of the hive."""
    try:
        settings = {f"--{option.name}" for option in hive.options()}
    except GraphError:
        settings = set()
    return set(words) - settings


def _run(hive: Hive, command: str, words: list[str], env: Mapping[str, str], version: str) -> int:
    if command == "inspect":
        _show_if_faulty(hive, words)
    own = {option.name for option in hive.options()}
    if {"--help", "-h"} & set(words):
        _print(help_page.page(hive, COMMANDS, version=bool(version)))
        return _OK
    if "--version" in words and version and "version" not in own:
        _print(f"{hive.name} {version}")
        return _OK
    if command == "shell":
        return _shell(hive, words, env)
    strict = "--strict" in words and "strict" not in own
    if strict:
        words = [word for word in words if word != "--strict"]
    if command == "completion":
        return _completion(hive, words, version)
    return _on_settings(hive, command, words, env, strict=strict)


def _on_settings(hive: Hive, command: str, words: list[str], env: Mapping[str, str], *, strict: bool) -> int:
    """Run, check or inspect, which need the settings."""
    flags = _own_flags(hive, words) & {"check": {_GRAPH, _JSON}, "inspect": {_JSON}}.get(command, set())
    words = [word for word in words if word not in flags]
    view, words = _view(words) if command == "inspect" else ([], words)
    if (stray := next((word for word in words[:1] if not word.startswith("-")), None)) is not None:
        raise UsageError(f"{stray}: no such command{suggestion(stray, COMMANDS)} (see: {hive.name} --help)")
    if _GRAPH in flags and words:
        raise UsageError(f"check --graph: {words[0]}: expected no settings: none are read")
    if hive.reads_settings:
        hive.read_settings(words, env, strict=strict)
    elif words:
        raise UsageError(f"{words[0]}: {hive.name} has its settings already: no flags are read")
    if command == "run":
        return _start(hive)
    if command == "check":
        return _check(hive, flags)
    return _inspect(hive, view, as_json=_JSON in flags)


def _start(hive: Hive) -> int:
    if not _logs_configured():
        configure_logging()
    hive.check()
    return anyio.run(hive.run_to_the_end)


def _check(hive: Hive, flags: Collection[str]) -> int:
    verdict = check_graph(hive) if _GRAPH in flags else check_all(hive)
    for warning in () if _GRAPH in flags else hive.warnings():
        _report(hive, warning)
    _print(verdict.json() if _JSON in flags else str(verdict))
    return _OK


def _inspect(hive: Hive, view: Sequence[str], *, as_json: bool) -> int:
    graph = hive.graph()
    for warning in hive.warnings():
        _report(hive, warning)
    try:
        _print(views.show(graph, *view, as_json=as_json))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if unset := views.unset(graph):
        _report(hive, f"not set, so the hooks of what needs it are left out: {', '.join(unset)}")
    return _FOUND if view[:1] == ["circles"] and circles(graph) else _OK


def _show_if_faulty(hive: Hive, words: list[str]) -> None:
    """Show the graph of a hive that cannot be built; its error is raised afterwards."""
    try:
        hive.options()
    except GraphError:
        try:
            _print(views.show(hive.graph(faulty=True), *_view(words)[0]))
        except ValueError as error:
            raise UsageError(str(error)) from error


def _shell(hive: Hive, words: Sequence[str], env: Mapping[str, str]) -> int:
    """Flags before the first word belong to the shell, all others to the command."""
    from lifecycle.command.shell import shell

    count = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    own, rest = list(words[:count]), words[count:]
    named = [word.partition("=")[2] for word in own if word.startswith(_SOCKET)]
    flags = [word for word in own if not word.startswith(_SOCKET)]
    hive.read_settings(flags, env)
    if flags or not named:
        settings = hive.graph().settings  # rejects invalid flags
        named = named or [
            setting.value for setting in settings if setting.name == "admin-socket" and setting.value
        ]
    if not named:
        raise UsageError(
            f"shell: {hive.name} has no setting admin-socket: name its socket with {_SOCKET}PATH"
        )
    return shell(Path(named[-1]), rest, hive.name)


def _completion(hive: Hive, words: Sequence[str], version: str) -> int:
    if words[:1] == ["words"]:  # called by the completion scripts
        more = ["--help", *(["--version"] if version else []), "--strict"]
        for word in completion.candidates(hive.options(), COMMANDS, more, " ".join(words[1:])):
            _print(word)
        return _OK
    if len(words) != 1 or words[0] not in completion.SHELLS:
        raise UsageError(f"completion: expected one of {', '.join(completion.SHELLS)}")
    _print(completion.script(words[0], hive.name))
    return _OK


def _view(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first flag, and the rest."""
    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:count]), list(words[count:])


def _logs_configured() -> bool:
    import structlog

    return structlog.is_configured()


def _print(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def _report(hive: Hive, text: str) -> None:
    sys.stderr.write(f"{hive.name}: {text}\n")
