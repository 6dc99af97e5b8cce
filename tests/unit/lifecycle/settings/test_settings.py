"""Settings: where values come from, how texts are read, what is reported about mistakes."""

import enum
import re
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import (
    Duration,
    Hive,
    Settings,
    SettingsError,
    Sources,
    config,
    milliseconds,
    minutes,
    module,
    seconds,
)


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class All(Settings, frozen=True):
    """One of every kind."""

    flag: bool = False
    """Whether to."""
    count: int = 1
    ratio: float = 0.5
    name: str = "n"
    state_dir: Path = Path("/run/x")
    conf: Path | None = None
    interval: Duration = seconds(15)
    """How often,
    in the mean."""
    range: IPv4Network | None = None
    either: IPv4Network | IPv6Network = IPv4Network("10.0.0.0/8")
    address: IPv4Address = IPv4Address("127.0.0.1")
    devices: tuple[str, ...] = ()
    ports: list[int] = []  # noqa: RUF012  # copied for every struct
    mode: Literal["none", "full"] = "none"
    colour: Colour = Colour.RED


class Longer(All, frozen=True):
    """Inherits options and their help."""

    extra: int = 0
    """More."""


def read(**given: object) -> All:
    hive = Hive(config(All), settings={name.replace("_", "-"): value for name, value in given.items()})
    hive.check()
    return hive._loaded.structs[All]  # type: ignore[return-value]  # of that type


def from_sources(*argv: str, env: dict[str, str] | None = None, config_dir: Path | None = None) -> All:
    hive = Hive(config(All), settings=Sources(argv, env, config_dir))
    hive.check()
    return hive._loaded.structs[All]  # type: ignore[return-value]  # of that type


def faults(*argv: str, env: dict[str, str] | None = None, config_dir: Path | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        from_sources(*argv, env=env, config_dir=config_dir)
    return [fault.text for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("flag", "t", True),
        ("flag", "F", False),
        ("count", "-3", -3),
        ("count", "0x10", 16),
        ("ratio", "0.0025", 0.0025),
        ("name", "", ""),
        ("state-dir", "/x/y", Path("/x/y")),
        ("conf", "", None),
        ("conf", "/c", Path("/c")),
        ("interval", "2m0s", minutes(2)),
        ("interval", "100ms", milliseconds(100)),
        ("range", "10.1.0.0/16", IPv4Network("10.1.0.0/16")),
        ("range", "", None),
        ("either", "fd00::/64", IPv6Network("fd00::/64")),
        ("address", "10.0.0.1", IPv4Address("10.0.0.1")),
        ("devices", "eth0 eth1", ("eth0", "eth1")),
        ("devices", "eth0,eth1, eth2", ("eth0", "eth1", "eth2")),
        ("devices", "", ()),
        ("ports", "1,2", [1, 2]),
        ("mode", "full", "full"),
        ("colour", "green", Colour.GREEN),
    ],
)
def test_texts_are_read_by_type(name: str, text: str, value: object) -> None:
    assert getattr(from_sources(f"--{name}={text}"), name.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("flag", "yes", "true or false"),
        ("flag", "", "true or false"),
        ("count", "1.5", "a whole number"),
        ("count", "", "a whole number"),
        ("ratio", "nan", "a number"),
        ("state-dir", "", "a path"),
        ("interval", "15", "a duration such as 15s, 2m0s or 100ms"),
        ("interval", "soon", "a duration such as 15s, 2m0s or 100ms"),
        ("range", "10.0.0.1/8", "an IPv4 network such as 10.0.0.0/16, without host bits"),
        ("either", "ten", "an IP network, without host bits"),
        ("ports", "1,x", "a whole number"),
        ("mode", "half", "one of none, full"),
        ("colour", "blue", "one of red, green"),
    ],
)
def test_unparsable_values_are_reported_with_the_expected_form(name: str, text: str, expected: str) -> None:
    assert faults(f"--{name}={text}") == [f"--{name}={text}: expected {expected}"]


