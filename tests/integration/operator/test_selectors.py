"""Label selectors are parsed as Kubernetes parses them."""

from __future__ import annotations

import pytest

from cells.kubernetes.objects.kind import selector_of

LABELS = {"app": "dns", "tier": "", "example.com/role": "edge", "cores": "8"}


@pytest.mark.parametrize(
    ("text", "selects"),
    [
        ("", True),
        ("app=dns", True),
        ("app==dns", True),
        ("app=web", False),
        ("app!=web", True),
        ("app!=dns", False),
        ("none!=x", True),
        ("app in (web, dns)", True),
        ("app in (web)", False),
        ("app notin (web,api)", True),
        ("none notin (web)", True),
        ("app", True),
        ("none", False),
        ("!none", True),
        ("! app", False),
        ("tier=", True),
        ("example.com/role=edge,app in (dns),!none", True),
        (" app = dns , tier = ", True),
        ("app=dns,none", False),
        ("in=x", False),
        ("cores>7", True),
        ("cores > 8", False),
        ("app, cores<09", True),
        ("cores < 8", False),
        ("app>1", False),
        ("none<1", False),
    ],
)
def test_a_label_selector_selects_matching_objects(text: str, selects: bool) -> None:
    assert selector_of(text).matches(LABELS) is selects


@pytest.mark.parametrize(
    "text",
    [
        "!!!==",
        "app=dns,",
        ",app",
        "app in dns",
        "app in (dns",
        "app in ( )",
        "app notin ()",
        "app ~ dns",
        "a=b=c",
        "=x",
        "a=" + "x" * 64,
        "-a",
        "cores>many",
        "cores>-1",
        "cores>",
    ],
)
def test_an_invalid_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        selector_of(text)
