"""Names for the agent's numbers and addresses: pods, services, nodes, labels."""

import difflib
import time
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import click

from hive.client import RefusedError, ask

HELD: Final = 10.0
"""Seconds for which names are cached."""
_PAUSE: Final = 1.0
"""Seconds between two queries for a missing name."""
_SERVED_AT: Final = {"ClusterIP", "LoadBalancer", "ExternalIPs"}
"""Types of services with an address of their own, not a node's."""
_MOST: Final = 5
"""Maximum number of candidates in an error."""


def pod_of(endpoint: dict[str, Any]) -> str:
    """Return ``namespace/name`` of an endpoint's pod; ``host`` and similar for other endpoints; empty without
    a name.
    """
    status = endpoint.get("status", {})
    name: str = (status.get("external-identifiers") or {}).get("pod-name", "").strip("/")
    labels = (status.get("labels") or {}).get("security-relevant") or ()
    reserved = (label for label in labels if label.startswith("reserved:"))
    return name or next(reserved, "").removeprefix("reserved:")


def service_of(one: dict[str, Any]) -> str:
    """Return ``namespace/name`` of a frontend's service."""
    flags = one["spec"].get("flags") or {}
    return f"{flags.get('namespace', '')}/{flags.get('name', '')}".strip("/")


def labels_text(labels: Iterable[str]) -> str:
    """Return the labels that distinguish identities, without those that Cilium adds to all pods."""
    short = [label.removeprefix("k8s:").removeprefix("reserved:") for label in labels]
    own = [label for label in short if not label.startswith(("io.kubernetes.", "io.cilium."))]
    return ", ".join(own or [label for label in short if label.startswith("io.kubernetes.pod.namespace")])


class Names:
    """Names from the agent, requested on first use; empty without an agent."""

    def __init__(self, agent_socket: Path, timeout: float, *, quiet: bool = False) -> None:
        """``quiet``: print no note that names are missing, where an agent need not run."""
        self._socket, self._timeout, self._quiet = agent_socket, timeout, quiet
        self._silent = False
        self._held: dict[str, tuple[float, dict[Any, str]]] = {}
        self._missing: set[tuple[str, object]] = set()

    def endpoint(self, number: int) -> str:
        """Return the pod of an endpoint of this node, or its kind; empty if unknown."""
        return self._find("/v1/endpoint", number, _pods)

    def identity(self, number: int) -> str:
        """Return the short labels of an identity; empty if unknown."""
        return self._find("/v1/identity", number, _labels)

    def address(self, address: str) -> str:
        """Return the pod, service or node with an address; empty if unknown."""
        return (
            self.pod(address)
            or self._find("/v1/service", address, _service_addresses)
            or self._find("/v1/cluster/nodes", address, _node_addresses)
        )

    def pod(self, address: str) -> str:
        """Return the pod with an address, on any node; empty if unknown."""
        return self._find("/v1/ip", address, _pod_addresses)

    def _find(self, path: str, key: object, names: Callable[[Any], dict[Any, str]]) -> str:
        asked, known = self._held.get(path, (-HELD, {}))
        age = time.monotonic() - asked
        new = key not in known and (path, key) not in self._missing
        if not self._silent and (age > HELD or (new and age > _PAUSE)):
            if age > HELD:
                self._missing.clear()
            known = names(self._ask(path))
            self._held[path] = time.monotonic(), known
            if key not in known:  # most likely an address outside the cluster: not requested again soon
                self._missing.add((path, key))
        return known.get(key, "")

    def _ask(self, path: str) -> Any:
        try:
            return ask(path, self._socket, timeout=self._timeout) or ()
        except RefusedError as error:
            if error.status == 404:  # it does not exist yet
                return ()
            self._give_up(error)
        except click.ClickException as error:
            self._give_up(error)
        return ()

    def _give_up(self, error: click.ClickException) -> None:
        self._silent = True
        if not self._quiet:
            click.echo(f"names are not shown: {error.message}", err=True)


def _pods(found: Sequence[dict[str, Any]]) -> dict[Any, str]:
    return {one["id"]: pod_of(one) for one in found}


def _labels(found: Sequence[dict[str, Any]]) -> dict[Any, str]:
    return {one["id"]: labels_text(one.get("labels") or ()) for one in found}


def _pod_addresses(found: Sequence[dict[str, Any]]) -> dict[Any, str]:
    return {one["cidr"].partition("/")[0]: name for one in found if (name := prefix_pod(one))}


