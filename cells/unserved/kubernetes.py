"""The Kubernetes API: options that are not served yet.

Needs: nothing.   Gives: UnservedKubernetes.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedKubernetes(UnservedSettings, frozen=True):
    """The Kubernetes API."""

    k8s_require_ipv4_pod_cidr: bool = False
    """The node's range is not taken from its object yet: see ipv4-range."""

    k8s_require_ipv6_pod_cidr: bool = False
    """The node's range is not taken from its object yet: see ipv6-range."""

    annotate_k8s_node: bool = False
    """The node's object is not written yet."""
