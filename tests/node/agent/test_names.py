"""Rules that speak of names: what pods may ask for, and where they may go for having asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.client import ask
from hive.lab import agent_process
from hive.lab.agent_process import api_socket
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from tests.support.agents import serving
from tests.support.town import REFUSED, WEB, town
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def test_a_pod_goes_where_dns_said_a_name_is(node: Lab, tmp_path: Path) -> None:
    with town(node, tmp_path) as place:
        assert not place.reaches_web(), "the name is not known yet"
        for tcp in (False, True):
            assert place.look(tcp=tcp).addresses == (OUTSIDE_ADDRESS,)
            assert place.look(tcp=tcp, version=6).addresses == ("2001:db8::80",)
            assert place.look("other.example.com", tcp=tcp).code == REFUSED
        assert place.reaches_web(), "at once: the answer came after the map entries"
        told = ask(f"/hive/policy/explain?source=default/client&destination={WEB}", api_socket(place.pid))
        assert told["allowed"]
        assert told["directions"][0]["rules"] == ["spec.egress[1] of CiliumNetworkPolicy default/names"], (
            "by which rule a name may be gone to"
        )
        assert place.cached == {(f"{WEB}.", ip, "lookup") for ip in (OUTSIDE_ADDRESS, "2001:db8::80")}
        agent_process.crash(place.node)
        assert place.look().addresses == (OUTSIDE_ADDRESS,), "without an agent the server is asked directly"
        assert place.reaches_web()
        place.pid = serving(node, f"--manifests-dir={tmp_path}", "--enable-ipv6=true")
        assert place.reaches_web()
        assert (f"{WEB}.", OUTSIDE_ADDRESS, "lookup") in place.cached
        eventually(lambda: place.look("other.example.com").code == REFUSED)
        ask("/v1/fqdn/cache", api_socket(place.pid), method="DELETE")
        eventually(lambda: not place.reaches_web())
