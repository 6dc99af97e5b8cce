"""hive cleanup on a node removes the agent's state and nothing else."""

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from cells.datapath.build import find_clang
from cells.maps.bpf import pin
from cells.maps.map import NO_PREALLOC, MapSpec, MapType, create_map
from hive.init import node_state
from hive.init.cleanup import command
from hive.main import cli

pytestmark = pytest.mark.kernel


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def tc(*words: str) -> str:
    return subprocess.run(["tc", *words], check=True, capture_output=True, text=True).stdout


def make_pin(directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    spec = MapSpec(name=name, type=MapType.HASH, key_size=4, value_size=4, max_entries=1, flags=NO_PREALLOC)
    with create_map(spec) as table:
        pin(table.fd, directory / name)


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """Options that point every directory away from this machine's."""
    for name in ("state", "lib", "cgroup", "cni"):
        (tmp_path / name).mkdir()
    return [
        f"--state-dir={tmp_path / 'state'}",
        f"--lib-dir={tmp_path / 'lib'}",
        f"--cgroup-root={tmp_path / 'cgroup'}",
        f"--cni-conf-dir={tmp_path / 'cni'}",
    ]


def clean(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_links_pins_and_files_of_the_agent_go_and_others_stay(
    in_node: None, tmp_path: Path, places: list[str]
) -> None:
    ip("link", "add", "cilium_host", "type", "veth", "peer", "name", "cilium_net")
    ip("link", "add", "lxc0123456789ab", "type", "veth", "peer", "name", "tmpx")
    ip("link", "add", "eth7", "type", "veth", "peer", "name", "eth8")
    for family in ("-4", "-6"):
        for priority, table in (("9", "2004"), ("10", "2010")):
            rule = ("fwmark", "0x200/0xf00", "lookup", table, "priority", priority)
            ip(family, "rule", "add", *rule)
            ip(family, "route", "add", "local", "default", "dev", "lo", "table", table, "proto", "static")
    make_pin(Path("/sys/fs/bpf/tc/globals"), "cilium_lxc")
    make_pin(Path("/sys/fs/bpf/tc/globals"), "others_map")
    Path("/sys/fs/bpf/cilium/dispatch").mkdir(parents=True)
    cni = tmp_path / "cni"
    (cni / "05-cilium.conflist").write_text("{}")
    (cni / "10-flannel.conflist.cilium_bak").write_text("{}")
    (tmp_path / "state" / "state").mkdir()

    output = clean("-f", *places)

    assert "removed cilium_host" in output
    for family in ("-4", "-6"):
        assert "2004" not in ip(family, "rule")
        assert "2010" in ip(family, "rule")
        assert "default" not in ip(family, "route", "show", "table", "2004")
    assert {line.split(": ")[1].split("@")[0] for line in ip("-o", "link").splitlines()} == {
        "lo",
        "eth7",
        "eth8",
    }
    assert [path.name for path in Path("/sys/fs/bpf/tc/globals").iterdir()] == ["others_map"]
    assert not Path("/sys/fs/bpf/cilium").exists()
    assert [path.name for path in cni.iterdir()] == ["10-flannel.conflist"]
    assert not (tmp_path / "state").exists()
    assert clean("-f", *places) == ""


def test_bpf_state_alone_leaves_links_and_files(in_node: None, tmp_path: Path, places: list[str]) -> None:
    ip("link", "add", "cilium_host", "type", "veth", "peer", "name", "cilium_net")
    make_pin(Path("/sys/fs/bpf/tc/globals"), "cilium_lxc")

    assert clean("-f", "--bpf-state", *places).splitlines() == ["removed /sys/fs/bpf/tc/globals/cilium_lxc"]
    assert "cilium_host" in ip("link")
    assert (tmp_path / "state").exists()


def test_bpf_state_alone_warns_that_pods_are_open(in_node: None, places: list[str]) -> None:
    for number in range(7):
        ip("link", "add", f"lxc{number}", "type", "veth", "peer", "name", f"pod{number}")
    warning = "Warning: 7 pods keep their links (lxc0, lxc1, lxc2, lxc3, lxc4, …) and no policy holds"
    for arguments in (["-f"], []):
        done = CliRunner().invoke(command, [*arguments, "--bpf-state", *places], input="n\n")
        assert done.exit_code == 0
        assert warning in done.output
        assert "lose their network. Go on" not in done.output
    assert "Warning" not in clean("-f", "--all-state", *places)


def test_programs_on_any_interface_go_by_their_name(in_node: None, tmp_path: Path, places: list[str]) -> None:
    ip("link", "add", "eth7", "type", "veth", "peer", "name", "eth8")
    for name in ("cil_from_netdev", "other"):
        source = tmp_path / f"{name}.c"
        source.write_text(f'__attribute__((section("tc"), used)) int {name}(void *skb) {{ return 0; }}\n')
        subprocess.run(
            [
                find_clang(),
                "-O2",
                "-g",
                "-target",
                "bpf",
                "-c",
                str(source),
                "-o",
                str(tmp_path / f"{name}.o"),
            ],
            check=True,
        )
    tc("qdisc", "replace", "dev", "eth7", "clsact")
    for direction, name in (("ingress", "cil_from_netdev"), ("egress", "other")):
        pinned = f"/sys/fs/bpf/{name}"
        subprocess.run(["bpftool", "prog", "load", str(tmp_path / f"{name}.o"), pinned], check=True)
        tc("filter", "add", "dev", "eth7", direction, "bpf", "da", "object-pinned", pinned)

    assert clean("-f", "--bpf-state", *places).splitlines() == ["removed cil_from_netdev from eth7"]
    assert tc("filter", "show", "dev", "eth7", "ingress") == ""
    assert "other" in tc("filter", "show", "dev", "eth7", "egress")


def test_cleanup_asks_and_a_refusal_changes_nothing(in_node: None, places: list[str]) -> None:
    make_pin(Path("/sys/fs/bpf/tc/globals"), "cilium_lxc")
    result = CliRunner().invoke(command, places, input="n\n", catch_exceptions=False)
    assert "Nothing was removed." in result.output
    assert Path("/sys/fs/bpf/tc/globals/cilium_lxc").exists()


def test_one_step_that_fails_does_not_stop_the_next(
    in_node: None, tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> list[str]:
        raise OSError(16, f"busy: {directory}")

    monkeypatch.setattr(node_state, "remove_pins", refuse)
    result = CliRunner().invoke(command, ["-f", *places], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr.startswith("Error: pinned maps in /sys/fs/bpf: ")
    assert not (tmp_path / "state").exists()


def test_cleanup_is_refused_while_an_agent_runs(in_node: None, tmp_path: Path, places: list[str]) -> None:
    import fcntl

    with (tmp_path / "state" / "agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = CliRunner().invoke(cli, ["cleanup", "-f", *places])
    assert result.exit_code == 1
    assert "an agent runs with the state directory" in result.output