def test_values_given_in_code_are_checked_too() -> None:
    assert read(
        count=3, interval=1, devices=["a"], range="10.0.0.0/8", colour=Colour.GREEN, conf=None
    ) == All(
        count=3, interval=seconds(1), devices=("a",), range=IPv4Network("10.0.0.0/8"), colour=Colour.GREEN
    )
    with pytest.raises(SettingsError, match="count=True: expected a whole number"):
        read(count=True)
    with pytest.raises(SettingsError, match=r"state-dir=5: expected a path"):
        read(state_dir=5)


def test_flags_are_written_the_usual_ways() -> None:
    assert from_sources("--flag", "--count", "5", "--name=a=b", "--devices=a", "--devices", "b,c") == All(
        flag=True, count=5, name="a=b", devices=("a", "b", "c")
    )
    assert from_sources("--count=1", "--COUNT=2").count == 2


def test_a_flag_wins_over_the_environment_over_the_config_dir_over_the_default(tmp_path: Path) -> None:
    for name in ("count", "name", "ratio"):
        (tmp_path / name).write_text(" 1 \n")
    found = from_sources("--count=3", env={"HIVE_COUNT": "2", "HIVE_NAME": "2"}, config_dir=tmp_path)
    assert (found.count, found.name, found.ratio, found.mode) == (3, "2", 1.0, "none")


@given(st.lists(st.sampled_from(["flag", "env", "file"]), unique=True))
def test_the_origin_of_a_value_is_the_highest_place_that_has_one(places: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "count"
        if "file" in places:
            path.write_text("10")
        sources = Sources(
            ["--count=30"] if "flag" in places else [],
            {"HIVE_COUNT": "20"} if "env" in places else {},
            directory,
        )
        settings = {
            setting.option.name: setting for setting in Hive(config(All), settings=sources).settings()
        }
        expected = {"flag": (30, "flag --count"), "env": (20, "HIVE_COUNT"), "file": (10, f"file {path}")}
        winner = next((place for place in expected if place in places), None)
        found = settings["count"]
        assert (found.value, found.origin) == (expected[winner] if winner else (1, "default"))


def test_empty_variables_count_as_unset_and_unknown_ones_are_ignored() -> None:
    assert from_sources(env={"HIVE_COUNT": "", "HIVE_NO_SUCH_THING": "1", "COUNT": "7"}).count == 1


def test_the_config_dir_may_be_named_by_flag_or_variable(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("7")
    assert from_sources(f"--config-dir={tmp_path}").count == 7
    assert from_sources(env={"HIVE_CONFIG_DIR": str(tmp_path)}).count == 7


def test_a_config_map_as_it_is_mounted_is_read(tmp_path: Path) -> None:
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    (data / "count").write_text("7\n")
    (data / "operator-thing").write_text("?")
    (tmp_path / "..data").symlink_to(data.name)
    for name in ("count", "operator-thing"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    (tmp_path / "directory").mkdir()
    assert from_sources(config_dir=tmp_path) == All(count=7)


def test_all_invalid_settings_are_reported_at_once_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "ratio").write_text("half")
    assert faults(
        "--cuont=1", "--flag=maybe", "stray", "--name", env={"HIVE_MODE": "x"}, config_dir=tmp_path
    ) == [
        "--cuont: no such setting; did you mean --count?",
        "stray: not expected here; settings are --name=value",
        "--name: needs a value, as in --name=VALUE",
        "--flag=maybe: expected true or false",
        f"{tmp_path / 'ratio'}: 'half': expected a number",
        "HIVE_MODE=x: expected one of none, full",
    ]


def test_the_value_of_an_unknown_flag_is_not_reported_separately() -> None:
    assert faults("--zzz", "5", "--count=2") == ["--zzz: no such setting"]
    assert faults("--zzz", "5", "--count=two") == [
        "--zzz: no such setting",
        "--count=two: expected a whole number",
    ]
    assert faults("--zzz", "--yyy=1") == ["--zzz: no such setting", "--yyy: no such setting"]


def test_a_missing_config_dir_is_reported(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    assert faults(config_dir=missing) == [
        f"config-dir {missing}: no such file or directory; expected a directory"
    ]


def test_a_duration_without_unit_in_a_file_is_nanoseconds_and_warned_about(tmp_path: Path) -> None:
    (tmp_path / "interval").write_text("1000000000")
    hive = Hive(config(All), settings=Sources(config_dir=tmp_path))
    hive.check()
    assert hive._loaded.structs[All] == All(interval=seconds(1))
    expected = f"{tmp_path / 'interval'}: '1000000000': a duration without a unit is read as nanoseconds"
    assert hive._loaded.warnings == [expected]


class Checked(Settings, frozen=True):
    level: int = 0

    def validate(self) -> None:
        if self.level > 9:
            raise ValueError(f"level={self.level}: expected 0 to 9")


@pytest.mark.parametrize("place", ["flag", "env", "file", "code"])
def test_a_refused_value_is_reported_with_its_place(tmp_path: Path, place: str) -> None:
    (tmp_path / "level").write_text("10" if place == "file" else "1")
    env = {"HIVE_LEVEL": "10"} if place == "env" else {}
    argv = ["--level=10"] if place == "flag" else []
    source = Sources(argv, env, tmp_path)
    with pytest.raises(SettingsError) as caught:
        Hive(config(Checked), settings={"level": 10} if place == "code" else source).check()
    shown = {
        "flag": "--level=10",
        "env": "HIVE_LEVEL=10",
        "file": f"{tmp_path / 'level'}: '10'",
        "code": "level=10",
    }
    assert [fault.text for fault in caught.value.faults] == [f"{shown[place]}: expected 0 to 9"]


class Needed(Settings, frozen=True):
    node_name: str


def test_a_field_without_default_is_required() -> None:
    with pytest.raises(SettingsError, match="node-name is required: give --node-name, HIVE_NODE_NAME or its"):
        Hive(config(Needed)).check()
    Hive(config(Needed), settings={"node-name": "n"}).check()


def test_help_is_the_docstring_under_the_field() -> None:
    options = {option.name: option for option in Hive(module("m", "M", config(Longer))).options()}
    assert options["flag"].help == "Whether to."
    assert options["interval"].help == "How often, in the mean."
    assert options["extra"].help == "More."
    assert options["count"].help == ""
    assert options["interval"].default == seconds(15)
    assert [options[name].type_text for name in ("flag", "conf", "mode", "colour", "devices")] == [
        "bool",
        "path, optional",
        "none|full",
        "red|green",
        "list of str",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("15s", 15),
        ("1h2m3s", 3723),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("-2ms", -0.002),
        ("+1us", 1e-6),
        ("3µs", 3e-6),
        ("7ns", 7e-9),
    ],
)
def test_durations_are_gos(text: str, value: float) -> None:
    assert Duration.parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "5", "s", "1 s", "1s 2m", "1d", "--1s", "1s2", "٣s", "1e3s", ".s", "1..5s", "9" * 99 + "s"]
)
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        Duration.parse(text)


