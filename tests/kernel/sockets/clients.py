"""Client pods and protocols for socket load balancing tests."""

from __future__ import annotations

import socket
from pathlib import Path

from hive.lab.namespaces import hold
from hive.syscalls import set_loopback_up
from tests.support.namespaces import Namespaces, inside, new_netns

V4, V6 = socket.AF_INET, socket.AF_INET6
TCP, UDP = socket.SOCK_STREAM, socket.SOCK_DGRAM


def a_pod() -> Namespaces:
    """Create a network namespace with only a loopback device, pinned as container runtimes do."""
    pod = new_netns()
    hold(pod.net, Path("/run/netns/pod"))
    with inside(pod):
        set_loopback_up()
    return pod
