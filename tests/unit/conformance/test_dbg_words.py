"""`cilium-dbg`: arguments that are refused, and requests that fail, in the words of Cilium's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conformance.replayed_agent import shown

CONFIG = {
    "spec": {"options": {"Debug": "Disabled"}, "policy-enforcement": "default"},
    "status": {
        "daemonConfigurationMap": {
            "EnableIPv4": True,
            "LocalConfig": {"NodeIPv4": "192.0.2.1", "Debug": "inner"},
            "Debug": "fixed",
        },
        "k8s-endpoint": "https://192.0.2.1:6443",
        "immutable": {"DropNotification": "Enabled"},
        "nodeMonitor": {"npages": 64},
        "realized": {"options": {"Debug": "Disabled"}, "policy-enforcement": "default"},
    },
}
NOT_FOUND = (404, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable-ipv4", "true"),
        ("Enable_IPv4", None),
        ("node-ipv4", "192.0.2.1"),
        ("localconfig", "map[Debug:inner NodeIPv4:192.0.2.1]"),
        ("debug", "Disabled"),
        ("policy-enforcement", "default"),
        ("k8s-endpoint", None),
        ("DropNotification", None),
    ],
)
def test_settings_are_found_by_their_names_as_of_flags(
    name: str,
    value: str | None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = shown(f"config get {name}", {"GET config": CONFIG}, tmp_path, capfd, monkeypatch)
    if value is None:
        assert found == (1, [], "Error: Configuration does not exist\n")
    else:
        assert found == (0, [value.split()], "")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "config get": ({}, "Missing config name argument\n"),
    "config Debug": ({"GET config": CONFIG}, "Improper configuration format provided"),
    "endpoint get abc": (
        {"GET endpoint/abc": (400, "no number")},
        "Cannot get endpoint abc: [GET /endpoint/{id}][400] getEndpointIdInvalid  no number\n",
    ),
    "endpoint get -l k8s:a -l k8s:b,k8s:c": (
        {"GET endpoint": NOT_FOUND},
        (
            "Cannot get endpoints for given list of labels [k8s:a k8s:b k8s:c]: "
            "[GET /endpoint][404] getEndpointNotFound \n"
        ),
    ),
    "identity get": ({}, "Invalid identity ID\n"),
    "identity get --label a,b": (
        {"GET identity": NOT_FOUND},
        "Cannot get identity for labels [a b]: [GET /identity][404] getIdentityNotFound \n",
    ),
    "identity get 7": (
        {"GET identity/7": NOT_FOUND},
        "Cannot get identity for given ID 7: [GET /identity/{id}][404] getIdentityIdNotFound \n",
    ),
    "ip get": ({}, "Missing cidr argument\n"),
    "ip get 10.0.0.1": ({}, 'Unable to parse CIDR "10.0.0.1": invalid CIDR address: 10.0.0.1'),
    "ip get 10.0.0.0/8 -l a": ({}, "Cannot provide both cidr and labels arguments concurrently\n"),
    "policy delete": ({}, "Please use --all flag to delete all policies"),
    "prefilter list": ({"GET prefilter": {}}, "Cannot get CIDR list: empty response"),
    "recorder get x": ({}, "Unable to parse recorder ID: x"),
    "recorder get 7": ({"GET recorder/7": {}}, "Cannot get recorder '7': empty response\n"),
    "recorder delete 7": (
        {"DELETE recorder/7": NOT_FOUND},
        "Cannot delete recorder '7': [DELETE /recorder/{id}][404] deleteRecorderIdNotFound \n",
    ),
    "recorder update": ({}, "Empty recorder id argument\n"),
    "recorder update --id -1": (
        {},
        'invalid argument "-1" for "--id" flag: strconv.ParseUint: parsing "-1": invalid syntax',
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_have_the_words_of_the_client(
    words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, reason = REFUSED[words]
    code, out, err = shown(words, answers, tmp_path, capfd, monkeypatch)
    assert (code, out) == (1, [])
    assert err.startswith(f"Error: {reason}\n")


def test_an_unknown_option_is_refused_before_the_agent_is_asked_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"GET config": CONFIG}
    found = shown("config Debug=enable Speed=enable", answers, tmp_path, capfd, monkeypatch)
    assert found == (1, [["unknown", "option", '"Speed"']], "")
    code, _, err = shown("config Debug=enable", answers, tmp_path, capfd, monkeypatch)
    assert (code, err[:42]) == (1, "Error: Unable to change agent configuratio")


def test_identities_and_addresses_are_sorted_as_json_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(words: str, answers: dict[str, Any]) -> Any:
        code, lines, _ = shown(f"{words} -o json", answers, tmp_path, capfd, monkeypatch)
        assert code == 0
        return json.loads(" ".join(word for line in lines for word in line))

    numbers = [{"id": 9}, {"id": 1}, {"id": 5}]
    assert [one["id"] for one in listed("identity list", {"GET identity": numbers})] == [1, 5, 9]
    assert [one["id"] for one in listed("identity get --label a", {"GET identity": numbers})] == [1, 5, 9]
    local = {"GET identity/endpoints": [{"identity": one} for one in numbers]}
    assert [one["identity"]["id"] for one in listed("identity list --endpoints", local)] == [1, 5, 9]
    prefixes = {"GET ip": [{"cidr": "10.0.0.1/32", "identity": 1}, {"cidr": "10.0.0.0/8", "identity": 2}]}
    assert [one["cidr"] for one in listed("ip list", prefixes)] == ["10.0.0.0/8", "10.0.0.1/32"]
    assert listed("cgroups list", {"GET cgroup-dump-metadata": {}}) is None


def test_addresses_of_identities_are_listed_by_labels(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"name": "web-0", "namespace": "shop", "source": "k8s"}
    answers: dict[str, Any] = {
        "GET ip": [{"cidr": "10.0.1.7/32", "identity": 256, "hostIP": "192.0.2.1", "metadata": metadata}]
    }
    code, lines, _ = shown("ip get -l app=web,k8s:a", answers, tmp_path, capfd, monkeypatch)
    assert code == 0
    assert lines == [
        [27 * "="],
        ["Labels:"],
        ["k8s:a"],
        ["unspec:app=web"],
        [27 * "="],
        ["IP", "HOST", "IDENTITY", "POD", "NAMESPACE"],
        ["10.0.1.7/32", "192.0.2.1", "256", "web-0", "shop"],
    ]
    answers["GET identity/256"] = {"id": 256, "labels": ["k8s:app=web", "k8s:team=a"]}
    _, lines, _ = shown(
        "ip get 10.0.1.0/24 -v",
        {"GET ip?cidr=10.0.1.0%2F24": answers["GET ip"], **answers},
        tmp_path,
        capfd,
        monkeypatch,
    )
    assert lines[1:] == [["10.0.1.7/32", "k8s:app=web", "k8s", "192.0.2.1", "0"], ["k8s:team=a"]]


@pytest.mark.parametrize(("status", "verb"), [(201, "Added"), (200, "Updated")])
def test_recorders_are_set_with_any_number_of_filters(
    status: int,
    verb: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: dict[str, Any] = {"GET recorder/7": (500, None), "PUT recorder/7": (status, None)}
    code, lines, _ = shown("recorder update --id 7", answers, tmp_path, capfd, monkeypatch)
    assert (code, lines[1:]) == (0, [[verb, "recorder", "with", "0", "filter"]])
