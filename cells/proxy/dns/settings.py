"""Settings of the DNS proxy.

Source: Cilium 1.17, tofqdns-* and dnsproxy-*.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from cells.base.addresses import IPAddress
from cells.proxy.dns.wire import NXDOMAIN, REFUSED
from lifecycle import Duration, Settings, seconds


class Reject(StrEnum):
    """How the proxy refuses a name."""

    REFUSED = "refused"
    NAME_ERROR = "nameError"


class AddressClass(StrEnum):
    """Classes of addresses to which names of other hosts never resolve."""

    LINK_LOCAL = "link-local"
    LOOPBACK = "loopback"
    UNSPECIFIED = "unspecified"
    MULTICAST = "multicast"


REJECT_CODES: Final = {Reject.REFUSED: REFUSED, Reject.NAME_ERROR: NXDOMAIN}


class DNSPortSettings(Settings, frozen=True):
    """Where the DNS proxy listens."""

    tofqdns_proxy_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the loopback address that the DNS proxy listens on; 0 takes a free one, and keeps it."""


class DNSProxySettings(Settings, frozen=True):
    """The DNS proxy, and how long what it has seen counts."""

    tofqdns_min_ttl: Annotated[int, Meta(ge=0)] = 0
    """Least seconds for which an answer counts, whatever its TTL."""

    tofqdns_endpoint_max_ip_per_hostname: Annotated[int, Meta(ge=1)] = 1000
    """Most addresses of a name that count for an endpoint; those that end first go first."""

    tofqdns_max_deferred_connection_deletes: Annotated[int, Meta(ge=0)] = 10000
    """Most addresses an endpoint may keep after their TTL because it has connections to them."""

    tofqdns_idle_connection_grace_period: Annotated[Duration, Meta(ge=0)] = seconds(0)
    """How long an address without connections stays known after its TTL."""

    tofqdns_dns_reject_response_code: Reject = Reject.REFUSED
    """Answer to a query that policy does not allow: refused, or nameError."""

    tofqdns_forbidden_addresses: tuple[AddressClass, ...] = (AddressClass.LINK_LOCAL, AddressClass.LOOPBACK)
    """Classes of addresses that toFQDNs never opens, whatever a server answers; empty: none."""

    tofqdns_enable_dns_compression: bool = True
    """Whether pods get answers with compressed names; else every name is written out."""

    tofqdns_pre_cache: Path | None = None
    """File of answers (as of fqdn cache list -o json) that count from the start, until their TTL ends."""

    tofqdns_proxy_response_max_delay: Annotated[Duration, Meta(ge=0)] = seconds(0.1)
    """How long an answer waits at most for its addresses to be allowed in policy maps and ipcache."""

    dnsproxy_enable_transparent_mode: bool | None = None
    """Whether servers are asked from the address and port of the pod, not the node's; unset: true, unless
    another plugin makes pods' links (cni-chaining-mode)."""

    dnsproxy_concurrency_limit: Annotated[int, Meta(ge=0)] = 0
    """Most queries served at a time; 0: unlimited."""

    dnsproxy_concurrency_processing_grace_period: Annotated[Duration, Meta(ge=0)] = seconds(0)
    """How long a query waits where the limit is reached; 0 refuses it at once."""

    def forbids(self, address: IPAddress) -> AddressClass | None:
        """Return the class for which toFQDNs does not allow an address; None if it is allowed."""
        inner = getattr(address, "ipv4_mapped", None) or address
        for one in self.tofqdns_forbidden_addresses:
            if getattr(inner, f"is_{one.name.lower()}"):
                return one
        return None
