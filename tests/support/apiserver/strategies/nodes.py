"""Nodes.

Gives: Nodes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, ClassVar

from tests.support.apiserver.errors import FieldError, Obj, forbidden, invalid
from tests.support.apiserver.kinds import Strategy

INFO = (
    "machineID",
    "systemUUID",
    "bootID",
    "kernelVersion",
    "osImage",
    "containerRuntimeVersion",
    "kubeletVersion",
    "kubeProxyVersion",
    "operatingSystem",
    "architecture",
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
    resets = (("f:status",),)

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
        found: list[FieldError] = []
        spec = obj.get("spec") or {}
        cidrs = spec.get("podCIDRs") or []
        families = []
        for number, one in enumerate(cidrs):
            try:
                network = ipaddress.ip_network(one, strict=False)
                families.append(network.version)
                if str(network.network_address) != one.partition("/")[0]:
                    why = "must not have bits set beyond the prefix length"
                    found.append(invalid(f"spec.podCIDRs[{number}]", one, why))
            except ValueError:
                why = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
                found.append(invalid(f"spec.podCIDRs[{number}]", one, why))
        if len(families) != len(set(families)):
            found.append(
                invalid("spec.podCIDRs", cidrs, "may specify no more than one CIDR for each IP family")
            )
        elif len(cidrs) > 2:
            found.append(invalid("spec.podCIDRs", cidrs, "may specify no more than 2 CIDRs"))
        return found + self._taint_errors(spec.get("taints") or [])

    def _taint_errors(self, taints: list[Obj]) -> list[FieldError]:
        found, seen = [], set()
        for number, one in enumerate(taints):
            key = (one.get("key"), one.get("effect"))
            if key in seen:
                value = {
                    "Key": one.get("key"),
                    "Value": one.get("value", ""),
                    "Effect": one.get("effect"),
                    "TimeAdded": None,
                }
                why = "taints must be unique by key and effect pair"
                found.append(FieldError("duplicate", f"metadata.taints[{number}]", why, value))
            seen.add(key)
            effects = ["NoSchedule", "PreferNoSchedule", "NoExecute"]
            if one.get("effect") not in effects:
                shown = FieldError(
                    "notsupported",
                    f"metadata.taints[{number}].effect",
                    "supported values: " + ", ".join(f'"{e}"' for e in effects),
                    one.get("effect"),
                )
                found.append(shown)
        return found

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        found = self.validate(obj, server)
        before, after = old.get("spec") or {}, obj.get("spec") or {}
        if before.get("podCIDRs") and before["podCIDRs"] != after.get("podCIDRs"):
            found.append(
                forbidden("spec.podCIDRs", 'node updates may not change podCIDR except from "" to valid')
            )
        if before.get("providerID") and before["providerID"] != after.get("providerID"):
            found.append(
                forbidden("spec.providerID", 'node updates may not change providerID except from "" to valid')
            )
        addresses = (obj.get("status") or {}).get("addresses") or []
        found += [
            FieldError("duplicate", f"status.addresses[{number}]", "", one)
            for number, one in enumerate(addresses)
            if one in addresses[:number]
        ]
        return found
