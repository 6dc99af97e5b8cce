"""Marked packets are delivered to the node itself; pyroute2 is imported late."""

import socket
import subprocess
import sys

import pytest

from cells.netlink.network import FwmarkRule, add_local_delivery, remove_local_delivery
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


def marked_ways() -> tuple[set[str], set[str]]:
    """Rules with a mark, and routes of the table 2004, as ip shows them."""
    shown = (
        subprocess.run(["ip", family, *asked], check=False, capture_output=True, text=True).stdout
        for family in ("-4", "-6")
        for asked in (["rule", "show", "priority", "9"], ["route", "show", "table", "2004"])
    )
    rules4, routes4, rules6, routes6 = (
        {" ".join(each.split()) for each in one.splitlines()} for one in shown
    )
    return rules4 | rules6, routes4 | routes6


async def test_marked_packets_are_taken_and_left_however_often_that_is_asked(in_node: None) -> None:
    marked = FwmarkRule(mark=0x200, mask=0xF00, table=2004, priority=9)
    both = (socket.AF_INET, socket.AF_INET6)
    for _ in range(2):
        add_local_delivery(marked, both)
        rules, routes = marked_ways()
        assert rules == {"9: from all fwmark 0x200/0xf00 lookup 2004"}
        assert {each.split(" metric")[0] for each in routes} == {
            "local default dev lo proto static scope host",
            "local default dev lo proto static",
        }
    for _ in range(2):
        remove_local_delivery(marked, both)
        assert marked_ways() == (set(), set())


def test_the_netlink_library_is_loaded_on_first_use() -> None:
    code = "import sys; import cells.agent; sys.exit('pyroute2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
