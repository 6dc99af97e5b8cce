"""The edges of policies by rules: the proxies that traffic is redirected to.

For:    RulePolicy. Needs: nothing. Gives: DNSProxyPort, HTTPProxyPorts.
"""

from typing import Protocol


class DNSProxyPort(Protocol):
    """The DNS proxy of this node, if a cell provides one."""

    @property
    def port(self) -> int:
        """Where it listens, on the loopback address of each family; the same over restarts."""
        ...


class HTTPProxyPorts(Protocol):
    """The proxy of HTTP of this node, if a cell provides one: its ports on the loopback addresses."""

    @property
    def serves(self) -> bool:
        """Whether there is a proxy to read requests."""
        ...

    def port(self, name: str) -> int:
        """The port of a redirect, the same over restarts; 0 where none is left, or there is no proxy."""
        ...
