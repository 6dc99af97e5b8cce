"""The BGP router of a lab's cluster: FRR of Debian, in the network between the nodes.

Source: FRR's manual, "BGP" and "Basic commands"; RFC 4271.

It accepts sessions from every node's address, and installs the announced routes in the network: outside
clients reach pods and services without NAT, through all nodes that announce them. Routes of each family come
by a session of that family.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hive.lab.children import signals_blocked
from hive.lab.cluster.network import LabNetwork, Place
from hive.lab.daemon import Daemon
from hive.lab.node import LabError

ROUTER_AS, NODES_AS = 65000, 65001
READY_WITHIN = 30.0
_PLACES = "/usr/lib/frr:/usr/sbin"
"""Directories of FRR's programs, by distribution."""
_SHARED = Path("/run/frr")
_DAEMONS = ("zebra", "bgpd")
"""In start order."""


@dataclass(frozen=True, slots=True)
class Router:
    """The FRR of a cluster's network, whether it runs or not."""

    network: LabNetwork

    @property
    def directory(self) -> Path:
        """Directory of its configuration, sockets, logs and pid files."""
        return self.network.directory / "router"

    @property
    def exists(self) -> bool:
        """Whether the cluster has one."""
        return self.directory.is_dir()

    @property
    def ipv6(self) -> bool:
        """Whether it accepts sessions and routes of IPv6, too."""
        return self.exists and "ipv6 unicast" in (self.directory / "bgpd.conf").read_text()

    @property
    def settings(self) -> list[str]:
        """Settings of the agents."""
        return ["--enable-bgp-control-plane=true"] if self.exists else []

    def pid(self, daemon: str = "bgpd") -> int | None:
        """Return the pid of one of its programs; None if it does not run."""
        return self._daemon(daemon).pid

    def _daemon(self, name: str) -> Daemon:
        return Daemon(name, self.directory / f"{name}.running", self.directory / f"{name}.log")

    @staticmethod
    def installed() -> bool:
        """Return whether this machine has FRR, and the speaker that nodes need."""
        return all(shutil.which(name, path=_PLACES) for name in _DAEMONS) and bool(shutil.which("gobgpd"))

    def drop_session(self, address: str) -> None:
        """End the session with a node, as when its hold timer expires. Raises LabError."""
        command = ["vtysh", "--vty_socket", str(self.directory), "-c", f"clear bgp {address}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"the router keeps its session with {address}: {done.stdout}{done.stderr}")

    def start(self, *, ipv6: bool = False) -> None:
        """Start it if it does not run; IPv6 stays enabled once it was. Raises LabError."""
        if not self.installed():
            raise LabError("BGP in a lab needs FRR and gobgpd: install them (Debian: apt install frr gobgpd)")
        programs = {name: shutil.which(name, path=_PLACES) for name in _DAEMONS}
        ipv6 = ipv6 or self.ipv6
        self.directory.mkdir(exist_ok=True)
        (self.directory / "zebra.conf").write_text("hostname router\n")
        (self.directory / "bgpd.conf").write_text(self._configuration(ipv6=ipv6))
        for path in (self.directory, *self.directory.iterdir()):
            shutil.chown(path, "frr", "frr")  # they run as this user
        shared = _SHARED.exists()
        for name in _DAEMONS:
            if self.pid(name) is None:
                self._begin(name, str(programs[name]))
        if not shared:
            with suppress(OSError):
                _SHARED.rmdir()  # each makes it, and has its sockets elsewhere

    def _begin(self, name: str, program: str) -> None:
        directory, listening = self.directory, self.directory / f"{name}.vty"
        listening.unlink(missing_ok=True)
        command = [program, "-P", "0", "-z", directory / "zserv.api", "--vty_socket", directory]
        command += ["-i", directory / f"{name}.pid", "-f", directory / f"{name}.conf"]
        daemon = self._daemon(name)
        with self.network.open() as network:
            pid = daemon.start(network, list(map(str, command)))
        daemon.wait(pid, listening.exists, READY_WITHIN)

    def _configuration(self, *, ipv6: bool) -> str:
        segments = [Place(0, number) for number in range(self.network.segments)]
        lines = [
            "hostname router",
            f"router bgp {ROUTER_AS}",
            f" bgp router-id {segments[0].routers[0]}",
            " no bgp ebgp-requires-policy",
            " bgp bestpath as-path multipath-relax",
            " bgp graceful-restart",
            " neighbor nodes peer-group",
            f" neighbor nodes remote-as {NODES_AS}",
            *(f" bgp listen range {one.ranges[0]} peer-group nodes" for one in segments),
            " address-family ipv4 unicast",
            "  maximum-paths 8",
            " exit-address-family",
        ]
        if ipv6:
            lines += [
                " neighbor nodes6 peer-group",
                f" neighbor nodes6 remote-as {NODES_AS}",
                *(f" bgp listen range {one.ranges[1]} peer-group nodes6" for one in segments),
                " address-family ipv4 unicast",
                "  no neighbor nodes6 activate",
                " exit-address-family",
                " address-family ipv6 unicast",
                "  neighbor nodes6 activate",
                "  maximum-paths 8",
                " exit-address-family",
            ]
        return "\n".join((*lines, ""))

    def remove(self) -> None:
        """Stop it and remove its state; a missing one is ignored."""
        with signals_blocked():
            for name in reversed(_DAEMONS):
                self._daemon(name).kill()
            shutil.rmtree(self.directory, ignore_errors=True)


def bgp_objects(node: str, place: Place, *, ipv6: bool = False) -> list[dict[str, Any]]:
    """Return the objects by which a node announces its pods, and services labelled ``announce: "yes"``."""
    routers = {"router": ("ipv4", place.routers[0])}
    if ipv6:
        routers["router6"] = ("ipv6", place.routers[1])
    peers = [
        {"name": name, "peerAddress": address, "peerASN": ROUTER_AS, "peerConfigRef": {"name": name}}
        for name, (_, address) in routers.items()
    ]
    services = {
        "advertisementType": "Service",
        "service": {"addresses": ["ClusterIP", "ExternalIP", "LoadBalancerIP"]},
        "selector": {"matchLabels": {"announce": "yes"}},
    }
    specs: list[tuple[str, str, dict[str, Any]]] = [
        (
            "CiliumBGPNodeConfig",
            node,
            {"bgpInstances": [{"name": "lab", "localASN": NODES_AS, "peers": peers}]},
        ),
        (
            "CiliumBGPAdvertisement",
            "router",
            {"advertisements": [{"advertisementType": "PodCIDR"}, services]},
        ),
    ]
    for name, (afi, _) in routers.items():
        family = {"afi": afi, "safi": "unicast", "advertisements": {"matchLabels": {"to": "router"}}}
        spec = {
            "timers": {"connectRetryTimeSeconds": 5},  # of 120 s a router that starts again would wait many
            "gracefulRestart": {"enabled": True},
            "families": [family],
        }
        specs.append(("CiliumBGPPeerConfig", name, spec))
    return [
        {
            "apiVersion": "cilium.io/v2alpha1",
            "kind": kind,
            "metadata": {"name": name, "labels": {"to": "router"}},
            "spec": spec,
        }
        for kind, name, spec in specs
    ]
