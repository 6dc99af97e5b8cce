"""DNS names of endpoints over restarts, of open connections, and in the API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from cells.base.addresses import IPAddress
from cells.endpoint import Endpoint, StateFiles
from cells.policy.control import NameFilter
from cells.proxy.dns.settings import AddressClass, DNSPortSettings, DNSProxySettings
from cells.proxy.dns.store import FILE, Journal, NameStore
from cells.proxy.dns.wire import Answer
from lifecycle import Lifecycle, Table
from lifecycle.jobs.jobs import Timer
from lifecycle.tables import Initializer
from tests.support.settings import refused
from tests.unit.ciliumendpoint.endpoints import endpoint

pytestmark = pytest.mark.anyio

WEB = "web.example.org."
ONE, TWO = ip_address("192.0.2.1"), ip_address("192.0.2.2")
POD = endpoint(7)
SERVER = "10.0.0.53", 17, 53
MAY = NameFilter(frozenset({WEB}), ("*.example.com",))


@dataclass
class Names:
    """NamedAddresses, as far as a store needs it."""

    pairs: dict[tuple[str, IPAddress], int] = field(default_factory=dict)

    def learn(self, name: str, addresses: Iterable[IPAddress]) -> None:
        for address in addresses:
            self.pairs[name, address] = self.pairs.get((name, address), 0) + 1

    def forget(self, name: str, addresses: Iterable[IPAddress]) -> None:
        for address in addresses:
            self.pairs[name, address] -= 1
            if not self.pairs[name, address]:
                del self.pairs[name, address]

    def stale(self, addresses: Iterable[IPAddress]) -> bool:
        del addresses
        return False

    def claims(self) -> Initializer:
        return Table[int, Endpoint]("ipcache", key=lambda one: one.id).initializer("addresses of names")

    def source(self) -> Callable[[], None]:
        return lambda: None

    async def wait_written(self, addresses: Collection[IPAddress]) -> None:
        del addresses


@dataclass
class Kernel:
    """Connections."""

    connected: set[tuple[IPAddress, IPAddress]] = field(default_factory=set)

    async def alive(self, addresses: Collection[IPAddress]) -> set[tuple[IPAddress, IPAddress]]:
        return {pair for pair in self.connected if pair[1] in addresses}


class Idle:
    """Jobs that never run."""

    def one_shot(self, *_: object) -> None: ...

    observe = one_shot

    def timer(self, *_: object, **__: object) -> Timer:
        return Timer(0.0)


class Shop:
    """A store in a directory, with one endpoint."""

    def __init__(self, directory: Path, settings: DNSProxySettings | None = None) -> None:
        self.names, self.kernel, self.now = Names(), Kernel(), 1000.0
        self.endpoints = endpoints = Table[int, Endpoint]("endpoints", key=lambda one: one.id)
        endpoints.put(POD)
        self.lifecycle = Lifecycle("test")
        self.files = StateFiles(directory)
        self.files.scan()
        fakes = cast("Any", self.names), cast("Any", None), self.kernel
        self.store = NameStore(
            settings or DNSProxySettings(),
            endpoints,
            *fakes,
            Journal(directory),
            self.files,
            lifecycle=self.lifecycle,
            jobs=cast("Any", Idle()),
            log=structlog.get_logger(),
        )
        self.store.clock = lambda: self.now

    def learn(self, *addresses: IPAddress, name: str = WEB, ttl: int = 60) -> None:
        assert self.store.learn(POD, Answer(name, 1, 0, addresses, ttl, 0))


@asynccontextmanager
async def shop(directory: Path, settings: DNSProxySettings | None = None) -> AsyncIterator[Shop]:
    """Opened as an agent does; left as one that is killed does, with no word to the file."""
    found = Shop(directory, settings)
    await found.lifecycle.specs[0].context().__aenter__()
    yield found


async def test_dns_names_survive_a_killed_agent(tmp_path: Path) -> None:
    async with shop(tmp_path) as first:
        first.learn(ONE)
        first.learn(TWO)
        first.store.set_server_filter(POD, SERVER, MAY)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"type":"seen","endpo')
    async with shop(tmp_path) as second:
        assert second.names.pairs == {(WEB, ONE): 1, (WEB, TWO): 1}
        assert second.store.restored_filter(POD.id, SERVER) == MAY
        second.store.rules_changed(POD.id)
    async with shop(tmp_path) as third:
        assert third.store.restored_filter(POD.id, SERVER) is None
        third.store.forget(lambda name: name == WEB)
    async with shop(tmp_path) as fourth:
        assert not fourth.names.pairs


@pytest.mark.parametrize(
    ("good", "bad"), [(b"192.0.2.1", b"192.0.2.x"), (b'"seen"', b'"se\xffn"'), (b"60", b"\0")]
)
async def test_a_damaged_line_of_the_journal_costs_its_name_alone(
    tmp_path: Path, good: bytes, bad: bytes
) -> None:
    async with shop(tmp_path) as first:
        first.learn(ip_address("192.0.2.1"))
        first.learn(TWO, name="b.example.org.")
    whole, rest = (tmp_path / FILE).read_bytes().split(b"\n", 1)
    assert good in whole
    (tmp_path / FILE).write_bytes(whole.replace(good, bad) + b"\n" + rest)
    async with shop(tmp_path) as second:
        assert second.names.pairs == {("b.example.org.", TWO): 1}


async def test_another_pod_with_the_same_endpoint_id_gets_no_saved_names(tmp_path: Path) -> None:
    async with shop(tmp_path) as first:
        first.learn(ONE)
    text = (tmp_path / FILE).read_text().replace(POD.attachment_id, "other:eth0")
    (tmp_path / FILE).write_text(text)
    async with shop(tmp_path) as second:
        assert not second.names.pairs


async def test_an_answer_to_a_deleted_endpoint_teaches_nothing(tmp_path: Path) -> None:
    async with shop(tmp_path) as place:
        for after in (None, endpoint(7, container_id="another")):
            with place.endpoints.txn() as rows:
                rows.replace_all([] if after is None else [after])
            place.learn(ONE)
            assert not place.names.pairs
            assert not place.store.of


async def test_an_address_goes_after_its_ttl_and_its_last_connection(tmp_path: Path) -> None:
    async with shop(tmp_path, DNSProxySettings(tofqdns_min_ttl=30)) as place:
        place.learn(ONE, TWO, ttl=5)
        place.now += 20
        await place.store.collect()
        assert not place.store.of[POD.id].zombies, "the least TTL counts"
        assert POD.ipv4 is not None
        place.kernel.connected.add((POD.ipv4, ONE))
        place.now += 20
        await place.store.collect()
        await place.store.collect()
        assert place.names.pairs == {(WEB, ONE): 1}
    async with shop(tmp_path) as later:
        assert set(later.store.of[POD.id].zombies) == {ONE}
        later.now = place.now
        await later.store.collect()
        await later.store.collect()
        assert not later.names.pairs
        assert later.store.deleted == 1


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_clock_that_is_set_back_keeps_no_address_open(tmp_path: Path, restarts: bool) -> None:
    year = 365 * 24 * 3600.0
    async with shop(tmp_path, DNSProxySettings(tofqdns_min_ttl=30)) as place:
        place.learn(ONE, ttl=60)
        place.learn(TWO, ttl=5)
        place.now += 40
        await place.store.collect()
        assert set(place.store.of[POD.id].zombies) == {TWO}
        now = place.now - year
        if not restarts:
            await _ends(place, now)
    if restarts:
        async with shop(tmp_path) as later:
            await _ends(later, now)


async def _ends(place: Any, now: float) -> None:
    """Addresses end within their TTL of the clock as it is now."""
    place.now = now
    await place.store.collect()
    assert (WEB, ONE) in place.names.pairs
    place.now += 61
    for _ in range(3):
        await place.store.collect()
    assert not place.names.pairs


async def test_a_clock_that_jumps_ahead_leaves_connections_open(tmp_path: Path) -> None:
    async with shop(tmp_path) as place:
        place.learn(ONE, TWO, ttl=60)
        assert POD.ipv4 is not None
        place.kernel.connected.add((POD.ipv4, ONE))
        place.now += 365 * 24 * 3600.0
        for _ in range(3):
            await place.store.collect()
        assert place.names.pairs == {(WEB, ONE): 1}


async def test_names_of_a_file_count_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "names.json"
    file.write_text('[{"fqdn": "Web.example.org", "ips": ["192.0.2.1"], "ttl": 60, "endpoint-id": 4}]')
    async with shop(tmp_path, DNSProxySettings(tofqdns_pre_cache=file)) as place:
        assert place.names.pairs == {(WEB, ONE): 1}
    file.write_text("{")
    async with shop(tmp_path, DNSProxySettings(tofqdns_pre_cache=file)) as place:
        assert not place.names.pairs


CILIUMS = {
    "DNSHistory": [
        {
            "fqdn": "web.example.org.",
            "lookup-time": "1970-01-01T01:16:30.123456789+01:00",
            "expiration-time": "1970-01-01T00:17:30.123456789Z",
            "ttl": 60,
            "ips": ["192.0.2.1", "2001:db8::1"],
        }
    ],
    "DNSZombies": {
        "deletes": {
            "192.0.2.2": {
                "names": ["old.example.org.", "web.example.org."],
                "ip": "192.0.2.2",
                "alive-at": "0001-01-01T00:00:00Z",
                "delete-pending-at": "1970-01-01T00:15:00Z",
            }
        }
    },
}
"""As an agent of Cilium's leaves it in ep_config.json."""


