"""How types of settings are written: quantities, MACs, maps, enums; and that every value can be written."""

import enum
import math
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Duration, GraphError, Hive, Secret, Settings, config
from lifecycle.settings import MAC, Quantity
from lifecycle.settings.values import accept, known, parse, parse_all, show, type_text


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Port(enum.IntEnum):
    HTTP = 80
    HTTPS = 443


MACS = st.binary(min_size=6, max_size=6).map(MAC)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
KEYS = st.text("abcXYZ019-_.:/@;", min_size=1)

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    int | None: st.none() | st.integers(),
    Duration: st.integers(-(10**9), 10**9).map(lambda milliseconds: Duration(milliseconds / 1000)),
    Quantity: st.integers(-(2**63) + 1, 2**63 - 1).map(Quantity),
    MAC: MACS,
    Level: st.sampled_from(Level),
    Port: st.sampled_from(Port),
    Literal["a", 1, True]: st.sampled_from(["a", 1, True]),
    IPv4Address: st.ip_addresses(v=4),
    IPv6Address: st.ip_addresses(v=6),
    IPv4Interface: st.ip_addresses(v=4).map(lambda ip: IPv4Interface(f"{ip}/24")),
    IPv4Network: st.ip_addresses(v=4).map(lambda ip: IPv4Network(f"{ip}/16", strict=False)),
    IPv4Network | IPv6Network: st.ip_addresses(v=6).map(lambda ip: IPv6Network(f"{ip}/64", strict=False)),
    list[int]: st.lists(st.integers()),
    tuple[MAC, ...]: st.lists(MACS).map(tuple),
    frozenset[Level]: st.frozensets(st.sampled_from(Level)),
    dict[str, str]: st.dictionaries(TEXTS, TEXTS),
    dict[str, int]: st.dictionaries(KEYS, st.integers(-(2**63), 2**63 - 1)),
    dict[Level, Duration]: st.dictionaries(st.sampled_from(Level), st.integers(0, 99).map(Duration)),
    Mapping[str, MAC]: st.dictionaries(KEYS, MACS),
}


@pytest.mark.parametrize("kind", VALUES, ids=type_text)
@given(st.data())
def test_what_is_shown_can_be_written_and_is_the_same(kind: object, data: st.DataObject) -> None:
    value = data.draw(VALUES[kind])
    again = parse(show(value), kind)
    assert again == value
    assert type(again) is type(value)
    assert accept(value, kind) == value


@given(
    st.sampled_from(list(VALUES)), TEXTS | st.sampled_from(["{", '{"a":[]}', "[" * 5000, "\0", "a=", "1e99"])
)
def test_any_text_is_read_or_refused_in_one_line(kind: object, text: str) -> None:
    try:
        value = parse(text, kind)
    except ValueError as error:
        if "expected" not in str(error) or "\n" in str(error):
            raise
    else:
        parse(show(value), kind)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("1000", 1000),
        ("512Mi", 512 << 20),
        ("1.5Gi", 3 << 29),
        ("1k", 1000),
        ("2M", 2_000_000),
        ("1E", 10**18),
        ("1E3", 1000),
        ("1e3", 1000),
        ("100e-2", 1),
        ("5000m", 5),
        (".5k", 500),
        ("1.", 1),
        ("-2Ki", -2048),
        ("+3", 3),
    ],
)
def test_quantities_are_kubernetes(text: str, amount: int) -> None:
    assert Quantity.parse(text) == amount


@pytest.mark.parametrize(
    "text", ["", "1 Mi", "1K", "1ki", "1MB", "1m", "1e-1", "9Ei", "1e99", "k", "٣", "0x10"]
)
def test_other_texts_are_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        Quantity.parse(text)


def test_quantities_print_as_people_write_them() -> None:
    amounts = [0, 1, 999, 1000, 1024, 1536 << 20, 10**9, -(1 << 30), 1025]
    assert [str(Quantity(amount)) for amount in amounts] == [
        "0", "1", "999", "1k", "1Ki", "1536Mi", "1G", "-1Gi", "1025",
    ]  # fmt: skip


@given(st.integers(0, 10**6), st.sampled_from(["Ki", "Mi", "Gi", "k", "M", "G"]))
def test_a_suffix_multiplies(number: int, suffix: str) -> None:
    unit = 1024 if suffix.endswith("i") else 1000
    power = 1 + "kmg".index(suffix[0].lower())
    assert Quantity.parse(f"{number}{suffix}") == number * unit**power
    assert math.isclose(Quantity.parse(f"{number}.5{suffix}"), (number + 0.5) * unit**power)


@pytest.mark.parametrize("text", ["0A:00:5e:00:53:01", "0a-00-5E-00-53-01", "0a00.5e00.5301"])
def test_macs_are_read_in_three_spellings_and_printed_in_one(text: str) -> None:
    mac = MAC.parse(text)
    assert mac == bytes.fromhex("0a005e005301")
    assert str(mac) == repr(mac) == "0a:00:5e:00:53:01"


