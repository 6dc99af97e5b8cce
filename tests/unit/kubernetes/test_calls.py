"""Metrics of requests to an API server."""

import pytest

from cells.base.metrics import Histogram
from cells.kubernetes.client.calls import Calls, families, normalised


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/api/v1/pods?watch=1", "/api/v1/pods"),
        ("/api/v1/namespaces/default", "/api/v1/namespaces/{name}"),
        ("/api/v1/namespaces/default/pods/web", "/api/v1/namespaces/{namespace}/pods/{name}"),
        ("/apis/cilium.io/v2/ciliumidentities/300", "/apis/cilium.io/v2/ciliumidentities/{name}"),
        ("/apis/cilium.io/v2/ciliumnodes/n/status", "/apis/cilium.io/v2/ciliumnodes/{name}/status"),
        ("/version", "/version"),
        ("/apis", "/apis"),
    ],
)
def test_names_in_paths_are_placeholders(target: str, path: str) -> None:
    assert normalised(target) == path


def test_requests_are_metrics_by_server_method_and_end() -> None:
    calls = Calls()
    with calls.timed("GET", "/api/v1/pods", "https://192.0.2.1:6443", 0.2) as call:
        call.answered(200)
    with calls.timed("GET", "/api/v1/pods", "https://192.0.2.1:6443", 0.0):
        pass
    series = {family.name: family.series for family in families(calls)}
    host = "192.0.2.1:6443"
    assert series["cilium_k8s_client_api_calls_total"] == {
        (host, "GET", "200"): 1,
        (host, "GET", "<error>"): 1,
    }
    (latency,) = series["cilium_k8s_client_api_latency_time_seconds"].values()
    (waited,) = series["cilium_k8s_client_rate_limiter_duration_seconds"].values()
    assert isinstance(latency, Histogram)
    assert isinstance(waited, Histogram)
    assert (latency.count, waited.count, waited.sum) == (1, 2, 0.2)
