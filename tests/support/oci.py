"""A pod's containers without a kubelet: manifests become runc bundles over the image's root filesystem.

Needs: Debian's runc, a node (hive.lab), a root filesystem.   Gives: PodRunner.
Source: OCI runtime specification; what the kubelet and containerd make of securityContext and volumeMounts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hive.lab.namespaces import Namespaces

DEFAULT_CAPABILITIES = [
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP"),
    *("SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
PROPAGATION = {"Bidirectional": "rshared", "HostToContainer": "rslave", None: "rprivate"}
SYSTEM_MOUNTS = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
    {
        "destination": "/sys",
        "type": "sysfs",
        "source": "sysfs",
        "options": ["nosuid", "noexec", "nodev", "ro"],
    },
]


class PodRunner:
    """Runs the containers of one pod in a node's network and with its mounts, each as the manifest says.

    ``host_paths`` are the places on the node, by the hostPath of the manifest; ``volumes`` those of other
    volumes, by name.
    """

    def __init__(
        self,
        folder: Path,
        rootfs: Path,
        node: Namespaces,
        pod: Mapping[str, Any],
        host_paths: Mapping[str, str],
        volumes: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._rootfs = rootfs
        self._node = node
        self._pod = pod
        self._sources = dict(volumes)
        for volume in pod["volumes"]:
            if path := volume.get("hostPath", {}).get("path"):
                self._sources[volume["name"]] = host_paths.get(path, path)

    def run(self, container: Mapping[str, Any], env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run a container to its end; its exit code and all it printed."""
        process = self.start(container, env)
        output, _ = process.communicate(timeout=50)
        self.remove(container)
        return process.returncode, output.decode()

    def start(
        self, container: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a container; its output is the process's. remove() it afterwards."""
        bundle = self._folder / container["name"]
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(self.config(container, env or {})))
        return self._node.popen(
            ["runc", *self._global(), "run", f"--bundle={bundle}", self._id(container)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def exec(self, container: Mapping[str, Any], command: Iterable[str]) -> tuple[int, str]:
        """Run a command in a running container, as the kubelet does for its hooks."""
        done = self._node.popen(
            ["runc", *self._global(), "exec", self._id(container), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = done.communicate(timeout=50)
        return done.returncode, output.decode()

    def remove(self, container: Mapping[str, Any]) -> None:
        """End a container, if it runs, and forget it."""
        self._node.popen(
            ["runc", *self._global(), "delete", "--force", self._id(container)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).wait(20)

    def _global(self) -> list[str]:
        return [f"--root={self._folder / 'runc'}"]

    def _id(self, container: Mapping[str, Any]) -> str:
        return f"hive-test-{self._folder.name}-{container['name']}"

    def config(self, container: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
        """The OCI configuration of a container."""
        security = container.get("securityContext", {})
        privileged = security.get("privileged", False)
        capabilities = self._capabilities(security)
        shares = any(one.get("mountPropagation") == "Bidirectional" for one in container["volumeMounts"])
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [*container["command"], *container.get("args", ())],
                "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", *(f"{k}={v}" for k, v in env.items())],
                "cwd": "/",
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
                "noNewPrivileges": not security.get("allowPrivilegeEscalation", True),
            },
            "root": {
                "path": str(self._rootfs),
                "readonly": security.get("readOnlyRootFilesystem", False),
            },
            "hostname": "node",
            "mounts": [*SYSTEM_MOUNTS, *map(self._mount, container["volumeMounts"])],
            "linux": {
                # The network stays the node's, whose namespaces runc is started in.
                "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "cgroup")],
                "cgroupsPath": f"/{self._id(container)}",
                "resources": {"devices": [{"allow": privileged, "access": "rwm"}]},
                "rootfsPropagation": "rshared" if shares else "rslave",
                **({} if privileged else {"readonlyPaths": READ_ONLY}),
            },
        }

    def _capabilities(self, security: Mapping[str, Any]) -> list[str]:
        if security.get("privileged", False):
            return [f"CAP_{name}" for name in (*DEFAULT_CAPABILITIES, "NET_ADMIN", "SYS_ADMIN")]
        asked = security.get("capabilities", {})
        dropped = DEFAULT_CAPABILITIES if "ALL" in asked.get("drop", ()) else asked.get("drop", ())
        kept = [name for name in DEFAULT_CAPABILITIES if name not in dropped]
        return [f"CAP_{name}" for name in dict.fromkeys([*kept, *asked.get("add", ())])]

    def _mount(self, mount: Mapping[str, Any]) -> dict[str, Any]:
        access = "ro" if mount.get("readOnly") else "rw"
        return {
            "destination": mount["mountPath"],
            "type": "bind",
            "source": self._sources[mount["name"]],
            "options": ["rbind", PROPAGATION[mount.get("mountPropagation")], access],
        }
