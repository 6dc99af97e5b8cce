"""Builds structural schemas from the structs of objects, and helpers for schemas without a struct.

Source: apiextensions.k8s.io/v1 JSONSchemaProps; "Specifying a structural schema" of the Kubernetes
documentation: every level has a type, unknown fields are pruned unless a level preserves them.

Some structs have fewer fields than Cilium's object. Their schemas preserve unknown fields, which the API
server would otherwise drop for all clients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import inspect

from cells.kubernetes.objects.kind import Condition, LabelSelector, Meta

Schema = dict[str, Any]

KEEP: Final = "x-kubernetes-preserve-unknown-fields"
TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
NUMBER: Final[Schema] = {"type": "integer"}
CIDR: Final[Schema] = {"type": "string", "format": "cidr"}
TIME: Final[Schema] = {"type": "string", "format": "date-time"}
LABEL_VALUE: Final = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"


def obj(required: str = "", /, **properties: Schema) -> Schema:
    """Return an object's schema; required properties are names separated by blanks."""
    found: Schema = {"type": "object", "properties": properties}
    return {**found, "required": required.split()} if required else found


def exactly_one(names: str, of: Schema) -> Schema:
    """Return an object with exactly one of these properties; names are separated by blanks."""
    return {**of, "oneOf": [{"required": [one], "properties": {one: {}}} for one in names.split()]}


def items(of: Schema, **limits: int) -> Schema:
    """Return a list's schema."""
    return {"type": "array", "items": of, **limits}


def texts(of: Schema = TEXT) -> Schema:
    """Return the schema of a map from strings to these values."""
    return {"type": "object", "additionalProperties": of}


def matched(pattern: str, **limits: int) -> Schema:
    """Return the schema of a string that matches a pattern."""
    return {"type": "string", "pattern": pattern, **limits}


def string_enum(*choices: str) -> Schema:
    """Return the schema of a string enumeration."""
    return {"type": "string", "enum": list(choices)}


def within(least: int, most: int, form: str = "") -> Schema:
    """Return the schema of an integer in a range."""
    return {"type": "integer", "minimum": least, "maximum": most, **({"format": form} if form else {})}


def immutable(of: Schema, name: str) -> Schema:
    """Return a schema with values that cannot be changed after creation."""
    rule = {"rule": "self == oldSelf", "message": f"{name} is immutable"}
    return {**of, "x-kubernetes-validations": [rule]}


def _atomic(of: Schema) -> Schema:
    return {**items(of), "x-kubernetes-list-type": "atomic"}


def _selector(operator: Schema, value: Schema) -> Schema:
    expression = obj("key operator", key=TEXT, operator=operator, values=_atomic(TEXT))
    return obj(matchExpressions=_atomic(expression), matchLabels=texts(value))


SELECTOR: Final = _selector(
    string_enum("In", "NotIn", "Exists", "DoesNotExist"), matched(LABEL_VALUE, maxLength=63)
)
"""Cilium's label selector: keys may have a label source as a prefix."""
PLAIN_SELECTOR: Final = _selector(TEXT, TEXT)
"""metav1.LabelSelector."""

