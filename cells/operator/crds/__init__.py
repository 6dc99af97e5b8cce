"""Registers the CustomResourceDefinitions when leadership starts, and upgrades them by schema version.

Agents wait for the definitions; the leader's other cells start once all are established.
"""

from __future__ import annotations

import re
import time
from typing import Any, Final

import anyio
from msgspec import field

from cells.kubernetes.client.errors import ConflictError, KubernetesError, NotFoundError
from cells.kubernetes.objects.kind import Condition, Kind, Object
from cells.kvstore.store import KVStore
from cells.operator.api_server import ClusterAPI
from cells.operator.crds.definitions import SCHEMA_VERSION, VERSION_LABEL, Definition, definitions
from cells.operator.options import ServedCluster
from lifecycle import HiveError, Hook, Lifecycle, Logger, Settings, after, config, invoke, module, provide

__all__ = [
    "SCHEMA_VERSION",
    "VERSION_LABEL",
    "CRDSettings",
    "CustomResources",
    "Definition",
    "cell",
    "definitions",
]


# Creates CustomResourceDefinitions, and replaces those of an older schema version.
#
# Source: Cilium 1.17, pkg/k8s/apis/crdhelpers: the version label is compared, not the schema. Definitions of
# an
#         equal or newer version are unchanged, so an older operator does not downgrade them.

PATIENCE: Final = 60.0
"""Timeout in seconds until the API server has established a definition."""
PAUSES: Final = (0.05, 0.5)
"""Backoff of the polling in seconds: initial and maximum."""


class CRDSettings(Settings, frozen=True):
    """Settings of the custom-resources cell."""

    skip_crd_creation: bool = False
    """Do not create or update CustomResourceDefinitions."""

    enable_local_redirect_policy: bool = False
    """Register CiliumLocalRedirectPolicy."""

    enable_ipv4_egress_gateway: bool = False
    """Register CiliumEgressGatewayPolicy."""

    disable_endpoint_crd: bool = False
    """Do not register CiliumEndpoints, and delete existing ones: agents publish their pods only in the
    kvstore. Requires a kvstore; without one it is ignored, with a warning.
    """

    enable_cilium_endpoint_slice: bool = False
    """Batch CiliumEndpoints in CiliumEndpointSlices, which agents with the same setting read."""

    enable_bgp_control_plane: bool = False
    """Register the custom resources of BGP, and create a CiliumBGPNodeConfig for each node that a
    CiliumBGPClusterConfig selects.
    """


class DefinitionStatus(Object, frozen=True, gc=False):
    """The fields of a CustomResourceDefinition that are read."""

    spec: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def conditions(self) -> dict[str, Condition]:
        """The conditions by type."""
        listed: list[dict[str, str]] = self.status.get("conditions") or []
        return {
            one["type"]: Condition(
                one["type"], one.get("status", ""), one.get("reason", ""), one.get("message", "")
            )
            for one in listed
        }


DEFINITIONS: Final = Kind(
    DefinitionStatus,
    "apiextensions.k8s.io/v1",
    "customresourcedefinitions",
    kind="CustomResourceDefinition",
    namespaced=False,
)


def version_of(text: str | None) -> tuple[int, int, int] | None:
    """Parse a semantic version into numbers; None if it is invalid."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)(?:[-+].*)?", text or "")
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def outdated(spec: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether the cluster's definition is to be replaced."""
    versions = spec.get("versions") or [{}]
    if not (versions[0].get("schema") or {}).get("openAPIV3Schema"):
        return True
    theirs, ours = version_of(labels.get(VERSION_LABEL)), version_of(SCHEMA_VERSION)
    return theirs is None or (ours is not None and theirs < ours)


