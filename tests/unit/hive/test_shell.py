"""``hive shell``: commands to any hive with an admin socket."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from hive.main import cli
from tests.support.daemon import running


def test_commands_run_in_any_hive_with_an_admin_socket(tmp_path: Path) -> None:
    with running(tmp_path):
        socket = f"--socket={tmp_path / 'admin.sock'}"
        ran = CliRunner().invoke(cli, ["shell", socket, "db/show", "--columns=number", "orders"])
        assert ran.output == "NUMBER\n"
        ran = CliRunner().invoke(cli, ["shell", socket], input="echo hi\nshop/deliver\n")
        assert ran.output == "hi\ndelivered\n"
        assert CliRunner().invoke(cli, ["shell", socket, "nothing"], standalone_mode=False).return_value == 1


def test_a_shell_socket_without_a_server_is_one_line(tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli, ["shell", f"--socket={tmp_path / 'x'}", "db"])
    assert (
        ran.output == f"Error: nothing listens on {tmp_path / 'x'}: start the process, or name its --socket\n"
    )


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_its_help_names_the_default(word: str) -> None:
    assert "/var/run/cilium/shell.sock" in CliRunner().invoke(cli, ["shell", word]).output
