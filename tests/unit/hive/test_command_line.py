"""The hive command line: output, streams and exit codes."""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

from hive.agent.status import lines
from hive.endpoint.command import render
from hive.main import main
from hive.output import fact_lines
from tests.support.command_line import hive
from tests.support.recordings import recordings
from tests.unit.hive.answers import ENDPOINTS, HEALTHY, TREE
from tests.unit.hive.stub_agent import stub_agent


def test_endpoints_are_listed_in_the_columns_operators_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, {"/v1/endpoint": (200, ENDPOINTS)}) as agent:
        result = hive(capsys, "endpoint", "list", "--socket", agent.socket)
    assert result.code == 0
    assert [" ".join(line.split()) for line in result.out.splitlines()] == [
        "ENDPOINT POD POLICY IDENTITY IPv4 IPv6 STATUS LABELS (source:key[=value])",
        "900 shop/db audit-ingress 24584 10.0.1.80 not-ready k8s:app=db",
        "901 store/db none 24585 10.0.1.81 ready k8s:app=db",
        "1234 shop/web-0 both 24583 10.0.1.77 fd00:10:1::77 ready k8s:app=web",
        "k8s:io.kubernetes.pod.namespace=default",
    ]


def test_a_narrow_terminal_gets_labels_below() -> None:
    status = {
        **ENDPOINTS[0]["status"],  # type: ignore[dict-item]
        "networking": {"addressing": [{"ipv4": "10.0.100.177"}]},
        "external-identifiers": {"pod-name": "shop/coredns-668d6bf9bc-x2v4k"},
    }
    lines = [click.unstyle(line) for line in render([{"id": 1234, "status": status}], 60)]
    assert lines == [
        "ENDPOINT   POLICY   IDENTITY   IPv4           STATUS",
        "1234       both     24583      10.0.100.177   ready",
        "    shop/coredns-668d6bf9bc-x2v4k",
        "    k8s:app=web",
        "    k8s:io.kubernetes.pod.namespace=default",
    ]


def test_an_endpoint_without_a_pod_is_named_by_its_reserved_label() -> None:
    status = {
        **ENDPOINTS[1]["status"],  # type: ignore[dict-item]
        "labels": {"security-relevant": ["reserved:health"]},
        "external-identifiers": {"pod-name": "/"},
    }
    assert render([{"id": 900, "status": status}], None)[1].split()[:2] == ["900", "health"]


def test_endpoints_without_a_header_are_rows_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, {"/v1/endpoint": (200, ENDPOINTS[1:])}) as agent:
        all_lines = hive(capsys, "endpoint", "list", "-H", f"unix://{agent.socket}").out.splitlines()
        rows = hive(capsys, "endpoint", "list", "--no-headers", "-H", agent.socket).out.splitlines()
    assert (len(rows), rows) == (2, all_lines[1:])


def test_json_output_is_the_answer_of_the_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, {"/v1/endpoint": (200, ENDPOINTS), "/v1/healthz": (200, HEALTHY)}) as agent:
        listed = hive(capsys, "endpoint", "list", "-o", "json", "-H", agent.socket)
        status = hive(capsys, "status", "-o", "json", "-H", agent.socket)
    assert json.loads(listed.out) == sorted(ENDPOINTS, key=lambda one: int(str(one["id"])))
    assert json.loads(status.out) == HEALTHY


def test_status_shows_what_the_agent_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, {"/v1/healthz": (200, HEALTHY)}) as agent:
        result = hive(capsys, "status", "--verbose", "--socket", agent.socket)
    assert result.code == 0
    assert dict(line.split(":", 1) for line in result.out.splitlines() if "allocated  " not in line) == {
        "CNI Chaining": "        none",
        "CNI Config file": "     successfully wrote CNI configuration file to /x/05-cilium.conflist",
        "Cilium": "              Ok   0.1.0",
        "IPAM": "                IPv4: 2/65534 allocated from 10.10.0.0/16",
        "  allocated": "         10.10.0.5 (router)",
        "Attach Mode": "         Legacy TC",
        "Device Mode": "         veth",
        "Controller Status": "   0/0 healthy",
    }


