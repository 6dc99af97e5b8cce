"""Settings of socket load balancing.

Gives: SocketLBSettings.
"""

from pathlib import Path

from lifecycle import Settings

DEFAULT_CGROUP_ROOT = Path("/run/cilium/cgroupv2")


class SocketLBSettings(Settings, frozen=True):
    """Services at the socket: who connects to one talks to a backend, and no packet is translated."""

    bpf_lb_sock: bool = False
    """Serve services at sockets, of the node's processes and of pods."""

    bpf_lb_sock_hostns_only: bool = False
    """Only of processes in the node's own network namespace; packets of pods are translated one by one."""

    bpf_lb_sock_terminate_pod_connections: bool = True
    """End sockets of pods too, not only the node's own, whose backend is removed."""

    bpf_lb_sock_terminate_all_protos: bool = False
    """End TCP connections to removed backends too, not only UDP sockets."""

    cgroup_root: Path | None = None
    """Control group whose processes are served; unset: all, by cgroup v2 mounted on /run/cilium/cgroupv2."""

    node_port_bind_protection: bool = True
    """Refuse to let processes of the node bind to the address and port of a service."""

    disable_external_ip_mitigation: bool = False
    """Serve externalIPs that the node does not have to its pods (CVE-2020-8554)."""

    def validate(self) -> None:
        """Refuse a relative path; raises ValueError with one line."""
        if self.cgroup_root is not None and not self.cgroup_root.is_absolute():
            raise ValueError(f"cgroup-root={self.cgroup_root}: expected an absolute path")
