"""Throwaway certificates, made by openssl."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

ALGORITHM = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:api.test"


class Authority:
    """A CA in a folder; one without `usage` lacks the purposes of its key, as those of old clusters."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", *, usage: bool = True) -> None:
        self._folder = folder
        self._usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"] if usage else []
        self._names = NAMES if host == "127.0.0.1" else f"{NAMES},IP:{host}"
        self._issue("ca", "/CN=stand-in-ca", signed=False)
        self.certificate = folder / "ca.crt"

    def issue(self, name: str, subject: str) -> tuple[Path, Path]:
        """A certificate and its key, such as for ``/O=dev/CN=alice``."""
        return self._issue(name, subject, signed=True)

    def serving(self) -> ssl.SSLContext:
        """For a server on the loopback address that accepts client certificates of this CA."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.certificate))
        context.load_cert_chain(*self.issue("server", "/CN=server"))
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _issue(self, name: str, subject: str, *, signed: bool) -> tuple[Path, Path]:
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        command = ["openssl", "req", "-x509", *ALGORITHM, "-keyout", str(key), "-out", str(certificate)]
        command += ["-subj", subject, "-addext", self._names]
        if signed:
            command += ["-CA", str(self._folder / "ca.crt"), "-CAkey", str(self._folder / "ca.key")]
            command += ["-addext", "basicConstraints=CA:FALSE"]
        else:
            command += self._usage
        subprocess.run(command, check=True, capture_output=True, timeout=20)
        return certificate, key