REPLACEMENT = {
    "mode": "True",
    "deviceList": [{"name": "eth0", "ip": ["192.0.2.1"]}],
    "features": {
        "nodePort": {
            "enabled": True,
            "mode": "SNAT",
            "algorithm": "Random",
            "portMin": 30000,
            "portMax": 32767,
        },
        "socketLB": {"enabled": True},
    },
}


def _policy(name: str, *, valid: bool = True, refused: bool = False, unenforced: str = "") -> object:
    return {"obj": {"name": name, "valid": valid, "refused": refused, "unenforced": unenforced}}


def test_status_shows_what_is_served_and_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = [
        *(_policy("a"), _policy("b")),
        *(_policy("c", valid=False, refused=True), _policy("d", valid=False), _policy("e", unenforced="no")),
    ]
    modules = [
        {"module-id": "agent.dns-proxy.serve", "level": "OK", "message": "running"},
        {"module-id": "agent.dns-proxy.restore", "level": "Stopped", "message": "done"},
        {"module-id": "agent.inner", "level": "Stopped", "message": "not running"},
    ]
    answers = {
        "/v1/healthz": (
            200,
            HEALTHY
            | {
                "modules": modules,
                "kube-proxy-replacement": REPLACEMENT,
                "cluster": {"self": "default/one", "nodes": [{}, {}, {}]},
                "hubble": {
                    "state": "Ok",
                    "observer": {"current-flows": 3, "max-flows": 4095, "seen-flows": 8, "uptime": "1h2m3s"},
                },
            },
        ),
        "/statedb/tables": (
            200,
            [{"name": "frontends", "rows": 4}, {"name": "service-conflicts", "rows": 1}],
        ),
        "/statedb/dump/policies": (200, {"policies": policies}),
        "/statedb/dump/http-proxy": (200, {"http-proxy": [{"obj": {"runs": False, "message": "no Envoy"}}]}),
    }
    with stub_agent(tmp_path, answers) as agent:
        result = hive(capsys, "status", "--socket", agent.socket)
        verbose = hive(capsys, "status", "--verbose", "--socket", agent.socket)
    assert result.code == 0
    shown = {
        name: text.strip() for name, _, text in (line.partition(":") for line in result.out.splitlines())
    }
    assert {
        "KubeProxyReplacement": "True   [eth0 192.0.2.1]   node ports 30000-32767 (SNAT, Random), sockets",
        "Nodes": "3 known, this one is default/one",
        "Services": "4 frontends, 1 conflict (hive db show service-conflicts)",
        "Policies": "2 in force, 1 refused, 2 not enforced as written (hive policy list --refused)",
        "Envoy": "no Envoy",
        "DNS Proxy": "Ok",
        "Hubble": "Ok   3/4095 flows stored, 8 seen",
        "Modules Health": "Stopped(1) Degraded(0) OK(1)   1 job done",
    }.items() <= shown.items()
    assert "agent.dns-proxy.restore:   Done" in verbose.out


def recorded_answer(name: str) -> dict[str, object]:
    """What an agent of Cilium's answered when its status was asked for."""
    found = json.loads((recordings("dbg") / f"{name}.json").read_text())
    body = found["exchanges"][0]["response"]["body"]
    return body if isinstance(body, dict) else json.loads(body)


