"""DNS names of all endpoints: restored after restarts, expired after their TTL.

Answers come in; NamedAddresses, the journal and the endpoints' saved state are updated.

Source: Cilium 1.17, DNS history of endpoints, dns-garbage-collector-job.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from functools import lru_cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Protocol

import msgspec
from anyio import to_thread
from anyio.lowlevel import checkpoint

from cells.base.addresses import IPAddress
from cells.endpoint import Endpoint, SavedNames, StateFiles
from cells.endpoint.restore import ExposedEndpoints
from cells.policy.control import NamedAddresses, NameFilter
from cells.policy.labels import canonical_name
from cells.policy.maps import KnownRules
from cells.proxy.dns.cache import EndpointNames, Lookup, Pair, Zombie, saved_names, zombies_of
from cells.proxy.dns.settings import DNSProxySettings
from cells.proxy.dns.wire import Answer
from lifecycle import Change, Hook, Jobs, Lifecycle, Logger, Table, after, minutes

# The journal of answers, from which the next agent restores names, even after SIGKILL.

FILE: Final = "dns-names.jsonl"
"""File name in the state directory."""


class JournaledAnswer(msgspec.Struct, frozen=True, gc=False, tag="seen", rename="kebab", omit_defaults=True):
    """An answer to an endpoint; ``zombie``: its TTL has expired, and the endpoint was connected."""

    endpoint: int
    attachment: str
    """The endpoint's attachment ID, since endpoint numbers are reused."""
    name: str
    addresses: tuple[str, ...]
    ttl: int
    at: float
    expires: float
    zombie: bool = False


class JournaledServerFilter(
    msgspec.Struct, frozen=True, gc=False, tag="asked", rename="kebab", omit_defaults=True
):
    """The names that an endpoint may look up at a server."""

    endpoint: int
    attachment: str
    server: str
    protocol: int
    port: int
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    """``*`` allows everything."""


class JournaledRulesChange(
    msgspec.Struct, frozen=True, gc=False, tag="changed", rename="kebab", omit_defaults=True
):
    """The endpoint's rules have changed: earlier Asked records of it are void."""

    endpoint: int


Record = JournaledAnswer | JournaledServerFilter | JournaledRulesChange
_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()


class Journal:
    """The journal of answers and rules. All methods raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._fd = -1

    def read(self) -> Iterator[Record]:
        """Yield all records; damaged lines are skipped."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        for line in data.splitlines():
            try:
                yield _decoder.decode(line)
            except ValueError:  # a DecodeError, or invalid UTF-8
                continue

    def append(self, record: Record) -> None:
        """Append a record."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._fd, _encoder.encode(record) + b"\n")

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the contents of the file."""
        temporary = self._path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_encoder.encode_lines(records))
        temporary.rename(self._path)
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


GC: Final = minutes(1)
PRE_CACHE_ENDPOINT: Final = 0
"""The endpoint number for names from tofqdns-pre-cache."""
MAX_LOGGED_NAMES: Final = 4096
"""Maximum number of remembered names with forbidden addresses, each logged once."""
SAVE_DELAY: Final = 5.0
"""Seconds between a change and the write of the endpoints' saved state, which only other agents read."""
EXPIRY_TOLERANCE: Final = 2.0
"""Seconds by which a later expiry of a known answer is not journaled."""

Server = tuple[str, int, int]
"""Address, protocol and port."""


class Connections(Protocol):
    """Reads live connections; implemented with the conntrack maps."""

    async def alive(self, addresses: Collection[IPAddress]) -> set[tuple[IPAddress, IPAddress]]:
        """Return source and destination of live connections to these addresses. Raises OSError."""
        ...


class PreCached(msgspec.Struct, rename={"lookup_time": "lookup-time"}):
    """A row of the output of ``fqdn cache list -o json``."""

    fqdn: str
    ips: list[str]
    ttl: int = 0
    lookup_time: str = ""


