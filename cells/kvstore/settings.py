"""Settings of the kvstore, and the etcd configuration file.

Source: Cilium 1.17, kvstore, kvstore-opt and the options of its etcd client; etcd's clientv3/yaml, the fields
       that Cilium documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from lifecycle import Duration, Settings, UsageError, minutes, seconds

__all__ = ["KVStoreSettings", "StoreConfigError", "StoreOptions"]


SHORTEST_LEASE: Final = seconds(25)
LONGEST_LEASE: Final = Duration(24 * 3600)


class StoreOptions(msgspec.Struct, frozen=True):
    """The parsed ``kvstore-opt``."""

    addresses: tuple[str, ...] = ()
    """``etcd.address``: endpoints, separated by commas."""
    config: str = ""
    """``etcd.config``: path of an etcd client configuration, YAML."""
    qps: float = 20.0
    """``etcd.qps``: requests per second after the initial lists."""
    bootstrap_qps: float = 10000.0
    """``etcd.bootstrapQps``: requests per second until then."""
    max_inflight: int = 20
    """``etcd.maxInflight``: maximum number of concurrent requests."""
    limit: int = 256
    """``etcd.limit``: page size of lists, in keys."""
    keepalive_heartbeat: Duration = seconds(15)
    """``etcd.keepaliveHeartbeat``: idle time after which the connection is pinged."""
    keepalive_timeout: Duration = seconds(25)
    """``etcd.keepaliveTimeout``: deadline of the answer to a ping."""


def _positive_int(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError("expected a whole number above 0")
    return int(text)


def _path(text: str) -> str:
    if not PurePosixPath(text).is_absolute():
        raise ValueError("expected an absolute path")
    return text


def _addresses(text: str) -> tuple[str, ...]:
    found = tuple(each.strip() for each in text.split(",") if each.strip())
    if not found:
        raise ValueError("expected an address, as in http://127.0.0.1:2379")
    return found


def _duration(text: str) -> Duration:
    found = Duration.parse(text)
    if found <= 0:
        raise ValueError("expected a time above 0, as in 15s")
    return found


OPTIONS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "etcd.address": ("addresses", _addresses),
    "etcd.config": ("config", _path),
    "etcd.qps": ("qps", _positive_int),
    "etcd.bootstrapQps": ("bootstrap_qps", _positive_int),
    "etcd.maxInflight": ("max_inflight", _positive_int),
    "etcd.limit": ("limit", _positive_int),
    "etcd.keepaliveHeartbeat": ("keepalive_heartbeat", _duration),
    "etcd.keepaliveTimeout": ("keepalive_timeout", _duration),
}


class KVStoreSettings(Settings, frozen=True):
    """The key-value store in which nodes share identities, nodes and pod addresses."""

    kvstore: str = ""
    """The store: etcd, or empty for none."""

    kvstore_opt: Mapping[str, str] = {}
    """How to reach it: etcd.address or etcd.config (a YAML file: endpoints, trusted-ca-file, cert-file,
    key-file); further etcd.qps, etcd.bootstrapQps, etcd.maxInflight, etcd.limit, etcd.keepaliveHeartbeat and
    etcd.keepaliveTimeout."""

    kvstore_lease_ttl: Duration = minutes(15)
    """TTL of this node's lease: how long its keys outlive its agent, from 25s to 24h."""

    kvstore_periodic_sync: Annotated[Duration, Meta(gt=0)] = minutes(5)
    """How often this node's keys are compared with the store."""

    kvstore_connectivity_timeout: Annotated[Duration, Meta(gt=0)] = minutes(2)
    """How long allocating an identity may take before it is retried."""

    kvstore_max_consecutive_quorum_errors: Annotated[int, Meta(ge=1)] = 2
    """How many checks of the store may fail in a row before the agent's status is a failure."""

    @property
    def enabled(self) -> bool:
        """Whether a kvstore is configured."""
        return bool(self.kvstore)

    @property
    def options(self) -> StoreOptions:
        """The parsed ``kvstore-opt``."""
        values = {OPTIONS[key][0]: OPTIONS[key][1](text) for key, text in self.kvstore_opt.items()}
        return StoreOptions(**values)

    def faults(self) -> Iterator[str]:
        if self.kvstore not in {"", "etcd"}:
            yield f"kvstore={self.kvstore}: expected etcd, or leave it unset"
        for key, text in self.kvstore_opt.items():
            if key not in OPTIONS:
                yield f"kvstore-opt: {key}: expected one of {', '.join(OPTIONS)}"
                continue
            try:
                OPTIONS[key][1](text)
            except ValueError as error:
                yield f"kvstore-opt: {key}={text}: {error}"
        if self.kvstore == "etcd" and not {"etcd.address", "etcd.config"} & set(self.kvstore_opt):
            yield "kvstore=etcd: expected its endpoints in kvstore-opt: etcd.address=URL or etcd.config=FILE"
        if not SHORTEST_LEASE <= self.kvstore_lease_ttl <= LONGEST_LEASE:
            yield f"kvstore-lease-ttl={self.kvstore_lease_ttl}: expected from 25s to 24h"


# Endpoints and certificates.

PORT: Final = 2379


class StoreConfigError(UsageError):
    """Raised when the etcd configuration is invalid or cannot be read; names the file."""


class EtcdAccess(msgspec.Struct, frozen=True):
    """Endpoints as URLs, and TLS material as PEM; empty fields are not used."""

    endpoints: tuple[str, ...]
    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = b""

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted: the URLs have the scheme https."""
        return self.endpoints[0].startswith("https:")


class _EtcdFile(msgspec.Struct, rename="kebab", forbid_unknown_fields=False):
    endpoints: list[str] = []
    trusted_ca_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    insecure_skip_tls_verify: bool = False
    username: str = ""


def read_access(options: StoreOptions) -> EtcdAccess:
    """Read the configuration file and its certificates. Raises StoreConfigError.

    They are read again for every new connection: certificates are rotated.
    """
    if not options.config:
        return EtcdAccess(_urls(options.addresses, "kvstore-opt etcd.address"))
    path = Path(options.config)
    try:
        file = msgspec.yaml.decode(path.read_bytes() or b"{}", type=_EtcdFile)
    except OSError as error:
        raise StoreConfigError(f"etcd.config={path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise StoreConfigError(f"etcd.config={path}: {' '.join(str(error).split())}") from error
    if file.insecure_skip_tls_verify:
        raise StoreConfigError(
            f"etcd.config={path}: insecure-skip-tls-verify is not supported: give trusted-ca-file"
        )
    if file.username:
        raise StoreConfigError(
            f"etcd.config={path}: username and password are not supported: give cert-file and key-file"
        )
    if bool(file.cert_file) != bool(file.key_file):
        raise StoreConfigError(f"etcd.config={path}: cert-file and key-file belong together")
    return EtcdAccess(
        _urls(options.addresses or tuple(file.endpoints), f"etcd.config={path}: endpoints"),
        _pem(file.trusted_ca_file or file.ca_file, path),
        _pem(file.cert_file, path),
        _pem(file.key_file, path),
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
    """Return the URL as a gRPC target, without its scheme."""
    return url.partition("://")[2]


def tls_credentials(access: EtcdAccess) -> Any:
    """Return the credentials for a gRPC channel."""
    import grpc

    return grpc.ssl_channel_credentials(access.ca or None, access.key or None, access.certificate or None)
