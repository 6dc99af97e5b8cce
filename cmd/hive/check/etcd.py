"""``cilium-dbg troubleshoot``: tests each step to the etcds of remote clusters and of this one.

Source: Cilium 1.17, cilium-dbg/cmd/troubleshoot*.go, pkg/kvstore/etcd_debug.go. X.509: RFC 5280.
"""

import os
import re
import socket
import ssl
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click

from cells.kvstore.settings import (
    EtcdAccess,
    StoreConfigError,
    StoreOptions,
    read_access,
    target,
    tls_credentials,
)
from hive.dbg.main import Group
from hive.dbg.requests import RequestFailedError, ask
from lifecycle import Duration

HEARTBEAT: Final = b"cilium/.heartbeat"
"""A key that is read to test the permission; it need not exist."""
NOTE: Final = "\N{INFORMATION SOURCE}\N{VARIATION SELECTOR-16}  "
_SERVICE: Final = re.compile(r"([^.]+)\.([^.]+)\.svc(\..*)?")
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----\s*(.*?)\s*-----END CERTIFICATE-----", re.DOTALL)
_ETCD_VERSION: Final = re.compile(rb'"etcdserver":"(.*?)"')


class _Seconds(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse seconds from ``5s``, as Go writes durations."""
        if isinstance(value, float):
            return value
        try:
            return float(Duration.parse(value))
        except ValueError as error:
            return self.fail(f"{value!r}: {error}", param, ctx)


timeout_option = click.option(
    "--timeout", type=_Seconds(), default="5s", help="Timeout when checking connectivity to one etcd"
)
services_option = click.option(
    "--without-service-resolution",
    "without_services",
    is_flag=True,
    help="Do not ask the agent for the addresses of Kubernetes services",
)


@click.group(cls=Group)
def command() -> None:
    """Run troubleshooting utilities to check control-plane connectivity"""


@command.command()
@click.option(
    "--etcd-config",
    type=click.Path(path_type=Path),
    default="/var/lib/etcd-config/etcd.config",
    help="Path to the etcd configuration",
)
@timeout_option
@services_option
def kvstore(etcd_config: Path, timeout: float, without_services: bool) -> None:
    """Troubleshoot connectivity towards the etcd kvstore"""
    if not etcd_config.exists():
        click.echo(f"Unable to read etcd configuration: {etcd_config}")
        click.echo("This is expected when Cilium is running in CRD mode")
        return
    Check(etcd_config, timeout, Services(asked=not without_services)).run()


@command.command()
@click.argument("clusters", nargs=-1)
@click.option(
    "--clustermesh-config",
    type=click.Path(path_type=Path),
    default="/var/lib/cilium/clustermesh/",
    help="Path to the ClusterMesh configuration directory",
)
@timeout_option
@services_option
def clustermesh(
    clusters: tuple[str, ...], clustermesh_config: Path, timeout: float, without_services: bool
) -> None:
    """Troubleshoot connectivity towards remote clusters"""
    try:
        found = config_files(clustermesh_config)
    except OSError as error:
        click.echo(f"Unable to retrieve cluster configurations: {clustermesh_config}: {error.strerror}")
        click.echo(f'Is "{clustermesh_config}" the correct configuration directory?')
        raise click.exceptions.Exit(1) from error
    own = own_cluster()
    click.echo(f"Found {len(found)} cluster configurations")
    if clusters:
        click.echo(f"Troubleshooting filtered subset of clusters: {', '.join(clusters)}")
    services = Services(asked=not without_services)
    for name in sorted(clusters or found):
        click.echo(f'\nCluster "{name}":')
        if name == own:
            click.echo(f"{NOTE}This entry corresponds to the local cluster")
        if name not in found:
            click.echo("❌ Configuration not found")
            continue
        Check(found[name], timeout, services).run()


def config_files(folder: Path) -> dict[str, Path]:
    """Return the configuration files of remote clusters by name: those with endpoints. Raises OSError."""
    found = {}
    for path in sorted(folder.iterdir()):
        try:
            if path.is_file() and b"endpoints:" in path.read_bytes():
                found[path.name] = path
        except OSError:  # agents ignore it, too
            continue
    return found


def own_cluster() -> str:
    """Return the name of the agent's cluster; empty without an agent."""
    try:
        settings = (ask("GET /config").get("status") or {}).get("daemonConfigurationMap") or {}
    except RequestFailedError:
        text = "Could not connect to the Cilium's API and retrieve the local cluster name"
        click.echo(f"⚠️ {text}", err=True)
        return ""
    return str(settings.get("ClusterName") or "")


class Services:
    """Addresses of Kubernetes services from the agent; pods in the host network do not use cluster DNS."""

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        self._found: dict[tuple[str, str], str] | None = None

    def address(self, host: str) -> str:
        """Return the cluster IP of ``NAME.NAMESPACE.svc``; empty for other names and unknown services."""
        named = _SERVICE.fullmatch(host)
        if named is None or not self._asked:
            return ""
        if self._found is None:
            self._found = self._read()
        return self._found.get((named[2], named[1]), "")

    @staticmethod
    def _read() -> dict[tuple[str, str], str]:
        try:
            specs = [one.get("spec") or {} for one in ask("GET /service")]
        except RequestFailedError as error:
            click.echo(f"⚠️ Could not ask the agent, service resolution may not work: {error}\n", err=True)
            return {}
        found: dict[tuple[str, str], str] = {}
        for spec in specs:
            flags = spec.get("flags") or {}
            if flags.get("type") == "ClusterIP":
                ip = (spec.get("frontend-address") or {}).get("ip", "")
                found.setdefault((flags.get("namespace", ""), flags.get("name", "")), ip)
        return found


class Check:
    """The steps to one etcd; the result of each is printed."""

    def __init__(self, path: Path, timeout: float, services: Services) -> None:
        self._path = path
        self._end = time.monotonic() + timeout
        self._services = services

    def run(self) -> None:
        """Run the steps up to the first failure."""
        click.echo(f"📄 Configuration path: {self._path}")
        try:
            access = read_access(StoreOptions(config=str(self._path)))
        except StoreConfigError as error:
            click.echo(f"❌ Cannot parse etcd configuration: {error}")
            return
        click.echo("\n🔌 Endpoints:")
        for url in access.endpoints:
            click.echo(f"   - {url}")
            for line in self._endpoint(url, access):
                click.echo(f"     {line}")
        click.echo("\n🔑 Digital certificates:")
        for line in certificates(access):
            click.echo(f"   {line}")
        click.echo("\n⚙️ Etcd client:")
        for line in self._client(access):
            click.echo(f"   {line}")

    @property
    def _left(self) -> float:
        return max(self._end - time.monotonic(), 0.001)

    def _endpoint(self, url: str, access: EtcdAccess) -> Iterator[str]:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
        where = url.partition("://")[2]
        addresses = [host]
        if not _is_address(host):
            try:
                addresses = self._resolved(host)
            except OSError as error:
                yield f"❌ Cannot resolve hostname: {error.strerror or error}"
                yield f"❌ Cannot establish TCP connection to {where}: the name has no address"
                return
            shown = [*addresses[:4], *(["..."] if len(addresses) > 4 else [])]
            yield f"✅ Hostname resolved to: {', '.join(shown)}"
        try:
            connection = self._connect(addresses, port)
        except OSError as error:
            yield f"❌ Cannot establish TCP connection to {where}: {_reason(error)}"
            return
        with connection:
            peer = _peer(connection)
            yield f"✅ TCP connection successfully established to {peer}"
            if parts.scheme == "https":
                yield from self._encrypted(connection, host, where, access)

    def _resolved(self, host: str) -> list[str]:
        if address := self._services.address(host):
            return [address]
        return list(
            dict.fromkeys(str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        )

    def _connect(self, addresses: list[str], port: int) -> socket.socket:
        """Connect to the first address that answers. Raises OSError."""
        failure: OSError = TimeoutError("timed out")
        for address in addresses:
            try:
                return socket.create_connection((address, port), timeout=self._left)
            except OSError as error:
                failure = error
        raise failure

    def _encrypted(
        self, connection: socket.socket, host: str, where: str, access: EtcdAccess
    ) -> Iterator[str]:
        """Do the handshake and a request: TLS 1.3 rejects a client certificate only in the answer."""
        peer = _peer(connection)
        try:
            secured = tls_context(access).wrap_socket(connection, server_hostname=host)
        except OSError as error:
            yield f"❌ Cannot establish TLS connection to {where}: {_reason(error)}"
            return
        with secured:
            yield f"✅ TLS connection successfully established to {peer}"
            version, cipher = secured.version() or "", secured.cipher()
            name = version.replace("TLSv", "TLS ")
            yield f"{NOTE}Negotiated TLS version: {name}, ciphersuite {cipher[0] if cipher else ''}"
            try:
                secured.settimeout(min(self._left, 1.0))
                secured.sendall(f"GET /version HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
                answer = secured.recv(1000)
            except ssl.SSLError as error:
                yield f"❌ TLS client authentication failed: {_reason(error)}"
                return
            except OSError as error:
                yield f"❌ Failed to retrieve GET /version answer: {_reason(error)}"
                return
        found = _ETCD_VERSION.search(answer)
        if found is None:
            yield "⚠️ Could not retrieve etcd server version"
        else:
            yield f"{NOTE}Etcd server version: {found[1].decode(errors='replace')}"

    def _client(self, access: EtcdAccess) -> Iterator[str]:
        """Read a key as agents do, from the first address that answers."""
        import grpc

        from cells.kvstore.etcd import load_messages

        rpc = load_messages()
        reason = ""
        for url in access.endpoints:
            host = urlsplit(url).hostname or ""
            place = target(url)
            options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
            if address := self._services.address(host):
                place = f"{address}:{urlsplit(url).port}"
                options += [("grpc.ssl_target_name_override", host), ("grpc.default_authority", host)]
            credentials = tls_credentials(access) if access.tls else None
            with (
                grpc.secure_channel(place, credentials, options)
                if credentials is not None
                else grpc.insecure_channel(place, options)
            ) as channel:
                try:
                    answer = rpc.KVStub(channel).Range(rpc.RangeRequest(key=HEARTBEAT), timeout=self._left)
                except grpc.RpcError as error:
                    reason = _refusal(error)
                    continue
            yield "✅ Etcd connection successfully established"
            yield f"{NOTE}Etcd cluster ID: {answer.header.cluster_id:x}"
            return
        yield f"❌ Failed to retrieve key from etcd: {reason}"


def _refusal(error: Any) -> str:
    return f"{error.code().name}: {' '.join(error.details().split())}"


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _peer(connection: socket.socket) -> str:
    host, port = connection.getpeername()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return error.strerror or str(error)


# Certificates: what TLS uses, and what people look for in them.


def tls_context(access: EtcdAccess) -> ssl.SSLContext:
    """Return the TLS context that agents use. Raises OSError for unusable certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if access.ca:
        context.load_verify_locations(cadata=access.ca.decode(errors="replace"))
    else:
        context.load_default_certs()
    if access.certificate:
        with _as_file(access.certificate) as certificate, _as_file(access.key) as key:
            context.load_cert_chain(certificate, key)
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Return a path of bytes in memory, since the library reads certificates only from files."""
    held = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(held, content)
        yield f"/proc/self/fd/{held}"
    finally:
        os.close(held)


def certificates(access: EtcdAccess) -> Iterator[str]:
    """Yield the configured certificates with their issuers."""
    if access.ca:
        yield "✅ TLS Root CA certificates:"
        yield from _described(access.ca)
    else:
        yield "⚠️ Root CA unset: using system pool"
    if access.certificate:
        yield "✅ TLS client certificates:"
        yield from _described(access.certificate)
    else:
        yield "⚠️ No available TLS client certificates"


def _described(pem: bytes) -> Iterator[str]:
    found = [b64decode(one, validate=False) for one in _PEM.findall(pem)]
    if not found:
        yield "❌ No certificate found"
    for one in found:
        try:
            shown = read_certificate(one)
        except ValueError as error:
            yield f"❌ Failed to parse certificate: {error}"
            continue
        yield f"   - Serial number:       {shown.serial}"
        yield f"     Subject:             {shown.subject}"
        yield f"     Issuer:              {shown.issuer}"
        yield "     Validity:"
        yield f"       Not before:  {shown.not_before}"
        yield f"       Not after:   {shown.not_after}"


@dataclass(frozen=True)
class Certificate:
    """The printed fields of a certificate."""

    serial: str
    subject: str
    issuer: str
    not_before: datetime
    not_after: datetime


_ATTRIBUTES: Final = {
    b"\x55\x04\x03": "CN",
    b"\x55\x04\x05": "SERIALNUMBER",
    b"\x55\x04\x06": "C",
    b"\x55\x04\x07": "L",
    b"\x55\x04\x08": "ST",
    b"\x55\x04\x0a": "O",
    b"\x55\x04\x0b": "OU",
}
_VERSION, _INTEGER, _UTC_TIME = 0xA0, 0x02, 0x17


def read_certificate(der: bytes) -> Certificate:
    """Parse an X.509 certificate. Raises ValueError."""
    ((_, certificate),) = _elements(der)
    ((_, signed), *_) = _elements(certificate)
    fields = [one for one in _elements(signed) if one[0] != _VERSION]
    (kind, serial), _, (_, issuer), (_, validity), (_, subject) = fields[:5]
    if kind != _INTEGER:
        raise ValueError("expected a certificate of X.509")
    before, after = (_time(*one) for one in _elements(validity))
    digits = f"{int.from_bytes(serial, 'big'):x}"
    pairs = ":".join(digits[at : at + 2] for at in range(0, len(digits), 2))
    return Certificate(pairs, _name(subject), _name(issuer), before, after)


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    """Yield tag and content of each DER element. Raises ValueError."""
    found = []
    at = 0
    while at < len(data):
        if at + 2 > len(data):
            raise ValueError("it is cut off")
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(data[at : at + size], "big"), at + size
        if at + length > len(data):
            raise ValueError("it is cut off")
        found.append((tag, data[at : at + length]))
        at += length
    return found


def _name(data: bytes) -> str:
    """Format a name as ``CN=etcd,O=example``, the last part first (RFC 4514)."""
    parts = []
    for _, attributes in _elements(data):
        for _, attribute in _elements(attributes):
            (_, kind), (_, text) = _elements(attribute)
            parts.append(f"{_ATTRIBUTES.get(kind, kind.hex())}={text.decode(errors='replace')}")
    return ",".join(reversed(parts))


def _time(tag: int, text: bytes) -> datetime:
    """Parse a time; two-digit years from 50 on are in the 20th century (UTCTime)."""
    pattern = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    found = datetime.strptime(text.decode(errors="replace"), pattern).replace(tzinfo=UTC)
    return found.replace(year=found.year - 100) if tag == _UTC_TIME and found.year >= 2050 else found
