"""The CustomResourceDefinitions, and the settings on which each depends.

Source: Cilium 1.17, pkg/k8s/apis/cilium.io: names, scopes, columns, versions; apiextensions.k8s.io/v1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from cells.kubernetes.objects.cilium_bgp import CILIUM_BGP_KINDS
from cells.kubernetes.objects.cilium_endpoint import (
    CILIUM_ENDPOINT_SLICES,
    CILIUM_ENDPOINTS,
    CILIUM_IDENTITIES,
)
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.cilium_policy import (
    CILIUM_CIDR_GROUPS,
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_EGRESS_GATEWAYS,
    CILIUM_LOCAL_REDIRECT_POLICIES,
    CILIUM_NETWORK_POLICIES,
)
from cells.kubernetes.objects.cilium_pools import (
    CILIUM_L2_ANNOUNCEMENTS,
    CILIUM_LOAD_BALANCER_IP_POOLS,
    CILIUM_NODE_CONFIGS,
    CILIUM_POD_IP_POOLS,
)
from cells.kubernetes.objects.kind import Kind, LabelSelector
from cells.operator.crds.policies import POLICY
from cells.operator.crds.schema import (
    CIDR4,
    NUMBER,
    PLAIN_SELECTOR,
    TEXT,
    Schema,
    Shapes,
    immutable,
    matched,
    obj,
    refine,
)

SCHEMA_VERSION: Final = "1.30.1"
"""Version of all schemas. Raise it with every change, or clusters keep the old schemas."""
VERSION_LABEL: Final = "io.cilium.k8s.crd.schema.version"
GROUP: Final = "cilium.io"

OPEN: Final = frozenset(
    {
        "CiliumNodeSpec",  # eni, azure, alibaba-cloud
        "IPAMSpec",  # ipv6-pool, static-ip-tags
        "CiliumNodeStatus",  # eni, azure, alibaba-cloud
        "IPAMStatus",  # ipv6-used, release-ipv6s, assigned-static-ip
        "CiliumEndpointStatus",  # controllers, health, log
        "ExternalIdentifiers",  # those of Docker
        "Enforcement",  # adding, allowed, denied, removing
    }
)
"""Structs with fewer fields than Cilium's object: their schemas preserve unknown fields."""

_CIDR6: Final = r"^[0-9A-Fa-f:.]+(%[^/]+)?/([0-9]|[1-9][0-9]|1[01][0-9]|12[0-8])$"