class CustomResources:
    """Registers the definitions; cells that depend on it start once all are established."""

    endpoints: bool
    """Whether there are CiliumEndpoints; without them nodes publish their pods in the kvstore alone."""
    endpoint_slices: bool
    """Whether there are CiliumEndpointSlices."""
    bgp: bool
    """Whether there are custom resources of BGP."""

    def __init__(
        self,
        settings: CRDSettings,
        cluster: ServedCluster,
        store: KVStore,
        server: ClusterAPI,
        *,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._server = server
        self._log = log
        self.endpoints = not (settings.disable_endpoint_crd and store.enabled)
        """Whether CiliumEndpoints are used; without them agents publish their pods in the kvstore."""
        self.endpoint_slices = settings.enable_cilium_endpoint_slice
        """Whether CiliumEndpointSlices are used."""
        self.bgp = settings.enable_bgp_control_plane
        """Whether the custom resources of BGP are registered."""
        if settings.disable_endpoint_crd and self.endpoints:
            log.warning("disable-endpoint-crd needs a kvstore: using false instead")
        if not self.endpoints and cluster.identity_mode != "kvstore":
            raise HiveError(
                "disable-endpoint-crd=true: expected identity-allocation-mode=kvstore, not"
                f" {cluster.identity_mode}: CiliumEndpoints say which CiliumIdentities are used"
            )
        lifecycle.append(Hook("register custom resources", self._register, start_timeout=3 * PATIENCE))

    @property
    def wanted(self) -> list[Definition]:
        """The definitions to register."""
        return definitions(
            endpoints=self.endpoints,
            endpoint_slices=self.endpoint_slices,
            local_redirects=self._settings.enable_local_redirect_policy,
            egress_gateways=self._settings.enable_ipv4_egress_gateway,
            bgp=self.bgp,
        )

    async def _register(self) -> None:
        if self._settings.skip_crd_creation:
            self._log.info("custom resource definitions are not created", setting="skip-crd-creation")
            return
        try:
            async with anyio.create_task_group() as group:
                for one in self.wanted:
                    group.start_soon(self._ensure, one)
        except* (KubernetesError, HiveError) as errors:
            raise HiveError(f"unable to create CRDs: {errors.exceptions[0]}") from errors

    async def _ensure(self, wanted: Definition) -> None:
        client = self._server.client
        try:
            found = await client.get(DEFINITIONS, wanted.name)
        except NotFoundError:
            try:
                await client.create(DEFINITIONS, wanted.body)
            except ConflictError:
                self._log.debug("another writer was faster", definition=wanted.name)
        else:
            if outdated(found.spec, found.labels):
                await self._replace(wanted)
        await self._established(wanted)
        self._log.info("custom resource definition is up to date", definition=wanted.name)

    async def _replace(self, wanted: Definition) -> None:
        """Replace labels and spec of a definition; its annotations are unchanged."""

        def ours(live: dict[str, Any]) -> dict[str, Any] | None:
            metadata = live["metadata"]
            if not outdated(live["spec"], metadata.get("labels") or {}):
                return None
            labels = wanted.body["metadata"]["labels"]
            spec = {**wanted.body["spec"], "preserveUnknownFields": False}
            if "conversion" in live["spec"]:
                spec["conversion"] = {"strategy": "None"}
            return {**live, "metadata": {**metadata, "labels": labels}, "spec": spec}

        await self._server.client.update(DEFINITIONS, wanted.name, ours)
        self._log.info("custom resource definition replaced", definition=wanted.name, version=SCHEMA_VERSION)

    async def _established(self, wanted: Definition) -> None:
        """Wait until the API server serves a definition. Raises HiveError if it cannot."""
        deadline = time.monotonic() + PATIENCE
        pause, longest = PAUSES
        while True:
            conditions = (await self._server.client.get(DEFINITIONS, wanted.name)).conditions
            accepted = conditions.get("NamesAccepted")
            if accepted is not None and accepted.status == "False":
                raise HiveError(f"{wanted.name}: {accepted.reason}: {accepted.message}")
            established = conditions.get("Established")
            if established is not None and established.status == "True":
                return
            if time.monotonic() > deadline:
                raise HiveError(f"{wanted.name}: not established within {PATIENCE:g} s")
            await anyio.sleep(pause)
            pause = min(2 * pause, longest)


@after(CustomResources)
def register() -> None:
    """Register the definitions."""


cell = module(
    "custom-resources",
    "Definitions of the custom resources",
    config(CRDSettings),
    provide(CustomResources),
    invoke(register),
)
