"""The framework as a distribution: built without a compiler, installed alone and run."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.pages import ROOT, blocks

SOURCE = ROOT / "lifecycle"


def built(form: str, source: Path, target: Path) -> Path:
    """The distribution, built where no compiler is to be found."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", form, "-d", target],
        cwd=source,
        env={"PATH": "/nowhere", "HOME": str(target)},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    (found,) = target.glob("*.whl" if form == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", SOURCE, tmp_path_factory.mktemp("wheel"))


def described(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_framework_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    pages = {path.relative_to(ROOT) for path in (SOURCE / "graph/page").iterdir() if path.is_file()}
    sources = {path.relative_to(ROOT) for path in SOURCE.rglob("*.py")}
    assert inside == {str(path) for path in sources | pages} | {"lifecycle/py.typed"}
    assert wheel.name.endswith("-py3-none-any.whl")
    assert (SOURCE / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_wheel_needs_five_libraries_and_one_more_for_each_extra(wheel: Path) -> None:
    needs = [Requirement(text) for text in described(wheel).get_all("Requires-Dist", [])]
    assert {one.name for one in needs if one.marker is None} == {
        "anyio",
        "dependency-injector",
        "msgspec",
        "pyyaml",
        "structlog",
    }
    assert {one.name for one in needs if one.marker is not None} == {"h11", "opentelemetry-api"}
    agent = metadata.requires("hive-agent") or []
    assert {str(one) for one in needs if one.marker is None} <= {str(Requirement(text)) for text in agent}


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "-xzf", built("sdist", SOURCE, tmp_path), "-C", tmp_path], check=True, timeout=50)
    (source,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    again = built("wheel", source, tmp_path / "again")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def needed(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """A distribution with all it needs here, its extras left out."""
    if name in seen:
        return
    seen.add(name)
    found = metadata.distribution(name)
    yield found
    for one in map(Requirement, found.requires or []):
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            yield from needed(one.name, seen)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, and of ours only its declared dependencies; without any network."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=50)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True, timeout=50)
    (target,) = (home / "lib").glob("python*/site-packages")
    seen: set[str] = set()
    names = {
        one.name for one in map(Requirement, described(wheel).get_all("Requires-Dist", [])) if not one.marker
    }
    for distribution in (found for name in names for found in needed(name, seen)):
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
            link = target / top
            if top != "__pycache__" and not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return python


def run(python: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [python, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={"PATH": ""},
    )


def test_the_hive_of_the_tutorial_runs_with_it_alone(python: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "lifecycle" / "tutorial.md").read_text(encoding="utf-8")
    for block in blocks(page):
        if block.file in {"beat.py", "main.py"}:  # the last form of each counts
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    checked = run(python, tmp_path, "main.py", "check", "--every=1s")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith("heart is sound: ")
    assert "jobs of Beat" in run(python, tmp_path, "main.py", "inspect").stdout
    assert run(python, tmp_path, "main.py", "--every=fast").returncode == 2
    (tmp_path / "once.py").write_text(
        "import anyio\nfrom main import Hive, heart\n\n"
        "async def once():\n    async with Hive(heart).started():\n"
        "        print(open('heartbeat').read())\n\n"
        "anyio.run(once)\n"
    )
    assert run(python, tmp_path, "once.py").stdout == "beat 1\n\n"
    assert not (tmp_path / "heartbeat").exists()


def test_the_wheel_has_a_command_and_a_pytest_plugin(wheel: Path, python: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from lifecycle import invoke, module\n\n\ndef open_it() -> None: ...\n\n\n"
        'shop = module("shop", "A shop", invoke(open_it))\n'
    )
    checked = run(python, tmp_path, "-m", "lifecycle", "check", "shop:shop")
    assert (checked.returncode, checked.stdout) == (
        0,
        "hive is sound: 0 constructors, 0 hooks, 0 settings given\n",
    )
    wrong = run(python, tmp_path, "-m", "lifecycle", "check", "shop:shoe")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("lifecycle: shop:shoe: shop has no shoe; ")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("/entry_points.txt")]
        assert "[pytest11]\nlifecycle.testing.pytest_plugin = " in archive.read(name).decode()


def test_the_wheel_states_its_version_and_python_versions(wheel: Path) -> None:
    about = described(wheel)
    assert f"## [{about['Version']}]" in (SOURCE / "CHANGELOG.md").read_text(encoding="utf-8")
    stated = {one.rpartition(" ")[2] for one in about.get_all("Classifier", []) if "Python :: 3." in one}
    assert stated == {"3.11", "3.12", "3.13", "3.14"}


def test_everything_but_http_is_imported_without_more(python: Path, tmp_path: Path) -> None:
    packages = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py") if path.parent.name != "http")
    script = "import sys\n" + "".join(f"import lifecycle.{name}\n" for name in packages)
    others = ("h11", "cells", "hive", "click", "opentelemetry", "pytest")
    script += f"print([name for name in {others} if name in sys.modules])\n"
    ran = run(python, tmp_path, "-c", script)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
    assert "No module named 'h11'" in run(python, tmp_path, "-c", "import lifecycle.http").stderr


def test_an_interpreter_is_one_that_runs_not_a_shim_of_a_version_that_is_not_selected(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"

    def program(text: str, *parts: str) -> Path:
        path = tmp_path.joinpath(*parts, f"python{version}")
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def found(**env: str) -> tuple[int, str, str]:
        command = ["/bin/sh", str(ROOT / "configs" / "interpreter"), version]
        env |= {"PATH": f"{tmp_path}/shims:{tmp_path}/other", "HOME": str(tmp_path)}
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)
        return ran.returncode, ran.stdout.strip(), ran.stderr

    program(f"echo 'python{version}: command not found' >&2; exit 127", "shims")
    program("echo 2.7", "other")
    assert found() == (1, "", "")
    real = program(f'exec "{sys.executable}" "$@"', "pyenv", "versions", f"{version}.99", "bin")
    assert found(PYENV_ROOT=f"{tmp_path}/pyenv") == (0, str(real), "")
