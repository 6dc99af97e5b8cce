"""Cilium's options of what is not built yet: accepted where they ask for what this agent does anyway.

Needs:  nothing.
Gives:  UnservedSettings, for the same elsewhere; the settings are checked. A file for each family of cells,
        which its owner empties.
Source: Cilium 1.17, option names. Unset, each takes the value shown as its default here, which is not always
        Cilium's: an agent without Kubernetes, tunnels and services.
Why:    no operator must believe that traffic is encrypted, or policies are enforced, when it is not so: any
        other value is refused, all at once. What only qualifies a part that is off is no option at all.
"""

from cells.unserved.agent import UnservedAgent
from cells.unserved.announcements import UnservedAnnouncements
from cells.unserved.bandwidth import UnservedBandwidth
from cells.unserved.cluster import UnservedCluster
from cells.unserved.datapath import UnservedDatapath
from cells.unserved.encryption import UnservedEncryption
from cells.unserved.gateways import UnservedGateways
from cells.unserved.masquerade import UnservedMasquerade
from cells.unserved.node import UnservedNode
from cells.unserved.observe import UnservedObserve
from cells.unserved.policy import UnservedPolicy
from cells.unserved.proxy import UnservedProxy
from cells.unserved.refusal import UnservedSettings
from cells.unserved.services import UnservedServices
from lifecycle import config, module

FAMILIES: tuple[type[UnservedSettings], ...] = (
    UnservedAgent,
    UnservedAnnouncements,
    UnservedBandwidth,
    UnservedCluster,
    UnservedDatapath,
    UnservedEncryption,
    UnservedGateways,
    UnservedMasquerade,
    UnservedNode,
    UnservedObserve,
    UnservedPolicy,
    UnservedProxy,
    UnservedServices,
)

cell = module("unserved", "Options of what is not built yet", config(*FAMILIES))

__all__ = ["FAMILIES", "UnservedSettings", "cell"]
