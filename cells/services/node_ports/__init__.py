"""Services for clients outside the node: the node's addresses that serve them.

Controller: the node's devices in, the table ``node-port-addresses`` out: the addresses for node ports.
Reconciler: the table ``node-port``, computed from them, into the map ``hive_nodeport``. It enables services
            for clients outside in the programs on native devices, and has the source of packets to nodes.
Why:        addresses are added and removed; node ports must be served at the present ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Annotated, Final, Literal, Protocol

import msgspec
from anyio import to_thread

from cells.base.metrics import Collector, features
from cells.config import AgentConfig
from cells.config.shared import ServiceReach
from cells.datapath.settings import ServicePrograms
from cells.maps.node_maps import Maps
from cells.maps.records.flows import (
    NODEPORT_DSR_CHOSEN,
    NODEPORT_DSR_OTHER,
    NODEPORT_DSR_TCP,
    NODEPORT_MAGLEV,
    NODEPORT_ON,
    NODEPORT_XDP,
    NodePortConfig,
)
from cells.node.addresses import (
    AddressUse,
    NodeAddress,
    NodeAddresses,
    device_addresses,
    direct_routing_device,
    node_addresses,
)
from cells.node.devices import Device, matches, native_uplinks
from cells.node.sysctl import Sysctls, reserved_ports
from cells.services import DEFAULT_SEED, Seed
from cells.services.node_ports.netfilter import FoundRules, found_rules
from cells.tunnel.settings import PodTunnel
from lifecycle import (
    Derived,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    Reconciler,
    Settings,
    Table,
    Tables,
    Target,
    UsageError,
    config,
    invoke,
    module,
    provide,
    provide_private,
    seconds,
)
from lifecycle.settings import RenamedFrom

__all__ = [
    "ForwardingSettings",
    "IPAddress",
    "NodePortAddress",
    "NodePortMap",
    "NodePortMode",
    "NodePorts",
    "cell",
]


# The node's addresses that serve node ports, and its source address towards other nodes.

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network


class NodePortAddress(msgspec.Struct, frozen=True):
    """A row of the table ``node-port-addresses``: an address that serves node ports."""

    ip: IPAddress
    device: str


class Selection(msgspec.Struct, frozen=True):
    """The settings that select addresses."""

    ranges: Sequence[IPNetwork]
    """``nodeport-addresses``."""
    direct_device: str
    """``direct-routing-device``."""


def _uses(
    devices: Iterable[Device], node_ips: Sequence[IPAddress], selection: Selection
) -> tuple[list[AddressUse], str | None]:
    """Return the use of every address, and the device towards other nodes."""
    devices = list(devices)
    native = native_uplinks(devices)
    rows = [device_addresses(each, native) for each in devices]
    direct = direct_routing_device(rows, node_ips, selection.direct_device)
    return node_addresses(rows, node_ips, node_port_ranges=selection.ranges), direct


def node_port_addresses(
    devices: Iterable[Device], node_ips: Sequence[IPAddress], selection: Selection
) -> Mapping[IPAddress, NodePortAddress]:
    """Return the addresses that serve node ports. ``node_ips``: the node's published addresses."""
    uses, _ = _uses(devices, node_ips, selection)
    return {one.address: NodePortAddress(one.address, one.device) for one in uses if one.node_port}


def direct_device(devices: Iterable[Device], node_ips: Sequence[IPAddress], selection: Selection) -> str:
    """Return the device towards other nodes; empty if there is none."""
    return _uses(devices, node_ips, selection)[1] or ""


def direct_addresses(
    devices: Iterable[Device], node_ips: Sequence[IPAddress], selection: Selection
) -> Mapping[int, IPAddress]:
    """Return the source address of packets to backends on other nodes, by family (4, 6).

    On the device towards other nodes: the address that serves node ports, else the primary one; else the
    node's own.
    """
    uses, direct = _uses(devices, node_ips, selection)
    found: dict[int, IPAddress] = {}
    for version in (4, 6):
        own = [one for one in uses if one.device == direct and one.address.version == version]
        served = [one.address for one in own if one.node_port]
        primary = [one.address for one in own if one.primary]
        of_node = [one for one in node_ips if one.version == version]
        if candidates := [*served, *primary, *of_node]:
            found[version] = candidates[0]
    return found


# The tables of these addresses, and the configuration of the programs.

INTERVAL: Final = seconds(30)
_LOCAL: Final = "net/ipv4/ip_local_port_range"
_RESERVED: Final = "net/ipv4/ip_local_reserved_ports"
_FORWARDING: Final = {"net/ipv4/ip_forward": "1"}
_FORWARDING6: Final = {"net/ipv6/conf/all/forwarding": "1"}


