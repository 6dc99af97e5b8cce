"""The page of drop reasons has each reason that the datapath gives, by Cilium's number and text."""

import re
from pathlib import Path

from cells.observe.events import DROP_REASONS

ROOT = Path(__file__).parents[3]


def test_the_page_has_every_reason_that_occurs() -> None:
    header = (ROOT / "cells/datapath/bpf/lib/reasons.h").read_text(encoding="utf-8")
    page = (ROOT / "docs/operate/drop-reasons.md").read_text(encoding="utf-8")
    occurring = {int(number) for number in re.findall(r"^#define DROP_\w+ (\d+)", header, re.MULTILINE)}
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page, re.MULTILINE)
    assert {int(number): text for number, text in rows} == {each: DROP_REASONS[each] for each in occurring}
