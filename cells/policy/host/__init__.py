"""The policy of the node itself: its labels followed, and put in force once all rules are known.

Controller: this node's labels and the rules in; the host endpoint's labels and policy out.
Needs:  HostEndpoint, Identities, ReadTable[ClusterNode], KnownRules.   Gives: HostLabels.
Why:    until the rules are known the node goes by the policy of a former agent, or by none, so that neither a
        start nor a restart locks it up or opens it.
"""

from cells.policy.host.labels import HostLabels
from lifecycle import invoke, module, provide

__all__ = ["HostLabels", "cell"]

cell = module("host-policy", "The policy of the node itself", provide(HostLabels), invoke(HostLabels))