class NodePortMap(Protocol):
    """The map hive_nodeport, and netfilter rules of other programs. All methods raise OSError."""

    def read(self) -> NodePortConfig:
        """The present configuration of the programs."""
        ...

    def write(self, config: NodePortConfig) -> None:
        """Write the configuration of the programs."""
        ...

    def found_rules(self) -> FoundRules:
        """Detect netfilter rules of other programs on the node; called in a thread."""
        ...


class KernelFacts:
    """The map in the kernel."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps, reach: ServiceReach, programs: ServicePrograms) -> NodePortMap:
        """Select the maps that services for external clients need."""
        if reach.outside:
            maps.use("snat4", "snat6")
            if programs.accelerates:
                maps.use("nodeport_neighbours4", "nodeport_neighbours6")
        return KernelFacts(maps)

    def read(self) -> NodePortConfig:
        """The present configuration of the programs."""
        return NodePortConfig.unpack(self._maps.nodeport.lookup(bytes(4)) or bytes(NodePortConfig.SIZE))

    def write(self, config: NodePortConfig) -> None:
        """Write the configuration of the programs."""
        self._maps.nodeport.update(bytes(4), config.pack())

    def found_rules(self) -> FoundRules:
        """Detect netfilter rules of other programs on the node."""
        return found_rules()


class NodePortSettings(Settings, frozen=True):
    """Where node ports are served."""

    nodeport_addresses: tuple[IPv4Network | IPv6Network, ...] = ()
    """Serve node ports at the node's addresses in these networks; unset: at one of each family and device."""

    direct_routing_device: str = ""
    """Device with the address that backends on other nodes see as the client; bond+ matches all names that
    start with bond, of which the first device counts; unset: that of the node's own address."""

    enable_auto_protect_node_port_range: bool = True
    """Keep the ports of node-port-range out of those that the kernel gives to connections by itself."""


class ForwardingSettings(Settings, frozen=True):
    """How backends are chosen for clients outside, and reached on other nodes."""

    bpf_lb_mode: Annotated[Literal["snat", "dsr", "hybrid"], RenamedFrom("node-port-mode")] = "snat"
    """How a backend on another node is reached: with this node's address, or so that it answers the client
    itself (dsr), in TCP only (hybrid)."""

    bpf_lb_dsr_dispatch: Literal["opt", "ipip", "geneve"] = "opt"
    """How that backend's node learns which service was asked: in an option of the IP header; no other way is
    served yet."""

    bpf_lb_algorithm: Annotated[Literal["random", "maglev"], RenamedFrom("node-port-algorithm")] = "random"
    """How a backend is chosen for clients outside: any, or by maglev the same at every node."""

    bpf_lb_maglev_hash_seed: str = DEFAULT_SEED
    """Base64 of 12 bytes, the same on every node of a cluster: where tables and hashes of maglev begin."""

    bpf_lb_algorithm_annotation: bool = False
    """Let services choose their algorithm by the annotation service.cilium.io/lb-algorithm."""

    bpf_lb_mode_annotation: bool = False
    """Let services choose by the annotation service.cilium.io/forwarding-mode, dsr or snat, how backends on
    other nodes are reached. bpf-lb-algorithm-annotation does so too, but for nodes with a tunnel."""

    def faults(self) -> Iterator[str]:
        if self.bpf_lb_dsr_dispatch != "opt":
            asked = self.bpf_lb_dsr_dispatch
            yield f"bpf-lb-dsr-dispatch={asked}: not supported yet, expected opt, or leave it unset"
        try:
            Seed.parse(self.bpf_lb_maglev_hash_seed)
        except ValueError as error:
            yield f"bpf-lb-maglev-hash-seed: {error}"


