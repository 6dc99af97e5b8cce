"""Datapath: loads the node's programs, replaces them atomically, and attaches dispatchers to interfaces.

Router, endpoints, tunnel, masquerading and encryption attach their devices through it; the status and the
monitor read its state.
"""

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
from cells.datapath.attachments import L3_OBJECT, XDP_OBJECT, Dispatchers, L3Programs, XdpAcceleration
from cells.datapath.cilium_takeover import CiliumPrograms
from cells.datapath.generation import (
    Constants,
    active_constants,
    active_program_ids,
    build_of,
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
"""Name of the tunnel device by kind; a node has one of them."""


class ActivePrograms(msgspec.Struct, frozen=True):
    """The generation of programs that the start hook activated."""

    generation: int
    build: str
    programs: MappingProxyType[str, int]


class HostPolicy(msgspec.Struct, frozen=True):
    """The endpoint of the host policy."""

    endpoint_id: int = 0
    """0: no host policy."""
    audited: bool = False
    """Audit mode: forward and report packets that the host policy denies."""


class Datapath:
    """The node's eBPF programs: one set for all endpoints, replaced as a whole.

    If the object, its settings or the maps differ from those of the active generation, the start hook loads a
    new one, tests it on packets, and replaces the entries in hive_entry. If any step fails, it raises
    HiveError, and the earlier generation keeps forwarding.
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
        """Whether packets between devices and pods bypass the host's stack."""
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
        self._xdp = XdpAcceleration(self._settings, maps, links)
        self._l3 = L3Programs(self._settings, maps)
        self._log = log
        self._preloaded = preloaded
        self._dispatchers: Dispatchers | None = None
        self._active: ActivePrograms | None = None
        self._node: NodeConfig | None = None
        self.notifications = settings.notifications
        """The events that the programs send; set_notifications() changes it."""
        self._host: HostPolicy | None = None
        lifecycle.append(Hook("load the datapath", self._start, self._stop))

    @property
    def generation(self) -> int:
        """Number of the active generation, counted since the node booted."""
        return self._started().generation

    @property
    def build(self) -> str:
        """The active object: the first 12 hexadecimal digits of its SHA-256."""
        return self._started().build

    @property
    def programs(self) -> MappingProxyType[str, int]:
        """Kernel ids of all programs by name: dispatchers and the programs they call."""
        return MappingProxyType(self._started().programs | self._l3.programs)

    def attach_endpoint(self, ifindex: int, *, egress_prog: bool = False) -> None:
        """Attach the programs to the host side of a pod's link; idempotent.

        ``egress_prog`` also attaches cil_to_container, for links that another plugin made; on our own links
        ingress policy is enforced before delivery. Raises NetlinkError.
        """
        self._attach(ifindex, pod_link(egress_prog=egress_prog))

    def attach_host(self, ifindex_host: int, ifindex_net: int) -> None:
        """Attach the programs to cilium_host and cilium_net; idempotent. Raises NetlinkError."""
        self._attach(ifindex_host, DeviceKind.HOST_LINK)
        self._attach(ifindex_net, DeviceKind.NET_LINK)

    def attach_tunnel(self, ifindex: int) -> None:
        """Attach the programs to the tunnel device; idempotent. Raises NetlinkError."""
        self._attach(ifindex, DeviceKind.TUNNEL)

    def serves_tunnel(self, ifindex: int) -> bool:
        """Return whether the tunnel device has the current dispatchers. Raises NetlinkError."""
        return self._has(ifindex, self._expected(DeviceKind.TUNNEL))

    def release_previous(self, keep: Collection[int]) -> None:
        """Detach the programs of Cilium's agent from all interfaces except ``keep`` (indexes).

        Call it after ours are attached everywhere. Raises BpfError, NetlinkError, OSError.
        """
        self._started()
        if self._cilium is None or not self._cilium.present:
            return
        released = self._cilium.release_all(self.programs.values(), keep)
        self._log.info("Cilium's programs detached", pins=len(released), left=len(keep))

    async def prepare_l3(self) -> None:
        """Load the programs of devices without Ethernet headers; idempotent. Raises HiveError."""
        generation, tables = self._started().generation, self._maps.all()
        if self._l3.programs:
            return
        try:
            data = read_object(L3_OBJECT)
            await anyio.to_thread.run_sync(self._l3.activate, tables, data, generation)
        except BpfError as error:
            raise HiveError(f"devices without Ethernet headers cannot be served: {error}") from error

    def attach_device(self, ifindex: int, *, l3: bool = False) -> None:
        """Attach the programs to a native device; idempotent. Raises NetlinkError.

        ``l3``: it has no Ethernet headers; call :meth:`prepare_l3` before.
        """
        self._attach(ifindex, _native(l3=l3))

    @property
    def program_settings(self) -> ProgramSettings:
        """The settings of the programs, with those that other cells determine."""
        return self._settings

    @property
    def accelerates(self) -> bool:
        """Whether native devices get an XDP program (bpf-lb-acceleration)."""
        return self._settings.accelerates

    def attach_xdp(self, ifindex: int) -> bool:
        """Attach the XDP program; False if the device does not support it (best-effort only).

        Raises NetlinkError.
        """
        self._started()
        assert self._dispatchers is not None  # noqa: S101  (set with _active)
        return self._xdp.attach(ifindex, self._dispatchers.descriptors[XDP_DISPATCHER])

    def detach_xdp(self, ifindex: int) -> None:
        """Detach the XDP program. Raises NetlinkError."""
        self._xdp.detach(ifindex)

    def detach_device(self, ifindex: int) -> None:
        """Detach our programs from a native device; foreign ones stay. Raises NetlinkError."""
        self._xdp.detach(ifindex)
        found = self._links.programs(ifindex)
        ours = [self._expected(_native(l3=l3)) for l3 in (False, True)]
        self._links.detach(
            ifindex,
            ingress=found.ingress in {each.ingress for each in ours},
            egress=found.egress in {each.egress for each in ours},
        )

    def serves_device(self, ifindex: int, *, l3: bool = False, accelerated: bool) -> bool:
        """Return whether the device has the current dispatchers, and XDP only if ``accelerated``.

        Raises NetlinkError.
        """
        if not self._has(ifindex, self._expected(_native(l3=l3))) or (l3 and not self._l3.programs):
            return False
        if accelerated:
            return self._xdp.serves(ifindex, self.programs[XDP_DISPATCHER])
        return not self._xdp.has_any(ifindex)

    def endpoint_programs(self, *, egress_prog: bool = False) -> LinkPrograms:
        """Return the kernel ids of the programs that :meth:`attach_endpoint` attaches."""
        return self._expected(pod_link(egress_prog=egress_prog))

    def serves_host(self, ifindex_host: int, ifindex_net: int) -> bool:
        """Return whether cilium_host and cilium_net have the current dispatchers. Raises NetlinkError."""
        wanted = {ifindex_host: DeviceKind.HOST_LINK, ifindex_net: DeviceKind.NET_LINK}
        return all(self._has(index, self._expected(place)) for index, place in wanted.items())

    def set_node(self, node: NodeConfig) -> None:
        """Write the node's configuration to hive_node; the flags of events are added here."""
        self._node = node
        self._maps.node.update(bytes(4), self._row(node))

    def has_node(self, node: NodeConfig) -> bool:
        """Return whether hive_node has what :meth:`set_node` would write."""
        return self._maps.node.lookup(bytes(4)) == self._row(node)

    def known_node(self) -> NodeConfig | None:
        """Return the configuration in hive_node, maybe of an earlier agent; None if it is empty."""
        value = self._maps.node.lookup(bytes(4))
        return None if value is None or not any(value) else NodeConfig.unpack(value)

    @property
    def host_policy(self) -> HostPolicy:
        """The endpoint of the host policy; before :meth:`set_host_policy`, an earlier agent's."""
        if self._host is not None:
            return self._host
        known = self.known_node()
        if known is None:
            return HostPolicy()
        return HostPolicy(known.host_endpoint, audited=bool(known.flags & NODE_AUDITS_HOST))

    def set_host_policy(self, policy: HostPolicy) -> None:
        """Set the endpoint of the host policy. Raises BpfError."""
        before = self.host_policy
        self._host = policy
        if policy == before:
            return
        node = self._node or self.known_node()
        if node is not None:
            self._maps.node.update(bytes(4), self._row(node))  # the write invalidates cached verdicts

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
        """Set which events the programs send. Raises BpfError, and changes nothing then."""
        before, self.notifications = self.notifications, notifications
        if self._node is None:
            return
        try:
            self.set_node(self._node)
        except BpfError:
            self.notifications = before
            raise

    async def repair(self) -> list[str]:
        """Restore removed entries of hive_entry and pins; return the names of restored programs.

        Raises what the start hook raises.
        """
        previous = self._dispatchers
        assert previous is not None  # noqa: S101  (set with _active)
        if unpinned := await anyio.to_thread.run_sync(previous.unpinned, self._pins):
            previous.pin_all(self._pins)
        missing = await anyio.to_thread.run_sync(self._missing)
        if missing:
            try:
                await self._activate()
            finally:
                if self._dispatchers is not previous:
                    previous.close()
        return unpinned + missing

    def _missing(self) -> list[str]:
        """Return the names of programs that are no longer entered. For a worker thread."""
        known = self._started().programs
        with map_by_id(self._maps.entry.id) as entry:
            now = active_program_ids(entry)
        return [name for name in ENTRIES if now.get(name) != known[name]] + [
            *self._xdp.missing(),
            *self._l3.missing(),
        ]

    def _started(self) -> ActivePrograms:
        if self._active is None:
            raise NotStartedError(
                "Datapath was used before the hook 'load the datapath' ran: depend on Datapath"
            )
        return self._active

    def _attach(self, ifindex: int, place: DeviceKind) -> None:
        self._started()
        assert self._dispatchers is not None  # noqa: S101  (set with _active)
        ingress, egress = at(place)
        descriptors = self._dispatchers.descriptors
        self._links.attach_clsact(ifindex, descriptors[ingress], descriptors.get(egress), ingress, egress)
        if self._cilium is not None and self._cilium.present:
            self._cilium.release(ifindex, self.programs.values())

    def _has(self, ifindex: int, expected: LinkPrograms) -> bool:
        """Return whether the link has these programs; where we attach none, foreign ones are accepted."""
        found = self._links.programs(ifindex)
        return found.ingress == expected.ingress and expected.egress in {0, found.egress}

    def _expected(self, place: DeviceKind) -> LinkPrograms:
        ingress, egress = at(place)
        return LinkPrograms(self.programs[ingress], self.programs[egress] if egress else 0)

    async def _start(self) -> None:
        try:
            self._cilium = CiliumPrograms(self._agent.programs_dir, self._agent.globals_dir, self._links)
            await self._activate()
        except BaseException:  # the thread may have finished despite the cancellation
            await self._stop()
            raise

    async def _activate(self) -> None:
        try:
            self._active = await anyio.to_thread.run_sync(self._load)
        except LoadError as error:
            if error.log:
                self._log.error("libbpf", log=error.log)
            raise
        except BpfError as error:
            raise HiveError(f"the datapath could not be loaded: {error}") from error
        if self._dispatchers is not None and self._dispatchers.stale:
            self._attach_everywhere()
            self._dispatchers.pin_all(self._pins)
        await self._maps.remove_retired()
        self._log.info("datapath loaded", generation=self.generation, build=self.build)

    async def _stop(self) -> None:
        if self._dispatchers is not None:
            self._dispatchers.close()  # attached and entered programs keep forwarding
            self._dispatchers = None
        self._active = None

    def _load(self) -> ActivePrograms:
        """Load and activate the wanted generation, unless it is active. For a worker thread."""
        path, tables = self._object, self._maps.all()
        data = read_object(path)
        with map_by_id(self._maps.entry.id, writable=True) as entry:  # its buffers are this thread's
            constants = active_constants(entry)
            if constants is None or not self._fits(constants, data) or not serves(entry, tables, constants):
                constants = self._replace(entry, constants, data)
            self._xdp.activate(tables, read_object(XDP_OBJECT), constants.generation)
            if self._l3.needed:
                self._l3.activate(tables, read_object(L3_OBJECT), constants.generation)
            self._dispatchers = self._load_dispatchers(tables)
            ids = active_program_ids(entry) | self._xdp.programs
        ids |= {name: info.id for name, info in self._dispatchers.describe().items()}
        return ActivePrograms(constants.generation, constants.build, MappingProxyType(ids))

    def _fits(self, constants: Constants, data: bytes) -> bool:
        """Return whether the active generation has this object and these settings."""
        return constants.build == build_of(data) and constants == constants.configured(self._settings)

    def _replace(self, entry: Map, previous: Constants | None, data: bytes) -> Constants:
        tables = self._maps.all()
        known = self._active.generation if self._active is not None else 0
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
        """Replace the dispatchers of all interfaces that have ours, each atomically."""
        rows = {key: EndpointConfig.unpack(row) for key, row in self._maps.endpoints.items()}
        found = {link.name: link for link in self._links.links()}
        for link in found.values():
            pod = rows.get(struct.pack("<I", link.ifindex))
            if (
                pod is None or link.kind != "veth" or link.mac != pod.host_mac
            ):  # the index may be another link's by now
                continue
            with _unless_removed():
                self.attach_endpoint(link.ifindex, egress_prog=bool(pod.flags & ENDPOINT_REQUIRE_EGRESS_PROG))
        indexes = {link.ifindex for link in found.values()}
        for key, row in self._maps.devices.items():
            (ifindex,) = struct.unpack("<I", key)
            if ifindex in indexes:
                with _unless_removed():
                    self.attach_device(ifindex, l3=DeviceConfig.unpack(row).l3)
                    if self.accelerates and self._xdp.has_any(ifindex):
                        self.attach_xdp(ifindex)
        if HOST_LINK in found and NET_LINK in found:
            with _unless_removed():
                self.attach_host(found[HOST_LINK].ifindex, found[NET_LINK].ifindex)
        for ifindex in _tunnels(found.values()):
            with _unless_removed():
                self.attach_tunnel(ifindex)


@contextmanager
def _unless_removed() -> Iterator[None]:
    """Ignore NetlinkError ENODEV: a removed link needs no programs."""
    try:
        yield
    except NetlinkError as error:
        if error.errno != errno.ENODEV:
            raise


def _tunnels(links: Iterable[LinkInfo]) -> list[int]:
    return [link.ifindex for link in links if TUNNEL_LINKS.get(link.kind) == link.name]


def _native(*, l3: bool) -> DeviceKind:
    return DeviceKind.NATIVE_L3_DEVICE if l3 else DeviceKind.NATIVE_DEVICE
