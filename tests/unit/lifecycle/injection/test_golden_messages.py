"""Messages about users' mistakes: part of the product, compared whole.

Each case of algebra_cells.py and algebra_refusals.py has its message in golden/. To write them again, and
read what changed:

    GOLDEN=write pytest tests/unit/lifecycle/injection/test_golden_messages.py
    git diff tests/unit/lifecycle/injection/golden
"""

import os
import re
from pathlib import Path

import pytest

from lifecycle import HiveError
from tests.unit.lifecycle.injection import algebra_cells, algebra_refusals

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[4]
CASES = algebra_cells.CASES | algebra_refusals.CASES


def message_of(name: str) -> str:
    """The report of a hive that is asked for its graph: faults, or what went wrong while building."""
    with pytest.raises(HiveError) as caught:
        CASES[name]().graph()
    return str(caught.value).replace(f"{ROOT}/", "") + "\n"


@pytest.mark.parametrize("name", CASES)
def test_error_messages_match_their_golden_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(message_of(name))
    assert message_of(name) == golden.read_text()


def test_there_is_no_message_without_a_case() -> None:
    assert {golden.stem for golden in GOLDEN.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_places_are_of_this_tree_and_lines_are_bare(name: str) -> None:
    """A place a person can click, no address of an object, nothing of the machine it ran on."""
    text = (GOLDEN / f"{name}.txt").read_text()
    assert not re.search(r" 0x[0-9a-f]+|/root|/home|/tmp|\s$", text.removesuffix("\n"), re.MULTILINE)
    for file, line in re.findall(r"(\S+\.py):(\d+)", text):
        assert 0 < int(line) <= len((ROOT / file).read_text().splitlines())
