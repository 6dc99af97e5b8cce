"""The server of flow metrics: TLS, the watched file of metrics, and metrics of flow logs."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import ssl
import time
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells.hubble.export.exporters import Exporters
from cells.hubble.metrics.server import HubbleMetrics, HubbleMetricsSettings
from lifecycle.testing import eventually
from tests.support.apiserver.certificates import Authority
from tests.support.ports import free_port
from tests.unit.hubble.serving import degraded, in_thread, serving

pytestmark = pytest.mark.anyio


def scraped(port: int, authority: Authority, certificate: tuple[Path, Path] | None = None) -> str:
    """The metrics of flows, twice over one connection; empty for a server or client that is not trusted."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.check_hostname = False
    if certificate is not None:
        context.load_cert_chain(*certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    texts = []
    with contextlib.closing(connection):
        for _ in range(2):
            try:
                connection.request("GET", "/metrics")
                texts.append(connection.getresponse().read().decode())
            except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
                return ""
            assert isinstance(connection.sock, ssl.SSLSocket)
            assert connection.sock.version() == "TLSv1.3"
    return "".join(texts)


async def test_metrics_are_served_with_tls_to_clients_with_a_certificate_alone(tmp_path: Path) -> None:
    authority, port = Authority(tmp_path), free_port()
    client = authority.issue("client", "/CN=prometheus")
    settings = {
        "hubble-metrics": "flow drop",
        "hubble-metrics-server": f"127.0.0.1:{port}",
        "hubble-metrics-server-enable-tls": True,
        "hubble-metrics-server-tls-cert-file": str(tmp_path / "server.crt"),
        "hubble-metrics-server-tls-key-file": str(tmp_path / "server.key"),
        "hubble-metrics-server-tls-client-ca-files": (str(authority.certificate),),
    }
    async with serving(tmp_path, **settings) as hive:
        wrong = f"{tmp_path}/server.crt: No such file or directory; no metrics are served"
        await eventually(lambda: wrong in degraded(hive, "metrics-server"))
        assert await in_thread(lambda: scraped(port, authority, client)) == "", "there is no certificate yet"
        authority.issue("server", "/CN=server")
        await eventually(lambda: not degraded(hive, "metrics-server"))
        text = await in_thread(lambda: scraped(port, authority, client))
        assert text.count('hubble_metrics_http_handler_requests_total{code="200"} 1') == 1
        assert await in_thread(lambda: scraped(port, authority)) == ""
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            await in_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10))
        assert await in_thread(lambda: scraped(port, authority, client))
        key, good = tmp_path / "server.key", (tmp_path / "server.key").read_text()
        await anyio.Path(key).write_text("half")
        await eventually(lambda: "the last good ones are" in degraded(hive, "metrics-server"))
        assert await in_thread(lambda: scraped(port, authority, client)), "by the last good certificate"
        await anyio.Path(key).write_text(good)
        await eventually(lambda: not degraded(hive, "metrics-server"))


async def test_the_file_of_metrics_is_followed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dynamic" / "metrics.yaml"
    of_flows = {"hubble_flows_processed_total", "hubble_drop_total", "hubble_icmp_total"}

    async with serving(tmp_path, **{"hubble-dynamic-metrics-config-path": str(file)}) as hive:
        metrics = hive.get(HubbleMetrics)

        async def asked_for(text: str, *names: str) -> None:
            whole = anyio.Path(f"{file}.new")
            await anyio.Path(file.parent).mkdir(exist_ok=True)
            await whole.write_text(text)
            await whole.rename(file)
            await eventually(lambda: {one.name for one in metrics.flows.families()} == set(names))

        await eventually(lambda: f"{file}: No such file or directory" in degraded(hive, "metrics-file"))
        assert metrics.flows.families() == [], "there is no file yet"
        await asked_for("metrics: [{name: drop}]", "hubble_drop_total")
        assert not degraded(hive, "metrics-file")
        await asked_for("metrics: [{name: icmp}, {name: flow}]", *of_flows - {"hubble_drop_total"})
        await asked_for("metrics: [{name: what}]", *of_flows - {"hubble_drop_total"})
        await eventually(lambda: "'what' does not exist; metrics stay as they were" in capfd.readouterr().err)
        assert "'what' does not exist; metrics stay as they were" in degraded(hive, "metrics-file")
        assert len(metrics.flows.families()) == 2
        await asked_for("metrics: []")
        assert not degraded(hive, "metrics-file")


async def test_metrics_of_flow_logs_count_active_ones_and_changes_of_their_file(tmp_path: Path) -> None:
    file, port = tmp_path / "flowlogs.yaml", free_port()
    names = {"a": "", "old": ', end: "2020-01-01T00:00:00Z"'}
    logs = "".join(f"- {{name: {name}, filePath: {tmp_path}/{name}{more}}}\n" for name, more in names.items())
    text = f"flowLogs:\n{logs}"
    file.write_text(text)
    settings = {
        "hubble-metrics-server": f"127.0.0.1:{port}",
        "hubble-flowlogs-config-path": str(file),
    }

    def lines() -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            found: list[str] = answer.read().decode().splitlines()
        return {line for line in found if line.startswith("hubble_dynamic_exporter")}

    async with serving(tmp_path, **settings) as hive:
        await eventually(lambda: hive.get(Exporters).active == {"a": True, "old": False})
        found = await in_thread(lines)
        (applied,) = (line for line in found if "last_applied" in line)
        digest = int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:8], "little")
        (hashed,) = (line for line in found if "config_hash" in line)
        assert float(hashed.split()[1]) == float(digest)
        assert time.time() - 60 < float(applied.split()[1]) <= time.time()
        assert found - {applied, hashed} == {
            'hubble_dynamic_exporter_exporters_total{status="active"} 1',
            'hubble_dynamic_exporter_exporters_total{status="inactive"} 1',
            'hubble_dynamic_exporter_up{name="a"} 1',
            'hubble_dynamic_exporter_up{name="old"} 0',
            'hubble_dynamic_exporter_reconfigurations_total{op="add"} 2',
        }


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"hubble_metrics": "drop", "hubble_dynamic_metrics_config_path": "x"},
            "only one of them may be set",
        ),
        ({"hubble_metrics_server_enable_tls": True}, "without hubble-metrics-server-tls-cert-file"),
        ({"hubble_metrics_server_tls_client_ca_files": ("ca.crt",)}, "every client would be served"),
    ],
)
def test_settings_of_metrics_that_cannot_all_hold_are_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HubbleMetricsSettings(**more).validate()
