"""The configuration source in a config-dir, with arbitrary contents."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.config.drift import OVERRIDES, SOURCES, mounted_sources

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
ENTRY = st.fixed_dictionaries(
    {"kind": st.sampled_from(["directory", "node", ""]), "name": st.text(max_size=8) | st.just("/")}
)
CONTENT = (
    st.binary()
    | st.just(b"[" * 100_000)
    | (JSON | st.lists(ENTRY, max_size=3)).map(lambda value: json.dumps(value).encode())
)


@given(sources=CONTENT, overrides=CONTENT | st.just(b'{"allowConfigKeys": null, "denyConfigKeys": null}'))
def test_only_directories_that_are_there_are_ever_found(
    tmp_path_factory: pytest.TempPathFactory, sources: bytes, overrides: bytes
) -> None:
    directory = tmp_path_factory.mktemp("config")
    (directory / SOURCES).write_bytes(sources)
    (directory / OVERRIDES).write_bytes(overrides)
    assert all(path.is_absolute() and path.is_dir() for path in mounted_sources(directory))


def test_mounted_directories_are_listed_in_order(tmp_path: Path) -> None:
    names = [tmp_path / "b", tmp_path / "a"]
    for name in names:
        name.mkdir()
    (tmp_path / SOURCES).write_text(json.dumps([{"kind": "directory", "name": str(name)} for name in names]))
    (tmp_path / OVERRIDES).write_text("{}")
    assert mounted_sources(tmp_path) == names