def test_status_has_what_cilium_dbg_has_on_80_columns() -> None:
    """The facts of recordings, for which ``cilium-dbg status`` prints its own lines."""
    facts = dict(lines(recorded_answer("status_verbose"), verbose=True))
    assert {name: click.unstyle(text) for name, text in facts.items()}.items() >= {
        "KubeProxyReplacement": "True   [eth0 192.0.2.10 2001:db8::10, eth1 198.51.100.10]"
        "   node ports 30000-32767 (SNAT, Random), sockets",
        "Host firewall": "Disabled",
        "IPAM": "IPv4: 3/254 allocated from 10.0.1.0/24",
        "IPv4 BIG TCP": "Disabled",
        "IPv6 BIG TCP": "Enabled   [196608, 131072]",
        "BandwidthManager": "EDT with BPF [BBR]   [eth0]",
        "Routing": "Network: Tunnel [vxlan]   Host: BPF",
        "Masquerading": "BPF (IPv4), not to 10.0.0.0/16",
        "Clock Source for BPF": "ktime",
        "Controller Status": "2/3 healthy",
        "  sync-node-with-ciliumnode": "boom",
        "Proxy Status": "1 redirect on ports 10000-20000, Envoy: external",
        "  cilium-dns-egress": "dns on port 40045",
        "Encryption": "Wireguard   of nodes: Disabled; cilium_wg0 port 51871, 1 peer",
        "  socket LB": "Enabled",
        "  node ports": "Enabled   30000-32767, SNAT, Random, XDP Disabled",
        "BPF maps": "sized by memory, ratio 0.0025",
        "  Auth": "524288 entries",
    }.items()
    quiet = dict(lines(recorded_answer("status_verbose_all_features_off"), verbose=False))
    assert not quiet.keys() & {"IPv4 BIG TCP", "Clock Source for BPF", "Services in detail", "BPF maps"}
    for path in sorted(recordings("dbg").glob("status*.json")):
        exchanges = json.loads(path.read_text())["exchanges"]  # none where no agent answers
        if exchanges and exchanges[0]["response"]["status"] == 200:
            answer = recorded_answer(path.stem)
            for verbose in (False, True):
                shown = [(f"{name}:", text) for name, text in lines(answer, verbose=verbose)]
                wide = [one for one in fact_lines(shown, 80) if len(click.unstyle(one)) > 80]
                assert not wide, (path.stem, wide)


def test_status_lists_remote_clusters_that_are_not_ready() -> None:
    recorded_mesh = json.loads((recordings("clustermesh") / "dbg_status_all_clusters_mixed.json").read_text())
    answer = recorded_mesh["exchanges"][0]["response"]["body"]
    facts = {name: click.unstyle(text) for name, text in lines(answer, verbose=False)}
    assert facts["ClusterMesh"] == "1/3 remote clusters ready   7 global services"
    assert "  east" not in facts
    waiting = "Waiting for initial connection to be established"
    assert facts["  west"] == f"Not ready   {waiting}, 3 reconnections"
    assert facts["  north"].endswith(", no configuration of the cluster yet")
    every = {name: click.unstyle(text) for name, text in lines(answer, verbose=True)}
    assert every["  east"].startswith("Ready   etcd: 1/1 connected")
    assert every["  east"].endswith(", 3 nodes, 10 addresses, 5 identities, 2 services")


def test_status_counts_the_nodes_that_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    well = {"status": "", "latency": 1000}
    away = {"status": "Connection timed out", "latency": 0}

    def node(name: str, path: object) -> dict[str, object]:
        primary = {"ip": "192.0.2.1", "icmp": path, "http": path}
        return {"name": name, "host": {"primary-address": primary}}

    answers = {
        "/v1/healthz": (200, HEALTHY | {"modules": []}),
        "/statedb/tables": (404, ""),
        "/v1beta/status": (200, {"nodes": [node("default/a", well), node("default/b", away)]}),
    }
    with stub_agent(tmp_path, answers) as agent:
        assert "Cluster health:" in hive(capsys, "status", "--socket", agent.socket).out
        (tmp_path / "health.sock").symlink_to(agent.socket)
        out = hive(capsys, "status", "--socket", agent.socket).out
    assert re.search(r"^Cluster health: +1/2 reachable   \(hive health\)$", out, re.MULTILINE), out


