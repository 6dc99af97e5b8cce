"""Kernel settings are written where they differ, and a refusal says what to do."""

from pathlib import Path

import pytest

from cells.router.sysctl import ensure, router_settings
from lifecycle import HiveError


def setting(root: Path, name: str, value: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value, encoding="ascii")
    return path


def test_the_settings_are_those_of_the_datapath_page() -> None:
    settings = router_settings()
    assert settings.pop("net/ipv4/conf/all/rp_filter") == "0"
    for device in ("cilium_host", "cilium_net"):
        for name, value in (("rp_filter", "0"), ("forwarding", "1"), ("accept_local", "1")):
            assert settings.pop(f"net/ipv4/conf/{device}/{name}") == value
        assert settings.pop(f"net/ipv4/conf/{device}/send_redirects") == "0"
    assert settings == {}


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    same, other = setting(tmp_path, "a", "0\n"), setting(tmp_path, "b", "2\n")
    ensure({"a": "0", "b": "0"}, tmp_path)
    assert (same.read_text(), other.read_text()) == ("0\n", "0")


def test_a_setting_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(HiveError) as caught:
        ensure({"net/ipv4/conf/all/rp_filter": "0"}, tmp_path)
    assert str(caught.value) == (
        "cannot set net.ipv4.conf.all.rp_filter=0: No such file or directory; "
        f"make {tmp_path} writable for the agent, or set it on the node"
    )
