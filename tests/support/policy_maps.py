"""For tests that write one policy map at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cells.policy.maps import PolicyEntries


def write_singly(
    write: Callable[[int, PolicyEntries], None], wanted: Mapping[int, PolicyEntries]
) -> dict[int, OSError]:
    """Implements PolicyMapPool.write_all() by PolicyMapPool.write()."""
    failed = {}
    for number, entries in wanted.items():
        try:
            write(number, entries)
        except OSError as error:
            failed[number] = error
    return failed