def saved(directory: Path) -> Path:
    return directory / str(POD.id) / "ep_config.json"


async def test_names_that_ciliums_agent_has_learnt_are_taken_over_and_left_to_it(tmp_path: Path) -> None:
    StateFiles(tmp_path).write(POD)
    config = json.loads(saved(tmp_path).read_text())
    assert (config["DNSHistory"], config["DNSZombies"]) == ([], {}), "null would end Cilium's agent"
    saved(tmp_path).write_text(json.dumps(config | CILIUMS))
    six = ip_address("2001:db8::1")
    learnt = {(WEB, ONE): 1, (WEB, six): 1, (WEB, TWO): 1, ("old.example.org.", TWO): 1}
    async with shop(tmp_path) as place:
        assert place.names.pairs == learnt
        assert set(place.store.of[POD.id].zombies) == {TWO}
        place.files.refresh(POD)
        assert json.loads(saved(tmp_path).read_text())["DNSHistory"], "a regeneration loses nothing"
        place.now += 10
        place.learn(ONE, name="api.example.org.")
        await place.store.collect()
    left = json.loads(saved(tmp_path).read_text())
    assert {one["fqdn"]: one["ips"] for one in left["DNSHistory"]} == {
        WEB: ["192.0.2.1", "2001:db8::1"],
        "api.example.org.": ["192.0.2.1"],
    }
    assert left["DNSHistory"][1]["lookup-time"] == "1970-01-01T00:16:50Z"
    assert left["DNSZombies"]["deletes"]["192.0.2.2"]["names"] == ["old.example.org.", WEB]
    (tmp_path / FILE).unlink()
    async with shop(tmp_path) as without_our_own:
        assert without_our_own.names.pairs == learnt | {("api.example.org.", ONE): 1}
        without_our_own.store.forget(lambda _: True)
    async with shop(tmp_path) as later:
        assert not later.names.pairs


