"""MAC addresses of pods: annotation, fixed, longest prefix, deterministic, random; bad values are refused."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.cni.attachment import MacPair, macs_of
from cells.cni.protocol import CniError
from cells.cni.request import NetConf, PodReference
from cells.endpoint import MAC_ANNOTATION
from cells.netlink.rows import mac_text, parse_mac

Conf = dict[str, object]
WEB = PodReference("web-0", "default", "")
PREFIXES = {"sts-": "aa:bb:cc:00:00:02", "sts-db-": "aa:bb:cc:00:00:03"}
DETERMINISTIC: Conf = {"macAddrMode": "deterministic"}
FIXED: Conf = {"fixedMac": "AA:BB:CC:00:00:02"}


def annotated(mac: str) -> Conf:
    return {"runtimeConfig": {"io.kubernetes.cri.pod-annotations": {MAC_ANNOTATION: mac, "other": "x"}}}


def macs(conf: Conf, pod: PodReference = WEB, ifname: str = "eth0") -> MacPair:
    return macs_of(msgspec.json.decode(json.dumps(conf), type=NetConf), pod, ifname)


@pytest.mark.parametrize(
    ("conf", "pod", "expected"),
    [
        (DETERMINISTIC, WEB, "52:84:2a:fe:62:3a"),
        (DETERMINISTIC, PodReference("coredns-abc", "kube-system", ""), "1e:48:67:06:fe:f9"),
        (FIXED, WEB, "aa:bb:cc:00:00:02"),
        ({**FIXED, **DETERMINISTIC, "prefixMacMap": {"web": "aa:bb:cc:00:00:09"}}, WEB, "aa:bb:cc:00:00:02"),
        ({"prefixMacMap": PREFIXES}, PodReference("sts-db-0", "x", ""), "aa:bb:cc:00:00:03"),
        (
            {"prefixMacMap": dict(reversed(PREFIXES.items()))},
            PodReference("sts-db-0", "x", ""),
            "aa:bb:cc:00:00:03",
        ),
        ({"prefixMacMap": PREFIXES, **DETERMINISTIC}, PodReference("sts-0", "x", ""), "aa:bb:cc:00:00:02"),
        (
            {"prefixMacMap": {**PREFIXES, "": "aa:bb:cc:00:00:04"}},
            PodReference("", "", ""),
            "aa:bb:cc:00:00:04",
        ),
        ({"prefixMacMap": PREFIXES, **DETERMINISTIC}, WEB, "52:84:2a:fe:62:3a"),
        ({**FIXED, **DETERMINISTIC, **annotated("02-00-00-00-00-09")}, WEB, "02:00:00:00:00:09"),
    ],
)
def test_the_pods_end_follows_the_most_important_rule(conf: Conf, pod: PodReference, expected: str) -> None:
    assert mac_text(macs(conf, pod).pod) == expected


def test_only_deterministic_mode_fixes_the_mac_of_the_host_end() -> None:
    assert mac_text(macs(DETERMINISTIC).host) == "52:d4:d5:f3:05:0d"
    assert mac_text(macs({**DETERMINISTIC, **FIXED}).host) == "52:d4:d5:f3:05:0d"
    assert macs(FIXED).host != macs(FIXED).host


@pytest.mark.parametrize(
    ("conf", "pod"),
    [
        ({}, WEB),
        ({"macAddrMode": "random"}, WEB),
        ({"macAddrMode": "unheard-of"}, WEB),
        ({"prefixMacMap": PREFIXES}, PodReference("mysts-0", "x", "")),
        (DETERMINISTIC, PodReference("", "default", "")),
    ],
)
def test_without_a_rule_both_ends_are_random(conf: Conf, pod: PodReference) -> None:
    seen = [mac for _ in range(8) for mac in macs(conf, pod)]
    assert len(set(seen)) == len(seen)
    assert all(mac[0] & 3 == 2 for mac in seen)


def test_every_interface_of_a_pod_has_its_own() -> None:
    pairs = [macs(DETERMINISTIC, ifname=name) for name in ("eth0", "net1", "net2")]
    ends = {mac for pair in pairs for mac in pair}
    assert len(ends) == 6
    assert macs(DETERMINISTIC, ifname="net1") == pairs[1]


@given(namespace=st.text(max_size=20), name=st.text(min_size=1, max_size=20))
def test_derived_addresses_are_unicast_and_local(namespace: str, name: str) -> None:
    for mac in macs(DETERMINISTIC, PodReference(name, namespace, "")):
        assert len(mac) == 6
        assert mac[0] & 3 == 2


@pytest.mark.parametrize(
    "text", ["01:00:00:00:00:01", "00:00:00:00:00:00", "zz:zz", "02:00:00:00:00:00:00:01"]
)
@pytest.mark.parametrize("source", ["fixedMac", "prefixMacMap other", f"pod annotation {MAC_ANNOTATION}"])
def test_what_no_interface_can_have_is_refused_even_where_it_does_not_decide(source: str, text: str) -> None:
    sources: dict[str, Conf] = {
        "fixedMac": {"fixedMac": text, **annotated("02:00:00:00:00:01")},
        "prefixMacMap other": {"prefixMacMap": {"other": text}, **FIXED},
        f"pod annotation {MAC_ANNOTATION}": annotated(text),
    }
    with pytest.raises(CniError) as refused:
        macs(sources[source])
    assert refused.value.code == 999
    assert refused.value.message == (
        f"unable to set MAC address on interface eth0: address {text}: invalid MAC address"
    )
    assert refused.value.details.startswith(f"{source}: ")


def test_the_text_of_the_result_is_lower_case() -> None:
    assert mac_text(parse_mac("AA:BB:CC:00:00:02")) == "aa:bb:cc:00:00:02"
