"""Shell completion of names that the running agent has."""

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from hive.main import cli
from tests.unit.hive.stub_agent import stub_agent

ANSWERS: dict[str, tuple[int, object]] = {
    "/statedb/tables": (200, [{"name": "nodes"}, {"name": "node-addresses"}, {"name": "devices"}]),
    "/v1/map": (200, {"maps": [{"path": "/sys/fs/bpf/tc/globals/cilium_lxc"}]}),
    "/hive/config": (
        200,
        {"settings": [{"name": "mtu", "value": "0"}, {"name": "enable-ipv4", "value": ""}]},
    ),
    "/v1/config": (200, {"spec": {"options": {"Debug": "Disabled"}, "policy-enforcement": "default"}}),
    "/v1/endpoint": (
        200,
        [
            {"id": 7, "status": {"external-identifiers": {"pod-name": "shop/cart"}}},
            {"id": 71, "status": {"labels": {"security-relevant": ["reserved:host"]}}},
        ],
    ),
    "/v1/service": (200, [{"spec": {"flags": {"namespace": "shop", "name": "web"}}}, {"spec": {}}]),
}


@pytest.mark.parametrize(
    ("words", "incomplete", "names"),
    [
        (["db", "show"], "node", ["node-addresses", "nodes"]),
        (["db", "watch"], "d", ["devices"]),
        (["map", "get"], "", ["cilium_lxc"]),
        (["config", "get"], "m", ["mtu"]),
        (["config", "set"], "", ["Debug=", "PolicyEnforcement="]),
        (["endpoint", "get"], "", ["7", "71", "host", "shop/cart"]),
        (["bpf", "policy"], "sh", ["shop/cart"]),
        (["policy", "explain"], "", ["shop/cart"]),
        (["policy", "explain", "shop/cart"], "", ["shop/cart"]),
        (["monitor", "--pod"], "s", ["shop/cart"]),
        (["service", "get"], "", ["shop/web"]),
    ],
)
def test_a_shell_completes_names_that_the_agent_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], incomplete: str, names: list[str]
) -> None:
    with stub_agent(tmp_path, ANSWERS) as agent:
        monkeypatch.setenv("CILIUM_SOCK", str(agent.socket))
        assert _completed(words, incomplete) == names
    assert _completed(words, incomplete) == []  # without an agent


def test_the_socket_on_the_line_is_the_one_that_is_asked(tmp_path: Path) -> None:
    with stub_agent(tmp_path, ANSWERS) as agent:
        assert _completed(["db", "show", "--socket", str(agent.socket)], "dev") == ["devices"]


def _completed(words: list[str], incomplete: str) -> list[str]:
    shell = ShellComplete(cli, {}, "hive", "_HIVE_COMPLETE")
    return [one.value for one in shell.get_completions(words, incomplete)]
