"""Every option of Cilium's operator is supported, rejected by name, or listed as without effect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner
from structlog.testing import capture_logs

from cells.operator import operator, options
from cells.operator.options import UNUSED_BY_OPERATOR, UnsupportedOperator
from hive.operator.command import command
from lifecycle import Hive, SettingsError, Sources
from tests.support import chart
from tests.support.recordings import recorded

pytestmark = pytest.mark.anyio
CILIUM = """
agent-not-ready-taint-key auto-create-cilium-pod-ip-pools ces-max-ciliumendpoints-per-ces ces-rate-limits
ces-slice-mode cilium-endpoint-gc-interval cilium-pod-labels cilium-pod-namespace cluster-id cluster-name
cluster-pool-ipv4-cidr cluster-pool-ipv4-mask-size cluster-pool-ipv6-cidr cluster-pool-ipv6-mask-size
clustermesh-concurrent-service-endpoint-syncs clustermesh-config clustermesh-enable-endpoint-sync
clustermesh-enable-mcs-api clustermesh-endpoint-updates-batch-period clustermesh-endpoints-per-slice
controller-group-metrics debug default-lb-service-ipam disable-endpoint-crd enable-bgp-control-plane
enable-cilium-clusterwide-network-policy enable-cilium-endpoint-slice enable-cilium-network-policy
enable-cilium-operator-server-access enable-envoy-config enable-gateway-api enable-gateway-api-alpn
enable-gateway-api-app-protocol enable-gateway-api-proxy-protocol enable-gateway-api-secrets-sync
enable-icmp-rules enable-ingress-controller enable-ingress-proxy-protocol enable-ingress-secrets-sync
enable-ipv4 enable-ipv4-egress-gateway enable-ipv6 enable-k8s enable-k8s-api-discovery
enable-k8s-endpoint-slice enable-l2-announcements enable-l7-proxy enable-lb-ipam enable-local-redirect-policy
enable-metrics enable-node-ipam enable-node-port enable-policy-secrets-sync enforce-ingress-https
gateway-api-hostnetwork-enabled gateway-api-hostnetwork-nodelabelselector gateway-api-secrets-namespace
gateway-api-service-externaltrafficpolicy gateway-api-xff-num-trusted-hops gops-port identity-allocation-mode
identity-gc-interval identity-gc-rate-interval identity-gc-rate-limit identity-heartbeat-timeout
identity-management-mode ingress-default-lb-mode ingress-default-secret-name ingress-default-secret-namespace
ingress-default-request-timeout ingress-default-xff-num-trusted-hops ingress-hostnetwork-enabled
ingress-hostnetwork-nodelabelselector ingress-hostnetwork-shared-listener-port ingress-lb-annotation-prefixes
ingress-secrets-namespace ingress-shared-lb-service-name instance-tags-filter ipam k8s-api-server
k8s-api-server-urls k8s-client-burst k8s-client-connection-keep-alive k8s-client-connection-timeout
k8s-client-qps k8s-heartbeat-timeout k8s-kubeconfig-path k8s-namespace k8s-service-proxy-name
kube-proxy-replacement kvstore kvstore-lease-ttl kvstore-max-consecutive-quorum-errors kvstore-opt
lbipam-require-lb-class leader-election-lease-duration leader-election-renew-deadline
leader-election-retry-period limit-ipam-api-burst limit-ipam-api-qps loadbalancer-l7
loadbalancer-l7-algorithm loadbalancer-l7-ports log-driver log-opt max-connected-clusters
mesh-auth-mutual-enabled mesh-auth-spiffe-trust-domain mesh-auth-spire-agent-socket
mesh-auth-spire-server-address mesh-auth-spire-server-connection-timeout nodes-gc-interval
operator-api-serve-addr operator-k8s-client-burst operator-k8s-client-qps operator-manages-identities
operator-pprof operator-pprof-address operator-pprof-port operator-prometheus-serve-addr
parallel-alloc-workers pod-restart-selector policy-secrets-namespace remove-cilium-node-taints
set-cilium-is-up-condition set-cilium-node-taints skip-crd-creation subnet-ids-filter subnet-tags-filter
synchronize-k8s-nodes synchronize-k8s-services taint-sync-workers unmanaged-pod-watcher-interval
validate-network-policy
"""
"""Names of the options that Cilium 1.17's operator takes: flags, hidden ones, and keys of its ConfigMap.
``config``, ``config-dir``, ``help`` and ``version`` are no settings."""


def known() -> set[str]:
    return {one.option.name for one in Hive(operator, settings=Sources(argv=[])).settings()}


def refused(values: Mapping[str, str]) -> list[str]:
    hive = Hive(options.cell, settings=Sources(argv=[f"--{name}={value}" for name, value in values.items()]))
    try:
        hive.check()
    except SettingsError as error:
        return [fault.text for fault in error.faults]
    return []


def test_no_option_of_cilium_is_unknown() -> None:
    assert set(CILIUM.split()) - known() == set()


def test_each_option_is_listed_once_with_a_reason() -> None:
    unserved = [name for struct in (UnsupportedOperator, *UNUSED_BY_OPERATOR) for name in names(struct)]
    served = known() - set(unserved)
    assert len(served) + len(unserved) == len(known())
    for one in Hive(options.cell, settings=Sources(argv=[])).settings():
        assert (one.option.help or one.option.struct.__doc__ or "").endswith("."), one.option.name


def names(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    return struct.__struct_encode_fields__


DEFAULTS = dict(zip(names(UnsupportedOperator), UnsupportedOperator.__struct_defaults__, strict=True))


@pytest.mark.parametrize("name", DEFAULTS)
def test_unsupported_options_are_refused_by_name_and_their_defaults_accepted(name: str) -> None:
    default = DEFAULTS[name]
    text = str(default).lower()
    other = {"true": "false", "false": "true"}.get(text, "7")
    assert refused({name: text}) == []
    assert [one.startswith(f"--{name}={other}: not supported yet") for one in refused({name: other})] == [
        True
    ]


async def test_options_without_effect_are_accepted_and_logged() -> None:
    argv = ["--gops-port=1", "--taint-sync-workers=3"]
    with capture_logs() as logged:
        async with Hive(options.cell, settings=Sources(argv=argv)).started():
            pass
    found = [one for one in logged if one["event"] == "settings without effect here"]
    assert [one["settings"] for one in found] == [["gops-port", "taint-sync-workers"]]
    assert refused({"gops-port": "many"}) != []


@pytest.mark.parametrize("owner", ["ours", "Cilium's"])
def test_the_settings_of_a_chart_start_an_operator(owner: str, tmp_path: Path) -> None:
    if owner == "ours":
        (one,) = yaml.safe_load_all(chart.render({})["configmap.yaml"])
    else:
        one = json.loads(recorded("helm/default").read_text())["rendered"]["ConfigMap/cilium-config"]
    for name, value in one["data"].items():
        (tmp_path / name).write_text(value or "")
    Hive(operator, settings=Sources(config_dir=tmp_path, unknown="ignore")).check()


def test_the_version_flag_prints_the_version_and_starts_nothing() -> None:
    found = CliRunner().invoke(command, ["--version"], standalone_mode=False)
    assert (found.return_value, found.output) == (0, f"hive {metadata.version('hive-agent')}\n")
