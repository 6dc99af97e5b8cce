"""WireGuard's devices: cilium_wg0, and during a rotation cilium_wg1 and cilium_wg2.

Source: wireguard-go's environment (WG_UAPI_FD).
Why:    devices, peers and the programs' configuration remain when the agent ends, so traffic continues
        encrypted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from enum import IntEnum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

import anyio

from cells.base.addresses import Family, IPNetwork
from cells.base.processes import detached
from cells.cluster.encryption import WIREGUARD_LINKS, WIREGUARD_OVERHEAD, WIREGUARD_PORT
from cells.config import AgentConfig
from cells.encryption.wireguard.control import DeviceState, KernelControl, UserspaceControl, WireguardControl
from cells.encryption.wireguard.peers import DUMMY_KEY, PeerCall
from cells.encryption.wireguard.settings import WireguardKey
from cells.maps.node_maps import Maps
from cells.maps.records.flows import (
    ENCRYPTION_NODES,
    ENCRYPTION_STRICT,
    ENCRYPTION_STRICT_NODES,
    EncryptionConfig,
)
from cells.netlink.connection import NetlinkError
from cells.netlink.overlay import FoundOverlay, OverlayLinks, create_wireguard
from cells.node.addresses import NodeAddresses
from cells.node.devices import PodMtu
from lifecycle import HiveError, Logger

__all__ = ["SOCKETS", "Slot", "WireguardDevice", "WireguardLink"]

FIREWALL_MARK: Final = 0x1E00
"""Mark of encrypted datagrams, which the programs at native devices let pass (bpf/netdev/encrypt.h)."""


class Slot(IntEnum):
    """The purpose of a device; it listens on WIREGUARD_PORT plus this number."""

    MAIN = 0
    """cilium_wg0: the node's key, and all nodes."""
    NEXT = 1
    """cilium_wg1: the node's next key, while its key is being rotated."""
    HELP = 2
    """cilium_wg2: the node's key, and the next keys of nodes that rotate theirs."""

    @property
    def link(self) -> str:
        """The name of the device."""
        return WIREGUARD_LINKS[self]

    @property
    def port(self) -> int:
        """The UDP port."""
        return WIREGUARD_PORT + self


# The program: its socket is made here and passed to it, so that it can be asked at once; it answers when its
# device is there.

SOCKETS: Final = Path("/var/run/wireguard")
PROGRAM: Final = "wireguard-go"
LOG_FILE: Final = "wireguard-go.log"
_UAPI_FD: Final = 3
"""The program's descriptor of its control socket."""
_ABOVE: Final = 10


class WireguardProgram:
    """The wireguard-go process of one device. All but ``pid`` blocks, and raises OSError and HiveError."""

    def __init__(self, slot: Slot, state_dir: Path, log: Logger) -> None:
        self._link = slot.link
        self._pid_file = state_dir / (f"{PROGRAM}-{slot.link}.pid" if slot else f"{PROGRAM}.pid")
        self._log_file = state_dir / LOG_FILE
        self._log = log
        self.socket = SOCKETS / f"{slot.link}.sock"

    @property
    def pid(self) -> int:
        """Its process, started by this agent or an earlier one; 0 if there is none."""
        try:
            pid = int(self._pid_file.read_text(encoding="ascii"))
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return 0
        return pid if self._link.encode() in command else 0

    def start(self) -> None:
        """Start it; it creates a device that is down."""
        import shutil  # it imports three decompressors: 2 ms of a start without WireGuard

        program = shutil.which(PROGRAM)
        if program is None:
            raise HiveError(
                f"enable-wireguard-userspace-fallback=true: {PROGRAM} is not installed; install the package"
                f" {PROGRAM}, or use a kernel with WireGuard"
            )
        with ExitStack() as opened:

            def descriptor(number: int) -> int:
                """Above those that the program gets; ours only."""
                high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
                opened.callback(os.close, high)
                return high

            log = opened.enter_context(self._log_file.open("ab"))
            server = opened.enter_context(self._listening())
            logged = descriptor(log.fileno())
            pid = detached(
                Path(program),
                [program, "--foreground", self._link],
                {**os.environ, "WG_UAPI_FD": str(_UAPI_FD), "LOG_LEVEL": "error"},
                {1: logged, 2: logged, _UAPI_FD: descriptor(server.fileno())},
            )
        self._pid_file.write_text(str(pid), encoding="ascii")
        self._log.info(
            "wireguard-go was started", pid=pid, device=self._link, program=program, log=str(self._log_file)
        )

    def end(self) -> None:
        """End it, which removes its device; a no-op if it does not run."""
        pid = self.pid
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.socket.unlink(missing_ok=True)
        self._pid_file.unlink(missing_ok=True)

    def _listening(self) -> socket.socket:
        self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(str(self.socket))
            self.socket.chmod(0o600)
            server.listen()
        except BaseException:
            server.close()
            raise
        return server


