"""Contents of the CNI configuration file: templates, MAC keys, another file, a chained network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.cni.configuration import CniConfigSettings, rename_others
from cells.cni.configuration.contents import ConfigurationContents, NoTargetError, find_target, splice

LOG = "/var/run/cilium/cilium-cni.log"
OURS: dict[str, object] = {"type": "cilium-cni", "chaining-mode": "generic-veth"}


def file_bytes(directory: Path, **values: Any) -> bytes:
    contents = ConfigurationContents(CniConfigSettings(**values), Path("/var/run/cilium/cni.sock"))
    return contents.read(directory / "05-cilium.conflist", print)


def contents(directory: Path, **values: Any) -> dict[str, Any]:
    """The file an agent with these settings would write."""
    found: dict[str, Any] = json.loads(file_bytes(directory, **values))
    return found


def test_the_file_is_the_documented_one(tmp_path: Path) -> None:
    assert contents(tmp_path) == {
        "cniVersion": "0.3.1",
        "name": "cilium",
        "plugins": [{"type": "cilium-cni", "enable-debug": False, "log-file": LOG}],
    }


def test_the_socket_is_named_only_where_the_plugin_would_not_look() -> None:
    plugin = ConfigurationContents(CniConfigSettings(), Path("/run/node1/cni.sock")).plugin()
    assert plugin["agent-socket"] == "/run/node1/cni.sock"


def test_portmap_comes_after_us(tmp_path: Path) -> None:
    found = contents(tmp_path, cni_chaining_mode="portmap")
    assert found["name"] == "portmap"
    assert found["plugins"][1] == {"type": "portmap", "capabilities": {"portMappings": True}}


def test_flannel_comes_before_us(tmp_path: Path) -> None:
    found = contents(tmp_path, cni_chaining_mode="flannel", cni_fixed_mac="aa:bb:cc:00:00:02")
    assert [plugin["type"] for plugin in found["plugins"]] == ["flannel", "portmap", "cilium-cni"]
    assert found["plugins"][2]["chaining-mode"] == "flannel"
    assert "fixedMac" not in found["plugins"][2]


def test_mac_keys_only_when_set_and_normalised(tmp_path: Path) -> None:
    found = contents(
        tmp_path,
        cni_mac_addr_mode="deterministic",
        cni_fixed_mac="AA-BB-CC-00-00-02",
        cni_prefix_mac_map='{"sts-": "aabb.cc00.0003"}',
    )
    plugin = found["plugins"][0]
    assert list(plugin)[-4:] == ["macAddrMode", "fixedMac", "prefixMacMap", "capabilities"]
    assert plugin["capabilities"] == {"io.kubernetes.cri.pod-annotations": True}
    assert plugin["fixedMac"] == "aa:bb:cc:00:00:02"
    assert plugin["prefixMacMap"] == {"sts-": "aa:bb:cc:00:00:03"}
    assert contents(tmp_path, cni_prefix_mac_map="{}")["plugins"][0]["prefixMacMap"] == {}


def test_a_file_of_the_operators_is_written_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.conf").write_text("not even JSON")
    assert file_bytes(tmp_path, read_cni_conf=str(tmp_path / "own.conf")) == b"not even JSON"


def test_a_target_alone_means_generic_veth(tmp_path: Path) -> None:
    (tmp_path / "10-ptp.conflist").write_text('{"name": "ptp", "plugins": [{"type": "ptp"}]}')
    ours = contents(tmp_path, cni_chaining_target="ptp", cni_fixed_mac="aa:bb:cc:00:00:02")["plugins"][1]
    assert ours == {
        "type": "cilium-cni",
        "chaining-mode": "generic-veth",
        "enable-debug": False,
        "log-file": LOG,
    }


def test_aws_cni_has_a_target_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "10-aws.conflist.cilium_bak").write_text('{"name": "aws-cni", "plugins": [{"type": "aws"}]}')
    assert contents(tmp_path, cni_chaining_mode="aws-cni")["plugins"][1]["chaining-mode"] == "aws-cni"


def test_the_rest_of_a_chained_file_stays_byte_for_byte() -> None:
    source = '{ "name":"a\\u0062", "x": 1.50,\n "plugins" : [ {"type":"ptp"} , {"type":"z"}\n ], "y":{} }'
    assert splice(source, OURS) == source.replace('"z"}', '"z"}, ' + json.dumps(OURS))


def test_our_previous_entry_is_replaced_in_place() -> None:
    source = '{"plugins":[{"type":"ptp"},{"type":"cilium-cni","old":true},{"type":"z"}]}'
    assert json.loads(splice(source, OURS))["plugins"] == [{"type": "ptp"}, OURS, {"type": "z"}]


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(
    before=st.dictionaries(st.text(), json_values, max_size=3),
    plugins=st.lists(st.dictionaries(st.text(), json_values, max_size=3), min_size=1, max_size=3),
    after=st.dictionaries(st.text(), json_values, max_size=3),
    indent=st.sampled_from([None, 2]),
)
def test_any_configuration_gets_exactly_our_plugin(
    before: dict[str, Any], plugins: list[dict[str, Any]], after: dict[str, Any], indent: int | None
) -> None:
    others = {key: value for key, value in (before | after).items() if key != "plugins"}
    source = {**{k: v for k, v in before.items() if k != "plugins"}, "plugins": plugins, **others}
    spliced = json.loads(splice(json.dumps(source, indent=indent), OURS))
    retained = [plugin for plugin in plugins if plugin.get("type") != "cilium-cni"]
    assert spliced["plugins"] == [*retained, OURS]
    assert {key: value for key, value in spliced.items() if key != "plugins"} == others


def test_targets_are_taken_by_name_of_file_and_backups_count(tmp_path: Path) -> None:
    (tmp_path / "05-cilium.conflist").write_text('{"name": "b", "plugins": [{"type": "us"}]}')
    (tmp_path / "20-b.conflist").write_text('{"name": "b", "plugins": [{"type": "second"}]}')
    (tmp_path / "10-b.conf.cilium_bak").write_text('{"name": "b", "type": "first", "cniVersion": "1.0.0"}')
    (tmp_path / "00-broken.conf").write_text("{")
    (tmp_path / "01-nameless.conf").write_text("{}")
    skipped: list[str] = []
    found = json.loads(find_target(tmp_path, "b", "05-cilium.conflist", skipped.append))
    assert found["plugins"] == [{"name": "b", "type": "first", "cniVersion": "1.0.0"}]
    assert (found["name"], found["cniVersion"]) == ("b", "1.0.0")
    assert len(skipped) == 1
    assert "00-broken.conf" in skipped[0]
    assert json.loads(find_target(tmp_path, "*", "05-cilium.conflist", skipped.append))["name"] == "b"
    with pytest.raises(NoTargetError, match="no matching CNI configurations found"):
        find_target(tmp_path, "c", "05-cilium.conflist", skipped.append)


def test_other_configurations_are_renamed_only_when_we_are_to_be_alone(tmp_path: Path) -> None:
    own = tmp_path / "05-cilium.conflist"
    others = ("05-cilium.conf", "10-x.conflist", "z.json", ".a.conf", ".10-y.conf.swp", "readme.txt")
    for name in (own.name, *others):
        (tmp_path / name).touch()
    (tmp_path / "dir.conf").mkdir()
    assert rename_others(own, exclusive=False) == ["05-cilium.conf"]
    assert rename_others(own, exclusive=True) == [".a.conf", "10-x.conflist", "z.json"]
    assert rename_others(own, exclusive=True) == []
    assert (tmp_path / "10-x.conflist.cilium_bak").exists()
