"""Cilium's options that the agent does not support: rejected, without effect, or of other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from structlog.testing import capture_logs

from cells import unsupported
from cells.agent import agent
from cells.operator import operator
from cells.unsupported import OTHERS, REFUSED, UNUSED
from cells.unsupported.refused import CLOUDS, OPERATOR
from hive.agent.process import build
from lifecycle import Duration, Hive, SettingsError, Sources
from tests.support.recordings import recordings

DATA: Final = recordings("helm")
EXTRA: Final = {"some-bool", "some-number", "zz"}
"""What values of a recording put into the ConfigMap as extraConfig: options of no program."""
BINARY: Final = """
agent-labels allocator-list-timeout bgp-router-id-allocation-mode bpf-events-default-rate-limit
bpf-filter-priority bpf-lb-affinity-map-max bpf-lb-maglev-map-max bpf-lb-nat46x64 bpf-lb-rev-nat-map-max
bpf-lb-rss-ipv4-src-cidr bpf-lb-service-backend-map-max bpf-lb-service-map-max bpf-lb-source-range-map-max
bpf-map-event-buffers bypass-ip-availability-upon-restore certificates-directory cluster-health-port
clustermesh-config clustermesh-sync-timeout dns-max-ips-per-restored-rule dnsproxy-lock-count
dnsproxy-lock-timeout enable-active-connection-tracking enable-drift-checker enable-dynamic-config
enable-ipv6-ndp enable-k8s enable-recorder endpoint-queue-size envoy-config-timeout fixed-zone-mapping
gops-port http-idle-timeout http-max-grpc-timeout http-retry-timeout hubble-monitor-events
hubble-recorder-storage-path identity-restore-grace-period install-iptables-rules ipv4-pod-subnets
ipv4-service-range ipv6-mcast-device k8s-sync-timeout lib-dir local-max-addr-scope log-driver
max-controller-interval prepend-iptables-chains proxy-gid proxy-portrange-max proxy-portrange-min
status-collector-interval trace-payloadlen use-full-tls-context
"""
"""Options of Cilium's agent that its chart renders no key for."""


@cache
def recorded() -> dict[str, set[str]]:
    """Every key of a ConfigMap that Cilium's chart renders for some values, with its texts."""
    found: dict[str, set[str]] = {}
    default = json.loads((DATA / "default.json").read_text())
    pairs = list(default["rendered"]["ConfigMap/cilium-config"]["data"].items())
    for path in DATA.glob("*.json"):
        scenario = json.loads(path.read_text())
        for pointer, (_, new) in scenario.get("diff", {}).get("ConfigMap/cilium-config", {}).items():
            if pointer.startswith("/data/"):
                pairs.append((pointer.removeprefix("/data/"), new))
    for effect in json.loads((DATA / "effects.json").read_text())["values"].values():
        pairs += [(key, text) for key, (_, text) in effect.get("config", {}).items()]
    for key, text in pairs:
        texts = found.setdefault(key, set())
        if text != "<absent>":
            texts.add("" if text is None else str(text))
    return {key: texts for key, texts in found.items() if key not in EXTRA}


def options_of(hive: Hive) -> set[str]:
    return {name for one in hive.settings() for name in one.option.names}


@cache
def served() -> set[str]:
    """Names of settings of parts that are built."""
    ours = options_of(Hive(agent, settings=Sources(argv=[])))
    return ours - names(*REFUSED) - names(*UNUSED)


def names(*structs: type[msgspec.Struct]) -> set[str]:
    return {name for struct in structs for name in struct.__struct_encode_fields__}


def refused(directory: Path, values: Mapping[str, str]) -> list[str]:
    """What an agent reports of a config-dir with these files."""
    for name, text in values.items():
        (directory / name).write_text(text)
    hive = Hive(unsupported.cell, settings=Sources(config_dir=directory))
    try:
        hive.check()
    except SettingsError as error:
        return [fault.text for fault in error.faults]
    return []


def test_every_key_of_ciliums_chart_is_known() -> None:
    assert len(recorded()) > 300
    assert recorded().keys() | set(BINARY.split()) <= served() | names(*REFUSED, *UNUSED) | OTHERS


WRONG: Final = {
    "bpf-explicit-false": {"enable-bpf-masquerade"},  # masquerading by iptables is not built
    "masq-bpf-explicit-false": {"enable-bpf-masquerade"},
    "bpf-map-sizes": {"bpf-ct-global-tcp-max"},  # 1e+06
    "family-none": {"enable-ipv4"},
    "null-removes-cni-exclusive": {"auto-direct-node-routes", "cni-exclusive"},  # empty texts
    "unvalidated-chaining-mode-unknown": {"cni-chaining-mode"},
    "unvalidated-identity-mode-unknown": {"identity-allocation-mode"},
    "unvalidated-lb-mode-unknown": {"bpf-lb-acceleration", "bpf-lb-algorithm", "bpf-lb-mode"},
    "unvalidated-routing-mode-unknown": {"routing-mode"},
    "unvalidated-tunnel-protocol-unknown": {"tunnel-protocol"},
}
"""Recordings with values that a built part refuses, and which."""


def config_maps() -> Iterator[tuple[str, dict[str, str]]]:
    """Each ConfigMap that was recorded, once, with the name of the first recording that has it."""
    seen: list[dict[str, str]] = []
    default = json.loads((DATA / "default.json").read_text())["rendered"]["ConfigMap/cilium-config"]["data"]
    for path in sorted(DATA.glob("*.json")):
        if (changes := json.loads(path.read_text()).get("diff")) is None:
            continue
        data = dict(default)
        for pointer, (_, new) in changes.get("ConfigMap/cilium-config", {}).items():
            if pointer.startswith("/data/"):
                data[pointer.removeprefix("/data/")] = new
        texts = {key: str(text or "") for key, text in data.items() if text != "<absent>"}
        if texts not in seen:
            seen.append(texts)
            yield path.stem, texts


