"""The setting of rate limits: precedence, keywords, and rejected values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from cells.api.limiter import Parameters
from cells.api.rate_limits import NAMES, LimitSettings, limiter_name
from lifecycle import Hive, SettingsError, Sources, config
from lifecycle.settings.values import parse


def parameters(spoken: str) -> Parameters:
    """Those of endpoint-create with these words."""
    return LimitSettings(api_rate_limit={"endpoint-create": spoken}).parameters()["endpoint-create"]


def refused(directory: Path, spoken: str) -> list[str]:
    """The error of an agent with this setting."""
    (directory / "api-rate-limit").write_text(spoken)
    try:
        Hive(config(LimitSettings), settings=Sources(config_dir=directory)).check()
    except SettingsError as error:
        return [fault.text for fault in error.faults]
    return []


def test_unset_limits_are_ciliums() -> None:
    known = LimitSettings().parameters()
    assert tuple(known) == NAMES
    rows = {
        name: (
            one.rate_limit,
            one.rate_burst if one.rate_limit else None,
            one.parallel_requests,
            one.min_parallel_requests,
            one.max_wait_duration,
            one.estimated_processing_duration,
            one.skip_initial,
        )
        for name, one in known.items()
    }
    assert rows == {
        "endpoint-create": (0.5, 4, 4, 2, 60, 2.0, 4),
        "endpoint-delete": (0.0, None, 4, 4, 0, 0.2, 0),
        "endpoint-get": (4.0, 4, 4, 2, 10, 0.2, 4),
        "endpoint-patch": (0.5, 4, 4, 1, 15, 1.0, 4),
        "endpoint-list": (1.0, 4, 2, 2, 0, 0.3, 0),
    }
    for one in known.values():
        assert one.auto_adjust
        assert not one.log
        assert (one.mean_over, one.delayed_adjustment_factor, one.max_adjustment_factor) == (10, 0.5, 100.0)
        assert (one.min_wait_duration, one.max_parallel_requests) == (0, 0)


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("rate-limit:10/s", "rate_limit", 10),
        ("rate-limit:10/m", "rate_limit", 10 / 60),
        ("rate-limit:3.5/h", "rate_limit", 3.5 / 3600),
        ("rate-limit:1/100ms", "rate_limit", 10),
        ("rate-limit:10/2m", "rate_limit", 10 / 120),
        ("rate-limit:0/s", "rate_limit", 0),
        ("RATE-LIMIT:5/s", "rate_limit", 5),
        ("rate-burst:7", "rate_burst", 7),
        ("rate-burst:0", "rate_burst", 1),
        ("min-wait-duration:10ms", "min_wait_duration", 0.01),
        ("max-wait-duration:1m30s", "max_wait_duration", 90),
        ("max-wait-duration:0", "max_wait_duration", 0),
        ("estimated-processing-duration:100ms", "estimated_processing_duration", 0.1),
        ("auto-adjust:false", "auto_adjust", False),
        ("auto-adjust:T", "auto_adjust", True),
        ("parallel-requests:0", "parallel_requests", 0),
        ("min-parallel-requests:3", "min_parallel_requests", 3),
        ("max-parallel-requests:6", "max_parallel_requests", 6),
        ("mean-over:20", "mean_over", 20),
        ("mean-over:0", "mean_over", 10),
        ("delayed-adjustment-factor:0.25", "delayed_adjustment_factor", 0.25),
        ("delayed-adjustment-factor:0.0", "delayed_adjustment_factor", 0.5),
        ("max-adjustment-factor:10", "max_adjustment_factor", 10),
        ("max-adjustment-factor:0", "max_adjustment_factor", 100),
        ("skip-initial:0", "skip_initial", 0),
        ("log:true", "log", True),
    ],
)
def test_a_rate_limit_option_changes_one_parameter(word: str, field: str, value: float) -> None:
    changed = parameters(word)
    assert getattr(changed, field) == pytest.approx(value)
    base = parameters("")
    assert {
        each for each in Parameters.__struct_fields__ if getattr(changed, each) != getattr(base, each)
    } <= {field}


@pytest.mark.parametrize(
    "spoken",
    [
        "endpoint-create=rate-limit:10/m,rate-burst:2,endpoint-list=parallel-requests:9",
        '{"endpoint-create": "rate-limit:10/m,rate-burst:2", "endpoint-list": "parallel-requests:9"}',
        "endpoint-create=rate-limit:10/m, rate-burst:2,,endpoint-list=parallel-requests:9",
    ],
    ids=["pairs", "json", "blanks"],
)
def test_several_limiters_in_either_form(spoken: str) -> None:
    known = LimitSettings(api_rate_limit=cast("dict[str, str]", parse(spoken, dict[str, str]))).parameters()
    create, listed = known["endpoint-create"], known["endpoint-list"]
    assert (create.rate_limit, create.rate_burst, create.parallel_requests) == (10 / 60, 2, 4)
    assert (listed.rate_limit, listed.parallel_requests) == (1, 9)


@pytest.mark.parametrize(
    ("spoken", "text"),
    [
        (
            "endpoint-creat=rate-limit:1/s",
            "no such limiter, expected one of endpoint-create, endpoint-delete,",
        ),
        ("endpoint-get=rate:1/s", "'rate': no such option, expected one of rate-limit, rate-burst,"),
        ("endpoint-get=rate-limit", "'rate-limit': expected option:value, with commas between several"),
        *(
            (f"endpoint-get=rate-limit:{rate}", f"'rate-limit:{rate}': expected a rate such as 10/s, 3.5/m")
            for rate in ("10", "10/10", "10/", "/s", "ten/s", "-1/s", "1/0s", "1/-1s", "nan/s", "1e999/s")
        ),
        ("endpoint-get=rate-burst:-1", "'rate-burst:-1': expected a whole number, 0 to 999999999"),
        ("endpoint-get=rate-burst:1_0", "'rate-burst:1_0': expected a whole number"),
        ("endpoint-get=max-wait-duration:10", "'max-wait-duration:10': expected a duration such as 15s"),
        ("endpoint-get=max-wait-duration:-1s", "expected a duration such as 15s, not less than 0"),
        ("endpoint-get=auto-adjust:yes", "'auto-adjust:yes': expected true or false"),
        ("endpoint-get=delayed-adjustment-factor:2", "expected a number between 0 and 1"),
        (
            "endpoint-get=max-adjustment-factor:.5",
            "expected a number that is at least 1, or 0 for the default",
        ),
        ("endpoint-get=max-adjustment-factor:inf", "expected a number, not less than 0"),
        ("endpoint-get=min-wait-duration:11s", "expected a min-wait-duration within 10s"),
        ("rate-limit:1/s", "expected key=value,key1=value1 or a JSON object"),
        ('{"endpoint-get": 5}', "expected text"),
    ],
)
def test_an_invalid_limit_is_refused_in_one_line(spoken: str, text: str, tmp_path: Path) -> None:
    (line,) = refused(tmp_path, spoken)
    assert text in line
    assert line.startswith(f"{tmp_path}/api-rate-limit: ")
    assert "\n" not in line


def test_all_invalid_limits_are_reported_at_once(tmp_path: Path) -> None:
    assert len(refused(tmp_path, "endpoint-get=log:2,endpoint-list=log:3,other=x")) == 3


PAGE = (Path(__file__).resolve().parents[3] / "docs/operate/rate-limits.md").read_text(encoding="utf-8")


def test_the_page_has_every_limiter_as_it_is() -> None:
    for name, one in LimitSettings().parameters().items():
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        rate, at_once, longest, first, takes = (cell.strip() for cell in row.split("|")[3:8])
        assert rate == (f"{one.rate_limit:g}/s, {one.rate_burst}" if one.rate_limit else "none")
        assert int(at_once.partition(",")[0]) == one.parallel_requests
        assert longest == (f"{one.max_wait_duration:g}s" if one.max_wait_duration else "none")
        assert int(first or 0) == one.skip_initial
        assert takes in {
            f"{one.estimated_processing_duration:g}s",
            f"{one.estimated_processing_duration * 1000:g}ms",
        }


def test_the_page_has_every_option_and_its_examples_count() -> None:
    assert {field.replace("_", "-") for field in Parameters.__struct_fields__} <= set(
        re.findall("`([a-z-]+)`", PAGE)
    )
    examples = re.findall(r"--api-rate-limit=('[^']*'|\S+)", PAGE)
    assert len(examples) == 2
    for spoken in examples:
        settings = LimitSettings(
            api_rate_limit=cast("dict[str, str]", parse(spoken.strip("'"), dict[str, str]))
        )
        settings.validate()
        assert settings.parameters() != LimitSettings().parameters()


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("PUT", "/v1/endpoint/{id}", "endpoint-create"),
        ("DELETE", "/v1/endpoint/{id}", "endpoint-delete"),
        ("DELETE", "/v1/endpoint", "endpoint-delete"),
        ("GET", "/v1/endpoint", "endpoint-list"),
        ("GET", "/v1/endpoint/{id}", "endpoint-get"),
        *(
            ("GET", f"/v1/endpoint/{{id}}/{part}", "endpoint-get")
            for part in ("healthz", "log", "labels", "config")
        ),
        ("PATCH", "/v1/endpoint/{id}/labels", "endpoint-patch"),
        ("PATCH", "/v1/endpoint/{id}/config", "endpoint-patch"),
        ("PATCH", "/v1/endpoint/{id}", "endpoint-patch"),
        ("GET", "/v1/config", None),
        ("PATCH", "/v1/config", None),
        ("GET", "/v1/healthz", None),
        ("POST", "/v1/ipam", None),
        ("GET", "/statedb/dump/{table}", None),
    ],
)
def test_operations_have_their_limiters(method: str, path: str, name: str | None) -> None:
    assert limiter_name(method, path) == name
