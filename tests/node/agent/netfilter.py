"""Rules of kube-proxy in a node's netfilter."""

from __future__ import annotations

import subprocess

from hive.client import ask
from hive.lab.agent_process import api_socket

IPTABLES = "*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n"


def run(text: str, *command: str) -> str:
    return subprocess.run(command, input=text, text=True, check=True, capture_output=True).stdout


def looked(pid: int) -> bool:
    """Return whether the agent has searched for rules."""
    jobs = ask("/v1/healthz", api_socket(pid))["controllers"]
    return any("look-for-kube-proxy" in one["name"] and one["status"]["success-count"] > 0 for one in jobs)
