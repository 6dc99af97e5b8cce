"""The chart's objects other than the ConfigMap, compared with Cilium's field by field."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from tests.integration.deploy.differences import DIFFERENT, compared, places, why
from tests.integration.deploy.rendered import CONFIG, comparable, load, recorded, rendered
from tests.support import chart
from tests.support.counts import Count

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")


@pytest.mark.parametrize("name", comparable())
def test_objects_are_those_of_cilium_s_chart_or_differ_for_a_reason(name: str, count: Count) -> None:
    ours, theirs = rendered(name), recorded(name)
    if isinstance(ours, str):
        return  # test_chart.py shows why
    outcomes: Counter[str] = Counter()
    assert compared(ours) == compared(theirs)
    for key in compared(ours):
        mine, other = dict(places(ours[key])), dict(places(theirs[key]))
        for place in mine.keys() | other.keys():
            if mine.get(place) == other.get(place):
                outcomes["equal"] += 1
                continue
            reason = why(key, place)
            assert reason is not None, (key, place, mine.get(place), other.get(place))
            outcomes[f"different: {reason}"] += 1
    assert (CONFIG in ours) == (CONFIG in theirs)
    count("places of rendered objects", outcomes)


def test_every_listed_difference_occurs() -> None:
    used: set[str] = set()
    for name in comparable():
        ours, theirs = rendered(name), recorded(name)
        if isinstance(ours, str):
            continue
        for key in compared(ours) & compared(theirs):
            mine, other = dict(places(ours[key])), dict(places(theirs[key]))
            for place in mine.keys() | other.keys():
                if mine.get(place) != other.get(place):
                    used |= {pattern for pattern, _ in DIFFERENT if re.search(pattern, f"{key}:{place}")}
    assert {pattern for pattern, _ in DIFFERENT} - used == set()


def test_operators_are_spread_by_their_own_labels_unless_a_constraint_has_a_selector() -> None:
    zones = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {"labelSelector": {"matchLabels": {"io.cilium/app": "operator", "name": "cilium-operator"}}}
    other = {"labelSelector": {"matchLabels": {"a": "b"}}}
    given = {"operator": {"topologySpreadConstraints": [zones, zones | other]}}
    operator = chart.objects(given)["Deployment/cilium-operator"]
    found = operator["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert found == [zones | own, zones | other]
    assert operator["spec"]["selector"] == {"matchLabels": own["labelSelector"]["matchLabels"]}


def test_the_operator_s_service_monitor_is_found_by_its_name() -> None:
    monitor = {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}
    given = {
        "operator": {"prometheus": monitor},
        "prometheus": {"serviceMonitor": {"trustCRDsExist": True}},
    }
    assert chart.objects(given)["ServiceMonitor/cilium-operator"]["metadata"]["labels"] == {
        "app.kubernetes.io/name": "cilium-operator",
        "app.kubernetes.io/part-of": "cilium",
        "release": "prometheus",
    }


def flow_metrics(*, tls: dict[str, Any] | None = None, **metrics: object) -> dict[str, Any]:
    """Values with metrics of flows; with what TLS they are served."""
    served = {"tls": {"enabled": True, "server": tls}} if tls is not None else {}
    return {"hubble": {"enabled": True, "metrics": {**metrics, **served}}}


def agent_pod(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Volumes of the agent's pod, and mounts of its container, each by name."""
    spec = objects["DaemonSet/cilium"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    volumes, mounts = (
        {one["name"]: one for one in of} for of in (spec["volumes"], container["volumeMounts"])
    )
    return volumes, mounts


def test_metrics_of_flows_have_a_certificate_that_names_the_cluster() -> None:
    more = {"extraDnsNames": ["a.example"], "extraIpAddresses": ["192.0.2.1"]}
    objects = chart.objects(flow_metrics(enabled=["drop"], tls=more) | {"cluster": {"name": "blue"}})
    secret = {
        key: base64.b64decode(one)
        for key, one in objects["Secret/hubble-metrics-server-certs"]["data"].items()
    }
    made, authority = (x509.load_pem_x509_certificate(secret[key]) for key in ("tls.crt", "ca.crt"))
    made.verify_directly_issued_by(authority)
    names = made.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
    assert isinstance(names, x509.SubjectAlternativeName)
    assert names.get_values_for_type(x509.DNSName) == ["blue.hubble-metrics.cilium.io", "a.example"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.1"]


@pytest.mark.parametrize("mtls", [False, True])
def test_agents_find_the_certificate_of_metrics_where_their_settings_name_it(mtls: bool) -> None:
    given = flow_metrics(enabled=["drop"], tls={"mtls": {"enabled": mtls}, "existingSecret": "own"})
    given["hubble"]["tls"] = {"enabled": False}
    objects = chart.objects(given)
    assert not [key for key in objects if key.startswith("Secret/")], "the Secret is there already"
    volumes, mounts = agent_pod(objects)
    (source,) = volumes["hubble-metrics-tls"]["projected"]["sources"]
    assert source["secret"]["name"] == "own"
    folder = mounts["hubble-metrics-tls"]["mountPath"]
    found = {one["key"]: f"{folder}/{one['path']}" for one in source["secret"]["items"]}
    keys = {"tls.crt": "tls-cert-file", "tls.key": "tls-key-file"} | (
        {"ca.crt": "tls-client-ca-files"} if mtls else {}
    )
    settings = objects[CONFIG]["data"]
    assert found == {of: settings[f"hubble-metrics-server-{key}"] for of, key in keys.items()}
    assert ("hubble-metrics-server-tls-client-ca-files" in settings) == mtls


def test_a_file_of_metrics_is_served_with_tls_too_and_where_its_service_leads() -> None:
    wanted = [{"name": "drop", "contextOptions": [{"name": "sourceContext", "values": ["pod"]}]}]
    dynamic = {"enabled": True, "config": {"content": wanted, "configMapName": "flows"}}
    monitor = {"enabled": True, "tlsConfig": {"serverName": "x"}}
    given = flow_metrics(dynamic=dynamic, port=9975, serviceMonitor=monitor, enableOpenMetrics=True, tls={})
    given["prometheus"] = {"serviceMonitor": {"trustCRDsExist": True}}
    objects = chart.objects(given)
    settings = objects[CONFIG]["data"]
    assert settings["hubble-metrics-server-enable-tls"] == settings["enable-hubble-open-metrics"] == "true"
    volumes, mounts = agent_pod(objects)
    (name,) = objects["ConfigMap/flows"]["data"]
    path = f"{mounts['hubble-dynamic-metrics-config']['mountPath']}/{name}"
    assert settings["hubble-dynamic-metrics-config-path"] == path
    assert volumes["hubble-dynamic-metrics-config"]["configMap"] == {"name": "flows", "optional": True}
    assert yaml.safe_load(objects["ConfigMap/flows"]["data"][name]) == {"metrics": wanted}
    (port,) = objects["Service/hubble-metrics"]["spec"]["ports"]
    (container,) = objects["DaemonSet/cilium"]["spec"]["template"]["spec"]["containers"]
    ports = {one["name"]: one["hostPort"] for one in container["ports"]}
    assert settings["hubble-metrics-server"] == f":{ports[port['targetPort']]}" == ":9975"
    (endpoint,) = objects["ServiceMonitor/hubble"]["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "x"})


def test_cert_manager_makes_the_certificate_of_metrics_though_the_api_has_none() -> None:
    given = flow_metrics(enabled=["drop"], tls={})
    auto: dict[str, Any] = {"method": "certmanager"}
    given["hubble"]["tls"] = {"enabled": False, "auto": auto}
    with pytest.raises(chart.RenderError, match="certManagerIssuerRef"):
        chart.objects(given)
    auto["certManagerIssuerRef"] = {"name": "ca"}
    objects = chart.objects(given)
    made = {key: one["spec"] for key, one in objects.items() if key.startswith("Certificate/")}
    assert made["Certificate/hubble-metrics-server-certs"]["secretName"] == "hubble-metrics-server-certs"
    assert len(made) == 1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            flow_metrics(enabled=["drop"], dynamic={"enabled": True}),
            "hubble.metrics.enabled: agents count flows by this list or by the file",
        ),
        (
            flow_metrics(enabled=["drop"], tls={"mtls": {"enabled": True, "name": "ca"}}),
            "hubble.metrics.tls.server.mtls.name: a value of Cilium's chart that is not served here",
        ),
        (
            flow_metrics(enabled=["drop"], tls={"cert": "x"}),
            "hubble.metrics.tls.server.cert: hubble.tls.auto makes this certificate",
        ),
    ],
)
def test_metrics_of_flows_refuse_what_is_not_served_by_name(given: dict[str, Any], why: str) -> None:
    with pytest.raises(chart.RenderError, match=re.escape(why)):
        chart.objects(given)


