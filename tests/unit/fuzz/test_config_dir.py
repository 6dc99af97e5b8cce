"""A config-dir with arbitrary contents: read at once, and rejected with a line for each mistake."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hive.agent.process import YAML_NAME, build
from lifecycle import SettingsError
from tests.unit.fuzz.folders import Holding, Put, put
from tests.unit.fuzz.inputs import bounded, odd_bytes, odd_texts

CONFIG_DIR = {option.option.name: option.option for option in build([]).settings()}
NAMES = sorted(CONFIG_DIR)
LONGEST_LINE = 1000

values = st.one_of(
    odd_bytes,
    odd_texts.map(lambda text: text.encode(errors="surrogatepass")),
    st.sampled_from(
        [
            b"true",
            b"9" * 5000,
            b"1e400s",
            b"nan",
            b"-5m",
            b"10.0.0.0/33",
            b"fd00::/200",
            b"a=b,c",
            b"{}",
            b'{"a": ',
            b"[" * 500,
            b"99999999999999999999999h",
            b"02:00:00:00:00:zz",
            b"\xef\xbb\xbftrue",
            b"a\nb",
            b"0" * 500_000,
        ]
    ),
)
names = st.sampled_from(
    [*NAMES, *(name.upper() for name in NAMES[:5]), "..data", ".hidden", "x" * 200, "unknown"]
)
yaml_files = st.one_of(
    odd_bytes,
    st.sampled_from(
        [
            b"[" * 100,
            b"a: &a [*a]\nmtu: *a",
            b"mtu: [1, [2]]",
            b"mtu: {a: 1}",
            b"? [1]\n: 2",
            b"- 1",
            b"mtu: !!python/object:os.system x",
            b"mtu: 1\nmtu: 2",
            b"\x00",
            b"%YAML 9.9\n---\n",
            b"a: 1\n---\nb: 2\n",
            b"mtu: '" + b"x" * 5000 + b"'",
            b"".join(
                b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9) if n else b"x")
                for n in range(9)
            )
            + b"mtu: *a8",
        ]
    ),
    st.builds(
        lambda name, value: name.encode() + b": " + value,
        st.sampled_from(NAMES),
        values.filter(lambda value: len(value) < 1000),
    ),
)


@bounded(120)
@example({}, Holding(b"[" * 3000))
@given(
    st.dictionaries(names, put(values), max_size=4),
    st.just(lambda path: None) | put(yaml_files),
)
def test_any_content_is_read_or_refused_in_lines(entries: dict[str, Put], yaml_file: Put) -> None:
    with tempfile.TemporaryDirectory(prefix="config-") as made:
        directory = Path(made)
        for name, make in entries.items():
            make(directory / name)
        yaml_file(directory / YAML_NAME)
        hive = build([f"--config-dir={directory}"])
        try:
            hive.settings()
            hive.check()
        except SettingsError as error:
            for fault in error.faults:
                (line,) = str(fault.text).splitlines()
                assert len(line) < LONGEST_LINE, line
                assert re.search(r"expected|did you mean|give one of|not |no |cannot ", line), line


def test_an_unreadable_config_file_is_an_error_for_known_options_and_a_warning_for_others() -> None:
    with tempfile.TemporaryDirectory(prefix="config-") as made:
        directory = Path(made)
        os.mkfifo(directory / "mtu")
        (directory / "cluster-name").symlink_to("/dev/zero")
        (directory / "debug").symlink_to("debug")
        (directory / "enable-ipv4").mkdir()
        (directory / "enable-ipv6").write_bytes(b"\xff")
        hive = build([f"--config-dir={directory}"])
        with pytest.raises(SettingsError) as caught:
            hive.settings()
        expected = "expected a file that can be read"
        assert sorted(fault.text for fault in caught.value.faults) == [
            f"{directory}/cluster-name: it is not a file; {expected}",
            f"{directory}/debug: too many levels of symbolic links; {expected}",
            f"{directory}/enable-ipv4: is a directory; {expected}",
            f"{directory}/enable-ipv6: it is not UTF-8 text; {expected}",
            f"{directory}/mtu: it is not a file; {expected}",
        ]