def prefix_pod(one: dict[str, Any]) -> str:
    """Return ``namespace/name`` of the pod of a prefix of /v1/ip; empty for others."""
    metadata = one.get("metadata") or {}
    return "/".join(filter(None, (metadata.get("namespace"), metadata.get("name"))))


def _service_addresses(found: Sequence[dict[str, Any]]) -> dict[Any, str]:
    return {
        one["spec"]["frontend-address"].get("ip", ""): service_of(one)
        for one in found
        if (one["spec"].get("flags") or {}).get("type") in _SERVED_AT
    }


def _node_addresses(answer: Any) -> dict[Any, str]:
    names = {}
    for node in (answer or {}).get("nodes-added") or ():
        primary = node.get("primary-address") or {}
        elements = [primary.get("ipv4"), primary.get("ipv6"), *(node.get("secondary-addresses") or ())]
        for element in elements:
            if element and element.get("ip"):
                names[element["ip"]] = f"node {node['name'].rpartition('/')[2]}"
    return names


def endpoint_number(text: str, agent_socket: Path, timeout: float) -> str:
    """Return the number of an endpoint that is given by number, pod name or address.

    Cilium's own forms, such as ``container-id:...``, are returned unchanged. Raises click.ClickException,
    with similar names.
    """
    if text.isdigit() or (":" in text and not _is_address(text)):
        return text
    endpoints = ask("/v1/endpoint", agent_socket, timeout=timeout)
    if _is_address(text):
        found = [one for one in endpoints if _has_address(one, text)]
    else:
        found = [one for one in endpoints if _matches(text, pod_of(one))]
    names = sorted(pod_of(one) for one in endpoints)
    _check("pod", text, [f"{pod_of(one)} (endpoint {one['id']})" for one in found], names, "endpoint")
    return str(found[0]["id"])


def _has_address(endpoint: dict[str, Any], text: str) -> bool:
    pairs = (endpoint["status"].get("networking") or {}).get("addressing") or ()
    wanted = ip_address(text)
    return any(ip_address(one) == wanted for pair in pairs for one in _families(pair))


def _families(pair: dict[str, str]) -> list[str]:
    return [pair[family] for family in ("ipv4", "ipv6") if pair.get(family)]


def services_of(text: str, agent_socket: Path, timeout: float) -> list[dict[str, Any]]:
    """Return the frontends of a service that is given by name, address or ADDRESS:PORT.

    Raises click.ClickException, with similar names.
    """
    frontends = ask("/v1/service", agent_socket, timeout=timeout)
    found = [one for one in frontends if _matches(text, service_of(one)) or text in _addresses(one)]
    by_name = [one for one in found if _matches(text, service_of(one))]
    names = sorted({service_of(one) for one in frontends} - {""})
    chosen = sorted({service_of(one) for one in by_name}) or [""] * bool(found)
    _check("service", text, chosen, names, "service")
    return sorted(found, key=lambda one: int(one["spec"]["id"]))


def _addresses(one: dict[str, Any]) -> set[str]:
    frontend = one["spec"]["frontend-address"]
    address, port = frontend.get("ip", ""), frontend.get("port", 0)
    return {address, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"}


def _matches(text: str, name: str) -> bool:
    """Whether the text is a name, or its part after the namespace."""
    return text in (name, name.rpartition("/")[2])


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _check(kind: str, text: str, found: Sequence[str], names: Sequence[str], command: str) -> None:
    """Raise click.ClickException unless there is one candidate."""
    if len(found) == 1:
        return
    if found:
        raise click.ClickException(f"{text} is several {kind}s: name one of {', '.join(found[:_MOST])}")
    if _is_address(text.rpartition(":")[0] if text.count(":") == 1 else text):
        raise click.ClickException(f"no {kind} here has the address {text}; hive {command} list shows all")
    short = {name.rpartition("/")[2]: name for name in names}
    near = [name for name in names if text in name]
    near += [short.get(one, one) for one in difflib.get_close_matches(text, [*short, *names], _MOST)]
    candidates = ", ".join(list(dict.fromkeys(near))[:_MOST])
    where = " on this node" if kind == "pod" else ""
    hint = f"; did you mean {candidates}?" if candidates else f"; hive {command} list shows all"
    raise click.ClickException(f"there is no {kind} {text}{where}{hint}")
