"""The REST API on ``cilium.sock``, as Cilium 1.17's clients know it.

Controller: turns HTTP requests into calls of the ipam and endpoint cells, and their rows into answers.
Needs:  AgentConfig, Ipam, Endpoints, PolicyMaps, Router, Table[Device], Maps, Datapath, StatusCollector;
        starts after ExposedEndpoints and QueueLock.
Gives:  StartedDaemon; Api, which listens on ``<state-dir>/cilium.sock``, mode 0660, group ``cilium`` where
        there is one.
Why:    an unmodified cilium-cni makes pods with it, and cilium-dbg and ``hive`` show the node through it.
The socket is there before the daemon runs; what needs it, such as endpoints, is answered once it does.
Calls that change anything need peer uid 0, whatever the socket's group. Operations that are not in
:meth:`Operations.routes` do not exist: 404, or 405 where the path has others. Those on endpoints wait behind
rate limits, and are answered 429 where that would take too long.
"""

from cells.api.cell import cell
from cells.api.config_mapping import ChainingMode
from cells.api.gate import StartedDaemon
from cells.api.node_operations import MapReader
from cells.api.operations import Facts, PolicyPool
from cells.api.server import Api

__all__ = ["Api", "ChainingMode", "Facts", "MapReader", "PolicyPool", "StartedDaemon", "cell"]
