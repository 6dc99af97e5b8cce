"""Cilium's options that are accepted and have no effect; each class gives the reason.

Source: Cilium 1.17, option names. Defaults are those of its chart where it renders the option, so that an
installation with default values logs nothing.

A ConfigMap or command line written for Cilium thus starts this agent, too, and a misspelt key differs from a
useless one. Options that would change results are rejected instead.
"""

from __future__ import annotations

from typing import Final

from cells.unsupported.refused import WithoutEffect
from lifecycle import Duration, HiveView, Logger, milliseconds, minutes, seconds


class UnusedByTheAgent(WithoutEffect, frozen=True):
    """The agent has no use for these options of its log, threads and controllers."""

    agent_labels: str = ""
    agent_health_require_k8s_connectivity: bool = True
    boot_id_file: str = "/proc/sys/kernel/random/boot_id"
    cflags: str = ""
    enable_gops: bool = True
    gops_port: int = 9890
    pprof_address: str = "localhost"
    pprof_port: int = 6060
    log_driver: str = ""
    """The log goes to standard error, in lines of key=value."""
    log_opt: str = ""
    """The log goes to standard error, in lines of key=value."""
    log_system_load: bool = False
    lib_dir: str = "/var/lib/cilium"
    """The agent needs only the files of its package."""
    procfs: str = "/host/proc"
    """/host/proc is used if it is mounted."""
    mke_cgroup_mount: str = ""
    dynamic_lifecycle_config: str = "[]"
    metrics_sampling_interval: Duration = minutes(5)
    max_controller_interval: int = 0
    max_internal_timer_delay: Duration = seconds(0)
    status_collector_failure_threshold: Duration = minutes(1)
    status_collector_interval: Duration = seconds(5)
    status_collector_probe_check_timeout: Duration = minutes(5)
    status_collector_stackdump_path: str = "/run/cilium/state/agent.stack.gz"
    status_collector_warning_threshold: Duration = seconds(15)
    enable_dynamic_config: bool = True
    """Differences from the running settings are always reported."""
    enable_drift_checker: bool = True
    """Differences from the running settings are always reported."""
    ignore_flags_drift_checker: str = ""
    bypass_ip_availability_upon_restore: bool = False
    """A restored pod always keeps its address."""
    endpoint_queue_size: int = 25
    endpoint_regen_interval: Duration = minutes(2)


class UnusedByPolicies(WithoutEffect, frozen=True):
    """The computation of policies and identities has no use for these options."""

    policy_accounting: bool = True
    """Packets and bytes of every policy map entry are always counted."""
    policy_queue_size: int = 100
    policy_trigger_interval: Duration = seconds(1)
    policy_secrets_only_from_secrets_namespace: bool = True
    certificates_directory: str = "/var/run/cilium/certs"
    """Rules that need secrets are rejected."""
    use_full_tls_context: bool = False
    bpf_policy_map_full_reconciliation_interval: Duration = minutes(15)
    """Every policy map is reconciled while the agent runs."""
    bpf_policy_stats_map_max: int = 65536
    identity_allocation_sync_interval: Duration = minutes(5)
    identity_allocation_timeout: Duration = minutes(2)
    identity_max_jitter: Duration = seconds(30)
    identity_restore_grace_period: Duration = seconds(30)
    """A restored identity is released once all possible users are synchronized."""
    allocator_list_timeout: Duration = minutes(3)
    fqdn_regex_compile_lru_size: int = 1024
    tofqdns_preallocate_identities: bool = True
    dns_max_ips_per_restored_rule: int = 1000


class UnusedWithoutAuthentication(WithoutEffect, frozen=True):
    """Mutual authentication of pods is not supported: rules that require it are rejected."""

    bpf_auth_map_max: int = 524288
    mesh_auth_enabled: bool = True
    mesh_auth_gc_interval: Duration = minutes(5)
    mesh_auth_mutual_connect_timeout: Duration = seconds(5)
    mesh_auth_mutual_enabled: bool = False
    mesh_auth_mutual_listener_port: int = 0
    mesh_auth_queue_size: int = 1024
    mesh_auth_rotated_identities_queue_size: int = 1024
    mesh_auth_signal_backoff_duration: Duration = seconds(1)
    mesh_auth_spiffe_trust_domain: str = "spiffe.cilium"
    mesh_auth_spire_admin_socket: str = ""


class UnusedByTheDatapath(WithoutEffect, frozen=True):
    """The programs and maps of this datapath have no use for these options."""

    allow_unsafe_policy_skb_usage: bool = False
    bpf_distributed_lru: bool = False
    bpf_events_default_burst_limit: int = 0
    bpf_events_default_rate_limit: int = 0
    """Events have no rate limit; see bpf-events-drop-enabled and similar options."""
    bpf_map_event_buffers: str = ""
    """The agent stores the last 256 writes of each map that only it writes."""
    bpf_node_map_max: int = 16384
    """There is no node map."""
    enable_tcx: bool = True
    """Programs are attached with clsact."""
    monitor_aggregation_flags: str = "all"
    """The first SYN, FIN and RST of a connection are reported."""
    nat_map_stats_entries: int = 32
    nat_map_stats_interval: Duration = seconds(30)
    trace_payloadlen: int = 128
    """Events carry the first 128 bytes of a packet."""
    trace_payloadlen_overlay: int = 192
    enable_local_node_route: bool = True
    """The node has a route to its pods if our plugin creates their links."""
    arping_refresh_period: Duration = seconds(30)
    enable_l2_neigh_discovery: bool = True
    """The kernel resolves neighbours, and refreshes those in use."""
    ipv4_service_range: str = "auto"
    ipv6_service_range: str = "auto"
    ipv6_mcast_device: str = ""


