"""The node's maps: opened at their pins, or created.

Every program refers to every map, and a preallocated map takes tens of megabytes. So a map that no cell uses
is replaced by a placeholder: an empty map of one entry, pinned beside the programs, where no tool takes it
for the map.
"""

import errno
import os
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from anyio import to_thread
from msgspec.structs import replace

from cells.base.metrics import MetricChoice
from cells.config import AgentConfig
from cells.maps.bpf import BpfError, measure, pin, replace_pin, unpin, unpin_unfinished
from cells.maps.map import EXIST, Epochs, Map, MapSpec, MapType, create_map, open_map, possible_cpus
from cells.maps.map_log import SYSCALLS, MapLog, SyscallTimes
from cells.maps.migration import RetiredMap, migrate, retired_maps
from cells.maps.specs import ALWAYS, NAT, MapSettings, family_of, map_specs, sizes
from lifecycle import HiveError, Hook, Lifecycle, Logger, NotStartedError, UsageError

__all__ = ["Maps", "PreparedMaps", "node_specs", "placeholder_spec"]


_SIZE_OPTIONS = {
    "cilium_egress_gw_policy_v4": "egress-gateway-policy-map-max",
    "cilium_ct4_global": "bpf-ct-global-tcp-max",
    "cilium_ct_any4_global": "bpf-ct-global-any-max",
    "cilium_ct6_global": "bpf-ct-global-tcp-max",
    "cilium_ct_any6_global": "bpf-ct-global-any-max",
    "cilium_lb4_reverse_sk": "bpf-sock-rev-map-max",
    "cilium_lb6_reverse_sk": "bpf-sock-rev-map-max",
    "cilium_snat_v4_external": "bpf-nat-global-max",
    "cilium_snat_v6_external": "bpf-nat-global-max",
}


class PreparedMaps:
    """Maps of a new node that another thread creates while Python imports the agent's cells.

    They are not pinned, so a failed start leaves nothing. Methods wait until the maps exist: call them in a
    worker thread. If their creation failed, there are none.
    """

    def __init__(self, made: Future[tuple[Map, ...]]) -> None:
        self._made = made
        self._taken: set[str] = set()

    def create(self, spec: MapSpec) -> Map:
        """The prepared, unpinned map of exactly these attributes, or a new one. Raises BpfError."""
        for table in self._maps():
            if table.spec == spec and spec.name not in self._taken:
                self._taken.add(spec.name)
                return table
        return create_map(spec)

    def close(self) -> None:
        """Close the maps that create() did not return."""
        for table in self._maps():
            if table.spec.name not in self._taken:
                self._taken.add(table.spec.name)
                table.close()

    def _maps(self) -> Iterable[Map]:
        return () if self._made.exception() is not None else self._made.result()


