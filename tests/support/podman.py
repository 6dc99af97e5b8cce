"""Runs a podman for one test, with its CNI backend."""

from __future__ import annotations

import json
import subprocess
from types import TracebackType
from typing import Any

from hive.lab.namespaces import Namespaces
from tests.support.pause import IMAGE, pause_image
from tests.support.runtime_place import RuntimePlace

NETWORK = "cilium"
WITHOUT_CNI = 5
"""Since this version, Debian builds podman with netavark only, which calls no CNI plugin."""

# Locks in files, not in the machine's /dev/shm; limits and cgroups as they are, without more privileges.
CONTAINERS = """\
[containers]
default_ulimits = []
log_driver = "none"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
tmp_dir = "{folder}/tmp"
static_dir = "{folder}/static"
volume_path = "{folder}/volumes"
[network]
network_backend = "cni"
cni_plugin_dirs = ["{plugins}"]
network_config_dir = "{networks}"
default_network = "{network}"
"""
STORAGE = """\
[storage]
driver = "vfs"
graphroot = "{folder}/root"
runroot = "{folder}/run"
"""


def installed_version() -> tuple[int, ...]:
    """Return podman's version on this machine, such as (4, 3, 1)."""
    asked = subprocess.run(["podman", "--version"], check=True, capture_output=True, text=True, timeout=60)
    return tuple(int(part) for part in asked.stdout.split()[-1].split("."))


class Podman:
    """``with Podman(place) as podman: podman.run("web-0")``; removes remaining containers at the end."""

    def __init__(self, place: RuntimePlace) -> None:
        self._place = place
        containers, storage = place.folder / "containers.conf", place.folder / "storage.conf"
        containers.write_text(
            CONTAINERS.format(
                folder=place.folder, plugins=place.plugins, networks=place.networks, network=NETWORK
            )
        )
        storage.write_text(STORAGE.format(folder=place.folder))
        self._env = {"CONTAINERS_CONF": str(containers), "CONTAINERS_STORAGE_CONF": str(storage)}

    def __enter__(self) -> Podman:
        self._call("load", "--quiet", f"--input={pause_image(self._place.folder)}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call("rm", "--all", "--force", "--time=0")

    def network(self, name: str) -> str:
        """Return the container's network, as podman reports it."""
        (found,) = self._inspect(name)["NetworkSettings"]["Networks"]
        return str(found)

    def run(self, *names: str) -> None:
        """Start containers of these names in parallel."""
        options = ["--detach", "--label=app=web", f"--cgroup-parent={self._place.cgroup}"]
        starting = [self._start("run", *options, f"--name={name}", IMAGE) for name in names]
        for one in starting:
            self._place.output_of(one)

    def remove(self, *names: str) -> None:
        """End containers in parallel, and delete them."""
        self._call("rm", "--force", "--time=0", *names)

    def address(self, name: str) -> str:
        """Return the container's address, as podman reports it."""
        return str(self._inspect(name)["NetworkSettings"]["Networks"][NETWORK]["IPAddress"])

    def open(self, name: str) -> Namespaces:
        """Open the container's network namespace."""
        return Namespaces.open(f"/proc/{self._inspect(name)['State']['Pid']}/ns/net")

    def _inspect(self, name: str) -> Any:
        (found,) = json.loads(self._call("inspect", name))
        return found

    def _start(self, *arguments: str) -> Any:
        return self._place.start(["podman", *arguments], self._env)

    def _call(self, *arguments: str) -> str:
        return self._place.output_of(self._start(*arguments))