_QUALIFIED: Final = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
CONDITIONS: Final[Schema] = {
    **items(
        obj(
            "lastTransitionTime message reason status type",
            lastTransitionTime=TIME,
            message={"type": "string", "maxLength": 32768},
            observedGeneration={"type": "integer", "format": "int64", "minimum": 0},
            reason=matched(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", minLength=1, maxLength=1024),
            status=string_enum("True", "False", "Unknown"),
            type=matched(_QUALIFIED, maxLength=316),
        )
    ),
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}
"""A list of metav1.Condition with one entry per type."""

_LIMITS: Final = {
    "ge": "minimum",
    "le": "maximum",
    "pattern": "pattern",
    "min_length": "minLength",
    "max_length": "maxLength",
}
_LIST_LIMITS: Final = {"min_length": "minItems", "max_length": "maxItems"}


class Shapes:
    """Converts structs to schemas; those of structs in ``open_`` preserve unknown fields."""

    def __init__(
        self, open_: frozenset[str] = frozenset(), special: Mapping[type[Any], Schema] | None = None
    ) -> None:
        self._open = open_
        self._special: dict[type[Any], Schema] = {
            LabelSelector: SELECTOR,
            **(special or {}),
        }

    def of(self, struct: type[msgspec.Struct]) -> Schema:
        """Return the schema of a struct."""
        return self._type(inspect.type_info(struct))

    def _type(self, found: inspect.Type) -> Schema:
        if isinstance(found, inspect.Metadata):
            return {**self._type(found.type), **(found.extra_json_schema or {})}
        if isinstance(found, inspect.UnionType):
            (one,) = (each for each in found.types if not isinstance(each, inspect.NoneType))
            return self._type(one)
        if isinstance(found, inspect.StructType):
            return self._struct(found)
        if isinstance(found, inspect.VarTupleType):
            return self._list(found)
        if isinstance(found, inspect.DictType):
            return texts(self._type(found.value_type))
        return _plain(found)

    def _list(self, found: inspect.VarTupleType) -> Schema:
        if isinstance(found.item_type, inspect.StructType) and found.item_type.cls is Condition:
            return CONDITIONS
        return items(self._type(found.item_type), **_limits(found, _LIST_LIMITS))

    def _struct(self, found: inspect.StructType) -> Schema:
        if found.cls in self._special:
            return self._special[found.cls]
        if issubclass(found.cls, Meta):
            return {"type": "object"}
        required = " ".join(one.encode_name for one in found.fields if one.required)
        made = obj(required, **{one.encode_name: self._type(one.type) for one in found.fields})
        return {**made, KEEP: True} if found.cls.__name__ in self._open else made


def _plain(found: inspect.Type) -> Schema:
    if isinstance(found, inspect.LiteralType):
        return {"type": "string", "enum": list(found.values)}
    for kind, name in (
        (inspect.StrType, "string"),
        (inspect.IntType, "integer"),
        (inspect.BoolType, "boolean"),
    ):
        if isinstance(found, kind):
            return {"type": name, **_limits(found, _LIMITS)}
    raise TypeError(f"{found}: no schema is known for it")


def _limits(found: inspect.Type, names: Mapping[str, str]) -> dict[str, Any]:
    values = ((key, getattr(found, name, None)) for name, key in names.items())
    return {key: value for key, value in values if value is not None}


# Checks beyond a struct's types that the API server makes: formats, enumerations, defaults.
#
# Agents decode objects into structs on every read; checks by the API server are not repeated there.
#
# A path is a list of names separated by dots; ``[]`` are the items of a list, ``{}`` the values of a map.

_INT64: Final[Schema] = {"format": "int64"}
_CIDR: Final[Schema] = {"format": "cidr"}
_ADDRESSING: Final[Schema] = {"required": ["addressing"]}
_ENFORCING: Final[Schema] = {"required": ["enforcing"]}
_RELEASE: Final[Schema] = {"enum": ["marked-for-release", "ready-for-release", "do-not-release", "released"]}
OCTET: Final = r"(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
CIDR4: Final = rf"^({OCTET}\.){{3}}{OCTET}/([0-9]|[12][0-9]|3[0-2])$"
_PORT: Final[Schema] = {
    "pattern": r"^([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
}
_PORT_NAME: Final[Schema] = {"pattern": r"^([0-9]{1,4}|([a-zA-Z0-9]-?)*[a-zA-Z](-?[a-zA-Z0-9])*)$"}
_TCP_UDP: Final[Schema] = {"enum": ["TCP", "UDP"]}


def _redirect_ports(at: str) -> dict[str, Schema]:
    return {
        f"{at}.toPorts[].name": _PORT_NAME,
        f"{at}.toPorts[].port": _PORT,
        f"{at}.toPorts[].protocol": _TCP_UDP,
    }


REFINEMENTS: Final[Mapping[str, Mapping[str, Schema]]] = {
    "ciliumnodes": {
        "": {"required": ["metadata", "spec"]},
        "spec.ipam.pools.allocated[].cidrs[]": _CIDR,
        "spec.nodeidentity": _INT64,
        "status.ipam.pod-cidrs{}.status": {"enum": ["released", "depleted", "in-use"]},
        "status.ipam.release-ips{}": _RELEASE,
    },
    "ciliumendpoints": {
        "status.id": _INT64,
        "status.identity.id": _INT64,
        "status.networking": _ADDRESSING,
        "status.policy.egress": _ENFORCING,
        "status.policy.ingress": _ENFORCING,
        "status.state": {
            "enum": [
                "creating",
                "waiting-for-identity",
                "not-ready",
                "waiting-to-regenerate",
                "regenerating",
                "restoring",
                "ready",
                "disconnecting",
                "disconnected",
                "invalid",
            ]
        },
    },
    "ciliumendpointslices": {"endpoints[].id": _INT64, "endpoints[].networking": _ADDRESSING},
    "ciliumcidrgroups": {
        "spec": {"required": ["externalCIDRs"]},
        "spec.externalCIDRs": {"minItems": 0},
        "spec.externalCIDRs[]": _CIDR,
    },
    "ciliumpodippools": {"spec.ipv4.cidrs[]": _CIDR, "spec.ipv6.cidrs[]": _CIDR},
    "ciliumloadbalancerippools": {
        "spec.blocks[].cidr": _CIDR,
        "spec.disabled": {"default": False},
    },
    "ciliumnodeconfigs": {"spec": {"required": ["defaults", "nodeSelector"]}},
    "ciliumegressgatewaypolicies": {
        "spec.destinationCIDRs[]": {"pattern": CIDR4},
        "spec.excludedCIDRs[]": {"pattern": CIDR4},
        "spec.egressGateway.egressIP": {"format": "ipv4"},
    },
    "ciliumlocalredirectpolicies": {
        "": {"properties": {"status": obj(ok=FLAG)}},
        "spec.skipRedirectFromBackend": {"default": False},
        "spec.redirectFrontend": {
            "oneOf": [
                {"required": [one], "properties": {one: {}}} for one in ("addressMatcher", "serviceMatcher")
            ]
        },
        "spec.redirectFrontend.addressMatcher.ip": {
            "pattern": r"^\s*([0-9]{1,3}(\.[0-9]{1,3}){3}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\S+)?)\s*$"
        },
        **_redirect_ports("spec.redirectBackend"),
        **_redirect_ports("spec.redirectFrontend.addressMatcher"),
        **_redirect_ports("spec.redirectFrontend.serviceMatcher"),
    },
}


def refine(plural: str, schema: Schema) -> Schema:
    """Return the schema with the additional checks of its kind. Raises KeyError for an invalid path."""
    for path, more in REFINEMENTS.get(plural, {}).items():
        schema = _at(schema, re.findall(r"[^.\[\]{}]+|\[\]|\{\}", path), more)
    return schema


def _at(schema: Schema, path: list[str], more: Schema) -> Schema:
    if not path:
        properties = {**schema.get("properties", {}), **more.get("properties", {})}
        return {**schema, **more, **({"properties": properties} if properties else {})}
    first, *rest = path
    if first in {"[]", "{}"}:
        name = "items" if first == "[]" else "additionalProperties"
        return {**schema, name: _at(schema[name], rest, more)}
    inner: dict[str, Any] = schema["properties"]
    return {**schema, "properties": {**inner, first: _at(inner[first], rest, more)}}
