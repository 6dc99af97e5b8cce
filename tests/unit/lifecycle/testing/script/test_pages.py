"""Scripts over the tables of a hive: tests of a controller, in virtual time, brought up to date."""

from pathlib import Path

import pytest

from lifecycle.testing import ScriptError, run_script, scripts
from tests.unit.lifecycle.testing.script import shop

pytestmark = pytest.mark.anyio

PAGES = Path(__file__).parent / "pages"


@pytest.mark.parametrize("page", scripts(PAGES), ids=lambda page: page.stem)
async def test_documented_scripts_have_the_documented_output(page: Path) -> None:
    await run_script(page, shop.cell, virtual_time=True)


def write(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.txtar"
    page.write_text(text)
    return page


async def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ScriptError) as caught:
        await run_script(write(tmp_path, text), shop.cell, settings={"every": "1h"})
    return str(caught.value)


ROW = "\n-- row.yaml --\nnumber: 1\ncustomer: ann\nship-to: 192.0.2.1\n"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("db/show order", "no table is named order; did you mean orders?"),
        (
            "db/insert customers row.yaml" + ROW,
            "table customers follows from others: expected one that can be",
        ),
        ("db/insert orders x\n-- x --\nnumber: one\n", "x: Expected `int`, got `str` - at `$.number`"),
        ("db/insert orders x\n-- x --\nnumber: 1\n", "x: Object missing required field `customer`"),
        ("db/insert orders x\n-- x --\n{\n", "x: this is not YAML: while parsing a flow node"),
        ("db/cmp orders x\n-- x --\n", "x: expected a line with the names of columns"),
        ("db/insert orders row.yaml\ndb/cmp orders x" + ROW + "-- x --\nnmber\n1\n", "has no column nmber;"),
        ("db/insert orders row.yaml\ndb/empty orders" + ROW, "table orders has 1 rows, expected none"),
        ("db/list --index=name orders x", "table orders has no index 'name'; it has: customer"),
        ("db/show --columns=a --format=json orders", "--columns is for the format table"),
        ("hive/disable shop", "module shop cannot be switched: hive is not running"),
        ("hive forest", "forest: no such view; expected one of tree,"),
        ("hive/start\nhive/start", "hive was started before: a hive starts once"),
        ("db/watch orders", "it has no end, so it is for shells only"),
    ],
)
async def test_a_failing_page_is_reported_in_one_line(tmp_path: Path, page: str, message: str) -> None:
    assert message in await refused(tmp_path, page)


async def test_a_page_may_be_brought_up_to_date(tmp_path: Path) -> None:
    text = "# Comments stay.\ndb/insert orders row.yaml\ndb/cmp --timeout=0s orders wanted\n"
    text += f"db/show --columns=number orders\ncmp stdout shown{ROW}-- wanted --\ncustomer   number\n"
    page = write(tmp_path, f"{text}-- shown --\n")
    with pytest.raises(ScriptError):
        await run_script(page, shop.cell)
    await run_script(page, shop.cell, update=True)
    assert (
        page.read_text()
        == f"{text.replace('customer   number', 'CUSTOMER   NUMBER')}ann        1\n-- shown --\nNUMBER\n1\n"
    )
    await run_script(page, shop.cell)


def test_a_folder_without_pages_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no page is called"):
        scripts(tmp_path)
