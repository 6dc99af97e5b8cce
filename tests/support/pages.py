"""Runs the examples of documentation pages in a shell, and compares their output."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)


class Block(msgspec.Struct, frozen=True):
    """A fenced block: its language, the file that has this content, and its text."""

    language: str
    file: str | None
    text: str
    line: int


def blocks(markdown: str) -> Iterator[Block]:
    """Return the fenced blocks in order."""
    for found in FENCE.finditer(markdown):
        language, _, attribute = found[1].partition(" ")
        file = attribute.removeprefix("file=") if attribute.startswith("file=") else None
        yield Block(language, file, found[2], markdown[: found.start()].count("\n") + 1)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Return the commands of a console block, each with its expected output."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def matches(shown: str, printed: str) -> bool:
    """Return whether the output is as shown, where ``...`` stands for anything."""
    pattern = ".*?".join(map(re.escape, shown.split("...")))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def run(shell: "subprocess.Popen[str]", command: str) -> str:
    """Run a command in this shell and return its output of both streams."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(f"{command}\ncode=$?; printf '\\nend-of-output\\n'; (exit $code)\n")
    shell.stdin.flush()
    lines: list[str] = []
    while not (line := shell.stdout.readline()).startswith("end-of-output"):
        assert line, f"the shell ended in: {command}"
        lines.append(line)
    return "".join(lines).removesuffix("\n")


@contextmanager
def shell(directory: Path, environment: Mapping[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Start a bash in this directory that finds this project's command."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    known = {
        "PATH": path,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'cmd'}",
        "LC_ALL": "C.UTF-8",
        "HOME": str(directory),
        "PYTEST_PLUGINS": "lifecycle.testing.pytest_plugin",  # as where the framework is installed
    }
    with subprocess.Popen(
        ["bash", "--norc"],
        cwd=directory,
        env=known | dict(environment or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:  # a command that never ends would be waited for: away with all of them
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.stdin is not None
        process.stdin.close()


def play(page: Path, block: Block, process: "subprocess.Popen[str]", *, columns: bool = True) -> None:
    """Run the commands of a console block; raises AssertionError at the first with other output.

    Without ``columns``, the widths of table columns are ignored.
    """
    for command, shown in commands(block.text):
        printed = run(process, command)
        as_shown, as_printed = (shown, printed) if columns else (squeezed(shown), squeezed(printed))
        assert matches(as_shown, as_printed), (
            f"{page.name}:{block.line}: $ {command}\n{printed}\ninstead of\n{shown}"
        )


def squeezed(text: str) -> str:
    """Strip line ends and reduce blanks to one, so that column widths are ignored."""
    return re.sub(r" +$| +(?= )", "", text, flags=re.MULTILINE)
