"""Lists and objects as tables, as ``kubectl get`` shows them.

Gives: as_table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.support.apiserver.errors import Obj, bad_request
from tests.support.apiserver.kinds import Kind
from tests.support.apiserver.types import METADATA, builtin_type

Column = tuple[str, str, int]
"""Name, description, priority."""


def _described(name: str) -> str:
    return str(builtin_type(METADATA).properties[name].schema.get("description", ""))


def _column(name: str, description: str, kind: str = "string", form: str = "", priority: int = 0) -> Obj:
    return {"name": name, "type": kind, "format": form, "description": description, "priority": priority}


def age(stamp: str | None) -> str:
    """Since a moment, as kubectl writes it."""
    if not stamp:
        return "<unknown>"
    then = datetime.fromisoformat(stamp)
    seconds = int((datetime.now(UTC) - then).total_seconds())
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{letter}"
    return f"{max(0, seconds)}s"


def _ready(pod: Obj) -> str:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return f"{sum(bool(one.get('ready')) for one in statuses)}/{len(pod['spec']['containers'])}"


def _restarts(pod: Obj) -> str:
    return str(
        sum(one.get("restartCount", 0) for one in pod.get("status", {}).get("containerStatuses") or [])
    )


def _pod_status(pod: Obj) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = pod.get("status", {})
    return str(status.get("reason") or status.get("phase", ""))


def _node_status(node: Obj) -> str:
    conditions = {one["type"]: one["status"] for one in node.get("status", {}).get("conditions") or []}
    words = [
        "Ready" if conditions.get("Ready") == "True" else "NotReady" if "Ready" in conditions else "Unknown"
    ]
    if node.get("spec", {}).get("unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def _roles(node: Obj) -> str:
    prefix = "node-role.kubernetes.io/"
    labels = node["metadata"].get("labels") or {}
    return ",".join(sorted(one.removeprefix(prefix) for one in labels if one.startswith(prefix))) or "<none>"


def _address(kind: str) -> Callable[[Obj], str]:
    def found(node: Obj) -> str:
        addresses = node.get("status", {}).get("addresses") or []
        return next((str(one["address"]) for one in addresses if one["type"] == kind), "<none>")

    return found


def _info(name: str) -> Callable[[Obj], str]:
    return lambda node: str(node.get("status", {}).get("nodeInfo", {}).get(name, "")) or "<unknown>"


def _ports(service: Obj) -> str:
    shown = []
    for one in service.get("spec", {}).get("ports") or []:
        node_port = f":{one['nodePort']}" if one.get("nodePort") else ""
        shown.append(f"{one['port']}{node_port}/{one.get('protocol', 'TCP')}")
    return ",".join(shown) or "<none>"


def _external(service: Obj) -> str:
    spec = service.get("spec", {})
    ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress") or []
    found = [one.get("ip") or one.get("hostname") for one in ingress] + (spec.get("externalIPs") or [])
    if spec.get("type") == "ExternalName":
        return str(spec.get("externalName"))
    return ",".join(found) or ("<pending>" if spec.get("type") == "LoadBalancer" else "<none>")


def _text(*path: str, empty: str = "") -> Callable[[Obj], str]:
    def found(obj: Any) -> str:
        for name in path:
            obj = obj.get(name) if isinstance(obj, dict) else None
        return empty if obj in (None, "") else str(obj)

    return found


def _gates(pod: Obj) -> str:
    return "<none>" if not pod["spec"].get("readinessGates") else f"0/{len(pod['spec']['readinessGates'])}"


Cell = tuple[str, str, int, Callable[[Obj], object]]
AGE = "Age"
POD = "io.k8s.api.core.v1.PodStatus"


def _doc(definition: str, name: str) -> str:
    found = builtin_type(definition).properties.get(name)
    return str(found.schema.get("description", "")) if found else ""


def _cells(kind: Kind) -> list[Cell]:
    """The columns between the name and the end of a built-in kind."""
    made = _COLUMNS.get((kind.group, kind.plural))
    return made() if made is not None else [(AGE, _described("creationTimestamp"), 0, _age)]


def _age(obj: Obj) -> object:
    return age(obj["metadata"].get("creationTimestamp"))


def _pods() -> list[Cell]:
    return [
        ("Ready", "The aggregate readiness state of this pod for accepting traffic.", 0, _ready),
        ("Status", "The aggregate status of the containers in this pod.", 0, _pod_status),
        (
            "Restarts",
            "The number of times the containers in this pod have been restarted and when the last container in this pod has restarted.",
            0,
            _restarts,
        ),
        (AGE, _described("creationTimestamp"), 0, _age),
        ("IP", _doc(POD, "podIP"), 1, _text("status", "podIP", empty="<none>")),
        (
            "Node",
            _doc("io.k8s.api.core.v1.PodSpec", "nodeName"),
            1,
            _text("spec", "nodeName", empty="<none>"),
        ),
        (
            "Nominated Node",
            _doc(POD, "nominatedNodeName"),
            1,
            _text("status", "nominatedNodeName", empty="<none>"),
        ),
        ("Readiness Gates", _doc("io.k8s.api.core.v1.PodSpec", "readinessGates"), 1, _gates),
    ]


def _nodes() -> list[Cell]:
    info = "io.k8s.api.core.v1.NodeSystemInfo"
    status = "io.k8s.api.core.v1.NodeStatus"
    return [
        ("Status", "The status of the node", 0, _node_status),
        ("Roles", "The roles of the node", 0, _roles),
        (AGE, _described("creationTimestamp"), 0, _age),
        ("Version", _doc(info, "kubeletVersion"), 0, _text("status", "nodeInfo", "kubeletVersion")),
        ("Internal-IP", _doc(status, "addresses"), 1, _address("InternalIP")),
        ("External-IP", _doc(status, "addresses"), 1, _address("ExternalIP")),
        ("OS-Image", _doc(info, "osImage"), 1, _info("osImage")),
        ("Kernel-Version", _doc(info, "kernelVersion"), 1, _info("kernelVersion")),
        ("Container-Runtime", _doc(info, "containerRuntimeVersion"), 1, _info("containerRuntimeVersion")),
    ]


def _services() -> list[Cell]:
    spec = "io.k8s.api.core.v1.ServiceSpec"
    return [
        ("Type", _doc(spec, "type"), 0, _text("spec", "type")),
        ("Cluster-IP", _doc(spec, "clusterIP"), 0, _text("spec", "clusterIP", empty="<none>")),
        ("External-IP", _doc(spec, "externalIPs"), 0, _external),
        ("Port(s)", _doc(spec, "ports"), 0, _ports),
        (AGE, _described("creationTimestamp"), 0, _age),
        ("Selector", _doc(spec, "selector"), 1, _selector),
    ]


def _selector(service: Obj) -> str:
    found = service.get("spec", {}).get("selector") or {}
    return ",".join(f"{key}={value}" for key, value in sorted(found.items())) or "<none>"


def _configmaps() -> list[Cell]:
    return [
        (
            "Data",
            _doc("io.k8s.api.core.v1.ConfigMap", "data"),
            0,
            lambda one: str(len(one.get("data") or {}) + len(one.get("binaryData") or {})),
        ),
        (AGE, _described("creationTimestamp"), 0, _age),
    ]


def _namespaces() -> list[Cell]:
    return [
        ("Status", "The status of the namespace", 0, _text("status", "phase")),
        (AGE, _described("creationTimestamp"), 0, _age),
    ]


def _network_policies() -> list[Cell]:
    spec = "io.k8s.api.networking.v1.NetworkPolicySpec"
    return [
        ("Pod-Selector", _doc(spec, "podSelector"), 0, _pod_selector),
        (AGE, _described("creationTimestamp"), 0, _age),
    ]


def _pod_selector(policy: Obj) -> str:
    selector = policy["spec"].get("podSelector") or {}
    found = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for one in selector.get("matchExpressions") or ():
        values = f" ({','.join(one.get('values') or ())})" if one.get("values") else ""
        words = {"In": "in", "NotIn": "notin"}
        shown = f"{one['key']} {words[one['operator']]}{values}" if values else one["key"]
        found.append(f"!{shown}" if one["operator"] == "DoesNotExist" else shown)
    return ",".join(found) or "<none>"


def _leases() -> list[Cell]:
    return [
        (
            "Holder",
            _doc("io.k8s.api.coordination.v1.LeaseSpec", "holderIdentity"),
            0,
            _text("spec", "holderIdentity"),
        ),
        (AGE, _described("creationTimestamp"), 0, _age),
    ]


_COLUMNS: dict[tuple[str, str], Callable[[], list[Cell]]] = {
    ("", "pods"): _pods,
    ("", "nodes"): _nodes,
    ("", "services"): _services,
    ("", "configmaps"): _configmaps,
    ("", "namespaces"): _namespaces,
    ("coordination.k8s.io", "leases"): _leases,
    ("networking.k8s.io", "networkpolicies"): _network_policies,
}


def as_table(
    body: Obj, kind: Kind, include: str, *, listed: bool, header: bool = True, version: str = "v1"
) -> Obj:
    """A list or an object as a table. Raises StatusError 400."""
    if include not in {"", "None", "Metadata", "Object"}:
        why = f"includeObject: Invalid value: \"{include}\": must be 'Metadata', 'Object', 'None', or empty"
        raise bad_request(f"Unable to convert to Table as requested: {why}")
    items = body["items"] if listed else [body]
    metadata: Obj = {"resourceVersion": body["metadata"].get("resourceVersion", "")}
    if listed:
        for name in ("continue", "remainingItemCount"):
            if body["metadata"].get(name):
                metadata[name] = body["metadata"][name]
    columns, cells = _custom(kind) if kind.custom is not None else _builtin(kind)
    rows = []
    for item in items:
        row: Obj = {"cells": [item["metadata"]["name"], *(cell(item) for cell in cells)]}
        if kind.plural == "pods" and kind.group == "":
            row.update(_pod_conditions(item))
        if include == "Object":
            row["object"] = {"kind": kind.kind, "apiVersion": kind.api_version, **item}
        elif include != "None":
            row["object"] = {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": item["metadata"],
            }
        else:
            row["object"] = None
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": f"meta.k8s.io/{version}",
        "metadata": metadata,
        "columnDefinitions": columns if header else None,
        "rows": rows,
    }


def _pod_conditions(pod: Obj) -> Obj:
    phase = pod.get("status", {}).get("phase")
    if phase in {"Succeeded", "Failed"}:
        why = {"Succeeded": "Succeeded", "Failed": "Failed"}[phase]
        message = {"Succeeded": "The pod has completed successfully.", "Failed": "The pod failed."}[phase]
        return {"conditions": [{"type": "Completed", "status": "True", "reason": why, "message": message}]}
    return {}


def _builtin(kind: Kind) -> tuple[list[Obj], list[Callable[[Obj], object]]]:
    found = _cells(kind)
    columns = [_column("Name", _described("name"), form="name")]
    columns += [_column(name, description, priority=priority) for name, description, priority, _ in found]
    return columns, [cell for *_, cell in found]


def _custom(kind: Kind) -> tuple[list[Obj], list[Callable[[Obj], object]]]:
    columns = [_column("Name", _described("name"), form="name")]
    cells: list[Callable[[Obj], object]] = []
    given = kind.custom.get("additionalPrinterColumns")
    if not given:
        columns.append(_column(AGE, _described("creationTimestamp"), "date"))
        return columns, [_age]
    for one in given:
        path = one["jsonPath"]
        told = one.get("description") or f"Custom resource definition column (in JSONPath format): {path}"
        columns.append(_column(one["name"], told, one["type"], one.get("format", ""), one.get("priority", 0)))
        cells.append(_custom_cell(path, one["type"]))
    return columns, cells


def _custom_cell(path: str, kind: str) -> Callable[[Obj], object]:
    def cell(obj: Obj) -> object:
        found = json_path(obj, path)
        if not found or found[0] is None:
            return None
        if kind == "date":
            return age(str(found[0]))
        if kind in {"integer", "number", "boolean"}:
            return found[0]
        return str(found[0]).lower() if isinstance(found[0], bool) else str(found[0])

    return cell


_STEP = re.compile(r"\.((?:[^.\[\]\\]|\\.)+)|\[(\d+)\]|\[\?\(@\.(\w+)\s*==\s*['\"]([^'\"]*)['\"]\)\]|\[\*\]")


def json_path(obj: Any, path: str) -> list[Any]:
    """What a simple JSON path selects."""
    found = [obj]
    for match in _STEP.finditer(path):
        name, index, key, value = match.groups()
        if name is not None:
            name = name.replace("\\.", ".").replace("\\/", "/")
            found = [one[name] for one in found if isinstance(one, dict) and name in one]
        elif index is not None:
            found = [one[int(index)] for one in found if isinstance(one, list) and int(index) < len(one)]
        elif key is not None:
            found = [item for one in found if isinstance(one, list) for item in one if item.get(key) == value]
        else:
            found = [item for one in found if isinstance(one, list) for item in one]
    return found