class Maps:
    """The maps shared by all endpoints. Reading one before the hook ran raises NotStartedError.

    A Map has one buffer: use these on the event loop only, or open another by its ``id``.
    """

    lxc: Map
    """cilium_lxc: LxcKey to LxcValue, the addresses of this node."""
    ipcache: Map
    """cilium_ipcache: IpcacheKey to IpcacheValue, the identity of every prefix."""
    policy_prefixes: Map
    """hive_policy_prefixes: IpcacheKey to identity, for CIDR policies that also select pods."""
    ct4_tcp: Map
    """cilium_ct4_global: CtKey to CtEntry."""
    ct4_any: Map
    """cilium_ct_any4_global: CtKey to CtEntry, all but TCP."""
    ct6_tcp: Map
    """cilium_ct6_global: CtKey to CtEntry, IPv6."""
    ct6_any: Map
    """cilium_ct_any6_global: CtKey to CtEntry, IPv6, all but TCP."""
    fragments4: Map
    """cilium_ipv4_frag_datagrams: FragmentPorts of datagrams in fragments."""
    fragments6: Map
    """cilium_ipv6_frag_datagrams: the same for IPv6."""
    metrics: Map
    """cilium_metrics: MetricsKey to one MetricsValue for each CPU."""
    events: Map
    """cilium_events: perf event array."""
    endpoints: Map
    """hive_endpoints: ifindex to EndpointConfig."""
    node: Map
    """hive_node: index 0 to NodeConfig."""
    links: Map
    """hive_links: hive_endpoints rows cached by each CPU; written by the programs."""
    passage: Map
    """hive_passage: the packet that each CPU's pod program handles; written by the programs."""
    epoch: Map
    """hive_epoch: see Epochs."""
    epochs: Epochs
    """The policy epochs. Maps advance them on writes."""
    policies: Map
    """hive_policies: endpoint id to its policy map."""
    services4: Map
    """cilium_lb4_services_v2: frontends and their backends."""
    services6: Map
    """cilium_lb6_services_v2: the same for IPv6."""
    backends4: Map
    """cilium_lb4_backends_v3: backend id to address, port and state."""
    backends6: Map
    """cilium_lb6_backends_v3: the same for IPv6."""
    reverse_nat4: Map
    """cilium_lb4_reverse_nat: reverse NAT index to the address and port of the frontend."""
    reverse_nat6: Map
    """cilium_lb6_reverse_nat: the same for IPv6."""
    affinity4: Map
    """cilium_lb4_affinity: a client's last backend, and when; written by the programs."""
    affinity6: Map
    """cilium_lb6_affinity: the same for IPv6."""
    affinity_match: Map
    """cilium_lb_affinity_match: backends to which clients of a frontend may return."""
    reverse_sk4: Map
    """cilium_lb4_reverse_sk: ReverseSkKey to ReverseSk, sockets' original destinations; by programs."""
    reverse_sk6: Map
    """cilium_lb6_reverse_sk: the same for IPv6."""
    skip_lb4: Map
    """cilium_skip_lb4: SkipLbKey, destinations to which a namespace's sockets connect directly."""
    skip_lb6: Map
    """cilium_skip_lb6: the same for IPv6."""
    sock: Map
    """hive_sock: index 0 to SockConfig."""
    source_range4: Map
    """cilium_lb4_source_range: client prefixes that a frontend allows or denies."""
    source_range6: Map
    """cilium_lb6_source_range: the same for IPv6."""
    maglev4: Map
    """cilium_lb4_maglev: reverse NAT index to a map of one entry, numbers of backends."""
    maglev6: Map
    """cilium_lb6_maglev: the same for IPv6."""
    nodeport: Map
    """hive_nodeport: index 0 to NodePortConfig."""
    nodeport_neighbours4: Map
    """cilium_nodeport_neigh4: external client to source MAC of its packets; written by programs."""
    nodeport_neighbours6: Map
    """cilium_nodeport_neigh6: the same for IPv6."""
    tunnel: Map
    """hive_tunnel: index 0 to TunnelConfig."""
    tunnels: Map
    """cilium_tunnel_map: TunnelKey to TunnelValue, the nodes of pod networks."""
    nodes: Map
    """cilium_node_map_v2: NodeKey to NodeValue, addresses of other nodes."""
    snat4: Map
    """cilium_snat_v4_external: NatKey to NatEntry, flows with SNAT; written by the programs."""
    snat6: Map
    """cilium_snat_v6_external: the same for IPv6."""
    ipmasq4: Map
    """cilium_ipmasq_v4: destinations to which packets are not masqueraded."""
    ipmasq6: Map
    """cilium_ipmasq_v6: the same for IPv6."""
    devices: Map
    """hive_devices: ifindex to DeviceConfig."""
    encrypt_state: Map
    """cilium_encrypt_state: index 0 to the key number with which IPsec encrypts; 0: none."""
    pod_networks: Map
    """hive_pod_networks: IpcacheKey to 1 for other nodes' pod networks, to 0 for this node's."""
    encryption: Map
    """hive_encryption: index 0 to EncryptionConfig."""
    encryption_paths: Map
    """hive_encryption_paths: IpcacheKey to the ifindex for a node during a key rotation."""
    l2_responder4: Map
    """cilium_l2_responder_v4: L2ResponderKey to the number of replies, for services' addresses."""
    egress_gateway4: Map
    """cilium_egress_gw_policy_v4: EgressKey to EgressValue, the gateways of pods."""
    runtime_config: Map
    """cilium_runtime_config: values that change while programs run; index AGENT_LIVENESS."""
    entry: Map
    """hive_entry: programs that the dispatchers call."""
    l3_entry: Map
    """hive_l3_entry: programs of devices without Ethernet headers."""
    xdp_entry: Map
    """hive_xdp_entry: the program that the XDP dispatcher calls."""

    created: frozenset[str]
    """Names of the maps that this start created. Programs loaded earlier use other maps: reload them."""
    unused: frozenset[str] = frozenset()
    """Names of maps that no cell uses: their attributes are placeholders."""

    def __init__(
        self,
        settings: MapSettings,
        agent: AgentConfig,
        lifecycle: Lifecycle,
        log: Logger,
        prepared: PreparedMaps | None = None,
        choice: MetricChoice | None = None,
    ) -> None:
        self._settings = settings
        self.syscalls = SyscallTimes() if choice is not None and choice.adds(SYSCALLS) else None
        """Durations of system calls, if the setting ``metrics`` adds them."""
        self._prepared = prepared
        self._families = {0} | ({4} if agent.ipv4 else set()) | ({6} if agent.ipv6 else set())
        self._used = {each for each in ALWAYS if family_of(each) in self._families}
        self._directory = agent.globals_dir
        self._placeholders = agent.programs_dir / "unused"
        self._log = log
        self._open: list[Map] = []
        lifecycle.append(Hook("open the maps", self._start, self._stop))

    if not TYPE_CHECKING:  # type checkers must reject unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            if name in Maps.__annotations__:
                raise NotStartedError(
                    f"Maps.{name} was read before the hook 'open the maps' ran: depend on Maps"
                )
            raise AttributeError(name)

    def use(self, *attributes: str, both_families: bool = False) -> None:
        """Add maps to those of every node. For constructors of cells that read or write the maps.

        A map of an address family that pods lack is added only with ``both_families``. Raises RuntimeError if
        the maps are open without these; a cell that is enabled again uses the maps it had.
        """
        if unknown := sorted(set(attributes) - Maps.__annotations__.keys()):
            raise AttributeError(f"Maps has no {', '.join(unknown)}")
        wanted = {each for each in attributes if both_families or family_of(each) in self._families}
        if self._open and not wanted <= self._used:
            raise RuntimeError(f"{', '.join(attributes)}: the maps are open, use() belongs in a constructor")
        self._used |= wanted

    def uses(self, attribute: str) -> bool:
        """Whether a cell uses the map; complete once all cells are constructed."""
        return attribute in self._used

    @property
    def conntrack(self) -> tuple[Map, ...]:
        """The conntrack maps in use."""
        return self._of_these(self.ct4_tcp, self.ct4_any, self.ct6_tcp, self.ct6_any)

    @property
    def nat(self) -> tuple[Map, ...]:
        """The NAT maps in use."""
        return self._of_these(self.snat4, self.snat6)

    def _of_these(self, *tables: Map) -> tuple[Map, ...]:
        return tuple(table for table in tables if table.spec.name not in self.unused)

    @property
    def directory(self) -> Path:
        """The directory of the maps' pins."""
        return self._directory

    def all(self) -> tuple[Map, ...]:
        """All open maps, with the placeholders: programs are loaded with these."""
        return tuple(self._open)

    def used(self) -> tuple[Map, ...]:
        """The open maps without the placeholders."""
        return self._of_these(*self._open)

    def pins(self) -> dict[Path, Map]:
        """All open maps by the path of their pin."""
        return {self._place(table.spec.name) / table.spec.name: table for table in self._open}

    def _place(self, name: str) -> Path:
        return self._placeholders if name in self.unused else self._directory

    async def _start(self) -> None:
        settings = self._settings
        if self.syscalls is not None:
            measure(self.syscalls.wrap)
        found = sizes(settings, node_memory())
        if settings.bpf_policy_map_max > found.policy:
            self._log.warning(
                "bpf-policy-map-max lowered", asked=settings.bpf_policy_map_max, entries=found.policy
            )
        if settings.bpf_nat_global_max not in {None, NAT, found.nat}:  # the default is lowered silently
            raise UsageError(
                f"bpf-nat-global-max={settings.bpf_nat_global_max}: expected at most"
                f" {found.ct_tcp + found.ct_any}, the entries of the conntrack maps of this node"
            )
        # Creating a large preallocated map takes tens of milliseconds.
        await to_thread.run_sync(self._open_all)

    def _open_all(self) -> None:
        specs = node_specs(self._settings)
        self.unused = frozenset(spec.name for each, spec in specs.items() if each not in self._used)
        self._placeholders.mkdir(mode=0o755, parents=True, exist_ok=True)
        for directory in (self._directory, self._placeholders):
            unpin_unfinished(directory, (spec.name for spec in specs.values()))
        created = set()
        create = create_map if self._prepared is None else self._prepared.create
        for attribute, spec in specs.items():
            if attribute in self._used:
                table, is_new = open_or_create(spec, self._directory, self._log, create)
                if is_new:
                    created.add(spec.name)
            else:
                table = open_placeholder(spec, self._placeholders, create)
            self._open.append(table)
            setattr(self, attribute, table)
        if self._prepared is not None:
            self._prepared.close()
        for table in self._open if self.syscalls is not None else ():
            table.remeasure()
        for written in (self.lxc, self.ipcache):
            written.log = MapLog()
        self.epochs = Epochs(self.epoch)
        for table in self._open:
            table.epochs = self.epochs
        self.created = frozenset(created)

    def catch_up(self) -> None:
        """Copy entries that current programs wrote to replaced maps since the maps were copied.

        Call it in the thread that replaces the programs, right before: connections that begin between this
        call and :meth:`remove_retired` are unknown to the new programs until remove_retired().
        """
        for retired, current in self._retired():
            retired.catch_up(current)

    async def remove_retired(self) -> None:
        """Remove replaced and unused maps, once no program uses them."""
        await to_thread.run_sync(self._remove_retired)

    def _remove_retired(self) -> None:
        for retired, current in self._retired():
            taken = retired.finish(current)
            self._log.info("retired map released", map=retired.name, entries_taken_over=taken)
        for retired in retired_maps(self._directory):
            if retired.name in self.unused:
                retired.remove()
        for table in self._open:
            name = table.spec.name
            other = self._directory if name in self.unused else self._placeholders
            if unpin(other / name) and name in self.unused:
                self._log.info("map removed: nothing uses it any more", map=name)

    def _retired(self) -> list[tuple[RetiredMap, Map]]:
        present = {table.spec.name: table for table in self.used()}
        found = retired_maps(self._directory)
        return [(retired, present[retired.name]) for retired in found if retired.name in present]

    async def _stop(self) -> None:
        for table in self._open:
            table.close()  # the pins stay: the datapath continues without the agent
        self._open.clear()
        if self.syscalls is not None:
            measure(None)


