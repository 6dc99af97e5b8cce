"""The DaemonSet's pod on a node, under runc, from the image: all init containers, the agent, its hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from hive import syscalls
from hive.lab import pods
from hive.lab.node import Lab
from hive.lab.probe import ping
from tests.support.oci import PodRunner
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]

MANIFESTS = Path(__file__).resolve().parents[3] / "configs" / "manifests"


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((MANIFESTS / name).read_text())
    return found


def make_bare() -> None:
    """As before anyone prepared it: no bpffs, an empty sysctl.d, and a /sys that passes mounts on."""
    syscalls.mount("tmpfs", "/etc/sysctl.d", "tmpfs")
    syscalls.unmount("/sys/fs/bpf", syscalls.MNT_DETACH)
    syscalls.mount("none", "/sys", flags=syscalls.MS_SHARED)


class DaemonPod:
    """The pod's containers by name, and where the node keeps what they mount."""

    def __init__(self, node: Lab, rootfs: Path, folder: Path, first_process: int) -> None:
        spec = manifest("daemonset.yaml")["spec"]["template"]["spec"]
        self.init = [one["name"] for one in spec["initContainers"]]
        self._containers = {one["name"]: one for one in [*spec["initContainers"], *spec["containers"]]}
        self.plugins = folder / "opt-cni-bin"
        config_map, tmp = folder / "config-map", folder / "tmp"
        node.cni_conf.parent.mkdir(exist_ok=True)
        for directory in (self.plugins, config_map, tmp):
            directory.mkdir()
        for key, value in manifest("configmap.yaml")["data"].items():
            (config_map / key).write_text(value)
        self.settings = tmp / "cilium" / "config-map"
        self._config_map = config_map
        host_paths = {
            "/var/run/cilium": "/run/cilium",
            "/opt/cni/bin": str(self.plugins),
            "/etc/cni/net.d": str(node.cni_conf.parent),
            "/proc": str(folder / "hostproc"),
        }
        # The first process the container sees under /hostproc is the node's, not this machine's.
        (folder / "hostproc" / "1").mkdir(parents=True)
        self._namespaces = node.open()
        self._namespaces.run(
            syscalls.mount, f"/proc/{first_process}", folder / "hostproc" / "1", "", syscalls.MS_BIND
        )
        self._runner = PodRunner(
            folder,
            rootfs,
            self._namespaces,
            spec,
            host_paths,
            {"config-map": str(config_map), "tmp": str(tmp)},
        )

    def set(self, key: str, value: str) -> None:
        """Change the ConfigMap."""
        (self._config_map / key).write_text(value)

    def run(self, name: str, **env: str) -> str:
        """Run a container that must succeed; what it printed."""
        code, output = self._runner.run(self._containers[name], {"K8S_NODE_NAME": "n1", **env})
        assert code == 0, f"{name}: {output}"
        return output

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """A container that runs for a block."""
        process = self._runner.start(self._containers[name], {"K8S_NODE_NAME": "n1"})
        try:
            yield
        finally:
            self._runner.remove(self._containers[name])
            output, _ = process.communicate(timeout=20)
            print(output.decode())  # noqa: T201  # pytest shows it when the test fails

    def exec(self, name: str, *command: str) -> str:
        """Run a command in a running container; it must succeed."""
        code, output = self._runner.exec(self._containers[name], command)
        assert code == 0, output
        return output

    def close(self) -> None:
        self._namespaces.close()


@pytest.fixture
def daemon_pod(node: Lab, rootfs: Path, tmp_path: Path) -> Iterator[DaemonPod]:
    """The pod on a node that nobody has prepared."""
    with node.open() as namespaces:
        namespaces.run(make_bare)
        first = namespaces.start(lambda stop: stop.wait(300))
        made = DaemonPod(node, rootfs, tmp_path, first.pid)
        try:
            yield made
        finally:
            made.close()
            first.kill()


def test_a_bare_node_gets_pods_and_gives_them_up(node: Lab, daemon_pod: DaemonPod) -> None:
    with node.open() as namespaces:
        assert "wrote" in daemon_pod.run("config")
        assert (daemon_pod.settings / "cni-exclusive").read_text() == "true"
        assert "mounted cgroup v2 on /run/cilium/cgroupv2" in daemon_pod.run("mount-cgroup")
        assert namespaces.run(os.path.ismount, "/run/cilium/cgroupv2")
        assert "sysctl config created" in daemon_pod.run("apply-sysctl-overwrites")
        assert namespaces.run(os.listdir, "/etc/sysctl.d") == ["99-zzz-override_cilium.conf"]
        assert "mounted bpffs on /sys/fs/bpf" in daemon_pod.run("mount-bpf-fs")
        assert namespaces.run(syscalls.filesystem_type, "/sys/fs/bpf") == syscalls.BPF_FS_MAGIC
        assert daemon_pod.run("clean-cilium-state") == ""
        assert "Wrote /host/opt/cni/bin/cilium-cni" in daemon_pod.run("install-cni-binaries")
        assert (daemon_pod.plugins / "cilium-cni").read_bytes() == pods.PLUGIN.read_bytes()

        (node.cni_conf.parent / "10-other.conflist").write_text("{}")
        with daemon_pod.running("cilium-agent"):
            eventually(node.cni_conf.exists, within=30)
            eventually((node.cni_conf.parent / "10-other.conflist.cilium_bak").exists)
            first, second = pods.add(node, "first"), pods.add(node, "second")
            with node.open_pod("first") as pod:
                assert pod.run(ping, second.ipv4, 3) != []
            assert "endpoint" in daemon_pod.exec("cilium-agent", "hive", "endpoint", "list").lower()
            pods.delete(node, "second")

            assert "disabled" in daemon_pod.exec("cilium-agent", "/cni-uninstall.sh")
            assert node.cni_conf.exists()

        # A container that is gone left a network that works, and one that comes back finds it.
        with node.open_pod("first") as pod:
            assert pod.run(ping, first.gateway, 3) != []
        daemon_pod.set("cni-uninstall", "true")
        daemon_pod.run("config")
        with daemon_pod.running("cilium-agent"):
            listing = ("hive", "endpoint", "list", "-o", "json")
            eventually(lambda: '"first"' in daemon_pod.exec("cilium-agent", *listing), within=30)
            pods.delete(node, "first")
            assert "Removed" in daemon_pod.exec("cilium-agent", "/cni-uninstall.sh")
            assert not node.cni_conf.exists()

        output = daemon_pod.run("clean-cilium-state", CILIUM_ALL_STATE="true")
        assert "removed cilium_host" in output
        assert not namespaces.run(os.path.exists, "/sys/fs/bpf/cilium")
        assert namespaces.run(os.listdir, "/sys/fs/bpf/tc/globals") == []
