"""Compiling the eBPF objects: reproducible, identified by a tag, with clear errors for missing tools."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cells.datapath import build
from cells.datapath.build import (
    DIGEST,
    PROGRAMS,
    SOURCES,
    ObjectBuildError,
    are_current,
    compile_objects,
    explain,
    find_clang,
    tagged,
)
from cells.datapath.generation import compiled_constants
from cells.datapath.libbpf import LoadedObject
from cells.datapath.settings import PACKAGED_OBJECTS

SMALL = ("dispatch", "gc", "sock")
"""Those that compile within a second. The others take fifteen."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_build_depends_on_its_source_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was installed is what the sources make anywhere; else they changed after ``make install``."""
    elsewhere = tmp_path / "elsewhere" / "bpf"
    shutil.copytree(SOURCES, elsewhere)
    monkeypatch.setattr(build, "SOURCES", elsewhere)
    monkeypatch.chdir(tmp_path)
    there = compile_objects(tmp_path / "there")
    assert [path.stem for path in there] == list(PROGRAMS)
    assert [path.name for path in there if digest(path) != digest(PACKAGED_OBJECTS / path.name)] == []


def test_objects_are_current_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path / "bpf")
    shutil.copytree(SOURCES, tmp_path / "bpf")
    assert not are_current(tmp_path), "nothing is compiled"
    (tmp_path / DIGEST).write_text((PACKAGED_OBJECTS / DIGEST).read_text())
    assert are_current(tmp_path)
    header = tmp_path / "bpf" / "lib" / "config.h"
    header.write_text(header.read_text() + "\n")
    assert not are_current(tmp_path)


def test_a_tag_makes_another_build_of_the_same_source(tmp_path: Path) -> None:
    plain = PACKAGED_OBJECTS / "datapath.o"
    before, after = plain.read_bytes(), tagged(plain, tmp_path / "tagged.o", "next-1.0_x+y").read_bytes()
    place = after.index(b"next-1.0_x+y")
    assert before[place : place + 32] == bytes(32), "nothing else was there"
    assert before[:place] + after[place : place + 32] + before[place + 32 :] == after
    with LoadedObject(after, "tagged") as loaded:
        assert compiled_constants(loaded).tag == "next-1.0_x+y"


def test_only_objects_with_constants_have_a_build_tag(tmp_path: Path) -> None:
    with pytest.raises(ObjectBuildError, match=r"dispatch.o: expected an object with constants"):
        tagged(PACKAGED_OBJECTS / "dispatch.o", tmp_path / "tagged.o", "next")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tag", ["x" * 32, 'a"b', "a b", "ä"])
def test_a_tag_that_would_not_fit_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ObjectBuildError, match="expected at most 31 of the characters"):
        tagged(PACKAGED_OBJECTS / "datapath.o", tmp_path / "tagged.o", tag)


def test_without_a_compiler_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(
        ObjectBuildError, match=r"no clang found: .*apt-get install one of clang-14 to clang-17"
    ):
        find_clang()


def compilers(monkeypatch: pytest.MonkeyPatch, folder: Path, **versions: str) -> None:
    """On the path there are only these, each of a version."""
    for name, version in versions.items():
        program = folder / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\necho {version}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"clang": "14.0.6"}, "clang"),
        ({"clang": "14.0.6", "clang_16": "16.0.6"}, "clang"),
        ({"clang_14": "14.0.6", "clang_16": "16.0.6", "clang_19": "19.1.7"}, "clang-16"),
        ({"clang": "19.1.7", "clang_17": "17.0.6"}, "clang-17"),
    ],
)
def test_a_tested_version_of_the_compiler_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: dict[str, str], chosen: str
) -> None:
    compilers(monkeypatch, tmp_path, **there)
    assert find_clang() == str(tmp_path / chosen)


def test_a_compiler_that_is_too_new_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compilers(monkeypatch, tmp_path, clang="19.1.7")
    with pytest.raises(ObjectBuildError, match=r"is clang 19: .*apt-get install one of clang-14 to clang-17"):
        find_clang()


@pytest.mark.parametrize(
    ("header", "package"), [("bpf/bpf_helpers.h", "libbpf-dev"), ("asm/types.h", "linux-libc-dev")]
)
def test_without_a_header_the_package_to_install_is_named(header: str, package: str) -> None:
    complaint = f"bpf.h:5:10: fatal error: '{header}' file not found"
    assert explain(complaint, Path("dispatch.c")) == f"dispatch.c needs <{header}>: apt-get install {package}"


def test_a_compile_error_leaves_the_previous_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PROGRAMS", SMALL)
    out = tmp_path / "out"
    before = [digest(path) for path in compile_objects(out)]
    source = tmp_path / "bpf"
    shutil.copytree(SOURCES, source)
    (source / "dispatch.c").write_text("int x = y;\n")
    monkeypatch.setattr(build, "SOURCES", source)
    with pytest.raises(ObjectBuildError, match=r"(?s)dispatch.c does not compile:.*undeclared"):
        compile_objects(out)
    assert [digest(out / f"{name}.o") for name in SMALL] == before


def test_building_needs_nothing_but_the_standard_library() -> None:
    script = f"import runpy; runpy.run_path({str(Path(build.__file__))!r})"
    subprocess.run([sys.executable, "-I", "-S", "-W", "error", "-c", script], check=True)
