"""Sorted and LPM indexes: ranges, prefixes, longest prefix match; also at random against a plain search."""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Table
from lifecycle.tables import LPM, Lookup, Sorted
from lifecycle.tables.indexes.sorted_values import SortedValues

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    networks: tuple[Any, ...]
    metric: int = 0


def routes(*rows: Route) -> Table[str, Route]:
    table: Table[str, Route] = Table(
        "routes",
        key=lambda route: route.name,
        indexes={
            "metric": lambda route: [route.metric],
            "name": Sorted(lambda route: [route.name]),
            "parts": Sorted(lambda route: [tuple(route.name.split("/"))]),
            "network": LPM(lambda route: route.networks),
        },
    )
    write(table, *rows)
    return table


def write(table: Table[Any, Any], *rows: object) -> None:
    with table.txn() as txn:
        for row in rows:
            txn.put(row)


def to(name: str, *networks: str) -> Route:
    return Route(name, tuple(map(ip_network, networks)))


def names(found: list[Route]) -> list[str]:
    return [route.name for route in found]


def test_a_sorted_index_gives_ranges_and_prefixes_in_order() -> None:
    by_name = routes(to("pod/b"), to("node/a"), to("pod/a"), to("service")).sorted_by("name")
    assert by_name.values() == ["node/a", "pod/a", "pod/b", "service"]
    assert names(by_name.prefix("pod/")) == ["pod/a", "pod/b"]
    assert names(by_name.prefix("")) == ["node/a", "pod/a", "pod/b", "service"]
    assert names(by_name.prefix("q")) == []
    assert names(by_name.range("pod/a", "service")) == ["pod/a", "pod/b"]
    assert names(by_name.range("pod/b")) == ["pod/b", "service"]
    assert names(by_name.range(high="pod")) == ["node/a"]
    assert names(by_name.get("service")) == ["service"]


def test_prefixes_of_tuples() -> None:
    table = routes(to("pod/b"), to("pods"), to("pod/a/x"))
    assert names(table.sorted_by("parts").prefix(("pod",))) == ["pod/a/x", "pod/b"]


def test_the_longest_prefix_wins_whatever_the_order_of_writing() -> None:
    table = routes(to("default", "0.0.0.0/0", "::/0"), to("pod", "10.1.2.3/32"), to("cluster", "10.0.0.0/8"))
    by_network = table.lpm("network")

    def longest(address: str) -> str | None:
        return route.name if (route := by_network.longest(address)) else None

    assert [longest(one) for one in ("10.1.2.3", "10.1.2.4", "192.0.2.1", "2001:db8::1")] == [
        "pod",
        "cluster",
        "default",
        "default",
    ]
    with table.txn() as txn:
        txn.delete("pod")
        txn.put(to("default", "::/0"))
    assert [longest(one) for one in ("10.1.2.3", "192.0.2.1", "::1")] == ["cluster", None, "default"]
    assert by_network.longest(IPv4Address("10.0.0.0")) == table.get("cluster")


def test_all_around_a_prefix_and_all_within_it() -> None:
    table = routes(
        to("all", "0.0.0.0/0"),
        to("ten", "10.0.0.0/8"),
        to("first", "10.0.0.0/16"),
        to("host", "10.0.9.9/32"),
        to("next", "10.1.0.0/16"),
        to("six", "a00::/8"),
    )
    by_network = table.lpm("network")
    assert names(by_network.covering("10.0.0.0/16")) == ["first", "ten", "all"]
    assert names(by_network.covering("10.0.9.9")) == ["host", "first", "ten", "all"]
    assert names(by_network.within("10.0.0.0/8")) == ["ten", "first", "host", "next"]
    assert names(by_network.within("10.0.0.0/16")) == ["first", "host"]
    assert names(by_network.within("::/0")) == ["six"]
    assert names(by_network.get(ip_network("10.1.0.0/16"))) == ["next"]
    assert ip_network("10.1.0.0/16") in by_network
    assert by_network.values()[0] == ip_network("0.0.0.0/0")


