"""Runs the containers of a pod's manifest as a kubelet does, each when the test demands it.

Source: Kubernetes' PodSpec (core/v1); CRI runtime/v1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.containerd import Containerd
from tests.support.waiting import eventually

PROPAGATION = {None: 0, "HostToContainer": 1, "Bidirectional": 2}
RUNNING, EXITED = 1, 2
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass
class Kubelet:
    """The kubelet of a node. Folders are created as the node has them."""

    runtime: Containerd
    folder: Path
    """For volumes and logs of pods."""
    node: str = "node1"
    env: dict[str, str] = field(default_factory=dict)
    """Environment of every container, such as the API server's address."""
    account: Path | None = None
    """The folder that is mounted as the service account: token, ca.crt, namespace."""
    host_paths: dict[str, Path] = field(default_factory=dict)
    """Paths of the manifest that the node has elsewhere."""
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)

    def pod(self, name: str, template: Mapping[str, Any], namespace: str = "kube-system") -> KubePod:
        """Return the pod of a workload's template; its sandbox starts with its first container."""
        return KubePod(self, name, namespace, template["spec"])

    def write(self, name: str) -> Path:
        """Write a ConfigMap as a folder of files."""
        made = self.folder / "config-maps" / name
        made.mkdir(parents=True, exist_ok=True)
        for key, value in self.config_maps[name].items():
            (made / key).write_text(value)
        return made


