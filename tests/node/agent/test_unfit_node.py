"""A node that the agent cannot run on: one line with reason and advice, and no partial state."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cells.datapath.settings import PACKAGED_OBJECTS
from hive import syscalls
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.ports import listening
from tests.support.account import agreed, in_kernel
from tests.support.agents import invoke, run_agent, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

RUN = Path("/run/cilium")
# Reading stays allowed, so that wherever the project lies its code can be loaded.
POWERLESS = ("setpriv", "--bounding-set=-all,+dac_read_search")
NOT_OVER_FILES = ("setpriv", "--bounding-set=-dac_override")
EXPECTED = "expected a directory that the agent may write to, with room for its files"
MS_RDONLY, MS_REMOUNT = 1, 32


def made_there() -> list[str]:
    """What an agent made: sockets, pidfile, state, pinned maps and programs, links."""
    files = [path for path in RUN.rglob("*") if not path.is_dir() and path.name != "agent.lock"]
    pins = [path for path in Path("/sys/fs/bpf").rglob("*") if path.is_file() and path.suffix != ".debug"]
    links = [Path(name) for _, name in socket.if_nameindex() if name.startswith(("cilium", "lxc"))]
    return [str(path) for path in (*files, *pins, *links)]


def refused(node: Lab, line: str, *settings: str, code: int = 1, wrapper: tuple[str, ...] = ()) -> None:
    """The agent ends with this one line and this code, having made nothing."""
    with node.open() as inside:
        before = inside.run(made_there)
        ended = run_agent(node, *settings, wrapper=wrapper)
        assert (ended.code, ended.messages) == (code, [f"hive: {line}"])
        assert inside.run(made_there) == before


def within(node: Lab, do: Callable[..., object], *args: object) -> None:
    with node.open() as inside:
        inside.run(do, *args)


def test_a_node_without_bpffs_is_refused(node: Lab) -> None:
    within(node, syscalls.unmount, "/sys/fs/bpf", syscalls.MNT_DETACH)
    refused(node, "no bpffs at bpf-root /sys/fs/bpf: mount one with: mount -t bpf bpf /sys/fs/bpf")


@pytest.mark.parametrize(
    ("wrapper", "lacks"),
    [
        (POWERLESS, "CAP_NET_ADMIN and CAP_SYS_ADMIN"),
        (("setpriv", "--bounding-set=-net_admin"), "CAP_NET_ADMIN"),
        (("setpriv", "--bounding-set=-sys_admin"), "CAP_SYS_ADMIN"),
    ],
)
def test_an_agent_without_privileges_is_refused(node: Lab, wrapper: tuple[str, ...], lacks: str) -> None:
    refused(node, f"the agent lacks {lacks}: run it as root, or grant the capabilities", wrapper=wrapper)


def test_a_state_directory_of_another_user_is_refused(node: Lab) -> None:
    line = (
        f"state-dir /var/run/cilium is not usable: /var/run/cilium/agent.lock: Permission denied; {EXPECTED}"
    )
    with node.open() as inside:
        inside.run(os.chown, "/run/cilium", 65534, 65534)
    refused(node, line, wrapper=NOT_OVER_FILES)


def test_a_too_low_file_limit_is_refused(node: Lab) -> None:
    line = (
        "the agent may open 100 files at most, and needs 256 and more, one for each pod:"
        " raise the limit (ulimit -Hn, or LimitNOFILE of systemd)"
    )
    refused(node, line, wrapper=("prlimit", "--nofile=100:100"))


def test_a_node_without_a_global_address_is_refused(node: Lab) -> None:
    within(node, cut, "uplink")
    ended = run_agent(node)
    assert (ended.code, ended.line) == (
        2,
        (
            "hive: IPv4 allocation CIDR is not configured. Please specify --ipv4-range: auto needs a global"
            " IPv4 address on one of the node's devices, there is none"
        ),
    )
    serving(node, "--ipv4-range=10.5.0.0/24")


def cut(name: str) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("del", index=ip.link_lookup(ifname=name)[0])


def read_only_sysctls() -> None:
    syscalls.mount("/proc/sys", "/proc/sys", flags=syscalls.MS_BIND)
    syscalls.mount("none", "/proc/sys", flags=syscalls.MS_BIND | MS_REMOUNT | MS_RDONLY)


def test_a_read_only_proc_sys_is_refused(node: Lab) -> None:
    within(node, read_only_sysctls)
    ended = run_agent(node)
    assert ended.code == 1
    assert re.fullmatch(
        r"hive: cannot set net\.ipv4\.conf\.\S+=\d: Read-only file system; "
        r"make /proc/sys writable for the agent, or set it on the node",
        ended.line,
    )
    within(node, syscalls.unmount, "/proc/sys")
    serving(node)


def read_only() -> None:
    syscalls.mount("state", RUN, "tmpfs")
    syscalls.mount("state", RUN, "tmpfs", MS_REMOUNT | MS_RDONLY)


def without_inodes() -> None:
    syscalls.mount("state", RUN, "tmpfs", data="nr_inodes=1")


def without_space() -> None:
    syscalls.mount("state", RUN, "tmpfs", data="size=4k")
    (RUN / "agent.lock").touch()
    (RUN / "filler").write_bytes(bytes(4096))


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (read_only, "/var/run/cilium/agent.lock: Read-only file system"),
        (without_inodes, "/var/run/cilium/agent.lock: No space left on device"),
        (without_space, "No space left on device"),
    ],
)
def test_an_unwritable_state_directory_is_refused(node: Lab, prepare: Callable[[], None], why: str) -> None:
    within(node, prepare)
    refused(node, f"state-dir /var/run/cilium is not usable: {why}; {EXPECTED}")


def test_a_file_in_place_of_a_directory_is_refused(node: Lab) -> None:
    refused(
        node,
        f"state-dir /proc/version is not usable: /proc/version: File exists; {EXPECTED}",
        "--state-dir=/proc/version",
    )
    within(node, (RUN / "state").touch)
    refused(node, f"state-dir /var/run/cilium is not usable: /var/run/cilium/state: File exists; {EXPECTED}")


# Another program is there


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("name", ["cilium.sock", "cni.sock"])
def test_a_socket_in_use_is_refused(node: Lab, name: str, kind: int) -> None:
    within(node, (RUN / "cilium.pid").write_text, "1\n")
    with listening(node, socket.AF_UNIX, kind, str(RUN / name)):
        line = f"another process serves /var/run/cilium/{name}: stop that agent, or choose another state-dir"
        refused(node, line)


def test_a_file_in_place_of_the_socket_is_refused(node: Lab) -> None:
    within(node, (RUN / "cni.sock").write_text, "precious")
    refused(
        node,
        "/var/run/cilium/cni.sock is in the way and is not a socket: remove it, or choose another state-dir",
    )


def leave_sockets() -> None:
    for name, kind in (("cilium.sock", socket.SOCK_STREAM), ("cni.sock", socket.SOCK_SEQPACKET)):
        with socket.socket(socket.AF_UNIX, kind) as server:
            server.bind(str(RUN / name))
            server.listen()
    (RUN / "cilium.pid").write_text("1\n")


def test_sockets_and_pidfile_of_a_dead_agent_are_taken_over(node: Lab) -> None:
    within(node, leave_sockets)
    pid = serving(node)
    with node.open() as inside:
        assert inside.run((RUN / "cilium.pid").read_text) == f"{pid}\n"
    pods.add(node, "pod")


def test_a_second_agent_is_refused(lab: Lab) -> None:
    pid = agent_process.running(lab)
    pods.add(lab, "pod")
    refused(lab, f"another agent (pid {pid}) has the same state-dir, /var/run/cilium: stop it first")
    refused(lab, "another agent has the same bpf-root, /sys/fs/bpf: stop it first", "--state-dir=/run/other")
    assert agent_process.running(lab) == pid
    assert len(agreed(lab).listed) == 1


def test_a_used_health_port_is_refused(node: Lab) -> None:
    with listening(node, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 9879)):
        ended = run_agent(node)
        assert ended.code == 1
        assert ended.line == (
            "hive: agent-health-port: 127.0.0.1:9879 cannot be served (Address already in use): "
            "stop what listens there, or choose another port"
        )
        with node.open() as inside:
            left = inside.run(made_there)
        assert not [name for name in left if name.endswith((".sock", ".pid"))]
        serving(node, "--agent-health-port=9880")
        agent_process.crash(node)
    serving(node)


# The datapath


def test_an_invalid_datapath_object_is_refused(lab: Lab, tmp_path: Path) -> None:
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    with lab.open() as inside:
        before = inside.run(in_kernel)
    agent_process.crash(lab)
    (tmp_path / "garbage.o").write_bytes(b"no ELF" * 100)
    for path, why in (
        (tmp_path / "none.o", "No such file or directory; expected a compiled datapath, or leave it out"),
        (tmp_path, "Is a directory; expected a compiled datapath, or leave it out"),
        (tmp_path / "garbage.o", "garbage.o is not an eBPF object libbpf can read: "),
        (tmp_path / "dispatch.o", "dispatch.o has no section .rodata.cfg: it is not one of ours: "),
    ):
        if path.name == "dispatch.o":
            path.write_bytes((PACKAGED_OBJECTS / "dispatch.o").read_bytes())
        ended = run_agent(lab, f"--datapath-object={path}")
        assert ended.code == 2
        assert ended.line.startswith(f"hive: datapath-object={path}: {why}")
        assert ended.line.endswith("or leave it out")
    with lab.open() as inside:
        assert inside.run(in_kernel) == before
    serving(lab)
    assert {ip for ip, _, _ in agreed(lab).listed.values()} == {first.ipv4, second.ipv4}


# The disk fills up later


def fill() -> None:
    with (RUN / "filler").open("wb", buffering=0) as filler:
        while os.statvfs(RUN).f_bavail:
            filler.write(bytes(4096))


def test_a_disk_that_fills_up_refuses_pods_and_serves_again(node: Lab) -> None:
    within(node, syscalls.mount, "state", RUN, "tmpfs", 0, "size=128k")
    serving(node)
    pods.add(node, "before")
    within(node, fill)
    node.hold_pod("pod")
    refusal = invoke(node, "pod", "ADD")
    assert (refusal.code, refusal.json["code"]) == (1, 999)
    assert refusal.json["msg"].startswith("unable to create endpoint: [Errno 28] No space left on device")
    assert len(agreed(node).listed) == 1
    pods.delete(node, "before")
    assert agreed(node).listed == {}
    within(node, (RUN / "filler").unlink)
    assert invoke(node, "pod", "ADD").code == 0
    assert len(agreed(node).listed) == 1


def only_ipv6() -> None:
    for arguments in ("-4 address flush dev uplink", "address add fd50::10/64 dev uplink nodad"):
        subprocess.run(["ip", *arguments.split()], check=True)


def with_ipv4() -> None:
    subprocess.run(["ip", "address", "add", "192.168.50.10/24", "dev", "uplink"], check=True)


def test_without_an_ipv4_address_local_pods_are_served_and_health_is_degraded(node: Lab) -> None:
    within(node, only_ipv6)
    families = ("--enable-ipv6=true", "--ipv6-range=fd00:5::/112", "--ipv4-range=10.200.0.0/16")
    pid = serving(node, *families)
    assert "this node has no IPv4 address" in node.agent_log.read_text()
    one, other = pods.add(node, "one"), pods.add(node, "other")
    assert one.ipv6
    assert other.ipv6
    with node.open_pod("one") as inside:
        for address in (other.ipv6, other.ipv4):
            assert inside.run(ping, address, 1)

    def reported() -> bool:
        return "this node has no IPv4 address" in str(ask("/v1/healthz", agent_process.api_socket(pid)))

    eventually(reported)
    within(node, with_ipv4)
    eventually(lambda: not reported())
