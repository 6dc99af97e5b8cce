"""Credentials of requests: headers and client certificates, renewed before they expire.

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


# The expiry of a certificate.
#
# Source: RFC 5280, section 4.1 (Certificate, Validity); X.690 (DER).

_BLOCK: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
"""DER tag of the optional version before the serial number."""
_UTC_TIME: Final = 0x17


def not_after(pem: bytes) -> datetime | None:
    """Return the end of the first certificate's validity; None if there is no readable certificate."""
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
    """Return the tag and content of the first DER element, and the rest."""
    length, begin = der[1], 2
    if length >= 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin], "big")
    return der[0], der[begin : begin + length], der[begin + length :]


_IN_HEADER_NAMES: Final = "!#$&'*+^`|"
"""Characters of header names besides letters, digits and -._~ (RFC 9110, 5.6.2), without "%"."""
TOKEN_AGE = 60.0
"""Seconds after which a token file is read again; the kubelet renews it long before it expires."""
PLUGIN_DEADLINE = 30.0
EARLY = 30.0
"""Seconds before its expiry after which a plugin's credential is renewed."""


class ExecStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The credential that a plugin returns."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: str = ""


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """The output of a plugin."""

    status: ExecStatus


_PLUGIN_OUTPUT: Final = msgspec.json.Decoder(ExecCredential)


class Credentials:
    """The client's identity: token, password, certificate, or the credential of a plugin."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._token = access.token
        self._read_at = -TOKEN_AGE
        self._issued: ExecStatus | None = None
        self._expires = 0.0
        self.version = 0
        """Increases with each changed token of the file, and with each run of the plugin."""
        self._fresh = anyio.Lock()

    async def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that authenticate a request. Raises CredentialsError."""
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
        """Whether new credentials can be read after a refusal: from a file or a plugin."""
        return self._access.token_file is not None or self._access.exec is not None

    def refused(self, version: int) -> None:
        """The server answered 401 to this version of the credentials: renew them, unless this was done."""
        if version == self.version:
            self._read_at, self._expires = -TOKEN_AGE, 0.0

    def expired(self) -> str:
        """Return a message if the client certificate has expired, else an empty text."""
        access, issued = self._access, self._issued
        pem, name = access.certificate_data, "the client certificate"
        if issued is not None and issued.client_certificate_data:
            pem = issued.client_certificate_data.encode()
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
            if self._token:  # the current token may still be valid
                return self._token
            why = error.strerror if isinstance(error, OSError) else "no text"
            raise CredentialsError(f"{path}: {why}; expected a token") from error
        self._read_at = time.monotonic()
        self.version += text != self._token
        return text or self._token

    async def _plugin(self, plugin: Exec) -> ExecStatus:
        async with self._fresh:
            if self._issued is None or time.time() >= self._expires:
                self._issued = await self._run_plugin(plugin)
                self._expires = _expiry(self._issued.expiration_timestamp)
                self.version += 1
            return self._issued

    async def _run_plugin(self, plugin: Exec) -> ExecStatus:
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
        if problem := _invalid(found):
            raise CredentialsError(f"exec {command}: {problem}")
        return found

    async def _cluster(self, plugin: Exec) -> dict[str, object]:
        """Return the cluster information for a plugin (v1, Cluster). Raises CredentialsError."""
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
        """Return a TLS context with the current certificates. Raises CredentialsError."""
        if self._access.exec is not None:
            await self._plugin(self._access.exec)
        return await to_thread.run_sync(self._context)

    def stamps(self) -> tuple[object, ...]:
        """Return a value that changes with the certificates: connections are then replaced."""
        files = (self._access.ca_file, self._access.certificate_file, self._access.key_file)
        found: list[object] = [_stamp(one) for one in files]
        issued = self._issued
        return (*found, issued.client_certificate_data if issued else "")

    def _context(self) -> ssl.SSLContext:
        access = self._access
        try:
            # The CAs of the host are loaded only without a configured CA.
            context = ssl.create_default_context(
                cafile=str(access.ca_file) if access.ca_file else None,
                cadata=access.ca_data.decode() if access.ca_data else None,
            )
            # Go clients accept a CA without key usage, so clusters have such CAs; Python 3.13 refuses them.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if access.insecure:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._load_certificate(context)
        except (OSError, ssl.SSLError, UnicodeDecodeError) as error:
            names = [str(one) for one in (access.ca_file, access.certificate_file, access.key_file) if one]
            raise CredentialsError(f"TLS: {', '.join(names) or 'kubeconfig data'}: {error}") from error
        return context

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        access, issued = self._access, self._issued
        certificate, key = access.certificate_data, access.key_data
        if issued is not None and issued.client_certificate_data:
            certificate, key = issued.client_certificate_data.encode(), issued.client_key_data.encode()
        if certificate is None and access.certificate_file is None:
            return
        load_certificate(context, certificate or access.certificate_file, key or access.key_file)


def _invalid(found: ExecStatus) -> str:
    """Return why a plugin's credential is invalid; it needs a token, a certificate with its key, or both."""
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
    """Load a client certificate and its key, as PEM or files; by default the certificate has its key.

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
        context.load_cert_chain(paths[0], paths[1], password=lambda: b"")  # no prompt


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
