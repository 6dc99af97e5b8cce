"""Turns a lab node into one that Cilium 1.17 leaves behind: its programs, pins and state, none of ours.

Source: Cilium 1.17 with enable-tcx: programs held by links pinned below /sys/fs/bpf/cilium, tail calls pinned
beside the maps, ep_config.json and ep_config.h for each endpoint.

The forwarding programs are those of the agent that ran here, on links like Cilium's: pods communicate all the
time.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from pyroute2 import IPRoute

from cells.maps.bpf import attach_cgroup, open_link, pin, program_by_id, program_info
from cells.maps.map import MapSpec, MapType, create_map
from cells.netlink.links import programs_of
from hive.lab.children import Stop
from hive.lab.node import Lab
from tests.support.waiting import eventually

BPF: Final = Path("/sys/fs/bpf")
GLOBALS: Final = BPF / "tc" / "globals"
STATE: Final = Path("/run/cilium/state")
HELD: Final = Path("/run/cilium/held")
_TCX: Final = {"ingress": 46, "egress": 47}
"""enum bpf_attach_type: BPF_TCX_INGRESS and BPF_TCX_EGRESS."""
_OWN_KEYS: Final = ("property-cni-network",)


class CiliumNode(msgspec.Struct, frozen=True):
    """The pins that were created."""

    links: list[str]
    """Pinned links, each of which holds a program at an interface."""
    calls: list[str]
    """Pinned maps of tail calls."""


@contextmanager
def make_cilium(lab: Lab, *, tcx: bool = True) -> Iterator[CiliumNode]:
    """Turn the node into one with a killed Cilium agent, with pods that keep communicating.

    ``tcx=False``: filters, as before Linux 6.6. The programs' maps exist until the block ends.
    """
    with lab.open() as node:
        holder = node.start(_hold)
        try:
            eventually(lambda: node.run(HELD.exists))
            yield node.run(partial(_make, tcx=tcx))
        finally:
            holder.finish(within=60)


def _hold(stop: Stop) -> None:
    """Keep our maps open while nothing pins them: no other descriptor would preserve their tail calls."""
    held = [open_link(path) for path in GLOBALS.iterdir() if path.name.startswith("hive_")]
    HELD.touch()
    stop.wait(120)
    for descriptor in held:
        os.close(descriptor)


def _make(*, tcx: bool) -> CiliumNode:
    links = [pin for name in _served() for pin in _as_cilium(name, tcx=tcx)]
    for path in GLOBALS.iterdir():
        if path.name.startswith("hive_"):
            path.unlink()
    shutil.rmtree(BPF / "cilium" / "dispatch")
    numbers = [int(path.name) for path in STATE.iterdir() if path.name.isdecimal()]
    for path in STATE.iterdir():
        if path.name.isdecimal():
            _rewrite(path)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    calls = ["cilium_call_policy", "cilium_egresscall_policy", *(f"cilium_calls_{one:05}" for one in numbers)]
    for name in calls:
        with create_map(MapSpec(name, MapType.PROG_ARRAY, 4, 4, 64)) as made:
            pin(made.fd, GLOBALS / name)
    return CiliumNode(links, [str(GLOBALS / name) for name in calls])


def _served() -> list[str]:
    names = [name for _, name in socket.if_nameindex()]
    return [name for name in names if name.startswith(("lxc", "cilium_"))]


def _as_cilium(name: str, *, tcx: bool) -> list[str]:
    """Hold the interface's programs by pinned links, as Cilium does, or by filters; without our alias."""
    index = socket.if_nametoindex(name)
    found = programs_of([index])[index]
    made = []
    for side, number in (("ingress", found.ingress), ("egress", found.egress)):
        if number and tcx:
            program = program_by_id(number)
            kind = f"endpoints/{_number(name)}" if name.startswith("lxc") else f"devices/{name}"
            path = BPF / "cilium" / kind / "links" / program_info(program).name
            path.parent.mkdir(parents=True, exist_ok=True)
            link = attach_cgroup(program, index, _TCX[side])  # the same call, to a device
            pin(link, path)
            made.append(str(path))
            os.close(link)
            os.close(program)
    with IPRoute() as ip:
        if tcx:
            ip.tc("del", "clsact", index)
        if name.startswith("lxc"):
            ip.link("set", index=index, ifalias="")
    return made


def _number(name: str) -> int:
    for path in STATE.glob("*/ep_config.json"):
        if json.loads(path.read_bytes())["IfName"] == name:
            return int(path.parent.name)
    raise LookupError(name)


def _rewrite(directory: Path) -> None:
    """Add to an endpoint's state what only Cilium's agent writes, and remove what only ours writes."""
    saved: dict[str, Any] = json.loads((directory / "ep_config.json").read_bytes())
    for key in _OWN_KEYS:
        (saved["Properties"] or {}).pop(key, None)
    saved |= {
        "Options": {"map": {"ConntrackAccounting": 0, "DropNotification": 1, "PolicyVerdictNotification": 1}},
        "DNSHistory": [],
        "DNSZombies": {"deletes": {}, "alive": {}},
        "DNSRules": {},
        "DNSRulesV2": {},
        "CiliumEndpointUID": "1f7b2f0e-7b53-4c0c-a5cb-0a4be9a2ab4d",
    }
    text = json.dumps(saved)
    encoded = base64.b64encode(text.encode()).decode()
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "ep_config.json").write_text(text)
    (directory / "ep_config.h").write_text(
        "/*\n * This file is generated by cilium.\n"
        f" * CILIUM_BASE64_1.17.0 go version go1.23.8 linux/amd64:{encoded}\n */\n"
    )
    (directory / "template.txt").write_text(
        "62b8b1d8d4a4aef2c2b3ba1ba1f66c2c6d6b7ad4b1a6dcbff6c9b8cf3e3b0ee3"
    )