@pytest.mark.parametrize(
    "text",
    ["", "0a:00:5e:00:53", "0a:00-5e:00:53:01", "0a:0:5e:00:53:01", "0a005e005301", "zz:00:5e:00:53:01"],
)
def test_other_texts_are_no_macs(text: str) -> None:
    with pytest.raises(ValueError, match="expected a MAC address such as"):
        MAC.parse(text)
    with pytest.raises(ValueError, match="expected 6 bytes, not 0"):
        MAC(b"")


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ('{"etcd.config": "/x"}', {"etcd.config": "/x"}),
        ("etcd.config=/x", {"etcd.config": "/x"}),
        (" \n", {}),
        ("{}", {}),
        ("a=1,b=2", {"a": "1", "b": "2"}),
        ("a=1, b=2", {"a": "1", "b": "2"}),
        ("a=x,y,z,b=2", {"a": "x,y,z", "b": "2"}),
        ("a=b=c", {"a": "b=c"}),
        ("a=,b=", {"a": "", "b": ""}),
        ("a=1,a=2", {"a": "2"}),
        ('{"a": "1,b=2"}', {"a": "1,b=2"}),
        ('{"": " 1 "}', {"": " 1 "}),
    ],
)
def test_maps_are_json_or_pairs(text: str, pairs: dict[str, str]) -> None:
    assert parse(text, dict[str, str]) == pairs
    assert parse(show(pairs), dict[str, str]) == pairs


@pytest.mark.parametrize("text", ["a", "=1", "a b=1", '{"a": ', "[]", '["a"]', ",a=1"])
def test_other_texts_are_no_maps(text: str) -> None:
    with pytest.raises(ValueError, match="expected key=value,key1=value1 or a JSON object, each value text"):
        parse(text, dict[str, str])


def test_an_invalid_value_in_a_map_is_reported_with_its_key() -> None:
    with pytest.raises(ValueError, match="key 'b': expected a whole number"):
        parse("a=1,b=x", dict[str, int])
    with pytest.raises(ValueError, match="key 'a': expected text"):
        parse('{"a": 1}', dict[str, str])
    assert parse('{"a": 1, "b": "0x10"}', dict[str, int]) == {"a": 1, "b": 16}


def test_a_map_given_several_times_adds_up() -> None:
    assert parse_all(["a=1,b=2", '{"b": 3}', "c=4"], dict[str, int]) == {"a": 1, "b": 3, "c": 4}
    assert parse_all(["a b", "c,d"], list[str]) == ["a", "b", "c", "d"]


def test_enums_are_given_by_value_or_as_members() -> None:
    assert parse("443", Port) is Port.HTTPS
    assert accept(443, Port) is accept(Port.HTTPS, Port) is accept("443", Port) is Port.HTTPS
    with pytest.raises(ValueError, match="expected one of 80, 443"):
        parse("HTTP", Port)
    assert accept(1, Literal[1, True]) == 1
    assert accept(True, Literal[1, True]) is True


def test_types_are_named_in_a_few_words() -> None:
    kinds: list[object] = [dict[str, int], tuple[Path, ...], Quantity, MAC | None, Level]
    assert list(map(type_text, kinds)) == [
        "map of int",
        "list of path",
        "quantity",
        "mac, optional",
        "low|high",
    ]


class Strange(Settings, frozen=True):
    nested: dict[str, dict[str, object]] = {}  # noqa: RUF012  # copied for every struct
    lists: list[list[int]] = []  # noqa: RUF012
    config_dir: str = ""


def test_a_type_that_no_text_can_stand_for_is_a_fault_of_the_graph() -> None:
    assert not any(map(known, (dict[list[str], str], dict[Secret, str], list[dict[str, str]])))
    with pytest.raises(GraphError) as caught:
        Hive(config(Strange)).check()
    message = str(caught.value)
    assert "field 'nested': no text can be read as dict[str, dict[str, object]]" in message
    assert "field 'lists': no text can be read as list[list[int]]" in message
    assert "field 'config_dir': config-dir names the directory of settings; take another name" in message


def test_a_default_of_another_type_is_a_fault_of_the_graph() -> None:
    class Wrong(Settings, frozen=True):
        count: int = "many"  # type: ignore[assignment]  # the mistake, as in the next
        spool: Path = "spool"  # type: ignore[assignment]
        wait: Duration = 5  # type: ignore[assignment]  # a number of seconds, as anywhere

    with pytest.raises(GraphError) as caught:
        Hive(config(Wrong)).check()
    assert "field 'count': its default 'many': expected a whole number" in str(caught.value)
    assert "field 'spool': its default 'spool': expected a path, not a text" in str(caught.value)
    assert "'wait'" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["9" * 5000 + "s", "." + "9" * 5000 + "s", "0" * 5000 + "s"], ids=["long", "part", "zeros"]
)
def test_a_duration_of_thousands_of_digits_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration such as 15s"):
        Duration.parse(text)
