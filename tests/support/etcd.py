"""Runs Debian's etcd for one test, which can kill, freeze, empty and compact it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
from aetcd import rpc

from tests.support.ports import free_port
from tests.support.waiting import eventually


class Etcd:
    """One member on ports of its own; its data is below `directory`."""

    def __init__(self, directory: Path, tls: Mapping[str, Path] | None = None) -> None:
        """``tls``: paths of ``ca``, ``cert`` and ``key``; clients need certificates of the same authority."""
        self.directory = directory
        self.port, self._peer = free_port(), free_port()
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> None:
        """Start it, and wait until it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        peer = f"http://127.0.0.1:{self._peer}"
        arguments = {
            "name": "test",
            "data-dir": str(self.directory / "data"),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"test={peer}",
            "heartbeat-interval": "20",
            "election-timeout": "200",
        }
        if self._tls:
            arguments |= {
                "cert-file": str(self._tls["cert"]),
                "key-file": str(self._tls["key"]),
                "trusted-ca-file": str(self._tls["ca"]),
                "client-cert-auth": "true",
            }
        log = (self.directory / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                ["etcd", *(f"--{name}={value}" for name, value in arguments.items())],
                stdout=log,
                stderr=log,
            )
        if wait:
            eventually(self._answers)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """kill -9, and start it again with its data."""
        self.kill()
        self.start()

    def empty(self) -> None:
        """Delete the data, for the next start."""
        shutil.rmtree(self.directory / "data")

    def freeze(self) -> None:
        """SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    # Manual changes to it

    def all(self, prefix: str = "") -> dict[str, str]:
        """Return the keys of the prefix with their values."""
        begin = prefix.encode() or b"\0"
        end = begin[:-1] + bytes([begin[-1] + 1]) if prefix else b"\0"
        with self._channel() as channel:
            answer = rpc.KVStub(channel).Range(rpc.RangeRequest(key=begin, range_end=end), timeout=30)
        return {kv.key.decode(): kv.value.decode() for kv in answer.kvs}

    def lease_of(self, key: str) -> int:
        """Return the lease of a key, 0 without one."""
        with self._channel() as channel:
            answer = rpc.KVStub(channel).Range(rpc.RangeRequest(key=key.encode()), timeout=30)
        return int(answer.kvs[0].lease)

    def put(self, key: str, value: str) -> None:
        """Write a key; surrogates stand for bytes that are not UTF-8."""
        raw = key.encode(errors="surrogateescape")
        with self._channel() as channel:
            rpc.KVStub(channel).Put(rpc.PutRequest(key=raw, value=value.encode()), timeout=30)

    def delete(self, key: str) -> None:
        """Delete a key."""
        with self._channel() as channel:
            rpc.KVStub(channel).DeleteRange(rpc.DeleteRangeRequest(key=key.encode()), timeout=30)

    def revoke(self, lease: int) -> None:
        """Revoke a lease."""
        with self._channel() as channel:
            rpc.LeaseStub(channel).LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease), timeout=30)

    def compact(self) -> None:
        """Compact all history."""
        with self._channel() as channel:
            kv = rpc.KVStub(channel)
            revision = kv.Range(rpc.RangeRequest(key=b"\0"), timeout=30).header.revision
            kv.Compact(rpc.CompactionRequest(revision=revision, physical=True), timeout=30)

    def fill(self) -> None:
        """Raise its NOSPACE alarm: it answers reads, and refuses writes."""
        with self._channel() as channel:
            full = rpc.AlarmRequest(action=rpc.AlarmRequest.ACTIVATE, alarm=rpc.NOSPACE)
            rpc.MaintenanceStub(channel).Alarm(full, timeout=30)

    @contextmanager
    def _channel(self) -> Iterator[grpc.Channel]:
        assert self._tls is None
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            yield channel

    def _answers(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError((self.directory / "log").read_text()[-2000:])
        if self._tls:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        self.all("/nothing")
        return True


def installed() -> bool:
    """Return whether etcd is installed."""
    return shutil.which("etcd", path=os.defpath) is not None
