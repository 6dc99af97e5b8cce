"""Keys of Cilium's ConfigMap, and variables of its pods, that other programs read: no settings of the agent.

Source: Cilium 1.17, options of its operators, its chart's init containers and hooks.
"""

from __future__ import annotations

from typing import Final

OPERATOR: Final = """
agent-not-ready-taint-key auto-create-cilium-pod-ip-pools ces-max-ciliumendpoints-per-ces ces-rate-limits
ces-slice-mode cilium-endpoint-gc-interval cilium-pod-labels cilium-pod-namespace cluster-pool-ipv4-cidr
cluster-pool-ipv4-mask-size cluster-pool-ipv6-cidr cluster-pool-ipv6-mask-size
clustermesh-concurrent-service-endpoint-syncs clustermesh-enable-endpoint-sync clustermesh-enable-mcs-api
clustermesh-endpoint-updates-batch-period clustermesh-endpoints-per-slice default-lb-service-ipam
enable-cilium-operator-server-access enable-gateway-api-alpn enable-gateway-api-app-protocol
enable-gateway-api-proxy-protocol enable-gateway-api-secrets-sync enable-ingress-proxy-protocol
enable-ingress-secrets-sync enable-lb-ipam enable-metrics enable-node-ipam enable-policy-secrets-sync
enforce-ingress-https gateway-api-hostnetwork-enabled gateway-api-hostnetwork-nodelabelselector
gateway-api-secrets-namespace gateway-api-service-externaltrafficpolicy gateway-api-xff-num-trusted-hops
identity-gc-interval identity-gc-rate-interval identity-gc-rate-limit identity-heartbeat-timeout
identity-management-mode ingress-default-lb-mode ingress-default-request-timeout ingress-default-secret-name
ingress-default-secret-namespace ingress-default-xff-num-trusted-hops ingress-hostnetwork-enabled
ingress-hostnetwork-nodelabelselector ingress-hostnetwork-shared-listener-port
ingress-lb-annotation-prefixes ingress-secrets-namespace ingress-shared-lb-service-name instance-tags-filter
lbipam-require-lb-class leader-election-lease-duration leader-election-renew-deadline
leader-election-retry-period limit-ipam-api-burst limit-ipam-api-qps loadbalancer-l7
loadbalancer-l7-algorithm loadbalancer-l7-ports mesh-auth-spire-agent-socket mesh-auth-spire-server-address
mesh-auth-spire-server-connection-timeout nodes-gc-interval operator-api-serve-addr
operator-k8s-client-burst operator-k8s-client-qps operator-manages-identities operator-pprof
operator-pprof-address operator-pprof-port operator-prometheus-serve-addr parallel-alloc-workers
pod-restart-selector policy-secrets-namespace remove-cilium-node-taints set-cilium-is-up-condition
set-cilium-node-taints skip-crd-creation subnet-ids-filter subnet-tags-filter synchronize-k8s-nodes
synchronize-k8s-services taint-sync-workers unmanaged-pod-watcher-interval validate-network-policy
"""
"""Options of our operator, which refuses those of parts that are not built."""

CLOUDS: Final = """
aws-enable-prefix-delegation aws-release-excess-ips azure-use-primary-address azure-user-assigned-identity-id
ec2-api-endpoint eni-gc-interval eni-gc-tags eni-tags update-ec2-adapter-limit-via-api
"""
"""Options of Cilium's operators of clouds, whose modes of IPAM are refused."""

PODS: Final = """
all-state bpf-state clean-cilium-bpf-state clean-cilium-state cni-uninstall config-sources
config-sources-overrides custom-cni-conf etcd-config health-sock sock state wait-bpf-mount
"""
"""What init containers, hooks, clients and `hive build-config` read and write."""

OTHERS: Final = frozenset(f"{OPERATOR} {CLOUDS} {PODS}".split())
"""All of them."""
