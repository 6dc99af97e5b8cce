"""The REST API on ``cilium.sock``, as Cilium 1.17's clients know it.

Edge: HTTP requests become calls of other cells, and their rows become answers.
Needs:  every ``Member[ApiPart]``, a part for each cell that it speaks for; starts after ExposedEndpoints and
        QueueLock.
Gives:  ApiPart, Route and the rules of the wire, for cells that contribute; StartedDaemon; Api, which listens
        on ``<state-dir>/cilium.sock``, mode 0660, group ``cilium`` where there is one.
Why:    an unmodified cilium-cni makes pods with it, and cilium-dbg and ``hive`` show the node through it.
The socket is there before the daemon runs; what needs it, such as endpoints, is answered once it does.
Calls that change anything need peer uid 0, whatever the socket's group. Operations that no part has do not
exist: 404, or 405 where the path has others. Those on endpoints wait behind rate limits, and are answered 429
where that would take too long.
"""

from cells.api.cell import cell
from cells.api.gate import StartedDaemon
from cells.api.models.status import MasqueradedProtocols, Masquerading
from cells.api.operations.endpoints.operations import PolicyPool
from cells.api.operations.node.config_mapping import MasqueradeReport
from cells.api.operations.node.node_status import NodeStatus
from cells.api.operations.node.operations import MapReader
from cells.api.part import ApiPart, Operation, Route
from cells.api.server import Api
from cells.api.wire import FrameworkError, answer, empty, parse_bool, parse_int, read_body

__all__ = [
    "Api",
    "ApiPart",
    "FrameworkError",
    "MapReader",
    "MasqueradeReport",
    "MasqueradedProtocols",
    "Masquerading",
    "NodeStatus",
    "Operation",
    "PolicyPool",
    "Route",
    "StartedDaemon",
    "answer",
    "cell",
    "empty",
    "parse_bool",
    "parse_int",
    "read_body",
]
