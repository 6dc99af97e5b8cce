"""The plugin alone: environment, stdin, versions; texts and codes as recorded from client 1.17."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cni_plugin import compiled_plugin, environment, run_plugin
from tests.support.examples import scaled
from tests.support.plugin import ROOT

VERSIONS = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
CONF = {"cniVersion": "1.0.0", "name": "cilium", "type": "cilium-cni", "enable-debug": False}


def refusal(env: dict[str, str], stdin: object) -> dict[str, Any]:
    """The error object without its protocol version."""
    ended = run_plugin(env, stdin)
    assert ended.code == 1
    error: dict[str, Any] = ended.json
    assert error.pop("cniVersion") in VERSIONS
    return error


def test_version_is_answered_without_agent_stdin_or_other_variables() -> None:
    ended = run_plugin({"CNI_COMMAND": "VERSION"}, {"cniVersion": "1.0.0"})
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.json == {"cniVersion": "1.1.0", "supportedVersions": VERSIONS}


def test_the_plugin_run_without_a_command_prints_what_it_is() -> None:
    ended = run_plugin({}, b"")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (ended.code, ended.stdout) == (0, "")
    assert ended.stderr == (
        f"Cilium CNI plugin {version} (hive)\nCNI protocol versions supported: {', '.join(VERSIONS)}\n"
    )


@pytest.mark.parametrize(
    ("env", "stdin", "expected"),
    [
        (environment("FROB"), CONF, {"code": 4, "msg": "unknown CNI_COMMAND: FROB"}),
        (
            environment("ADD", CNI_NETNS=None, CNI_IFNAME=None),
            CONF,
            {"code": 4, "msg": "required env variables [CNI_NETNS,CNI_IFNAME] missing"},
        ),
        (
            environment("DEL", CNI_CONTAINERID="", CNI_PATH=None),
            CONF,
            {"code": 4, "msg": "required env variables [CNI_CONTAINERID,CNI_PATH] missing"},
        ),
        (
            environment("ADD", CNI_NETNS="/x"),
            b"{not json",
            {
                "code": 6,
                "msg": "error unmarshall network config: invalid character 'n' looking for beginning of"
                " object key string",
            },
        ),
        (
            environment("ADD", CNI_NETNS="/x"),
            b"",
            {"code": 6, "msg": "error unmarshall network config: unexpected end of JSON input"},
        ),
        (
            environment("ADD", CNI_NETNS="/x"),
            {**CONF, "cniVersion": "9.9.9"},
            {
                "code": 1,
                "msg": "incompatible CNI versions",
                "details": 'config is "9.9.9", plugin supports'
                ' ["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]',
            },
        ),
        (environment("DEL"), {**CONF, "name": ""}, {"code": 7, "msg": "missing network name"}),
        (
            environment("DEL"),
            {**CONF, "name": "bad/name"},
            {"code": 7, "msg": "invalid characters found in network name", "details": "bad/name"},
        ),
        (
            environment("DEL", CNI_CONTAINERID="bad id!"),
            CONF,
            {"code": 4, "msg": "invalid characters in containerID", "details": "bad id!"},
        ),
        (
            environment("DEL", CNI_IFNAME="waytoolonginterfacename"),
            CONF,
            {
                "code": 4,
                "msg": "interface name is too long",
                "details": "interface name should be less than 16 characters",
            },
        ),
        (environment("DEL", CNI_IFNAME=".."), CONF, {"code": 4, "msg": "interface name is . or .."}),
        (
            environment("DEL", CNI_IFNAME="a/b"),
            CONF,
            {"code": 4, "msg": "interface name contains / or : or whitespace characters"},
        ),
        (
            environment("ADD", CNI_IFNAME="eth%d"),
            CONF,
            {"code": 4, "msg": "interface name contains %"},
        ),
        (
            environment("CHECK", CNI_NETNS="/x"),
            {**CONF, "cniVersion": "0.3.1"},
            {"code": 1, "msg": "config version does not allow CHECK"},
        ),
        (
            environment("CHECK", CNI_NETNS="/var/run/netns/gone"),
            CONF,
            {
                "code": 999,
                "msg": "opening netns pinned at /var/run/netns/gone: open /var/run/netns/gone:"
                " no such file or directory",
            },
        ),
        (
            environment("STATUS", CNI_PATH=None),
            CONF,
            {"code": 4, "msg": "required env variables [CNI_PATH] missing"},
        ),
        (environment("STATUS"), CONF, {"code": 1, "msg": "config version does not allow STATUS"}),
        (environment("GC"), CONF, {"code": 1, "msg": "config version does not allow GC"}),
        (
            environment("DEL"),
            {**CONF, "agent-socket": "cni.sock"},
            {
                "code": 7,
                "msg": "agent-socket is not usable: expected an absolute path of at most 107 bytes",
                "details": "cni.sock",
            },
        ),
        (
            environment("ADD", CNI_NETNS="/var/run/netns/gone"),
            CONF,
            {
                "code": 999,
                "msg": "opening netns pinned at /var/run/netns/gone: open /var/run/netns/gone:"
                " no such file or directory",
            },
        ),
        (
            environment("ADD", CNI_NETNS="/proc/self/ns/net"),
            CONF,
            {"code": 8, "msg": "plugin's netns and netns from CNI_NETNS should not be the same"},
        ),
        (
            environment("DEL", CNI_NETNS="/proc/self/ns/net"),
            CONF,
            {"code": 8, "msg": "plugin's netns and netns from CNI_NETNS should not be the same"},
        ),
    ],
)
def test_a_wrong_invocation_is_refused_in_the_documented_words(
    env: dict[str, str], stdin: object, expected: dict[str, object]
) -> None:
    assert refusal(env, stdin) == expected


def test_errors_speak_the_version_that_was_asked_for() -> None:
    ended = run_plugin(environment("CHECK", CNI_NETNS="/x"), {**CONF, "cniVersion": "0.4.0"})
    assert ended.json["cniVersion"] == "0.4.0"


def test_a_configuration_that_is_too_long_is_refused() -> None:
    error = refusal(environment("DEL"), {**CONF, "x": "y" * (128 << 10)})
    assert error["code"] == 6
    assert "too long" in error["msg"]


@pytest.mark.parametrize(
    "text",
    [
        b'{"name":"a",}',
        b'{"name":"a"} x',
        b'{"name":"a" "b":1}',
        b'{"a":[1,2,]}',
        b'{"a":01}',
        b'{"a":1.}',
        b'{"a":-}',
        b'{"a":1e}',
        b'{"a":tru}',
        b'{"a":"\x01"}',
        b'{"a":"\\x"}',
        b'{"a":"\\u12g4"}',
        b'{"a":"',
        b"[" * 2000,
        b'"name"',
        b'{"name":1}',
        b"\xff{}",
    ],
)
def test_an_invalid_network_configuration_returns_code_6(text: bytes) -> None:
    assert refusal(environment("DEL"), text)["code"] == 6


WRONG = b'{"cniVersion":"1.0.0","name":"a","enable-debug":"yes","log-file":1}'
FAULT = "json: cannot unmarshal string into Go struct field NetConf.enable-debug of type bool"


@pytest.mark.parametrize(
    ("command", "stdin", "expected"),
    [
        (
            "DEL",
            WRONG,
            {
                "code": 999,
                "msg": f"unable to parse CNI configuration {json.dumps(WRONG.decode())}: {FAULT}",
            },
        ),
        *(
            (
                command,
                WRONG.replace(b"1.0.0", b"1.1.0"),
                {
                    "code": 7,
                    "msg": "InvalidNetworkConfig",
                    "details": "unable to parse CNI configuration"
                    f' "{WRONG.decode().replace("1.0.0", "1.1.0")}": {FAULT}',
                },
            )
            for command in ("CHECK", "STATUS")
        ),
        # The library's checks come first, as it reads neither key.
        (
            "DEL",
            WRONG.replace(b"1.0.0", b"9.0.0"),
            {
                "code": 1,
                "msg": "incompatible CNI versions",
                "details": 'config is "9.0.0", plugin supports'
                ' ["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]',
            },
        ),
        ("DEL", WRONG.replace(b'"a"', b'""'), {"code": 7, "msg": "missing network name"}),
        (
            "DEL",
            b'{"cniVersion":1,"name":"a"}',
            {
                "code": 6,
                "msg": "decoding version from network config: json: cannot unmarshal number into Go struct"
                " field .cniVersion of type string",
            },
        ),
        (
            "DEL",
            b'{"cniVersion":1,"name":2}',
            {
                "code": 6,
                "msg": "error unmarshall network config: json: cannot unmarshal number into Go struct"
                " field .name of type string",
            },
        ),
        (
            "DEL",
            b'{"cniVersion":"1.0.0","name":"a","ipam":{"type":[]}}',
            {
                "code": 999,
                "msg": 'unable to parse CNI configuration "{\\"cniVersion\\":\\"1.0.0\\",\\"name\\":\\"a\\",'
                '\\"ipam\\":{\\"type\\":[]}}": json: cannot unmarshal array into Go struct field'
                " NetConf.ipam.type of type string",
            },
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_as_by_go(
    command: str, stdin: bytes, expected: dict[str, object]
) -> None:
    assert refusal(environment(command, CNI_NETNS="/x"), stdin) == expected


def test_the_error_of_a_long_configuration_ends_with_the_reason() -> None:
    stdin = json.dumps({"cniVersion": "1.0.0", "name": "a", "x": "y" * 5000, "enable-debug": 1}).encode()
    error = refusal(environment("DEL"), stdin)
    assert error["msg"].endswith("NetConf.enable-debug of type bool")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_an_error_about_binary_input_is_valid_json() -> None:
    stdin = b'{"cniVersion":"1.0.0","name":"\xff\xc3(\xe2\x82\xac"}'
    assert refusal(environment("DEL"), stdin)["details"] == "\ufffd\ufffd(€"


@settings(max_examples=scaled(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(extra=st.dictionaries(st.text(), JSON, max_size=4), ascii_only=st.booleans())
def test_any_json_around_the_known_keys_is_read(extra: dict[str, Any], ascii_only: bool) -> None:
    conf = {**extra, "cniVersion": "1.0.0", "name": "bad/näme\U0001f600", "enable-debug": False}
    for key in ("agent-socket", "chaining-mode", "log-file"):
        conf.pop(key, None)
    text = json.dumps(conf, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    error = refusal(environment("DEL"), text)
    assert error["code"] == 7
    assert error["details"] == conf["name"]


def test_the_plugin_is_static_and_small() -> None:
    binary = Path(compiled_plugin()).read_bytes()
    assert len(binary) < 128 << 10
    assert b"/ld-musl" not in binary