# Devices as the agent keeps them.

NO_WIREGUARD: Final = (
    "WireGuard not supported by the Linux kernel ({error}). Please upgrade your kernel, or manually install"
    " the kernel module (https://www.wireguard.com/install/), or set enable-wireguard-userspace-fallback=true"
    " to run wireguard-go"
)


class WireguardLink:
    """One device, of the kernel or of wireguard-go.

    Methods block. They raise OSError, and HiveError, one line, for missing features of the node.
    """

    def __init__(self, slot: Slot, state_dir: Path, *, fallback: bool, log: Logger) -> None:
        self._name, self._port = slot.link, slot.port
        self._fallback = fallback
        self._log = log
        self._links = OverlayLinks()
        self.program = WireguardProgram(slot, state_dir, log)
        self._control: WireguardControl = KernelControl(self._name)
        self.state = DeviceState()
        """The last state that was read."""

    @property
    def ifindex(self) -> int:
        """Its index; 0 if it does not exist."""
        link = self._links.find(self._name)
        return link.ifindex if link is not None else 0

    def ensure(self, private: bytes, mtu: int) -> bool:
        """Create and configure it if necessary, and set it up. Returns whether it is new, without peers."""
        link = self._found()
        made = link is None
        if link is None:
            link = self._make(mtu)
        state = self._control.read()  # wireguard-go sets an MTU before it answers
        if (state.private, state.port, state.mark) != (private, self._port, FIREWALL_MARK):
            self._control.configure_self(private, self._port, FIREWALL_MARK)
            state = self._control.read()
        self.state = state
        if not link.up or link.mtu != mtu:
            self._links.set_up(link.ifindex, self._name, mtu)
        return made

    def remove(self) -> None:
        """Remove it; a no-op if it does not exist."""
        link = self._links.find(self._name)
        if link is not None and link.kind in {"wireguard", "tun"}:
            self._links.delete(link.ifindex)
            self._log.info("WireGuard removed", device=self._name)
        self.program.end()

    def configure(self, call: PeerCall) -> None:
        """Change one peer."""
        self._control.configure(call)

    def peers(self) -> Mapping[bytes, frozenset[IPNetwork]]:
        """The allowed addresses of each peer by its public key."""
        self.state = self._control.read()
        return {key: frozenset(peer.allowed) for key, peer in self.state.peers.items() if key != DUMMY_KEY}

    def _found(self) -> FoundOverlay | None:
        """The link if it is usable. Leftovers of a program that does not run are removed."""
        link = self._links.find(self._name)
        if link is None:
            self.program.end()
            return None
        if link.kind == "wireguard":
            self._control = KernelControl(self._name)
            return link
        if link.kind != "tun":
            raise HiveError(
                f"{self._name} is a link of kind {link.kind or 'none'}, not WireGuard's: delete it"
            )
        if self._fallback and self.program.pid:
            self._control = UserspaceControl(self.program.socket)
            return link
        self._links.delete(link.ifindex)
        self.program.end()
        return None

    def _make(self, mtu: int) -> FoundOverlay:
        try:
            create_wireguard(self._name, mtu)
            self._control = KernelControl(self._name)
        except NetlinkError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            if not self._fallback:
                raise HiveError(NO_WIREGUARD.format(error=error)) from error
            self.program.start()
            self._control = UserspaceControl(self.program.socket)
            self._control.read()
        link = self._links.find(self._name)
        if link is None:
            raise HiveError(f"{self._name} is not there")
        self._log.info("WireGuard device created", device=self._name, kind=link.kind, mtu=mtu)
        return link


