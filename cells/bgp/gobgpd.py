"""A gRPC client for gobgpd over its Unix socket.

Why:    it is a few hundred lines over h2, which the agent needs for Hubble; grpcio would use 20 MB of memory.
Source: the gRPC protocol over HTTP/2 (PROTOCOL-HTTP2.md), RFC 9113; gobgp 3.10.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import anyio
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from cells.bgp import gobgp_messages as api
from cells.hubble.codec import DecodeError, WireMessage, decode, encode
from cells.hubble.rpc.messages import MessageReader, RpcCode, RpcError, code_name, decode_message, framed
from lifecycle import HiveError

__all__ = ["Gobgp", "GobgpError", "GobgpUnreachableError", "connected"]

SERVICE: Final = "apipb.GobgpApi"
CALL_TIMEOUT: Final = 10.0
"""Timeout in seconds for a response, or for each message of a stream."""
LARGEST: Final = 16 << 20
"""Maximum size of a message in bytes; a set of all prefixes is one message."""
WINDOW: Final = 1 << 20
"""Flow control window in bytes."""
READ: Final = 64 << 10
PATHS: Final = 200
"""Paths per message; gobgpd applies a message at once."""

M = TypeVar("M", bound=WireMessage)


class GobgpError(HiveError):
    """A failed call; the message has the call, gRPC's status, gobgpd's text and its socket."""

    def __init__(self, place: Path, call: str, code: int, text: str) -> None:
        super().__init__(f"gobgpd at {place}: {call}: {code_name(code)}: {text}")
        self.call = call
        self.code = code
        self.text = text


class GobgpUnreachableError(GobgpError):
    """The connection to gobgpd's socket failed or was closed."""


