"""Which place a setting comes from: order, old names, what is reported of mistakes. The order by a model."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Duration, GraphError, Hive, Secret, Settings, SettingsError, Sources, config, module
from lifecycle.command.main import run_command
from lifecycle.settings import RenamedFrom
from lifecycle.settings.sources import Loaded, load


class Maps(Settings, frozen=True):
    tcp_max: Annotated[int, RenamedFrom("ct-tcp", "conntrack-tcp")] = 1
    """Entries of the TCP map."""

    any_max: int = 2
    """Entries of the other map."""

    wait: Duration | None = None
    verbose: bool | None = None
    opt: dict[str, str] = {}  # noqa: RUF012  # copied for every struct

    def validate(self) -> None:
        """Refuse, all at once, what is not positive."""
        wrong = [
            ValueError(f"{name}={value}: expected more than 0")
            for name, value in (("tcp-max", self.tcp_max), ("any-max", self.any_max))
            if value < 1
        ]
        if wrong:
            raise ExceptionGroup("maps", wrong)
        if self.tcp_max < self.any_max and self.verbose:
            raise ValueError("tcp-max is below any-max; expected it to be at least as much")


def read(*argv: str, env: dict[str, str] | None = None, config_dir: Path | None = None) -> Loaded:
    return load([Maps], Sources(argv, env, config_dir))


def maps(*argv: str, env: dict[str, str] | None = None, config_dir: Path | None = None) -> Maps:
    loaded = read(*argv, env=env, config_dir=config_dir)
    assert loaded.faults == []
    found = loaded.structs[Maps]
    assert isinstance(found, Maps)
    return found


def faults(*argv: str, env: dict[str, str] | None = None, config_dir: Path | None = None) -> list[str]:
    return [fault.text for fault in read(*argv, env=env, config_dir=config_dir).faults]


NAMES = ("tcp-max", "ct-tcp", "conntrack-tcp", "any-max")
LAYER = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 99))


@given(flags=LAYER, env=LAYER, files=LAYER)
def test_each_option_has_the_value_of_the_first_place_and_there_of_its_newest_name(
    tmp_path_factory: pytest.TempPathFactory,
    flags: dict[str, int],
    env: dict[str, int],
    files: dict[str, int],
) -> None:
    directory = tmp_path_factory.mktemp("config")
    for name, value in files.items():
        (directory / name).write_text(f"{value}\n")
    loaded = read(
        *(f"--{name}={value}" for name, value in flags.items()),
        env={f"HIVE_{name.upper().replace('-', '_')}": str(value) for name, value in env.items()},
        config_dir=directory,
    )
    found = {setting.option.name: (setting.value, setting.origin) for setting in loaded.settings}
    for option, names, default in (("tcp-max", NAMES[:3], 1), ("any-max", NAMES[3:], 2)):
        places = [(flags, "flag --{}"), (env, "HIVE_{}"), (files, f"file {directory}/{{}}")]
        given_in = [(layer, origin, name) for layer, origin in places for name in names if name in layer]
        if not given_in:
            assert found[option] == (default, "default")
            continue
        layer, origin, name = given_in[0]
        spelled = name.upper().replace("-", "_") if origin.startswith("HIVE_") else name
        assert found[option] == (layer[name], origin.format(spelled))
        warned = [warning for warning in loaded.warnings if f"called {option} now" in warning]
        assert len(warned) == (name != option)


def test_an_old_name_is_warned_about_when_it_counts(tmp_path: Path) -> None:
    old = tmp_path / "ct-tcp"
    old.write_text("2000")
    loaded = read(config_dir=tmp_path)
    assert loaded.warnings == [f"{old}: '2000': this setting is called tcp-max now; rename it"]
    assert loaded.structs[Maps] == Maps(tcp_max=2000)
    assert read("--tcp-max=5", config_dir=tmp_path).warnings == []
    (tmp_path / "tcp-max").write_text("3000")
    loaded = read(config_dir=tmp_path)
    assert (loaded.warnings, loaded.structs[Maps]) == ([], Maps(tcp_max=3000))


def test_old_names_count_in_code_too() -> None:
    loaded = load([Maps], {"ct-tcp": 7})
    assert loaded.structs[Maps] == Maps(tcp_max=7)
    assert loaded.warnings == ["ct-tcp=7: this setting is called tcp-max now; rename it"]


class Other(Settings, frozen=True):
    ct_tcp: int = 0


def test_an_option_with_an_old_name_of_another_is_a_duplicate() -> None:
    with pytest.raises(GraphError, match="setting ct-tcp is declared twice"):
        Hive(module("m", "M", config(Maps, Other))).check()


def test_a_refused_struct_is_reported_with_the_origin_of_its_values(tmp_path: Path) -> None:
    (tmp_path / "any-max").write_text("0")
    assert faults(env={"HIVE_TCP_MAX": "-1"}, config_dir=tmp_path) == [
        "HIVE_TCP_MAX=-1: expected more than 0",
        f"{tmp_path}/any-max: '0': expected more than 0",
    ]
    (tmp_path / "any-max").write_text("10")
    assert "\n".join(faults("--tcp-max=9", "--verbose", config_dir=tmp_path)) == (
        "tcp-max is below any-max; expected it to be at least as much"
        f" (tcp-max from flag --tcp-max; any-max from file {tmp_path}/any-max)"
    )
    with pytest.raises(SettingsError) as caught:
        Hive(config(Maps), settings={"tcp-max": 0, "any-max": 1}).check()
    assert [fault.text for fault in caught.value.faults] == ["tcp-max=0: expected more than 0"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--tcp_max=1", "--tcp_max: no such setting; did you mean --tcp-max?"),
        ("--any-mx=1", "--any-mx: no such setting; did you mean --any-max?"),
        ("--confg-dir=/x", "--confg-dir: no such setting; did you mean --config-dir?"),
        ("--ct-tpc=1", "--ct-tpc: no such setting"),
        ("-any-max=1", "-any-max: not expected here; settings are --name=value; did you mean --any-max?"),
        ("any-max=1", "any-max: not expected here; settings are --name=value; did you mean --any-max?"),
        ("--any-max", "--any-max: needs a value, as in --any-max=VALUE"),
        ("--any-max=a\nb", r"--any-max='a\nb': expected a whole number"),
        ("--", "--: not expected here; settings are --name=value"),
    ],
)
def test_an_unknown_flag_is_reported_with_a_suggestion(argument: str, message: str) -> None:
    assert faults(argument) == [message]


def test_optional_booleans_and_durations_are_written_as_plain_ones() -> None:
    assert maps("--verbose", "--tcp-max=9").verbose is True
    assert maps("--verbose=").verbose is None
    loaded = read(env={"HIVE_WAIT": "1000000000"})
    assert loaded.structs[Maps] == Maps(wait=Duration(1))
    assert loaded.warnings == ["HIVE_WAIT=1000000000: a duration without a unit is read as nanoseconds"]


def test_variables_may_have_another_prefix(tmp_path: Path) -> None:
    class Needs(Settings, frozen=True):
        count: int

    (tmp_path / "count").write_text("2")
    env = {"BEES_COUNT": "1", "HIVE_COUNT": "3"}
    assert load([Needs], Sources(env=env, prefix="BEES_")).structs[Needs] == Needs(count=1)
    env = {"BEES_CONFIG_DIR": str(tmp_path)}
    assert load([Needs], Sources(env=env, prefix="BEES_")).structs[Needs] == Needs(count=2)
    (fault,) = load([Needs], Sources(prefix="BEES_")).faults
    assert fault.text == "count is required: give --count, BEES_COUNT or its config-dir file"


def test_a_map_flag_may_be_given_several_times() -> None:
    assert maps("--opt=a=1,b=2", '--opt={"b": "3"}').opt == {"a": "1", "b": "3"}
    assert maps(env={"HIVE_OPT": "etcd.config=/x"}).opt == {"etcd.config": "/x"}


def test_an_empty_config_dir_flag_means_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "any-max").write_text("7")
    monkeypatch.chdir(tmp_path)
    assert maps("--config-dir=", config_dir=tmp_path).any_max == 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.write_bytes(b"\xff"), "it is not UTF-8 text"),
        (lambda path: path.symlink_to("missing"), "no such file or directory"),
        (lambda path: path.symlink_to(path.name), "too many levels of symbolic links"),
        (Path.mkdir, "is a directory"),
        (os.mkfifo, "it is not a file"),
        (lambda path: path.write_bytes(bytes(1 << 21)), "it is larger than 1048576 bytes"),
    ],
)
def test_a_file_of_a_setting_that_cannot_be_read_is_a_fault(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    make(tmp_path / "any-max")
    loaded = read(config_dir=tmp_path)
    assert [one.text for one in loaded.faults] == [
        f"{tmp_path}/any-max: {why}; expected a file that can be read"
    ]


class Lock(Settings, frozen=True):
    token: Secret | None = None
    """Without one everybody may enter."""


@contextmanager
def as_another_user() -> Iterator[Path]:
    """A directory that this process may list, though its user does not own the files."""
    with TemporaryDirectory(dir="/tmp") as made:
        directory = Path(made)
        directory.chmod(0o755)
        (directory / "token").write_text("s3cret")
        (directory / "token").chmod(0 if os.geteuid() else 0o600)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            yield directory
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("strict", [[], ["--strict"]])
def test_a_token_of_another_owner_keeps_a_daemon_from_starting(
    strict: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with as_another_user() as directory:
        hive = Hive(config(Lock), name="lock")
        assert run_command(hive, ["check", *strict, f"--config-dir={directory}"], {}) == 2
    message = f"lock: {directory}/token: permission denied; expected a file that can be read\n"
    assert capsys.readouterr().err == message


def test_a_mounted_config_map_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "..1").write_text("what is not a directory cannot be listed")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "any-max").symlink_to("..data/any-max")
    assert faults(config_dir=tmp_path) == [
        f"{tmp_path}/..data: not a directory; expected a directory that can be read"
    ]
    (tmp_path / "..1").unlink()
    assert faults(config_dir=tmp_path) == [
        f"{tmp_path}/..data: it leads to ..1, which is missing; expected a directory"
    ]


def test_two_files_of_one_setting_are_a_fault(tmp_path: Path) -> None:
    (tmp_path / "Any-Max").write_text("1")
    (tmp_path / "any-max").write_text("2")
    assert faults(config_dir=tmp_path) == [
        f"{tmp_path}/any-max: file {tmp_path}/Any-Max gives any-max too; expected each setting once"
    ]


def from_yaml(directory: Path, text: str, *argv: str) -> Loaded:
    (directory / "all.yaml").write_text(text)
    return load([Maps], Sources(argv, config_dir=directory, yaml_name="all.yaml"))


def test_a_yaml_file_in_the_config_dir_counts_less_than_the_file_of_a_setting(tmp_path: Path) -> None:
    text = """
        tcp-max: 10
        ANY-MAX: "3"
        wait: 15s
        verbose: true
        opt: {etcd.config: /x, retries: 5}
        operator-thing: [1, {2: 3}]
    """
    found = from_yaml(tmp_path, text).structs[Maps]
    opt = {"etcd.config": "/x", "retries": "5"}
    assert found == Maps(tcp_max=10, any_max=3, wait=Duration(15), verbose=True, opt=opt)
    (tmp_path / "any-max").write_text("4")
    loaded = from_yaml(tmp_path, text, "--wait=1s")
    origins = {setting.option.name: setting.origin for setting in loaded.settings}
    assert origins["tcp-max"] == f"file {tmp_path}/all.yaml"
    assert loaded.structs[Maps] == Maps(tcp_max=10, any_max=4, wait=Duration(1), verbose=True, opt=opt)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tcp-max: many", ": tcp-max: 'many': expected a whole number"),
        ("tcp-max: {a: 1}", ": tcp-max: {'a': '1'}: expected a whole number"),
        ("opt: [a=1, {b: 2}]", ": opt: ['a=1', {'b': '2'}]: expected a list of texts"),
        ("- a", ": expected a mapping of settings to values"),
        ("a: b: c", ", line 1: this is not YAML; expected a mapping of settings to values"),
        ("a: 1\nb: 2\nA: 3", ", line 3: a is there twice; expected each setting once"),
        (
            "apiVersion: v1\nkind: ConfigMap\ndata: {tcp-max: '3'}",
            ": this is a Kubernetes object; expected a mapping of settings to values",
        ),
    ],
)
def test_mistakes_in_a_yaml_file_are_reported_with_line_and_column(
    tmp_path: Path, text: str, message: str
) -> None:
    assert [fault.text for fault in from_yaml(tmp_path, text).faults] == [f"{tmp_path}/all.yaml{message}"]


def test_a_yaml_file_that_is_empty_or_not_asked_for_changes_nothing(tmp_path: Path) -> None:
    for text in ("", "# nothing", "{}"):
        assert from_yaml(tmp_path, text).structs[Maps] == Maps()
    from_yaml(tmp_path, "tcp-max: 10")
    assert maps(config_dir=tmp_path) == Maps()
    (tmp_path / "all.yaml").unlink()
    assert load([Maps], Sources(config_dir=tmp_path, yaml_name="all.yaml")).structs[Maps] == Maps()


def test_a_named_file_goes_before_the_config_dir_setting_by_setting(tmp_path: Path) -> None:
    (tmp_path / "tcp-max").write_text("10")
    (tmp_path / "any-max").write_text("10")
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "named"
    file.write_text("tcp-max: 20")

    def find(*argv: str, **env: str) -> Loaded:
        return load([Maps], Sources(argv, env, tmp_path, file_flag="config"))

    loaded = find(f"--config={file}")
    assert loaded.structs[Maps] == Maps(tcp_max=20, any_max=10)
    (warning,) = loaded.warnings
    assert warning.startswith(f"--config {file} and --config-dir {tmp_path} are both given: ")
    assert find(HIVE_CONFIG=str(file), HIVE_ANY_MAX="7").structs[Maps] == Maps(tcp_max=20, any_max=7)
    assert find("--config=", HIVE_CONFIG=str(file)).structs[Maps] == Maps(tcp_max=10, any_max=10)
    assert [fault.text for fault in find(f"--config={file}s").faults] == [
        f"--config {file}s: no such file or directory; expected a YAML file of settings"
    ]
    assert faults(f"--config={file}") == ["--config: no such setting; did you mean --config-dir?"]


def test_a_part_of_the_settings_passes_over_what_others_have(tmp_path: Path) -> None:
    (tmp_path / "any-max").write_text("5")
    (tmp_path / "of-others").write_text("x")
    sources = Sources(
        ["--of-others", "1", "--tcp-max=3", "--more"], {"HIVE_OF_OTHERS": "1"}, tmp_path, unknown="refuse"
    )
    loaded = load([Maps], sources, part=True)
    assert (loaded.faults, loaded.warnings) == ([], [])
    assert loaded.structs == {Maps: Maps(tcp_max=3, any_max=5)}
    assert len(load([Maps], sources).faults) == 4
    wrong = load([Maps], Sources(["--tcp-max=many"]), part=True)
    assert [fault.text for fault in wrong.faults] == ["--tcp-max=many: expected a whole number"]
