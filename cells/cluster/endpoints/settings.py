"""How nodes learn of each other's pods.

Needs: KVStoreSettings.   Gives: ClusterEndpointSettings, EndpointObjects, endpoint_objects().
Source: Cilium 1.17: disable-endpoint-crd counts with a kvstore only, and is put back to false without one.
"""

import msgspec

from cells.cluster.kvstore import KVStoreSettings
from lifecycle import Logger, Settings


class ClusterEndpointSettings(Settings, frozen=True):
    """How nodes learn of each other's pods."""

    enable_cilium_endpoint_slice: bool = False
    """Read other nodes' pods from CiliumEndpointSlices, which the operator writes, not CiliumEndpoints."""

    disable_endpoint_crd: bool = False
    """Publish pods in the kvstore only: CiliumEndpoints are neither written nor used. Needs a kvstore;
    without one it is reset to false, with a warning."""


class EndpointObjects(msgspec.Struct, frozen=True):
    """Whether CiliumEndpoints are written and used."""

    served: bool = True


def endpoint_objects(
    settings: ClusterEndpointSettings, store: KVStoreSettings | None, log: Logger
) -> EndpointObjects:
    """What the settings say."""
    if not settings.disable_endpoint_crd:
        return EndpointObjects()
    if store is None or not store.enabled:
        log.warning("disable-endpoint-crd needs a kvstore: it is put back to false")
        return EndpointObjects()
    return EndpointObjects(served=False)
