"""The chart maps Cilium's values to Cilium's keys, and rejects unsupported values by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from cells.agent import agent
from cells.operator import LEADER, operator
from lifecycle import Settings, Sources
from lifecycle.graph import sections
from lifecycle.settings.sources import load as load_settings
from tests.integration.deploy.differences import DIFFERENT_KEYS
from tests.integration.deploy.rendered import (
    CONFIG,
    NAMES,
    OF_INIT,
    known_keys,
    load,
    recorded_keys,
    rendered,
)
from tests.support import chart
from tests.support.counts import Count

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")

RENDERED_HERE = {
    "bad-hubble-own-certs-missing": "certificates of Secrets are taken when they are there",
}


@cache
def structs() -> list[type[Settings]]:
    """The settings of agent and operator."""
    return [section.struct for section in sections(agent, operator, *LEADER)]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_values_give_the_keys_that_cilium_s_chart_gives(name: str, count: Count) -> None:
    bad = name.startswith("bad-") and name not in RENDERED_HERE
    found = rendered(name)
    if isinstance(found, str):
        text = found
        if bad:
            message = load(name)["error"].get("message")
            same = message is not None and message in text
            words = "the same words" if same else "words of our own"
            count("recorded values", {f"refused by both, in {words}": 1})
            assert same or message is None, text
            return
        assert any(why in text for why in ("not served here", "no value of this chart", "one family")), text
        asks = re.search(r"\): ([\w.]+)", text)
        count("recorded values", {f"refused here: {asks[1] if asks else 'neither family'} is not served": 1})
        return
    assert not bad
    if name in RENDERED_HERE:
        count("recorded values", {f"taken here: {RENDERED_HERE[name]}": 1})
        return
    ours, theirs = (found.get(CONFIG) or {}).get("data"), recorded_keys(name)
    assert (ours is None) == (theirs is None)
    count("recorded values", {"compared": 1})
    outcomes: Counter[str] = Counter()
    for key in known_keys() if ours is not None and theirs is not None else ():
        assert ours is not None
        assert theirs is not None
        if str(ours.get(key) or "") == str(theirs.get(key) or ""):
            outcomes["equal"] += 1
        else:
            assert key in DIFFERENT_KEYS, (key, ours.get(key), theirs.get(key))
            outcomes[f"different: {DIFFERENT_KEYS[key]}"] += 1
    outcomes["of what is not served"] += len((theirs or {}).keys() - known_keys())
    count("keys of the ConfigMap", outcomes)


def test_generated_chart_files_are_up_to_date() -> None:
    for path, text in {**chart.generated(), **chart.manifests()}.items():
        assert path.read_text() == text, f"{path.name}: run python -m tests.support.chart"


def test_every_value_of_the_schema_has_a_description() -> None:
    def bare(of: dict[str, Any], at: str = "") -> Iterator[str]:
        for name, one in of["properties"].items():
            if "properties" in one:
                yield from bare(one, f"{at}{name}.")
            elif not one.get("description"):
                yield at + name

    assert list(bare(json.loads((chart.CHART / "values.schema.json").read_text()))) == []


def test_every_key_is_a_setting_of_the_agent_or_the_operator() -> None:
    options = {option.name for section in sections(agent, operator, *LEADER) for option in section.options}
    assert known_keys() - options - OF_INIT == set()


@pytest.mark.parametrize(
    ("given", "states"),
    [
        ({"hubble": {"ui": {"enabled": True}}}, "Hubble UI requires .Values.hubble.relay.enabled=true"),
        ({"kubeProxyReplacement": "partial"}, "kubeProxyReplacement must be explicitly set to a valid value"),
        ({"loadBalancer": {"acceleration": "fast"}}, "loadBalancer.acceleration=fast: not served here"),
        ({"identityAllocationMode": "kvstore"}, "identityAllocationMode=kvstore: agents need a store"),
        ({"ipam": {"mod": "x"}}, "ipam.mod: no value of this chart, nor of Cilium's"),
        ({"nonsense": True}, "nonsense: no value of this chart, nor of Cilium's"),
        ({"routingMode": "bogus"}, "routingMode=bogus: not served here: expected native or tunnel"),
        ({"routingMode": "tunnel", "autoDirectNodeRoutes": True}, "autoDirectNodeRoutes=true: needs"),
        ({"autoDirectNodeRoutes": True}, "autoDirectNodeRoutes=true: needs routingMode"),
        ({"tunnelProtocol": "gre"}, "tunnelProtocol=gre: not served here: expected vxlan or geneve"),
        ({"underlayProtocol": "auto"}, "underlayProtocol=auto: not served here: expected ipv4 or ipv6"),
        ({"bpf": {"masquerade": False}}, "bpf.masquerade=false: masquerading by iptables is not served here"),
        ({"cni": {"chainingMode": "bogus"}}, "cni.chainingMode=bogus: not served here: expected none"),
        ({"ipam": {"ciliumNodeUpdateRate": "soon"}}, "ipam.ciliumNodeUpdateRate=soon: expected a duration"),
        ({"encryption": {"enabled": True, "ipsec": {"keyRotationDuration": "1d"}}},
         "encryption.ipsec.keyRotationDuration=1d: expected a duration"),
        ({"k8sServicePort": True}, "k8sServicePort"),
        ({"gke": {"enabled": True}, "routingMode": "tunnel"}, "RoutingMode must be set to native when gke"),
        ({"hubble": {"enabled": True, "relay": {"enabled": True},
                     "ui": {"enabled": True, "frontend": {"image": {"tag": "v0.8.5"}}}}},
         "Hubble UI requires hubble.ui.frontend.image.tag to be '>=v0.9.0'"),
        ({"clustermesh": {"useAPIServer": True}, "disableEndpointCRD": True},
         "The clustermesh-apiserver cannot be enabled in combination with .Values.disableEndpointCRD=true"),
        ({"envoy": {"baseID": 4294967296}}, "envoy.baseID must be an int. Supported values 0 - 4294967295"),
        ({"cluster": {"name": "a", "id": 300}, "eni": {"enabled": True}}, "eni.enabled: a value of Cilium's"),
        ({"cluster": {"name": "a", "id": 400}, "eni": {"enabled": True}}, "Cilium is currently affected"),
        ({"operator": {"nodeGCInterval": "soon"}}, "operator.nodeGCInterval=soon: expected a duration"),
        ({"operator": {"replicas": "two"}}, "replicas"),
        ({"aksbyocni": {"enabled": True}, "routingMode": "native"}, "RoutingMode must be set to tunnel"),
        ({"fragmentTracking": False}, "fragmentTracking=false: not served here: expected true"),
        ({"bpf": {"datapathMode": "netkit"}}, "bpf.datapathMode: a value of Cilium's chart"),
        ({"daemon": {"configSources": "secret:a/b"}}, "daemon.configSources: secret:a/b: expected one of"),
        ({"daemon": {"configSources": "directory"}}, "daemon.configSources: directory: expected a path"),
    ],
)  # fmt: skip
def test_unsupported_values_are_refused_by_name(given: dict[str, Any], states: str) -> None:
    with pytest.raises(chart.RenderError, match=states.replace("(", r"\(")):
        chart.objects(given)


def test_disabled_unsupported_values_are_accepted() -> None:
    given = {"hubble": {"enabled": False}, "kubeProxyReplacement": "", "l2announcements": {"enabled": False}}
    assert chart.objects(given) == chart.objects({})


def test_values_without_effect_are_accepted_and_listed_after_the_install() -> None:
    given = {
        "nat": {"mapStatsEntries": 64},
        "monitor": {"enabled": True, "eventTypes": ["drop"]},
        "operator": {
            "pprof": {"enabled": True, "port": 6061},
            "image": {"genericDigest": "sha256:0", "useDigest": True},
        },
        "hubble": {"ui": {"backend": {"image": {"digest": "sha256:0"}}}},
    }
    assert chart.objects(given) == chart.objects({})
    (line,) = [line for line in chart.render(given)["NOTES.txt"].splitlines() if "without effect" in line]
    listed = (
        "hubble.ui.backend.image, monitor, nat.mapStatsEntries, operator.image.genericDigest, operator.pprof"
    )
    assert line == f"Taken, but without effect here: {listed}."
    assert "without effect" not in chart.render({})["NOTES.txt"]


def test_node_networks_may_be_a_list_or_a_string() -> None:
    def ranges(given: object) -> str:
        values = {"ipam": {"operator": {"clusterPoolIPv4PodCIDRList": given}}}
        return str(chart.objects(values)[CONFIG]["data"]["cluster-pool-ipv4-cidr"])

    assert ranges("10.1.0.0/16") == ranges(["10.1.0.0/16"]) == "10.1.0.0/16"
    assert ranges("10.1.0.0/16 10.2.0.0/16") == ranges(["10.1.0.0/16", "10.2.0.0/16"])
    with pytest.raises(chart.RenderError, match="clusterPoolIPv4PodCIDRList"):
        ranges(10)


@pytest.mark.parametrize("text", ["0", ".5s", "1.s", "+1h2m", "1m0s500ms"])
def test_durations_are_those_of_go(text: str) -> None:
    assert chart.objects({"conntrackGCInterval": text})[CONFIG]["data"]["conntrack-gc-interval"] == text


def test_values_without_a_type_in_cilium_s_chart_may_be_text() -> None:
    given = {"sessionAffinity": "true", "policyAuditMode": "true", "hubble": {"eventQueueSize": "4096"}}
    data = chart.objects(given)[CONFIG]["data"]
    assert (data["enable-session-affinity"], data["policy-audit-mode"]) == ("true", "true")


def test_values_that_equal_fixed_behaviour_are_accepted_without_effect() -> None:
    given = {
        "fragmentTracking": True,
        "bpf": {"datapathMode": "veth", "enableTCX": True},
        "tls": {"secretsBackend": "local"},
    }
    assert chart.objects(given) == chart.objects({})


def test_a_list_with_one_element_may_be_a_string() -> None:
    given = {"policyCIDRMatchMode": "nodes", "nodePort": {"addresses": "192.0.2.0/24"}, "devices": "eth+"}
    data = chart.objects(given)[CONFIG]["data"]
    assert (data["policy-cidr-match-mode"], data["nodeport-addresses"]) == ("nodes", "192.0.2.0/24")
    assert data["devices"] == "eth+"
    listed = {
        "policyCIDRMatchMode": ["nodes"],
        "nodePort": {"addresses": ["192.0.2.0/24"]},
        "devices": ["eth+"],
    }
    assert chart.objects(listed)[CONFIG]["data"] == data


def test_the_values_of_the_installation_page_are_accepted() -> None:
    page = (chart.CONFIGS.parent / "docs" / "operate" / "install.md").read_text()
    text = page.partition("```yaml file=values.yaml\n")[2].partition("```")[0]
    found = chart.objects(yaml.safe_load(text))
    image = found["DaemonSet/cilium"]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "registry.example/hive-agent:0.1.0"
    assert found[CONFIG]["data"]["auto-direct-node-routes"] == "true"


def test_objects_are_in_the_namespace_of_the_release() -> None:
    found = chart.objects({}, namespace="net")
    assert {one["metadata"].get("namespace", "net") for one in found.values()} == {"net"}
    bindings = [one for one in found.values() if one["kind"].endswith("RoleBinding")]
    assert {subject["namespace"] for one in bindings for subject in one["subjects"]} == {"net"}
    admitted = [one for one in found.values() if one["kind"] == "ValidatingAdmissionPolicy"]
    assert {one["spec"]["matchConditions"][0]["expression"] for one in admitted} == {
        "request.userInfo.username == 'system:serviceaccount:net:cilium'"
    }


def test_extra_settings_win_and_are_texts() -> None:
    data = chart.objects({"extraConfig": {"debug": True, "mtu": 1400, "cni-mac-addr-mode": "fixed"}})[CONFIG][
        "data"
    ]
    assert (data["debug"], data["mtu"], data["cni-mac-addr-mode"]) == ("true", "1400", "fixed")


def test_settings_may_come_from_where_the_values_say() -> None:
    def container(**values: object) -> dict[str, Any]:
        spec = chart.objects(values)["DaemonSet/cilium"]["spec"]["template"]["spec"]
        found: dict[str, Any] = next(one for one in spec["initContainers"] if one["name"] == "config")
        return found

    given = load("agent-config-sources")["values"]["daemon"]
    (theirs,) = load("agent-config-sources")["diff"]["DaemonSet/cilium"].values()
    assert container(daemon=given)["command"] == ["hive", *theirs[1][1:]]
    default = "--source=directory:/etc/cilium/config-map,cilium-node-config"
    assert container()["command"] == ["hive", "build-config", default]
    mounted = {"configSources": "directory:/etc/cilium/config-map"}
    assert container(daemon=mounted, kubeConfigPath="/etc/k.conf") == container(daemon=mounted)
    other = container(kubeConfigPath="/etc/k.conf")
    assert other["command"] == ["hive", "build-config", default, "--k8s-kubeconfig-path=/etc/k.conf"]
    assert {"name": "kube-config", "mountPath": "/etc/k.conf", "readOnly": True} in other["volumeMounts"]


def test_agents_may_read_the_sources_that_are_named_and_no_others() -> None:
    sources = "config-map:,config-map:other/a,config-map:b,cilium-node-config:kube-system"
    text = chart.render({"daemon": {"configSources": sources}})["rbac-agent.yaml"]
    roles = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "Role"]
    assert {
        one["metadata"]["namespace"]: one["rules"]
        for one in roles
        if one["metadata"]["name"] == "cilium-config-agent"
    } == {
        "kube-system": [_may_get("cilium-config", "b")],
        "other": [_may_get("a")],
    }


def _may_get(*names: str) -> dict[str, Any]:
    return {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": list(names), "verbs": ["get"]}


def test_mac_addresses_of_pods_are_values() -> None:
    cni = {"macAddrMode": "deterministic", "fixedMac": "", "prefixMacMap": {"sts-": "aa:bb:cc:00:00:02"}}
    data = chart.objects({"cni": cni})[CONFIG]["data"]
    assert data["cni-mac-addr-mode"] == "deterministic"
    assert json.loads(data["cni-prefix-mac-map"]) == cni["prefixMacMap"]
    assert not {key for key in chart.objects({})[CONFIG]["data"] if "mac-" in key}
    loaded = load_settings(structs(), Sources([f"--{key}={data[key]}" for key in data if "mac-" in key]))
    assert [fault.text for fault in loaded.faults] == []


def test_agents_and_operator_can_be_left_out() -> None:
    assert "DaemonSet/cilium" not in chart.objects({"agent": False})
    assert CONFIG in chart.objects({"agent": False})
    assert "Deployment/cilium-operator" not in chart.objects({"operator": {"enabled": False}})
    left = chart.objects({"agent": False, "operator": {"enabled": False}})
    assert all("envoy" in name for name in left), "as in Cilium's chart"
    assert chart.objects({"agent": False, "operator": {"enabled": False}, "envoy": {"enabled": False}}) == {}


@pytest.mark.parametrize("name", NAMES)
def test_agents_and_operator_take_what_is_rendered(name: str) -> None:
    found = rendered(name)
    if isinstance(found, str) or CONFIG not in found:
        return
    given = {key: text for key, text in found[CONFIG]["data"].items() if key in known_keys() - OF_INIT}
    loaded = load_settings(structs(), Sources([f"--{key}={text}" for key, text in given.items()]))
    assert [fault.text for fault in loaded.faults] == []


def test_a_number_may_be_a_text_where_cilium_s_chart_takes_both() -> None:
    for size in (65521, "65521"):
        data = chart.objects({"maglev": {"tableSize": size}})[CONFIG]["data"]
        assert data["bpf-lb-maglev-table-size"] == "65521"


def test_zero_leaves_out_sizes_and_rates_as_in_cilium_s_chart() -> None:
    sizes = dict.fromkeys(("ctTcpMax", "ctAnyMax", "natMax", "neighMax"), 0)
    rates = {"qps": 0, "burst": 0, "operator": {"qps": 0, "burst": 0}}
    assert chart.objects({"bpf": sizes, "k8sClientRateLimit": rates}) == chart.objects({})


def test_a_setting_of_null_is_none() -> None:
    data = chart.objects({"extraConfig": {"mtu": None, "policy-queue-size": 7}})[CONFIG]["data"]
    assert data["policy-queue-size"] == "7"
    assert "mtu" not in data


def put(into: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Values that say this too."""
    *above, last = path.split(".")
    at = into
    for name in above:
        at = at.setdefault(name, {})
    at[last] = value
    return into