@given(st.integers(-(10**15), 10**15))
def test_a_duration_prints_as_it_is_read(nanoseconds: int) -> None:
    duration = Duration(nanoseconds / 1e9)
    assert Duration.parse(str(duration)) == pytest.approx(duration, rel=1e-9, abs=1e-9)


def test_durations_print_as_people_write_them() -> None:
    shown = [str(Duration(value)) for value in (0, 15, 120, 3723.5, 0.1, 0.0015, 2e-6, -30, float("inf"))]
    assert shown == ["0s", "15s", "2m0s", "1h2m3.5s", "100ms", "1.5ms", "2us", "-30s", "inf"]


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, "TypeError: it returned None: expected texts, one for each fault"),
        ("count=1: expected 2", "TypeError: it returned 'count=1: expected 2': expected texts, one for each"),
        (RuntimeError("no device"), "RuntimeError: no device"),
    ],
)
def test_a_mistake_in_faults_is_one_line_with_its_place(returned: object, why: str) -> None:
    class Wrong(Settings, frozen=True):
        count: int = 1

        def faults(self) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

    with pytest.raises(SettingsError) as caught:
        Hive(config(Wrong)).check()
    [fault] = caught.value.faults
    assert re.match(r".*Wrong\.faults at .*test_settings\.py:\d+: ", fault.text)
    assert f": {why}" in fault.text
