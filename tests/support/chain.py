"""A small container runtime: runs a chain of CNI plugins for a pod of a lab node, as libcni does.

Source: CNI specification 1.0, section 3: each plugin gets the previous plugin's result, DEL runs backwards,
CHECK and DEL get the result of the ADD.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hive.lab.node import Lab
from hive.lab.pods import Attached
from tests.support.agents import Ended, call_environment, ended, hasty_plugin, start_plugin

FOREIGN = Path("/usr/lib/cni")


class ChainError(Exception):
    """A plugin failed; the text is what it printed."""


@dataclass(slots=True)
class Chained:
    """A pod and the result of its ADD."""

    pod: str
    result: dict[str, Any]
    runtime: dict[str, Any]

    @property
    def attached(self) -> Attached:
        """Return it in the form of the lab's own pods."""
        host, inner = self.result["interfaces"][-2:]
        return Attached(self.pod, self.ipv4, "", inner["mac"], host["name"], host["mac"], 0, self.ipv6)

    @property
    def ipv4(self) -> str:
        """Return its IPv4 address; empty without one."""
        return self._address(version=4)

    @property
    def ipv6(self) -> str:
        """Return its IPv6 address; empty without one."""
        return self._address(version=6)

    def _address(self, version: int) -> str:
        found = (str(each["address"]).partition("/")[0] for each in self.result["ips"])
        return next((each for each in found if (":" in each) is (version == 6)), "")


@dataclass(slots=True)
class Chain:
    """A network of a node: plugins that are called one after the other."""

    lab: Lab
    network: dict[str, Any]
    pods: dict[str, Chained] = field(default_factory=dict)

    @classmethod
    def written(cls, lab: Lab) -> Chain:
        """Return the network of the configuration that the agent has written."""
        return cls(lab, json.loads(lab.cni_conf.read_bytes()))

    def add(self, pod: str, *, runtime: dict[str, Any] | None = None) -> Chained:
        """Create the pod's namespace and attach it; ``runtime`` has the runtime's capability arguments."""
        self.lab.hold_pod(pod)
        made = Chained(pod, {}, runtime or {})
        for entry in self.network["plugins"]:
            done = self._call(entry, made, "ADD")
            made.result = done.json
        self.pods[pod] = made
        return made

    def check(self, pod: str) -> None:
        """Run CHECK of every plugin."""
        for entry in self.network["plugins"]:
            self._call(entry, self.pods[pod], "CHECK")

    def delete(self, pod: str) -> None:
        """Detach the pod and delete its namespace."""
        made = self.pods.pop(pod)
        for entry in reversed(self.network["plugins"]):
            self._call(entry, made, "DEL")
        self.lab.release_pod(pod)

    def _call(self, entry: dict[str, Any], made: Chained, command: str) -> Ended:
        conf = {**entry, "cniVersion": self.network["cniVersion"], "name": self.network["name"]}
        if made.result:
            conf["prevResult"] = made.result
        offered = {key: made.runtime[key] for key in entry.get("capabilities", {}) if key in made.runtime}
        if offered:
            conf["runtimeConfig"] = offered
        ours = entry["type"] == "cilium-cni"
        env = call_environment(self.lab, made.pod, command, CNI_PATH=str(FOREIGN))
        plugin = hasty_plugin() if ours else FOREIGN / str(entry["type"])
        env["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
        done = ended(start_plugin(self.lab, env, conf, plugin=plugin))
        if done.code:
            raise ChainError(f"{command} of {entry['type']}: {done.stdout or done.stderr}")
        return done


def addresses_of(lab: Lab, *subnets: str) -> dict[str, Any]:
    """Return the ``ipam`` section of a network: Debian's host-local, with a default route."""
    return {
        "type": "host-local",
        "ranges": [[{"subnet": subnet}] for subnet in subnets],
        "routes": [{"dst": "::/0" if ":" in subnet else "0.0.0.0/0"} for subnet in subnets],
        "dataDir": str(lab.directory / "host-local"),
    }
