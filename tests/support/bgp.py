"""Routers beside a node: FRR and BIRD at the other end of a cable, as peers that gobgpd dials."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from typing import Any

import structlog

from cells.bgp import SpeakerSettings
from cells.bgp.speaker import BGPSpeakers
from cells.bgp.speaker_state import (
    ALLOW_LOCAL,
    AnnouncedPath,
    BGPInstance,
    BGPPeer,
    PeerTimers,
    PolicyDirection,
    PolicyStatement,
    PrefixMatch,
    RoutePolicy,
    WantedSpeakers,
    instance_table,
    observed_peers,
    path_table,
    peer_table,
    policy_table,
)
from cells.config import AgentConfig, AgentSettings
from lifecycle import Hive, Lifecycle, Table, config, invoke, provide, supply
from tests.support.namespaces import Namespaces, inside, new_netns
from tests.support.waiting import eventually

NODE, NODE6 = "10.99.0.1", "fd00:99::1"
FRR, FRR6, BIRD, STRANGER = "10.99.0.101", "fd00:99::101", "10.99.0.102", "10.99.0.103"
PASSWORD, INSTANCE = "sesame", "edge"

FRR_CONFIG = f"""router bgp 65101
 bgp router-id {FRR}
 no bgp default ipv4-unicast
 no bgp ebgp-requires-policy
 no bgp network import-check
 bgp graceful-restart
 neighbor {NODE} remote-as 65001
 neighbor {NODE} password {PASSWORD}
 neighbor {NODE} passive
 neighbor {NODE} timers 3 9
 neighbor {NODE6} remote-as 65001
 neighbor {NODE6} passive
 address-family ipv4 unicast
  network 192.0.2.0/24
  neighbor {NODE} activate
 exit-address-family
 address-family ipv6 unicast
  neighbor {NODE6} activate
 exit-address-family
