"""Whether and for whom LB-IPAM works.

Needs: nothing.   Gives: LBIPAMSettings.
Source: Cilium 1.17, options of the operator.
"""

from __future__ import annotations

from collections.abc import Iterator

from lifecycle import Settings, refuse

L2_CLASS = "io.cilium/l2-announcer"


class LBIPAMSettings(Settings, frozen=True):
    """Settings of LB-IPAM."""

    enable_lb_ipam: bool = True
    """Give addresses of CiliumLoadBalancerIPPools to services of type LoadBalancer."""

    default_lb_service_ipam: str = "lbipam"
    """Who gives addresses to services without a loadBalancerClass: lbipam, or none."""

    enable_l2_announcements: bool = False
    """Services of class io.cilium/l2-announcer get addresses, too."""

    k8s_service_proxy_name: str = ""
    """Serve only services whose label service.kubernetes.io/service-proxy-name says so; unset: only those
    without it."""

    def validate(self) -> None:
        """Refuse what cannot be; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if self.default_lb_service_ipam == "nodeipam":
            yield "default-lb-service-ipam=nodeipam: not supported yet, expected lbipam or none"
        elif self.default_lb_service_ipam not in {"lbipam", "none"}:
            yield f"default-lb-service-ipam={self.default_lb_service_ipam}: expected lbipam or none"

    @property
    def classes(self) -> frozenset[str]:
        """The classes of services that are served; an empty text stands for none."""
        found = {""} if self.default_lb_service_ipam == "lbipam" else set()
        return frozenset(found | ({L2_CLASS} if self.enable_l2_announcements else set()))
