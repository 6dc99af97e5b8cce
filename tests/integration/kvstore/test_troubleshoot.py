"""``cilium-dbg troubleshoot``: each step against a real etcd, and the reasons of failures."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from hive.check.etcd import NOTE, read_certificate
from hive.dbg.main import run
from tests.support.apiserver.certificates import Authority
from tests.support.etcd import Etcd
from tests.support.ports import free_port
from tests.unit.conformance.replayed_agent import replaying

NO_AGENT = "⚠️ Could not connect to the Cilium's API and retrieve the local cluster name\n"


@pytest.fixture(autouse=True)
def _socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "clustermesh"
    found.mkdir()
    return found


def troubleshoot(capfd: pytest.CaptureFixture[str], folder: Path, *more: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr, with the folder left out."""
    code = run(["troubleshoot", "clustermesh", "--clustermesh-config", str(folder), *more])
    out, err = capfd.readouterr()
    return code, out.replace(f"{folder}/", ""), err.replace(f"{folder}/", "")


def test_each_cluster_is_tried(capfd: pytest.CaptureFixture[str], folder: Path, etcd: Etcd) -> None:
    (folder / "east").write_text(f"endpoints:\n- {etcd.url}\n")
    closed = free_port()
    (folder / "west").write_text(f"endpoints: [http://127.0.0.1:{closed}, http://none.invalid:2379]\n")
    (folder / "json").write_text('{"endpoints": ["http://127.0.0.1:1"]}')
    (folder / "ca.crt").write_text("PEM")
    code, out, err = troubleshoot(capfd, folder, "--timeout=3s")
    assert (code, err) == (0, NO_AGENT)
    before, east, west = re.split(r'\nCluster "(?:east|west)":\n', out)
    assert before == "Found 2 cluster configurations\n"
    connected = etcd.url.removeprefix("http://")
    lines = east.splitlines()
    assert lines[:4] == ["📄 Configuration path: east", "", "🔌 Endpoints:", f"   - {etcd.url}"]
    assert f"     ✅ TCP connection successfully established to {connected}" in lines
    assert lines[-2] == "   ✅ Etcd connection successfully established"
    assert re.fullmatch(rf"   {NOTE}Etcd cluster ID: [0-9a-f]+", lines[-1])
    refused = f"     ❌ Cannot establish TCP connection to 127.0.0.1:{closed}: Connection refused"
    assert refused in west.splitlines()
    assert "     ❌ Cannot resolve hostname: " in west
    assert "   ❌ Failed to retrieve key from etcd: UNAVAILABLE" in west


