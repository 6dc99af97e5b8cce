"""Kernel settings are written where they differ and written again when changed; a refusal has advice."""

from pathlib import Path

import pytest

from cells.node.router import accept_ra_settings, router_settings, router_settings6
from cells.node.sysctl import SysctlFiles, Sysctls, cell
from lifecycle import Hive, HiveError, Logger, Tables, invoke, replace
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio


def setting(root: Path, name: str, value: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value, encoding="ascii")
    return path


def root(_sysctls: Sysctls, _log: Logger, _tables: Tables) -> None:
    """What the tests need of the hive."""


def hive(place: Path) -> Hive:
    return Hive(cell, invoke(root), replace(SysctlFiles, SysctlFiles(place)))


def test_the_settings_are_those_of_the_datapath_page() -> None:
    settings = router_settings()
    assert settings.pop("net/ipv4/conf/all/rp_filter") == "0"
    for device in ("cilium_host", "cilium_net"):
        for name, value in (("rp_filter", "0"), ("forwarding", "1"), ("accept_local", "1")):
            assert settings.pop(f"net/ipv4/conf/{device}/{name}") == value
        assert settings.pop(f"net/ipv4/conf/{device}/send_redirects") == "0"
    assert settings == {}


def device(place: Path, name: str, accept_ra: str, forwarding: str) -> None:
    setting(place, f"net/ipv6/conf/{name}/accept_ra", accept_ra + "\n")
    setting(place, f"net/ipv6/conf/{name}/forwarding", forwarding + "\n")


def test_ipv6_forwards_and_devices_that_listen_to_routers_go_on_to(tmp_path: Path) -> None:
    device(tmp_path, "eth0", "1", "0")
    device(tmp_path, "eth1", "0", "0")
    device(tmp_path, "eth2", "1", "1")  # forwards, and so does not listen
    device(tmp_path, "eth3", "2", "1")
    read = SysctlFiles(tmp_path).read
    devices = ["eth0", "eth1", "eth2", "eth3", "gone"]
    assert accept_ra_settings(devices, read) == {"net/ipv6/conf/eth0/accept_ra": "2"}
    ours = {"disable_ipv6": "0", "accept_ra": "0", "forwarding": "1"}
    assert list(router_settings6().items()) == [
        *((f"net/ipv6/conf/cilium_host/{name}", value) for name, value in ours.items()),
        *((f"net/ipv6/conf/cilium_net/{name}", value) for name, value in ours.items()),
        ("net/ipv6/conf/all/forwarding", "1"),
    ]


async def test_only_what_differs_is_written(tmp_path: Path) -> None:
    same, other = setting(tmp_path, "a", "0\n"), setting(tmp_path, "b", "2\n")
    async with hive(tmp_path).started() as started:
        started.get(Sysctls).enforce({"a": "0", "b": "0"})
        assert (same.read_text(), other.read_text()) == ("0\n", "0")


async def test_a_setting_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    async with hive(tmp_path).started() as started:
        with pytest.raises(HiveError) as caught:
            started.get(Sysctls).enforce({"net/ipv4/conf/all/rp_filter": "0"})
        assert str(caught.value) == (
            "cannot set net.ipv4.conf.all.rp_filter=0: No such file or directory; "
            f"make {tmp_path} writable for the agent, or set it on the node"
        )


async def test_a_changed_sysctl_is_restored(tmp_path: Path) -> None:
    retained, once = setting(tmp_path, "a", "0"), setting(tmp_path, "b", "0")
    async with hive(tmp_path).started() as started:
        sysctls = started.get(Sysctls)
        sysctls.enforce({"a": "1"})
        sysctls.write({"b": "1"})
        statuses = started.get(Tables).get("sysctls-status")
        await eventually(lambda: len(statuses) == 1)
        retained.write_text("2")
        once.write_text("2")
        sysctls.check()
        await eventually(lambda: retained.read_text() == "1")
        assert once.read_text() == "2"
