"""What an operator may say of the node's addresses.

Needs: nothing.   Gives: AddressSettings.
"""

from collections.abc import Iterator
from ipaddress import ip_address
from typing import Final

from cells.ipam import Family, IPAddress
from lifecycle import Settings, refuse

AUTO: Final = "auto"


class AddressSettings(Settings, frozen=True):
    """The node's own addresses, where they cannot be detected."""

    ipv4_node: str = AUTO
    """The node's IPv4 address; auto: the source of its default route. The Node object's InternalIP wins."""

    ipv6_node: str = AUTO
    """The node's IPv6 address; auto: the source of its default route. The Node object's InternalIP wins."""

    def validate(self) -> None:
        """Refuse what no node can be reached by; raises ValueErrors of one line."""
        refuse(self._wrong())

    def address(self, family: Family) -> IPAddress | None:
        """What is set, None for auto."""
        text = self.ipv4_node if family is Family.IPV4 else self.ipv6_node
        return None if text in {AUTO, ""} else ip_address(text)

    def _wrong(self) -> Iterator[str]:
        for family, example in ((Family.IPV4, "192.0.2.7"), (Family.IPV6, "2001:db8::7")):
            try:
                ip = self.address(family)
            except ValueError:
                ip = None
                fits = False
            else:
                fits = ip is None or (Family.of(ip) is family and can_be_reached(ip))
            if not fits:
                text = self.ipv4_node if family is Family.IPV4 else self.ipv6_node
                yield f"{family}-node={text}: expected auto, or an address of the node such as {example}"


def can_be_reached(ip: IPAddress) -> bool:
    """Whether other nodes may know a node by such an address."""
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified)
