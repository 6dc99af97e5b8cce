"""Pods and nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tests.support.apiserver.errors import (
    FieldError,
    Obj,
    duplicate,
    forbidden,
    invalid,
    required,
    unsupported,
)
from tests.support.apiserver.kinds import Strategy, selectable
from tests.support.apiserver.rules import cidr_problem, ip_problem

TOLERATIONS = tuple(
    {
        "key": f"node.kubernetes.io/{one}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 300,
    }
    for one in ("not-ready", "unreachable")
)
PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
FINISHED = {"Succeeded", "Failed"}


class Pods(Strategy):
    """Ended gracefully once they are bound to a node."""

    empty: ClassVar[Obj] = {"spec": {"containers": None}, "status": {}}
    generations = True
    answers_object = True
    graceful = True
    fields: ClassVar[Mapping[str, str]] = selectable(
        *("metadata.name", "metadata.namespace", "spec.nodeName", "spec.restartPolicy", "spec.schedulerName"),
        *("spec.serviceAccountName", "spec.hostNetwork", "status.phase", "status.podIP", "status.podIPs"),
        "status.nominatedNodeName",
    )
    selector_empty: ClassVar[Mapping[str, str]] = {"spec.hostNetwork": "false"}

    def defaults(self, obj: Obj) -> None:
        spec = obj.get("spec") or {}
        obj["spec"] = spec
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        spec.setdefault("dnsPolicy", "ClusterFirst")
        spec.setdefault("securityContext", {})
        spec.setdefault("schedulerName", "default-scheduler")
        spec.setdefault("enableServiceLinks", True)
        if spec.get("serviceAccountName"):
            spec.setdefault("serviceAccount", spec["serviceAccountName"])
        for container in _containers(spec):
            _default_container(container, host_network=bool(spec.get("hostNetwork")))
        for volume in spec.get("volumes") or ():
            if set(volume) == {"name"}:
                volume["emptyDir"] = {}
            for name in ("configMap", "secret"):
                if isinstance(volume.get(name), dict):
                    volume[name].setdefault("defaultMode", 420)
        status = obj.get("status") or {}
        for one in status.get("containerStatuses") or ():
            one.setdefault("lastState", {})
        for condition in status.get("conditions") or ():
            condition.setdefault("lastProbeTime", None)
            condition.setdefault("lastTransitionTime", None)
        own, all_of_them = status.get("podIP"), status.get("podIPs") or []
        if own and (not all_of_them or all_of_them[0].get("ip") != own):
            status["podIPs"] = [{"ip": own}]
        elif all_of_them and not own:
            status["podIP"] = all_of_them[0].get("ip")

    def admit_update(self, obj: Obj, old: Obj, server: Any) -> None:
        self.admit_create(obj, server)

    def admit_create(self, obj: Obj, server: Any) -> None:
        spec = obj["spec"]
        held = spec.get("tolerations") or []
        keys = {one.get("key") for one in held if one.get("effect") in {None, "", "NoExecute"}}
        added = [dict(one) for one in TOLERATIONS if one["key"] not in keys and None not in keys]
        if held or added:
            spec["tolerations"] = [*held, *added]
        spec.setdefault("priority", 0)
        spec.setdefault("preemptionPolicy", "PreemptLowerPriority")

    def prepare_create(self, obj: Obj, server: Any) -> None:
        obj["status"] = {"phase": "Pending", "qosClass": _qos(obj["spec"])}
        if obj["spec"].get("schedulingGates"):
            condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            times = {"lastProbeTime": None, "lastTransitionTime": None}
            why = "Scheduling is blocked due to non-empty scheduling gates"
            obj["status"]["conditions"] = [{**condition, **times, "message": why}]

    def prepare_update(self, obj: Obj, old: Obj, server: Any) -> None:
        status = obj.get("status") or {}
        obj["status"] = {**status, "qosClass": (old.get("status") or {}).get("qosClass", _qos(obj["spec"]))}

    def grace(self, obj: Obj, options: Obj) -> int:
        spec, status = obj["spec"], obj.get("status") or {}
        asked = options.get("gracePeriodSeconds")
        if asked is not None and asked < 0:
            asked = 1
        if not spec.get("nodeName") or status.get("phase") in FINISHED:
            return 0
        return int(spec.get("terminationGracePeriodSeconds", 30) if asked is None else asked)

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        if obj["spec"].get("dnsPolicy") == "None" and not obj["spec"].get("dnsConfig"):
            return [required("spec.dnsConfig", "must provide `dnsConfig` when `dnsPolicy` is None")]
        return list(_host_port_errors(obj["spec"]))

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        found: list[FieldError] = []
        before, after = old["spec"], obj["spec"]
        if len(before.get("containers") or ()) != len(after.get("containers") or ()):
            return [forbidden("spec.containers", "pod updates may not add or remove containers")]
        for field in ("podIPs", "hostIPs"):
            for number, one in enumerate((obj.get("status") or {}).get(field) or ()):
                if problem := ip_problem(one["ip"]):
                    found.append(invalid(f"status.{field}[{number}]", one["ip"], problem))
        previous = {one["name"]: one for one in before.get("containers") or ()}
        if _fixed(before) != _fixed(after) or previous.keys() != {one["name"] for one in after["containers"]}:
            why = (
                "pod updates may not change fields other than images, deadlines, gates and added tolerations"
            )
            found.append(forbidden("spec", why))
        return found


def _fixed(spec: Obj) -> Obj:
    previous = {
        key: value
        for key, value in spec.items()
        if key not in {"tolerations", "activeDeadlineSeconds", "schedulingGates"}
    }
    for name in ("containers", "initContainers"):
        previous[name] = [{k: v for k, v in one.items() if k != "image"} for one in spec.get(name) or ()]
    return previous


def _containers(spec: Obj) -> Iterator[Obj]:
    for name in ("initContainers", "containers", "ephemeralContainers"):
        yield from spec.get(name) or ()


def _host_port_errors(spec: Obj) -> Iterator[FieldError]:
    """A pod in the node's network has no other ports there."""
    for name in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(name) or () if spec.get("hostNetwork") else ()):
            for place, port in enumerate(container.get("ports") or ()):
                if port["hostPort"] != port["containerPort"]:
                    at = f"spec.{name}[{number}].ports[{place}].containerPort"
                    why = "must match `hostPort` when `hostNetwork` is true"
                    yield invalid(at, port["containerPort"], why)


