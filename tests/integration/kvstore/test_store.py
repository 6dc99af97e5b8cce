"""The kvstore client: watched and published keys, status, and both while etcd is down."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from cells import kvstore
from cells.config import AgentConfig
from cells.kubernetes.objects.core import Service
from cells.kubernetes.resources import ServiceAddresses
from cells.kvstore.own_keys import OwnKey, keep_keys
from cells.kvstore.settings import StoreConfigError, StoreOptions, read_access
from cells.kvstore.store import KVStore
from cells.kvstore.watch import PrefixWatch
from cells.observe import metrics
from lifecycle import (
    Cell,
    HealthTree,
    Hive,
    Jobs,
    SettingsError,
    Table,
    Tables,
    invoke,
    module,
    provide,
    supply,
)
from lifecycle.testing import eventually
from tests.support.etcd import Etcd
from tests.support.ports import free_port
from tests.support.scrape import scraped

pytestmark = pytest.mark.anyio


class Row(OwnKey, frozen=True):
    """A key less its prefix, and its value."""


def read(key: str, value: bytes) -> Row | None:
    return Row(key, value.decode()) if value != b"unreadable" else None


class Followed:
    """Keys of ``their/`` as a table, and a table with rows that become keys of ``our/``."""

    grace = 0.3

    def __init__(self, store: KVStore, jobs: Jobs, tables: Tables, health: HealthTree) -> None:
        self.store, self.health = store, health
        self.theirs: Table[str, Row] = Table("theirs", key=lambda row: row.key)
        self.ours: Table[str, OwnKey] = Table("ours", key=lambda row: row.key)
        self._first = self.ours.initializer()
        self._first.done()
        watch = PrefixWatch(store, "their/", self.theirs, read, scope="their", grace=self.grace)
        jobs.observe("follow", watch)
        self.retained = keep_keys(store, self.ours, "our", jobs=jobs, tables=tables)

    def by_key(self) -> dict[str, str]:
        return {row.key: row.value for row in self.theirs.all()}

    def report(self, *rows: OwnKey) -> None:
        with self.ours.txn() as txn:
            txn.replace_all(rows)


@asynccontextmanager
async def following(etcd: Etcd, *cells: Cell, **more: str) -> AsyncIterator[Followed]:
    cell = module("test", "Follows and tells", kvstore.cell, provide(Followed), invoke(Followed), *cells)
    settings = {"kvstore": "etcd", "kvstore-opt": f"etcd.address={etcd.url}", "kvstore-lease-ttl": "25s"}
    async with Hive(cell, settings=settings | more).started() as hive:
        yield hive.get(Followed)


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition, within=30)


async def test_keys_are_read_then_followed(etcd: Etcd) -> None:
    etcd.put("their/a", "1")
    async with following(etcd) as found:
        await found.theirs.wait_initialized()
        assert found.by_key() == {"a": "1"}
        etcd.put("their/b", "2")
        etcd.delete("their/a")
        await until(lambda: found.by_key() == {"b": "2"})
        assert found.store.state().state == "Ok"


def quorum_errors(found: Followed) -> set[str]:
    """The label of failed checks in metrics."""
    families = found.store.metrics.families("home")
    (series,) = (one.series for one in families if one.name == "cilium_kvstore_quorum_errors_total")
    return {error for error, *_ in (key if isinstance(key, tuple) else (key,) for key in series)}


def service(cluster_ip: str) -> Service:
    metadata = {"namespace": "kube-system", "name": "etcd"}
    return msgspec.convert({"metadata": metadata, "spec": {"clusterIP": cluster_ip}}, Service)


async def test_an_address_that_names_a_service_is_its_cluster_ip(etcd: Etcd) -> None:
    etcd.put("their/a", "1")
    services: Table[tuple[str, str], Service] = Table("services", key=lambda row: row.key)
    port = etcd.url.rpartition(":")[2]
    address = f"etcd.address=http://etcd.kube-system.svc.cluster.local:{port}"

    def service_addresses() -> ServiceAddresses:
        return ServiceAddresses(lambda: services, lambda row: row.spec.cluster_ip)

    async with following(etcd, provide(service_addresses), **{"kvstore-opt": address}) as found:
        await until(lambda: "not connected yet" not in found.store.state().message)
        services.put(service("127.0.0.1"))
        await until(lambda: found.by_key() == {"a": "1"})
        services.put(service("None"))
        services.put(service("127.0.0.1"))
        etcd.put("their/b", "2")
        await until(lambda: found.by_key() == {"a": "1", "b": "2"} and found.store.state().state == "Ok")


async def test_a_value_that_cannot_be_read_leaves_the_last_one_in_force(etcd: Etcd) -> None:
    etcd.put("their/a", "1")
    async with following(etcd) as found:
        await found.theirs.wait_initialized()
        etcd.put("their/a", "unreadable")
        etcd.put("their/b", "2")
        await until(lambda: "b" in found.by_key())
        assert found.by_key() == {"a": "1", "b": "2"}
        (health,) = found.health.snapshot("test.follow")
        assert (health.level, health.message) == ("ok", "2 keys; 1 cannot be read, such as their/a")
        etcd.put("their/a", "3")
        await until(lambda: found.by_key() == {"a": "3", "b": "2"})
        etcd.put("their/a", "unreadable")
        etcd.delete("their/a")
        await until(lambda: found.by_key() == {"b": "2"})


async def test_an_unreadable_key_of_invalid_utf_8_is_reported_as_text(etcd: Etcd) -> None:
    etcd.put("their/\udcff", "unreadable")
    async with following(etcd) as found:
        await found.theirs.wait_initialized()
        wanted = "0 keys; 1 cannot be read, such as their/\ufffd"
        await until(lambda: found.health.snapshot("test.follow")[0].message == wanted)


async def test_changes_during_an_etcd_outage_are_read_after_it(etcd: Etcd) -> None:
    etcd.put("their/a", "1")
    async with following(etcd) as found:
        await until(lambda: found.store.state().state == "Ok")
        etcd.kill()
        await until(lambda: "consecutive-errors=" in found.store.state().message)
        assert found.by_key() == {"a": "1"}, "what is known stays in force"
        etcd.start()
        etcd.put("their/b", "2")
        await until(lambda: found.by_key() == {"a": "1", "b": "2"})


async def test_a_compacted_watch_is_replaced_by_a_new_list(etcd: Etcd) -> None:
    etcd.put("their/a", "1")
    async with following(etcd) as found:
        await found.theirs.wait_initialized()
        etcd.freeze()  # what is written from here on reaches the watch by its history alone
        etcd.thaw()
        etcd.kill()
        etcd.start()
        etcd.delete("their/a")
        etcd.put("their/b", "2")
        etcd.compact()
        await until(lambda: found.by_key() == {"b": "2"})


async def test_keys_missing_from_a_new_store_stay_for_a_grace_period(etcd: Etcd) -> None:
    for name in "abc":
        etcd.put(f"their/{name}", "1")
    async with following(etcd) as found:
        await found.theirs.wait_initialized()
        found.report(OwnKey("our/x", "1"))
        await until(lambda: etcd.all("our/") == {"our/x": "1"})
        etcd.kill()
        etcd.empty()
        etcd.start()
        await until(lambda: etcd.all("our/") == {"our/x": "1"})
        etcd.put("their/b", "2")
        await until(lambda: found.by_key().get("b") == "2")
        await until(lambda: found.by_key() == {"b": "2"})


async def test_the_grace_period_of_missing_keys_does_not_end_while_etcd_is_away(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Followed, "grace", 2.0)
    for name in "ab":
        etcd.put(f"their/{name}", "1")
    async with following(etcd) as found:

        def level() -> str:
            return found.health.snapshot("test.follow")[0].level

        await found.theirs.wait_initialized()
        found.report(OwnKey("our/x", "1"))
        await until(lambda: etcd.all("our/") == {"our/x": "1"})
        etcd.kill()
        etcd.empty()
        etcd.start()
        await until(lambda: found.store.generation and level() == "ok")
        etcd.kill()
        await until(lambda: level() == "degraded")
        over = time.monotonic() + Followed.grace
        await until(lambda: time.monotonic() > over)
        etcd.start()
        await until(lambda: level() == "ok")
        assert found.by_key() == {"a": "1", "b": "1"}
        etcd.put("their/b", "2")
        await until(lambda: found.by_key() == {"b": "2"})


async def test_own_keys_are_written_restored_after_changes_and_withdrawn(etcd: Etcd) -> None:
    async with following(etcd, **{"kvstore-periodic-sync": "300ms"}) as found:
        found.report(OwnKey("our/x", "1"), OwnKey("our/y", "1"))
        await until(lambda: etcd.all("our/") == {"our/x": "1", "our/y": "1"})
        etcd.delete("our/x")
        etcd.put("our/y", "somebody's")
        await until(lambda: etcd.all("our/") == {"our/x": "1", "our/y": "1"})
        found.report(OwnKey("our/x", "2"))
        await until(lambda: etcd.all("our/") == {"our/x": "2"})


async def test_after_a_lost_lease_the_keys_are_written_again(etcd: Etcd) -> None:
    async with following(etcd, **{"kvstore-periodic-sync": "300ms"}) as found:
        found.report(OwnKey("our/x", "1"))
        await until(lambda: etcd.all("our/") == {"our/x": "1"})
        lease = etcd.lease_of("our/x")
        assert lease
        etcd.revoke(lease)
        await until(lambda: etcd.all("our/") == {"our/x": "1"} and etcd.lease_of("our/x") != lease)
        assert found.store.generation, "others' keys may have gone as well: all is read anew"


async def test_a_key_that_another_node_owns_by_now_is_not_deleted(etcd: Etcd) -> None:
    async with following(etcd) as found:
        found.report(OwnKey("our/x", "here"))
        await until(lambda: etcd.all("our/") == {"our/x": "here"})
        etcd.put("our/x", "there")
        found.report(OwnKey("our/y", "here"))
        await until(lambda: etcd.all("our/").get("our/y") == "here")
        await found.retained.wait_realised("our/x")
        assert etcd.all("our/") == {"our/x": "there", "our/y": "here"}


async def test_keys_that_wait_and_failed_writes_are_metrics_of_the_cluster(etcd: Etcd) -> None:
    agent, port = AgentConfig.__new__(AgentConfig), free_port()
    agent.cluster_name = "mars"
    given = {"prometheus-serve-addr": f":{port}"}
    queue, errors = "cilium_kvstore_sync_queue_size", "cilium_kvstore_sync_errors_total"
    async with following(etcd, metrics.cell, supply(agent), **given) as found:
        etcd.put("their/a", "1")
        found.report(OwnKey("our/x", "1"))
        await found.retained.wait_realised("our/x")
        await until(lambda: found.by_key() == {"a": "1"})
        before = await scraped(port)
        etcd.kill()
        found.report(OwnKey("our/x", "2"), OwnKey("our/y", "2"))
        await until(lambda: found.retained.failing == 2)
        during = await scraped(port)
        etcd.start()
        await until(lambda: etcd.all("our/") == {"our/x": "2", "our/y": "2"})
        await found.retained.wait_realised("our/x")
        await found.retained.wait_realised("our/y")
        after = await scraped(port)
    scope = ("our", "mars")
    assert before["cilium_kvstore_initial_sync_completed"] == {("their", "mars", "read"): 1}
    assert [each[queue][scope] for each in (before, during, after)] == [0, 2, 0]
    assert before[errors] == {scope: 0}
    assert 2 <= during[errors][scope] <= after[errors][scope]


async def test_an_agent_starts_without_the_store(etcd: Etcd) -> None:
    etcd.kill()
    async with following(etcd) as found:
        await until(lambda: "refused" in found.store.state().message)
        assert found.store.state().state == "Failure"
        assert not found.theirs.initialized, "nothing may be taken for gone"
        found.report(OwnKey("our/x", "1"))
        etcd.start()
        etcd.put("their/a", "1")
        await until(lambda: etcd.all("our/") == {"our/x": "1"})
        await until(lambda: found.by_key() == {"a": "1"})
        await until(lambda: "has-quorum=true: http" in found.store.state().message)
        begin = "etcd: 1/1 connected, leases=1, lock leases=0"
        await until(lambda: found.store.state().message.startswith(begin))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kvstore": "consul"}, "kvstore=consul: expected etcd, or leave it unset"),
        ({"kvstore": "etcd"}, "kvstore=etcd: expected its endpoints in kvstore-opt"),
        ({"kvstore-opt": "etcd.adress=x"}, "kvstore-opt: etcd.adress: expected one of etcd.address"),
        ({"kvstore-opt": "etcd.qps=0"}, "kvstore-opt: etcd.qps=0: expected a whole number above 0"),
        ({"kvstore-opt": "etcd.config=here"}, "kvstore-opt: etcd.config=here: expected an absolute path"),
        ({"kvstore-lease-ttl": "24s"}, "kvstore-lease-ttl=24s: expected from 25s to 24h"),
    ],
)
async def test_invalid_settings_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        Hive(kvstore.cell, settings=settings).check()
    assert message in str(error.value)


async def test_etcd_is_reached_past_the_proxy_of_the_environment(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with following(etcd) as found:
        await until(lambda: found.store.state().state == "Ok")


async def test_etcd_asks_for_certificates(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    etcd = Etcd(tmp_path / "etcd", {"ca": files["ca"], "cert": files["server"], "key": files["server-key"]})
    etcd.start()
    config = tmp_path / "etcd.config"
    etcd_config = {"endpoints": [etcd.url], "trusted-ca-file": str(files["ca"])}
    try:
        config.write_text(json.dumps(etcd_config))
        async with following(etcd, **{"kvstore-opt": f"etcd.config={config}"}) as found:
            await until(lambda: "not able to connect" in found.store.state().message)
        etcd_config |= {"cert-file": str(files["client"]), "key-file": str(files["client-key"])}
        config.write_text(json.dumps(etcd_config))
        async with following(etcd, **{"kvstore-opt": f"etcd.config={config}"}) as found:
            found.report(OwnKey("their/x", "1"))
            await until(lambda: found.by_key() == {"x": "1"})
    finally:
        etcd.kill()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("endpoints: 3", "Expected `array`, got `int` - at `$.endpoints`"),
        ("{}", "endpoints: expected at least one address"),
        ("endpoints: [ftp://x]", "endpoints: ftp://x: expected a URL"),
        ("endpoints: [https://x]\ncert-file: /x", "cert-file and key-file belong together"),
        ("endpoints: [https://x]\ntrusted-ca-file: /none", "/none: No such file or directory"),
        ("insecure-skip-tls-verify: true", "insecure-skip-tls-verify is not supported"),
        ("endpoints: [\xff]", "unacceptable character"),
        ("endpoints: 2026-13-45", "month must be in 1..12"),
        ("username: root", "username and password are not supported"),
    ],
)
def test_an_invalid_etcd_configuration_is_reported_in_one_line(
    tmp_path: Path, text: str | None, message: str
) -> None:
    config = tmp_path / "etcd.config"
    if text is not None:
        config.write_text(text, encoding="latin-1")
    with pytest.raises(StoreConfigError) as error:
        read_access(StoreOptions(config=str(config)))
    assert str(error.value).startswith(f"etcd.config={config}: ")
    assert message in str(error.value)


def certificates(folder: Path) -> dict[str, Path]:
    """An authority, a server for 127.0.0.1 and a client, made by openssl."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]

    def made(name: str, *more: str) -> None:
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        command = ["openssl", "req", "-x509", *key, "-subj", f"/CN={name}", *files, *more]
        subprocess.run(command, check=True, capture_output=True)

    made("ca")
    signed = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
    plain = [*signed, "-addext", "basicConstraints=critical,CA:FALSE"]
    made("server", *plain, "-addext", "subjectAltName=IP:127.0.0.1")
    made("client", *plain, "-addext", "extendedKeyUsage=clientAuth")
    found = {name: folder / f"{name}.crt" for name in ("ca", "server", "client")}
    return found | {f"{name}-key": folder / f"{name}.key" for name in ("server", "client")}


