"""Limits that msgspec.Meta puts on settings: held to wherever a value comes from, and shown everywhere."""

from pathlib import Path
from typing import Annotated, Any

import jsonschema_rs
import msgspec
import pytest
from msgspec import Meta

from lifecycle import Duration, GraphError, Hive, Secret, Settings, Sources, config, seconds
from lifecycle.command.help_page import page
from lifecycle.command.main import COMMANDS
from lifecycle.graph.reference import markdown, sections
from lifecycle.settings import RenamedFrom
from lifecycle.settings.options import options_of
from lifecycle.settings.schema import schema


class Limited(Settings, frozen=True):
    port: Annotated[int, Meta(ge=1, le=65535), RenamedFrom("old-port")] = 80
    """Where it listens."""

    share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    even: Annotated[int, Meta(multiple_of=2)] | None = None
    every: Annotated[Duration, Meta(ge=1)] = seconds(30)
    name: Annotated[str, Meta(pattern="^[a-z]+$", max_length=5)] = "web"
    hosts: Annotated[tuple[str, ...], Meta(min_length=1)] = ("one",)
    token: Annotated[Secret | None, Meta(min_length=4)] = None


WRONG = [
    ("port", "0", "at least 1, at most 65535"),
    ("port", "65536", "at least 1, at most 65535"),
    ("old-port", "0", "at least 1, at most 65535"),
    ("share", "1", "more than 0, less than 1"),
    ("even", "3", "a multiple of 2"),
    ("every", "100ms", "at least 1s"),
    ("name", "Web", "at most 5 characters, a text that matches ^[a-z]+$"),
    ("name", "longer", "at most 5 characters, a text that matches ^[a-z]+$"),
    ("hosts", "", "at least 1 value"),
    ("token", "abc", "at least 4 characters"),
]


def faults(settings: Sources | dict[str, object]) -> list[str]:
    with pytest.raises(GraphError) as caught:
        Hive(config(Limited), settings=settings).check()
    return [fault.text for fault in caught.value.faults]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_a_value_beyond_a_limit_is_refused_wherever_it_comes_from(
    tmp_path: Path, name: str, value: str, expected: str
) -> None:
    (tmp_path / name).write_text(value)
    (tmp_path / "all.yaml").write_text(f"{name}: '{value}'")
    (tmp_path / "yaml").mkdir()
    (tmp_path / "all.yaml").rename(tmp_path / "yaml" / "all.yaml")
    variable = f"HIVE_{name.upper().replace('-', '_')}"
    places: list[Sources | dict[str, object]] = [
        Sources([f"--{name}={value}"]),
        Sources(config_dir=tmp_path),
        Sources(config_dir=tmp_path / "yaml", yaml_name="all.yaml"),
        {name: value},
        *([Sources(env={variable: value})] if value else []),
    ]
    for place in places:
        (fault,) = faults(place)
        assert fault.endswith(f": expected {expected}")
        assert name in fault or variable in fault
        assert "abc" not in fault


def test_values_within_the_limits_are_taken() -> None:
    given = {"port": 65535, "share": 0.9, "even": 2, "every": "1s", "name": "abcde", "token": "abcd"}
    hive = Hive(config(Limited), settings=given)
    assert {one.option.name: one.text for one in hive.settings()} == {
        "port": "65535", "share": "0.9", "even": "2", "every": "1s", "name": "abcde", "hosts": "one",
        "token": "(hidden)",
    }  # fmt: skip
    assert Hive(config(Limited), settings={"even": ""}).settings()[2].value is None


def test_help_reference_and_schema_show_limits() -> None:
    hive = Hive(config(Limited), name="web")
    assert "Where it listens. Expected: at least 1, at most 65535. [80]" in " ".join(
        page(hive, COMMANDS, version=False).split()
    )
    assert "Where it listens. Expected: at least 1, at most 65535." in markdown(
        sections(config(Limited)), "Title", "", Sources()
    )
    found = schema(options_of(Limited), "web")
    properties = found["properties"]
    assert {name: properties["port"][name] for name in ("minimum", "maximum")} == {
        "minimum": 1,
        "maximum": 65535,
    }
    valid = jsonschema_rs.validator_for(found)
    assert valid.is_valid({"port": 1, "even": None, "every": "2s", "name": "web", "hosts": ["a"]})
    beyond: list[dict[str, object]] = [
        {"port": 0},
        {"old-port": 0},
        {"share": 1},
        {"even": 3},
        {"name": "A"},
        {"hosts": []},
    ]
    for wrong in beyond:
        assert not valid.is_valid(wrong), wrong


@pytest.mark.parametrize(
    ("kind", "default", "message"),
    [
        (Annotated[str, Meta(ge=1)], "a", "Meta(ge=...) means nothing for str"),
        (Annotated[int, Meta(max_length=1)], 1, "Meta(max_length=...) means nothing for int"),
        (Annotated[int, Meta(pattern="a")], 1, "Meta(pattern=...) means nothing for int"),
        (Annotated[int, Meta(ge=1)], 0, "its default 0: expected at least 1"),
    ],
)
def test_limits_that_cannot_hold_are_faults_of_the_graph(kind: Any, default: object, message: str) -> None:
    odd: Any = msgspec.defstruct(
        "Odd", [("value", kind, default)], bases=(Settings,), frozen=True, rename="kebab"
    )
    with pytest.raises(GraphError) as caught:
        Hive(config(odd)).check()
    assert f"field 'value': {message}" in str(caught.value)
