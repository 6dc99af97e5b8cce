"""Brings the programs into the kernel, and onto interfaces."""

import errno
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Final

import anyio.to_thread
import msgspec
from msgspec import structs

from cells.config import AgentConfig
from cells.datapath.attachments import L3_OBJECT, XDP_OBJECT, Dispatchers, Drivers, L3Programs
from cells.datapath.cilium_takeover import CiliumPrograms
from cells.datapath.generation import (
    Constants,
    build_of,
    ids_in_force,
    in_force,
    publish,
    read_object,
    serves,
)
from cells.datapath.libbpf import LoadError
from cells.datapath.programs import ENTRIES, XDP_DISPATCHER, DeviceKind, at, pod_link
from cells.datapath.settings import (
    PACKAGED_OBJECTS,
    DatapathSettings,
    HostRouting,
    MonitorNotifications,
    ProgramSettings,
)
from cells.datapath.trial import PreloadedPrograms, WrongObjectError, load_tried
from cells.maps.bpf import BpfError
from cells.maps.map import Map, map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.endpoints import (
    ENDPOINT_REQUIRE_EGRESS_PROG,
    NODE_AUDITS_HOST,
    NODE_CIDR_MATCHES_PODS,
    EndpointConfig,
    NodeConfig,
)
from cells.maps.records.flows import DeviceConfig
from cells.netlink.connection import NetlinkError
from cells.netlink.links import HostLinks
from cells.netlink.rows import LinkInfo, LinkPrograms
from lifecycle import HiveError, Hook, Lifecycle, Logger, NotStartedError

__all__ = ["TUNNEL_LINKS", "Datapath", "HostPolicy"]


HOST_LINK: Final = "cilium_host"
NET_LINK: Final = "cilium_net"
TUNNEL_LINKS: Final = MappingProxyType({"vxlan": "cilium_vxlan", "geneve": "cilium_geneve"})
"""The tunnel's device by its kind, of which a node has one."""


class InForce(msgspec.Struct, frozen=True):
    """What the hook brought about."""

    generation: int
    build: str
    programs: MappingProxyType[str, int]


class HostPolicy(msgspec.Struct, frozen=True):
    """The endpoint with the node's own policy."""

    endpoint_id: int = 0
    """0: it may do everything."""
    audited: bool = False
    """What that policy refuses is let through and reported."""


