"""Wrong settings: one line each, exit code 2, and no change of the node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.lab.node import Lab
from tests.support.agents import made, run_agent
from tests.support.namespaces import need_root

pytestmark = pytest.mark.node


@pytest.fixture(scope="module")
def node() -> Iterator[Lab]:
    """One for all: the agents that run here do not begin."""
    need_root()
    with made(Lab(f"settings-{os.getpid()}")) as lab:
        yield lab


def touched() -> list[Path]:
    """What an agent would have changed: its files, its pins, the links."""
    return [path for top in ("/run/cilium", "/sys/fs/bpf", "/sys/class/net") for path in Path(top).iterdir()]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--mtuu=1500", "--mtuu: no such setting; did you mean --mtu?"),
        ("stray", "stray: not expected here; settings are --name=value"),
        ("--mtu", "--mtu: needs a value, as in --mtu=VALUE"),
        ("--mtu=many", "--mtu=many: expected a whole number"),
        ("--mtu=100", "--mtu=100: expected 0, or 576 to 65535 bytes"),
        ("--enable-ipv4=perhaps", "--enable-ipv4=perhaps: expected true or false"),
        ("--bpf-map-dynamic-size-ratio=half", "--bpf-map-dynamic-size-ratio=half: expected a number"),
        (
            "--bpf-ct-timeout-regular-tcp=soon",
            "--bpf-ct-timeout-regular-tcp=soon: expected a duration such as 15s, 2m0s or 100ms",
        ),
        ("--state-dir=", "--state-dir=: expected a path"),
        ("--state-dir=run/cilium", "--state-dir=run/cilium: expected an absolute path"),
        (
            f"--state-dir=/run/{'x' * 100}",
            f"--state-dir=/run/{'x' * 100}: too long for the sockets in it, expected at most 95 bytes",
        ),
        (
            "--enable-ipv4=false",
            "--enable-ipv4=false and enable-ipv6=false: a pod needs an address; leave one of them true",
        ),
        (
            "--ipam=eni",
            (
                "--ipam=eni is not supported yet: expected cluster-pool, kubernetes, multi-pool"
                " or delegated-plugin"
            ),
        ),
        (
            "--ipv4-range=lots",
            "--ipv4-range=lots: expected auto or a network such as 10.5.0.0/16",
        ),
        (
            "--ipv4-range=10.0.0.1/32",
            "--ipv4-range=10.0.0.1/32: too small, expected at most a /31: the node takes one address",
        ),
        ("--agent-health-port=0", "--agent-health-port=0: expected at least 1, at most 65535"),
        (
            "--cni-chaining-mode=generic-veth",
            (
                "--cni-chaining-mode=generic-veth: set cni-chaining-target too,"
                " the network our plugin is added to"
            ),
        ),
        (
            "--config-dir=/no/such",
            "config-dir /no/such: no such file or directory; expected a directory",
        ),
        ("--config-dir=/dev/null", "config-dir /dev/null: not a directory; expected a directory"),
    ],
)
def test_a_wrong_flag_is_one_line(node: Lab, flag: str, line: str) -> None:
    with node.open() as inside:
        before = inside.run(touched)
        ended = run_agent(node, flag)
        assert (ended.code, ended.stdout, ended.stderr) == (2, "", f"hive: {line}\n")
        assert inside.run(touched) == before


def test_an_invalid_environment_variable_is_reported_by_name(node: Lab) -> None:
    ended = run_agent(node, env={"CILIUM_MTU": "100", "CILIUM_IPV4_RANGE": "10.0.0.0"})
    assert ended.code == 2
    assert sorted(ended.messages) == [
        "hive: CILIUM_IPV4_RANGE=10.0.0.0: expected auto or a network such as 10.5.0.0/16",
        "hive: CILIUM_MTU=100: expected 0, or 576 to 65535 bytes",
    ]


def test_an_invalid_settings_file_is_reported_by_path(node: Lab, tmp_path: Path) -> None:
    (tmp_path / "mtu").write_text("100\n")
    (tmp_path / "agent-health-port").write_text("http\n")
    ended = run_agent(node, f"--config-dir={tmp_path}")
    assert ended.code == 2
    assert sorted(ended.messages) == [
        f"hive: {tmp_path}/agent-health-port: 'http': expected a whole number",
        f"hive: {tmp_path}/mtu: '100': expected 0, or 576 to 65535 bytes",
    ]


def test_every_mistake_has_its_line(node: Lab, tmp_path: Path) -> None:
    (tmp_path / "policy-map-pool").write_text("none")
    flags = ("--nonsense", "5", "--ipv4-range=10.0.0.0", f"--config-dir={tmp_path}")
    ended = run_agent(node, *flags, env={"CILIUM_ENABLE_IPV4": "false"})
    assert ended.code == 2
    assert sorted(ended.messages) == [
        "hive: --ipv4-range=10.0.0.0: expected auto or a network such as 10.5.0.0/16",
        "hive: --nonsense: no such setting",
        f"hive: {tmp_path}/policy-map-pool: 'none': expected a whole number",
        (
            "hive: CILIUM_ENABLE_IPV4=false and enable-ipv6=false: a pod needs an address;"
            " leave one of them true"
        ),
    ]


def test_a_health_endpoint_needs_addresses_that_the_agent_gives(node: Lab) -> None:
    delegated = (
        "--ipam=delegated-plugin",
        "--local-router-ipv4=169.254.23.1",
        "--enable-endpoint-routes=true",
        "--routing-mode=native",
    )
    ended = run_agent(node, *delegated, "--enable-health-checking=true")
    assert ended.code == 2
    assert ended.line.endswith("set enable-endpoint-health-checking=false")