def test_certificates_are_used_and_shown(
    capfd: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    authority, other = Authority(tmp_path), Authority(folder)
    server, server_key = authority.issue("server", "/CN=etcd")
    client, client_key = authority.issue("client", "/O=mesh/CN=remote")
    wrong, wrong_key = other.issue("wrong", "/CN=remote")
    etcd = Etcd(tmp_path / "etcd", {"ca": authority.certificate, "cert": server, "key": server_key})
    etcd.start()
    try:
        ca = f"trusted-ca-file: {authority.certificate}"
        (folder / "east").write_text(
            f"endpoints: [{etcd.url}]\n{ca}\ncert-file: {client}\nkey-file: {client_key}\n"
        )
        (folder / "alien").write_text(
            f"endpoints: [{etcd.url}]\n{ca}\ncert-file: {wrong}\nkey-file: {wrong_key}\n"
        )
        (folder / "doubtful").write_text(f"endpoints: [{etcd.url}]\ntrusted-ca-file: {other.certificate}\n")
        _, out, _ = troubleshoot(capfd, folder, "east")
        assert f"     {NOTE}Negotiated TLS version: TLS 1.3, ciphersuite TLS_" in out
        assert re.search(rf"^     {NOTE}Etcd server version: 3\.", out, re.MULTILINE)
        assert "        Subject:             CN=remote,O=mesh" in out
        assert out.count("        Issuer:              CN=stand-in-ca") == 2
        assert "   ✅ Etcd connection successfully established" in out
        _, out, _ = troubleshoot(capfd, folder, "alien", "--timeout=2s")
        assert "     ❌ TLS client authentication failed: " in out
        assert "   ❌ Failed to retrieve key from etcd: " in out
        _, out, _ = troubleshoot(capfd, folder, "doubtful", "--timeout=2s")
        assert f"     ❌ Cannot establish TLS connection to 127.0.0.1:{etcd.port}: " in out
        assert "   ⚠️ No available TLS client certificates" in out
    finally:
        etcd.kill()


def test_fields_of_certificates_are_read_as_a_library_reads_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for path in (authority.certificate, *authority.issue("a", "/C=DE/ST=x/L=y/O=z/OU=u/CN=a.example")[:1]):
        theirs = x509.load_pem_x509_certificate(path.read_bytes())
        der = ssl.PEM_cert_to_DER_cert(path.read_text())
        ours = read_certificate(der)
        assert int(ours.serial.replace(":", ""), 16) == theirs.serial_number
        assert ours.subject == theirs.subject.rfc4514_string()
        assert ours.issuer == theirs.issuer.rfc4514_string()
        assert ours.not_before == theirs.not_valid_before_utc
        assert ours.not_after == theirs.not_valid_after_utc
        for end in range(1, len(der), 7):
            with pytest.raises(ValueError):  # noqa: PT011
                read_certificate(der[:end])


def test_names_of_services_are_those_of_the_agent(
    capfd: pytest.CaptureFixture[str], folder: Path, etcd: Etcd, tmp_path: Path
) -> None:
    host = "clustermesh-apiserver.kube-system.svc"
    (folder / "east").write_text(f"endpoints: [http://{host}:{etcd.port}]\n")
    frontend = {"ip": "127.0.0.1", "port": etcd.port}
    flags = {"type": "ClusterIP", "namespace": "kube-system", "name": "clustermesh-apiserver"}
    answers = {
        "/v1/config": {"status": {"daemonConfigurationMap": {"ClusterName": "east"}}},
        "/v1/service": [{"spec": {"id": 1, "frontend-address": frontend, "flags": flags}}],
    }
    exchanges = [
        {"request": {"method": "GET", "path": path}, "response": {"status": 200, "body": body}}
        for path, body in answers.items()
    ]
    with replaying(tmp_path / "cilium.sock", exchanges):
        code, out, err = troubleshoot(capfd, folder)
    assert (code, err) == (0, "")
    assert f"{NOTE}This entry corresponds to the local cluster\n" in out
    assert "     ✅ Hostname resolved to: 127.0.0.1\n" in out
    assert "   ✅ Etcd connection successfully established\n" in out
    _, out, _ = troubleshoot(capfd, folder, "--without-service-resolution", "--timeout=1s")
    assert "     ❌ Cannot resolve hostname: " in out


def test_what_is_not_there_is_named(
    capfd: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, etcd: Etcd
) -> None:
    (folder / "east").write_text("endpoints: 3")
    code, out, _ = troubleshoot(capfd, folder, "west", "east")
    assert code == 0
    assert "Troubleshooting filtered subset of clusters: west, east\n" in out
    assert "❌ Cannot parse etcd configuration: etcd.config=east: Expected `array`" in out
    assert 'Cluster "west":\n❌ Configuration not found\n' in out
    missing = tmp_path / "none"
    code, out, _ = troubleshoot(capfd, missing)
    assert code == 1
    assert f'Is "{missing}" the correct configuration directory?' in out
    assert run(["troubleshoot", "kvstore", "--etcd-config", str(missing)]) == 0
    assert "This is expected when Cilium is running in CRD mode" in capfd.readouterr().out
    config = tmp_path / "etcd.config"
    config.write_text(f"endpoints: [{etcd.url}]")
    assert run(["troubleshoot", "kvstore", "--etcd-config", str(config)]) == 0
    assert "✅ Etcd connection successfully established" in capfd.readouterr().out
    assert run(["troubleshoot", "kvstore", "--timeout", "soon"]) == 1
    assert "expected a duration" in capfd.readouterr().err
