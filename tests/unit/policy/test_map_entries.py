"""Computed entries in the layout of policy maps."""

from __future__ import annotations

from cells.cluster.identity.numbers import HOST
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy.compute import Entry, Key, PortKey, Redirect
from cells.policy.compute.map_state import map_entry, map_key

WEB = PolicyKey(identity=300, egress=False, protocol=6, port=80, port_bits=16)


def test_computed_entries_become_those_of_the_map() -> None:
    http = Entry(redirect=Redirect(0, 10080, "cilium-http-ingress"), auth=1)
    computed = [
        (Key(300, PortKey(6, 80, 16)), False, http),
        (Key(HOST, PortKey()), False, Entry()),
        (Key(0, PortKey(17)), True, Entry(deny=True, auth=2)),
    ]
    entries = {map_key(key, egress=egress): map_entry(entry) for key, egress, entry in computed}
    assert entries == {
        WEB: PolicyEntry(proxy_port=10080, auth_type=1),
        PolicyKey(identity=HOST, egress=False): PolicyEntry(),
        PolicyKey(identity=0, egress=True, protocol=17): PolicyEntry(deny=True),
    }
    for key, entry in entries.items():
        assert PolicyKey.unpack(key.pack()) == key
        assert PolicyEntry.unpack(entry.pack(key)) == entry