def open_or_create(
    spec: MapSpec, directory: Path, log: Logger, create: Callable[[MapSpec], Map] = create_map
) -> tuple[Map, bool]:
    """The map pinned as ``spec.name``, or a new pinned map; and whether it is new.

    Entries of a pinned map with other attributes are copied: see migration. Raises HiveError, one line,
    naming the map.
    """
    path = directory / spec.name
    try:
        if (pinned := _open_pinned(path)) is not None:
            if spec.same_as(pinned.spec) and not takes_inner(pinned, spec):
                pinned.close()
                table = create_map(spec)
                replace_pin(table.fd, path)  # the inner maps have another size: create them again
                table.spec = spec
                return table, True
            if spec.same_as(pinned.spec):
                pinned.spec = spec  # with the inner map, which the kernel does not report
                return pinned, False
            with pinned:
                table = migrate(pinned, spec, path, log)
            table.spec = spec
            return table, True
        table = create(spec)
        try:
            pin(table.fd, path)
        except BaseException:
            table.close()
            raise
        table.spec = spec
    except OSError as error:
        raise HiveError(f"{error}{_advice(error, spec.name)}") from error
    return table, True


def open_placeholder(spec: MapSpec, directory: Path, create: Callable[[MapSpec], Map] = create_map) -> Map:
    """An empty map of one entry in place of a map that no cell uses, pinned in ``directory``.

    It is the same at every start, so programs need no reload. Raises HiveError, one line.
    """
    small = placeholder_spec(spec)
    path = directory / spec.name
    try:
        table = _open_pinned(path)
        if table is not None and not (small.same_as(table.spec) and takes_inner(table, small)):
            table.close()
            table = None
        if table is None:
            table = create(small)
            replace_pin(table.fd, path)
    except OSError as error:
        raise HiveError(f"{error}{_advice(error, spec.name)}") from error
    table.spec = small
    return table


