"""The endpoints of this node: containers' attachments to its network.

Controller and kernel edge: a request becomes a row of the ``endpoints`` table, rows in BPF maps, a program
on the link and a state directory; all of it or nothing.
Needs:  AgentConfig, Controllers, Maps, PolicyMaps, Datapath, Ipam.
Gives:  Endpoints, Regenerations, PolicyEnforcement, Table[Endpoint], StateFiles.
Why:    making an endpoint is what a pod waits for, so it is synchronous and touches the kernel as little as
        possible; what is slow (conntrack, retries) happens afterwards.
"""

from cells.endpoint.aftercare import Aftercare, controllers_of
from cells.endpoint.builds import Builds
from cells.endpoint.cell import cell
from cells.endpoint.changes import EndpointChanges
from cells.endpoint.enforcement import Enforced, PolicyEnforcement
from cells.endpoint.identity import (
    FIRST_IDENTITY,
    HOST,
    INIT,
    INIT_LABELS,
    LAST_IDENTITY,
    WORLD,
    Identities,
    Identity,
)
from cells.endpoint.kernel import EndpointAddresses, EndpointMaps, EndpointPrograms, PolicySlot
from cells.endpoint.labels import Label, labels_sha256, parse, texts
from cells.endpoint.manager import Endpoints
from cells.endpoint.model import (
    DatapathConfiguration,
    Endpoint,
    EndpointError,
    EndpointRequest,
    IPAddress,
)
from cells.endpoint.policy import ALLOW_ALL, ALLOW_LOCALHOST, Enforcement, PolicyEntries, PolicySettings
from cells.endpoint.regeneration import Regeneration, Regenerations
from cells.endpoint.saved import SavedEndpoint
from cells.endpoint.state_files import Scan, StateFiles
from cells.endpoint.states import (
    Code,
    EndpointHealth,
    Level,
    State,
    StatusEntry,
    StatusLog,
    displayed,
    health_of,
)

__all__ = [
    "ALLOW_ALL",
    "ALLOW_LOCALHOST",
    "FIRST_IDENTITY",
    "HOST",
    "INIT",
    "INIT_LABELS",
    "LAST_IDENTITY",
    "WORLD",
    "Aftercare",
    "Builds",
    "Code",
    "DatapathConfiguration",
    "Endpoint",
    "EndpointAddresses",
    "EndpointChanges",
    "EndpointError",
    "EndpointHealth",
    "EndpointMaps",
    "EndpointPrograms",
    "EndpointRequest",
    "Endpoints",
    "Enforced",
    "Enforcement",
    "IPAddress",
    "Identities",
    "Identity",
    "Label",
    "Level",
    "PolicyEnforcement",
    "PolicyEntries",
    "PolicySettings",
    "PolicySlot",
    "Regeneration",
    "Regenerations",
    "SavedEndpoint",
    "Scan",
    "State",
    "StateFiles",
    "StatusEntry",
    "StatusLog",
    "cell",
    "controllers_of",
    "displayed",
    "health_of",
    "labels_sha256",
    "parse",
    "texts",
]
