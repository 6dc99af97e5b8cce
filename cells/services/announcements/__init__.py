"""Addresses of services on the local network: one node answers ARP for each, so that clients find it.

Source:     CiliumL2AnnouncementPolicies, Services, this node's CiliumNode and devices. The table
            ``l2-candidates`` follows from them: the services this node may answer for.
Controller: an election by Lease for each of those, the table ``l2-leases``: who answers.
Reconciler: the table ``l2-announce``, addresses of services whose lease this node holds, in; the map
            ``cilium_l2_responder_v4`` and gratuitous ARP out. The programs on native devices answer.
Needs:      Resources, KubernetesAPI, Table[Device], Maps, AnnouncementSettings.   Gives: Announcements.
Why:        a load balancer's address on a bare network is nobody's: somebody has to say where it is, and only
            one at a time. An agent that cannot renew its leases answers no more, nor does a node whose agent
            is gone: the programs look at when it was last alive.
Source:     Cilium 1.17, L2 announcements: IPv4 alone. What cannot be followed is told in a policy's status.
"""

from cells.services.announcements.announcements import Announcements
from cells.services.announcements.candidates import Candidate
from cells.services.announcements.conditions import PolicyConditions
from cells.services.announcements.elections import Elections, L2Lease
from cells.services.announcements.kernel import KernelResponder, ResponderKernel
from cells.services.announcements.responder import L2Announcement
from lifecycle import invoke, module, provide

__all__ = ["Announcements", "Candidate", "Elections", "L2Announcement", "L2Lease", "ResponderKernel", "cell"]

cell = module(
    "l2-announcements",
    "Addresses of services on the local network",
    provide(Announcements, Elections, PolicyConditions, KernelResponder.provided),
    invoke(Announcements, PolicyConditions),
)
