"""Options of Cilium's operator for what is not built: accepted where they ask for what this one does anyway.

Needs: nothing.   Gives: UnservedOperator.
Source: Cilium 1.17, options of cilium-operator-generic.
"""

from __future__ import annotations

from cells.unserved import UnservedSettings


class UnservedOperator(UnservedSettings, frozen=True):
    """Parts of Cilium's operator that are not built."""

    enable_k8s: bool = True
    """The operator works for a cluster: it has nothing to do without an API server."""

    enable_bgp_control_plane: bool = False
    """Routes are not announced yet, so no CiliumBGPNodeConfigs are made."""

    enable_envoy_config: bool = False
    """CiliumEnvoyConfigs are not served yet."""

    enable_ingress_controller: bool = False
    """Ingresses are not served yet."""

    enable_gateway_api: bool = False
    """The Gateway API is not served yet."""

    loadbalancer_l7: str = ""
    """Services are not balanced by HTTP requests yet."""

    enable_policy_secrets_sync: bool = False
    """Secrets of policies are not copied."""

    mesh_auth_mutual_enabled: bool = False
    """Pods do not authenticate each other."""

    clustermesh_config: str = ""
    """Several clusters are not connected yet."""

    clustermesh_enable_endpoint_sync: bool = False
    """Several clusters are not connected yet."""

    clustermesh_enable_mcs_api: bool = False
    """Several clusters are not connected yet."""

    max_connected_clusters: int = 255
    """Numbers of clusters have eight bits."""

    operator_manages_identities: bool = False
    """Agents make identities, the operator deletes them."""

    identity_management_mode: str = "agent"
    """Agents make identities, the operator deletes them."""

    operator_pprof: bool = False
    """Profiles are not served; `hive inspect --hive operator --timeline` shows the start."""
