"""Proxies of layer 7: options that are not served yet.

Needs: nothing.   Gives: UnservedProxy.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedProxy(UnservedSettings, frozen=True):
    """Proxies of layer 7."""

    enable_envoy_config: bool = False
    """No Envoy is configured yet."""

    enable_bpf_tproxy: bool = False
    """No proxy is started yet."""

    enable_ingress_controller: bool = False
    """No proxy is started yet."""

    enable_gateway_api: bool = False
    """No proxy is started yet."""