class Datapath:
    """The node's eBPF programs: one set for all endpoints, replaced as a whole.

    If the object, its settings or the maps are others than those of the generation in force, the hook loads a
    new one beside it, tries it on packets, and replaces the entries the attached programs jump to. If any of
    that fails, HiveError, and the earlier generation forwards on.
    """

    def __init__(
        self,
        settings: DatapathSettings,
        agent: AgentConfig,
        maps: Maps,
        links: HostLinks,
        lifecycle: Lifecycle,
        log: Logger,
        routing: HostRouting | None = None,
        preloaded: PreloadedPrograms | None = None,
    ) -> None:
        self.routing = routing or HostRouting()
        """How packets get from devices to pods and back."""
        legacy = not self.routing.past_stack
        chosen = structs.asdict(settings) | {"enable_host_legacy_routing": legacy}
        self._settings = ProgramSettings(
            **chosen, marks_for_xfrm=self.routing.marks, serves_outside=self.routing.serves_outside
        )
        self._object = settings.datapath_object or PACKAGED_OBJECTS / "datapath.o"
        self._agent = agent
        self._pins = agent.programs_dir / "dispatch"
        self._cilium: CiliumPrograms | None = None
        self._maps = maps
        self._links = links
        self._drivers = Drivers(self._settings, maps, links)
        self._l3 = L3Programs(self._settings, maps)
        self._log = log
        self._preloaded = preloaded
        self._dispatchers: Dispatchers | None = None
        self._in_force: InForce | None = None
        self._node: NodeConfig | None = None
        self.notifications = settings.notifications
        """Which events the programs send; set_notifications() changes it."""
        self._host: HostPolicy | None = None
        lifecycle.append(Hook("load the datapath", self._start, self._stop))

    @property
    def generation(self) -> int:
        """Counts the builds loaded on this node since it booted."""
        return self._started().generation

    @property
    def build(self) -> str:
        """Which object runs: the first 12 hexadecimal digits of its SHA-256."""
        return self._started().build

    @property
    def programs(self) -> MappingProxyType[str, int]:
        """Kernel ids of all programs by name, attached ones and those they jump to."""
        return MappingProxyType(self._started().programs | self._l3.programs)

    def attach_endpoint(self, ifindex: int, *, egress_prog: bool = False) -> None:
        """Attach the programs for what a pod sends to the host's end of its link; again is harmless.

        ``egress_prog``: and what comes to it by that link, which on our own links is seen before. Raises
        NetlinkError.
        """
        self._attach(ifindex, pod_link(egress_prog=egress_prog))

    def attach_host(self, ifindex_host: int, ifindex_net: int) -> None:
        """Attach to cilium_host and cilium_net, the host's way to pods; again is harmless. NetlinkError."""
        self._attach(ifindex_host, DeviceKind.HOST_LINK)
        self._attach(ifindex_net, DeviceKind.NET_LINK)

    def attach_tunnel(self, ifindex: int) -> None:
        """Attach to the tunnel's device; again is harmless. Raises NetlinkError."""
        self._attach(ifindex, DeviceKind.TUNNEL)

    def serves_tunnel(self, ifindex: int) -> bool:
        """Whether the tunnel's device has what :meth:`attach_tunnel` attaches. Raises NetlinkError."""
        return self._has(ifindex, self._expected(DeviceKind.TUNNEL))

    def release_previous(self, keep: Collection[int]) -> None:
        """Take off every interface what Cilium's agent left there, but of ``keep``, by index.

        To be called once all that lives on has ours. Raises BpfError, NetlinkError, OSError.
        """
        self._started()
        if self._cilium is None or not self._cilium.there:
            return
        released = self._cilium.release_all(self.programs.values(), keep)
        self._log.info("Cilium's programs released", pins=len(released), left=len(keep))

    async def prepare_l3(self) -> None:
        """Load what devices without Ethernet headers need; again is harmless. HiveError."""
        generation, tables = self._started().generation, self._maps.all()
        if self._l3.programs:
            return
        try:
            data = read_object(L3_OBJECT)
            await anyio.to_thread.run_sync(self._l3.put_in_force, tables, data, generation)
        except BpfError as error:
            raise HiveError(f"devices without Ethernet headers cannot be served: {error}") from error

    def attach_device(self, ifindex: int, *, l3: bool = False) -> None:
        """Attach to a device that packets leave the node through; again is harmless. NetlinkError.

        ``l3``: it has no Ethernet headers; :meth:`prepare_l3` comes first.
        """
        self._attach(ifindex, _native(l3=l3))

    @property
    def program_settings(self) -> ProgramSettings:
        """What the programs do by settings."""
        return self._settings

    @property
    def accelerates(self) -> bool:
        """Whether devices' drivers are to have a program, too."""
        return self._settings.accelerates

    def accelerate_device(self, ifindex: int) -> bool:
        """Attach to the device's driver; False if it cannot, where only effort is asked for. NetlinkError."""
        self._started()
        assert self._dispatchers is not None  # noqa: S101  (set with _in_force)
        return self._drivers.attach(ifindex, self._dispatchers.descriptors[XDP_DISPATCHER])

    def slow_device(self, ifindex: int) -> None:
        """Take off what :meth:`accelerate_device` attached. NetlinkError."""
        self._drivers.detach(ifindex)

    def detach_device(self, ifindex: int) -> None:
        """Take off what was attached; other people's programs stay. NetlinkError."""
        self._drivers.detach(ifindex)
        found = self._links.programs(ifindex)
        ours = [self._expected(_native(l3=l3)) for l3 in (False, True)]
        self._links.detach(
            ifindex,
            ingress=found.ingress in {each.ingress for each in ours},
            egress=found.egress in {each.egress for each in ours},
        )

    def serves_device(self, ifindex: int, *, l3: bool = False, accelerated: bool) -> bool:
        """Whether the device has what :meth:`attach_device` attaches, and its driver or not. NetlinkError."""
        if not self._has(ifindex, self._expected(_native(l3=l3))) or (l3 and not self._l3.programs):
            return False
        if accelerated:
            return self._drivers.serves(ifindex, self.programs[XDP_DISPATCHER])
        return not self._drivers.has_any(ifindex)

    def endpoint_programs(self, *, egress_prog: bool = False) -> LinkPrograms:
        """Kernel ids of what :meth:`attach_endpoint` attaches."""
        return self._expected(pod_link(egress_prog=egress_prog))

    def serves_host(self, ifindex_host: int, ifindex_net: int) -> bool:
        """Whether cilium_host and cilium_net have what :meth:`attach_host` attaches. NetlinkError."""
        wanted = {ifindex_host: DeviceKind.HOST_LINK, ifindex_net: DeviceKind.NET_LINK}
        return all(self._has(index, self._expected(place)) for index, place in wanted.items())

    def set_node(self, node: NodeConfig) -> None:
        """Configure the programs for the node; of which packets they report is ours to decide."""
        self._node = node
        self._maps.node.update(bytes(4), self._row(node))

    def has_node(self, node: NodeConfig) -> bool:
        """Whether the programs already have what :meth:`set_node` would set."""
        return self._maps.node.lookup(bytes(4)) == self._row(node)

    def known_node(self) -> NodeConfig | None:
        """What the programs know of the node, maybe by an agent that ran here before; None: nothing."""
        value = self._maps.node.lookup(bytes(4))
        return None if value is None or not any(value) else NodeConfig.unpack(value)

    @property
    def host_policy(self) -> HostPolicy:
        """The endpoint with the node's own policy; before :meth:`set_host_policy`, an earlier agent's."""
        if self._host is not None:
            return self._host
        known = self.known_node()
        if known is None:
            return HostPolicy()
        return HostPolicy(known.host_endpoint, audited=bool(known.flags & NODE_AUDITS_HOST))

    def set_host_policy(self, policy: HostPolicy) -> None:
        """Enforce an endpoint's policy on the node itself from now on. Raises BpfError."""
        before = self.host_policy
        self._host = policy
        if policy == before:
            return
        node = self._node or self.known_node()
        if node is not None:
            self._maps.node.update(bytes(4), self._row(node))  # which voids what pods send to the node

    def _row(self, node: NodeConfig) -> bytes:
        host = self.host_policy
        row = structs.replace(
            node,
            flags=self.notifications.flags
            | NODE_AUDITS_HOST * host.audited
            | NODE_CIDR_MATCHES_PODS * self._maps.uses("policy_prefixes"),
            aggregation=self.notifications.aggregation,
            host_endpoint=host.endpoint_id,
        )
        return row.pack()

    def set_notifications(self, notifications: MonitorNotifications) -> None:
        """Make the programs report this of packets, from the next on. Raises BpfError, nothing changed."""
        before, self.notifications = self.notifications, notifications
        if self._node is None:
            return
        try:
            self.set_node(self._node)
        except BpfError:
            self.notifications = before
            raise

    async def repair(self) -> list[str]:
        """Restore removed entries of hive_entry and pins; the names of what was restored.

        Raises what the start does.
        """
        previous = self._dispatchers
        assert previous is not None  # noqa: S101  (set with _in_force)
        if unpinned := await anyio.to_thread.run_sync(previous.unpinned, self._pins):
            previous.settle(self._pins)
        missing = await anyio.to_thread.run_sync(self._missing)
        if missing:
            try:
                await self._put_in_force()
            finally:
                if self._dispatchers is not previous:
                    previous.close()
        return unpinned + missing

    def _missing(self) -> list[str]:
        """Programs that are not the ones in force any more: for a worker thread."""
        known = self._started().programs
        with map_by_id(self._maps.entry.id) as entry:
            now = ids_in_force(entry)
        return [name for name in ENTRIES if now.get(name) != known[name]] + [
            *self._drivers.missing(),
            *self._l3.missing(),
        ]

    def _started(self) -> InForce:
        if self._in_force is None:
            raise NotStartedError(
                "Datapath was used before the hook 'load the datapath' ran: depend on Datapath"
            )
        return self._in_force

    def _attach(self, ifindex: int, place: DeviceKind) -> None:
        self._started()
        assert self._dispatchers is not None  # noqa: S101  (set with _in_force)
        ingress, egress = at(place)
        descriptors = self._dispatchers.descriptors
        self._links.attach_clsact(ifindex, descriptors[ingress], descriptors.get(egress), ingress, egress)
        if self._cilium is not None and self._cilium.there:
            self._cilium.release(ifindex, self.programs.values())

    def _has(self, ifindex: int, expected: LinkPrograms) -> bool:
        """Whether ours are there; where we attach nothing, others may."""
        found = self._links.programs(ifindex)
        return found.ingress == expected.ingress and expected.egress in {0, found.egress}

    def _expected(self, place: DeviceKind) -> LinkPrograms:
        ingress, egress = at(place)
        return LinkPrograms(self.programs[ingress], self.programs[egress] if egress else 0)

    async def _start(self) -> None:
        try:
            self._cilium = CiliumPrograms(self._agent.programs_dir, self._agent.globals_dir, self._links)
            await self._put_in_force()
        except BaseException:  # the thread may have finished though we are cancelled
            await self._stop()
            raise

    async def _put_in_force(self) -> None:
        try:
            self._in_force = await anyio.to_thread.run_sync(self._load)
        except LoadError as error:
            if error.log:
                self._log.error("libbpf", log=error.log)
            raise
        except BpfError as error:
            raise HiveError(f"the datapath could not be loaded: {error}") from error
        if self._dispatchers is not None and self._dispatchers.stale:
            self._attach_everywhere()
            self._dispatchers.settle(self._pins)
        await self._maps.settle()
        self._log.info("datapath loaded", generation=self.generation, build=self.build)

    async def _stop(self) -> None:
        if self._dispatchers is not None:
            self._dispatchers.close()  # what is attached and entered forwards on
            self._dispatchers = None
        self._in_force = None

    def _load(self) -> InForce:
        """Bring the wanted generation about, in a worker thread: the verifier takes tens of milliseconds."""
        path, tables = self._object, self._maps.all()
        data = read_object(path)
        with map_by_id(self._maps.entry.id, writable=True) as entry:  # this thread's own
            constants = in_force(entry)
            if constants is None or not self._fits(constants, data) or not serves(entry, tables, constants):
                constants = self._replace(entry, constants, data)
            self._drivers.put_in_force(tables, read_object(XDP_OBJECT), constants.generation)
            if self._l3.needed:
                self._l3.put_in_force(tables, read_object(L3_OBJECT), constants.generation)
            self._dispatchers = self._load_dispatchers(tables)
            ids = ids_in_force(entry) | self._drivers.programs
        ids |= {name: info.id for name, info in self._dispatchers.describe().items()}
        return InForce(constants.generation, constants.build, MappingProxyType(ids))

    def _fits(self, constants: Constants, data: bytes) -> bool:
        """Whether what is in force was made from this object and these settings."""
        return constants.build == build_of(data) and constants == constants.configured(self._settings)

    def _replace(self, entry: Map, previous: Constants | None, data: bytes) -> Constants:
        tables = self._maps.all()
        known = self._in_force.generation if self._in_force is not None else 0
        generation = max(previous.generation if previous else 0, known) + 1
        path = self._object
        try:
            with ExitStack() as parts:
                wanted = data, tables, generation, self._settings, parts
                found = self._preloaded.take(*wanted) if self._preloaded is not None else None
                programs, constants = found or load_tried(
                    data, path.name, tables, generation, self._settings, parts, first=previous is None
                )
                self._maps.catch_up()
                publish(entry, programs)
        except LoadError as error:
            if path.parent == PACKAGED_OBJECTS:
                raise
            raise WrongObjectError(path, error) from error
        return constants

    def _load_dispatchers(self, tables: tuple[Map, ...]) -> Dispatchers:
        path = PACKAGED_OBJECTS / "dispatch.o"
        return Dispatchers.load(read_object(path), path.name, tables, self._pins)

    def _attach_everywhere(self) -> None:
        """Replace the programs of every interface we had attached to, one atomic exchange each."""
        rows = {key: EndpointConfig.unpack(row) for key, row in self._maps.endpoints.items()}
        found = {link.name: link for link in self._links.links()}
        for link in found.values():
            pod = rows.get(struct.pack("<I", link.ifindex))
            if pod is None or link.kind != "veth" or link.mac != pod.host_mac:  # a row may outlive its link
                continue
            with _unless_removed():
                self.attach_endpoint(link.ifindex, egress_prog=bool(pod.flags & ENDPOINT_REQUIRE_EGRESS_PROG))
        indexes = {link.ifindex for link in found.values()}
        for key, row in self._maps.devices.items():
            (ifindex,) = struct.unpack("<I", key)
            if ifindex in indexes:
                with _unless_removed():
                    self.attach_device(ifindex, l3=DeviceConfig.unpack(row).l3)
                    if self.accelerates and self._drivers.has_any(ifindex):
                        self.accelerate_device(ifindex)
        if HOST_LINK in found and NET_LINK in found:
            with _unless_removed():
                self.attach_host(found[HOST_LINK].ifindex, found[NET_LINK].ifindex)
        for ifindex in _tunnels(found.values()):
            with _unless_removed():
                self.attach_tunnel(ifindex)


@contextmanager
def _unless_removed() -> Iterator[None]:
    """A link that is removed meanwhile needs no programs."""
    try:
        yield
    except NetlinkError as error:
        if error.errno != errno.ENODEV:
            raise


def _tunnels(links: Iterable[LinkInfo]) -> list[int]:
    return [link.ifindex for link in links if TUNNEL_LINKS.get(link.kind) == link.name]


def _native(*, l3: bool) -> DeviceKind:
    return DeviceKind.NATIVE_L3_DEVICE if l3 else DeviceKind.NATIVE_DEVICE
