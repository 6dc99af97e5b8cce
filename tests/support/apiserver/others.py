"""Kinds with few particulars, and where those of every built-in kind are."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tests.support.apiserver.crds import CRDS, DefinitionStrategy
from tests.support.apiserver.errors import (
    FieldError,
    Obj,
    Resource,
    forbidden,
    invalid,
    required,
    unsupported,
)
from tests.support.apiserver.kinds import Strategy, selectable
from tests.support.apiserver.reads import selector_errors
from tests.support.apiserver.rules import (
    PROTOCOLS,
    changed,
    cidr_problem,
    config_key_problem,
    endpoint_ip_problem,
    label_problem,
    path_segment_problem,
    port_name_problem,
    port_problem,
    qualified_name_problem,
)
from tests.support.apiserver.services import Services
from tests.support.apiserver.workloads import Nodes, Pods


class ConfigMaps(Strategy):
    """Checked as to their keys and size."""

    most, whole = 1 << 20, "[]"

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        found = [
            invalid(f"{part}[{key}]", key, problem)
            for part in ("data", "binaryData")
            for key in obj.get(part) or ()
            if (problem := config_key_problem(key))
        ]
        size = sum(len(one) for part in ("data", "binaryData") for one in (obj.get(part) or {}).values())
        if size > self.most:
            found.append(FieldError("toolong", self.whole, f"may not be more than {self.most} bytes"))
        return found

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        found = []
        if old.get("immutable"):
            why = "field is immutable when `immutable` is set"
            found += [forbidden(one, why) for one in ("data", "binaryData") if obj.get(one) != old.get(one)]
        return found + self.validate(obj, server)


class Secrets(ConfigMaps):
    """Like config maps, with a type; their data are longer by a third, being base64."""

    most, whole = (1 << 20) * 4 // 3, "data"

    fields: ClassVar[Mapping[str, str]] = {"type": "type", "metadata.namespace": "metadata.namespace"}

    def defaults(self, obj: Obj) -> None:
        for key, value in (obj.pop("stringData", None) or {}).items():
            obj.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
        obj.setdefault("type", "Opaque")


class ServiceAccounts(Strategy):
    """Answered with the object when deleted."""

    answers_object = True


class Namespaces(Strategy):
    """A finalizer of their spec retains them until their content is deleted."""

    empty: ClassVar[Obj] = {"spec": {}, "status": {}}
    fields: ClassVar[Mapping[str, str]] = {"metadata.name": "metadata.name", "status.phase": "status.phase"}

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
        if kind == "FQDN":
            return []
        for number, endpoint in enumerate(obj.get("endpoints") or ()):
            around = f"endpoints[{number}].addresses"
            for n, one in enumerate(endpoint.get("addresses") or ()):
                if problem := endpoint_ip_problem(one):
                    found.append(invalid(f"{around}[{n}]", one, problem))
                elif kind and (":" in one) is not (kind == "IPv6"):
                    found.append(invalid(around, one, f"must be an {kind} address"))
        return found


OBJECT = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
OLDER = {f"deprecated{one[0].upper()}{one[1:]}": one for one in ("firstTimestamp", "lastTimestamp", "count")}
NAMED = {"regarding": "involvedObject", "note": "message", "reportingController": "reportingComponent"}
"""How refusals name fields: as core/v1 does."""
COMMON = ("reason", "type", "metadata.namespace", "metadata.name")
FIXED = (
    "regarding",
    "reason",
    "reportingController",
    "reportingInstance",
    "action",
    "related",
    "note",
    "type",
)


class Events(Strategy):
    """events.k8s.io/v1: the older events of core/v1 are not served."""

    empty: ClassVar[Obj] = {
        "eventTime": None,
        "regarding": {},
        "deprecatedSource": {},
        "deprecatedFirstTimestamp": None,
        "deprecatedLastTimestamp": None,
    }
    create_on_update = True
    cached = False
    fields: ClassVar[Mapping[str, str]] = selectable(
        *COMMON, "reportingController", *(f"regarding.{one}" for one in OBJECT)
    )

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        if found := _namespace_errors(obj, obj.get("regarding") or {}):
            return found
        needed = ("eventTime", "reportingController", "reportingInstance", "action", "reason")
        found = [required(one) for one in needed if not obj.get(one)] + _series_errors(obj)
        if problem := qualified_name_problem(controller := obj.get("reportingController", "")):
            found.append(invalid("reportingController", controller, problem))
        if obj.get("type") not in {"Normal", "Warning"}:
            found.append(invalid("type", "", f"has invalid value: {obj.get('type', '')}"))
        if len(obj.get("note") or "") > 1024:
            found.append(invalid("message", "", "can have at most 1024 characters"))
        return found + [
            invalid(field, "", "needs to be unset") for name, field in OLDER.items() if obj.get(name)
        ]

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        found = changed(obj, old, (*FIXED, "eventTime"))
        return _series_errors(obj) + [one._replace(field=NAMED.get(one.field, one.field)) for one in found]


def _namespace_errors(obj: Obj, about: Obj) -> list[FieldError]:
    given, own = about.get("namespace", ""), obj["metadata"].get("namespace", "")
    if given == own or (given == "" and own == "default"):
        return []
    return [invalid("involvedObject.namespace", given, "does not match event.namespace")]


def _series_errors(obj: Obj) -> list[FieldError]:
    series, found = obj.get("series"), []
    if series is not None:
        if series.get("count", 0) < 2:
            found.append(invalid("series.count", "", "should be at least 2"))
        if not series.get("lastObservedTime"):
            found.append(required("series.lastObservedTime"))
    return found


DIRECTIONS = (("ingress", "from"), ("egress", "to"))


class NetworkPolicies(Strategy):
    """Defaulted and checked as the server does."""

    empty: ClassVar[Obj] = {"spec": {"podSelector": {}}}
    generations = True

    def defaults(self, obj: Obj) -> None:
        spec = obj["spec"]
        spec.setdefault("podSelector", {})
        for direction, _ in DIRECTIONS:
            for rule in spec.get(direction) or ():
                for port in rule.get("ports") or ():
                    port.setdefault("protocol", "TCP")
        if not spec.get("policyTypes"):
            spec["policyTypes"] = ["Ingress", *(["Egress"] if spec.get("egress") else [])]

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        spec = obj["spec"]
        found = selector_errors(spec.get("podSelector"), "spec.podSelector")
        for direction, peers in DIRECTIONS:
            for number, rule in enumerate(spec.get(direction) or ()):
                at = f"spec.{direction}[{number}]"
                for n, port in enumerate(rule.get("ports") or ()):
                    found += _port_errors(port, f"{at}.ports[{n}]")
                for n, peer in enumerate(rule.get(peers) or ()):
                    found += _peer_errors(peer, f"{at}.{peers}[{n}]")
        types = spec.get("policyTypes") or []
        if len(types) > 2:
            return [*found, invalid("spec.policyTypes", types, "may not specify more than two policyTypes")]
        return found + [
            unsupported(f"spec.policyTypes[{number}]", one, ["Ingress", "Egress"])
            for number, one in enumerate(types)
            if one not in {"Ingress", "Egress"}
        ]


def _port_errors(port: Obj, at: str) -> Iterator[FieldError]:
    if port.get("protocol") not in PROTOCOLS:
        yield unsupported(f"{at}.protocol", port.get("protocol"), PROTOCOLS)
    number, last = port.get("port"), port.get("endPort")
    check = port_name_problem if isinstance(number, str) else port_problem
    if number is not None and (problem := check(number)):
        yield invalid(f"{at}.port", number, problem)
    if last is None:
        return
    if not isinstance(number, int):
        yield invalid(f"{at}.endPort", last, "may not be specified when `port` is not a number")
    elif last < number:
        yield invalid(f"{at}.endPort", number, "must be greater than or equal to `port`")
    elif problem := port_problem(last):
        yield invalid(f"{at}.endPort", last, problem)


def _peer_errors(peer: Obj, at: str) -> Iterator[FieldError]:
    selectors = [name for name in ("podSelector", "namespaceSelector") if name in peer]
    for name in selectors:
        yield from selector_errors(peer[name], f"{at}.{name}")
    if (block := peer.get("ipBlock")) is None:
        if not selectors:
            yield required(at, "must specify a peer")
    elif selectors:
        yield forbidden(at, "may not specify both ipBlock and another peer")
    else:
        yield from _block_errors(block, f"{at}.ipBlock")


def _block_errors(block: Obj, at: str) -> Iterator[FieldError]:
    cidr = block.get("cidr", "")
    if not cidr:
        yield required(f"{at}.cidr")
    elif problem := cidr_problem(cidr):
        yield invalid(f"{at}.cidr", cidr, problem)
    else:
        around = ipaddress.ip_network(cidr)
        for number, one in enumerate(block.get("except") or ()):
            inside: Any = None if cidr_problem(one, strict=False) else ipaddress.ip_network(one, strict=False)
            if (
                inside is None
                or inside.version != around.version
                or inside == around
                or not inside.subnet_of(around)
            ):
                yield invalid(f"{at}.except[{number}]", one, "must be a strict subset of `cidr`")


RBAC = "rbac.authorization.k8s.io"
STRATEGIES: dict[Resource, Strategy] = {
    Resource("", "pods"): Pods(),
    Resource("", "nodes"): Nodes(),
    Resource("", "namespaces"): Namespaces(),
    Resource("", "services"): Services(),
    Resource("", "configmaps"): ConfigMaps(),
    Resource("", "secrets"): Secrets(),
    Resource("", "serviceaccounts"): ServiceAccounts(),
    Resource("", "endpoints"): Endpoints(),
    Resource("events.k8s.io", "events"): Events(),
    Resource("discovery.k8s.io", "endpointslices"): EndpointSlices(),
    Resource("coordination.k8s.io", "leases"): Leases(),
    Resource("networking.k8s.io", "networkpolicies"): NetworkPolicies(),
    **{
        Resource(RBAC, one): Roles()
        for one in ("roles", "clusterroles", "rolebindings", "clusterrolebindings")
    },
    CRDS: DefinitionStrategy(),
}
