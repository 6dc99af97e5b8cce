"""`cilium-dbg service update` and `delete`: requests, texts and refusals of Cilium's client."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from hive.dbg.main import run
from tests.unit.conformance.replayed_agent import replaying

DEPRECATED = "Deprecation warning: --id parameter will change from int to string in v1.14\n"
FLAGS = {
    "type": "ClusterIP",
    "trafficPolicy": "Cluster",
    "extTrafficPolicy": "Cluster",
    "intTrafficPolicy": "Cluster",
}
NO_FRONTEND = {"ip": "<nil>", "protocol": "tcp", "scope": "external"}
NEW = "service update --id 7 --frontend 10.96.0.7:80"


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The socket of an agent that a test runs."""
    socket = tmp_path / "cilium.sock"
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{socket}")
    return socket


def called(socket: Path, words: str, answers: dict[str, tuple[int, Any]]) -> tuple[int, list[Any]]:
    """Run a command beside an agent with these answers; return its exit code and its requests."""
    exchanges = []
    for request, (status, body) in answers.items():
        method, path = request.split()
        exchanges.append(
            {
                "request": {"method": method, "path": f"/v1/{path}"},
                "response": {"status": status, "body": body},
            }
        )
    with replaying(socket, exchanges) as asked:
        return run(words.split()), asked


def test_states_of_backends_are_set_in_all_services(agent: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "service update --backends 10.0.1.5:80,[fd00::5]:81 --backends 10.0.1.6:82 --states Quarantined"
    answers = {"GET service/0": (404, None), "PUT service/0": (200, None)}
    code, asked = called(agent, words, answers)
    assert (code, asked[0][:2]) == (0, ("GET", "/v1/service/0"))
    assert asked[1][2] == {
        "frontend-address": NO_FRONTEND,
        "flags": FLAGS,
        "updateServices": True,
        "backend-addresses": [
            {"ip": ip, "port": port, "state": "Quarantined", "weight": 100}
            for ip, port in (("10.0.1.5", 80), ("fd00::5", 81), ("10.0.1.6", 82))
        ],
    }
    printed = f"{DEPRECATED}Updating backend states \nUpdated service with 3 backends\n"
    assert capfd.readouterr() == (printed, "")


def test_a_service_has_policies_by_name_and_backends_of_the_standard_input(
    agent: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"10.0.1.5:80\n10.0.1.6:80\n")))
    words = f"{NEW} --k8s-load-balancer --k8s-ext-traffic-policy LOCAL --k8s-int-traffic-policy any"
    answers = {"GET service/7": (500, "down"), "PUT service/7": (201, None)}
    code, asked = called(agent, f"{words} --states active,maintenance --k8s-cluster-internal", answers)
    assert code == 0
    assert asked[1][2] == {
        "id": 7,
        "frontend-address": {"ip": "10.96.0.7", "port": 80, "protocol": "tcp", "scope": "internal"},
        "flags": FLAGS | {"type": "LoadBalancer", "trafficPolicy": "Local", "extTrafficPolicy": "Local"},
        "backend-addresses": [
            {"ip": "10.0.1.5", "port": 80, "state": "active", "weight": 100},
            {"ip": "10.0.1.6", "port": 80, "state": "maintenance", "weight": 100},
        ],
    }
    assert capfd.readouterr().out.splitlines()[1:] == [
        "Creating new service with id '7'",
        "Reading backend list from stdin...",
        "Added service with 2 backends",
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("service update --backends 10.0.1.5:80", "Cannot update empty backend states"),
        (
            "service update --frontend 10.0.0.1",
            "Unable to parse frontend address: address 10.0.0.1: missing port in address\n",
        ),
        (
            "service update --frontend fd00::1:80",
            "Unable to parse frontend address: address fd00::1:80: too many colons in address\n",
        ),
        (
            f"{NEW} --backends 10.0.1.5:x",
            'Cannot parse backend address "10.0.1.5:x": lookup tcp/x: unknown port',
        ),
        (
            f"{NEW} --backends 10.0.1.5:70000",
            'Cannot parse backend address "10.0.1.5:70000": address 70000: invalid port',
        ),
        (f"{NEW} --backends 10.0.1.5:80 --states well", "Invalid backend state (well)"),
        (
            f"{NEW} --backends 10.0.1.5:80,10.0.1.6:80 --states active,well",
            "Invalid backend state (well) for backend (10.0.1.6:80)",
        ),
        (
            f"{NEW} --backends 10.0.1.5:80 --states active,active",
            "Invalid number of backend states ([active active]) for backends ([10.0.1.5:80])",
        ),
        (
            f"{NEW} --backends 10.0.1.5:80 --k8s-node-port --local-redirect",
            (
                "Can only set one of --k8s-external, --k8s-node-port, --k8s-load-balancer, --k8s-host-port, "
                "--local-redirect for a service"
            ),
        ),
        (
            f"{NEW} --backends 10.0.1.5:80 --backend-weights 5",
            "Backend weights are supported currently only in lb-only mode",
        ),
        (
            "service update --id 7 --frontend 10.96.0.7:0 --backends 10.0.1.5:80",
            "L4 backend found (10.0.1.5:80) with L3 frontend",
        ),
        (
            f"{NEW} --backends 10.0.1.5:80",
            "Cannot add/update service: [PUT /service/{id}][460] putServiceIdInvalidFrontend  in use",
        ),
    ],
)
def test_wrong_updates_are_refused_in_the_words_of_the_client(
    words: str, reason: str, agent: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "GET service/0": (404, None),
        "GET service/7": (404, None),
        "GET config": (200, {"status": {"datapathMode": "veth"}}),
        "PUT service/7": (460, "in use"),
    }
    assert called(agent, words, answers)[0] == 1
    out, err = capfd.readouterr()
    assert (out.startswith(DEPRECATED), err) == (True, f"Error: {reason}\n")