class NodePortMode:
    """The algorithm and forwarding mode (SNAT, DSR) for external clients, as flags of the programs."""

    def __init__(self, settings: ForwardingSettings, programs: ServicePrograms, tunnel: PodTunnel) -> None:
        self._settings = settings
        self._tunnelled = tunnel.used
        self.forwarding = settings.bpf_lb_mode
        """snat, dsr or hybrid, for services that choose none."""
        self.algorithm = settings.bpf_lb_algorithm
        """random or maglev, for services that choose none."""
        self.hash_seed = settings.bpf_lb_maglev_hash_seed
        self.services_choose_algorithm = settings.bpf_lb_algorithm_annotation
        """Whether services choose it by annotation."""
        self.services_choose_forwarding = settings.bpf_lb_mode_annotation or (
            settings.bpf_lb_algorithm_annotation and not tunnel.used
        )
        """Whether services choose it by annotation.

        Cilium 1.17 reads this annotation if the algorithm may be chosen; either setting enables it here. With
        a tunnel, backends cannot answer clients directly.
        """
        self.flags = (
            NODEPORT_ON
            | (_CHOSEN_BY_SERVICES if self.services_choose_forwarding else _DIRECT[settings.bpf_lb_mode])
            | NODEPORT_MAGLEV * (settings.bpf_lb_algorithm == "maglev")
            | NODEPORT_XDP * programs.accelerates
        )
        """The programs' flags, for a node that serves clients outside."""
        self.seed = Seed.parse(settings.bpf_lb_maglev_hash_seed)[1:]
        """The seeds of packets' hashes."""

    def check(self) -> None:
        """Raise UsageError for a mode that does not work with a tunnel."""
        if self._tunnelled and (mode := self._settings.bpf_lb_mode) != "snat":
            raise UsageError(
                f"bpf-lb-mode={mode}: packets in a tunnel do not carry the service's address;"
                " set it to snat, or routing-mode=native"
            )
        if self._tunnelled and self._settings.bpf_lb_mode_annotation:
            raise UsageError(
                "bpf-lb-mode-annotation=true: packets in a tunnel do not carry the service's address;"
                " leave it out, or set routing-mode=native"
            )


class NodePortSysctls:
    """Sysctls for external clients: forwarding and reserved ports."""

    def __init__(
        self, settings: NodePortSettings, agent: AgentConfig, programs: ServicePrograms, sysctls: Sysctls
    ) -> None:
        self._agent = agent
        self._range = programs.port_range
        self._protects = settings.enable_auto_protect_node_port_range
        self._sysctls = sysctls

    def apply(self) -> None:
        """Enable forwarding, and reserve the node port range. Raises HiveError."""
        if self._agent.ipv4:
            self._sysctls.enforce(_FORWARDING)
        if self._agent.ipv6:
            self._sysctls.enforce(_FORWARDING6)
        if not self._protects:
            return
        wanted = reserved_ports(
            self._sysctls.read(_LOCAL) or "", self._sysctls.read(_RESERVED) or "", self._range
        )
        if wanted is not None:
            self._sysctls.enforce({_RESERVED: wanted})


class ServingAddresses:
    """Selects the node's addresses that serve external clients, or reach backends on other nodes."""

    def __init__(
        self, settings: NodePortSettings, reach: ServiceReach, agent: AgentConfig, own: NodeAddresses
    ) -> None:
        self.node = own.table
        """The node's published addresses."""
        self.direct_device = settings.direct_routing_device
        """The configured device; empty: the device with the node's own address."""
        self._serves = reach.node_ports or reach.host_ports
        self._own = own
        self._on = {4: agent.ipv4, 6: agent.ipv6}
        self._selection = Selection(settings.nodeport_addresses, settings.direct_routing_device)

    def served(self, devices: Iterable[Device]) -> Mapping[IPAddress, NodePortAddress]:
        """Return the addresses for node ports and host ports."""
        if not self._serves:
            return {}
        found = node_port_addresses(devices, self._node_ips(), self._selection)
        return {ip: row for ip, row in found.items() if self._on[ip.version]}

    def node_facing_device(self, devices: Iterable[Device]) -> str:
        """Return the device towards other nodes; empty if there is none."""
        return direct_device(devices, self._node_ips(), self._selection)

    def sources(self, devices: Iterable[Device]) -> tuple[IPv4Address, IPv6Address]:
        """Return the source addresses towards other nodes; unspecified in disabled families."""
        found = direct_addresses(devices, self._node_ips(), self._selection)
        ipv4, ipv6 = found.get(4), found.get(6)
        return (
            ipv4 if isinstance(ipv4, IPv4Address) and self._on[4] else IPv4Address(0),
            ipv6 if isinstance(ipv6, IPv6Address) and self._on[6] else IPv6Address(0),
        )

    def _node_ips(self) -> list[IPAddress]:
        return list(self._own.all().values())


