"""The endpoints of this node: containers' attachments to its network.

Controller and kernel edge: a request becomes a row of the ``endpoints`` table, rows in BPF maps, a program
on the link and a state directory; all of it or nothing.
Needs:  AgentConfig, Controllers, Identities, Ipcache, EndpointPolicies, Maps, Datapath, Ipam; tables of pods
        and namespaces.
Gives:  Endpoints, Regenerations, PolicyEnforcement, Table[Endpoint], StateFiles.
Why:    making an endpoint is what a pod waits for, so it is synchronous and touches the kernel as little as
        possible; what is slow (conntrack, retries) happens afterwards.
"""

from cells.endpoint.cell import cell
from cells.endpoint.creation import NewEndpoint
from cells.endpoint.kernel.conntrack_scrub import ConntrackScrub
from cells.endpoint.kernel.edges import (
    EndpointAddresses,
    EndpointMaps,
    EndpointPrograms,
    EndpointRoutes,
)
from cells.endpoint.kernel.ipcache import resource_of, restored_claims
from cells.endpoint.kernel.rows import config_row, ifindex_key, lxc_value
from cells.endpoint.manager import Endpoints
from cells.endpoint.metadata.edges import PodMetadata, PodName
from cells.endpoint.metadata.pods import KubernetesPods
from cells.endpoint.options.changes import EndpointChanges
from cells.endpoint.options.enforcement import Enforced, PolicyEnforcement
from cells.endpoint.options.settings import EndpointSettings
from cells.endpoint.regeneration.builds import Builds
from cells.endpoint.regeneration.queue import Regeneration, Regenerations
from cells.endpoint.regeneration.recovery import RegenerationRecovery, controllers_of
from cells.endpoint.state.files import Scan, StateFiles
from cells.endpoint.state.names import SavedLookup, SavedNames, SavedZombie
from cells.endpoint.state.saved import SavedEndpoint
from cells.endpoint.table.model import (
    DatapathConfiguration,
    Endpoint,
    EndpointError,
    EndpointRequest,
    IPAddress,
)
from cells.endpoint.table.states import (
    Code,
    EndpointHealth,
    Level,
    State,
    StatusEntry,
    StatusLog,
    Subject,
    displayed,
    health_of,
)

__all__ = [
    "Builds",
    "Code",
    "ConntrackScrub",
    "DatapathConfiguration",
    "Endpoint",
    "EndpointAddresses",
    "EndpointChanges",
    "EndpointError",
    "EndpointHealth",
    "EndpointMaps",
    "EndpointPrograms",
    "EndpointRequest",
    "EndpointRoutes",
    "EndpointSettings",
    "Endpoints",
    "Enforced",
    "IPAddress",
    "KubernetesPods",
    "Level",
    "NewEndpoint",
    "PodMetadata",
    "PodName",
    "PolicyEnforcement",
    "Regeneration",
    "RegenerationRecovery",
    "Regenerations",
    "SavedEndpoint",
    "SavedLookup",
    "SavedNames",
    "SavedZombie",
    "Scan",
    "State",
    "StateFiles",
    "StatusEntry",
    "StatusLog",
    "Subject",
    "cell",
    "config_row",
    "controllers_of",
    "displayed",
    "health_of",
    "ifindex_key",
    "lxc_value",
    "resource_of",
    "restored_claims",
]