def placeholder_spec(spec: MapSpec) -> MapSpec:
    """The attributes of a map's placeholder."""
    return replace(spec, max_entries=1)


def node_specs(settings: MapSettings) -> dict[str, MapSpec]:
    """Attributes of the node's maps, by the names in Maps, as if all were used."""
    found = sizes(settings, node_memory())
    return map_specs(found, preallocate=settings.preallocate_bpf_maps, cpus=possible_cpus())


def node_memory() -> int:
    """The node's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def takes_inner(outer: Map, spec: MapSpec) -> bool:
    """Whether a map of maps accepts the wanted inner maps; the kernel refuses those of other sizes."""
    if spec.inner is None or spec.type is not MapType.HASH_OF_MAPS:
        return True
    with create_map(spec.inner) as inner:
        try:
            outer.update(bytes(spec.key_size), struct.pack("<I", inner.fd), EXIST)
        except BpfError as error:
            return error.errno == errno.ENOENT  # no entry to replace: index 0 is never used
    return True


def _open_pinned(path: Path) -> Map | None:
    try:
        return open_map(path)
    except BpfError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


def _advice(error: OSError, name: str) -> str:
    match error.errno:
        case errno.ENOMEM:
            option = _SIZE_OPTIONS.get(name)
            return f": not enough memory, lower {option}" if option else ": not enough memory"
        case errno.EPERM if getattr(error, "operation", "") == "pin":
            return ": bpf-root must be a mounted bpffs (mount -t bpf bpf <bpf-root>) that we may write to"
        case errno.EPERM:
            return ": the agent needs root, or CAP_BPF and CAP_NET_ADMIN"
        case errno.ENOENT:
            return ": the directory of the pins is missing below bpf-root"
        case errno.ENOSYS:
            return ": this kernel has no BPF"
    return ""
