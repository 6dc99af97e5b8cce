"""The reference of settings: Markdown for people, a JSON Schema that agrees with what a hive takes."""

import enum
import json
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Cell, Duration, Secret, Settings, Sources, config, group, module, seconds
from lifecycle.graph.reference import json_schema, markdown, sections
from lifecycle.settings import MAC, Quantity, RenamedFrom
from lifecycle.settings.options import options_of
from lifecycle.settings.schema import plain, schema
from lifecycle.settings.sources import load
from lifecycle.settings.values import accept


class Level(enum.Enum):
    LOW = 1
    HIGH = "high"


class Store(Settings, frozen=True):
    """Where things are stored,
    and how many.

    More than the reference shows.
    """

    node_name: str

    size: Annotated[Quantity, RenamedFrom("store-size")] = Quantity(512 << 20)
    """How much,
    in bytes."""

    mode: Literal["ram", "disk"] | None = None
    """a|b."""

    password: Secret = Secret("never shown")
    """What opens it."""

    options: dict[str, Duration] = msgspec.field(default_factory=lambda: {"retry": seconds(5)})


class Net(Settings, frozen=True):
    """Other things."""

    level: Level = Level.LOW
    macs: tuple[MAC, ...] = ()
    range: IPv4Network | None = IPv4Network("10.0.0.0/8")
    address: IPv4Address = IPv4Address("127.0.0.1")
    ratio: float = 0.5
    count: int = 3
    on: bool = True
    path: Path = Path("/x")
    levels: frozenset[Level] = frozenset({Level.HIGH})
    by_level: Mapping[Level, int] = {}  # copied for every struct


def cells() -> Cell:
    return module("app", "An app", module("store", "Keeps things", config(Store)), group(config(Net, Store)))


def test_a_page_has_a_table_for_each_struct_and_the_types_that_occur() -> None:
    page = markdown(sections(cells()), "Settings", "Generated.", Sources(prefix="APP_"))
    assert page.startswith("# Settings\n\nGenerated.\n\nA setting takes its value from")
    assert (
        """
## `app.store`: Keeps things

Where things are stored, and how many.

| setting | type | default | |
|---|---|---|---|
| `node-name` | str | required |  |
| `size` | quantity | `512Mi` | How much, in bytes. Previously `store-size`. |
| `mode` | ram\\|disk, optional | nothing | a\\|b. |
| `password` | secret | `(hidden)` | What opens it. Or `password-file`: a file that holds it. |
| `options` | map of duration | `retry=5s` |  |

## `app`: An app
"""
        in page
    )
    assert page.count("`size`") == 1
    assert "`APP_NAME`" in page
    assert "4. its default." in page
    _, _, syntax = page.partition("| type | written as |\n|---|---|\n")
    assert [line.split()[1] for line in syntax.partition("\n\n")[0].splitlines()] == (
        ["bool", "int", "float", "path", "duration", "quantity", "mac", "secret", "list", "map", "optional"]
    )
    assert "never shown" not in page.replace("that is never shown", "")


def test_settings_outside_of_a_module_have_a_table_too() -> None:
    assert "## Settings\n\nOther things.\n" in markdown(sections(config(Net)), "T", "", Sources())


def test_a_schema_holds_every_name_and_no_secret() -> None:
    text = json_schema(sections(cells()), "App")
    assert "never shown" not in text
    found = json.loads(text)
    jsonschema_rs.meta.validate(found)
    names = {name for struct in (Store, Net) for option in options_of(struct) for name in option.names}
    assert set(found["properties"]) == names >= {"store-size", "password-file"}
    assert found["properties"]["store-size"]["deprecated"] is True
    assert found["properties"]["size"]["default"] == "512Mi"
    assert found["properties"]["by-level"]["additionalProperties"] == {"type": "integer"}


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "size": st.integers(0, 2**62).map(Quantity),
    "mode": st.sampled_from(["ram", "disk", None]),
    "options": st.dictionaries(
        st.text("ab", min_size=1), st.integers(0, 10**6).map(lambda ms: Duration(ms / 1000))
    ),
    "level": st.sampled_from(Level),
    "macs": st.lists(st.binary(min_size=6, max_size=6).map(MAC)).map(tuple),
    "range": st.none() | st.just(IPv4Network("10.1.0.0/16")),
    "address": st.ip_addresses(v=4),
    "ratio": st.floats(0, 1),
    "count": st.integers(-(2**63), 2**63 - 1),
    "on": st.booleans(),
    "path": st.just(Path("/y")),
    "levels": st.frozensets(st.sampled_from(Level)),
    "by-level": st.dictionaries(st.sampled_from(Level), st.integers(0, 9)),
}
OPTIONS = {option.name: option for struct in (Store, Net) for option in options_of(struct)}
VALIDATE = jsonschema_rs.validator_for(schema(OPTIONS.values(), "App"))


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_the_json_of_a_value_matches_the_schema_and_round_trips(values: dict[str, object]) -> None:
    spoken = {"node-name": "n", **{name: plain(value) for name, value in values.items()}}
    assert VALIDATE.is_valid(json.loads(json.dumps(spoken))), list(VALIDATE.iter_errors(spoken))
    for name, value in values.items():
        assert accept(spoken[name], OPTIONS[name].kind) == value
    assert load([Store, Net], spoken).faults == []


WRONG = {
    "size": "1KB",
    "mode": "tape",
    "options": {"retry": "soon"},
    "level": "low",
    "macs": ["1:2"],
    "ratio": "half",
    "count": 1.5,
    "on": "maybe",
    "path": "",
    "levels": ["none"],
    "by-level": {"high": "x"},
    "range": 5,
    "address": 5,
    "password": 5,
    "password-file": "",
    "store-size": "much",
    "unknown": 1,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_hive_refuses_the_schema_refuses(name: str) -> None:
    spoken = {"node-name": "n", name: WRONG[name]}
    assert len(load([Store, Net], spoken).faults) == 1
    assert not VALIDATE.is_valid(spoken)


def test_what_is_required_is_required_under_any_of_its_names() -> None:
    class Needs(Settings, frozen=True):
        token: Annotated[Secret, RenamedFrom("pass")]

    valid = jsonschema_rs.validator_for(schema(options_of(Needs), "T")).is_valid
    given_names: list[dict[str, object]] = [{}, {"token": "x"}, {"token-file": "/x"}, {"pass": "x"}]
    assert list(map(valid, given_names)) == [False, True, True, True]
