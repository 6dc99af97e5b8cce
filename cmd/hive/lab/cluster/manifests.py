"""The objects of a lab's cluster: a folder of manifests in each node, all with the same files.

Needs: the nodes' directories.   Gives: Manifests, node_objects, pod_object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hive.lab.cluster.network import Place
from hive.lab.node import Lab, LabError

Object = dict[str, Any]


class Manifests:
    """The folders of several nodes, written alike: what an API server would be to them."""

    def __init__(self, nodes: Sequence[Lab]) -> None:
        self._nodes = nodes

    def write(self, name: str, objects: Iterable[Object]) -> None:
        """Put a file into every folder; a reader sees the old one or the new one."""
        import yaml  # 25 ms that not every command needs

        text = yaml.safe_dump_all(list(objects), sort_keys=False)
        self.copy(f"{name}.yaml", text)

    def copy(self, name: str, text: str) -> None:
        """Put a file with this text into every folder."""
        for node in self._nodes:
            node.manifests.mkdir(exist_ok=True)
            fresh = node.manifests / f".{name}.new"
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(node.manifests / name)

    def remove(self, name: str) -> None:
        """Take a file out of every folder; gone already is fine."""
        for node in self._nodes:
            (node.manifests / f"{name}.yaml").unlink(missing_ok=True)

    def join(self, newcomer: Lab) -> None:
        """Give a node that has just come what the others have."""
        newcomer.manifests.mkdir(exist_ok=True)
        for file in self.files():
            if not (newcomer.manifests / file.name).exists():
                (newcomer.manifests / file.name).write_bytes(file.read_bytes())

    def files(self) -> list[Path]:
        """The files of the first folder there is, in order."""
        for node in self._nodes:
            if node.manifests.is_dir():
                return sorted(path for path in node.manifests.iterdir() if not path.name.startswith("."))
        return []

    def objects(self) -> Iterator[tuple[Object, str]]:
        """Every object, and the file it is in. Raises LabError for a file that cannot be read."""
        for file in self.files():
            for each in read_objects(file):
                yield each, file.name


def read_objects(file: Path) -> list[Object]:
    """The objects of a manifest, lists taken apart. Raises LabError."""
    import yaml

    try:
        found = [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one]
    except OSError as error:
        raise LabError(f"{file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LabError(f"{file}: {' '.join(str(error).split())}") from error
    objects: list[Object] = []
    for one in found:
        several = one.get("items") if isinstance(one, dict) else None
        objects += several if isinstance(several, list) else [one]
    for one in objects:
        if not isinstance(one, dict) or not one.get("kind") or not (one.get("metadata") or {}).get("name"):
            raise LabError(f"{file}: expected objects with kind and metadata.name")
    return objects


def node_objects(lab: Lab, place: Place) -> list[Object]:
    """The Node and the CiliumNode of a node of the lab."""
    addresses = [place.ipv4, place.ipv6]
    metadata = {"name": lab.name, "labels": {"kubernetes.io/hostname": lab.name}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": metadata,
            "spec": {"podCIDR": place.pod_cidrs[0], "podCIDRs": list(place.pod_cidrs)},
            "status": {"addresses": [{"type": "InternalIP", "address": ip} for ip in addresses]},
        },
        {
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNode",
            "metadata": metadata,
            "spec": {
                "addresses": [{"type": "InternalIP", "ip": ip} for ip in addresses],
                "ipam": {"podCIDRs": list(place.pod_cidrs)},
            },
        },
    ]


def pod_object(lab: Lab, place: Place, name: str, addresses: Sequence[str] = ()) -> Object:
    """The Pod of a pod of the lab; without addresses it is yet to be attached."""
    found: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {"nodeName": lab.name, "containers": [{"name": "main"}]},
        "status": {"phase": "Pending", "hostIP": place.ipv4},
    }
    if addresses:
        ips = {"podIP": addresses[0], "podIPs": [{"ip": ip} for ip in addresses]}
        found["status"] = {"phase": "Running", "hostIP": place.ipv4} | ips
    return found


def namespace_object() -> Object:
    """The namespace the lab's pods are in."""
    name = "default"
    labels = {"kubernetes.io/metadata.name": name}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
