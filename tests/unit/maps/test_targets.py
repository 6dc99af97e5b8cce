"""Rows that a reconciler writes by a MapTarget."""

import errno

import pytest

from cells.maps.bpf import BpfError
from cells.maps.map import MapSpec, MapType
from cells.maps.target import BYTES, MapTarget
from lifecycle import BatchError
from tests.support.fake_map import FakeMap

SPEC = MapSpec("cilium_some", MapType.HASH, 1, 1, 256, invalidates=0)


class Refusing(FakeMap[bytes, bytes]):
    """Without room for one key."""

    def refuse(self, what: str, key: bytes) -> None:
        if what == "update" and key == b"c":
            raise BpfError(errno.E2BIG, "update", "map cilium_some")


def target(made: FakeMap[bytes, bytes]) -> MapTarget[bytes, bytes, bytes]:
    return MapTarget(lambda: (made,), BYTES, BYTES, lambda row: row)


@pytest.mark.parametrize("number", [1, 4, 26])
def test_rows_are_written_and_removed_and_invalidate_verdicts_once(number: int) -> None:
    made: FakeMap[bytes, bytes] = FakeMap(SPEC)
    rows = {bytes([97 + each]): b"x" for each in range(number)}
    target(made).write_now(rows)
    assert dict(made.rows) == rows
    assert made.invalidated == 1
    target(made).write_now(dict.fromkeys(rows))
    assert not made.rows


@pytest.mark.parametrize("number", [4, 26])
def test_one_refused_row_keeps_no_other_back(number: int) -> None:
    made = Refusing(SPEC)
    rows = {bytes([97 + each]): b"x" for each in range(number)}
    with pytest.raises(BatchError) as refused:
        target(made).write_now(rows)
    assert list(refused.value.failures) == [b"c"]
    assert dict(made.rows) == {key: row for key, row in rows.items() if key != b"c"}


@pytest.mark.parametrize("number", [4, 26])
def test_rows_may_be_written_and_removed_together(number: int) -> None:
    made: FakeMap[bytes, bytes] = FakeMap(SPEC)
    target(made).write_now({b"a": b"x", b"b": b"x"})
    target(made).write_now({b"a": None} | {bytes([98 + each]): b"y" for each in range(number)})
    assert dict(made.rows) == {bytes([98 + each]): b"y" for each in range(number)}
