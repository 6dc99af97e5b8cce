"""The DNS cache: TTLs, limits and expiry."""

from __future__ import annotations

from ipaddress import IPv4Address

from cells.proxy.dns.cache import EndpointNames, Lookup

ONE, TWO, THREE = (IPv4Address(f"192.0.2.{number}") for number in (1, 2, 3))
WEB, API = "web.example.org.", "api.example.org."


def seen(name: str, *addresses: IPv4Address, at: float = 0.0, ttl: int = 60) -> Lookup:
    return Lookup(name, addresses, ttl, at, at + ttl)


def test_an_address_counts_until_the_latest_ttl_ends_and_then_for_its_connections() -> None:
    names = EndpointNames(most=10, most_zombies=10)
    assert names.learn(seen(WEB, ONE, TWO)) == ([(WEB, ONE), (WEB, TWO)], [])
    assert names.learn(seen(WEB, ONE, at=30.0)) == ([], [])
    assert names.expire(60.0) == []
    assert set(names.zombies) == {TWO}
    assert set(names.pairs()) == {(WEB, ONE), (WEB, TWO)}
    assert names.collect({TWO}, 60.0, 0.0) == []
    assert names.collect((), 120.0, 0.0) == [], "a connection may begin between two looks"
    assert names.collect((), 180.0, 0.0) == [(WEB, TWO)]
    assert set(names.pairs()) == {(WEB, ONE)}


def test_a_zombie_that_is_answered_again_counts_by_its_ttl_again() -> None:
    names = EndpointNames(most=10, most_zombies=10)
    names.learn(seen(WEB, ONE))
    names.expire(61.0)
    assert names.learn(seen(WEB, ONE, at=62.0)) == ([], [])
    assert not names.zombies
    assert names.learn(seen(API, ONE, at=62.0)) == ([(API, ONE)], [])


def test_the_grace_keeps_an_idle_zombie() -> None:
    names = EndpointNames(most=10, most_zombies=10)
    names.learn(seen(WEB, ONE))
    names.expire(60.0)
    for now in (61.0, 62.0, 89.0):
        assert names.collect((), now, 30.0) == []
    assert names.collect((), 90.0, 30.0) == [(WEB, ONE)]


def test_of_too_many_addresses_of_a_name_those_that_end_first_go_first() -> None:
    names = EndpointNames(most=2, most_zombies=1)
    names.learn(seen(WEB, ONE, ttl=5))
    assert names.learn(seen(WEB, TWO, THREE)) == ([(WEB, TWO), (WEB, THREE)], [])
    assert set(names.zombies) == {ONE}
    went = names.expire(61.0)
    assert len(names.zombies) == 1
    assert (WEB, ONE) in went


def test_names_are_forgotten_whatever_is_connected_to() -> None:
    names = EndpointNames(most=10, most_zombies=10)
    names.learn(seen(WEB, ONE))
    names.learn(seen(API, ONE, ttl=5))
    names.expire(6.0)
    assert names.all_names() == {WEB, API}
    assert names.forget([API]) == [(API, ONE)]
    assert set(names.pairs()) == {(WEB, ONE)}
