"""Socket load balancing with random services, against a plain model."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.services import BackendState, ServiceFlag
from tests.kernel.datapath_services.services import Backend
from tests.kernel.sockets.place import HOST, Served, serving
from tests.support.cgroups import cgroup
from tests.support.examples import scaled
from tests.support.namespaces import in_node

__all__ = ["cgroup", "in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

KINDS = {
    "cluster": ServiceFlag(0),
    "node port": ServiceFlag.NODE_PORT,
    "external": ServiceFlag.EXTERNAL_IP,
    "load balancer": ServiceFlag.LOAD_BALANCER,
    "host port": ServiceFlag.HOST_PORT,
    "loopback host port": ServiceFlag.HOST_PORT | ServiceFlag.LOOPBACK,
}
OURS, THEIRS, LOOPBACK, WILDCARD = "192.0.2.1", "192.0.2.9", "127.0.0.1", "0.0.0.0"
PORTS = (80, 30080)
PROTOCOLS = {0: (socket.SOCK_DGRAM, 17), 6: (socket.SOCK_STREAM, 6), 17: (socket.SOCK_DGRAM, 17)}


@dataclass(frozen=True)
class Frontend:
    kind: str
    ip: str
    port: int
    protocol: int
    scope: int
    backends: tuple[BackendState, ...]
    two_scopes: bool = False


@dataclass
class Model:
    """The model of loadbalancing.md for sockets, without affinity."""

    mitigates: bool
    frontends: dict[tuple[str, int, int, int], Frontend] = field(default_factory=dict)

    def at(self, ip: str, port: int, protocol: int) -> Frontend | None:
        for number in (protocol, 0):
            found = self.frontends.get((ip, port, number, 0))
            if found is not None:
                return self.frontends.get((ip, port, number, 1)) if found.two_scopes else found
        return None

    def meant(self, ip: str, port: int, protocol: int) -> Frontend | None:
        found = self.at(ip, port, protocol)
        if found is not None or ip not in (OURS, LOOPBACK):
            return found
        found = self.at(WILDCARD, port, protocol)
        if found is None or ("port" not in found.kind) or (("node" in found.kind) != (port >= 30000)):
            return None
        return None if found.kind == "loopback host port" and ip != LOOPBACK else found

    def allows(self, ip: str, port: int, protocol: int) -> set[int] | int | None:
        """Numbers of the backends that may be chosen, the error, or None: left alone."""
        found = self.meant(ip, port, protocol)
        if found is None:
            return None
        external = found.kind == "external" and self.mitigates
        if (external or ("host port" in found.kind and ip != LOOPBACK)) and ip != OURS:
            return None
        active = {n for n, state in enumerate(found.backends, 1) if state is BackendState.ACTIVE}
        return active or errno.EHOSTUNREACH


frontends = st.builds(
    Frontend,
    st.sampled_from(sorted(KINDS)),
    st.sampled_from((OURS, THEIRS, LOOPBACK, WILDCARD)),
    st.sampled_from(PORTS),
    st.sampled_from(sorted(PROTOCOLS)),
    st.sampled_from((0, 0, 1)),
    st.lists(st.sampled_from((BackendState.ACTIVE, BackendState.TERMINATING)), max_size=3).map(tuple),
    st.booleans(),
)


def fill(node: Served, served: dict[tuple[str, int, int, int], Frontend]) -> None:
    for name in ("services4", "backends4", "reverse_nat4", "affinity_match", "reverse_sk4"):
        getattr(node.maps, name).clear()
    for number, (key, one) in enumerate(served.items(), 1):
        backends = [
            Backend(10 * number + at, f"127.0.{number}.{at}", state=state)
            for at, state in enumerate(one.backends, 1)
        ]
        flags = KINDS[one.kind] | (ServiceFlag.TWO_SCOPES if one.two_scopes else ServiceFlag(0))
        node.services.serve(
            key[0], backends, port=key[1], number=number, protocol=key[2], scope=key[3], flags=flags
        )


def outcome(node: Served, ip: str, port: int, kind: int) -> set[tuple[str, int]] | int:
    with socket.socket(socket.AF_INET, kind) as caller:
        caller.setblocking(False)
        try:
            caller.connect((ip, port))
        except OSError as error:
            if error.errno == errno.EHOSTUNREACH:
                return error.errno
        return node.backends_of(caller)


@pytest.mark.parametrize("mitigates", [False, True])
async def test_any_socket_connects_to_the_backend_of_the_model(
    in_node: None, cgroup: Path, mitigates: bool
) -> None:
    async with serving(
        cgroup,
        disable_external_ip_mitigation=str(not mitigates).lower(),
        service_no_backend_response="drop",  # its error is none that a loopback without listeners has
    ) as node:
        node.belongs_to(OURS, HOST)

        @given(st.lists(frontends, max_size=6))
        @settings(max_examples=scaled(60), deadline=None, derandomize=True, database=None)
        def run(found: list[Frontend]) -> None:
            served = {(one.ip, one.port, one.protocol, one.scope): one for one in found}
            fill(node, served)
            numbers = {key: number for number, key in enumerate(served, 1)}
            model = Model(mitigates, served)
            for ip in (OURS, THEIRS, LOOPBACK):
                for port in PORTS:
                    for kind, protocol in {PROTOCOLS[6], PROTOCOLS[17]}:
                        allowed = model.allows(ip, port, protocol)
                        got = outcome(node, ip, port, kind)
                        if isinstance(allowed, set):
                            one = model.meant(ip, port, protocol)
                            assert one is not None
                            number = numbers[one.ip, one.port, one.protocol, one.scope]
                            assert got in [{(f"127.0.{number}.{at}", 8080)} for at in allowed]
                        else:
                            assert got == (allowed or set())

        run()
