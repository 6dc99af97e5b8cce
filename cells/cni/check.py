"""CHECK: is the attachment as its ADD left it?

Source: CNI spec 0.4.0 to 1.1.0, CHECK; order, texts and codes as recorded from the original plugin: first the
endpoint's health, then the interface and each address the previous result gave it.
"""

from __future__ import annotations

from ipaddress import ip_interface

from cells.base.addresses import IPAddress
from cells.cni.attachment import AttachEndpoints, PodEnd
from cells.cni.protocol import HEALTH_UNKNOWN, INVALID_CONFIG, UNHEALTHY, CniError
from cells.cni.request import PluginCall, PrevResult, chain_of, prev_result_of
from cells.endpoint import State
from cells.netlink.connection import NetlinkError

_BROKEN = frozenset({State.DISCONNECTED, State.INVALID})
"""Others are on their way to working, or work though something about them went wrong."""


class Checker:
    """Compares attachments with their results; changes nothing."""

    def __init__(self, endpoints: AttachEndpoints) -> None:
        self._endpoints = endpoints

    def check(self, call: PluginCall, pod: PodEnd | None) -> None:
        """Return when all is well, raise CniError when it is not.

        ``pod`` is None when the call came without a namespace: then there are no addresses to look at.
        """
        try:
            previous = prev_result_of(call)
        except CniError as error:
            raise _invalid(error.message) from error
        if previous is None:
            raise _invalid("CHECK without a prevResult: the runtime has to pass the result of the ADD")
        wanted = _addresses_of(previous, call.ifname)
        chained = bool(chain_of(call.conf))
        self._check_health(call)
        if not chained and pod is not None:
            _check_interface(call.ifname, wanted, pod)

    def _check_health(self, call: PluginCall) -> None:
        endpoint = self._endpoints.by_attachment(call.container_id, call.ifname)
        if endpoint is None:
            raise CniError(
                "HealthzFailed",
                code=HEALTH_UNKNOWN,
                details="failed to retrieve container health: there is no endpoint for CNI attachment ID"
                f" {call.attachment_id}",
            )
        if self._endpoints.shown_state(endpoint) in _BROKEN:
            raise CniError("Unhealthy", code=UNHEALTHY, details="container is unhealthy in agent")


def _addresses_of(previous: PrevResult, ifname: str) -> list[tuple[str, IPAddress]]:
    """The addresses, as written and as such, that the result gives to the pod's interface."""
    ours = {
        position
        for position, interface in enumerate(previous.interfaces or ())
        if interface.name == ifname and interface.sandbox
    }
    try:
        return [
            (each.address, ip_interface(each.address).ip)
            for each in previous.ips or ()
            if each.interface in ours
        ]
    except ValueError as error:
        raise _invalid(f"could not parse prevResult: {error}") from error


def _check_interface(ifname: str, wanted: list[tuple[str, IPAddress]], pod: PodEnd) -> None:
    try:
        found = pod.addresses(ifname)
    except NetlinkError as error:
        raise CniError(f"unable to look at interface {ifname}: {error}") from error
    if found is None:
        raise CniError(f"cannot find container link {ifname}")
    for text, address in wanted:
        if address not in found:
            raise CniError(f"expected ip {text} on interface {ifname}")


def _invalid(details: str) -> CniError:
    return CniError("InvalidNetworkConfig", code=INVALID_CONFIG, details=details)