"""
BIRD_CONFIG = f"""
router id {BIRD};
protocol device {{ }}
template bgp node {{
  strict bind on;
  passive on;
  neighbor {NODE} as 65001;
  ipv4 {{ import all; export none; }};
}}
protocol bgp inner from node {{ local {BIRD} as 65001; }}
protocol bgp stranger from node {{ local {STRANGER} as 65102; password "another"; }}
"""


class Routers:
    """FRR (AS 65101, a password, graceful restart, both families) and BIRD (AS 65001, an unknown peer)."""

    def __init__(self, far: Namespaces, folder: Path) -> None:
        self.far = far
        self._folder = folder
        self._bird = folder / "bird"
        self._frr = Path(tempfile.mkdtemp(dir="/run"))
        """Not below the folder, which FRR's user cannot enter."""
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        """By folder, which has the output."""

    def start(self) -> None:
        """Start both; they wait for connections. Raises ChildProcessError if one has ended."""
        shutil.chown(self._frr, "frr", "frr")
        self._bird.mkdir()
        config = self._frr / "bgpd.conf"
        config.write_text(FRR_CONFIG)
        (self._bird / "bird.conf").write_text(BIRD_CONFIG)
        addresses = ["-l", FRR, "-l", FRR6]
        bgpd: list[str | Path] = [
            "/usr/lib/frr/bgpd",
            "-Z",
            "-f",
            config,
            "-i",
            self._frr / "pid",
            "--vty_socket",
            self._frr,
        ]
        self._begin([*bgpd, "-P", "0", *addresses], self._frr)
        bird: list[str | Path] = [
            _bird("bird"),
            "-f",
            "-c",
            self._bird / "bird.conf",
            "-s",
            self._bird / "ctl",
        ]
        self._begin([*bird, "-P", self._bird / "pid"], self._bird)
        eventually(lambda: self._ended() or self._answer())
        if ended := self._ended():
            raise ChildProcessError(ended)

    def stop(self) -> None:
        """End both."""
        for process in self._processes.values():
            process.terminate()  # killed, FRR leaves a directory in /var/tmp/frr
        for process in self._processes.values():
            process.wait(timeout=20)
        shutil.rmtree(self._frr)

    def _begin(self, command: Sequence[str | Path], folder: Path) -> None:
        # By nsenter: a fork with code of ours before exec(2) runs gRPC's fork handlers too, and their threads
        # end or block the child at times.
        enter = ["nsenter", f"--net=/proc/self/fd/{self.far.net}", "--"]
        with (folder / "output").open("ab") as output:
            self._processes[folder] = subprocess.Popen(
                [*enter, *command], stdout=output, stderr=output, pass_fds=[self.far.net]
            )

    def _ended(self) -> str:
        """Return which router has ended, with its output; empty while both run."""
        for folder, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"{process.args!r} ended with {code}: {(folder / 'output').read_text()}"
        return ""

    def _answer(self) -> bool:
        return bool(self.frr("show bgp neighbors json") and self.bird("show", "status"))

    def frr(self, command: str) -> Any:
        """Run a command of FRR's shell and decode its JSON."""
        done = subprocess.run(
            ["vtysh", "--vty_socket", self._frr, "-c", command], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    def bird(self, *command: str) -> str:
        """Run a command of BIRD's client and return its output."""
        call: list[str | Path] = [_bird("birdc"), "-r", "-s", self._bird / "ctl", *command]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout

    def frr_routes(self, family: str = "ipv4") -> dict[str, dict[str, Any]]:
        """Return the routes that FRR has received from the node, by prefix."""
        listed = self.frr(f"show bgp {family} unicast json detail")["routes"]
        return {
            prefix: path
            for prefix, found in listed.items()
            for path in (found["paths"] if isinstance(found, dict) else found[1:])  # FRR 10, FRR 8
            if path["peer"]["peerId"] in {NODE, NODE6}
        }

    def frr_sessions(self, peer: str = NODE) -> tuple[str, int]:
        """Return the state of FRR's session with the node, and how often it was established."""
        found = self.frr("show bgp neighbors json")[peer]
        return found["bgpState"], found["connectionsEstablished"]

    def frr_clear(self) -> None:
        """Make FRR reset its sessions."""
        subprocess.run(["vtysh", "--vty_socket", self._frr, "-c", "clear bgp *"], check=True)

    def frr_updates(self, peer: str = NODE) -> int:
        """Return the number of UPDATE messages that FRR has received from the node."""
        return int(self.frr("show bgp neighbors json")[peer]["messageStats"]["updatesRecv"])

    def bird_session(self, protocol: str) -> str:
        """Return when BIRD's session of a protocol was established; empty while it is not."""
        fields = self.bird("show", "protocols", protocol).splitlines()[-1].split()
        return fields[4] if fields[-1] == "Established" else ""

    def bird_routes(self) -> str:
        """Return BIRD's routes with their attributes."""
        return self.bird("show", "route", "all")


class Wanted:
    """The tables that a controller writes for the speakers."""

    def __init__(self) -> None:
        self.instances, self.peers = instance_table(), peer_table()
        self.policies, self.paths = policy_table(), path_table()
        self.put(BGPInstance(INSTANCE, 65001, IPv4Address("10.99.0.1")))
        self.put(
            RoutePolicy(INSTANCE, ALLOW_LOCAL, PolicyDirection.IMPORT, (PolicyStatement(local_routes=True),))
        )

    @property
    def tables(self) -> WantedSpeakers:
        """Return all of them."""
        return WantedSpeakers(self.instances, self.peers, self.policies, self.paths)

    def put(self, *rows: BGPInstance | BGPPeer | RoutePolicy | AnnouncedPath) -> None:
        """Write rows, each table in one transaction."""
        tables: dict[type, Table[Any, Any]] = {
            BGPInstance: self.instances,
            BGPPeer: self.peers,
            RoutePolicy: self.policies,
            AnnouncedPath: self.paths,
        }
        for kind, table in tables.items():
            with table.txn() as written:
                for row in rows:
                    if isinstance(row, kind):
                        written.put(row)

    def announce(self, *prefixes: str) -> None:
        """Add routes."""
        self.put(*(AnnouncedPath(INSTANCE, ip_network(prefix)) for prefix in prefixes))

    def withdraw(self, prefix: str) -> None:
        """Remove a route."""
        with self.paths.txn() as rows:
            rows.delete((INSTANCE, ip_network(prefix)))


def peer(name: str, address: str, asn: int, **options: Any) -> BGPPeer:
    """Return a peer with short timers."""
    timers = PeerTimers(connect_retry=1, hold=9, keepalive=3)
    return BGPPeer(INSTANCE, name, ip_address(address), asn, 65001, timers=timers, **options)


def policy(name: str, to: str, *prefixes: str, **adds: Any) -> RoutePolicy:
    """Return a policy that accepts these prefixes for a peer."""
    networks = [ip_network(one) for one in prefixes]
    matches = tuple(PrefixMatch(one, one.prefixlen, one.prefixlen) for one in networks)
    statement = PolicyStatement(neighbors=(ip_address(to),), prefixes=matches, **adds)
    return RoutePolicy(INSTANCE, name, PolicyDirection.EXPORT, (statement,))


@asynccontextmanager
async def agent(wanted: Wanted, folder: Path) -> AsyncIterator[BGPSpeakers]:
    """The cells of an agent that run the BGP speakers."""
    known = AgentConfig(AgentSettings(state_dir=folder), Lifecycle("test"), structlog.get_logger())
    hive = Hive(
        config(SpeakerSettings),
        provide(observed_peers, BGPSpeakers),
        invoke(BGPSpeakers),
        supply(known),
        supply(wanted.tables),
    )
    async with hive.started():
        yield hive.get(BGPSpeakers)


def _bird(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    assert found is not None, f"{name}: install bird2"
    return found


@contextmanager
def routers(folder: Path, device: str = "uplink") -> Iterator[Routers]:
    """Connect this namespace to the routers by a cable, and run both; remove everything afterwards."""
    with cable(device) as far:
        both = Routers(far, folder)
        try:
            both.start()
            yield both
        finally:
            both.stop()


@contextmanager
def cable(device: str = "uplink") -> Iterator[Namespaces]:
    """Create a namespace at the other end of a cable from this one."""
    with new_netns() as far:
        end = f"/proc/{os.getpid()}/fd/{far.net}"
        _ip(f"link add {device} type veth peer name cable netns {end}")
        _ip(f"address add {NODE}/24 dev {device}", f"address add {NODE6}/64 dev {device} nodad")
        _ip(f"link set {device} up")
        with inside(far):
            _ip("link set lo up", "link set cable up", f"address add {FRR6}/64 dev cable nodad")
            _ip(*(f"address add {address}/24 dev cable" for address in (FRR, BIRD, STRANGER)))
        yield far


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def gobgpd_pids(folder: Path) -> list[int]:
    """Return the pids of gobgpd processes with a socket in the folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes()
        except OSError:
            continue
        if command.split(b"\0")[0].endswith(b"gobgpd") and f"unix://{folder}".encode() in command:
            found.append(int(place.parent.name))
    return found
