"""A kubeconfig is accepted, or rejected in one line with place, value and expectation."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cells import kubernetes
from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access, from_kubeconfig
from cells.kubernetes.client.credentials import not_after
from cells.kubernetes.client.errors import ApiError, CredentialsError, UnreachableError
from cells.kubernetes.settings import AccessError
from lifecycle import Hive
from lifecycle.errors import exit_code, explain
from tests.support.apiserver import ApiServer
from tests.support.apiserver.certificates import Authority
from tests.unit.kubernetes.configured import node

pytestmark = pytest.mark.anyio

SERVER = {"server": "https://10.0.0.1:6443"}
EXEC = {"command": "true", "apiVersion": "client.authentication.k8s.io/v1"}


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def alice(authority: Authority) -> tuple[Path, Path]:
    return authority.issue("alice", "/O=dev/CN=alice")


def expired(folder: Path) -> tuple[Path, Path]:
    """A certificate that expired yesterday, and its key."""
    certificate, key = folder / "expired.crt", folder / "expired.key"
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "late")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now - timedelta(days=1))
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return certificate, key


def document(cluster: Any = SERVER, user: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        **more,
    }


def written(folder: Path, value: Any) -> Path:
    path = folder / "config"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return path


def test_every_kubeconfig_field_is_read(
    tmp_path: Path, authority: Authority, alice: tuple[Path, Path]
) -> None:
    (tmp_path / "ca.crt").write_bytes(authority.certificate.read_bytes())
    (tmp_path / "get").touch(0o755)
    (tmp_path / "token").write_text("t")
    certificate, key = alice
    cluster = {
        "server": "https://10.0.0.1:6443/",
        "certificate-authority": "ca.crt",
        "tls-server-name": "api",
        "proxy-url": "http://proxy:3128",
        "insecure-skip-tls-verify": False,
    }
    user = {
        "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
        "client-key": str(key),
        "tokenFile": "token",
        "as": "jane",
        "as-groups": ["dev"],
        "as-user-extra": {"scopes": ["a", "b"]},
        "exec": {"command": "./get", "args": ["token"], "env": [{"name": "A", "value": "B"}]},
    }
    found = from_kubeconfig(written(tmp_path, document(cluster, user)))
    assert found.servers == ("https://10.0.0.1:6443",)
    assert found.ca_file == tmp_path / "ca.crt"
    assert (found.tls_server_name, found.proxy_url) == ("api", "http://proxy:3128")
    assert (found.certificate_data, found.key_file) == (certificate.read_bytes(), key)
    assert found.token_file == tmp_path / "token"
    assert (found.impersonate_user, found.impersonate_groups) == ("jane", ("dev",))
    assert found.impersonate_extra == (("scopes", "a"), ("scopes", "b"))
    assert found.exec is not None
    assert Path(found.exec.program) == tmp_path / "get"
    assert (found.exec.args, found.exec.env) == (("token",), (("A", "B"),))


def test_null_fields_of_a_kubeconfig_are_unset(tmp_path: Path) -> None:
    cluster = {**SERVER, "certificate-authority": None, "proxy-url": None, "insecure-skip-tls-verify": None}
    user = {"token": "t", "exec": None, "as-groups": None, "client-key-data": None}
    found = from_kubeconfig(written(tmp_path, document(cluster, user, preferences=None)))
    assert found == Access(servers=(SERVER["server"],), token="t")
    assert from_kubeconfig(written(tmp_path, document())) == Access(servers=(SERVER["server"],))


def of_user(**user: Any) -> dict[str, Any]:
    return document(user=user)


def of_cluster(**cluster: Any) -> dict[str, Any]:
    return document({**SERVER, **cluster})


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


WRONG: dict[str, tuple[Any, str]] = {
    "not YAML": ("a: [", ":2:1: did not find expected node content; expected a kubeconfig"),
    "nothing": ("", ": expected a kubeconfig, a mapping with clusters, users and contexts"),
    "a list": ("[]", ": expected a kubeconfig, a mapping with clusters, users and contexts"),
    "no text": ("\x00", ": not YAML; expected a kubeconfig"),
    "within itself": (
        "{current-context: x, users: [{name: u, user: {token: &a [*a]}}]}",
        ": users[0].user.token: expected `str`, got `array`",
    ),
    "no context": ("{}", ": current-context is not set"),
    "null context": ("current-context: null", ": current-context is not set"),
    "unknown context": (document(contexts=[]), ": contexts has no 'c'; it has: none"),
    "empty context": (
        document(contexts=[{"name": "c", "context": None}]),
        ": context c: cluster is not set",
    ),
    "unknown cluster": (document(clusters=None), ": context c: clusters has no 'k'; it has: none"),
    "unknown user": (
        document(users=[{"name": "v"}, {"name": "w"}]),
        ": context c: users has no 'u'; it has: v, w",
    ),
    "clusters no list": (document(clusters={"k": {}}), ": clusters: expected `array`, got `object`"),
    "no server": (of_cluster(server=None), ": cluster k: server is not set"),
    "server a number": (of_cluster(server=5), ": clusters[0].cluster.server: expected `str`, got `int`"),
    **{
        f"server {url}": (
            of_cluster(server=url),
            f": cluster k: server={url}: expected a URL such as https://10.0.0.1:6443",
        )
        for url in (
            "ftp://a",
            "https://[::1",
            "https://a:99999",
            "https://a:x",
            "https://a b",
            "https://",
            "https://a..b",
        )
    },
    **{
        f"proxy {url}": (
            of_cluster(**{"proxy-url": url}),
            f": cluster k: proxy-url={url}: expected a URL such as http://10.0.0.1:3128, https or socks5",
        )
        for url in ("foo", "socks4://a", "http://[::1")
    },
    "insecure as text": (
        of_cluster(**{"insecure-skip-tls-verify": "false"}),
        ": clusters[0].cluster.insecure-skip-tls-verify: expected `bool`, got `str`",
    ),
    "insecure with a CA": (
        of_cluster(**{"insecure-skip-tls-verify": True, "certificate-authority": "/dev/null"}),
        ": cluster k: insecure-skip-tls-verify and a certificate-authority; expected one of them",
    ),
    "CA no base64": (
        of_cluster(**{"certificate-authority-data": "!!!"}),
        ": cluster k: certificate-authority-data: Only base64 data is allowed; expected base64",
    ),
    "CA no certificate": (
        of_cluster(**{"certificate-authority-data": base64_of("hello")}),
        ": cluster k: certificate-authority-data: no certificate in PEM",
    ),
    "CA missing": (
        of_cluster(**{"certificate-authority": "/no/ca.crt"}),
        (
            ": cluster k: certificate-authority: /no/ca.crt: No such file or directory;"
            " expected a certificate in PEM"
        ),
    ),
    "CA a folder": (
        of_cluster(**{"certificate-authority": "/"}),
        ": cluster k: certificate-authority: /: Is a directory; expected a certificate in PEM",
    ),
    "CA file no certificate": (
        of_cluster(**{"certificate-authority": "/dev/null"}),
        ": cluster k: certificate-authority: /dev/null: no certificate in PEM",
    ),
    "certificate missing": (
        of_user(**{"client-certificate": "/no/a.crt", "client-key": "/no/a.key"}),
        ": user u: client-certificate: /no/a.crt: No such file or directory; expected PEM",
    ),
    "certificate garbage": (
        of_user(**{"client-certificate-data": base64_of("x"), "client-key-data": base64_of("y")}),
        ": user u: client-certificate: expected a certificate, and its key without a password, in PEM",
    ),
    "key alone": (
        of_user(**{"client-key": "/dev/null"}),
        ": user u: client-key without a client-certificate",
    ),
    "token file missing": (
        of_user(tokenFile="/no/token"),
        ": user u: tokenFile: /no/token: No such file or directory; expected a token",
    ),
    "token of two lines": (of_user(token="a\nb"), ": user u: token: has a line break; expected one line"),
    "token a number": (of_user(token=5), ": users[0].user.token: expected `str`, got `int`"),
    "groups of nobody": (
        of_user(**{"as-groups": ["a"]}),
        ": user u: as-uid, as-groups and as-user-extra need as, which is not set",
    ),
    "groups no list": (
        of_user(**{"as": "a", "as-groups": 5}),
        ": users[0].user.as-groups: expected `array`, got `int`",
    ),
    "auth provider": (
        of_user(**{"auth-provider": {"name": "gcp"}}),
        ": user u: auth-provider gcp: not known; expected exec, a token or a certificate",
    ),
    "plugin missing": (
        of_user(exec={**EXEC, "command": "/no/plugin", "installHint": "install it\nfrom there"}),
        ": user u: exec.command=/no/plugin: no such program; install it from there",
    ),
    "plugin without a name": (of_user(exec={"args": ["a"]}), ": user u: exec.command is not set"),
    "plugin a text": (of_user(exec="aws"), ": users[0].user.exec: expected `object | null`, got `str`"),
    "plugin's arguments": (
        of_user(exec={**EXEC, "args": 5}),
        ": users[0].user.exec.args: expected `array`, got `int`",
    ),
    "plugin's variables": (
        of_user(exec={**EXEC, "env": ["A=B"]}),
        ": users[0].user.exec.env[0]: expected `object`, got `str`",
    ),
    "plugin of another age": (
        of_user(exec={**EXEC, "apiVersion": "client.authentication.k8s.io/v1alpha1"}),
        (
            ": user u: exec.apiVersion=client.authentication.k8s.io/v1alpha1: expected"
            " client.authentication.k8s.io/v1 or client.authentication.k8s.io/v1beta1"
        ),
    ),
    "plugin that asks": (
        of_user(exec={**EXEC, "interactiveMode": "Always"}),
        ": user u: exec.interactiveMode=Always: the agent has no terminal; expected Never",
    ),
}


@pytest.mark.parametrize("what", WRONG)
async def test_an_agent_refuses_it_in_one_line_as_a_fault_of_its_settings(tmp_path: Path, what: str) -> None:
    value, message = WRONG[what]
    path = written(tmp_path, value)
    hive = Hive(node(), kubernetes.cell, settings={"k8s-kubeconfig-path": str(path)})
    with pytest.raises(ExceptionGroup) as raised:
        async with hive.started():
            pytest.fail("it started")
    assert explain(raised.value) == f"{path}{message}"
    assert exit_code(raised.value) == 2


def test_a_missing_kubeconfig_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=f"{tmp_path}/x: No such file or directory; expected a kubeconfig"):
        from_kubeconfig(tmp_path / "x")
    with pytest.raises(AccessError, match=f"{tmp_path}: Is a directory; expected a kubeconfig"):
        from_kubeconfig(tmp_path)


def test_a_key_of_another_certificate_is_reported(
    tmp_path: Path, authority: Authority, alice: tuple[Path, Path]
) -> None:
    _, key = authority.issue("bob", "/CN=bob")
    certificate, _ = alice
    user = {"client-certificate": str(certificate), "client-key": str(key)}
    with pytest.raises(AccessError) as raised:
        from_kubeconfig(written(tmp_path, document(user=user)))
    assert str(raised.value).endswith(
        f": user u: client-certificate: {certificate}, {key}: the key is not the certificate's"
    )


async def test_a_refusal_names_the_expired_client_certificate(tmp_path: Path) -> None:
    certificate, key = expired(tmp_path)
    end = not_after(certificate.read_bytes())
    assert end is not None
    server = ApiServer()
    async with server.serving() as url:
        access = Access((url,), token="wrong", certificate_file=certificate, key_file=key)
        client = connect(access)
        with pytest.raises(ApiError) as raised:
            await client.raw("GET", "/api/v1/nodes")
        await client.reset()
    reason = f"the client certificate {certificate} expired {end:%Y-%m-%d %H:%M} UTC"
    assert str(raised.value) == f"401 Unauthorized: Unauthorized; {reason}"


def test_the_end_of_a_certificate_is_read(alice: tuple[Path, Path]) -> None:
    shown = subprocess.run(
        ["openssl", "x509", "-in", str(alice[0]), "-noout", "-enddate", "-dateopt", "iso_8601"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert f"notAfter={not_after(alice[0].read_bytes()):%Y-%m-%d %H:%M:%SZ}" == shown.strip()
    for nonsense in (b"", b"x", alice[1].read_bytes()):
        assert not_after(nonsense) is None


async def test_an_exec_plugin_learns_which_cluster_it_is_for(tmp_path: Path, authority: Authority) -> None:
    extensions = [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a"}}]
    cluster = {
        **SERVER,
        "certificate-authority": str(authority.certificate),
        "tls-server-name": "api",
        "extensions": [{"name": "other", "extension": {"provider": "x"}}, *extensions],
    }
    script = 'echo "$KUBERNETES_EXEC_INFO" > "$0"; exit 1'
    arguments = ["-c", script, str(tmp_path / "info")]
    user = {"exec": {**EXEC, "command": "sh", "args": arguments, "provideClusterInfo": True}}
    client = connect(from_kubeconfig(written(tmp_path, document(cluster, user))))
    with pytest.raises(CredentialsError, match="exit 1"):
        await client.raw("GET", "/test")
    assert json.loads((tmp_path / "info").read_text())["spec"] == {
        "interactive": False,
        "cluster": {
            "server": "https://10.0.0.1:6443",
            "tls-server-name": "api",
            "certificate-authority-data": base64.b64encode(authority.certificate.read_bytes()).decode(),
            "config": {"audience": "a"},
        },
    }


PLUGINS: dict[str, tuple[str, str]] = {
    "fails": ("echo some; echo no way >&2; exit 3", "exit 3: no way"),
    "fails in silence": ("exit 1", "exit 1: no reason given"),
    "says nothing": ("true", "Input data was truncated; expected an ExecCredential"),
    "says nonsense": (
        "echo hello",
        "JSON is malformed: invalid character (byte 0); expected an ExecCredential",
    ),
    "says no text": (
        'printf \'{"status": {"token": "\\377"}}\'',
        "no UTF-8; expected an ExecCredential",
    ),
    "says a list": ("echo '[]'", "Expected `object`, got `array`; expected an ExecCredential"),
    "says null": (
        "echo '{\"status\": null}'",
        "Object missing required field `status`; expected an ExecCredential",
    ),
    "gives nothing": (
        'echo \'{"status": {"token": null}}\'',
        "neither a token nor a client certificate in its ExecCredential",
    ),
    "gives two lines": (
        'echo \'{"status": {"token": "a\\\\u000ab"}}\'',
        "the token has a line break",
    ),
    "gives no certificate": (
        'echo \'{"status": {"clientCertificateData": "x", "clientKeyData": "y"}}\'',
        "clientCertificateData and clientKeyData: expected a certificate and its key, in PEM",
    ),
    "has no time": (
        'echo \'{"status": {"token": "a", "expirationTimestamp": "soon"}}\'',
        "expirationTimestamp soon: expected a time such as 2026-01-31T12:00:00Z",
    ),
}


@pytest.mark.parametrize("what", PLUGINS)
async def test_a_failing_exec_plugin_is_reported_in_one_line(tmp_path: Path, what: str) -> None:
    script, message = PLUGINS[what]
    user = {"exec": {**EXEC, "command": "sh", "args": ["-c", script]}}
    client = connect(from_kubeconfig(written(tmp_path, document(user=user))))
    with pytest.raises(CredentialsError) as raised:
        await client.raw("GET", "/api/v1/nodes")
    assert str(raised.value) == f"exec sh: {message}"


@pytest.mark.parametrize(
    ("server", "without", "proxy"),
    [
        ("https://api.test:6443", "", "https"),
        ("http://api.test:8080", "", "http"),
        ("https://localhost:6443", "", ""),
        ("https://[::1]:6443", "", ""),
        ("https://api.test:6443", "*", ""),
        ("https://api.test:6443", "example.com, test", ""),
        ("https://API.test:6443", ".Test", ""),
        ("https://test:6443", ".test", "https"),
        ("https://api.test:6443", "*.test", ""),
        ("https://api.test:6443", "api.test:443", "https"),
        ("https://api.test", "api.test:443", ""),
        ("https://api.test:6443", "pi.test", "https"),
        ("https://10.1.2.3:6443", "10.0.0.0/8", ""),
        ("https://10.1.2.3:6443", "10.1.2.3:6443", ""),
        ("https://10.1.2.3:6443", "10.1.2.3:443,11.0.0.0/8,10.0.0.0/99", "https"),
        ("https://[fd00::1]:6443", "fd00::1", ""),
        ("https://[fd00::1]:6443", "[fd00::1]:6443", ""),
        ("https://[fd00::1]:6443", "fd00::/64,fd01::1", ""),
        ("https://[fd00::1]:6443", "fd00::2,10.0.0.0/8", "https"),
    ],
)
def test_proxies_of_the_environment_are_used_as_in_client_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, without: str, proxy: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "https:3128")
    monkeypatch.setenv("http_proxy", "socks5://http:1080")
    monkeypatch.setenv("NO_PROXY", without)
    urls = {"": "", "https": "http://https:3128", "http": "socks5://http:1080"}
    found = from_kubeconfig(written(tmp_path, document({"server": server})))
    assert found.proxy_for(found.servers[0]) == urls[proxy]
    own = from_kubeconfig(written(tmp_path, document({"server": server, "proxy-url": "http://own:1"})))
    assert own.proxy_for(own.servers[0]) == "http://own:1"


async def test_a_server_is_reached_by_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # and does not listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        client = connect(from_kubeconfig(written(tmp_path, document())))
        with pytest.raises(UnreachableError, match=f"^proxy 127.0.0.1:{port}: Connection refused$"):
            await client.raw("GET", "/api/v1/nodes")
        await client.reset()


def test_a_malformed_proxy_of_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "ftp://proxy:21")
    with pytest.raises(AccessError, match=r"^HTTPS_PROXY=ftp://proxy:21: expected a URL such as http://"):
        from_kubeconfig(written(tmp_path, document()))


@pytest.mark.parametrize(
    ("more", "scheme"),
    [({}, "http"), ({"insecure-skip-tls-verify": True}, "https"), ({"certificate-authority": "ca"}, "https")],
)
def test_a_server_without_a_scheme_has_that_of_client_go(
    tmp_path: Path, authority: Authority, more: dict[str, Any], scheme: str
) -> None:
    (tmp_path / "ca").write_bytes(authority.certificate.read_bytes())
    found = from_kubeconfig(written(tmp_path, document({"server": "10.0.0.1:6443", **more})))
    assert found.servers == (f"{scheme}://10.0.0.1:6443",)


async def test_an_unreachable_proxy_is_reported_as_such(tmp_path: Path) -> None:
    with socket.socket() as taken:  # and does not listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        cluster = {"server": "https://127.0.0.1:6443", "proxy-url": f"http://127.0.0.1:{port}"}
        client = connect(from_kubeconfig(written(tmp_path, document(cluster))))
        with pytest.raises(UnreachableError, match=f"^proxy 127.0.0.1:{port}: Connection refused$"):
            await client.raw("GET", "/api/v1/nodes")
        await client.reset()
