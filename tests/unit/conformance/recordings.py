"""The recordings of Cilium's clients, and whether the server test replays each.

Every file of index.json (API clients: cni/ and dbg/) is replayed or excluded with a reason.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from tests.support.recordings import INDEX, recorded, recordings

Json = Any
"""A decoded recording, or a part of one."""

CLOUD: Final = "cloud IPAM: out of scope"
NO_REQUEST: Final = "no request reaches the agent"
STUB_FAULT: Final = "the recorded agent answers what ours never does"
BROKEN: Final = "the recorded answer is broken on purpose, to see what the client makes of it"
MONITOR: Final = "the monitor socket: replayed in tests/unit/monitor"
SERVICES: Final = "changes services: replayed in tests/integration/services"
BGP: Final = "routes and peers are those of a speaker: tests/unit/bgp/test_rest.py"
NO_SUBSYSTEM: Final = "of a subsystem that is not built yet: answered as if it had nothing"
HEALTH_DAEMON: Final = "our table of health is there, and never empty"
NO_TABLE: Final = "a table of what is not built: 404, and the reason"
BY_OBJECTS: Final = "rules come from objects of the cluster alone: refused, and the words tell so"
CHANGES: Final = "changes options that this agent has not got, and refuses"

EXCLUDED_CNI: Final = {
    "add_agent_503": "GET /config is answered as soon as there is a socket",
    "add_agent_down": NO_REQUEST,
    "add_eni_ipam": CLOUD,
    "add_eni_ipam_missing_master_mac": CLOUD,
    "add_mac_override_invalid": BROKEN,
    "add_unknown_args_no_ignore": NO_REQUEST,
    "check_agent_down": NO_REQUEST,
    "del_queue_full": NO_REQUEST,
    "del_queue_locked_client1.17": NO_REQUEST,
    "fail_config_status_null": BROKEN,
    "fail_config_without_addressing": BROKEN,
    "fail_config_without_datapathmode_client1.17": BROKEN,
    "fail_ipam_403_500": STUB_FAULT,
    "fail_ipam_incomplete": BROKEN,
    "fail_put_timeout": STUB_FAULT,
    "gc_client1.17": NO_REQUEST,
    "status_client1.17": NO_REQUEST,
    "version_client1.17": NO_REQUEST,
}

EXCLUDED_DBG: Final = {
    "policy_get_labels": "the recorded rules were put by hand; rules by labels are in tests/unit/policy",
    "config_list_options": NO_REQUEST,
    "config_num_pages": CHANGES,
    "content_type_missing": BROKEN,
    "endpoint_config_list_options": NO_REQUEST,
    "endpoint_config_set": CHANGES,
    "endpoint_get_unknown_prefix": NO_REQUEST,
    "error_body_as_object": BROKEN,
    "metrics_list_404": "metrics are always listed",
    "monitor": MONITOR,
    "monitor_json": MONITOR,
    "bgp_peers": BGP,
    "bgp_peers_500": BGP,
    "bgp_route_policies": BGP,
    "bgp_routes_advertised": BGP,
    "bgp_routes_default": BGP,
    "bgp_route_policies_client1.19": BGP,
    "identity_list_520": "there is no cluster-wide allocator that could fail",
    "policy_delete_all": BY_OBJECTS,
    "policy_import": BY_OBJECTS,
    "policy_import_460": BY_OBJECTS,
    "prefilter_list": NO_SUBSYSTEM,
    "prefilter_update": NO_SUBSYSTEM,
    "recorder_delete": NO_SUBSYSTEM,
    "recorder_update": NO_SUBSYSTEM,
    "service_delete": SERVICES,
    "service_get": SERVICES,
    "service_update": SERVICES,
    "service_update_new": SERVICES,
    "statedb_bandwidth_qdiscs": NO_TABLE,
    "statedb_dump": "every table is dumped here",
    "statedb_health_client1.19": "every table is dumped here",
    "statedb_health_empty": HEALTH_DAEMON,
    "statedb_ipsets": NO_TABLE,
    "statedb_nat_stats": NO_TABLE,
    "statedb_node_addresses": "it takes devices with addresses: see tests/node/agent/test_cilium_tables.py",
    "statedb_table_404": HEALTH_DAEMON,
    "status_verbose_with_health_ep_empty_table": HEALTH_DAEMON,
    "status_verbose_with_health_ep_empty_table_client1.19": HEALTH_DAEMON,
    "status_with_health_ep_empty_table": HEALTH_DAEMON,
    "status_with_health_ep_statedb_404": HEALTH_DAEMON,
    "status_agent_503": "our socket does not exist before the agent serves",
    "status_brief_unreachable": NO_REQUEST,
    "status_empty_object": BROKEN,
    "status_hubble_uptime_as_number": BROKEN,
    "status_unreachable": NO_REQUEST,
    "unknown_json_keys": STUB_FAULT,
    "version_daemon_down": NO_REQUEST,
}

PLACEHOLDERS: Final = {
    "<MAC:pod:eth0>": "02:00:00:00:00:02",
    "<MAC:host:lxc>": "02:00:00:00:00:01",
    "<HOST_IFINDEX>": 12,
    "<IFINDEX>": 12,
    "<NETNS_COOKIE>": "4242",
}


def _reason(name: str) -> str | None:
    """Return why a recording is not replayed, or None."""
    directory, _, scenario = name.partition("/")
    return (EXCLUDED_CNI if directory == "cni" else EXCLUDED_DBG).get(scenario)


def _decide() -> tuple[tuple[str, ...], dict[str, str]]:
    index = json.loads(INDEX.read_text())
    names = [row["file"].removesuffix(".json") for row in index["cni"] + index["dbg"]]
    reasons = {name: _reason(name) for name in names}
    replayed = tuple(name for name, reason in reasons.items() if reason is None)
    return replayed, {name: reason for name, reason in reasons.items() if reason is not None}


REPLAYED, EXCLUDED = _decide()
COPIED: Final = tuple(
    sorted(f"{area}/{path.stem}" for area in ("cni", "dbg") for path in recordings(area).glob("[!_]*.json"))
)
"""All recordings in the repository: the replayed ones, and some that only the model test reads."""


@cache
def load(name: str) -> Json:
    """Load a recording such as ``cni/add_netkit``."""
    return json.loads(recorded(name).read_text())


def steps(name: str) -> list[Json]:
    """Return the commands of a recording, each with its exchanges; a dbg recording is one command."""
    recording = load(name)
    return list(recording.get("steps", [recording]))


def exchanges(name: str) -> list[Json]:
    """Return all requests and responses of a recording, in order."""
    return [exchange for step in steps(name) for exchange in step["exchanges"]]


def numbered(value: Json) -> Json:
    """Return the value with a real address, index or cookie for every placeholder."""
    if isinstance(value, dict):
        return {key: numbered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbered(item) for item in value]
    return PLACEHOLDERS.get(value, value) if isinstance(value, str) else value
