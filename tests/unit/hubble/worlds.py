"""The recorded worlds: the addresses, identities and services that the parser can look up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from ipaddress import ip_address
from typing import Any

from cells.hubble.flow import FlowService
from cells.hubble.parser.resolver import DecidingRules, EntryKey, LocalEndpoint, Resolver, workload_of
from tests.unit.hubble.recordings import recording


def _workload(pod: dict[str, Any] | None) -> Any:
    if pod is None:
        return None
    owners = pod.get("owner_references") or []
    owner = next(((each["kind"], each["name"]) for each in owners if each.get("controller")), None)
    return workload_of(pod.get("generate_name", ""), owner, pod.get("labels") or {})


def _local(row: dict[str, Any]) -> LocalEndpoint:
    return LocalEndpoint(
        row["id"],
        row["identity"],
        row["namespace"],
        row["pod_name"],
        tuple(row["labels"] or ()),
        _workload(row.get("pod")),
    )


class World(Resolver):
    """A resolver of recorded answers."""

    def __init__(self, rows: dict[str, Any]) -> None:
        super().__init__()
        self._rows = {name: value or [] for name, value in rows.items() if name != "no_getters"}

    def _find(self, table: str, **values: object) -> dict[str, Any] | None:
        rows: list[dict[str, Any]] = self._rows[table]
        return next((row for row in rows if all(row[key] == value for key, value in values.items())), None)

    def local_endpoint(self, address: str) -> LocalEndpoint | None:
        row = next((row for row in self._rows["endpoints"] if address in row["ips"]), None)
        return None if row is None else _local(row)

    def endpoint(self, number: int) -> LocalEndpoint | None:
        row = self._find("endpoints", id=number)
        return None if row is None else _local(row)

    def identity_at(self, address: str) -> int:
        row = self._find("ipcache", ip=address)
        return (row and row["identity"]) or 0

    def pod_at(self, address: str) -> tuple[str, str]:
        row = self._find("ipcache", ip=address) or {}
        return row.get("namespace", ""), row.get("pod_name", "")

    def labels_of(self, identity: int) -> Sequence[str]:
        row = self._find("identities", id=identity)
        return tuple(row["labels"]) if row else ()

    def service_at(self, address: str, port: int) -> FlowService | None:
        row = self._find("services", ip=address, port=port)
        return FlowService(name=row["name"], namespace=row["namespace"]) if row else None

    def names_at(self, endpoint: int, address: str) -> Sequence[str]:
        row = self._find("dns", endpoint_id=endpoint, ip=address)
        return tuple(row["names"]) if row else ()

    def link_name(self, index: int) -> str:
        row = self._find("links", index=index)
        return str(row["name"]) if row else ""

    def addresses_of_cgroup(self, cgroup: int) -> Sequence[str]:
        row = self._find("cgroups", cgroup_id=cgroup)
        return [each for each in (row["ips"] if row else None) or [] if _is_address(each)]

    def rules(self, endpoint: int, entry: EntryKey, address: str, *, egress: bool) -> DecidingRules | None:
        del address  # no network selects pods there
        row = self._find("endpoints", id=endpoint)
        for known in (row or {}).get("policy", ()):
            port = None if known.get("port_wildcard") else known["port"]
            key = EntryKey(known["identity"], port, known["proto"])
            if (known["direction"] == "egress", key) == (egress, entry):
                assert row is not None
                return DecidingRules(known["rule_labels"], row.get("policy_revision", 0))
        return None


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


@cache
def world(name: str) -> Resolver:
    """Return a world by its name."""
    return World(recording("worlds")["worlds"][name])
