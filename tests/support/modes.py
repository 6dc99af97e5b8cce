"""The modes of an agent that are combined, and the combinations of this run.

``MODES`` in the environment chooses: ``all`` takes every row, ``name=value,name=value,...`` that one. Without
it, a few rows are taken by the hash of the commit, so that all have their turn.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tests.support.pairwise import Row, commit, covering, rotated

DIMENSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "kube-proxy-replacement": ("false", "true"),
    "routing-mode": ("tunnel", "native"),
    "enable-host-legacy-routing": ("true", "false"),
    "families": ("4", "6", "46"),
    "bpf-lb-sock": ("false", "true", "hostns-only"),
    "enable-endpoint-routes": ("false", "true"),
    "enable-host-firewall": ("false", "true"),
    "masquerade": ("true", "false"),
    "first-identity": ("256", "40000"),
    "bpf-lb-algorithm": ("random", "maglev"),
    "bpf-lb-mode": ("snat", "dsr", "hybrid"),
}
"""Options of the agent with their values; ``families`` and ``masquerade`` stand for two options each."""
IN_A_RUN: Final = 2
"""Number of rows that a run tries by default."""
_ALL_PODS: Final = {"4": "10.244.0.0/16", "6": "fd00:10:244::/48"}
"""The range of all pods of a lab's cluster."""


@dataclass(frozen=True)
class Mode:
    """One combination."""

    row: Row

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.row.items())

    @property
    def versions(self) -> list[int]:
        """Return the IP versions of its pods."""
        return [int(version) for version in self.row["families"]]

    @property
    def masquerades(self) -> bool:
        """Return whether servers outside see the node's address."""
        return self.row["masquerade"] == "true"

    def seen_behind(self, kind: str) -> bool:
        """Return whether a backend on another node sees the client's own address, by that protocol."""
        modes = {"tcp": {"dsr", "hybrid"}, "udp": {"dsr"}}
        return self.row["bpf-lb-mode"] in modes[kind]

    @property
    def settings(self) -> list[str]:
        """Return the agents' settings, to be added to those of a lab's cluster."""
        plain = {name: value for name, value in self.row.items() if name not in {"families", "masquerade"}}
        if plain["routing-mode"] == "native":
            del plain["routing-mode"]  # a cluster without a tunnel is
        if plain["bpf-lb-sock"] == "hostns-only":
            plain |= {"bpf-lb-sock": "true", "bpf-lb-sock-hostns-only": "true"}
        for version in "46":
            there = version in self.row["families"]
            plain[f"enable-ipv{version}"] = str(there).lower()
            plain[f"enable-ipv{version}-masquerade"] = str(there and self.masquerades).lower()
            if self.row["routing-mode"] == "native" and there:
                plain[f"ipv{version}-native-routing-cidr"] = _ALL_PODS[version]
        plain |= {"enable-node-port": "true", "bpf-lb-maglev-table-size": "1021"}
        plain["enable-health-checking"] = "true"  # and of endpoints, as by Cilium's own default
        plain["tofqdns-proxy-response-max-delay"] = "30s"  # answers wait for map entries, however long
        return [f"--{name}={value}" for name, value in plain.items()]

    def blamed(self, refusal: str) -> set[str]:
        """Return the dimensions that an agent's refusal names."""
        words = {"families": ("enable-ipv4", "enable-ipv6"), "masquerade": ("masquerade",)}
        return {name for name in self.row if any(word in refusal for word in words.get(name, (name,)))}

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Parse the form that str() writes. Raises ValueError."""
        given = dict(part.split("=", 1) for part in text.split(","))
        row = {name: given.pop(name, values[0]) for name, values in DIMENSIONS.items()}
        wrong = [name for name, value in row.items() if value not in DIMENSIONS[name]]
        if given or wrong:
            raise ValueError(f"MODES={text}: expected all, or of {dict(DIMENSIONS)}")
        return cls(row)


def chosen() -> list[Mode]:
    """Return the combinations of this run."""
    wanted = os.environ.get("MODES", "")
    if wanted and wanted != "all":
        return [Mode.parse(wanted)]
    rows = covering(DIMENSIONS)
    return [Mode(row) for row in (rows if wanted else rotated(rows, commit(), IN_A_RUN))]