def test_status_lists_degraded_modules_without_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = [
        {"module-id": "hive.kubernetes.manifests", "level": "Degraded", "message": "/m/a.yaml:3:4: no YAML"},
        {"module-id": "hive.kubernetes.pods", "level": "OK", "message": "3 pods"},
    ]
    with stub_agent(tmp_path, {"/v1/healthz": (200, HEALTHY | {"modules": modules})}) as agent:
        result = hive(capsys, "status", "--socket", agent.socket)
    assert result.code == 0
    *_, count, degraded = result.out.splitlines()
    assert count.split() == ["Modules", "Health:", "Stopped(0)", "Degraded(1)", "OK(1)"]
    assert degraded.split() == ["hive.kubernetes.manifests:", "Degraded", "/m/a.yaml:3:4:", "no", "YAML"]


def test_brief_status_is_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, {"/v1/healthz": (200, HEALTHY)}) as agent:
        well = hive(capsys, "status", "--brief", "--socket", agent.socket)
        assert agent.requests[-1][1]["Brief"] == "true"
    (tmp_path / "cilium.sock").unlink()
    sick = {"cilium": {"state": "Failure", "msg": "the datapath is not loaded"}}
    with stub_agent(tmp_path, {"/v1/healthz": (200, sick)}) as agent:
        ill = hive(capsys, "status", "--brief", "--socket", agent.socket)
    assert (well.code, well.out) == (0, "OK\n")
    assert (ill.code, ill.out) == (1, "error in cilium: the datapath is not loaded\n")


FAILING = {
    "name": "status-probe-bpf-maps",
    "status": {"consecutive-failure-count": 1, "last-failure-msg": "the maps' pins are gone"},
}


@pytest.mark.parametrize(
    ("sick", "line"),
    [
        ({"controllers": [FAILING]}, "controller status-probe-bpf-maps: the maps' pins are gone"),
        (
            {"stale": {"bpf-maps": "2026-01-02T03:04:05Z"}},
            "bpf-maps: does not answer since 2026-01-02T03:04:05Z",
        ),
    ],
)
def test_an_unhealthy_component_is_shown_in_both_formats_and_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sick: dict[str, object], line: str
) -> None:
    with stub_agent(tmp_path, {"/v1/healthz": (200, HEALTHY | sick)}) as agent:
        brief = hive(capsys, "status", "--brief", "--socket", agent.socket)
        long = hive(capsys, "status", "--socket", agent.socket)
    assert (brief.code, brief.out) == (1, f"error in {line}\n")
    assert (long.code, line.rpartition(": ")[2] in long.out) == (1, True)


def test_no_agent_is_one_line_that_names_the_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "status", "--socket", tmp_path / "nobody.sock")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        f"hive: no agent answers at {tmp_path}/nobody.sock: start one (hive agent) or name its --socket\n"
    )


