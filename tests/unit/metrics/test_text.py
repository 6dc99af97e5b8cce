"""The Prometheus text format, read by its own parser; which metrics are exposed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cells.base.metrics import Histogram, MetricChoice, MetricFamily, counter, gauge, histogram
from cells.observe.metrics import MetricsSettings
from lifecycle.process import InconsistentError, exposition

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8)


def read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample that a scrape of this gives."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(st.dictionaries(st.tuples(texts, texts), st.floats(allow_nan=False)))
def test_exposition_text_round_trips(series: dict[tuple[str, str], float]) -> None:
    text = exposition([gauge("it", "Back\\slash and\nline.", series, "a b")])
    assert read(text) == {("it", (("a", a), ("b", b))): value for (a, b), value in series.items()}


@given(st.lists(st.floats(0, 1000)))
def test_buckets_are_cumulative_and_end_with_the_count(values: list[float]) -> None:
    spread = Histogram((0.1, 1, 10))
    for value in values:
        spread.observe(value)
    got = read(exposition([histogram("h", "H.", {"x": spread}, "of")]))
    for bound in (0.1, 1, 10):
        le = str(bound)
        assert got["h_bucket", (("le", le), ("of", "x"))] == sum(value <= bound for value in values)
    assert got["h_bucket", (("le", "+Inf"), ("of", "x"))] == got["h_count", (("of", "x"),)] == len(values)
    assert math.isclose(got["h_sum", (("of", "x"),)], sum(values), abs_tol=1e-9)


def test_a_counter_keeps_its_name_whatever_it_ends_with() -> None:
    text = exposition([counter("cilium_reconciler_count", "C.", 3), counter("a_total", "A.", 1)])
    assert "cilium_reconciler_count 3\n" in text
    assert text.index("a_total") < text.index("cilium_reconciler_count")


def test_several_cells_contribute_series_of_one_family() -> None:
    text = exposition([gauge("a", "A.", {"x": 1}, "b"), gauge("a", "A.", {"y": 2}, "b")])
    assert read(text) == {("a", (("b", "x"),)): 1, ("a", (("b", "y"),)): 2}
    assert text.count("# TYPE") == 1


def test_a_family_without_series_is_omitted() -> None:
    assert exposition([gauge("empty", "E.", {}, "of")]) == ""


@pytest.mark.parametrize(
    ("families", "message"),
    [
        (
            [gauge("a", "A.", {"x": 1}, "b"), gauge("a", "A.", {"x": 1}, "b")],
            "a occurs twice for {'b': 'x'}",
        ),
        ([gauge("a", "A.", 1), counter("a", "A.", 1)], "a is the name of two different metrics"),
        ([gauge("a", "A.", {}, "b"), gauge("a", "A.", {}, "c")], "a is the name of two different metrics"),
        ([gauge("a", "A.", {("x", "y"): 1}, "one")], "a has series with other labels than ['one']"),
    ],
)
def test_contradictory_metric_families_are_refused(families: list[MetricFamily], message: str) -> None:
    with pytest.raises(InconsistentError) as refused:
        exposition(families)
    assert str(refused.value) == message


USUAL, UNUSUAL, FIXED = (
    gauge("cilium_a", "", 1),
    gauge("cilium_b", "", 1, on=False),
    gauge("f", "", 1, fixed=True),
)


@pytest.mark.parametrize(
    ("words", "served"),
    [
        ([], "cilium_a f"),
        (["-cilium_a"], "f"),
        (["+cilium_b"], "cilium_a cilium_b f"),
        (["+cilium_b", "-cilium_b"], "cilium_a f"),
        (["-f", "+nobody_knows", "cilium_b", ""], "cilium_a f"),
    ],
)
def test_the_setting_adds_and_leaves_out_and_its_last_word_counts(words: list[str], served: str) -> None:
    choice = MetricChoice(words)
    assert " ".join(one.name for one in (USUAL, UNUSUAL, FIXED) if choice.serves(one)) == served
    assert choice.unsigned == [word for word in words if word[:1] not in {"+", "-"}]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("-hive_health_status_levels", "cilium_hive_status"),
        ("-cilium_hive_status", "cilium_hive_status"),
        ("-cilium_bpf_map_pressure", "cilium_bpf_map_pressure"),
        ("--cilium_bpf_map_pressure", "cilium_bpf_map_pressure"),
    ],
)
def test_names_under_which_cilium_knows_a_metric_mean_it(word: str, name: str) -> None:
    assert not MetricChoice([word]).serves(gauge(name, "", 1, fixed=name == "cilium_bpf_map_pressure"))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":9962", "", 9962),
        ("0.0.0.0:1", "0.0.0.0", 1),
        ("[::1]:9962", "::1", 9962),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_an_address_is_written_as_go_writes_it(text: str, host: str, port: int) -> None:
    settings = MetricsSettings(prometheus_serve_addr=text)
    settings.validate()
    assert settings.address == (host, port)
    assert str(settings.address) == text


@pytest.mark.parametrize("text", ["9962", ":", ":0", ":65536", "::1:9962", "host:http", ":-1", ":²"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^prometheus-serve-addr=.*: expected host:port or :port"):
        MetricsSettings(prometheus_serve_addr=text).validate()


def test_without_an_address_nothing_is_served() -> None:
    settings = MetricsSettings()
    settings.validate()
    assert settings.address is None
