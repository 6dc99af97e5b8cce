"""The page of drop reasons lists all that the datapath uses, by Cilium's number and text."""

import re
from pathlib import Path

import pytest

from cells.observe.events import DROP_REASONS
from hive.observe.drop_reason import ADVICE
from tests.support.command_line import hive

ROOT = Path(__file__).parents[3]


def test_the_page_has_every_reason_that_occurs() -> None:
    header = (ROOT / "cells/datapath/bpf/lib/reasons.h").read_text(encoding="utf-8")
    page = (ROOT / "docs/operate/drop-reasons.md").read_text(encoding="utf-8")
    occurring = {int(number) for number in re.findall(r"^#define DROP_\w+ (\d+)", header, re.MULTILINE)}
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert {int(number): text for number, text, _, _ in rows} == {
        each: DROP_REASONS[each] for each in occurring
    }
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", " | ".join(row)) for row in rows]
    shown = [f"{each} | {DROP_REASONS[each]} | {found.means} | {found.do}" for each, found in ADVICE.items()]
    assert shown == plain, "hive drop-reason shows what the page has"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["133"], ["133 Policy denied"]),
        (["policy DENIED"], ["133 Policy denied", "181 Policy denied by denylist"]),
        ([], [f"{number} {DROP_REASONS[number]}" for number in ADVICE]),
    ],
)
def test_reasons_are_found_by_number_and_by_words(
    words: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "drop-reason", *words)
    assert result.code == 0
    assert [line for line in result.out.splitlines() if line[:1].isdigit()] == shown
    if words == ["133"]:
        assert result.out.splitlines()[1:] == [
            "  means   no policy rule allows the packet",
            "  do      hive policy explain SOURCE DESTINATION; hive bpf policy POD",
        ]


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("nonsense", "there is no drop reason nonsense: expected a number or words of its text"),
        ("1330", "there is no drop reason 1330"),
        ("193", "193 Unsupported packet protocol for DSR encapsulation: it belongs to what is not built"),
    ],
)
def test_a_reason_that_does_not_occur_is_refused(
    reason: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "drop-reason", reason)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert line in result.err
