"""The socket file: its mode and group, and an existing file in its place."""

import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from lifecycle import HiveError
from lifecycle.http import listen


def test_only_root_and_the_group_may_connect(tmp_path: Path) -> None:
    own = grp.getgrgid(os.getgid()).gr_name
    with listen(tmp_path / "cilium.sock", group=own) as server:
        found = (tmp_path / "cilium.sock").stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o660
        assert found.st_gid == os.getgid()
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_a_host_without_the_group_is_served_all_the_same(tmp_path: Path) -> None:
    listen(tmp_path / "cilium.sock", group="no-such-group-here").close()


def test_a_socket_that_a_killed_agent_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cilium.sock"
    listen(path).close()
    assert path.exists()
    with listen(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_that_is_served_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "cilium.sock"
    with listen(path), socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(HiveError, match="another process serves") as refused:
            listen(path)
        assert "\n" not in str(refused.value)
        client.connect(str(path))


def test_a_file_in_the_way_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "cilium.sock"
    path.write_text("precious")
    with pytest.raises(HiveError, match="is not a socket"):
        listen(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["missing/cilium.sock", "x" * 200])
def test_an_unusable_socket_path_is_reported_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(HiveError, match="cannot be made") as refused:
        listen(tmp_path / name)
    assert "\n" not in str(refused.value)