@pytest.mark.parametrize(
    "odd",
    [
        {"DNSHistory": 5},
        {"DNSZombies": {"deletes": {"x": {}}}},
        {"DNSHistory": [{"fqdn": "x.", "ips": ["fe80::1%eth0"]}]},
    ],
)
async def test_names_that_cannot_be_read_cost_the_endpoint_nothing(tmp_path: Path, odd: Any) -> None:
    StateFiles(tmp_path).write(POD)
    config = json.loads(saved(tmp_path).read_text())
    saved(tmp_path).write_text(json.dumps(config | odd))
    assert not StateFiles(tmp_path).scan().unreadable
    async with shop(tmp_path) as place:
        assert not place.names.pairs
        place.learn(ONE)
        await place.store.collect()
    assert json.loads(saved(tmp_path).read_text())["DNSHistory"][0]["fqdn"] == WEB


def test_invalid_settings_are_refused() -> None:
    assert "tofqdns-proxy-port=70000" in refused(DNSPortSettings, tofqdns_proxy_port=70000)
    assert "tofqdns-min-ttl=-1" in refused(DNSProxySettings, tofqdns_min_ttl=-1)


ODD = (
    "169.254.169.254",
    "127.0.0.1",
    "fe80::1",
    "::1",
    "::ffff:169.254.169.254",
    "0.0.0.0",
    "224.0.0.1",
    "ff02::1",
)
FORBIDDEN_BY_DEFAULT = 5


async def test_a_name_does_not_open_addresses_that_are_forbidden(tmp_path: Path) -> None:
    odd = [ip_address(text) for text in ODD]
    with structlog.testing.capture_logs() as logs:
        async with shop(tmp_path) as first:
            first.learn(ONE, *odd)
            first.learn(ONE, *odd)
            first.learn(odd[0], name="metadata.example.org.")
            opened = set(first.names.pairs)
    assert opened == {(WEB, one) for one in (ONE, *odd[FORBIDDEN_BY_DEFAULT:])}
    reports = [line for line in logs if "tofqdns-forbidden-addresses" in line["event"]]
    assert [line["name"] for line in reports] == [WEB, "metadata.example.org."], "once for each name"
    assert "169.254.169.254 (link-local)" in reports[0]["addresses"]


async def test_which_addresses_are_forbidden_is_a_setting(tmp_path: Path) -> None:
    odd = [ip_address(text) for text in ODD]
    for name in ("all", "none"):
        (tmp_path / name).mkdir()
    everything = DNSProxySettings(tofqdns_forbidden_addresses=tuple(AddressClass))
    async with shop(tmp_path / "all", everything) as closed:
        closed.learn(*odd)
        assert not closed.names.pairs
    permissive = DNSProxySettings(tofqdns_forbidden_addresses=())
    async with shop(tmp_path / "none", permissive) as opened:
        opened.learn(*odd)
        assert set(opened.names.pairs) == {(WEB, one) for one in odd}
    async with shop(tmp_path / "none") as later:
        assert not set(later.names.pairs) & {(WEB, one) for one in odd[:FORBIDDEN_BY_DEFAULT]}, (
            "what another agent has learnt and this one may not open"
        )