class _GobgpCall:
    """The state of one call: headers, received messages, and whether the stream has ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reader = MessageReader(LARGEST)
        self.ended = False
        self._headers: dict[str, str] = {}

    def take(self, events: Iterable[h2.events.Event]) -> None:
        """Process the events of this stream; others belong to cancelled calls."""
        for event in events:
            if getattr(event, "stream_id", 0) != self.number:
                continue
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                self._headers |= {str(name): str(value) for name, value in event.headers or ()}
            elif isinstance(event, h2.events.DataReceived):
                self.reader.feed(event.data)
            elif isinstance(event, h2.events.StreamReset):
                self._headers.setdefault("grpc-status", str(int(RpcCode.INTERNAL)))
                self._headers.setdefault("grpc-message", f"the call was reset, code {event.error_code}")
                self.ended = True
            elif isinstance(event, h2.events.StreamEnded):
                self.ended = True

    def check(self) -> None:
        """Raise RpcError unless the status is OK."""
        status = self._headers.get("grpc-status", "")
        if not status.isdigit():
            http = self._headers.get(":status")
            raise RpcError(RpcCode.UNKNOWN, f"not an answer of gRPC, HTTP status {http}")
        if int(status):
            raise RpcError(int(status), decode_message(self._headers.get("grpc-message", "")))


class Gobgp:
    """A connection to gobgpd, for one call at a time; concurrent calls need separate connections.

    All methods raise GobgpError.
    """

    def __init__(self, place: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._socket = place
        self._reader = reader
        self._writer = writer
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
        self._h2.increment_flow_control_window(WINDOW)

    # The speaker

    @property
    def pid(self) -> int:
        """PID of the process that listens (SO_PEERCRED, unix(7)); 0 if it is in another PID namespace."""
        connection = self._writer.get_extra_info("socket")
        return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)

    async def start(self, speaker: api.Global) -> None:
        """Start BGP."""
        await self._call("StartBgp", api.StartBgp(all=speaker))

    async def stop(self) -> None:
        """Stop BGP: gobgpd sends Cease to peers, and removes all configuration and routes."""
        await self._call("StopBgp", api.EmptyMessage())

    async def speaker(self) -> api.Global | None:
        """Return the global configuration; None if BGP is not started."""
        found = await self._call("GetBgp", api.EmptyMessage(), api.StartBgp)
        return found.all if found.all is not None and found.all.asn else None

    # Peers

    async def peers(self, *, advertised: bool = False) -> list[api.ApiPeer]:
        """List all peers; ``advertised``: with counts of advertised routes, which are costly to compute."""
        listed = self._stream_of("ListPeer", api.ListPeer(enable_advertised=advertised), api.PeerMessage)
        return [one.peer async for one in listed if one.peer is not None]

    async def add_peer(self, peer: api.ApiPeer) -> None:
        """Add a peer."""
        await self._call("AddPeer", api.PeerMessage(peer=peer))

    async def update_peer(self, peer: api.ApiPeer) -> None:
        """Change a peer. Changes of other fields than timers end its session."""
        await self._call("UpdatePeer", api.PeerMessage(peer=peer))

    async def delete_peer(self, address: str) -> None:
        """Remove a peer; gobgpd sends Cease."""
        await self._call("DeletePeer", api.DeletePeer(address=address))

    async def shut_down(self, address: str) -> None:
        """End a session once pending updates are sent; gobgpd may establish it again."""
        await self._call("ShutdownPeer", api.DeletePeer(address=address))

    async def refresh_out(self, address: str) -> None:
        """Send all routes to a peer by the current policies: a soft reset of direction out."""
        reset = api.ResetPeer(address=address, soft=True, direction=api.SoftResetDirection.OUT)
        await self._call("ResetPeer", reset)

    async def events(self, *, routes: bool = False) -> AsyncGenerator[None]:
        """Yield on each change of a peer's state or, with ``routes``, of received routes; never ends.

        Events are not decoded, as peers could cause any amount of work.
        """
        request = api.WatchEventRequest(peer=api.EmptyMessage())
        if routes:
            request = api.WatchEventRequest(table=api.WatchTable(filters=[api.WatchFilter(type=api.ADJ_IN)]))
        async with aclosing(self._messages("WatchEvent", [request], endless=True)) as events:
            async for _ in events:
                yield

    # Routes

    async def routes(
        self, table: api.TableType, family: int, peer: str = "", *, binary: bool = False
    ) -> list[api.Destination]:
        """List the routes of a table; ``peer`` for an Adj-RIB. ``binary``: in wire format only."""
        request = api.ListPath(table_type=table, name=peer, family=_unicast(family), only_binary=binary)
        listed = self._stream_of("ListPath", request, api.ListedPath)
        return [one.destination async for one in listed if one.destination is not None]

    async def put_routes(self, paths: Iterable[api.ApiPath]) -> None:
        """Add, replace or withdraw routes."""
        remaining = list(paths)
        if not remaining:
            return
        parts = [remaining[at : at + PATHS] for at in range(0, len(remaining), PATHS)]
        await self._answer(
            "AddPathStream", [api.AddPathStream(paths=part) for part in parts], api.EmptyMessage
        )

    # Policies

    async def policies(self) -> list[api.ApiPolicy]:
        """List all policies."""
        listed = self._stream_of("ListPolicy", api.EmptyMessage(), api.PolicyMessage)
        return [one.policy async for one in listed if one.policy is not None]

    async def add_policy(self, policy: api.ApiPolicy) -> None:
        """Add a policy, with its statements."""
        await self._call("AddPolicy", api.PolicyMessage(policy=policy))

    async def delete_policy(self, name: str) -> None:
        """Remove an unassigned policy, with its statements."""
        await self._call("DeletePolicy", api.DeletePolicy(policy=api.ApiPolicy(name=name), all=True))

    async def sets(self, kind: api.DefinedType) -> list[api.DefinedSet]:
        """List all defined sets of a type."""
        request = api.ListDefinedSet(defined_type=kind)
        listed = self._stream_of("ListDefinedSet", request, api.DefinedSetMessage)
        return [one.defined_set async for one in listed if one.defined_set is not None]

    async def add_to_set(self, members: api.DefinedSet) -> None:
        """Add members to a defined set, creating it if necessary."""
        await self._call("AddDefinedSet", api.DefinedSetMessage(defined_set=members))

    async def remove_from_set(self, members: api.DefinedSet) -> None:
        """Remove members from a defined set."""
        await self._call("DeleteDefinedSet", api.DefinedSetMessage(defined_set=members))

    async def delete_set(self, kind: api.DefinedType, name: str) -> None:
        """Remove a defined set that no statement refers to."""
        unwanted = api.DefinedSet(defined_type=kind, name=name)
        await self._call("DeleteDefinedSet", api.DefinedSetMessage(defined_set=unwanted, all=True))

    async def assignment(self, direction: api.AssignmentDirection) -> api.PolicyAssignment | None:
        """Return the policies assigned to the global RIB."""
        request = api.ListAssignment(name=api.GLOBAL_RIB, direction=direction)
        listed = self._stream_of("ListPolicyAssignment", request, api.AssignmentMessage)
        found = [one.assignment async for one in listed if one.assignment is not None]
        return found[0] if found else None

    async def assign(self, direction: api.AssignmentDirection, names: Iterable[str]) -> None:
        """Replace the policies assigned to the global RIB atomically, with the default action reject."""
        assignment = api.PolicyAssignment(
            name=api.GLOBAL_RIB,
            direction=direction,
            policies=[api.ApiPolicy(name=name) for name in names],
            default_action=api.RouteAction.REJECT,
        )
        await self._call("SetPolicyAssignment", api.AssignmentMessage(assignment=assignment))

    # gRPC calls

    async def _call(self, call: str, request: WireMessage, answer: type[M] = api.EmptyMessage) -> M:  # type: ignore[assignment]
        return await self._answer(call, [request], answer)

    async def _answer(self, call: str, requests: Iterable[WireMessage], answer: type[M]) -> M:
        async with aclosing(self._messages(call, requests)) as messages:
            found = [message async for message in messages]
        if not found:
            raise GobgpError(self._socket, call, RpcCode.INTERNAL, "the answer has no message")
        return self._decoded(call, answer, found[0])

    async def _stream_of(self, call: str, request: WireMessage, answer: type[M]) -> AsyncGenerator[M]:
        async with aclosing(self._messages(call, [request])) as messages:
            async for message in messages:
                yield self._decoded(call, answer, message)

    def _decoded(self, call: str, answer: type[M], message: bytes) -> M:
        try:
            return decode(answer, message)
        except DecodeError as error:
            raise GobgpError(self._socket, call, RpcCode.INTERNAL, f"malformed answer: {error}") from error

    async def _messages(
        self, call: str, requests: Iterable[WireMessage], *, endless: bool = False
    ) -> AsyncGenerator[bytes]:
        """Yield encoded response messages as they arrive; ``endless``: without a timeout between them."""
        opened = _GobgpCall(self._h2.get_next_available_stream_id())
        try:
            await self._begin(call, opened, requests)
            while not opened.ended:
                opened.take(await self._events(call, endless=endless))
                while (message := opened.reader.take()) is not None:
                    yield message
            opened.check()
        except RpcError as error:
            raise GobgpError(self._socket, call, error.code, error.message) from error
        except h2.exceptions.ProtocolError as error:
            raise GobgpError(self._socket, call, RpcCode.INTERNAL, f"HTTP/2: {error}") from error
        finally:
            if not opened.ended:
                self._cancel(opened.number)

    def _cancel(self, number: int) -> None:
        """Cancel a call; the reset is sent with the next write."""
        try:
            self._h2.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
        except h2.exceptions.ProtocolError:
            return  # never opened, or closed by gobgpd

    async def _begin(self, call: str, opened: _GobgpCall, requests: Iterable[WireMessage]) -> None:
        self._h2.send_headers(
            opened.number,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", f"/{SERVICE}/{call}"),
                (":authority", "localhost"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "hive"),
            ],
        )
        rest = memoryview(framed(encode(request) for request in requests))
        while rest and not opened.ended:
            room = min(self._h2.local_flow_control_window(opened.number), self._h2.max_outbound_frame_size)
            part, rest = rest[:room], rest[room:]
            if part:
                self._h2.send_data(opened.number, bytes(part), end_stream=not rest)
            else:
                opened.take(await self._events(call))

    async def _events(self, call: str, *, endless: bool = False) -> list[h2.events.Event]:
        """Send pending data, then return the events of the next received data."""
        try:
            with anyio.fail_after(CALL_TIMEOUT):
                self._writer.write(self._h2.data_to_send())
                await self._writer.drain()
            with anyio.fail_after(None if endless else CALL_TIMEOUT):
                data = await self._reader.read(READ)
        except TimeoutError as error:
            raise RpcError(RpcCode.DEADLINE_EXCEEDED, f"no answer within {CALL_TIMEOUT:g} s") from error
        except OSError as error:
            raise self._unreachable(call, "the connection ended") from error
        if not data:
            raise self._unreachable(call, "the connection ended")
        events: list[h2.events.Event] = self._h2.receive_data(data)
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.ConnectionTerminated):
                raise self._unreachable(call, f"gobgpd closed the connection, code {event.error_code}")
        return events

    def _unreachable(self, call: str, text: str) -> GobgpUnreachableError:
        return GobgpUnreachableError(self._socket, call, RpcCode.UNAVAILABLE, text)


@asynccontextmanager
async def connected(place: Path) -> AsyncIterator[Gobgp]:
    """Connect to gobgpd for the duration of the block. Raises GobgpUnreachableError."""
    try:
        reader, writer = await asyncio.open_unix_connection(place)
    except OSError as error:
        text = error.strerror or str(error)
        raise GobgpUnreachableError(place, "connect", RpcCode.UNAVAILABLE, text) from error
    try:
        yield Gobgp(place, reader, writer)
    finally:
        writer.close()


def _unicast(afi: int) -> api.AddressFamily:
    return api.AddressFamily(afi=afi, safi=api.UNICAST)