def test_an_agent_takes_or_refuses_by_name_each_key_of_every_recorded_config_map(tmp_path: Path) -> None:
    """Refused is what is not built, and what is wrong; a ConfigMap of a user's own key has one warning."""
    may = names(*REFUSED) | {"ipam"}
    for name, data in config_maps():
        directory = tmp_path / name
        directory.mkdir()
        for key, text in data.items():
            (directory / key).write_text(text)
        hive = build([f"--config-dir={directory}"], {})
        try:
            hive.check()
            faults: list[str] = []
        except SettingsError as error:
            faults = [fault.text for fault in error.faults]
        found = {text.removeprefix(f"{directory}/").partition(":")[0] for text in faults}
        assert found - may == WRONG.get(name, set()), name
        strangers = {text.removeprefix(f"file {directory}/").partition(":")[0] for text in hive.warnings()}
        assert strangers == EXTRA & data.keys(), name


def test_no_key_is_known_twice() -> None:
    groups = [served(), names(*REFUSED), names(*UNUSED), set(OTHERS)]
    assert sum(map(len, groups)) == len(set[str]().union(*groups))


def test_the_keys_of_the_operator_are_the_options_it_has() -> None:
    ours = options_of(Hive(operator, settings=Sources(argv=[])))
    agents = options_of(Hive(agent, settings=Sources(argv=[])))
    assert set(OPERATOR.split()) == ours - agents
    assert set(CLOUDS.split()) <= recorded().keys()


def values_of_unused() -> Iterator[tuple[str, str]]:
    unused = names(*UNUSED)
    return ((key, text) for key in sorted(recorded()) if key in unused for text in sorted(recorded()[key]))


def test_what_the_chart_renders_for_an_option_without_effect_is_accepted(tmp_path: Path) -> None:
    found = list(values_of_unused())
    assert len(found) > 90
    for number in range(max(len(recorded()[key]) for key, _ in found)):
        texts = {key: sorted(recorded()[key])[number % len(recorded()[key])] for key, _ in found}
        assert refused(tmp_path, texts) == []


def test_default_values_of_the_chart_ask_for_nothing_that_is_refused(tmp_path: Path) -> None:
    data = json.loads((DATA / "default.json").read_text())["rendered"]["ConfigMap/cilium-config"]["data"]
    assert refused(tmp_path, {key: text or "" for key, text in data.items()}) == []


def test_unsupported_options_are_refused_at_once_with_their_place(tmp_path: Path) -> None:
    faults = refused(tmp_path, {"enable-srv6": "true", "enable-bbr": "true"})
    assert sorted(faults) == [
        f"{tmp_path}/enable-bbr: 'true': not supported yet, expected false, or leave it unset",
        f"{tmp_path}/enable-srv6: 'true': not supported yet, expected false, or leave it unset",
    ]


def test_options_that_match_fixed_behaviour_are_accepted(tmp_path: Path) -> None:
    given = {"enable-srv6": "false", "restore": "true", "node-labels": ""}
    assert refused(tmp_path, given) == []


OPTIONS: Final[dict[str, Any]] = {
    name: default
    for family in REFUSED
    for name, default in zip(family.__struct_encode_fields__, family.__struct_defaults__, strict=True)
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_unsupported_option_has_a_refused_value(option: str, tmp_path: Path) -> None:
    """Not one of them is only read and then forgotten."""
    default = OPTIONS[option]
    other = str(not default).lower() if isinstance(default, bool) else "7"
    if isinstance(default, Duration):
        other = "7s"
    assert [
        line.startswith(f"{tmp_path}/{option}: '{other}'") for line in refused(tmp_path, {option: other})
    ] == [True]


def test_policies_that_should_select_the_local_cluster_by_default_are_refused(tmp_path: Path) -> None:
    """Otherwise they would silently select endpoints of all clusters of the mesh."""
    (fault,) = refused(tmp_path, {"policy-default-local-cluster": "true"})
    assert "policy-default-local-cluster: 'true': not supported yet, expected false" in fault


@pytest.mark.anyio
async def test_options_without_effect_are_logged_unless_default() -> None:
    argv = ["--hubble-recorder-sink-queue-size=1", "--enable-tcx=false", "--pprof-port=6060"]
    with capture_logs() as logged:
        async with Hive(unsupported.cell, settings=Sources(argv=argv)).started():
            pass
    found = [one for one in logged if one["event"] == "settings without effect here"]
    assert [one["settings"] for one in found] == [["enable-tcx", "hubble-recorder-sink-queue-size"]]


def test_an_unknown_key_is_one_warning_with_what_is_near(tmp_path: Path) -> None:
    near = "bpf-lb-source-range-all-types"
    given = {
        near[:-1]: "true",
        "identity-gc-interval": "1h",
        "eni-tags": "a",
        "mtu": "1400",
    }
    for name, text in given.items():
        (tmp_path / name).write_text(text)
    environment = {"CILIUM_SOCK": "/run/x", "CILIUM_K8S_NAMESPACE": "a", "CILIUM_MTO": "1"}
    hive = build([f"--config-dir={tmp_path}"], environment)
    assert sorted(hive.warnings()) == [
        "CILIUM_MTO: no such setting; did you mean CILIUM_MTU?; it is ignored",
        f"file {tmp_path}/{near[:-1]}: no such setting; did you mean {near}?; it is ignored",
    ]
