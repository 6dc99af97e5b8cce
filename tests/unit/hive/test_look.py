"""Commands that list identities, prefixes, maps and single endpoints."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.command_line import hive
from tests.unit.hive.answers import ENDPOINTS, TREE
from tests.unit.hive.stub_agent import stub_agent

IDENTITIES = [
    {"id": 256, "labels": ["k8s:app=web", "k8s:tier=front"], "labelsSHA256": "0"},
    {"id": 1, "labels": ["reserved:host"], "labelsSHA256": "0"},
]
PREFIXES = [
    {"cidr": "0.0.0.0/0", "identity": 2, "metadata": {"source": "local"}},
    {
        "cidr": "10.0.1.7/32",
        "identity": 256,
        "metadata": {"source": "k8s", "namespace": "default", "name": "web-0"},
    },
    {
        "cidr": "10.0.1.20/32",
        "identity": 256,
        "metadata": {"source": "k8s", "namespace": "kube-system", "name": "dns-0"},
    },
]
ROW = {"key": "10.0.1.7:0", "value": "id=1", "desired-action": "sync", "last-error": ""}
MAPS = {"maps": [{"path": "/x/cilium_lxc", "cache": [ROW]}, {"path": "/x/cilium_ct4_global"}]}
CHANGE = {"timestamp": "2026-01-01T00:00:00Z", "action": "update", "last-error": "E2BIG", **ROW}
LOOKUP = {
    "fqdn": "web.example.org.",
    "ips": ["192.0.2.1", "192.0.2.2"],
    "ttl": 30,
    "lookup-time": "2026-01-01T00:00:00Z",
    "expiration-time": "2026-01-01T00:00:30Z",
    "endpoint-id": 1234,
    "source": "lookup",
}
SELECTOR = {"selectorString": "MatchName: a, MatchPattern: ", "regexString": "^a[.]$"}
LOOKED = ["ENDPOINT POD SOURCE FQDN TTL EXPIRATION TIME IPS"]
LOOKED += ["1234 shop/web-0 lookup web.example.org. 30 2026-01-01T00:00:30Z 192.0.2.1,192.0.2.2"]
SERVICE = {
    "id": 2,
    "frontend-address": {"ip": "10.96.0.10", "port": 53, "protocol": "UDP", "scope": "external"},
    "backend-addresses": [
        {"ip": "10.0.1.20", "port": 53, "state": "active", "preferred": True},
        {"ip": "10.0.2.21", "port": 53, "state": "terminating"},
    ],
    "flags": {"type": "ClusterIP", "name": "dns", "namespace": "kube-system", "intTrafficPolicy": "Local"},
}
INSIDE = SERVICE | {"id": 3, "frontend-address": {"ip": "fd00::1", "port": 80, "scope": "internal"}}
SERVICES = [{"spec": INSIDE | {"backend-addresses": [], "flags": {"type": "NodePort"}}}, {"spec": SERVICE}]
NO_BACKEND = "no backend"
DNS_BACKEND = "10.0.1.20:53 kube-system/dns-0 (active, preferred)"
SHOWN_SERVICE = [
    f"2 10.96.0.10:53/UDP ClusterIP (int Local) kube-system/dns {DNS_BACKEND}",
    "10.0.2.21:53 (terminating)",
]
ANSWERS = {
    "/v1/fqdn/cache": (200, [LOOKUP]),
    "/v1/fqdn/cache/1234?matchpattern=%2A.example.org&source=lookup": (200, [LOOKUP]),
    "/v1/fqdn/names": (200, {"DNSPollNames": [], "FQDNPolicySelectors": [SELECTOR]}),
    "/v1/service": (200, SERVICES),
    "/v1/service/2": (200, SERVICES[1]),
    "/v1/identity": (200, IDENTITIES),
    "/v1/identity/endpoints": (200, [{"identity": IDENTITIES[0], "refCount": 2}]),
    "/v1/identity/256": (200, IDENTITIES[0]),
    "/v1/ip": (200, PREFIXES),
    "/v1/ip?cidr=10.0.1.0%2F24": (200, PREFIXES[1:2]),
    "/v1/map": (200, MAPS),
    "/v1/map/cilium_lxc": (200, MAPS["maps"][0]),
    "/v1/map/cilium_ct4_global": (200, MAPS["maps"][1]),
    "/v1/cluster/nodes": (200, {}),
    "/v1/endpoint": (200, ENDPOINTS),
    "/v1/map/cilium_lxc/events?follow=false": (200, json.dumps(CHANGE).encode() + b"\n"),
    "/v1/endpoint/1234": (200, ENDPOINTS[0]),
    "/v1/endpoint/1234/log": (200, [{"timestamp": "t", "code": "OK", "state": "ready", "message": "made"}]),
    "/v1/endpoint/1234/healthz": (200, {"overallHealth": "Warning", "bpf": "Warning", "policy": "OK"}),
}


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("fqdn cache list", LOOKED),
        ("fqdn cache list -e web-0 -p *.example.org -s lookup", LOOKED),
        ("fqdn cache clean -f -p web.example.org", ["FQDN proxy cache cleared"]),
        ("fqdn names", ["SELECTOR EXPRESSION", "a ^a[.]$"]),
        (
            "service list",
            [
                "ID FRONTEND TYPE SERVICE BACKENDS",
                *SHOWN_SERVICE,
                f"3 [fd00::1]:80/ANY/i NodePort {NO_BACKEND}",
            ],
        ),
        ("service list dns UDP", ["ID FRONTEND TYPE SERVICE BACKENDS", *SHOWN_SERVICE]),
        *(
            (f"service get {name}", ["ID FRONTEND TYPE SERVICE BACKENDS", *SHOWN_SERVICE])
            for name in ("2", "dns", "kube-system/dns", "10.96.0.10", "10.96.0.10:53")
        ),
        ("identity list", ["ID LABELS", "1 reserved:host", "256 k8s:app=web", "k8s:tier=front"]),
        ("identity list k8s:app=web", ["ID LABELS", "256 k8s:app=web", "k8s:tier=front"]),
        ("identity list --endpoints", ["ID ENDPOINTS LABELS", "256 2 k8s:app=web", "k8s:tier=front"]),
        ("identity get 256", ["ID LABELS", "256 k8s:app=web", "k8s:tier=front"]),
        ("ip get 10.0.1.0/24", ["IP POD IDENTITY", "10.0.1.7/32 default/web-0 k8s:app=web, k8s:tier=front"]),
        ("ip get 10.0.1.7 -n", ["IP POD IDENTITY", "10.0.1.7/32 default/web-0 256"]),
        ("ip get 192.0.2.9 -n", ["IP IDENTITY", "0.0.0.0/0 2"]),
        ("map list", ["NAME ROWS ERRORS", "cilium_lxc 1 0", "cilium_ct4_global"]),
        ("map get lxc", ["KEY VALUE STATE", "10.0.1.7:0 id=1 sync"]),
        ("map get cilium_lxc", ["KEY VALUE STATE", "10.0.1.7:0 id=1 sync"]),
        ("map events cilium_lxc", ["2026-01-01T00:00:00Z update 10.0.1.7:0 id=1"]),
        ("endpoint log 1234", ["TIMESTAMP CODE STATE MESSAGE", "t OK ready made"]),
    ],
)
def test_nodes_identities_and_addresses_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, lines: list[str]
) -> None:
    with stub_agent(tmp_path, ANSWERS) as agent:
        result = hive(capsys, *arguments.split(), "-H", agent.socket)
    assert (result.code, result.err) == (0, "")
    assert [" ".join(line.split()) for line in result.out.splitlines()] == lines


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("identity get 7", "there is no identity 7; hive identity list shows all"),
        ("ip get 10.9.0.0/16", "there is no prefix inside 10.9.0.0/16"),
        (
            "map get nope",
            "the agent knows no map cilium_nope, or has no copy of it; hive map list names them",
        ),
        ("map get cilium_ct4_global", "hive bpf dump cilium_ct4_global reads the kernel's"),
        ("map events nope", "the agent knows no map cilium_nope"),
        ("endpoint get 7", "there is no endpoint 7"),
        ("endpoint get web", "there is no pod web on this node; did you mean shop/web-0?"),
        (
            "endpoint get db",
            "db is several pods: name one of shop/db (endpoint 900), store/db (endpoint 901)",
        ),
        ("endpoint log 10.0.1.9", "no pod here has the address 10.0.1.9; hive endpoint list shows all"),
        ("endpoint health qqq", "there is no pod qqq on this node; hive endpoint list shows all"),
        ("service get dnss", "there is no service dnss; did you mean kube-system/dns?"),
        ("service get 10.96.0.9:53", "no service here has the address 10.96.0.9:53; hive service list"),
        ("service get 9", "there is no service 9"),
    ],
)
def test_unknown_objects_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    with stub_agent(tmp_path, ANSWERS) as agent:
        result = hive(capsys, *arguments.split(), "-H", agent.socket)
    assert (result.code, result.out, line in result.err, result.err.count("\n")) == (1, "", True, 1), (
        result.err
    )


def test_an_invalid_prefix_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "ip", "get", "web")
    assert (result.code, "expected an address or a network, such as 10.0.1.0/24" in result.err) == (2, True)


@pytest.mark.parametrize("name", ["web-0", "shop/web-0", "10.0.1.77", "fd00:10:1:0::77", "1234"])
def test_an_endpoint_has_the_names_that_people_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with stub_agent(tmp_path, ANSWERS) as agent:
        result = hive(capsys, "endpoint", "get", name, "-H", agent.socket, "-o", "jsonpath={[0].id}")
    assert (result.code, result.out, result.err) == (0, "1234\n", "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("endpoint list", "No endpoints: no pod runs on this node, or none was given to this agent."),
        ("service list", "No services: none is known here."),
        ("service list web TCP", "No services: none has web and TCP in its name, address or type."),
        ("fqdn cache list", "No names: pods have looked up none through the DNS proxy."),
        ("node list", "No nodes: the agent does not know its own node yet."),
    ],
)
def test_an_empty_list_prints_a_sentence_without_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    answers: dict[str, tuple[int, object]] = {"/v1/cluster/nodes": (200, {"self": "a"})}
    answers |= {path: (200, []) for path in ("/v1/endpoint", "/v1/service", "/v1/fqdn/cache")}
    with stub_agent(tmp_path, answers) as agent:
        result = hive(capsys, *arguments.split(), "-H", agent.socket)
    assert (result.code, result.out, result.err) == (0, "", f"{line}\n")


def test_an_endpoint_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, ANSWERS) as agent:
        result = hive(capsys, "endpoint", "get", "1234", "-H", agent.socket)
        state = hive(
            capsys, "endpoint", "get", "1234", "-H", agent.socket, "-o", "jsonpath={[0].status.state}"
        )
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert {
        "Endpoint: 1234",
        "State: ready",
        "IPv4: 10.0.1.77",
        "Identity: 24583 (app=web)",
        "Enforced: both",
    } <= {*lines}
    assert state.out == "ready\n"


def test_an_unwell_endpoint_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, ANSWERS) as agent:
        result = hive(capsys, "endpoint", "health", "1234", "-H", agent.socket)
    assert result.code == 1
    assert next(line.split() for line in result.out.splitlines()) == ["Overall:", "Warning"]


CONFIG = {
    "/v1/config": (200, {"spec": {"options": {"Debug": "Disabled"}, "policy-enforcement": "default"}}),
    "/hive/config": (200, {"settings": [{"name": "mtu", "value": "1400"}]}),
}


@pytest.mark.parametrize(
    ("name", "code", "out", "err"),
    [
        ("mtu", 0, "1400\n", ""),
        ("debug", 0, "Disabled\n", ""),
        ("POLICYENFORCEMENT", 0, "default\n", ""),
        ("mtuu", 1, "", "hive: the agent has no setting or option mtuu; did you mean mtu?\n"),
        ("x", 1, "", "hive: the agent has no setting or option x; hive config list --live names them\n"),
    ],
)
def test_one_setting_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: int, out: str, err: str
) -> None:
    with stub_agent(tmp_path, CONFIG) as agent:
        result = hive(capsys, "config", "get", name, "-H", agent.socket)
    assert (result.code, result.out, result.err) == (code, out, err)


LABELS = {"spec": {"user": ["unspec:tier=front", "k8s:a=b"]}, "status": {}}
OPTIONS = {"realized": {"options": {"SourceIPVerification": "Enabled"}}, "immutable": {}}
CHANGEABLE = {"/v1/endpoint/7/labels": (200, LABELS), "/v1/endpoint/7/config": (200, OPTIONS)}


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        ("labels 7 -a new=1", ("labels", {"user": ["unspec:tier=front", "k8s:a=b", "new=1"]})),
        ("labels 7 -a tier=back -d k8s:a", ("labels", {"user": ["tier=back"]})),
        ("config 7 sourceipverification=off", ("config", {"options": {"SourceIPVerification": "off"}})),
    ],
)
def test_endpoint_options_can_be_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, change: tuple[str, object]
) -> None:
    with stub_agent(tmp_path, CHANGEABLE) as agent:
        result = hive(capsys, "endpoint", *arguments.split(), "-H", agent.socket)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert agent.changes == [(f"/v1/endpoint/7/{change[0]}", change[1])]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (
            "labels 7 -d nope",
            1,
            "nope is not a label that a user gave endpoint 7, which has: unspec:tier=front, ",
        ),
        ("labels 7 -a =x", 2, "'=x': expected [source:]key[=value], such as tier=front"),
        ("labels 8 -a x=1", 1, "there is no endpoint 8"),
        ("config 7 Debug=1", 1, "Debug cannot be changed for one endpoint: SourceIPVerification can"),
        ("config 7 SourceIPVerification=perhaps", 1, "expected Enabled or Disabled"),
        ("config 7 SourceIPVerification", 2, "expected OPTION=VALUE"),
    ],
)
def test_unchangeable_endpoint_options_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, code: int, line: str
) -> None:
    with stub_agent(tmp_path, CHANGEABLE) as agent:
        result = hive(capsys, "endpoint", *arguments.split(), "-H", agent.socket)
    assert (result.code, line in result.err, result.err.count("\n"), agent.changes) == (
        code,
        True,
        1,
        [],
    ), result.err


def test_a_bundle_has_all_available_files_and_lists_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    (tmp_path / "state" / "7").mkdir(parents=True)
    (tmp_path / "state" / "7" / "ep_config.json").write_text("{}")
    target = tmp_path / "bundle.tar.gz"
    with stub_agent(tmp_path, ANSWERS) as agent:
        result = hive(
            capsys, "debug", "bundle", "-f", target, "-H", agent.socket, "--bpf-root", tmp_path / "none"
        )
        again = hive(capsys, "debug", "bundle", "-f", target, "-H", agent.socket)
    assert result.code == 0
    assert "not collected: agent/healthz.json: not found" in result.err
    assert f"not collected: kernel/maps.json: there are no maps at {tmp_path}/none/tc/globals" in result.err
    assert target.stat().st_mode & 0o777 == 0o600
    with tarfile.open(target) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
        contents = b"".join(
            file.read()
            for member in archive.getmembers()
            if (file := archive.extractfile(member)) is not None
        )
    assert {
        "agent/identities.json",
        "state/state/7/ep_config.json",
        "node/proc/version",
        "errors.txt",
    } <= names
    assert b"hush" not in contents
    assert (again.code, "cannot be written: File exists; choose another --file" in again.err) == (1, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_learn_to_complete(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    result = hive(capsys, "completion", shell)
    assert (result.code, "_HIVE_COMPLETE" in result.out) == (0, True)


def test_the_completion_that_bash_asks_for_knows_commands() -> None:
    asked = {"_HIVE_COMPLETE": "bash_complete", "COMP_WORDS": "hive en", "COMP_CWORD": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", "from hive.main import main; main()"],
        env=TREE | asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "plain,endpoint" in ended.stdout, ended.stderr
