"""What passed the proxies, by endpoint.

Needs:  Table[Endpoint].
Gives:  ProxyStatistics.
Why:    who looks at an endpoint wants to see that its messages pass a proxy, and what became of them.
"""

from cells.proxy.statistics.statistics import Messages, ProxyStatistics, Redirect, Statistics
from lifecycle import module, provide

__all__ = ["Messages", "ProxyStatistics", "Redirect", "Statistics", "cell"]

cell = module("proxy-statistics", "Messages that passed proxies", provide(ProxyStatistics))
