"""Another datapath put in force under traffic, the agent killed for it: nothing is lost."""

from __future__ import annotations

import pytest

from hive.lab import pods
from hive.lab.node import Lab
from hive.lab.upgrade import RATE, second_build, upgrade
from tests.support.account import agreed

pytestmark = pytest.mark.node


def test_an_upgrade_loses_nothing(lab: Lab) -> None:
    source, target = pods.add(lab, "source"), pods.add(lab, "target")
    seen = upgrade(lab, source, target, second_build(lab))
    assert seen.sent.packets > 2 * RATE
    assert seen.sent.errors == 0
    assert seen.lost == 0
    assert (seen.received.duplicates, seen.received.reordered) == (0, 0)
    assert seen.read.continuous
    assert seen.read.octets == seen.written.octets > 0
    assert seen.after.lasting_maps == seen.before.lasting_maps
    assert seen.after.dispatchers == seen.before.dispatchers
    assert not set(seen.after.entries.values()) & set(seen.before.entries.values())
    assert {ip for ip, _, _ in agreed(lab).listed.values()} == {source.ipv4, target.ipv4}