def test_longest_with_two_best_prefixes_raises_lookup_error() -> None:
    table = routes(to("one", "10.0.0.0/8"), to("two", "10.0.0.0/8"))
    with pytest.raises(
        LookupError, match=r"table routes: 2 rows have the network that holds 10.1.1.1 best, not"
    ):
        table.lpm("network").longest("10.1.1.1")
    assert names(table.lpm("network").covering("10.1.1.1")) == ["one", "two"]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda table: table.sorted_by("metric"),
            "index 'metric' is not Sorted; make the table with 'metric': S",
        ),
        (lambda table: table.lpm("name"), "index 'name' is not LPM; make the table with 'name': LPM"),
        (lambda table: table.lpm("missing"), "no index 'missing'; it has: metric, name, parts, network"),
        (lambda table: table.snapshot().sorted_by("metric"), "index 'metric' is not Sorted"),
    ],
)
def test_asking_an_index_for_what_it_is_not_is_refused(
    ask: Callable[[Table[str, Route]], object], message: str
) -> None:
    with pytest.raises(LookupError, match=rf"^table routes.*{message}"):
        ask(routes())


@pytest.mark.parametrize("value", ["10.0.0.0/8", 7, IPv4Interface("10.0.0.1/8")])
def test_an_lpm_index_refuses_an_invalid_prefix_and_writes_nothing(value: object) -> None:
    table = routes(to("one", "10.0.0.0/8"))
    with pytest.raises(TypeError, match="table routes: index network holds addresses and networks of ip"):
        write(table, to("two", "10.1.0.0/16"), Route("bad", (value,)))
    assert names(table.all()) == ["one"]
    assert table.sorted_by("name").values() == ["one"]
    assert names(table.lpm("network").within("0.0.0.0/0")) == ["one"]


def test_values_that_cannot_be_compared_are_refused_and_nothing_is_written() -> None:
    table: Table[str, tuple[str, Any]] = Table(
        "mixed",
        key=lambda row: row[0],
        indexes={"first": Sorted(lambda row: [row[0]]), "it": Sorted(lambda row: [row[1]])},
    )
    write(table, ("a", 1))
    with pytest.raises(TypeError, match=r"^table mixed: index it is sorted, and a value cannot be compared"):
        write(table, ("b", 2), ("c", "two"))
    assert table.sorted_by("it").values() == [1]
    assert table.sorted_by("first").values() == ["a"]
    write(table, ("b", 2))
    assert table.sorted_by("it").range() == [("a", 1), ("b", 2)]


def test_ten_thousand_values_stay_in_order() -> None:
    order = SortedValues()
    numbers = [(number * 7919) % 10_007 for number in range(10_007)]
    for number in numbers:
        order.add(number)
    assert list(order) == sorted(numbers)
    assert list(order.starting_at(5000.5))[:2] == [5001, 5002]
    for number in numbers[::2]:
        order.remove(number)
    assert list(order) == sorted(numbers[1::2])


networks = st.builds(
    lambda number, length: ip_network((number, length), strict=False),
    st.integers(0, 2**32 - 1).map(lambda number: number & 0x0300_0003),
    st.sampled_from((0, 6, 7, 8, 30, 31, 32)),
)
addresses = networks.map(lambda network: network.network_address)
writes = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.none() | st.lists(networks, max_size=3).map(tuple)), max_size=4
)


@given(transactions=st.lists(writes, max_size=8), address=addresses, network=networks)
def test_lpm_and_sorted_equal_a_plain_search(
    transactions: list[list[tuple[str, tuple[Network, ...] | None]]], address: Any, network: Any
) -> None:
    table = routes()
    for transaction in transactions:
        with table.txn() as txn:
            for name, given_networks in transaction:
                if given_networks is None:
                    txn.delete(name)
                else:
                    txn.put(Route(name, given_networks, metric=len(given_networks)))
    for rows in (table, table.snapshot()):
        every = {route: set(route.networks) for route in rows.all()}
        by_network = rows.lpm("network")
        around = {one for found in every.values() for one in found if address in one}
        best = max(around, key=lambda one: one.prefixlen, default=None)
        holders = {route.name for route, found in every.items() if best in found}
        if len(holders) > 1:
            with pytest.raises(LookupError):
                by_network.longest(address)
        else:
            longest = by_network.longest(address)
            assert ({longest.name} if longest else set()) == holders
        assert set(names(by_network.covering(network))) == {
            route.name for route, found in every.items() if any(network.subnet_of(one) for one in found)
        }
        assert set(names(by_network.within(network))) == {
            route.name for route, found in every.items() if any(one.subnet_of(network) for one in found)
        }
        assert names(rows.sorted_by("name").range("b", "e")) == sorted(
            route.name for route in every if "b" <= route.name < "e"
        )
        assert rows.sorted_by("name").values() == sorted(route.name for route in every)
        assert ip_address(address) in by_network or not any(
            one.prefixlen == 32 and address in one for found in every.values() for one in found
        )


