"""Settings of socket load balancing.

Gives: SocketLBSettings.
"""

from pathlib import Path

from cells.services.settings import ServiceSettings
from lifecycle import Settings

DEFAULT_CGROUP_ROOT = Path("/run/cilium/cgroupv2")


class SocketLBSettings(Settings, frozen=True):
    """Services translated when a socket connects, so that no packet needs translation."""

    bpf_lb_sock: bool = False
    """Translate service addresses at the sockets of the node's processes and of pods."""

    bpf_lb_sock_hostns_only: bool = False
    """Only for processes in the node's own network namespace; pods' packets are translated one by one."""

    bpf_lb_sock_terminate_pod_connections: bool = True
    """Close pods' sockets too, not only the node's own, when their backend is removed."""

    bpf_lb_sock_terminate_all_protos: bool = False
    """Close TCP connections to removed backends too, not only UDP sockets."""

    cgroup_root: Path | None = None
    """Cgroup whose processes are served; unset: all of them, at cgroup v2 mounted on /run/cilium/cgroupv2."""

    node_port_bind_protection: bool = True
    """Refuse to let processes of the node bind to the address and port of a service."""

    def serves(self, services: ServiceSettings) -> bool:
        """Whether services are served at sockets."""
        return self.bpf_lb_sock or services.kube_proxy_replacement

    def validate(self) -> None:
        """Refuse a relative path; raises ValueError with one line."""
        if self.cgroup_root is not None and not self.cgroup_root.is_absolute():
            raise ValueError(f"cgroup-root={self.cgroup_root}: expected an absolute path")
