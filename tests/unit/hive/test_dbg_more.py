"""``cilium-dbg``: absent arguments, other forms and empty answers, in the words of Cilium's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hive.dbg.main import run
from tests.unit.conformance.replayed_agent import shown


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("map get", "map name must be specified\n"),
        ("map events", "map name must be specified\n"),
        ("policy import", "Missing path argument\n\n"),
        ("policy wait", "invalid revision\n\n"),
        ("policy wait x", "invalid revision 'x': strconv.ParseInt: parsing \"x\": invalid syntax\n"),
        ("endpoint log", "Missing endpoint id argument\n\n"),
        ("endpoint health", "Missing endpoint id argument\n\n"),
        ("endpoint labels", "Missing endpoint id argument\n\n"),
        ("endpoint disconnect", "Missing endpoint id argument\n\n"),
        ("service get", "Missing service id argument\n\n"),
        ("recorder get", "Missing recorder id argument\n\n"),
        ("bpf ct list", "Missing endpoint id or 'global' argument\n\n"),
        ("prefilter update --cidr 10.0.0.1/8,x", 'Cannot parse CIDR "x": invalid CIDR address: x\n'),
        ("metrics list -p [", "Cannot compile regex: error parsing regexp: missing closing ]: `[`\n\n"),
    ],
)
def test_absent_and_wrong_arguments(words: str, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 1
    assert capfd.readouterr() == ("", f"Error: {reason}")


POLICY = [
    {"key": "io.cilium.k8s.policy.name", "source": "k8s", "value": "all"},
    {"key": "a", "source": "unspec", "value": ""},
]
RECORDERS = [
    {"status": {"realized": {"capture-length": 0, "filters": [], "id": 9}}},
    {"status": {"realized": {"capture-length": 64, "filters": [{"src-prefix": "10.0.0.0/8"}], "id": 2}}},
]
MASKS = [
    {"status": {"realized": {"priority": 1, "src-prefix-mask": "ffffffff", "users": 1}}},
    {"status": {"realized": {"priority": 3, "src-prefix-mask": "ff000000", "users": 2}}},
    {"status": {"realized": {"priority": 2, "src-prefix-mask": "f" * 32, "users": 3}}},
]
PODS = [{"containers": None, "name": "a"}, {"containers": [{"cgroup-id": 7}], "name": "b", "namespace": "c"}]


@pytest.mark.parametrize(
    ("words", "answers", "lines"),
    [
        ("node list", {"GET cluster/nodes": {"nodes-added": None}}, []),
        ("node list", {"GET cluster/nodes": {"nodes-added": []}}, []),
        ("map list", {"GET map": {}}, []),
        (
            "cgroups list --no-headers",
            {"GET cgroup-dump-metadata": {"pod-metadatas": PODS}},
            [["b", "c", "7"]],
        ),
        (
            "policy selectors",
            {"GET policy/selectors": [{"labels": POLICY, "selector": "z"}, {"selector": "b", "users": 2}]},
            [["SELECTOR", "LABELS", "USERS", "IDENTITIES"], ["b", "2"], ["z", "0"]],
        ),
        (
            "policy selectors -v",
            {"GET policy/selectors": [{"labels": POLICY, "selector": "z"}]},
            [
                ["SELECTOR", "LABELS", "USERS", "IDENTITIES"],
                ["z", "[unspec:a", "k8s:io.cilium.k8s.policy.name=all]", "0"],
            ],
        ),
        (
            "recorder list",
            {"GET recorder": RECORDERS, "GET recorder/masks": MASKS},
            [
                ["ID", "Capture", "Length", "Wildcard", "Filters"],
                ["2", "<=", "64", "10.0.0.0/8:", "->", ":"],
                ["9", "full", "(none)"],
                [],
                ["Users", "Priority", "Wildcard", "Masks"],
                ["3", "2", f"{'f' * 32}:", "->", ":"],
                ["2", "3", "ff000000:", "->", ":"],
                ["1", "1", "ffffffff:", "->", ":"],
            ],
        ),
        (
            "map events a",
            {
                "GET map/a/events?follow=false": {
                    "key": 'a"\t\\',
                    "last-error": "x\ny",
                    "value": "é",
                }
            },
            [
                [
                    'key="a\\\\\\"\\\\n\\\\"',
                    'value="é"',
                    "time=0001-01-01T00:00:00Z",
                    "action=",
                    "desiredState=",
                    'lastError="x\\\\ny"',
                ]
            ],
        ),
    ],
)
def test_empty_and_unusual_answers(
    words: str,
    answers: dict[str, Any],
    lines: list[list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(words, answers, tmp_path, capfd, monkeypatch) == (0, lines, "")


LINK = {"listen-port": 51871, "name": "cilium_wg0", "peer-count": 1, "peers": [{"public-key": "p"}]}


@pytest.mark.parametrize(
    ("words", "answers", "wanted"),
    [
        ("cgroups list", {"GET cgroup-dump-metadata": {"pod-metadatas": []}}, []),
        (
            "encrypt status",
            {"GET healthz": {"encryption": {"mode": "Disabled", "msg": "why"}}},
            {"mode": "Disabled"},
        ),
        (
            "encrypt status",
            {"GET healthz": {"encryption": {"mode": "Wireguard", "wireguard": {"interfaces": [LINK]}}}},
            {
                "mode": "Wireguard",
                "wireguard": {"interfaces": [{"name": "cilium_wg0", "peer-count": 1, "peers": None}]},
            },
        ),
    ],
)
def test_values_as_json(
    words: str,
    answers: dict[str, Any],
    wanted: object,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hive.dbg.node.root_only", lambda _: None)
    code, lines, _ = shown(f"{words} -o json", answers, tmp_path, capfd, monkeypatch)
    assert code == 0
    assert json.loads(" ".join(" ".join(line) for line in lines)) == wanted


@pytest.mark.parametrize("words", ["node list", "cgroups list", "debuginfo"])
def test_some_failures_are_reported_without_more(
    words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/none.sock")
    assert run(words.split()) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith('Get "http://localhost/v1/')


def test_waiting_for_a_revision_shows_how_many_have_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = {"id": 1, "status": {"policy": {"realized": {"policy-revision": 2}}, "state": "ready"}}
    failed = {"id": 2, "status": {"policy": {"realized": {"policy-revision": 1}}, "state": "not-ready"}}
    answers = {"GET endpoint": [endpoint, failed]}
    words = "policy wait 2 --sleep-time 0 --fail-wait-time 0"
    code, lines, err = shown(words, answers, tmp_path, capfd, monkeypatch)
    assert code == 1
    assert err.startswith("Error: \n1 endpoints have failed regeneration after ")
    assert lines in ([], [["Waiting", "for", "endpoints", "to", "run", "policy", "revision", "2:", "1/2"]])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--output xml", "xml is not a valid output format; exiting\n"),
        ("--output json --file-per-command", "json does not support dumping a file per command; exiting\n"),
        (
            "--output-directory /tmp",
            (
                'invalid option combination; specified output-directory "/tmp", '
                "but did not specify for output to be redirected to file; exiting\n"
            ),
        ),
        (
            "--output html",
            (
                "if HTML is specified as the output format, "
                "it is required that you provide the `--file` argument as well\n"
            ),
        ),
    ],
)
def test_debuginfo_refuses_combinations(words: str, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["debuginfo", *words.split()]) == 1
    assert capfd.readouterr() == ("", reason)


def test_debuginfo_is_written_to_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    found = {"cilium-status": {}, "cilium-version": "1.17.0", "endpoint-list": [{"id": 5}]}
    words = f"debuginfo --output markdown,json -f --output-directory {tmp_path}"
    code, lines, _ = shown(words, {"GET debuginfo": found}, tmp_path, capfd, monkeypatch)
    assert code == 0
    assert [line[:3] for line in lines] == [["markdown", "output", "at"], ["json", "output", "at"]]
    markdown, values = (Path(line[3]) for line in lines)
    assert markdown.name.startswith("cilium-debuginfo-2")
    text = markdown.read_text()
    assert text.startswith("# Cilium debug information\n\n#### Cilium version\n\n```\n1.17.0\n```\n\n")
    assert "\n#### BPF Policy Get 5\n\n" in text
    assert json.loads(values.read_text())["cilium-version"] == "1.17.0"
    words = f"debuginfo -f --file-per-command --output-directory {tmp_path}"
    _, lines, _ = shown(words, {"GET debuginfo": found}, tmp_path, capfd, monkeypatch)
    assert len(lines) == 10
    assert lines[0][3].endswith("-cilium-version.md")