def _default_container(container: Obj, *, host_network: bool) -> None:
    image = container.get("image", "")
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    latest = "@" not in image and tag in {"", "latest"}
    container.setdefault("resources", {})
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
    for port in container.get("ports") or ():
        port.setdefault("protocol", "TCP")
        if host_network:
            port.setdefault("hostPort", port["containerPort"])
    limits = container["resources"].get("limits")
    if limits:
        requests = container["resources"].setdefault("requests", {})
        for resource, value in limits.items():
            requests.setdefault(resource, value)
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if probe := container.get(name):
            for setting, number in PROBE.items():
                probe.setdefault(setting, number)
            if get := probe.get("httpGet"):
                get.setdefault("path", "/")
                get.setdefault("scheme", "HTTP")
    for one in container.get("env") or ():
        if field := (one.get("valueFrom") or {}).get("fieldRef"):
            field.setdefault("apiVersion", "v1")


def _qos(spec: Obj) -> str:
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    resources = [one.get("resources") or {} for one in containers]
    if not any(one.get("requests") or one.get("limits") for one in resources):
        return "BestEffort"
    guaranteed = all(
        (limit := (one.get("limits") or {}).get(name)) and (one.get("requests") or {}).get(name) == limit
        for one in resources
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if guaranteed else "Burstable"


EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
INFO = (
    *("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion"),
    *("kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture"),
)


class Nodes(Strategy):
    """A PUT of the node writes its status only through /status."""

    empty: ClassVar[Obj] = {
        "spec": {},
        "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, "nodeInfo": dict.fromkeys(INFO, "")},
    }
    fields: ClassVar[Mapping[str, str]] = {
        "metadata.name": "metadata.name",
        "spec.unschedulable": "spec.unschedulable",
    }
    selector_empty: ClassVar[Mapping[str, str]] = {"spec.unschedulable": "false"}

    def defaults(self, obj: Obj) -> None:
        spec, status = obj.get("spec") or {}, obj.setdefault("status", {})
        status.setdefault("daemonEndpoints", {}).setdefault("kubeletEndpoint", {"Port": 0})
        status["nodeInfo"] = {**dict.fromkeys(INFO, ""), **(status.get("nodeInfo") or {})}
        if status.get("capacity") and not status.get("allocatable"):
            status["allocatable"] = dict(status["capacity"])
        for condition in status.get("conditions") or ():
            condition.setdefault("lastHeartbeatTime", None)
            condition.setdefault("lastTransitionTime", None)
        if spec.get("podCIDR") and (spec.get("podCIDRs") or [""])[0] != spec["podCIDR"]:
            spec["podCIDRs"] = [spec["podCIDR"]]
        obj["spec"] = spec

    def admit_create(self, obj: Obj, server: Any) -> None:
        spec = obj["spec"]
        taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
        if not any(
            one.get("key") == taint["key"] and one.get("effect") == taint["effect"]
            for one in spec.get("taints") or ()
        ):
            spec["taints"] = [*(spec.get("taints") or ()), taint]

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        cidrs = (obj.get("spec") or {}).get("podCIDRs") or []
        found = [
            invalid(f"spec.podCIDRs[{number}]", one, problem)
            for number, one in enumerate(cidrs)
            if (problem := cidr_problem(one))
        ]
        families = [":" in one for one in cidrs]
        if len(families) != len(set(families)):
            found.append(
                invalid("spec.podCIDRs", cidrs, "may specify no more than one CIDR for each IP family")
            )
        seen = set()
        for number, one in enumerate((obj.get("spec") or {}).get("taints") or ()):
            if (key := (one.get("key"), one.get("effect"))) in seen:
                found.append(duplicate(f"metadata.taints[{number}]", one))
            seen.add(key)
            if one.get("effect") not in EFFECTS:
                found.append(unsupported(f"metadata.taints[{number}].effect", one.get("effect"), EFFECTS))
        return found

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        before, after = old.get("spec") or {}, obj.get("spec") or {}
        why = 'node updates may not change it except from "" to valid'
        found = [
            forbidden(f"spec.{one}", why)
            for one in ("podCIDRs", "providerID")
            if before.get(one) and before[one] != after.get(one)
        ]
        addresses = (obj.get("status") or {}).get("addresses") or []
        found += [
            duplicate(f"status.addresses[{number}]", one)
            for number, one in enumerate(addresses)
            if one in addresses[:number]
        ]
        return self.validate(obj, server) + found