class Definition(NamedTuple):
    """A CustomResourceDefinition."""

    kind: str
    plural: str
    namespaced: bool
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name: ``ciliumnodes.cilium.io``."""
        return f"{self.plural}.{GROUP}"


def definitions(
    *, endpoints: bool, endpoint_slices: bool, local_redirects: bool, egress_gateways: bool, bgp: bool
) -> list[Definition]:
    """Return the definitions for these features; CiliumEndpointSlices require CiliumEndpoints."""
    kinds: list[Kind[Any]] = [
        CILIUM_NODES,
        CILIUM_IDENTITIES,
        CILIUM_NETWORK_POLICIES,
        CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
        CILIUM_CIDR_GROUPS,
        CILIUM_POD_IP_POOLS,
        CILIUM_LOAD_BALANCER_IP_POOLS,
        CILIUM_L2_ANNOUNCEMENTS,
    ]
    kinds += [CILIUM_ENDPOINTS] * endpoints
    kinds += [CILIUM_ENDPOINT_SLICES] * (endpoints and endpoint_slices)
    kinds += [CILIUM_LOCAL_REDIRECT_POLICIES] * local_redirects
    kinds += [CILIUM_EGRESS_GATEWAYS] * egress_gateways
    kinds += [*CILIUM_BGP_KINDS] * bgp
    return [*(_definition(kind) for kind in kinds), _node_configs(), _external_workloads()]


def schema_of(kind: Kind[Any]) -> Schema:
    """Return the schema of a kind, of its struct by default."""
    if kind in {CILIUM_NETWORK_POLICIES, CILIUM_CLUSTERWIDE_NETWORK_POLICIES}:
        return _complete(POLICY)
    special = {LabelSelector: PLAIN_SELECTOR} if kind is CILIUM_NODE_CONFIGS else {}
    found = refine(kind.plural, Shapes(OPEN, special).of(kind.struct))
    if kind is CILIUM_LOCAL_REDIRECT_POLICIES:
        properties = found["properties"]["spec"]["properties"]
        for name in ("redirectBackend", "redirectFrontend", "skipRedirectFromBackend"):
            properties[name] = immutable(properties[name], name)
    return _complete(found)


def _complete(schema: Schema) -> Schema:
    """Add the properties that every object has."""
    return {**schema, "properties": {"apiVersion": TEXT, "kind": TEXT, **schema["properties"]}}


def _version(kind: Kind[Any], schema: Schema, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": kind.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        **more,
    }
    if kind.status:
        found["subresources"] = {"status": {}}
    if kind.columns:
        found["additionalPrinterColumns"] = list(_columns(kind))
    return found


def _columns(kind: Kind[Any]) -> Iterator[dict[str, Any]]:
    for one in kind.columns:
        column: dict[str, Any] = {"name": one.name, "type": one.type, "jsonPath": one.path}
        if one.priority:
            column["priority"] = one.priority
        yield column


def _definition(kind: Kind[Any]) -> Definition:
    return _made(
        kind.kind,
        kind.plural,
        [_version(kind, schema_of(kind))],
        namespaced=kind.namespaced,
        short=kind.short,
        categories=kind.categories,
    )


def _made(
    kind: str,
    plural: str,
    versions: list[dict[str, Any]],
    *,
    namespaced: bool,
    short: tuple[str, ...] = (),
    categories: tuple[str, ...] = (),
) -> Definition:
    names: dict[str, Any] = {"kind": kind, "plural": plural, "singular": kind.lower()}
    if short:
        names["shortNames"] = list(short)
    if categories:
        names["categories"] = list(categories)
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}", "labels": {VERSION_LABEL: SCHEMA_VERSION}},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced" if namespaced else "Cluster",
            "versions": versions,
        },
    }
    return Definition(kind, plural, namespaced, body)


def _node_configs() -> Definition:
    """CiliumNodeConfig: two versions with one schema."""
    kind = CILIUM_NODE_CONFIGS
    schema = schema_of(kind)
    old = {
        "name": "v2alpha1",
        "served": True,
        "storage": False,
        "deprecated": True,
        "deprecationWarning": (
            "cilium.io/v2alpha1 CiliumNodeConfig will be deprecated in cilium v1.16; use cilium.io/v2"
            " CiliumNodeConfig"
        ),
        "schema": {"openAPIV3Schema": schema},
    }
    versions = [_version(kind, schema), old]
    return _made(kind.kind, kind.plural, versions, namespaced=True, categories=kind.categories)


def _external_workloads() -> Definition:
    """CiliumExternalWorkload, which only the cluster mesh reads."""
    schema = _complete(
        obj(
            "metadata",
            metadata={"type": "object"},
            spec=obj(**{"ipv4-alloc-cidr": matched(CIDR4), "ipv6-alloc-cidr": matched(_CIDR6)}),
            status=obj(id={**NUMBER, "format": "int64"}, ip=TEXT),
        )
    )
    version = {
        "name": "v2",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": "Cilium ID", "type": "integer", "jsonPath": ".status.id"},
            {"name": "IP", "type": "string", "jsonPath": ".status.ip"},
        ],
    }
    return _made(
        "CiliumExternalWorkload",
        "ciliumexternalworkloads",
        [version],
        namespaced=False,
        short=("cew",),
        categories=("cilium",),
    )
