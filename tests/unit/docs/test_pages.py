"""Pages with examples: every block is written or run, in order, and must print what it shows."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)


class Block(msgspec.Struct, frozen=True):
    """A fenced block: its language, the file it is the contents of, and its text."""

    language: str
    file: str | None
    text: str
    line: int


def blocks(markdown: str) -> Iterator[Block]:
    """The fenced blocks, in order."""
    for found in FENCE.finditer(markdown):
        language, _, attribute = found[1].partition(" ")
        file = attribute.removeprefix("file=") if attribute.startswith("file=") else None
        yield Block(language, file, found[2], markdown[: found.start()].count("\n") + 1)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output that follows it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def matches(shown: str, printed: str) -> bool:
    """Whether the output is as shown, where ``...`` stands for anything."""
    pattern = ".*?".join(map(re.escape, shown.split("...")))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def run(shell: "subprocess.Popen[str]", command: str) -> str:
    """What a command prints in this shell, to either stream."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(f"{command}\ncode=$?; printf '\\nend-of-output\\n'; (exit $code)\n")
    shell.stdin.flush()
    lines: list[str] = []
    while not (line := shell.stdout.readline()).startswith("end-of-output"):
        assert line, f"the shell ended in: {command}"
        lines.append(line)
    return "".join(lines).removesuffix("\n")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("page", "only_shown"),
    [
        ("tutorial.md", set[str]()),
        ("wiring.md", set[str]()),
        ("running.md", set[str]()),
        ("testing.md", set[str]()),
        ("comparison.md", {"go"}),
    ],
    ids=["tutorial", "wiring", "running", "testing", "comparison"],
)
def test_everything_runs_and_prints_what_it_shows(page: str, only_shown: set[str], tmp_path: Path) -> None:
    found = list(blocks((ROOT / "docs" / page).read_text(encoding="utf-8")))
    assert {block.language for block in found} == {"python", "console"} | only_shown
    found = [block for block in found if block.language not in only_shown]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", "--norc"],
        cwd=tmp_path,
        env={"PATH": path, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", "HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as shell:
        for block in found:
            if block.language == "python":
                assert block.file is not None, f"line {block.line}: say which file this is"
                (tmp_path / block.file).write_text(block.text, encoding="utf-8")
                continue
            for command, shown in commands(block.text):
                printed = run(shell, command)
                assert matches(shown, printed), (
                    f"{page}:{block.line}: $ {command}\n{printed}\ninstead of\n{shown}"
                )
        assert shell.stdin is not None
        shell.stdin.close()
