"""Credentials for requests: headers and client certificates, refreshed in time.

Source: client-go/plugin/pkg/client/auth/exec; client.authentication.k8s.io/v1 ExecCredential.
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import quote

import anyio
import msgspec
from anyio import to_thread

from cells.kubernetes.client.access import Access, Exec
from cells.kubernetes.client.errors import CredentialsError
from cells.kubernetes.objects.kind import decode

__all__ = ["Credentials"]


# When a certificate expires.
#
# Source: RFC 5280, section 4.1 (Certificate, Validity); X.690 (DER).

_BLOCK: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
"""The tag of what may come before the serial number."""
_UTC_TIME: Final = 0x17


def not_after(pem: bytes) -> datetime | None:
    """The end of the first certificate's validity; None where there is none to be read."""
    found = _BLOCK.search(pem)
    if found is None:
        return None
    try:
        der = ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))
        _, whole, _ = _element(der)
        _, rest, _ = _element(whole)
        tag, _, after = _element(rest)
        rest = after if tag == _VERSION else rest
        for _ in range(3):  # serial number, algorithm, issuer
            _, _, rest = _element(rest)
        _, validity, _ = _element(rest)
        _, _, rest = _element(validity)
        tag, text, _ = _element(rest)
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC)
    except (ValueError, IndexError):
        return None


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """The tag and the content of the first element, and what comes after it."""
    length, begin = der[1], 2
    if length >= 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin], "big")
    return der[0], der[begin : begin + length], der[begin + length :]


_IN_HEADER_NAMES: Final = "!#$&'*+^`|"
"""What names of headers may have besides letters, digits and -._~ (RFC 9110, 5.6.2), less what escapes."""
TOKEN_AGE = 60.0
"""Seconds after which a token file is read again: the kubelet renews it long before it expires."""
PLUGIN_DEADLINE = 30.0
EARLY = 30.0
"""Seconds before its expiry that a plugin's answer counts as expired."""


