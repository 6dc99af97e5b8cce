"""Overlaps of address ranges, compared with a plain search."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from hypothesis import given
from hypothesis import strategies as st

from cells.base.addresses import SpanIndex

_PAIRS = st.tuples(st.integers(0, 30), st.integers(0, 8), st.sampled_from([IPv4Address, IPv6Address]))


@given(st.lists(_PAIRS, max_size=12), _PAIRS)
def test_spans_that_overlap_are_found_in_their_order(
    spans: list[tuple[int, int, type[IPv4Address] | type[IPv6Address]]],
    wanted: tuple[int, int, type[IPv4Address] | type[IPv6Address]],
) -> None:
    index = SpanIndex((kind(low), kind(low + more), at) for at, (low, more, kind) in enumerate(spans))
    first, more, family = wanted
    assert index.overlapping(family(first), family(first + more)) == [
        at
        for at, (low, length, kind) in enumerate(spans)
        if kind is family and low <= first + more and first <= low + length
    ]
