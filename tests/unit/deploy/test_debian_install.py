"""Missing tools of `make demo` and `make test`: one line with the packages to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NEW_PYTHON = "exit 0"
OLD_PYTHON = 'case "$*" in --version) echo Python 3.9.2;; *) exit 1;; esac'
WITHOUT_VENV = 'case "$*" in *ensurepip*) exit 1;; esac'
INSTALLING = "installing Debian packages, usually one to five minutes:"
TOOLS = ("sed", "mktemp", "rm", "tail", "sh")


class Machine:
    """A folder of commands, and what the script prints without any others."""

    def __init__(self, directory: Path) -> None:
        self.commands = directory / "bin"
        self.commands.mkdir()
        for name in TOOLS:
            (self.commands / name).symlink_to(f"/usr/bin/{name}")
        self.has("dpkg-query", "echo installed")
        self.has("id", "echo 0")
        self.has("python3", NEW_PYTHON)
        self.packages = directory / "packages"
        self.packages.write_text("# a list\nclang   compiles\nmusl-tools   compiles\n")

    def has(self, name: str, script: str) -> None:
        path = self.commands / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def lacks(self, name: str) -> None:
        (self.commands / name).unlink()

    def install(self, **environment: str) -> tuple[int, str]:
        done = subprocess.run(
            ["/bin/sh", ROOT / "configs/debian/install", self.packages],
            env={"PATH": str(self.commands), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_check_prints_nothing_when_all_requirements_are_met(machine: Machine) -> None:
    assert machine.install() == (0, "")


def test_the_installer_installs_missing_packages_as_root(machine: Machine) -> None:
    machine.has("dpkg-query", 'case "$*" in *clang*) exit 1;; *) echo installed;; esac')
    machine.has("apt-get", "exit 0")
    assert machine.install() == (0, f"{INSTALLING} clang\n")


def test_the_installer_accepts_one_of_several_packages(machine: Machine) -> None:
    machine.packages.write_text("kubernetes-client|kubectl   kubectl\n")
    machine.has("dpkg-query", 'case "$*" in *client*) exit 1;; *) echo installed;; esac')
    assert machine.install() == (0, "")
    machine.has("dpkg-query", "exit 1")
    machine.has("apt-get", "exit 0")
    assert machine.install() == (0, f"{INSTALLING} kubernetes-client\n")


def test_the_installer_names_missing_packages_to_other_users(machine: Machine) -> None:
    machine.has("dpkg-query", "exit 1")
    machine.has("apt-get", "exit 0")
    machine.has("id", "echo 1000")
    machine.has("python3", WITHOUT_VENV)
    spoken = (
        "make: packages are missing; install them as root: apt-get install clang musl-tools python3-venv\n"
    )
    assert machine.install() == (1, spoken)


def test_the_installer_names_requirements_on_another_system(machine: Machine) -> None:
    machine.lacks("dpkg-query")
    machine.lacks("python3")
    spoken = (
        "make: these Debian packages, or what your system calls them, are needed: clang musl-tools python3"
        " python3-venv\n"
    )
    assert machine.install() == (1, spoken)


def test_an_old_python_is_named(machine: Machine) -> None:
    machine.has("python3", OLD_PYTHON)
    spoken = (
        "make: Python 3.9.2 is too old: install Python 3.11 or later, and name it: make PYTHON=python3.11\n"
    )
    assert machine.install() == (1, spoken)


def test_a_python_that_is_not_there_is_named(machine: Machine) -> None:
    spoken = "make: PYTHON=python3.99: there is no such command: name a Python 3.11 or later, or nothing\n"
    assert machine.install(PYTHON="python3.99") == (1, spoken)


def test_a_python_that_does_not_run_is_named(machine: Machine) -> None:
    machine.has("python3", "exit 127")
    spoken = "make: python3 does not run: install Python 3.11 or later, and name it: make PYTHON=python3.11\n"
    assert machine.install() == (1, spoken)


@pytest.mark.parametrize("target", ["demo", "test", "kernel", "node"])
def test_without_root_the_installer_stops_before_any_change(target: str, machine: Machine) -> None:
    machine.has("id", "echo 1000")
    done = subprocess.run(
        ["/usr/bin/make", "--no-print-directory", f"PYTHON={sys.executable}", target],
        cwd=ROOT,
        env={"PATH": f"{machine.commands}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    why = "it makes network namespaces and loads BPF programs; make unit needs none"
    assert done.stderr.splitlines()[0] == f"make: run {target} as root: {why}"
    assert done.stdout == ""
