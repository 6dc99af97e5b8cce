"""Serves Hubble's API on its unix socket and, with mutual TLS, on a TCP port.

The methods are those of ``services``, the protocol is that of ``grpc``.

Source: Cilium 1.17, hubble-socket-path, hubble-listen-address and hubble-tls-*.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream, TaskGroup

from cells.cluster.nodes.node import ClusterNode
from cells.config.drift import file_changes
from cells.hubble.hubble import Hubble
from cells.observe import metrics
from cells.observe.metrics import ListenAddress
from lifecycle import Health, Jobs, Lifecycle, Logger, ReadTable, Settings
from lifecycle.http import fair_queue_of
from lifecycle.process import Acceptor, listen

if TYPE_CHECKING:  # imported only if Hubble is enabled
    import ssl

    from cells.hubble.rpc.grpc import CallCounts, GrpcServer

HANDSHAKES = 64
"""Maximum number of concurrent TLS handshakes; further connections are closed."""
HANDSHAKE_SECONDS = 10.0
_LOG_INTERVAL = 60.0
"""Minimum interval of log lines about failed TLS handshakes, in seconds."""


class HubbleServerSettings(Settings, frozen=True):
    """Where Hubble's API is served, and to which clients."""

    hubble_socket_path: Path = Path("/var/run/cilium/hubble.sock")
    """Unix socket for clients on this node."""

    hubble_listen_address: str = ""
    """TCP address for relays and clients elsewhere, such as :4244; empty: not served there."""

    hubble_prefer_ipv6: bool = False
    """Announce IPv6 addresses of nodes to relays."""

    hubble_disable_tls: bool = False
    """Serve the TCP address without TLS: every host that reaches it reads all flows."""

    hubble_tls_cert_file: str = ""
    """File with the server's certificate (PEM); read again when it changes."""

    hubble_tls_key_file: str = ""
    """File with the private key of that certificate."""

    hubble_tls_client_ca_files: tuple[str, ...] = ()
    """Files with CA certificates that clients' certificates must be of; empty: clients need none."""

    def validate(self) -> None:
        """Refuse invalid addresses, and TLS without files. Raises ValueError with one line."""
        if not self.hubble_listen_address:
            return
        try:
            ListenAddress.parse(self.hubble_listen_address)
        except ValueError as error:
            raise ValueError(f"hubble-listen-address={self.hubble_listen_address}: {error}") from None
        if not self.hubble_disable_tls and not (self.hubble_tls_cert_file and self.hubble_tls_key_file):
            raise ValueError(
                "hubble-listen-address without hubble-tls-cert-file and hubble-tls-key-file: set both, or"
                " hubble-disable-tls to serve flows without TLS"
            )

    @property
    def address(self) -> ListenAddress | None:
        """The TCP address; None if the API is not served on TCP."""
        return ListenAddress.parse(self.hubble_listen_address) if self.hubble_listen_address else None


