"""What of the agent must have started before what else begins: the hard facts of its start.

Needs: the cells.   Gives: ORDER, pairs of what provides a type.
Source: spec startup.md §2 (hard ordering facts) and §10 (before the API is served), what of it we have.
"""

from __future__ import annotations

from cells.api import Api
from cells.cni_config import CniConfig
from cells.cni_server import CniServer, DeleteQueue
from cells.config import AgentConfig
from cells.conntrack import ConntrackGC
from cells.datapath import Datapath
from cells.devices import Device
from cells.endpoint_restore import ExposedEndpoints, OldEndpoints, RestoredEndpoints
from cells.events import Events
from cells.health import HealthServer
from cells.host_ip_sync import HostIPSync
from cells.ipam import Ipam
from cells.maps import Maps, PolicyMaps
from cells.monitor import Monitor
from cells.netlink import HostLinks
from cells.router import Router
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
    # 27 < 29 < 30 < 31: the range, then the addresses of old endpoints, then new ones, the router's first
    (Table[Device], Ipam),
    (Ipam, RestoredEndpoints),
    (RestoredEndpoints, Router),
    (RestoredEndpoints, ExposedEndpoints),
    # the programs are there before anything is attached to them
    (Maps, Datapath),
    (Datapath, Router),
    (Datapath, ExposedEndpoints),
    # 39 after 8 and 31
    (Maps, HostIPSync),
    (Router, HostIPSync),
    # before the API: endpoints of before in the list, queued deletions done, the node's addresses in the maps
    (ExposedEndpoints, DeleteQueue),
    (DeleteQueue, Api),
    (DeleteQueue, CniServer),
    (Router, Api),
    (Router, CniServer),
    (HostIPSync, Api),
    (HostIPSync, CniServer),
    # pods may come once all of that serves; probes succeed last
    (Api, CniConfig),
    (CniServer, CniConfig),
    (CniConfig, HealthServer),
    (HostIPSync, HealthServer),
    # what serves pods does so over an open netlink socket
    (HostLinks, CniServer),
    # 4.4 before 4.5: flows are collected once endpoints of before are back, or those would lose time
    (ExposedEndpoints, ConntrackGC),
    # 4.17: events are offered before anyone may watch; the buffers are the map's
    (Maps, Events),
    (Events, Monitor),
)