class WireguardDevice:
    """Creates, configures and restores the devices, and writes the configuration of programs at native
    devices.

    Methods block. They raise OSError, and HiveError, one line, for missing features of the node.
    """

    def __init__(
        self,
        agent: AgentConfig,
        key: WireguardKey,
        maps: Maps,
        addresses: NodeAddresses,
        mtu: PodMtu,
        *,
        log: Logger,
    ) -> None:
        self._settings = key.settings
        self._key = key
        self._maps = maps
        self._addresses = addresses
        self._mtu = mtu
        fallback = key.settings.enable_wireguard_userspace_fallback
        self.links = {slot: WireguardLink(slot, agent.state_dir, fallback=fallback, log=log) for slot in Slot}
        self._main = self.links[Slot.MAIN]
        self.program = self._main.program
        self.lock = anyio.Lock()
        """Held while devices or peers are changed."""
        if key.settings.enable_wireguard:
            maps.use("encryption_paths")

    @property
    def state(self) -> DeviceState:
        """The last state of cilium_wg0 that was read."""
        return self._main.state

    def ensure(self, slot: Slot = Slot.MAIN) -> bool:
        """Create and configure the device if necessary. Returns whether it is new, without peers."""
        private = self._key.next_private if slot is Slot.NEXT else self._key.private
        made = self.links[slot].ensure(private, self.mtu)
        self._set_facts(self._facts())
        return made

    @property
    def mtu(self) -> int:
        """The MTU of the devices below, less the overhead of encryption."""
        return self._mtu() - WIREGUARD_OVERHEAD

    def remove(self) -> None:
        """Clear the programs' configuration, then remove all devices; a no-op without devices."""
        self._set_facts(EncryptionConfig())
        for link in self.links.values():
            link.remove()

    def remove_rotating(self, slot: Slot) -> None:
        """Remove a device of a rotation that no packet uses any more; a no-op if it does not exist."""
        link = self.links[slot]
        if link.ifindex:
            link.remove()
            self._set_facts(self._facts())

    def configure(self, call: PeerCall) -> None:
        """Change one peer of cilium_wg0."""
        self._main.configure(call)

    def peers(self) -> Mapping[bytes, frozenset[IPNetwork]]:
        """The allowed addresses of each peer of cilium_wg0 by its public key."""
        return self._main.peers()

    def _facts(self) -> EncryptionConfig:
        strict = self._settings.strict
        own = self._addresses.all().get(Family.IPV4)
        node_ip = own if isinstance(own, IPv4Address) else IPv4Address(0)
        inside = strict is not None and node_ip in strict
        allowed = self._settings.encryption_strict_mode_allow_remote_node_identities
        if inside and not allowed:
            raise HiveError(
                "encryption strict mode is enabled but the node's IPv4 address is within the strict CIDR"
                f" range: {node_ip} is in encryption-strict-mode-cidr={strict}; name the pods' network, or"
                " set encryption-strict-mode-allow-remote-node-identities=true"
            )
        flags = (
            ENCRYPTION_NODES * (self._settings.encrypt_node and not self._key.opted_out)
            | ENCRYPTION_STRICT * (strict is not None)
            | ENCRYPTION_STRICT_NODES * allowed
        )
        ifindex, *rotating = (link.ifindex for link in self.links.values())
        return EncryptionConfig(ifindex, flags, strict, node_ip, WIREGUARD_PORT, (rotating[0], rotating[1]))

    def _set_facts(self, facts: EncryptionConfig) -> None:
        if self._maps.encryption.lookup(bytes(4)) != facts.pack():
            self._maps.encryption.update(bytes(4), facts.pack())
