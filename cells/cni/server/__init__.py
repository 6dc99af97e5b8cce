"""Attaches and detaches pods: the agent's side of the CNI plugin.

Edge: requests on cni.sock become links, addresses and endpoints, or their end.
Needs:  ChainingSettings, AgentConfig, HostLinks, Ipam, Endpoints, PolicyMaps, Router, PodMtu,
        ExposedEndpoints.
Gives:  CniServer (serves once its hook has run), QueueLock (keeps plugins from the delete queue until it is
        released), DeleteQueue (processed before cni.sock exists and before the API answers about endpoints).
Why:    the plugin is a small process in the runtime's namespaces; everything it asks for happens here, where
        it can be taken back as a whole.
"""

from cells.cni.server.cell import cell
from cells.cni.server.delete_queue import DeleteQueue
from cells.cni.server.queue_lock import QueueLock
from cells.cni.server.server import CniServer
from cells.cni.server.settings import ChainingSettings

__all__ = ["ChainingSettings", "CniServer", "DeleteQueue", "QueueLock", "cell"]
