"""The early load predicts exactly the programs and maps that the cells request, in each mode."""

from pathlib import Path

import pytest
import yaml

from cells.datapath.datapath import Datapath
from cells.maps.node_maps import Maps
from hive.agent.forecast import SettingsOfOthers, forecast
from hive.agent.process import build, sources_of
from lifecycle.settings.options import Group

CHART = Path(__file__).resolve().parents[3] / "configs" / "manifests" / "configmap.yaml"
MODES = {
    "the defaults": "",
    "kube-proxy replacement": "kube-proxy-replacement=true",
    "kube-proxy replacement through the stack": "kube-proxy-replacement=true enable-host-legacy-routing=true",
    "asked for the way past the stack in vain": "enable-host-legacy-routing=false",
    "node ports": "enable-node-port=true bpf-lb-acceleration=best-effort enable-ipv4-masquerade=false",
    "maglev": "bpf-lb-external-clusterip=true bpf-lb-algorithm=maglev",
    "maglev of some services": "enable-external-ips=true bpf-lb-algorithm-annotation=true",
    "maglev without clients outside": "bpf-lb-algorithm=maglev",
    "an option's other name": "enable-host-port=true node-port-algorithm=maglev",
    "sockets": "bpf-lb-sock=true enable-session-affinity=true",
    "redirects": "enable-local-redirect-policy=true",
    "announcements": "kube-proxy-replacement=true enable-l2-announcements=true",
    "both families": "enable-ipv6=true enable-sctp=true",
    "IPv6 alone": "enable-ipv6=true enable-ipv4=false",
    "the host firewall": "enable-host-firewall=true",
    "native routing": "routing-mode=native",
    "no masquerading": "enable-ipv4-masquerade=false",
    "ip-masq-agent": "enable-ip-masq-agent=true",
    "egress gateways": "enable-ipv4-egress-gateway=true kube-proxy-replacement=true",
    "chained": "cni-chaining-mode=flannel",
    "chained by a target": "cni-chaining-target=bridge",
    "portmap": "cni-chaining-mode=portmap",
    "WireGuard": "enable-wireguard=true",
    "networks of policies": "policy-cidr-match-mode=pods",
    "lifetimes": "bpf-ct-timeout-regular-tcp=1h node-port-range=31000,31999",
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_forecast_is_what_the_cells_of_the_agent_ask_for(mode: str) -> None:
    check([f"--{each}" for each in mode.split()])


def test_the_forecast_with_ipsec(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("3+ rfc4106(gcm(aes)) 44434241343332312423222114131211f4f3f2f1 128\n", encoding="utf-8")
    check(["--enable-ipsec=true", f"--ipsec-key-file={keys}", "--kube-proxy-replacement=true"])


def test_the_forecast_with_the_settings_of_the_chart(tmp_path: Path) -> None:
    for name, value in yaml.safe_load(CHART.read_text(encoding="utf-8"))["data"].items():
        (tmp_path / name).write_text(value, encoding="utf-8")
    check([f"--config-dir={tmp_path}"])
    check([f"--config-dir={tmp_path}", "--kube-proxy-replacement=true"])


def check(flags: list[str]) -> None:
    hive = build(flags, {})
    hive.build()
    found = forecast(sources_of(flags, {}))
    assert found is not None
    maps, datapath = hive.get(Maps), hive.get(Datapath)
    asked = {attribute for attribute in Maps.__annotations__ if maps.uses(attribute)}
    assert found.used == asked
    assert found.programs == datapath.program_settings


def test_settings_of_other_cells_have_their_names_and_defaults() -> None:
    known = {option.name: option for option in build([], {}).options()}
    for option in Group(SettingsOfOthers).options:
        theirs = known[option.name]
        assert (option.kind, option.default) == (theirs.kind, theirs.default), option.name
        assert option.renamed_from == theirs.renamed_from, option.name


def test_wrong_settings_have_no_forecast() -> None:
    assert forecast(sources_of(["--mtu=many"], {})) is None
    assert forecast(sources_of(["--enable-ipv4=false"], {})) is None
