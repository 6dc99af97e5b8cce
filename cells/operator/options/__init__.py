"""What every part of the operator is told: families, modes, names of the cluster.

Source: reads the settings.   Needs: nothing.   Gives: OperatorOptions; every other option of Cilium's is
refused by name where it asks for what is not there, or told to change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from cells.operator.options.unserved import UnservedOperator
from cells.operator.options.without_effect import WithoutEffect, tell
from lifecycle import Settings, config, invoke, module, refuse

__all__ = ["OperatorOptions", "UnservedOperator", "WithoutEffect", "cell"]

SERVED: Final = {"cluster-pool", "multi-pool", "kubernetes", "delegated-plugin"}
"""Modes of IPAM in which this operator has something to do, or rightly nothing."""
MODES: Final = ("crd", "kvstore", "doublewrite-readkvstore", "doublewrite-readcrd")
"""Of agreeing upon identities."""
CLUSTER_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?")


class OperatorOptions(Settings, frozen=True):
    """Options of the whole operator."""

    debug: bool = False
    """Log what is done in detail."""

    enable_ipv4: bool = True
    """Pods have IPv4 addresses."""

    enable_ipv6: bool = False
    """Pods have IPv6 addresses."""

    ipam: str = "cluster-pool"
    """Who gives nodes their ranges: this operator (cluster-pool, multi-pool), or kubernetes, or a
    delegated-plugin."""

    identity_allocation_mode: str = "crd"
    """Where identities are kept: kvstore, where one is set, or crd; without one it is read as crd. With
    doublewrite-readkvstore or doublewrite-readcrd both are looked after, and compared in metrics."""

    cluster_name: str = "default"
    """Name of the cluster."""

    cluster_id: int = 0
    """Number of the cluster in a mesh, 0 to 255; with a number it needs a name."""

    k8s_namespace: str = ""
    """Namespace the operator runs in, and where its lease is; default when empty."""

    disable_endpoint_crd: bool = False
    """Nodes tell of their pods in the kvstore alone: no CiliumEndpoints are registered, and those there are
    go. Only with a kvstore; without one it is put back to false, with a warning."""

    enable_cilium_endpoint_slice: bool = False
    """Batch CiliumEndpoints in CiliumEndpointSlices, which agents with the same setting read."""

    @property
    def namespace(self) -> str:
        """Where the operator is."""
        return self.k8s_namespace or "default"

    @property
    def compares_identities(self) -> bool:
        """Whether identities stand in both stores."""
        return self.identity_allocation_mode.startswith("doublewrite")

    def validate(self) -> None:
        """Refuse what cannot be, all at once; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if self.ipam not in SERVED:
            yield f"ipam={self.ipam}: expected cluster-pool, multi-pool, kubernetes or delegated-plugin"
        if self.identity_allocation_mode not in MODES:
            mode = self.identity_allocation_mode
            yield f"identity-allocation-mode={mode}: expected one of {', '.join(MODES)}"
        if not CLUSTER_NAME.fullmatch(self.cluster_name):
            yield (
                f"cluster-name={self.cluster_name}: expected at most 32 lower case letters, digits and '-',"
                " with a letter or digit at either end"
            )
        if not 0 <= self.cluster_id <= 255:
            yield f"cluster-id={self.cluster_id}: expected 0 to 255"
        elif self.cluster_id and self.cluster_name == "default":
            yield f"cluster-id={self.cluster_id}: expected a cluster-name of its own, not default"


cell = module(
    "options",
    "Options of the whole operator",
    config(OperatorOptions, UnservedOperator, WithoutEffect),
    invoke(tell),
)
