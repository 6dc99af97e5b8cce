"""The edges of policies by rules: the proxy that traffic is redirected to.

For:    RulePolicy. Needs: nothing. Gives: DNSProxyPort.
"""

from typing import Protocol


class DNSProxyPort(Protocol):
    """The DNS proxy of this node, if a cell provides one."""

    @property
    def port(self) -> int:
        """Where it listens, on the loopback address of each family; the same over restarts."""
        ...