AUTHORITY: Final = base64.b64encode(b"-----BEGIN CERTIFICATE-----").decode()
KEY: Final = base64.b64encode(b"-----BEGIN PRIVATE KEY-----").decode()
PAIR: Final = {"cert": AUTHORITY, "key": KEY}
CERTGEN: Final = {"image": {"repository": "quay.io/cilium/certgen", "tag": "v0.2.1"}}


def flows(of_hubble: dict[str, Any], relay: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Values with flows over TLS; with a relay, its own TLS."""
    served = {"enabled": True, "image": {"repository": "relay"}, "tls": relay} if relay is not None else {}
    return {"hubble": {"enabled": True, "tls": of_hubble, "relay": served}, **others}


def test_certgen_makes_the_certificates_of_the_recording_s_objects() -> None:
    found = rendered("hubble-cronjob-certs")
    assert isinstance(found, dict)
    added = load("hubble-cronjob-certs")["other_objects"]["added"]
    assert set(added) <= found.keys()
    assert not [key for key in found if key.startswith("Secret/")]


@pytest.mark.parametrize("relay", [None, {"server": {"enabled": True, "extraDnsNames": ["relay.example"]}}])
def test_certgen_may_write_the_secrets_that_pods_mount_and_no_others(relay: dict[str, Any] | None) -> None:
    given = flows({"auto": {"method": "cronJob", "schedule": "0 0 1 * *"}}, relay, certgen=CERTGEN)
    objects = chart.objects(given | {"cluster": {"name": "blue"}})
    job = objects["Job/hubble-generate-certs"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade"
    cron = objects["CronJob/hubble-generate-certs"]["spec"]
    assert (cron["schedule"], cron["jobTemplate"]["spec"]) == ("0 0 1 * *", job["spec"])
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "quay.io/cilium/certgen:v0.2.1"
    (variable,) = container["env"]
    certs = {one["name"]: one for one in yaml.safe_load(variable["value"])["certs"]}
    assert certs["hubble-server-certs"]["hosts"] == ["*.blue.hubble-grpc.cilium.io"]
    assert certs["hubble-server-certs"]["validity"] == "8760h"
    mounted = {
        one["secret"]["name"]
        for name in ("DaemonSet/cilium", "Deployment/hubble-relay")
        for volume in objects.get(name, {"spec": {"template": {"spec": {}}}})["spec"]["template"]["spec"].get(
            "volumes", []
        )
        for one in volume.get("projected", {}).get("sources", [])
        if "secret" in one and one["secret"]["name"].startswith("hubble-")
    }
    assert certs.keys() == mounted
    create, update, authority = objects["Role/hubble-generate-certs"]["rules"]
    assert (create["verbs"], "resourceNames" in create) == (["create"], False)
    assert (update["verbs"], set(update["resourceNames"])) == (["update"], mounted)
    assert (authority["verbs"], authority["resourceNames"]) == (["get", "update"], ["cilium-ca"])
    (subject,) = objects["RoleBinding/hubble-generate-certs"]["subjects"]
    assert f"ServiceAccount/{subject['name']}" in objects
    assert pod["serviceAccountName"] == subject["name"]
    if relay:
        assert certs["hubble-relay-server-certs"]["hosts"] == ["*.hubble-relay.cilium.io", "relay.example"]


def test_an_authority_of_values_signs_for_certgen_and_for_helm() -> None:
    given = flows({"auto": {"method": "cronJob"}}, certgen=CERTGEN, tls={"ca": PAIR})
    assert chart.objects(given)["Secret/cilium-ca"]["data"] == {"ca.crt": AUTHORITY, "ca.key": KEY}
    made = chart.objects(flows({}))["Secret/cilium-ca"]["data"]
    again = chart.objects(flows({}, tls={"ca": {"cert": made["ca.crt"], "key": made["ca.key"]}}))
    assert again["Secret/cilium-ca"]["data"] == made
    certificate, authority = (
        x509.load_pem_x509_certificate(base64.b64decode(one))
        for one in (again["Secret/hubble-server-certs"]["data"]["tls.crt"], made["ca.crt"])
    )
    certificate.verify_directly_issued_by(authority)


def test_certificates_of_values_are_in_the_secrets_that_pods_mount() -> None:
    relay = {"client": PAIR, "server": {"enabled": True, **PAIR}}
    given = flows({"auto": {"enabled": False}, "server": PAIR}, relay, tls={"ca": {"cert": AUTHORITY}})
    given["hubble"]["metrics"] = {"enabled": ["drop"], "tls": {"enabled": True, "server": PAIR}}
    objects = chart.objects(given)
    secrets = {key.removeprefix("Secret/"): one for key, one in objects.items() if key.startswith("Secret/")}
    assert secrets.keys() == {
        *("hubble-server-certs", "hubble-metrics-server-certs"),
        *("hubble-relay-client-certs", "hubble-relay-server-certs"),
    }
    for one in secrets.values():
        assert one["type"] == "kubernetes.io/tls"
        assert one["data"] == {"ca.crt": AUTHORITY, "tls.crt": AUTHORITY, "tls.key": KEY}


OWN_CERTIFICATES: Final = {"auto": {"enabled": False}}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            flows({"auto": {"method": "cronJob"}}),
            "certgen.image.repository: name the image of Cilium's certgen",
        ),
        (flows({"auto": {"method": "hand"}}), "hubble.tls.auto.method=hand: not served here"),
        (flows({"server": PAIR}), "hubble.tls.server.cert: hubble.tls.auto makes this certificate"),
        (flows({**OWN_CERTIFICATES, "server": {"cert": AUTHORITY}}), "missing hubble.tls.server.key"),
        (
            flows({**OWN_CERTIFICATES, "server": PAIR}),
            "missing tls.ca.cert: hubble.tls.server.cert is verified by it",
        ),
        (
            flows({**OWN_CERTIFICATES, "server": {**PAIR, "existingSecret": "own"}}),
            "the certificate is that of hubble.tls.server.existingSecret",
        ),
        (
            flows(
                {**OWN_CERTIFICATES, "server": {"cert": "eA==", "key": KEY}}, tls={"ca": {"cert": AUTHORITY}}
            ),
            "hubble.tls.server.cert: expected a PEM file in base64",
        ),
        (flows({}, tls={"ca": {"cert": AUTHORITY}}), "tls.ca.key: expected the key of tls.ca.cert"),
        (flows(OWN_CERTIFICATES, tls={"ca": {"cert": "eA=="}}), "tls.ca.cert: expected a PEM file in base64"),
    ],
)
def test_certificates_without_effect_or_use_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(chart.RenderError) as refused:
        chart.objects(given)
    assert why in str(refused.value)
