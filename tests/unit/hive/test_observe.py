"""``hive observe``: wrong words and absent flows are one line that names what was expected or what to set."""

from pathlib import Path

import pytest

from tests.support.command_line import hive
from tests.unit.hive.stub_agent import stub_agent


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--last", "x"), "--last: 'x': expected a whole number of at least 0"),
        (("--since", "yesterday"), "--since: 'yesterday': expected how long ago, such as 5m"),
        (("--verdict", "WRONG"), "--verdict: 'WRONG': expected one of VERDICT_UNKNOWN, FORWARDED, DROPPED"),
        (("-t", "nonsense"), "--type: 'nonsense': expected drop, debug, capture, trace"),
        (("-o", "nonsense"), "--output: 'nonsense': expected one of compact"),
        (("--follow=perhaps",), "--follow: 'perhaps': expected true or false"),
        (("--bogus",), "unknown flag: --bogus"),
    ],
)
def test_a_wrong_value_names_what_was_expected(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "observe", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"hive: {expected}")
    assert result.err.count("\n") == 1


def observed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, socket: Path) -> str:
    """What is printed where nothing listens at Hubble's socket."""
    server = f"unix://{socket.parent}/hubble.sock"
    monkeypatch.setattr("hive.observe.hubble.LOCAL", server)
    monkeypatch.setenv("CILIUM_SOCK", str(socket))
    result = hive(capsys, "observe", "--server", server)
    assert (result.code, result.out) == (1, "")
    return result.err


def test_without_flows_the_setting_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_agent(tmp_path, {"/v1/healthz": (200, {"hubble": {"state": "Disabled"}})}) as agent:
        assert "set enable-hubble=true" in observed(capsys, monkeypatch, agent.socket)


def test_flows_at_another_socket_are_pointed_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_agent(tmp_path, {"/v1/healthz": (200, {"hubble": {"state": "Ok"}})}) as agent:
        assert "flows are served elsewhere" in observed(capsys, monkeypatch, agent.socket)


def test_without_an_agent_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no agent answers at" in observed(capsys, monkeypatch, tmp_path / "cilium.sock")