def test_a_dead_agents_socket_is_the_same_as_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, {}) as agent:
        pass
    assert "no agent answers" in hive(capsys, "endpoint", "list", "--socket", agent.socket).err


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")
def test_permission_denied_prints_the_remedy(tmp_path: Path) -> None:
    with stub_agent(tmp_path, {}) as agent:
        agent.socket.chmod(0o600)
        for directory in (tmp_path, *tmp_path.parents):
            if str(directory).startswith("/tmp/"):
                directory.chmod(0o755)
        from hive.lab.children import run_child

        assert run_child(_ask_unprivileged, agent.socket) == (
            f"permission denied on {agent.socket}: run this as root, or as a member of the socket's group"
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")
def test_unreadable_maps_print_the_remedy(tmp_path: Path) -> None:
    from hive.lab.children import run_child

    tmp_path.chmod(0o700)
    code, message = run_child(_list_unprivileged, tmp_path)
    assert (code, message) == (1, f"hive: permission denied on {tmp_path}: run this as root")


def _list_unprivileged(bpf_root: Path) -> tuple[int, str]:
    import_module("hive.maps.bpf")  # which this user may not read
    spoken = io.StringIO()
    _drop_privileges()
    with contextlib.redirect_stderr(spoken), pytest.raises(SystemExit) as ended:
        main(["bpf", "list", "--bpf-root", str(bpf_root)])
    return int(str(ended.value.code)), spoken.getvalue().strip()


def _ask_unprivileged(agent_socket: Path) -> str:
    import click

    from hive.client import ask

    _drop_privileges()
    with pytest.raises(click.ClickException) as refused:
        ask("/v1/healthz", agent_socket)
    return refused.value.message


def _drop_privileges() -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


@pytest.mark.parametrize(
    ("status", "text", "code", "line"),
    [
        (503, "the agent is starting", 1, "the agent cannot answer now: the agent is starting"),
        (500, "no such luck", 1, "the agent failed: no such luck; its log has more"),
        (404, "no such thing", 1, "no such thing"),
        (400, "limit: expected a number", 2, "limit: expected a number"),
    ],
)
def test_an_error_of_the_agent_is_its_own_words_and_with_debug_what_it_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, text: str, code: int, line: str
) -> None:
    with stub_agent(tmp_path, {"/v1/endpoint": (status, text)}) as agent:
        result = hive(capsys, "endpoint", "list", "--socket", agent.socket)
        debugged = hive(capsys, "--debug", "endpoint", "list", "--socket", agent.socket)
    assert (result.code, result.out, result.err) == (code, "", f"hive: {line}\n")
    asked = f" (GET /v1/endpoint was answered with {status})"
    assert (debugged.code, debugged.err) == (code, f"hive: {line}{asked}\n")


def test_an_answer_that_is_not_json_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, {"/v1/endpoint": (200, b"<html>")}) as agent:
        result = hive(capsys, "endpoint", "list", "--socket", agent.socket)
    assert result.code == 1
    assert "is not JSON" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["endpont"], "hive: no such command 'endpont'. Did you mean 'endpoint'? (see: hive --help)"),
        (["status", "--sockt", "x"], "hive: no such option"),
        (["status", "--socket", "relative"], "expected an absolute path"),
        (["status", "--timeout", "-1"], "-1"),
        (["endpoint", "list", "-o", "xml"], "xml"),
        (["endpoint", "list", "extra"], "unexpected extra argument"),
        (["lab", "up", "--name", "No Such"], "expected up to 32 of a-z"),
        (["lab", "up", "--pods", "many"], "many"),
        (["lab", "exec"], "hive: missing argument"),
        (["status", "--wait"], "(see: hive status --help)"),
        (["endpoint", "list", "--timeout"], "(see: hive endpoint list --help)"),
        (["probe", "try", "{}"], "hive: JSON: expected a list of objects, not {}"),
        (["probe", "try", "[1]"], "expected an object with kind and to, not 1"),
        (["probe", "try", '[{"to": "a"}]'], "kind None: expected one of tcp,"),
        (["completion"], "Choose from: bash, zsh, fish"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, *arguments)
    assert (result.code, result.out) == (2, "")
    assert text in result.err
    assert len(result.err.splitlines()) == 1


def test_a_socket_of_another_service_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cni.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(path))
        other.listen()
        result = hive(capsys, "status", "-H", path)
    assert result.err == f"hive: {path} is another kind of socket: the API's is cilium.sock\n"


def test_help_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["lab", "--help"], ["lab", "demo", "--help"], ["status", "-h"]):
        result = hive(capsys, *arguments)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("Usage: hive")
        assert max(map(len, result.out.splitlines())) <= 80


def test_status_starts_without_loading_the_agent() -> None:
    code = "import sys, hive.agent.status, hive.endpoint.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=TREE)
    assert not {"cells", "lifecycle", "dependency_injector", "anyio", "rich"} & set(done.stdout.split())


def test_the_lab_without_root_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for arguments in (["up"], ["down"], ["demo"], ["exec", "--", "true"]):
        result = hive(capsys, "lab", *arguments)
        assert (result.code, result.out) == (1, "")
        assert "run it as root" in result.err
        assert len(result.err.splitlines()) == 1
