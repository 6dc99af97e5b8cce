"""Whether and for whom LB-IPAM works.

Needs: nothing.   Gives: LBIPAMSettings.
Source: Cilium 1.17, options of the operator.
"""

from __future__ import annotations

from collections.abc import Iterator

from lifecycle import Settings, refuse

L2_CLASS = "io.cilium/l2-announcer"
NODE_CLASS = "io.cilium/node"


class LBIPAMSettings(Settings, frozen=True):
    """Who gives addresses to services of type LoadBalancer."""

    enable_lb_ipam: bool = True
    """Give addresses of CiliumLoadBalancerIPPools to services of type LoadBalancer."""

    default_lb_service_ipam: str = "lbipam"
    """Who gives addresses to services without a loadBalancerClass: lbipam, nodeipam (with
    enable-node-ipam), or none."""

    enable_node_ipam: bool = False
    """Services of class io.cilium/node get the addresses of nodes."""

    enable_l2_announcements: bool = False
    """Services of class io.cilium/l2-announcer get addresses, too."""

    k8s_service_proxy_name: str = ""
    """Serve only services whose label service.kubernetes.io/service-proxy-name has this value; unset: only
    those without the label."""

    bpf_lb_proto_diff: bool = True
    """Whether agents tell protocols apart; if not, services that share an address have different port
    numbers."""

    def validate(self) -> None:
        """Refuse what cannot be; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if self.default_lb_service_ipam not in {"lbipam", "nodeipam", "none"}:
            yield f"default-lb-service-ipam={self.default_lb_service_ipam}: expected lbipam, nodeipam or none"
        elif self.default_lb_service_ipam == "nodeipam" and not self.enable_node_ipam:
            yield "default-lb-service-ipam=nodeipam: expected enable-node-ipam=true, too"

    @property
    def classes(self) -> frozenset[str]:
        """The classes of services that get addresses of pools; an empty text stands for none."""
        found = {""} if self.default_lb_service_ipam == "lbipam" else set()
        return frozenset(found | ({L2_CLASS} if self.enable_l2_announcements else set()))

    @property
    def node_classes(self) -> frozenset[str]:
        """The classes of services that get addresses of nodes; an empty text stands for none."""
        if not self.enable_node_ipam:
            return frozenset()
        return frozenset({NODE_CLASS, *([""] if self.default_lb_service_ipam == "nodeipam" else [])})
