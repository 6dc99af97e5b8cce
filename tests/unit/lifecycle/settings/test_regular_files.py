"""Files of settings and state are read whole, up to their limit."""

from pathlib import Path

import pytest

from lifecycle.settings import read_regular

SIZES = (0, 1, 4095, 4096, 4097, 8192, 100_000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("largest", [100_000, 64 << 20])
def test_a_file_is_read_whole(size: int, largest: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    assert read_regular(path, largest) == b"x" * size


@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_a_file_over_the_limit_is_refused(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    with pytest.raises(OSError, match=f"it is larger than {size - 1} bytes"):
        read_regular(path, size - 1)


def test_a_file_without_a_size_is_read_whole() -> None:
    path = Path("/proc/self/mountinfo")
    assert path.stat().st_size == 0
    assert read_regular(path) == path.read_bytes()


def test_a_file_that_has_grown_since_its_size_was_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    empty = path.stat()
    path.write_bytes(b"x" * 10_000)
    monkeypatch.setattr("os.fstat", lambda _: empty)
    assert read_regular(path) == b"x" * 10_000
