"""What the API tells of the node, read from the cells at the moment it is asked.

Needs: AgentConfig, Table[Device], Ipam, Router, Datapath, Maps.   Gives: NodeView.
"""

from __future__ import annotations

from collections.abc import Mapping

from cells.api.config_mapping import NodeFacts
from cells.api.status_mapping import StatusFacts
from cells.config import AgentConfig
from cells.datapath import Datapath
from cells.devices import Device
from cells.health import agent_version
from cells.ipam import Ipam
from cells.maps import Maps
from cells.router import Router
from lifecycle import Table


class NodeView:
    """Reads from the cells what the answers tell of the node; nothing is kept, so nothing gets old."""

    def __init__(
        self,
        config: AgentConfig,
        devices: Table[Device],
        ipam: Ipam,
        router: Router,
        datapath: Datapath,
        maps: Maps,
    ) -> None:
        self._config = config
        self._devices = devices
        self._ipam = ipam
        self._router = router
        self._datapath = datapath
        self._maps = maps

    def node(self) -> NodeFacts:
        """Router, pod CIDR and MTU."""
        return NodeFacts(router_ip=self._router.ip, pod_cidr=self._ipam.range, mtu=self._mtu())

    def settings(self) -> Mapping[str, object]:
        """The daemon's configuration under the names ``cilium-dbg config`` shows."""
        config = self._config
        return {
            "BPFRoot": str(config.bpf_root),
            "ClusterName": config.cluster_name,
            "DatapathMode": "veth",
            "EnableIPv4": True,
            "EnableIPv6": False,
            "IPAM": "cluster-pool",
            "MTU": config.mtu,
            "RoutingMode": "native",
            "SocketPath": str(config.api_socket),
            "StateDir": str(config.state),
        }

    def status(self) -> StatusFacts:
        """What GET /healthz tells besides the verdict."""
        return StatusFacts(
            version=agent_version(),
            revision=self._datapath.build,
            cluster_name=self._config.cluster_name,
            node_name=self._config.node_name,
            node=self.node(),
            uplinks=self._uplinks(),
            ipam_status=self._ipam.status(),
            allocations=self._ipam.dump(),
            map_sizes=self._map_sizes(),
            map_size_ratio=0.0,
        )