def at(of: Any, path: str) -> Any:
    """What they say there, ... for nothing."""
    for name in path.split("."):
        of = of.get(name, ...) if isinstance(of, dict) else ...
    return of


@pytest.mark.parametrize("path", chart.needed())
def test_values_that_cannot_be_null_are_refused_by_name(path: str) -> None:
    with pytest.raises(
        chart.RenderError, match=rf"\): {path}=null: expected a value|cluster name is invalid"
    ):
        chart.objects(put({}, path, None))


@pytest.mark.parametrize("path", sorted(chart.NULLABLE))
def test_a_section_that_may_be_null_leaves_out_its_keys(path: str) -> None:
    found = chart.render(put({}, path, None))
    assert not [text for text in found.values() if "<nil>" in text or "%!" in text]
    data = yaml.safe_load(found["configmap.yaml"])["data"]
    table = yaml.safe_load((chart.CHART / "files" / "settings.yaml").read_text())
    assert {one["key"] for one in table if one["value"].startswith(f"{path}.")} & data.keys() == set()


def test_null_leaves_out_the_key_of_a_value() -> None:
    given: dict[str, Any] = {}
    own, needed = chart.values(), chart.needed()
    for path in chart.paths(own):
        if path not in needed and path != "cluster.name" and not isinstance(at(own, path), bool):
            put(given, path, None)
    found = chart.render(given)
    assert not [text for text in found.values() if "<nil>" in text or "%!" in text]
    data = yaml.safe_load(found["configmap.yaml"])["data"]
    table = yaml.safe_load((chart.CHART / "files" / "settings.yaml").read_text())
    silent = {one["key"] for one in table if at(given, one["value"]) is None and "default" not in one}
    assert len(silent) > 50
    assert silent & data.keys() == {"dnsproxy-enable-transparent-mode"}, "that one follows from the others"
