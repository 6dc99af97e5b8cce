"""The objects of a lab's cluster: a directory of manifests in each node, all with the same files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from hive.endpoint_slices import SERVICE_NAME, endpoint_slices
from hive.lab.cluster.network import Place
from hive.lab.node import Lab, LabError

Object = dict[str, Any]
SLICES, CONTROLLER = "endpoint-slices", "hive-lab"
"""The file of the slices that the lab writes, and who manages them."""
CLUSTER_IPS, NODE_PORTS = IPv4Network("10.96.0.0/16"), range(30000, 32768)
"""Of services that have none, as an API server gives them."""


class Manifests:
    """The manifest directories of several nodes, with equal contents; they stand in for an API server."""

    def __init__(self, nodes: Sequence[Lab]) -> None:
        self.nodes = nodes

    def write(self, name: str, objects: Iterable[Object]) -> None:
        """Write a file to every directory, atomically."""
        import yaml  # 25 ms that not every command needs

        text = yaml.safe_dump_all(list(objects), sort_keys=False)
        self.copy(f"{name}.yaml", text)

    def copy(self, name: str, text: str) -> None:
        """Write a text to a file in every directory."""
        for node in self.nodes:
            node.manifests.mkdir(exist_ok=True)
            fresh = node.manifests / f".{name}.new"
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(node.manifests / name)

    def remove(self, name: str) -> None:
        """Remove a file from every directory; a missing one is ignored."""
        for node in self.nodes:
            (node.manifests / f"{name}.yaml").unlink(missing_ok=True)

    def join(self, newcomer: Lab) -> None:
        """Copy the files of the other nodes to a new node."""
        newcomer.manifests.mkdir(exist_ok=True)
        for file in self.files():
            if not (newcomer.manifests / file.name).exists():
                (newcomer.manifests / file.name).write_bytes(file.read_bytes())

    def follow_services(self) -> None:
        """Write the EndpointSlices of services with a selector, except those with applied slices."""
        objects = [one for one, file in self.objects() if file != f"{SLICES}.yaml"]
        pods = [one for one in objects if one["kind"] == "Pod"]
        given = {_service_of(one) for one in objects if one["kind"] == "EndpointSlice"}
        services = [one for one in objects if one["kind"] == "Service" and _name(one) not in given]
        slices = [each for one in services for each in endpoint_slices(one, pods, CONTROLLER)]
        there = self.files()
        if slices or any(file.name == f"{SLICES}.yaml" for file in there):
            self.write(SLICES, slices)

    def files(self) -> list[Path]:
        """Return the files of the first existing directory, in order."""
        for node in self.nodes:
            if node.manifests.is_dir():
                return sorted(path for path in node.manifests.iterdir() if not path.name.startswith("."))
        return []

    def objects(self) -> Iterator[tuple[Object, str]]:
        """Yield every object with its file. Raises LabError for an unreadable file."""
        for file in self.files():
            for each in read_objects(file):
                yield each, file.name


def read_objects(file: Path) -> list[Object]:
    """Return the objects of a manifest, with the items of lists. Raises LabError."""
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


def with_defaults(objects: Sequence[Object], known: Iterable[Object]) -> list[Object]:
    """Return objects with an API server's defaults: addresses and node ports of services.

    ``known`` are the existing objects: a service keeps its values.
    """
    services = [one for one in known if one["kind"] == "Service"]
    before = {_name(one): one.get("spec") or {} for one in services}
    specs = [one.get("spec") or {} for one in (*services, *objects) if one["kind"] == "Service"]
    taken = {ip for spec in specs for ip in (spec.get("clusterIP"), *(spec.get("clusterIPs") or ()))}
    ports = {port.get("nodePort") for spec in specs for port in spec.get("ports") or ()}
    free_ips = (str(ip) for ip in CLUSTER_IPS.hosts() if str(ip) not in taken)
    free_ports = (port for port in NODE_PORTS if port not in ports)
    return [
        _with_addresses(one, before.get(_name(one), {}), free_ips, free_ports)
        if one["kind"] == "Service" and (one.get("spec") or {}).get("type") != "ExternalName"
        else one
        for one in objects
    ]


def _with_addresses(
    service: Object, before: Object, free_ips: Iterator[str], free_ports: Iterator[int]
) -> Object:
    spec = dict(service.get("spec") or {})
    if not spec.get("clusterIP") and not spec.get("clusterIPs"):
        spec["clusterIP"] = before.get("clusterIP") or next(free_ips)
    if spec.get("type") in {"NodePort", "LoadBalancer"}:
        had = {port["port"]: port["nodePort"] for port in before.get("ports") or () if port.get("nodePort")}
        spec["ports"] = [
            port if port.get("nodePort") else {**port, "nodePort": had.get(port["port"]) or next(free_ports)}
            for port in spec.get("ports") or ()
        ]
    return {**service, "spec": spec}


def _name(object_: Object) -> tuple[str, str]:
    return object_["metadata"].get("namespace") or "default", object_["metadata"]["name"]


def _service_of(slice_: Object) -> tuple[str, str]:
    labels = slice_["metadata"].get("labels") or {}
    return slice_["metadata"].get("namespace") or "default", labels.get(SERVICE_NAME, "")


def node_objects(lab: Lab, place: Place) -> list[Object]:
    """Return the Node and the CiliumNode of a lab node."""
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


def pod_object(lab: Lab, host_ip: str, name: str, addresses: Sequence[str] = ()) -> Object:
    """Return the Pod of a lab pod, without addresses if it is not attached yet."""
    found: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {"nodeName": lab.name, "containers": [{"name": "main"}]},
        "status": {"phase": "Pending", "hostIP": host_ip},
    }
    if addresses:
        ips = {"podIP": addresses[0], "podIPs": [{"ip": ip} for ip in addresses]}
        found["status"] = {"phase": "Running", "hostIP": host_ip} | ips
    return found


def namespace_object() -> Object:
    """Return the namespace of the lab's pods."""
    name = "default"
    labels = {"kubernetes.io/metadata.name": name}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
