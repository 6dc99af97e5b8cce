"""The node's own addresses, devices and routes: options that are not served yet.

Needs: nothing.   Gives: UnservedNode.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedNode(UnservedSettings, frozen=True):
    """The node's own addresses, devices and routes."""

    enable_unreachable_routes: bool = False
    """Addresses that pods have left are not made unreachable yet."""

    route_metric: int = 0
    """The routes to pods have the kernel's usual metric."""

    enable_runtime_device_detection: bool = True
    """Devices that come or change while the agent runs are always noticed."""

    enable_pmtu_discovery: bool = False
    """Pods get no message yet about packets that are too large for the path."""

    install_uplink_routes_for_delegated_ipam: bool = False
    """Addresses of other IPAM plugins get no routes of ours."""

    egress_multi_home_ip_rule_compat: bool = False
    """No rules for several interfaces of a cloud are made."""
