"""Where etcd is and how it is spoken to: addresses, certificates.

For:    EtcdClient. Needs: StoreOptions. Gives: EtcdAccess, read_access(), StoreConfigError.
Source: etcd's client configuration (clientv3/yaml), as far as Cilium's documentation uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from cells.cluster.kvstore.settings import StoreOptions
from lifecycle import UsageError

PORT: Final = 2379


class StoreConfigError(UsageError):
    """Raised when how to reach the store cannot be read: what is wrong, and in which file."""


class EtcdAccess(msgspec.Struct, frozen=True):
    """Addresses as URLs, and what TLS needs; PEM, empty where it is not used."""

    endpoints: tuple[str, ...]
    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = b""

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted: the URLs say so."""
        return self.endpoints[0].startswith("https:")


class _File(msgspec.Struct, rename="kebab", forbid_unknown_fields=False):
    endpoints: list[str] = []
    trusted_ca_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    insecure_skip_tls_verify: bool = False


def read_access(options: StoreOptions) -> EtcdAccess:
    """Read the configuration and its certificates, which may have changed since. Raises StoreConfigError."""
    if not options.config:
        return EtcdAccess(_urls(options.addresses, "kvstore-opt etcd.address"))
    path = Path(options.config)
    try:
        told = msgspec.yaml.decode(path.read_bytes() or b"{}", type=_File)
    except OSError as error:
        raise StoreConfigError(f"etcd.config={path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise StoreConfigError(f"etcd.config={path}: {' '.join(str(error).split())}") from error
    if told.insecure_skip_tls_verify:
        raise StoreConfigError(
            f"etcd.config={path}: insecure-skip-tls-verify is not supported: give trusted-ca-file"
        )
    if bool(told.cert_file) != bool(told.key_file):
        raise StoreConfigError(f"etcd.config={path}: cert-file and key-file belong together")
    return EtcdAccess(
        _urls(options.addresses or tuple(told.endpoints), f"etcd.config={path}: endpoints"),
        _pem(told.trusted_ca_file or told.ca_file, path),
        _pem(told.cert_file, path),
        _pem(told.key_file, path),
    )


def _pem(name: str, path: Path) -> bytes:
    if not name:
        return b""
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise StoreConfigError(f"etcd.config={path}: {name}: {error.strerror}") from error


def _urls(texts: tuple[str, ...], what: str) -> tuple[str, ...]:
    if not texts:
        raise StoreConfigError(f"{what}: expected at least one address, as in http://127.0.0.1:2379")
    found = tuple(_url(text, what) for text in texts)
    if len({url.partition(":")[0] for url in found}) > 1:
        raise StoreConfigError(f"{what}: expected all with https, or all with http")
    return found


def _url(text: str, what: str) -> str:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname, parts.port or PORT
    except ValueError:
        host, port = None, PORT
    if parts.scheme not in {"http", "https"} or not host:
        raise StoreConfigError(f"{what}: {text}: expected a URL, as in http://127.0.0.1:2379")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def target(url: str) -> str:
    """The URL as gRPC takes it."""
    return url.partition("://")[2]


def tls_credentials(access: EtcdAccess) -> Any:
    """gRPC's credentials."""
    import grpc

    return grpc.ssl_channel_credentials(access.ca or None, access.key or None, access.certificate or None)
