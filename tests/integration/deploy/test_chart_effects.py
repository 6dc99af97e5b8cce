"""Each value of Cilium's chart changed alone has Cilium's effect, or differs for a listed reason."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import pytest

from tests.integration.deploy.differences import compared, places, recorded_places, why, within
from tests.integration.deploy.rendered import CONFIG, EFFECTS, known_keys
from tests.support import chart
from tests.support.counts import Count

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")

REFUSED: Final = {
    "aksbyocni.enabled": "needs another mode of IPAM than the one of its context",
    "autoDirectNodeRoutes": "means nothing through the tunnel",
    "cluster.id": "a number needs a name of the cluster",
    "cni.chainingMode": "the tried value does not exist",
    "daemon.configSources": "the tried value does not exist",
    "fragmentTracking": "always enabled",
    "identityAllocationMode": "requires etcd settings",
    "ipv4.enabled": "pods need at least one address family",
    "loadBalancer.acceleration": "the tried value does not exist",
    "tunnelProtocol": "the tried value does not exist",
}
"""Values for which our chart refuses what the recording tried, and the reasons."""
LEFT_OUT: Final = {
    "enable-svc-source-range-check",
    "remove-cilium-node-taints",
    "set-cilium-is-up-condition",
}
"""Keys that Cilium's chart omits if they are false."""
ONLY_ONE: Final = (
    (r"env/\[KUBERNETES_SERVICE_PORT\]", "empty in Cilium's chart; here Kubernetes' default port"),
    (r"\[cilium-agent\]/ports$", "metrics are served by default"),
    (r"annotations/prometheus.io/port$", "metrics are served by default"),
    (
        r"\[cilium-agent\]/volumeMounts/\[~1sys~1fs~1bpf~1x\]",
        "Cilium's chart applies its value in some places only",
    ),
    (r"^DaemonSet/cilium:.*/hostAliases$", "Cilium's chart has an empty list without clusters"),
    (r"^Service/cilium-agent", "belongs to a feature that is not built"),
)
"""Places that only one of the charts changes, and the reasons."""
DEFAULTS: Final = (
    (r"image\.(repository|tag|pullPolicy)$", "our own image"),
    (r"^resources$", "the agent requests the resources that it needs"),
    (r"securityContext", "least privilege: only used capabilities are granted"),
    (
        r"^bpf\.disableExternalIPMitigation$",
        "externalIPs that no node has are served, as by kube-proxy",
    ),
    (r"^prometheus\.enabled$", "metrics are served by default"),
    (r"^hubble\.enabled$", "Hubble is off by default"),
    (r"^hubble\.metrics\.dynamic\.config\.content$", "Cilium's default names a metric that does not exist"),
)


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return nested values that set one path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def merged(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values as Helm merges several values files."""
    both = dict(copy.deepcopy(weak))
    for name, value in strong.items():
        earlier = both.get(name)
        both[name] = (
            merged(earlier, value) if isinstance(earlier, dict) and isinstance(value, dict) else value
        )
    return both


@cache
def context(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What is served of the values that others are tried with, and what is rendered of it."""
    given: dict[str, Any] = {} if name == "defaults" else copy.deepcopy(EFFECTS["contexts"][name])
    hubble = {
        "enabled": True,
        "tls": {"auto": {"enabled": False}},
        "relay": {"image": {"repository": "relay"}},
    }
    given["hubble"] = merged(hubble, given.get("hubble", {}))
    while isinstance(found := rendered(given), str):
        refused = re.search(r"\): ([\w.]+)[:=]", found)
        assert refused, found
        *path, last = refused[1].split(".")
        at = given
        for step in path:
            at = at[step]
        del at[last]
    return given, found


def rendered(given: Mapping[str, Any]) -> dict[str, dict[str, Any]] | str:
    """The objects, or why these values are refused."""
    try:
        return chart.objects(given)
    except chart.RenderError as error:
        return str(error)


def changed(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> set[str]:
    """The places where an object differs; "" for one that comes or goes."""
    if (key in before) != (key in after):
        return {""}
    mine, other = (dict(places(of.get(key))) for of in (before, after))
    return {place for place in mine.keys() | other.keys() if mine.get(place) != other.get(place)}


def reason(key: str, place: str) -> str | None:
    """Why only one of both changes there."""
    explanation = why(key, place) or why(key, f"{place}/")
    return explanation or next(
        (text for pattern, text in ONLY_ONE if re.search(pattern, f"{key}:{place}")), None
    )


def effects(section: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The values of a section, and what is recorded of each."""
    for path, effect in EFFECTS["values"].items():
        if path.partition(".")[0] == section:
            yield path, effect


def is_served(path: str) -> bool:
    """Whether it is a value of our chart, or within one that is the user's own."""
    return any(f"{path}.".startswith(f"{one}.") for one in SERVED) or path in SECTIONS


SERVED: Final = {*chart.paths(chart.values()), *chart.OPEN}
WITHOUT_EFFECT: Final = set((chart.CHART / "files" / "without-effect.txt").read_text().split())
SECTIONS: Final = {one.rpartition(".")[0] for one in SERVED}


@pytest.mark.parametrize("section", sorted({path.partition(".")[0] for path in EFFECTS["values"]}))
def test_a_value_alone_changes_what_it_changes_in_cilium_s_chart(section: str, count: Count) -> None:
    outcomes: Counter[str] = Counter()
    differences: Counter[str] = Counter()
    for path, effect in effects(section):
        if "tried" not in effect:
            outcomes["told in words, not tried"] += 1
            continue
        given, before = context(effect["in_context"])
        after = rendered(merged(given, nested(path, effect["tried"])))
        if isinstance(after, str):
            assert path in after
            assert path in REFUSED or not is_served(path), (path, after)
            outcomes[f"refused: {REFUSED.get(path, 'not served here')}"] += 1
            continue
        assert path not in REFUSED
        if within(path, WITHOUT_EFFECT):
            assert after == before, path
            outcomes["accepted, without effect"] += 1
            continue
        if not is_served(path):
            assert not effect["tried"], path
            outcomes["accepted: equal to the default"] += 1
        else:
            outcomes["tried"] += 1
        differences += keys(path, effect, before, after) + objects(path, effect, before, after)
    count("values of Cilium's chart, each alone", outcomes)
    count("what they change", differences)


def keys(
    path: str, effect: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Counter[str]:
    """Compare what becomes of the ConfigMap."""
    found: Counter[str] = Counter()
    old, new = ((of.get(CONFIG) or {}).get("data", {}) for of in (before, after))
    for key in sorted(old.keys() | new.keys() | effect["config"].keys()):
        was, is_now = (str(of.get(key) or "") for of in (old, new))
        _, theirs = (
            "" if one in {"<absent>", None} else str(one) for one in effect["config"].get(key, (was, was))
        )
        if was == is_now and key not in effect["config"]:
            continue
        if is_now == theirs:
            found["keys: equal"] += 1
        elif key not in known_keys():
            found["keys: of features that are not built"] += 1
        else:
            assert key in LEFT_OUT, (path, key, was, is_now, theirs)
            assert (is_now, theirs) == ("false", ""), (path, key)
            found["keys: false is written explicitly, since the default is true"] += 1
    return found


def objects(
    path: str, effect: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Counter[str]:
    """Compare where the other objects change."""
    found: Counter[str] = Counter()
    for key in sorted(compared(before) | compared(after) | compared(effect["other"])):
        ours, theirs = changed(before, after, key), recorded_places(effect["other"].get(key, []))
        for place in ours:
            if within(place, theirs):
                found["places: equal"] += 1
                continue
            explanation = reason(key, place)
            assert explanation, (path, key, place, "only ours")
            found[f"places: {explanation}"] += 1
        for place in theirs:
            if not within(place, ours):
                explanation = reason(key, place)
                assert explanation, (path, key, place, "only Cilium's")
                found[f"places: {explanation}"] += 1
    return found


def test_defaults_are_those_of_cilium_s_chart_or_differ_for_a_reason(count: Count) -> None:
    outcomes: Counter[str] = Counter()
    own = chart.values()
    for path, effect in EFFECTS["values"].items():
        ours: Any = own
        for step in path.split("."):
            ours = ours.get(step, ...) if isinstance(ours, dict) else ...
        if ours is ... or path == "maglev":
            continue
        nothing: tuple[Any, ...] = (None, "", [], {}, "<not in the defaults>")
        if ours == effect["default"] or (ours in nothing and effect["default"] in nothing):
            outcomes["equal"] += 1
            continue
        explanation = next((text for pattern, text in DEFAULTS if re.search(pattern, path)), None)
        assert explanation, (path, ours, effect["default"])
        outcomes[f"different: {explanation}"] += 1
    count("defaults of values", outcomes)


OF_TWO_TYPES: Final = (
    r"^k8sServicePort$",
    r"[rR]esources\.requests\.|\.hard\.pods$",
    r"\.max(Unavailable|Surge)$",
    r"odeSelector\.",
)
"""Values that are texts or numbers."""
OTHERS: Final[dict[type, Any]] = {
    bool: "text",
    int: "text",
    float: "text",
    str: 5,
    list: {"a": 1},
    dict: ["a"],
}
"""Type of a default -> a value of another type."""


@pytest.mark.parametrize("section", sorted({path.partition(".")[0] for path in EFFECTS["values"]}))
def test_a_value_of_another_type_than_its_default_is_refused(section: str, count: Count) -> None:
    for path, effect in effects(section):
        default = effect["default"]
        if default in (None, "<not in the defaults>") or any(re.search(one, path) for one in OF_TWO_TYPES):
            continue
        found = rendered(merged({"hubble": {"enabled": True}}, nested(path, OTHERS[type(default)])))
        assert isinstance(found, str), path
        count("values of another type", {"refused": 1})


def test_durations_of_values_without_effect_are_checked_as_by_cilium_s_chart() -> None:
    found = rendered(nested("authentication.gcInterval", "soon"))
    assert isinstance(found, str)
    assert "authentication.gcInterval=soon: expected a duration" in found
