"""Which of the node's addresses are not taken for the host's.

For:    HostIPSync. Needs: nothing. Gives: HostIPSettings.
"""

from ipaddress import IPv4Network, IPv6Network, ip_network

from lifecycle import Settings


class HostIPSettings(Settings, frozen=True):
    """Settings of the host address sync."""

    exclude_local_address: tuple[str, ...] = ()
    """Networks whose addresses on this node do not count as the host's."""

    def validate(self) -> None:
        """Refuse what is no network; raises ValueError."""
        self.excluded()

    def excluded(self) -> list[IPv4Network | IPv6Network]:
        """The networks; raises ValueError that names the setting."""
        found = []
        for text in self.exclude_local_address:
            try:
                found.append(ip_network(text))
            except ValueError as error:
                raise ValueError(
                    f"exclude-local-address={text}: expected a network such as 192.0.2.0/24: {error}"
                ) from None
        return found