@after(ExposedEndpoints)
class NameStore:
    """The DNS caches of endpoints; adds each new pair of name and address to NamedAddresses."""

    def __init__(
        self,
        settings: DNSProxySettings,
        endpoints: Table[int, Endpoint],
        names: NamedAddresses,
        rules: KnownRules,
        connections: Connections,
        journal: Journal,
        files: StateFiles,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._forbids = lru_cache(maxsize=4096)(settings.forbids)
        self._grace = float(settings.tofqdns_idle_connection_grace_period)
        self._endpoints = endpoints
        self._names = names
        self._rules = rules
        self._read_all = names.source()
        self._claimed = names.claims()
        self._connections = connections
        self._journal = journal
        self._files = files
        self._saved: dict[int, SavedNames] = {}
        """The names in the endpoints' saved state."""
        self._log = log
        self.of: dict[int, EndpointNames] = {}
        """The DNS cache of each endpoint that has one."""
        self._server_filters: dict[int, dict[Server, NameFilter]] = {}
        self._journaled_until: dict[tuple[int, str], float] = {}
        """Expiry of each endpoint's name in the journal."""
        self._logged_forbidden: dict[str, None] = {}
        """Names with forbidden addresses that were logged, the oldest first."""
        self.deleted = 0
        """Number of expired pairs of name and address."""
        self.revision = 0
        """Increases with each added or removed pair of name and address."""
        self.clock: Callable[[], float] = time.time
        lifecycle.append(Hook("read names", self._restore, self._stop))
        jobs.one_shot("restore", self._release_restored)
        jobs.timer("garbage-collector", self.collect, GC)
        self._save_soon = jobs.timer("saved-state", self._save, math.inf, debounce=SAVE_DELAY).trigger
        jobs.observe("endpoints", partial(endpoints.changes, only=_is_removed), self._drop_deleted)

    # Answers

    def learn(self, endpoint: Endpoint, answer: Answer) -> bool:
        """Store an answer; return whether its addresses are already in the maps. Raises OSError."""
        held = self._endpoints.get(endpoint.id)
        if held is not endpoint and (held is None or held.attachment_id != endpoint.attachment_id):
            return True  # deleted in the meantime: the names would never be removed
        now = self.clock()
        ttl = max(answer.ttl, self._settings.tofqdns_min_ttl)
        lookup = Lookup(answer.name, answer.addresses, ttl, now, now + ttl)
        is_new = self._learn(endpoint.id, lookup)
        journaled_until = self._journaled_until.get((endpoint.id, answer.name), 0.0)
        if is_new or lookup.expires - journaled_until > EXPIRY_TOLERANCE:
            self._journaled_until[endpoint.id, answer.name] = lookup.expires
            self._journal.append(_answer_record(endpoint, lookup))
            self._save_soon()
        return not self._names.stale(answer.addresses)

    def _allowed(self, name: str, addresses: tuple[IPAddress, ...]) -> tuple[IPAddress, ...]:
        """Return the addresses that toFQDNs may allow; log the first forbidden ones of a name."""
        if not any(map(self._forbids, addresses)):
            return addresses
        found = {address: self._forbids(address) for address in addresses}
        if name not in self._logged_forbidden:
            if len(self._logged_forbidden) >= MAX_LOGGED_NAMES:
                del self._logged_forbidden[next(iter(self._logged_forbidden))]
            self._logged_forbidden[name] = None
            self._log.warning(
                "toFQDNs does not allow an address of an answer: tofqdns-forbidden-addresses",
                name=name,
                addresses=", ".join(f"{address} ({why})" for address, why in found.items() if why),
            )
        return tuple(address for address, why in found.items() if not why)

    def _learn(self, endpoint_id: int, lookup: Lookup) -> bool:
        """Add an answer to the endpoint's cache; return whether its addresses changed."""
        of = self.of.get(endpoint_id)
        if of is None:
            settings = self._settings
            of = self.of[endpoint_id] = EndpointNames(
                settings.tofqdns_endpoint_max_ip_per_hostname,
                settings.tofqdns_max_deferred_connection_deletes,
            )
        allowed = self._allowed(lookup.name, lookup.addresses)
        if not allowed:
            return False
        if allowed is not lookup.addresses:
            lookup = msgspec.structs.replace(lookup, addresses=allowed)
        added, removed = of.learn(lookup)
        if added:
            self.revision += 1
            self._names.learn(lookup.name, [address for _, address in added])
        self._remove_pairs(removed)
        return bool(added or removed)

    def _remove_pairs(self, pairs: Iterable[Pair]) -> None:
        for name, address in pairs:
            self.deleted += 1
            self.revision += 1
            self._names.forget(name, [address])

    # Rules by server

    def set_server_filter(self, endpoint: Endpoint, server: Server, name_filter: NameFilter) -> None:
        """Store the names that the endpoint may look up at this server. Raises OSError."""
        known = self._server_filters.setdefault(endpoint.id, {})
        if known.get(server) != name_filter:
            known[server] = name_filter
            self._journal.append(_server_record(endpoint, server, name_filter))

    def rules_changed(self, endpoint_id: int) -> None:
        """Drop the endpoint's stored rules of servers. Raises OSError."""
        if self._server_filters.pop(endpoint_id, None):
            self._journal.append(JournaledRulesChange(endpoint_id))

    def restored_filter(self, endpoint_id: int, server: Server) -> NameFilter | None:
        """Return the names that the endpoint could look up at this server; None if not stored."""
        return self._server_filters.get(endpoint_id, {}).get(server)

    # Expiry

    async def collect(self) -> None:
        """Expire addresses, and remove expired ones without connections. Raises OSError."""
        for of in self.of.values():
            of.clamp_future_times(self.clock())
            self._remove_pairs(of.expire(self.clock()))
        waiting = {address for of in self.of.values() for address in of.zombies}
        if waiting:
            alive = await self._connections.alive(waiting)
            for endpoint_id, of in self.of.items():
                own = self._addresses(endpoint_id)
                connected = {to for who, to in alive if own is None or who in own}
                self._remove_pairs(of.collect(connected, self.clock(), self._grace))
        self._journal.rewrite(list(self._records()))
        self._journaled_until = {key: at for key, at in self._journaled_until.items() if at > self.clock()}
        await self._save()

    def _addresses(self, endpoint_id: int) -> Collection[IPAddress] | None:
        endpoint = self._endpoints.get(endpoint_id)
        return None if endpoint is None else endpoint.addresses

    def forget(self, matches: Callable[[str], bool]) -> None:
        """Remove matching names, even with connections. Raises OSError."""
        for of in self.of.values():
            self._remove_pairs(of.forget([name for name in of.all_names() if matches(name)]))
        self._journaled_until.clear()
        self._journal.rewrite(list(self._records()))
        for endpoint_id in self.of:
            self._save_one(endpoint_id)

    async def _drop_deleted(self, changes: Iterable[Change[int, Endpoint]]) -> None:
        for change in changes:
            endpoint_id = change.key
            if change.deleted and endpoint_id in self.of:
                self._remove_pairs(list(self.of.pop(endpoint_id).pairs()))
            if change.deleted:
                self._server_filters.pop(endpoint_id, None)
                self._saved.pop(endpoint_id, None)

    # Restarts

    async def _restore(self) -> None:
        """Restore the names of endpoints that still exist."""
        try:
            records = await to_thread.run_sync(lambda: list(self._journal.read()))
        except OSError as error:
            self._log.warning("names saved by the previous agent cannot be read", error=str(error))
            records = []
        for record in records:
            self._restore_record(record)
        if self._settings.tofqdns_pre_cache is not None:
            self._pre_cache()
        for endpoint in list(self._endpoints.all()):
            self._restore_saved(endpoint)
        self._read_all()
        self._rewrite()

    def _restore_saved(self, endpoint: Endpoint) -> None:
        """Restore the names that Cilium's agent saved with the endpoint."""
        try:
            saved = self._files.names(endpoint.id)
            lookups = [
                Lookup(canonical_name(one.name), one.addresses, one.ttl, one.at, one.expires)
                for one in saved.lookups
            ]
        except ValueError as error:
            self._log.warning(
                "names saved with an endpoint cannot be read", endpoint=endpoint.id, error=str(error)
            )
            return
        for lookup in lookups:
            self._learn(endpoint.id, lookup)
        for name, address, since in zombies_of(saved):
            self._learn(endpoint.id, Lookup(name, (address,), 0, since, since))
            self._remove_pairs(self.of[endpoint.id].expire(since))

    def _restore_record(self, record: Record) -> None:
        if isinstance(record, JournaledRulesChange):
            self._server_filters.pop(record.endpoint, None)
            return
        endpoint = self._endpoints.get(record.endpoint)
        if endpoint is None or endpoint.attachment_id != record.attachment:
            return
        if isinstance(record, JournaledServerFilter):
            server = record.server, record.protocol, record.port
            name_filter = NameFilter(frozenset(record.names), record.patterns)
            self._server_filters.setdefault(record.endpoint, {})[server] = name_filter
            return
        try:
            addresses = tuple(map(ip_address, record.addresses))
        except ValueError:
            return  # a damaged line
        lookup = Lookup(record.name, addresses, record.ttl, record.at, record.expires)
        self._learn(record.endpoint, lookup)
        if record.zombie:
            self._remove_pairs(self.of[record.endpoint].expire(record.expires))

    def _pre_cache(self) -> None:
        path = self._settings.tofqdns_pre_cache
        assert path is not None  # noqa: S101  # callers have checked
        try:
            rows = msgspec.json.decode(path.read_bytes(), type=list[PreCached])
            for row in rows:
                now = self.clock()
                addresses = tuple(map(ip_address, row.ips))
                self._learn(
                    PRE_CACHE_ENDPOINT,
                    Lookup(canonical_name(row.fqdn), addresses, row.ttl, now, now + row.ttl),
                )
        except (OSError, ValueError) as error:
            self._log.error("tofqdns-pre-cache is not read", path=str(path), error=str(error))

    async def _release_restored(self) -> None:
        """Once the restored addresses are in the ipcache, let it prune entries of the previous agent."""
        await self._rules.known()
        await self._names.wait_written([address for of in self.of.values() for _, address in of.pairs()])
        self._claimed.done()

    async def _stop(self) -> None:
        self._rewrite()
        try:
            await self._save()
        except OSError as error:
            self._log.warning("names are not saved with their endpoints", error=str(error))

    async def _save(self) -> None:
        """Write names to the endpoints' saved state, for Cilium's agent. Raises OSError."""
        for endpoint_id in self.of.keys() | self._saved.keys():
            if self._save_one(endpoint_id):
                await checkpoint()

    def _save_one(self, endpoint_id: int) -> bool:
        """Write the names of one endpoint; return whether they changed. Raises OSError."""
        endpoint, names = self._endpoints.get(endpoint_id), saved_names(self.of.get(endpoint_id))
        if endpoint is None or names == self._saved.get(endpoint_id):
            return False
        self._files.keep_names(endpoint, names)
        self._saved[endpoint_id] = names
        return True

    def _rewrite(self) -> None:
        """Rewrite the journal; log a failure, which the next collection retries."""
        try:
            self._journal.rewrite(list(self._records()))
        except OSError as error:
            self._log.warning("names are not saved for the next agent", error=str(error))

    def _records(self) -> Iterator[Record]:
        for endpoint_id, of in self.of.items():
            endpoint = self._endpoints.get(endpoint_id)
            if endpoint is None:
                continue
            for lookup in of.lookups():
                yield _answer_record(endpoint, lookup)
            for address, zombie in of.zombies.items():
                yield from (_zombie_record(endpoint, name, address, zombie) for name in sorted(zombie.names))
        for endpoint_id, servers in self._server_filters.items():
            endpoint = self._endpoints.get(endpoint_id)
            if endpoint is not None:
                yield from (
                    _server_record(endpoint, server, name_filter) for server, name_filter in servers.items()
                )


def _server_record(endpoint: Endpoint, server: Server, name_filter: NameFilter) -> JournaledServerFilter:
    names = tuple(sorted(name_filter.names))
    return JournaledServerFilter(endpoint.id, endpoint.attachment_id, *server, names, name_filter.patterns)


def _answer_record(endpoint: Endpoint, lookup: Lookup) -> JournaledAnswer:
    addresses = tuple(map(str, lookup.addresses))
    return JournaledAnswer(
        endpoint.id, endpoint.attachment_id, lookup.name, addresses, lookup.ttl, lookup.at, lookup.expires
    )


def _zombie_record(endpoint: Endpoint, name: str, address: IPAddress, zombie: Zombie) -> JournaledAnswer:
    at = zombie.since
    return JournaledAnswer(endpoint.id, endpoint.attachment_id, name, (str(address),), 0, at, at, zombie=True)


def _is_removed(_key: Hashable, _old: Endpoint | None, row: Endpoint | None) -> bool:
    return row is None