class ExecStatus(msgspec.Struct, frozen=True, rename="camel"):
    """What a plugin gives."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: str = ""


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """What a plugin prints."""

    status: ExecStatus


_PLUGIN_OUTPUT: Final = msgspec.json.Decoder(ExecCredential)


class Credentials:
    """Who asks, by token, password, certificate or a plugin's answer."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._token = access.token
        self._read_at = -TOKEN_AGE
        self._given: ExecStatus | None = None
        self._expires = 0.0
        self.version = 0
        """Goes up with each other token of the file, and each answer of the plugin."""
        self._fresh = anyio.Lock()

    async def headers(self) -> list[tuple[bytes, bytes]]:
        """Of a request. Raises CredentialsError."""
        access = self._access
        found: list[tuple[bytes, bytes]] = []
        if token := await self._bearer():
            found.append((b"Authorization", b"Bearer " + token.encode()))
        elif access.username:
            pair = base64.b64encode(f"{access.username}:{access.password}".encode())
            found.append((b"Authorization", b"Basic " + pair))
        if access.impersonate_user:
            found.append((b"Impersonate-User", access.impersonate_user.encode()))
        if access.impersonate_uid:
            found.append((b"Impersonate-Uid", access.impersonate_uid.encode()))
        found += [(b"Impersonate-Group", one.encode()) for one in access.impersonate_groups]
        found += [
            (b"Impersonate-Extra-" + quote(key, safe=_IN_HEADER_NAMES).encode(), value.encode())
            for key, value in access.impersonate_extra
        ]
        return found

    @property
    def renewable(self) -> bool:
        """Whether others can be had after a refusal: of a file, or a plugin."""
        return self._access.token_file is not None or self._access.exec is not None

    def refused(self, version: int) -> None:
        """The server answered 401 to those of this version: they count as stale, if they are still held."""
        if version == self.version:
            self._read_at, self._expires = -TOKEN_AGE, 0.0

    def expired(self) -> str:
        """What is wrong with an expired client certificate; empty for any other."""
        access, given = self._access, self._given
        pem, name = access.certificate_data, "the client certificate"
        if given is not None and given.client_certificate_data:
            pem = given.client_certificate_data.encode()
        elif access.certificate_file is not None:
            name = f"the client certificate {access.certificate_file}"
            try:
                pem = access.certificate_file.read_bytes()
            except OSError:
                return ""  # reported where it is loaded
        end = not_after(pem) if pem else None
        return f"{name} expired {end:%Y-%m-%d %H:%M} UTC" if end and end <= datetime.now(UTC) else ""

    async def _bearer(self) -> str:
        if self._access.exec is not None:
            return (await self._plugin(self._access.exec)).token
        if self._access.token_file is None:
            return self._token
        if time.monotonic() - self._read_at >= TOKEN_AGE:
            self._token = await self._read_token(self._access.token_file)
        return self._token

    async def _read_token(self, path: Path) -> str:
        try:
            text = (await anyio.Path(path).read_text()).strip()
        except (OSError, UnicodeDecodeError) as error:
            if self._token:  # the one that is held may still do
                return self._token
            why = error.strerror if isinstance(error, OSError) else "no text"
            raise CredentialsError(f"{path}: {why}; expected a token") from error
        self._read_at = time.monotonic()
        self.version += text != self._token
        return text or self._token

    async def _plugin(self, plugin: Exec) -> ExecStatus:
        async with self._fresh:
            if self._given is None or time.time() >= self._expires:
                self._given = await self._asked(plugin)
                self._expires = _expiry(self._given.expiration_timestamp)
                self.version += 1
            return self._given

    async def _asked(self, plugin: Exec) -> ExecStatus:
        spec: dict[str, object] = {"interactive": False}
        if plugin.provide_cluster_info:
            spec["cluster"] = await self._cluster(plugin)
        info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
        env = {**os.environ, **dict(plugin.env), "KUBERNETES_EXEC_INFO": json.dumps(info)}
        command = plugin.program
        try:
            with anyio.fail_after(PLUGIN_DEADLINE):
                done = await anyio.run_process([command, *plugin.args], env=env, check=False)
        except TimeoutError as error:
            raise CredentialsError(f"exec {command}: no answer within {PLUGIN_DEADLINE:g} s") from error
        except OSError as error:
            raise CredentialsError(f"exec {command}: {error.strerror}") from error
        if done.returncode:
            output = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise CredentialsError(
                f"exec {command}: exit {done.returncode}: {output[-1] if output else 'no reason given'}"
            )
        try:
            found = decode(done.stdout, _PLUGIN_OUTPUT).status
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what = "no UTF-8" if isinstance(error, UnicodeDecodeError) else error
            raise CredentialsError(f"exec {command}: {what}; expected an ExecCredential") from error
        if wrong := _wrong(found):
            raise CredentialsError(f"exec {command}: {wrong}")
        return found

    async def _cluster(self, plugin: Exec) -> dict[str, object]:
        """What a plugin learns of the cluster (v1, Cluster). Raises CredentialsError."""
        access, authority = self._access, self._access.ca_data
        if authority is None and access.ca_file is not None:
            try:
                authority = await anyio.Path(access.ca_file).read_bytes()
            except OSError as error:
                raise CredentialsError(f"{access.ca_file}: {error.strerror}") from error
        found: dict[str, object] = {
            "server": access.servers[0],
            "tls-server-name": access.tls_server_name,
            "insecure-skip-tls-verify": access.insecure,
            "certificate-authority-data": base64.b64encode(authority or b"").decode(),
            "proxy-url": access.proxy_url,
            "config": plugin.cluster_config,
        }
        return {key: value for key, value in found.items() if value}

    # ---- TLS

    async def context(self) -> ssl.SSLContext:
        """For connections, with the certificates as they are now. Raises CredentialsError."""
        if self._access.exec is not None:
            await self._plugin(self._access.exec)
        return await to_thread.run_sync(self._context)

    def stamps(self) -> tuple[object, ...]:
        """Changes when a certificate does: connections are then replaced."""
        files = (self._access.ca_file, self._access.certificate_file, self._access.key_file)
        found: list[object] = [_stamp(one) for one in files]
        given = self._given
        return (*found, given.client_certificate_data if given else "")

    def _context(self) -> ssl.SSLContext:
        access = self._access
        try:
            # Those of the host are loaded only where no authority is given.
            context = ssl.create_default_context(
                cafile=str(access.ca_file) if access.ca_file else None,
                cadata=access.ca_data.decode() if access.ca_data else None,
            )
            # Authorities of clusters are what Go's clients take: Python 3.13 refuses those without key usage.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if access.insecure:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._load_certificate(context)
        except (OSError, ssl.SSLError, UnicodeDecodeError) as error:
            names = [str(one) for one in (access.ca_file, access.certificate_file, access.key_file) if one]
            raise CredentialsError(f"TLS: {', '.join(names) or 'kubeconfig data'}: {error}") from error
        return context

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        access, given = self._access, self._given
        certificate, key = access.certificate_data, access.key_data
        if given is not None and given.client_certificate_data:
            certificate, key = given.client_certificate_data.encode(), given.client_key_data.encode()
        if certificate is None and access.certificate_file is None:
            return
        load_certificate(context, certificate or access.certificate_file, key or access.key_file)


def _wrong(found: ExecStatus) -> str:
    """What is wrong with a plugin's answer: it has to have a token, a certificate with its key, or both."""
    certificate, key = found.client_certificate_data, found.client_key_data
    if not found.token and not certificate:
        return "neither a token nor a client certificate in its ExecCredential"
    if any(letter in found.token for letter in "\r\n\0"):
        return "the token has a line break"
    if found.expiration_timestamp and not _expiry(found.expiration_timestamp):
        return (
            f"expirationTimestamp {found.expiration_timestamp}: expected a time such as 2026-01-31T12:00:00Z"
        )
    if certificate or key:
        try:
            load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate.encode(), key.encode())
        except (OSError, ValueError):
            return "clientCertificateData and clientKeyData: expected a certificate and its key, in PEM"
    return ""


def load_certificate(
    context: ssl.SSLContext, certificate: bytes | Path | None, key: bytes | Path | None
) -> None:
    """Take a client certificate and its key, as PEM or files; without a key it is in the certificate's file.

    Raises ssl.SSLError, OSError.
    """
    with TemporaryDirectory() as folder:  # ssl loads from files only
        paths = []
        for name, given in (("certificate", certificate), ("key", key or certificate)):
            path = given
            if isinstance(given, bytes):
                path = Path(folder, name)
                path.touch(mode=0o600)
                path.write_bytes(given)
            paths.append(str(path))
        context.load_cert_chain(paths[0], paths[1], password=lambda: b"")  # an agent cannot ask for it


def _stamp(path: Path | None) -> object:
    try:
        return path.stat().st_mtime_ns if path else None
    except OSError:
        return None


def _expiry(text: str) -> float:
    if not text:
        return float("inf")
    try:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp() - EARLY
    except ValueError:
        return 0.0