def test_deletions_that_fail_have_no_other_words_than_the_agents(
    agent: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert called(agent, "service delete 9", {"DELETE service/9": (404, None)})[0] == 1
    reason = "[DELETE /service/{id}][404] deleteServiceIdNotFound "
    assert capfd.readouterr() == (DEPRECATED, f"Error: {reason}\n")
    assert called(agent, "service delete web", {})[0] == 1
    assert capfd.readouterr().err == 'Error: strconv.ParseInt: parsing "web": invalid syntax\n'
    services = [{"status": {"realized": {"id": number}}} for number in (1, 2)]
    answers = {
        "GET service": (200, [*services, {"spec": {"id": 3}}]),
        "DELETE service/1": (500, "down"),
        "DELETE service/2": (200, None),
    }
    code, asked = called(agent, "service delete --all", answers)
    assert (code, [path for _, path, _ in asked]) == (0, ["/v1/service", "/v1/service/1", "/v1/service/2"])
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith('level=error msg="Cannot delete service" error="[DELETE /service/{id}][500] ')
    assert first.endswith(" serviceID=1 subsys=cilium-dbg")
    assert second == 'level=error msg="Skipping service due to empty state" subsys=cilium-dbg'


def test_addresses_of_local_redirects_have_no_brackets(
    agent: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = {"backend-address": {"ip": "fd00::5", "port": 80}, "pod-id": "shop/web-0"}
    mapping = {
        "frontend-address": {"ip": "fd00::1", "port": 53, "protocol": "UDP"},
        "backends": [backend, backend],
    }
    rule = {"namespace": "shop", "name": "dns", "frontend-type": "IP + port", "frontend-mappings": [mapping]}
    assert called(agent, "lrp list", {"GET lrp": (200, [rule])})[0] == 0
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.split(maxsplit=1)[1] == "fd00::1:53/UDP -> " + 2 * "fd00::5:80(shop/web-0), "


def test_a_backend_without_a_state_has_empty_brackets(agent: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = {"id": 1, "flags": {"type": "ClusterIP"}, "backend-addresses": [{"ip": "10.0.1.5", "port": 80}]}
    body = [{"spec": spec, "status": {"realized": spec}}]
    assert called(agent, "service list", {"GET service": (200, body)})[0] == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith("1 => 10.0.1.5:80 ()   ")
