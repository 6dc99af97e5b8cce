"""What a frontend's slot 0 says of it, in bits."""

from __future__ import annotations

from cells.services.model import Frontend, ServiceFlag, ServiceType

_TYPE_FLAGS = {
    ServiceType.CLUSTER_IP.value: 0,
    ServiceType.NODE_PORT.value: ServiceFlag.NODE_PORT.value,
    ServiceType.EXTERNAL_IPS.value: ServiceFlag.EXTERNAL_IP.value,
    ServiceType.HOST_PORT.value: ServiceFlag.HOST_PORT.value,
    ServiceType.LOAD_BALANCER.value: ServiceFlag.LOAD_BALANCER.value,
    ServiceType.LOCAL_REDIRECT.value: ServiceFlag.LOCAL_REDIRECT.value,
}
_EXT_LOCAL, _INT_LOCAL = ServiceFlag.EXT_LOCAL_SCOPE.value, ServiceFlag.INT_LOCAL_SCOPE.value
_TWO_SCOPES, _AFFINITY = ServiceFlag.TWO_SCOPES.value, ServiceFlag.AFFINITY.value
_ROUTABLE, _SOURCE_RANGE = ServiceFlag.ROUTABLE.value, ServiceFlag.SOURCE_RANGE.value
_L7, _LOOPBACK = ServiceFlag.L7_LOAD_BALANCER.value, ServiceFlag.LOOPBACK.value

ALGORITHMS = {"": 0, "random": 1, "maglev": 2}
"""As slot 0 tells how backends are chosen for clients outside; 0: as for every service."""

_SOURCE_RANGE_DENY = ServiceFlag.QUARANTINED.value
_DSR = ServiceFlag.DSR.value
"""What the bit means of slot 0."""

_FROM_OUTSIDE = (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER, ServiceType.EXTERNAL_IPS)

_OF_ONE_NODE = (ServiceType.HOST_PORT, ServiceType.LOCAL_REDIRECT)


def service_flags(frontend: Frontend, *, affinity: bool) -> int:
    """As a plain number: combining members of an enumeration costs more than all else here."""
    return (
        _TYPE_FLAGS[frontend.type.value]
        | _EXT_LOCAL * (frontend.ext_local and frontend.type in _FROM_OUTSIDE)
        | _INT_LOCAL * (frontend.int_local and frontend.type not in _OF_ONE_NODE)
        | _TWO_SCOPES * frontend.two_scopes
        | _AFFINITY * affinity
        | _ROUTABLE * frontend.routable
        | _SOURCE_RANGE * bool(frontend.source_ranges)
        | _SOURCE_RANGE_DENY * frontend.source_ranges_deny
        | _L7 * bool(frontend.l7_proxy_port)
        | _LOOPBACK * frontend.loopback
        | _DSR * frontend.direct
    )
