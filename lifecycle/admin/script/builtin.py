"""Commands of every script: files, variables, and the output of the previous command.

Source: rsc.io/script and cilium/hive's fork of it. There is no ``exec``: scripts call commands of cells.
"""

import re
from collections.abc import Callable, Mapping

from lifecycle.admin.script.command import Arguments, Command, CommandError, Flag, State, StopScript
from lifecycle.errors import suggestion
from lifecycle.settings import Duration

__all__ = ["builtin", "help_command"]


def builtin() -> list[Command]:
    """Commands for scripts, which have a directory of files."""
    quiet = Flag("quiet", "Do not show the lines that differ", "switch", short="q")
    return [
        Command("cat", "Print files", _cat, "file..."),
        Command("cmp", "Compare two files, or stdout and stderr", _cmp, "file1 file2", (quiet,)),
        Command("cp", "Copy files, or stdout and stderr, to a file or directory", _cp, "from... to"),
        Command("echo", "Print the arguments", _echo, "[word...]"),
        Command("empty", "Check that files are empty", _empty, "file..."),
        Command("env", "Set variables, or print them", _env, "[name[=value]...]"),
        Command("exists", "Check that files are there", _exists, "file..."),
        Command(
            "grep",
            "Find lines by a regular expression",
            _grep,
            "pattern [file]",
            (_COUNT,),
            help="Looks at stdout unless a file is named.",
        ),
        Command("mkdir", "Make directories", _mkdir, "directory..."),
        Command("replace", "Replace texts in a file", _replace, "old new [old new]... file"),
        Command("rm", "Remove files and directories", _rm, "path..."),
        Command("sleep", "Let time pass: on the script's clock where it has one", _sleep, "time"),
        Command("stderr", "Find lines in what the last command failed with", _stderr, "pattern", (_COUNT,)),
        Command("stdout", "Find lines in what the last command printed", _stdout, "pattern", (_COUNT,)),
        Command("stop", "End the script here, as a success", _stop, "[reason...]"),
    ]


def help_command(commands: Callable[[], Mapping[str, Command]]) -> Command:
    """``help``: lists commands, and shows the usage of one."""

    async def show(state: State, arguments: Arguments) -> None:
        available = commands()
        if not arguments.words:
            width = max(map(len, available))
            for name, command in available.items():
                await state.print(f"{name:{width}}  {command.summary}")
            return
        for name in arguments.words:
            if (requested := available.get(name)) is None:
                raise CommandError(f"{name}: no such command{suggestion(name, available)}")
            await state.print("\n".join(_page(requested)))

    flag = Flag("verbose", "Accepted for those who are used to it", "switch", short="v")
    return Command("help", "List the commands, or explain some", show, "[command...]", (flag,))


def _page(command: Command) -> list[str]:
    lines = [command.usage(), f"    {command.summary}"]
    lines += [f"    {line}".rstrip() for line in command.help.splitlines()]
    for flag in command.flags:
        default = f" [{flag.default}]" if flag.default else ""
        lines.append(f"    --{flag.name}{f', -{flag.short}' if flag.short else ''}: {flag.help}{default}")
    return lines


_COUNT = Flag("count", "Expect so many lines", default="")


async def _cat(state: State, arguments: Arguments) -> None:
    for name in arguments.words:
        if text := state.text_of(name):
            await state.print(text)


async def _cmp(state: State, arguments: Arguments) -> None:
    actual_name, expected_name = arguments.words
    actual, expected = state.text_of(actual_name), state.text_of(expected_name)
    if actual == expected:
        return
    if state.updates and expected_name not in {"stdout", "stderr"}:
        state.goldens[expected_name] = actual
        return
    import difflib  # imported only for errors

    lines = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), expected_name, actual_name, lineterm=""
    )
    raise CommandError(
        f"{actual_name} and {expected_name} differ"
        + ("" if arguments.flags["quiet"] else "\n" + "\n".join(lines))
    )


async def _cp(state: State, arguments: Arguments) -> None:
    *sources, target = arguments.words
    place = state.path(target)
    if len(sources) > 1 and not place.is_dir():
        raise CommandError(f"{target}: expected a directory for several files")
    for name in sources:
        text = state.text_of(name)
        (place / name if place.is_dir() else place).write_text(text, encoding="utf-8")


async def _echo(state: State, arguments: Arguments) -> None:
    await state.print(" ".join(arguments.words))


async def _empty(state: State, arguments: Arguments) -> None:
    for name in arguments.words:
        if text := state.text_of(name):
            raise CommandError(f"{name} is not empty:\n{text.rstrip()}")


async def _env(state: State, arguments: Arguments) -> None:
    if not arguments.words:
        for name, value in state.variables.items():
            await state.print(f"{name}={value}")
    for word in arguments.words:
        name, equals, value = word.partition("=")
        if equals:
            state.variables[name] = value
        elif name in state.variables:
            await state.print(f"{name}={state.variables[name]}")
        else:
            raise CommandError(f"{name}: this variable is not set")


async def _exists(state: State, arguments: Arguments) -> None:
    for name in arguments.words:
        if not state.path(name).exists():
            raise CommandError(f"{name} is not there")


async def _grep(state: State, arguments: Arguments) -> None:
    pattern, *files = arguments.words
    _find(pattern, files[0] if files else "stdout", state, arguments)


async def _stdout(state: State, arguments: Arguments) -> None:
    _find(arguments.words[0], "stdout", state, arguments)


async def _stderr(state: State, arguments: Arguments) -> None:
    _find(arguments.words[0], "stderr", state, arguments)


def _find(pattern: str, name: str, state: State, arguments: Arguments) -> None:
    try:
        expression = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise CommandError(f"{pattern}: this is not a regular expression: {error}") from None
    text = state.text_of(name)
    lines = [line for line in text.splitlines() if expression.search(line)]
    shown = text.rstrip() or "(nothing)"
    if count := arguments.flags["count"]:
        if count != str(len(lines)):
            raise CommandError(f"{len(lines)} lines of {name} match {pattern}, expected {count}:\n{shown}")
    elif not lines:
        raise CommandError(f"no line of {name} matches {pattern}:\n{shown}")


async def _mkdir(state: State, arguments: Arguments) -> None:
    for name in arguments.words:
        state.path(name).mkdir(parents=True, exist_ok=True)


async def _replace(state: State, arguments: Arguments) -> None:
    *pairs, name = arguments.words
    if len(pairs) % 2:
        raise CommandError("expected an old and a new text, as often as needed, then the file")
    text = state.text_of(name)
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        if old not in text:
            raise CommandError(f"{name} has no {old!r}")
        text = text.replace(old, new)
    state.path(name).write_text(text, encoding="utf-8")


async def _rm(state: State, arguments: Arguments) -> None:
    for name in arguments.words:
        path = state.path(name)
        if path.is_dir():
            import shutil  # imports three decompressors: 2 ms

            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


async def _sleep(state: State, arguments: Arguments) -> None:
    try:
        pause = float(Duration.parse(arguments.words[0]))
    except ValueError as error:
        raise CommandError(f"{arguments.words[0]}: {error}") from None
    await state.sleep(pause)


async def _stop(_state: State, arguments: Arguments) -> None:
    raise StopScript(" ".join(arguments.words))
