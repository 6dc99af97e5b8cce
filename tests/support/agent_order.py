"""The order of the agent's start: which hooks must have started before which others.

Source: spec startup.md §2 (hard ordering facts) and §10 (before the API is served), as far as the parts are
built.
"""

from __future__ import annotations

from cells.api import Api, StartedDaemon
from cells.cluster.host_ip_sync import HostIPSync
from cells.cluster.identity.identities import Identities
from cells.cni import CniServer, DeleteQueue, QueueLock
from cells.cni.configuration import CniConfig
from cells.config import AgentConfig
from cells.datapath.conntrack import ConntrackGC
from cells.datapath.datapath import Datapath
from cells.endpoint.restore import (
    ExposedEndpoints,
    OldEndpoints,
    RegeneratedEndpoints,
    RestoredEndpoints,
)
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.netlink.links import HostLinks
from cells.node.devices import Device
from cells.node.ipam import Ipam
from cells.node.router import Router
from cells.observe.events import Events
from cells.observe.health import HealthServer, Probes
from cells.observe.monitor import Monitor
from lifecycle import Table

ORDER: tuple[tuple[object, object], ...] = (
    # the node is claimed before anything of it is touched
    (AgentConfig, Maps),
    (AgentConfig, OldEndpoints),
    (AgentConfig, Datapath),
    # newDaemon 8 < 30: what restore reads and writes is open; 13 reads the disk only, beside 8
    (Maps, PolicyMaps),
    (Maps, RestoredEndpoints),
    (PolicyMaps, RestoredEndpoints),
    (OldEndpoints, RestoredEndpoints),
    # the maps are open before a number is given that they might have
    (Maps, Identities),
    (PolicyMaps, Identities),
    # 27 < 29 < 30 < 31: the range, then the addresses of old endpoints, then new ones, the router's first
    (Table[int, Device], Ipam),
    (Ipam, RestoredEndpoints),
    (RestoredEndpoints, Router),
    (RestoredEndpoints, ExposedEndpoints),
    # the programs are there before anything is attached to them
    (Maps, Datapath),
    (Datapath, Router),
    (Datapath, RegeneratedEndpoints),
    # all endpoints of before are visible before any is regenerated
    (ExposedEndpoints, RegeneratedEndpoints),
    # 39 after 8 and 31
    (Maps, HostIPSync),
    (Router, HostIPSync),
    # before the API: no pod's address can be freed, no deletion is queued any more, the node's addresses are
    # in the maps
    (ExposedEndpoints, Api),
    (QueueLock, Api),
    # before pods are made, and before anything is answered about endpoints: queued deletions are done
    (QueueLock, DeleteQueue),
    (ExposedEndpoints, DeleteQueue),
    (DeleteQueue, CniServer),
    (DeleteQueue, StartedDaemon),
    (RegeneratedEndpoints, StartedDaemon),
    (HostIPSync, StartedDaemon),
    (Router, Api),
    (Router, CniServer),
    (HostIPSync, Api),
    (HostIPSync, CniServer),
    # pods may come once all of that serves; probes succeed last
    (Api, CniConfig),
    (CniServer, CniConfig),
    (CniConfig, HealthServer),
    (HostIPSync, HealthServer),
    (StartedDaemon, HealthServer),
    (Probes, HealthServer),
    # what serves pods does so over an open netlink socket
    (HostLinks, CniServer),
    # 4.4 before 4.5: flows are collected once endpoints of before are back, or those would lose time
    (ExposedEndpoints, ConntrackGC),
    # 4.17: events are offered before anyone may watch; the buffers are the map's
    (Maps, Events),
    (Events, Monitor),
)
