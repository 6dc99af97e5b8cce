"""Services and their load balancing: options that are not served yet.

Needs: nothing.   Gives: UnservedServices.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedServices(UnservedSettings, frozen=True):
    """Services and their load balancing."""

    kube_proxy_replacement: str = "false"
    """Of services, only those between pods are served: kube-proxy goes on."""

    enable_nat46x64_gateway: bool = False
    """Translation between IPv4 and IPv6."""

    enable_node_port: bool = False
    """Services on the node's ports."""

    enable_host_port: bool = False
    """Pods on the node's ports; chain the portmap plugin for them (cni-chaining-mode=portmap)."""

    enable_external_ips: bool = False
    """Services on addresses from outside."""

    enable_local_redirect_policy: bool = False
    """Redirection of services to pods of the node."""