class KubePod:
    """``with pod: pod.run("config"); with pod.running("cilium-agent"): ...``"""

    def __init__(self, kubelet: Kubelet, name: str, namespace: str, spec: Mapping[str, Any]) -> None:
        self._kubelet = kubelet
        self._name = name
        self._namespace = namespace
        self._spec = spec
        self._containers = {
            one["name"]: one for one in [*spec.get("initContainers", ()), *spec["containers"]]
        }
        self._ids: dict[str, str] = {}
        self._runs = 0
        privileged = any(self._security(one).get("privileged") for one in self._containers.values())
        self._config = kubelet.runtime.sandbox(
            name, namespace, host_network=spec.get("hostNetwork", False), privileged=privileged
        )
        self._logs = Path(self._config.log_directory)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._sandbox = kubelet.runtime.run_sandbox(self._config)

    @property
    def init(self) -> list[str]:
        """Return the names of the init containers, in order."""
        return [one["name"] for one in self._spec.get("initContainers", ())]

    def run(self, name: str, **env: str) -> str:
        """Run a container that must succeed, and return its output."""
        container = self._start(name, env)
        eventually(lambda: self._status(container).state == EXITED)
        status, log = self._status(container), self.log(name)
        self._kubelet.runtime.call("RemoveContainer", container_id=container)
        assert status.exit_code == 0, f"{name} ended with {status.exit_code}, {status.reason}:\n{log}"
        return log

    @contextmanager
    def running(self, name: str, **env: str) -> Iterator[None]:
        """Run a container for a block."""
        container = self._start(name, env)
        self._ids[name] = container
        try:
            yield
        finally:
            grace = self._spec.get("terminationGracePeriodSeconds", 30)
            self._kubelet.runtime.call("StopContainer", container_id=container, timeout=grace)
            print(self.log(name))  # noqa: T201  # pytest shows it when the test fails
            self._kubelet.runtime.call("RemoveContainer", container_id=container)
            del self._ids[name]

    def exec(self, name: str, *command: str) -> str:
        """Run a command in a running container, as hooks are run; it must succeed. Return its output."""
        done = self._kubelet.runtime.call("ExecSync", container_id=self._ids[name], cmd=command, timeout=60)
        output: str = (done.stdout + done.stderr).decode()
        assert done.exit_code == 0, f"{command}: {done.exit_code}\n{output}"
        return output

    def printed(self, name: str, *command: str) -> bytes:
        """Run a command in a running container; return its standard output only."""
        done = self._kubelet.runtime.call("ExecSync", container_id=self._ids[name], cmd=command, timeout=60)
        assert done.exit_code == 0, f"{command}: {done.exit_code}\n{done.stderr.decode()}"
        output: bytes = done.stdout
        return output

    def runs(self, name: str) -> bool:
        """Return whether the container is running."""
        return bool(self._status(self._ids[name]).state == RUNNING)

    def log(self, name: str) -> str:
        """Return the output of the latest run of a container."""
        path = self._logs / f"{name}.{self._runs}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return "".join(line.split(" ", 3)[3] + "\n" for line in lines)

    def _status(self, container: str) -> Any:
        return self._kubelet.runtime.call("ContainerStatus", container_id=container).status

    def _security(self, container: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._spec.get("securityContext", {}), **container.get("securityContext", {})}

    def _start(self, name: str, env: Mapping[str, str]) -> str:
        self._runs += 1
        made = self._kubelet.runtime.call(
            "CreateContainer",
            pod_sandbox_id=self._sandbox,
            config=self._container(self._containers[name], env),
            sandbox_config=self._config,
        )
        self._kubelet.runtime.call("StartContainer", container_id=made.container_id)
        return str(made.container_id)

    def _container(self, container: Mapping[str, Any], env: Mapping[str, str]) -> Any:
        make = self._kubelet.runtime.message
        security = self._security(container)
        asked = security.get("capabilities", {})
        network = 2 if self._spec.get("hostNetwork") else 0
        fields: dict[str, Any] = {
            "capabilities": make(
                "Capability",
                add_capabilities=asked.get("add", ()),
                drop_capabilities=asked.get("drop", ()),
            ),
            "privileged": security.get("privileged", False),
            "namespace_options": make("NamespaceOption", network=network, pid=1),
            "readonly_rootfs": security.get("readOnlyRootFilesystem", False),
            "no_new_privs": not security.get("allowPrivilegeEscalation", True),
        }
        if "runAsUser" in security:
            fields["run_as_user"] = make("Int64Value", value=security["runAsUser"])
        return make(
            "ContainerConfig",
            metadata=make("ContainerMetadata", name=container["name"], attempt=self._runs),
            image=make("ImageSpec", image=container["image"]),
            command=container.get("command", ()),
            args=container.get("args", ()),
            envs=[make("KeyValue", key=k, value=v) for k, v in self._env(container, env).items()],
            mounts=self._mounts(container, make),
            log_path=f"{container['name']}.{self._runs}.log",
            linux=make(
                "LinuxContainerConfig", security_context=make("LinuxContainerSecurityContext", **fields)
            ),
        )

    def _env(self, container: Mapping[str, Any], more: Mapping[str, str]) -> dict[str, str]:
        found = dict(self._kubelet.env)
        for one in container.get("env", ()):
            source = one.get("valueFrom", {})
            if "value" in one:
                found[one["name"]] = one["value"]
            elif "fieldRef" in source:
                fields = {"spec.nodeName": self._kubelet.node, "metadata.namespace": self._namespace}
                found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                ref = source["configMapKeyRef"]
                value = self._kubelet.config_maps[ref["name"]].get(ref["key"])
                assert value is not None or ref.get("optional"), ref
                if value is not None:
                    found[one["name"]] = value
        return found | dict(more)

    def _mounts(self, container: Mapping[str, Any], make: Callable[..., Any]) -> Sequence[Any]:
        mounts = [
            make(
                "Mount",
                container_path=one["mountPath"],
                host_path=str(self._source(one["name"])),
                readonly=one.get("readOnly", False),
                propagation=PROPAGATION[one.get("mountPropagation")],
            )
            for one in container.get("volumeMounts", ())
        ]
        account = self._kubelet.account
        if account is not None and self._spec.get("automountServiceAccountToken"):
            mounts.append(make("Mount", container_path=ACCOUNT, host_path=str(account), readonly=True))
        return mounts

    def _source(self, name: str) -> Path:
        (volume,) = (one for one in self._spec["volumes"] if one["name"] == name)
        if "hostPath" in volume:
            path = volume["hostPath"]["path"]
            return self._kubelet.host_paths.get(path, Path(path))
        if "configMap" in volume:
            return self._kubelet.write(volume["configMap"]["name"])
        made = self._kubelet.folder / "volumes" / self._name / name
        made.mkdir(parents=True, exist_ok=True)
        return made
