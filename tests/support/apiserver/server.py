"""A fake Kubernetes API server 1.36, held to recordings of a real one."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from tests.support.apiserver import auth
from tests.support.apiserver.auth import Authorizer, User, Users
from tests.support.apiserver.connection import Connection
from tests.support.apiserver.crds import Definitions
from tests.support.apiserver.discovery import Discovery
from tests.support.apiserver.errors import Obj, internal
from tests.support.apiserver.exec import Command, Conversation, Executor
from tests.support.apiserver.faults import Faults
from tests.support.apiserver.handlers import Handlers
from tests.support.apiserver.kinds import Call, Kind, Registry, now
from tests.support.apiserver.others import STRATEGIES
from tests.support.apiserver.reads import Reads
from tests.support.apiserver.services import Ranges
from tests.support.apiserver.store import Store
from tests.support.apiserver.valid import Admission
from tests.support.apiserver.watches import Watches
from tests.support.apiserver.wire import encode
from tests.support.apiserver.writes import Writes

ADMIN_TOKEN = "admin-token"
DEFAULT_NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")


class Limits:
    """How large objects may be."""

    def __init__(self) -> None:
        self.store = 1536 * 1024
        self.transport = 2 * 1024 * 1024

    def check_size(self, obj: Obj) -> None:
        """Raises StatusError 500 for an object the store does not take."""
        size = len(encode(obj))
        if size > self.transport:
            raise internal(
                "rpc error: code = ResourceExhausted desc = trying to send message larger than max"
                f" ({size} vs. {self.transport})"
            )
        if size > self.store:
            raise internal("etcdserver: request is too large")


class ApiServer:
    """One API server with its store.

    ``async with server.serving() as url`` serves it on a port of the loopback address. Between two of those
    the store stays: that is a restart, after :meth:`restart`.
    """

    def __init__(
        self,
        tokens: Mapping[str, User] | None = None,
        *,
        dual_stack: bool = True,
        bookmark_every: float = 60.0,
    ) -> None:
        self.bookmark_every = bookmark_every
        self.future_wait = 3.0
        """Seconds a read waits for a version that is yet to come."""
        self.crd_delay = 0.02
        """Seconds each step of a definition's life takes."""
        self.store = Store()
        self.kinds = Registry(STRATEGIES)
        self.limits = Limits()
        self.faults = Faults()
        admin = User("kubernetes-admin", ("system:masters",))
        self.users = Users({ADMIN_TOKEN: admin} if tokens is None else tokens)
        self.authorizer = Authorizer(self.store)
        self.ranges = Ranges(dual_stack=dual_stack)
        self.admission = Admission(self)
        self.reads = Reads(self)
        self.writes = Writes(self)
        self.watches = Watches(self)
        self.discovery = Discovery(self)
        self.definitions = Definitions(self)
        self.handlers = Handlers(self)
        self.requests: list[tuple[str, str]] = []
        """The method and the target of every request that came."""
        self.executor: Executor | None = None
        """What runs commands of ``pods/exec``; without one there is no such thing."""
        self.conversation: Conversation | None = None
        """What runs those that have input."""
        self.logs: Callable[[Command], bytes] | None = None
        """What containers printed, of ``pods/log``."""
        self.port = 0
        self._connections: dict[asyncio.Task[None], None] = {}
        """In their order, so that they end in the same order in each run."""
        self._bootstrap()

    # ---- life

    @asynccontextmanager
    async def serving(
        self, *, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[str]:
        """Serve until the block ends; the address to ask."""
        over = False

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if over:  # accepted in the moment before the end
                writer.transport.abort()
                return
            task = asyncio.get_running_loop().create_task(Connection(self, reader, writer).run())
            self._connections[task] = None

            def ended(task: asyncio.Task[None]) -> None:
                self._connections.pop(task, None)
                if task.cancelled():  # before its first step
                    writer.transport.abort()

            task.add_done_callback(ended)

        server = await asyncio.start_server(accept, host, port, ssl=tls, limit=2 * 1024 * 1024 + 8192)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield f"{'https' if tls else 'http'}://{host}:{self.port}"
        finally:
            over = True
            server.close()
            await self.hang_up()
            await server.wait_closed()
            await self.definitions.stop()

    async def hang_up(self) -> None:
        """Break every connection there is."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def restart(self) -> None:
        """Forget what a restarted server does not know: snapshots, old events, the storages of custom resources."""
        self.store.bump()
        self.store.forget()
        self.definitions.restarted()

    # ---- objects

    def converted(self, obj: Obj, kind: Kind) -> Obj:
        """A stored object as this kind's version has it."""
        if obj.get("apiVersion") == kind.api_version:
            return obj
        return {**obj, "apiVersion": kind.api_version, "kind": kind.kind}

    def add(self, obj: Obj) -> Obj:
        """Store an object as an administrator would create it; it as stored. For tests. Raises StatusError."""

        group, _, version = obj["apiVersion"].rpartition("/")
        kind = next(one for one in self.kinds.of(group, version) if one.kind == obj["kind"])
        metadata = obj["metadata"]
        namespace = metadata.get("namespace", "default") if kind.namespaced else ""
        return self.writes.create(Call(kind, namespace, ""), obj)

    def live(self, call: Call) -> Obj | None:
        """The object of a call in the version it asks for; None: there is none."""
        key = (call.namespace if call.kind.namespaced else "", call.name)
        found = self.store.get(call.kind.storage, key)
        return None if found is None else self.converted(found, call.kind)

    def _bootstrap(self) -> None:
        for name in DEFAULT_NAMESPACES:
            self.add({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name}})
        auth.bootstrap(self.store, now())
        self.ranges.bootstrap(self)