def test_a_page_follows_on_the_one_before_whatever_comes_and_goes() -> None:
    table = routes(*(to(f"r{number:02}") for number in range(10)))
    by_name = table.sorted_by("name")
    seen, after = [], None
    for _ in range(3):
        page = by_name.page(4, after)
        seen.append(names(page.rows))
        after = page.after
        with table.txn() as txn:
            txn.delete(page.rows[-1].name)
            txn.put(to("r00a"))
    assert [name for page in seen for name in page] == [f"r{number:02}" for number in range(10)]
    assert after is None
    assert by_name.page(20) == (table.sorted_by("name").range(), None)
    with pytest.raises(ValueError, match="expected 1 or more"):
        by_name.page(0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5))), st.integers(1, 7))
def test_pages_are_the_whole_range(rows: list[tuple[int, int]], size: int) -> None:
    table = routes(*(Route(f"r{number}", (), metric) for number, metric in rows))
    by_name, found, after = table.sorted_by("name"), [], None
    while True:
        page = by_name.page(size, after)
        found += page.rows
        if (after := page.after) is None:
            break
    assert found == by_name.range()


def test_an_index_is_a_value_that_is_up_to_date() -> None:
    table = routes(to("a+b"), to("b"))
    by_part: Lookup[str, str, Route] = table.lookup("part", lambda route: route.name.split("+"))
    assert names(by_part.get("a")) == ["a+b"]
    assert sorted(names(by_part.any(["a", "b", "c"]))) == ["a+b", "b"]
    write(table, to("c"))
    assert by_part.one("c") == to("c")
    assert (sorted(by_part.values()), "c" in by_part, by_part.keys("c")) == (["a", "b", "c"], True, ["c"])
    assert names(table.by("part").get("c")) == names(table.snapshot().by("part").get("c")) == ["c"]
    with pytest.raises(LookupError, match="2 rows have part 'b'"):
        by_part.one("b")
    with pytest.raises(ValueError, match="has an index 'part' already"):
        table.lookup("part", lambda route: route.networks)


def test_a_derived_table_has_lookups_and_other_keys() -> None:
    table = routes(Route("a", (), 1), Route("b", (), 2))
    by_metric = table.rekey(lambda route: route.metric)
    by_name = by_metric.lookup("name", lambda route: [route.name])
    write(table, Route("c", (), 3))
    assert by_metric.get(3) == by_name.one("c") == Route("c", (), 3)
    write(table, Route("d", (), 3))
    with pytest.raises(ValueError, match="3"):
        by_metric.all()


def test_a_lookup_with_a_failing_function_is_not_created() -> None:
    table = routes(Route("a", ()))
    with pytest.raises(ZeroDivisionError):
        table.lookup("part", lambda route: [1 // 0])
    write(table, Route("b", ()))
    with pytest.raises(LookupError, match="no index 'part'"):
        table.by("part")


def test_a_snapshot_that_is_held_stays_as_it_was_when_an_index_is_added() -> None:
    table = routes(to("a"))
    held = table.snapshot()
    table.lookup("part", lambda route: [route.name])
    write(table, to("b"))
    assert names(held.all()) == ["a"]
    assert names(table.snapshot().by("part").get("b")) == ["b"]
    with pytest.raises(LookupError, match="no index 'part'"):
        held.by("part")
