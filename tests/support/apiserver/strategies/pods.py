"""Pods.

Gives: Pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tests.support.apiserver.errors import FieldError, Obj, forbidden, invalid, required, unsupported
from tests.support.apiserver.kinds import Strategy
from tests.support.apiserver.names import label_problem, port_name_problem, subdomain_problem
from tests.support.apiserver.rules import ip_problem

TOLERATIONS = tuple(
    {
        "key": f"node.kubernetes.io/{one}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 300,
    }
    for one in ("not-ready", "unreachable")
)
FINISHED = {"Succeeded", "Failed"}


class Pods(Strategy):
    """Ended gracefully once they are bound to a node."""

    empty: ClassVar[Obj] = {"spec": {"containers": None}, "status": {}}
    generations = True
    answers_object = True
    graceful = True
    resets = (("f:status",),)
    fields: ClassVar[Mapping[str, str]] = {
        "metadata.name": "metadata.name",
        "metadata.namespace": "metadata.namespace",
        "spec.nodeName": "spec.nodeName",
        "spec.restartPolicy": "spec.restartPolicy",
        "spec.schedulerName": "spec.schedulerName",
        "spec.serviceAccountName": "spec.serviceAccountName",
        "spec.hostNetwork": "spec.hostNetwork",
        "status.phase": "status.phase",
        "status.podIP": "status.podIP",
        "status.podIPs": "status.podIPs",
        "status.nominatedNodeName": "status.nominatedNodeName",
    }
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
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "lastProbeTime": None,
                "lastTransitionTime": None,
                "reason": "SchedulingGated",
                "message": "Scheduling is blocked due to non-empty scheduling gates",
            }
            obj["status"] = {"phase": "Pending", "conditions": [condition], "qosClass": _qos(obj["spec"])}

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
        spec, found = obj["spec"], []
        containers = spec.get("containers") or []
        if not containers:
            found.append(required("spec.containers"))
        names: set[str] = set()
        for number, one in enumerate(containers):
            found += _container_errors(one, f"spec.containers[{number}]", names)
        if spec.get("restartPolicy") not in {"Always", "OnFailure", "Never"}:
            found.append(
                unsupported("spec.restartPolicy", spec.get("restartPolicy"), ["Always", "OnFailure", "Never"])
            )
        policies = ["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"]
        if spec.get("dnsPolicy") not in policies:
            found.append(unsupported("spec.dnsPolicy", spec.get("dnsPolicy"), policies))
        if spec.get("dnsPolicy") == "None" and not spec.get("dnsConfig"):
            found.append(required("spec.dnsConfig", "must provide `dnsConfig` when `dnsPolicy` is None"))
        if spec.get("nodeName") and (problem := subdomain_problem(spec["nodeName"])):
            found.append(invalid("spec.nodeName", spec["nodeName"], problem))
        return found

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        found: list[FieldError] = []
        before, after = old["spec"], obj["spec"]
        if len(before.get("containers") or ()) != len(after.get("containers") or ()):
            return [forbidden("spec.containers", "pod updates may not add or remove containers")]
        for field in ("podIPs", "hostIPs"):
            for number, one in enumerate((obj.get("status") or {}).get(field) or ()):
                if problem := ip_problem(one["ip"]):
                    found.append(invalid(f"status.{field}[{number}]", one["ip"], problem))
        kept = {one["name"]: one for one in before.get("containers") or ()}
        if _fixed(before) != _fixed(after) or kept.keys() != {one["name"] for one in after["containers"]}:
            told = (
                "pod updates may not change fields other than `spec.containers[*].image`,"
                "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to"
                " existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was"
                " previously negative)"
            )
            found.append(forbidden("spec", f"{told}\n"))
        return found


def _fixed(spec: Obj) -> Obj:
    kept = {
        key: value
        for key, value in spec.items()
        if key not in {"tolerations", "activeDeadlineSeconds", "schedulingGates"}
    }
    for name in ("containers", "initContainers"):
        kept[name] = [{k: v for k, v in one.items() if k != "image"} for one in spec.get(name) or ()]
    return kept


def _containers(spec: Obj) -> Iterator[Obj]:
    for name in ("initContainers", "containers", "ephemeralContainers"):
        yield from spec.get(name) or ()


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
            for setting, number in (
                ("timeoutSeconds", 1),
                ("periodSeconds", 10),
                ("successThreshold", 1),
                ("failureThreshold", 3),
            ):
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
    names = ("cpu", "memory")
    guaranteed = all(
        all(name in (one.get("limits") or {}) for name in names)
        and all((one.get("requests") or {}).get(name) == one["limits"][name] for name in names)
        for one in resources
    )
    return "Guaranteed" if guaranteed else "Burstable"


def _container_errors(container: Obj, at: str, names: set[str]) -> list[FieldError]:
    found = []
    name = container.get("name", "")
    if not name:
        found.append(required(f"{at}.name"))
    elif problem := label_problem(name):
        found.append(invalid(f"{at}.name", name, problem))
    elif name in names:
        found.append(FieldError("duplicate", f"{at}.name", "", name))
    names.add(name)
    if not container.get("image"):
        found.append(required(f"{at}.image"))
    for number, port in enumerate(container.get("ports") or ()):
        where = f"{at}.ports[{number}]"
        if port.get("name") and (problem := port_name_problem(port["name"])):
            found.append(invalid(f"{where}.name", port["name"], problem))
        if port.get("protocol") not in {"TCP", "UDP", "SCTP"}:
            found.append(unsupported(f"{where}.protocol", port.get("protocol"), ["SCTP", "TCP", "UDP"]))
    return found
