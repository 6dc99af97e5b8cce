"""A mounted ConfigMap that is swapped while it is read: always one generation, as the kubelet made it."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lifecycle import Settings, Sources
from lifecycle.settings import files
from lifecycle.settings.sources import Loaded, load

YAML = "all.yaml"
GENERATIONS = 30
"""As many are read in the middle of swaps."""


class Numbers(Settings, frozen=True):
    first: int = 0
    middle: int = 0
    last: int = 0
    packed: int = 0
    """Only ever set in the YAML file."""


def swap(directory: Path, generation: int, *, keys: tuple[str, ...] = ("first", "middle", "last")) -> None:
    """What the kubelet does, in its order: data, the swap, links of new keys; old links and data go."""
    fresh = directory / f"..{generation}"
    fresh.mkdir()
    for key in keys:
        (fresh / key).write_text(f"{generation}\n")
    (fresh / YAML).write_text(f"packed: {generation}")
    earlier = (directory / "..data").readlink() if (directory / "..data").is_symlink() else None
    (directory / "..tmp").symlink_to(fresh.name)
    (directory / "..tmp").replace(directory / "..data")
    wanted = {*keys, YAML}
    present = {path.name for path in directory.iterdir() if not path.name.startswith("..")}
    for key in wanted - present:
        (directory / key).symlink_to(f"..data/{key}")
    for key in present - wanted:
        (directory / key).unlink()
    if earlier is not None:
        shutil.rmtree(directory / earlier)


def read(directory: Path) -> Loaded:
    return load([Numbers], Sources(config_dir=directory, yaml_name=YAML, unknown="ignore"))


def numbers(directory: Path) -> Numbers:
    loaded = read(directory)
    assert (loaded.faults, loaded.warnings) == ([], [])
    found = loaded.structs[Numbers]
    assert isinstance(found, Numbers)
    return found


@contextmanager
def swapping(directory: Path) -> Iterator[None]:
    """Generations come and go, with the key ``middle`` in every other one, until the block is left."""
    ended = threading.Event()

    def go_on() -> None:
        for generation in range(2, 100_000):
            if ended.is_set():
                return
            swap(directory, generation, keys=("first", "middle", "last")[:: 1 + generation % 2])

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_what_is_read_during_swaps_is_of_one_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_TRIES", 10_000)  # no kubelet swaps without a pause
    swap(tmp_path, 1)
    with swapping(tmp_path):
        seen = {numbers(tmp_path)}
        while len(seen) < GENERATIONS:
            seen.add(numbers(tmp_path))
    for one in seen:
        generation = one.first
        middle = 0 if generation % 2 and generation > 1 else generation
        assert one == Numbers(first=generation, middle=middle, last=generation, packed=generation)


def test_a_key_counts_from_the_swap_on_and_no_longer_after_the_one_that_drops_it(tmp_path: Path) -> None:
    swap(tmp_path, 1, keys=("first", "last"))
    (tmp_path / "last").unlink()  # the kubelet's next step would make it
    (tmp_path / YAML).unlink()
    (tmp_path / "middle").symlink_to("..data/middle")  # and would remove this one
    assert numbers(tmp_path) == Numbers(first=1, last=1, packed=1)


def test_files_beside_a_mounted_config_map_count_too(tmp_path: Path) -> None:
    swap(tmp_path, 1, keys=("first",))
    (tmp_path / "last").write_text("7")
    (tmp_path / "elsewhere").write_text("8")
    (tmp_path / "middle").symlink_to("elsewhere")
    assert numbers(tmp_path) == Numbers(first=1, middle=8, last=7, packed=1)


def test_a_config_dir_that_keeps_changing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap(tmp_path, 1)
    generations = iter(range(2, 100))
    real = files.yaml_file

    def swapped_meanwhile(*args: object, **kwargs: object) -> object:
        swap(tmp_path, next(generations))
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "yaml_file", swapped_meanwhile)
    assert [fault.text for fault in read(tmp_path).faults] == [
        f"config-dir {tmp_path}: it changed whenever it was read; leave it alone and start again"
    ]
