"""What the API server shall check beyond what a struct says: formats, choices, defaults.

Needs: nothing.   Gives: refine().
Why:   a struct is checked whenever an object is read; what the server has checked need not be checked again.

A path is made of names with dots between; ``[]`` are the items of a list, ``{}`` the values of a map.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from cells.operator.crds.schema import FLAG, Schema, obj

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
    """The schema with what is said of its kind here. Raises KeyError for a path that leads nowhere."""
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