class ServerCertificates:
    """A server's certificate and the CAs of its clients; reloads the files when they change."""

    def __init__(self, certificate: str, key: str, client_cas: Sequence[str], protocol: str) -> None:
        self._protocol = protocol
        self._files = (certificate, key, *client_cas)
        self._stamps: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._fault = ""

    @property
    def usable(self) -> bool:
        """Whether handshakes are possible, possibly with earlier contents of the files."""
        return self._context is not None

    def context(self) -> ssl.SSLContext:
        """Return a TLS 1.3 context with this ALPN protocol.

        Raises OSError (also ssl.SSLError) if the files are unusable. If usable files become unusable, their
        previous contents remain in use.
        """
        stamps = tuple(_stamp(path) for path in self._files)
        if stamps != self._stamps or self._context is None:
            try:
                self._context = self._load()
                self._fault = ""
            except OSError as error:
                self._fault = f"{error.filename or ', '.join(self._files)}: {error.strerror or error}"
                if self._context is None:
                    raise
            self._stamps = stamps
        return self._context

    def load_error(self) -> str:
        """Why the current files are unusable; empty if they are usable."""
        with suppress(OSError):  # context() has set the fault
            self.context()
        return self._fault

    async def follow(self, report: Callable[[], None]) -> None:
        """Call ``report`` at start and after each change in a directory of the files."""

        async def at_changes(path: Path) -> None:
            async for _ in file_changes(path):
                report()

        async with anyio.create_task_group() as tasks:
            for path in {path.parent: path for path in map(Path, self._files)}.values():
                tasks.start_soon(at_changes, path)

    def _load(self) -> ssl.SSLContext:
        import ssl

        for path in self._files:
            Path(path).read_bytes()  # raises an error with the path; those of OpenSSL lack it
        certificate, key, *client_cas = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([self._protocol])
        context.load_cert_chain(certificate, key)
        for path in client_cas:
            context.load_verify_locations(path)
        if client_cas:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _stamp(path: str) -> object:
    try:
        status = os.stat(path)  # noqa: PTH116  # it follows the links of a mounted Secret
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class HubbleServer:
    """Serves Hubble's API while its hook runs, if enable-hubble is true."""

    def __init__(
        self,
        hubble: Hubble,
        settings: HubbleServerSettings,
        *,
        nodes: ReadTable[str, ClusterNode],
        jobs: Jobs,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._nodes = nodes
        self._health = health
        self._log = log
        self._servers: list[GrpcServer] = []
        self._certificates = ServerCertificates(
            settings.hubble_tls_cert_file,
            settings.hubble_tls_key_file,
            settings.hubble_tls_client_ca_files,
            "h2",
        )
        self._handshakes = 0
        self._quiet_until = -math.inf
        if hubble.observer is not None:
            self._flows = hubble.observer
            lifecycle.enter("serve Hubble", self._serving)
            if self._secure:
                jobs.one_shot("follow certificates", self._follow_certificates)

    @property
    def counts(self) -> Sequence[CallCounts]:
        """Call counters of the servers on the unix socket and on the TCP port."""
        return [server.counts for server in self._servers]

    @property
    def ready(self) -> bool:
        """Whether all listeners can serve clients."""
        return bool(self._servers) and (self._certificates.usable or not self._secure)

    @property
    def _secure(self) -> bool:
        return self._settings.address is not None and not self._settings.hubble_disable_tls

    async def _follow_certificates(self) -> None:
        await self._certificates.follow(self._report)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        from cells.hubble.rpc.grpc import GrpcServer
        from cells.hubble.rpc.services import PeerSettings, hubble_methods

        settings = self._settings
        address = settings.address
        peers = PeerSettings(
            port=address.port if address else 0,
            prefer_ipv6=settings.hubble_prefer_ipv6,
            tls=not settings.hubble_disable_tls,
        )
        methods = hubble_methods(self._flows, self._nodes, peers)
        servers = [GrpcServer(methods, log=self._log) for _ in range(2)]
        with ExitStack() as opened:
            local = opened.enter_context(listen(settings.hubble_socket_path, group="cilium"))
            opened.callback(settings.hubble_socket_path.unlink, missing_ok=True)
            port = None
            if address is not None:
                port = opened.enter_context(metrics.listen("hubble-listen-address", address))
            async with anyio.create_task_group() as tasks:
                self._serve(local, servers[0], tasks, tls=False)
                if port is not None:
                    self._serve(port, servers[1], tasks, tls=not settings.hubble_disable_tls)
                self._report()
                yield
                self._servers.clear()
                tasks.cancel_scope.cancel()

    def _serve(self, listener: socket.socket, server: GrpcServer, tasks: TaskGroup, *, tls: bool) -> None:
        def accepted(connected: socket.socket, peer: Hashable) -> None:
            tasks.start_soon(self._client, server, connected, peer, tls)

        acceptor = Acceptor(listener, accepted, self._log, self._health)
        tasks.start_soon(_until_stopped, acceptor)
        self._servers.append(server)
        self._log.info("serving Hubble", address=_text(listener), tls=tls)

    async def _client(self, server: GrpcServer, connected: socket.socket, peer: Hashable, tls: bool) -> None:
        """Serve one client until it disconnects. Errors end only its connection."""
        from cells.hubble.rpc.messages import ClientStream

        try:
            if connected.family != socket.AF_UNIX:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream: ByteStream = await ClientStream.of(connected)
        except OSError:
            connected.close()
            return
        async with stream:
            if tls:
                secured = await self._handshake(stream, peer)
                if secured is None:
                    return
                stream = secured
            await server.serve(stream, peer)

    async def _handshake(self, stream: ByteStream, peer: Hashable) -> ByteStream | None:
        """Return the stream after the TLS handshake; None if it fails.

        Handshakes take turns on the event loop, as requests do.
        """
        from anyio.streams.tls import TLSAttribute, TLSStream

        if self._handshakes >= HANDSHAKES:
            return None
        self._handshakes += 1
        try:
            await fair_queue_of(asyncio.get_running_loop()).wait(peer)
            with anyio.fail_after(HANDSHAKE_SECONDS):
                context = self._certificates.context()
                self._report()
                secured = await TLSStream.wrap(
                    stream, server_side=True, ssl_context=context, standard_compatible=False
                )
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            self._warn(peer, error)
            return None
        finally:
            self._handshakes -= 1
        protocol = secured.extra(TLSAttribute.alpn_protocol)  # noqa: S610
        return secured if protocol == "h2" else None

    def _tls_fault(self) -> str:
        """Describe the fault of the TLS files and its effect; empty if they are usable."""
        wrong = self._certificates.load_error() if self._secure else ""
        if not wrong:
            return ""
        served = (
            "the last good ones are"
            if self._certificates.usable
            else f"{self._settings.address} is not served"
        )
        return f"hubble-tls files cannot be used: {wrong}; {served}"

    def _report(self) -> None:
        if fault := self._tls_fault():
            self._health.degraded(fault)
        else:
            self._health.ok("serving")

    def _warn(self, peer: Hashable, error: Exception) -> None:
        now = anyio.current_time()
        if now < self._quiet_until:
            return
        self._quiet_until = now + _LOG_INTERVAL
        self._report()
        self._log.warning(
            "TLS handshake with a Hubble client failed",
            client=str(peer),
            error=self._tls_fault() or str(error),
        )


async def _until_stopped(acceptor: Acceptor) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        acceptor.close()


def _text(listener: socket.socket) -> str:
    name = listener.getsockname()
    return str(ListenAddress(*name[:2])) if isinstance(name, tuple) else str(name)
