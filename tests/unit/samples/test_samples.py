"""Metrics in the shell: current, sampled, plotted, as a page; by scripts in virtual time."""

import json
import math
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.base.metrics import Collector, Histogram, MetricFamily, counter, gauge, histogram
from cells.observe import samples
from cells.observe.metrics import Metrics, choice_cell
from cells.observe.samples import MAX_SERIES, RETAINED, Samples, pretty, quantile
from cells.observe.samples.graphs import per_second, plot
from lifecycle import Cell, Member, invoke, module, provide
from lifecycle.admin import Arguments, Command, Commands, State
from lifecycle.testing import run_script, scripts
from tests.support.examples import scaled

pytestmark = pytest.mark.anyio

PAGES = Path(__file__).parent / "pages"


class Mill:
    """What is measured."""

    def __init__(self, metrics: Metrics) -> None:
        self.sacks = 0.0
        self.took = Histogram((0.1, 0.2, 0.4))
        metrics.add([Collector("mill", self.families)])

    async def families(self) -> Iterable[MetricFamily]:
        return [
            counter("mill_sacks_total", "Sacks.", {"rye": self.sacks, "oat": 2 * self.sacks}, "grain"),
            gauge("mill_hidden", "Not told to Prometheus.", self.sacks, on=False),
            histogram("mill_took_seconds", "How long one takes.", self.took),
            gauge("mill_wheels", "Declared in another order.", {("south", "big"): 1.0}, "side kind"),
            gauge("cilium_event_ts", "Says nothing by its course.", 1.0),
        ]


def commands(mill: Mill) -> Member[Commands]:
    async def grind(_: State, given: Arguments) -> None:
        mill.sacks += len(given.words)
        for seconds in given.words:
            mill.took.observe(float(seconds))

    return Commands(Command("mill/grind", "Grind sacks", grind, "seconds..."))


CELLS: tuple[Cell, ...] = (
    choice_cell,
    module("metrics", "Metrics", provide(Metrics)),
    module("mill", "Grinds", provide(Mill, commands), invoke(Mill)),
    samples.cell,
)


@pytest.mark.parametrize("page", scripts(PAGES), ids=lambda page: page.stem)
async def test_documented_scripts_have_the_documented_output(page: Path) -> None:
    await run_script(page, *CELLS, virtual_time=True)


class Reader(HTMLParser):
    """Counts what is drawn."""

    lines = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.lines += tag == "polyline"


async def test_documents_and_the_page_are_well_formed(tmp_path: Path) -> None:
    script = tmp_path / "all.txtar"
    found: dict[str, str] = {}

    async def keep(state: State, given: Arguments) -> None:
        found[given.words[0]] = state.stdout

    def keeper() -> Member[Commands]:
        return Commands(Command("keep", "Keep what was printed", keep, "name"))

    script.write_text(
        "hive/start\nmill/grind 0.15\nsleep 6m\nmetrics -format=json mill_[st]\nkeep now\n"
        "metrics -s -format=json mill_\nkeep samples\nmetrics/html\nkeep page\n"
    )
    await run_script(script, *CELLS, provide(keeper), virtual_time=True)
    now = json.loads(found["now"])
    assert [one["name"] for one in now] == ["mill_sacks_total", "mill_sacks_total", "mill_took_seconds"]
    assert now[1] == {"labels": {"grain": "rye"}, "name": "mill_sacks_total", "value": 1.0}
    dump = json.loads(found["samples"])
    assert (dump["num_samples"], dump["interval_seconds"]) == (24, 300)
    by_name = {(one["name"], one["labels"]): one for one in dump["samples"]}
    assert by_name["mill_sacks_total", "grain=oat"]["gauge_or_counter"]["samples"] == [2.0] + [0.0] * 23
    assert [ring[0] for ring in by_name["mill_took_seconds", ""]["histogram"].values()] == pytest.approx(
        [0.15, 0.19, 0.199]
    )
    reader = Reader()
    reader.feed(found["page"])
    assert reader.lines >= 6
    assert "mill_hidden" in found["page"]
    assert "://" not in found["page"]


def family(number: int) -> MetricFamily:
    return gauge("g", "G.", {str(one): float(one) for one in range(number)}, "of")


async def test_samples_store_at_most_the_maximum_of_series() -> None:
    retained = Samples()
    retained.take([family(MAX_SERIES + 5)])
    assert (len(list(retained)), retained.full) == (MAX_SERIES, True)


async def test_a_series_without_samples_is_removed_after_two_hours() -> None:
    retained = Samples()
    retained.take([family(2)])
    for _ in range(RETAINED - 1):
        retained.take([family(1)])
    assert len(list(retained)) == 2
    retained.take([family(1)])
    assert [one.labels for one in retained] == ["of=0"]


async def test_a_histogram_that_starts_again_is_sampled_by_its_new_values() -> None:
    """As of a module that the shell has stopped and started; its buckets may be others, too."""
    taken = Samples()
    for bounds, values in (((1.0, 2.0), (0.5, 0.5, 1.5)), ((1.0, 2.0), (1.5,)), ((4.0, 8.0, 9.0), (8.5,))):
        seen = Histogram(bounds)
        for value in values:
            seen.observe(value)
        taken.take([histogram("took_seconds", "How long.", seen)])
    (series,) = taken
    assert taken.newest_first(series.rings[0])[:3] == [8.5, 1.5, 0.75]


@settings(max_examples=scaled(60), deadline=None)
@given(st.lists(st.floats(0, 1.4), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_a_quantile_is_within_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    bounds = (0.1, 0.5, 1.0, 1.5)
    seen = Histogram(bounds)
    for value in values:
        seen.observe(value)
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    estimate = quantile(bounds, seen.counts, share)
    upper = next(bound for bound in bounds if true <= bound)
    lower = max((bound for bound in (0.0, *bounds) if bound < upper), default=0.0)
    assert lower <= estimate <= upper * (1 + 1e-9)


def test_a_value_above_all_bounds_counts_as_the_last_bound() -> None:
    assert quantile((1.0, 2.0), (0, 0, 3), 0.5) == 2.0
    assert quantile((1.0, 2.0), (0, 0, 0), 0.5) == 0.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.5, "1.5"),
        (0.0015, "1.5m"),
        (23_400, "23.4k"),
        (2.5e-6, "2.5µ"),
        (-3e6, "-3M"),
        (7e12, "7T"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert pretty(value) == text


@settings(max_examples=scaled(60), deadline=None)
@given(st.lists(st.one_of(st.floats(-1e12, 1e12), st.just(math.nan)), min_size=RETAINED, max_size=RETAINED))
def test_whatever_there_is_to_plot_the_box_is_whole(samples: list[float]) -> None:
    lines = plot("title", "a=b", samples, 120)
    assert len(lines) == 12
    assert all(len(line) <= 80 for line in lines)
    assert [line[79:80] for line in lines[2:11]] == ["┐", *"│││││││", "┘"]
    dots = sum(ord(letter) > 0x2800 for line in lines for letter in line if 0x2800 <= ord(letter) <= 0x28FF)
    assert (dots > 0) == any(not math.isnan(one) for one in samples)


def test_a_rate_is_what_came_a_second() -> None:
    assert per_second([0.0, 300.0, 900.0])[1:] == [1.0, 2.0]