class NodePorts:
    """Configures services for external clients; the table of addresses is empty if they are disabled."""

    def __init__(
        self,
        reach: ServiceReach,
        serving: ServingAddresses,
        mode: NodePortMode,
        facts: NodePortMap,
        kernel: NodePortSysctls,
        devices: Table[int, Device],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._reach = reach
        self._serving = serving
        self._mode = mode
        self._kernel = kernel
        self._devices = devices
        self._log = log
        sources = (devices, serving.node)
        self.addresses: Derived[IPAddress, NodePortAddress] = Derived(
            "node-port-addresses", self._served, *sources
        )
        """The addresses that serve node ports."""
        self._found_rules = facts.found_rules
        self._direct: Derived[str, str] = Derived("direct-device", self._direct_device, *sources)
        self._configs: Derived[str, NodePortConfig] = Derived("node-port", self._wanted, *sources)
        reconciler = Reconciler(self._configs, _NodePortTarget(facts), full_every=INTERVAL)
        tables.add(self.addresses, self._configs, reconciler.statuses)
        lifecycle.append(Hook("prepare services for external clients", self._start))
        jobs.observe("reconcile", reconciler)
        if reach.outside:
            jobs.one_shot("look-for-kube-proxy", self._log_netfilter_rules)

    @property
    def direct_device(self) -> str:
        """The device towards other nodes; empty if there is none."""
        return self._direct.get(_NODE) or ""

    def _direct_device(self, devices: list[Device], _: list[NodeAddress]) -> Mapping[str, str]:
        return {_NODE: self._serving.node_facing_device(devices)}

    def _served(self, devices: list[Device], _: list[NodeAddress]) -> Mapping[IPAddress, NodePortAddress]:
        return self._serving.served(devices)

    def _wanted(self, devices: list[Device], _: list[NodeAddress]) -> Mapping[str, NodePortConfig]:
        if not self._reach.outside:
            return {_NODE: NodePortConfig()}
        ipv4, ipv6 = self._serving.sources(devices)
        return {_NODE: NodePortConfig(self._mode.flags, ipv4, ipv6, self._mode.seed)}

    async def _start(self) -> None:
        if not self._reach.outside:
            return
        self._mode.check()
        device = self._serving.direct_device
        if device and not any(matches(device, each.name) for each in self._devices.all()):
            raise UsageError(f"direct-routing-device={device}: the node has no such device")
        self._kernel.apply()
        served = ", ".join(str(each.ip) for each in self.addresses.all()) or "none"
        self._log.info("external clients are served", node_port_addresses=served)

    async def _log_netfilter_rules(self) -> None:
        """Log rules of other programs. A separate job, as listing many rules takes long."""
        try:
            found = await to_thread.run_sync(self._found_rules)
        except OSError as error:
            self._log.warning("netfilter rules of other programs cannot be listed", error=str(error))
            return
        if found.kube_proxy:
            self._log.warning(
                "rules of kube-proxy found and left in place: they see only packets that the datapath does"
                " not serve; kube-proxy --cleanup removes them",
                found=", ".join(found.kube_proxy),
            )
        if found.others:
            self._log.info(
                "netfilter rules of other programs found and left in place: they see neither packets that"
                " services translate before them, nor packets that bypass the host's stack",
                found=", ".join(found.others),
            )


_NODE: Final = "node"
_CHOSEN_BY_SERVICES: Final = NODEPORT_DSR_CHOSEN | NODEPORT_DSR_TCP | NODEPORT_DSR_OTHER
_DIRECT: Final = {"snat": 0, "hybrid": NODEPORT_DSR_TCP, "dsr": NODEPORT_DSR_TCP | NODEPORT_DSR_OTHER}


class _NodePortTarget(Target[str, NodePortConfig, NodePortConfig]):
    """The target of the reconciler: the map hive_nodeport."""

    def __init__(self, facts: NodePortMap) -> None:
        self._configs = facts

    async def observe(self) -> Mapping[str, NodePortConfig]:
        """The present configuration."""
        return {_NODE: self._configs.read()}

    async def put(self, batch: Mapping[str, NodePortConfig]) -> None:
        """Write the changed configuration."""
        for row in batch.values():
            self._configs.write(row)

    async def drop(self, batch: Collection[str]) -> None:
        """Clear the configuration; the table always has a row."""
        for _ in batch:
            self._configs.write(NodePortConfig())


def node_port_features(mode: NodePortMode, programs: ServicePrograms) -> Member[Collector]:
    """Report how external clients are served, as a feature in use."""
    value = (mode.forwarding, mode.algorithm, programs.acceleration)
    return features("node-port-features", lambda: {"adv_connect_and_lb_node_port_configuration": value})


cell = module(
    "node-ports",
    "Services for external clients",
    config(NodePortSettings, ForwardingSettings),
    provide(NodePorts, NodePortMode, KernelFacts.provided, node_port_features),
    provide_private(NodePortSysctls, ServingAddresses),
    invoke(NodePorts),
)