async def test_connecting_clients_take_the_init_lock_in_turn(etcd: Etcd) -> None:
    other = "cilium/.initlock/1"
    etcd.put(other, "")
    async with following(etcd) as found:
        await until(lambda: len(etcd.all("cilium/.initlock/")) == 2)
        await until(lambda: "lock leases=1" in found.store.state().message)
        etcd.delete(other)
        await until(lambda: not etcd.all("cilium/.initlock/"))
        await until(lambda: "lock leases=0" in found.store.state().message)


async def test_a_client_that_waits_long_for_a_lock_stays_in_its_place(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.kvstore.store.LOCK_TTL", 2.0)
    earlier = "cilium/.initlock/1"
    etcd.put(earlier, "")
    async with following(etcd) as found:
        await until(lambda: len(etcd.all("cilium/.initlock/")) == 2)
        keys = set(etcd.all("cilium/.initlock/"))
        etcd.put("cilium/.initlock/2", "")
        over = time.monotonic() + 6.0  # its lease has ended by then, unless it is renewed
        await until(lambda: time.monotonic() > over)
        assert set(etcd.all("cilium/.initlock/")) == {*keys, "cilium/.initlock/2"}
        etcd.delete(earlier)
        await until(lambda: set(etcd.all("cilium/.initlock/")) == {"cilium/.initlock/2"})
        await until(lambda: found.store.state().state == "Ok")


async def test_a_heartbeat_that_stops_is_a_failure_and_no_reason_to_write_keys_again(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.kvstore.store.CHECK_INTERVAL", 0.1)
    monkeypatch.setattr("cells.kvstore.store.HEARTBEAT_INTERVAL", 0.2)
    returns = 0

    async def count() -> None:
        nonlocal returns
        async for _ in found.store.resyncs():
            returns += 1

    etcd.put("cilium/.heartbeat", "now")
    async with following(etcd) as found, anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await until(lambda: found.store.state().state == "Ok")
        number = 0
        with anyio.fail_after(15):
            while found.store.state().state != "Failure":  # events show that it is reached
                etcd.put(f"their/{number}", "1")
                await until(lambda: f"{number}" in found.by_key())  # noqa: B023
                number += 1
        assert "since last heartbeat update has been received" in found.store.state().message
        assert quorum_errors(found) == {"no event received"}
        assert returns == 1
        monkeypatch.setattr("cells.kvstore.store.HEARTBEAT_INTERVAL", 60)
        etcd.put("cilium/.heartbeat", "later")
        await until(lambda: found.store.state().state == "Ok")
        tasks.cancel_scope.cancel()


async def test_an_etcd_without_space_is_degraded_and_still_read(etcd: Etcd) -> None:
    etcd.put("their/a", "1")
    etcd.fill()
    async with following(etcd) as found:
        await until(lambda: found.by_key() == {"a": "1"})
        await until(lambda: "space exceeded" in found.store.state().message)
        assert quorum_errors(found) == {"lock timeout"}
