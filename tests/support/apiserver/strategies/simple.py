"""Kinds with few particulars.

Gives: ConfigMaps, Secrets, ServiceAccounts, Namespaces, Leases, EndpointSlices, Endpoints, Roles.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from typing import Any, ClassVar

from tests.support.apiserver.errors import (
    FieldError,
    Obj,
    forbidden,
    invalid,
    required,
    unsupported,
)
from tests.support.apiserver.kinds import Strategy
from tests.support.apiserver.names import (
    config_key_problem,
    label_problem,
    path_segment_problem,
    qualified_name_problem,
)
from tests.support.apiserver.rules import changed, ip_problem

MAX_DATA = 1024 * 1024


class ConfigMaps(Strategy):
    """Checked as to their keys and size."""

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        found = [
            invalid(f"{part}[{key}]", key, problem)
            for part in ("data", "binaryData")
            for key in obj.get(part) or ()
            if (problem := config_key_problem(key))
        ]
        size = sum(len(value.encode()) for value in (obj.get("data") or {}).values())
        size += sum(len(base64.b64decode(value)) for value in (obj.get("binaryData") or {}).values())
        if size > MAX_DATA:
            found.append(FieldError("toolong", "[]", f"may not be more than {MAX_DATA} bytes"))
        return found

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        found = []
        if old.get("immutable"):
            why = "field is immutable when `immutable` is set"
            found += [forbidden(one, why) for one in ("data", "binaryData") if obj.get(one) != old.get(one)]
        return found + self.validate(obj, server)


class Secrets(ConfigMaps):
    """Like config maps, with a type."""

    fields: ClassVar[Mapping[str, str]] = {"type": "type", "metadata.namespace": "metadata.namespace"}

    def defaults(self, obj: Obj) -> None:
        for key, value in (obj.pop("stringData", None) or {}).items():
            obj.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
        obj.setdefault("type", "Opaque")

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        found = [
            invalid(f"data[{key}]", key, problem)
            for key in obj.get("data") or ()
            if (problem := config_key_problem(key))
        ]
        size = sum(len(base64.b64decode(value)) for value in (obj.get("data") or {}).values())
        if size > MAX_DATA:
            found.append(FieldError("toolong", "data", f"may not be more than {MAX_DATA} bytes"))
        return found


class ServiceAccounts(Strategy):
    """Answered with the object when deleted."""

    answers_object = True


class Namespaces(Strategy):
    """Kept by a finalizer of their spec until their content is gone."""

    empty: ClassVar[Obj] = {"spec": {}, "status": {}}
    fields: ClassVar[Mapping[str, str]] = {"metadata.name": "metadata.name", "status.phase": "status.phase"}
    resets = (("f:status",),)

    def name_problem(self, name: str) -> str:
        return label_problem(name)

    def defaults(self, obj: Obj) -> None:
        metadata = obj["metadata"] if isinstance(obj.get("metadata"), dict) else {}
        if metadata.get("name"):
            labels = dict(metadata.get("labels") or {})
            labels["kubernetes.io/metadata.name"] = metadata["name"]
            metadata["labels"] = labels

    def prepare_create(self, obj: Obj, server: Any) -> None:
        finalizers = (obj.get("spec") or {}).get("finalizers") or []
        if "kubernetes" not in finalizers:
            finalizers = [*finalizers, "kubernetes"]
        obj["spec"] = {"finalizers": finalizers}
        obj["status"] = {"phase": "Active"}

    def main_update(self, old: Obj, new: Obj, subresource: str) -> Obj:
        return new if subresource == "finalize" else {**new, "spec": old.get("spec", {})}

    def pending(self, obj: Obj) -> bool:
        return bool((obj.get("spec") or {}).get("finalizers"))

    def dying(self, obj: Obj) -> None:
        obj["metadata"].pop("deletionGracePeriodSeconds", None)
        obj["status"] = {**obj.get("status", {}), "phase": "Terminating"}


class Leases(Strategy):
    """Of leader election and of nodes."""

    def prepare_create(self, obj: Obj, server: Any) -> None:
        for name in ("strategy", "preferredHolder"):  # coordinated leader election is off
            (obj.get("spec") or {}).pop(name, None)

    def prepare_update(self, obj: Obj, old: Obj, server: Any) -> None:
        self.prepare_create(obj, server)

    empty: ClassVar[Obj] = {"spec": {}}
    create_on_update = True

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        spec = obj.get("spec") or {}
        found = []
        if (seconds := spec.get("leaseDurationSeconds")) is not None and seconds <= 0:
            found.append(invalid("spec.leaseDurationSeconds", seconds, "must be greater than 0"))
        if (count := spec.get("leaseTransitions")) is not None and count < 0:
            found.append(invalid("spec.leaseTransitions", count, "must be greater than or equal to 0"))
        return found


class Roles(Strategy):
    """Roles and their bindings."""

    def name_problem(self, name: str) -> str:
        return path_segment_problem(name)

    def defaults(self, obj: Obj) -> None:
        for subject in obj.get("subjects") or ():
            if subject.get("kind") in {"User", "Group"}:
                subject.setdefault("apiGroup", "rbac.authorization.k8s.io")

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        return changed(obj, old, ["roleRef"], "cannot change roleRef")


class Endpoints(Strategy):
    """The older form of EndpointSlices."""

    create_on_update = True

    def defaults(self, obj: Obj) -> None:
        for subset in obj.get("subsets") or ():
            for port in subset.get("ports") or ():
                port.setdefault("protocol", "TCP")


class EndpointSlices(Strategy):
    """Addresses behind a service."""

    empty: ClassVar[Obj] = {"addressType": "", "endpoints": None, "ports": None}
    generations = True

    def defaults(self, obj: Obj) -> None:
        for port in obj.get("ports") or ():
            port.setdefault("name", "")
            port.setdefault("protocol", "TCP")
        for endpoint in obj.get("endpoints") or ():
            endpoint.setdefault("conditions", {})

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        kind, found = obj.get("addressType", ""), []
        if not kind:
            found.append(required("addressType"))
        elif kind not in {"IPv4", "IPv6", "FQDN"}:
            found.append(unsupported("addressType", kind, ["FQDN", "IPv4", "IPv6"]))
        endpoints = obj.get("endpoints") or []
        if len(endpoints) > 1000:
            found.append(
                FieldError("toomany", "endpoints", f"{len(endpoints)}: must have at most 1000 items")
            )
        for number, one in enumerate(endpoints):
            found += _endpoint_errors(one, kind, f"endpoints[{number}]")
        return found + _slice_port_errors(obj.get("ports") or [])

    def warnings(self, obj: Obj) -> list[str]:
        return ["spec.addressType: FQDN endpoints are deprecated"] if obj.get("addressType") == "FQDN" else []


def _endpoint_errors(endpoint: Obj, kind: str, at: str) -> list[FieldError]:
    addresses, found = endpoint.get("addresses") or [], []
    if not addresses:
        found.append(required(f"{at}.addresses", "must contain at least 1 address"))
    if len(addresses) > 100:
        found.append(
            FieldError("toomany", f"{at}.addresses", f"{len(addresses)}: must have at most 100 items")
        )
    for number, one in enumerate(addresses):
        found += _address_errors(one, kind, f"{at}.addresses[{number}]", f"{at}.addresses")
    if (name := endpoint.get("nodeName")) and (problem := qualified_name_problem(name)):
        found.append(invalid(f"{at}.nodeName", name, problem))
    return found


def _address_errors(address: str, kind: str, at: str, around: str) -> list[FieldError]:
    if kind == "FQDN":
        return []
    if kind == "IPv4" and any(len(one) > 1 and one[0] == "0" and one.isdigit() for one in address.split(".")):
        return [invalid(at, address, "must not have leading 0s")]
    if problem := ip_problem(address):
        return [invalid(at, address, problem)]
    if kind in {"IPv4", "IPv6"} and ipaddress.ip_address(address).version != int(kind[-1]):
        return [invalid(around, address, f"must be an {kind} address")]
    return special_address_errors(address, at)


def special_address_errors(address: str, at: str) -> list[FieldError]:
    """Addresses that no endpoint can have."""
    found = ipaddress.ip_address(address)
    if found.is_unspecified:
        return [invalid(at, address, "may not be unspecified (0.0.0.0 or ::)")]
    if found.is_loopback:
        return [invalid(at, address, "may not be in the loopback range (127.0.0.0/8, ::1/128)")]
    if found.is_link_local:
        return [invalid(at, address, "may not be in the link-local range (169.254.0.0/16, fe80::/10)")]
    if found.is_multicast and str(address).startswith(("224.0.0.", "ff02:")):
        return [
            invalid(at, address, "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)")
        ]
    return []


def _slice_port_errors(ports: list[Obj]) -> list[FieldError]:
    found: list[FieldError] = []
    if len(ports) > 20000:
        found.append(FieldError("toomany", "ports", f"{len(ports)}: must have at most 20000 items"))
    names = set()
    for number, one in enumerate(ports):
        at, name = f"ports[{number}]", one.get("name", "")
        if name in names:
            found.append(FieldError("duplicate", f"{at}.name", "", name))
        names.add(name)
        if name and (problem := label_problem(name)):
            found.append(invalid(f"{at}.name", name, problem))
        if one.get("protocol") not in {"TCP", "UDP", "SCTP"}:
            found.append(unsupported(f"{at}.protocol", one.get("protocol"), ["SCTP", "TCP", "UDP"]))
    return found