class UnusedWithoutIptables(WithoutEffect, frozen=True):
    """The agent installs no iptables rules."""

    disable_iptables_feeder_rules: str = ""
    enable_xt_socket_fallback: bool = True
    install_iptables_rules: bool = True
    iptables_lock_timeout: Duration = seconds(5)
    iptables_random_fully: bool = False
    prepend_iptables_chains: bool = True


class UnusedByServices(WithoutEffect, frozen=True):
    """Load balancing has no use for these options."""

    bpf_lb_ipip_sock_mark: bool = False
    bpf_lb_rss_ipv4_src_cidr: str = ""
    """Used only with bpf-lb-dsr-dispatch=ipip, which is rejected."""
    bpf_lb_rss_ipv6_src_cidr: str = ""
    """Used only with bpf-lb-dsr-dispatch=ipip, which is rejected."""
    enable_experimental_lb: bool = False
    lb_pressure_metrics_interval: Duration = minutes(5)
    lb_retry_backoff_max: Duration = milliseconds(50)
    lb_retry_backoff_min: Duration = milliseconds(50)
    lb_state_file_interval: Duration = seconds(1)


class UnusedByProxies(WithoutEffect, frozen=True):
    """Envoy and the DNS proxy have no use for these options."""

    disable_envoy_version_check: bool = False
    dnsproxy_lock_count: int = 131
    """The DNS proxy has no locks."""
    dnsproxy_lock_timeout: Duration = milliseconds(500)
    """The DNS proxy has no locks."""
    dnsproxy_socket_linger_timeout: int = 10
    """The DNS proxy closes TCP connections to servers at once."""
    envoy_access_log_buffer_size: int = 4096
    envoy_base_id: int = 0
    envoy_config_retry_interval: Duration = seconds(15)
    envoy_config_timeout: Duration = minutes(2)
    envoy_default_log_level: str = ""
    """Envoy has its own default log level."""
    envoy_http_upstream_linger_timeout: int = -1
    envoy_keep_cap_netbindservice: bool = False
    envoy_policy_restore_timeout: Duration = minutes(3)
    envoy_secrets_namespace: str = "cilium-secrets"
    http_stream_idle_timeout: int = 300
    """Idle HTTP streams have no timeout."""
    proxy_admin_port: int = 0
    """Envoy's admin interface is a socket in the directory envoy of state-dir."""
    proxy_gid: int = 1337
    proxy_initial_fetch_timeout: int = 30
    """Envoy reads its configuration from files."""
    proxy_portrange_max: int = 20000
    proxy_portrange_min: int = 10000
    proxy_prometheus_port: int = 9964
    """An Envoy DaemonSet serves its metrics; an Envoy that the agent starts has none."""
    restored_proxy_ports_age_limit: int = 15
    standalone_dns_proxy_server_port: int = 40045


class HubbleWithoutEffect(WithoutEffect, frozen=True):
    """Hubble's recorder is not supported."""

    enable_hubble_recorder_api: bool = True
    hubble_network_policy_correlation_enabled: bool = True
    hubble_recorder_sink_queue_size: int = 1024
    hubble_recorder_storage_path: str = "/var/run/cilium/pcaps"


class UnusedWithoutEncryption(WithoutEffect, frozen=True):
    """IPsec and WireGuard have no use for these options: they encrypt the nodes' pod CIDRs and addresses, and
    IPsec lists its states at each reconciliation.
    """

    enable_ipsec_xfrm_state_caching: bool = True
    ipv4_pod_subnets: str = ""
    ipv6_pod_subnets: str = ""
    use_cilium_internal_ip_for_ipsec: bool = False
    wireguard_track_all_ips_fallback: bool = False


class UnusedWithoutTheirFeature(WithoutEffect, frozen=True):
    """Options of rejected features: gateways, SRv6, VTEP, announced pods, BBR; and of BGP router IDs, which
    are those of nodes here.
    """

    bgp_router_id_allocation_ip_pool: str = ""
    bgp_router_id_allocation_mode: str = "default"
    enable_bbr_hostns_only: bool = False
    l2_pod_announcements_interface: str = ""
    l2_pod_announcements_interface_pattern: str = ""
    srv6_encap_mode: str = "reduced"
    vtep_cidr: str = ""
    vtep_endpoint: str = ""
    vtep_mac: str = ""
    vtep_mask: str = ""


class UnusedFromKubernetes(WithoutEffect, frozen=True):
    """The Kubernetes client has no use for these options; the agent continues without an API server."""

    crd_wait_timeout: Duration = minutes(5)
    enable_k8s_api_discovery: bool = False
    enable_k8s_endpoint_slice: bool = True
    enable_stale_cilium_endpoint_cleanup: bool = True
    k8s_sync_timeout: Duration = minutes(3)


UNUSED: Final[tuple[type[WithoutEffect], ...]] = (
    UnusedByTheAgent,
    UnusedByPolicies,
    UnusedWithoutAuthentication,
    UnusedByTheDatapath,
    UnusedWithoutIptables,
    UnusedByServices,
    UnusedByProxies,
    HubbleWithoutEffect,
    UnusedWithoutEncryption,
    UnusedWithoutTheirFeature,
    UnusedFromKubernetes,
)


def log_unused(view: HiveView, log: Logger) -> None:
    """Log the options without effect that are set to another value than Cilium's default."""
    names = [
        one.option.name
        for one in view.loaded.settings
        if issubclass(one.option.struct, WithoutEffect) and one.value != one.option.default
    ]
    if names:
        log.info("settings without effect here", settings=sorted(names), reasons="hive config reference")
