"""In value sets that the chart rejects in part, the other values have Cilium's effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.integration.deploy.differences import (
    DIFFERENT_KEYS,
    compared,
    places,
    recorded_places,
    why,
    within,
)
from tests.integration.deploy.rendered import (
    CONFIG,
    EFFECTS,
    comparable,
    known_keys,
    recorded,
    recorded_keys,
    rendered,
    served,
)
from tests.support.counts import Count

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")

NOTHING_LEFT: Final = {
    "family-none": "pods need addresses of one family at least",
    "hubble-relay-ui": "the image of the relay is to be named",
    "preflight": "it is another installation",
    "unknown-values": "a value of ours has the name of one that Cilium's chart does not know",
}
TOUCHED: Final = {
    "agent-nodeinit-other-file": {"DaemonSet/cilium-node-init"},
    "clustermesh-sync-without-kvstoremesh": {"Deployment/cilium-operator"},
    "ipam-azure": {"Deployment/cilium-operator"},
    "routing-gke-other-namespace": {
        "ResourceQuota/cilium-resource-quota",
        "ResourceQuota/cilium-operator-resource-quota",
    },
}
"""Objects of what is refused, beside those that the values change alone."""
ALSO_FALSE: Final = {"enable-svc-source-range-check": "false is said, since left out it would mean true"}
NUMBERS: Final = {"bpf-ct-global-tcp-max": "Cilium's chart writes 1e+06, which no agent reads"}


def sets() -> list[str]:
    return [
        name
        for name in comparable()
        if isinstance(rendered(name), str)
        and name not in NOTHING_LEFT
        and not name.startswith("unvalidated-")
    ]


def refused_effects(name: str) -> Iterator[dict[str, Any]]:
    """What the values of the sections change from which something is refused."""
    sections = {path.partition(".")[0] for path in served(name)[1]}
    for path, effect in EFFECTS["values"].items():
        if path.partition(".")[0] in sections:
            yield effect


@pytest.mark.parametrize("name", sets())
def test_the_other_values_give_the_keys_that_cilium_s_chart_gives(name: str, count: Count) -> None:
    ours, theirs = served(name)[0][CONFIG]["data"], recorded_keys(name)
    assert theirs is not None
    refused = {key for effect in refused_effects(name) for key in effect.get("config", ())}
    for key in known_keys() - refused:
        if str(ours.get(key) or "") != str(theirs.get(key) or ""):
            assert key in {*DIFFERENT_KEYS, *ALSO_FALSE, *NUMBERS}, (key, ours.get(key), theirs.get(key))
            continue
        count("keys of sets that are refused in part", {"equal": 1})


@pytest.mark.parametrize("name", sets())
def test_the_other_values_make_workloads_as_in_cilium_s_chart(name: str, count: Count) -> None:
    ours, theirs = served(name)[0], recorded(name)
    apart = TOUCHED.get(name, set())
    assert compared(ours) ^ compared(theirs) <= apart
    for key in compared(ours) & compared(theirs) - apart:
        refused = {
            place
            for effect in refused_effects(name)
            for place in recorded_places(effect.get("other", {}).get(key, []))
        }
        mine, other = dict(places(ours[key])), dict(places(theirs[key]))
        for place in mine.keys() | other.keys():
            if mine.get(place) != other.get(place) and not within(place, refused):
                assert why(key, place) is not None, (key, place, mine.get(place), other.get(place))
                continue
            count("places of sets that are refused in part", {"equal, or of what is refused": 1})
