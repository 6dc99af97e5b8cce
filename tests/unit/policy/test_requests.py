"""HTTP rules: supported regular expressions, as Cilium checks and Envoy matches them."""

from __future__ import annotations

import pytest

from cells.policy.rules import SUPPORTED, PolicyError, PolicyOptions
from cells.policy.rules.peers import TranslationContext
from cells.policy.rules.translate import translate

TAKEN = [
    "",
    "/api/v[0-9]+/.*",
    r"\pL+",
    r"\p{Greek}|\PN",
    r"a\z",
    r"\Q[.*\E+",
    r"\Q\C\E",
    r"\\C",
    r"\x{41}\x41\101",
    "(?P<n>a)(?<m>b)",
    "(?i)a|(?s:.)(?-i:b)",
    "a(?i)b",
    "(?U)a+",
    "a{1000}",
    "a{,2}",
    "a{0,}?",
    "[[:alpha:]_-]",
    "[]a]",
    "^*",
]
REFUSED = {
    "/a(b": "missing closing ): `/a(b`",
    "a)": "unexpected ): `a)`",
    "[a": "missing closing ]: `[a`",
    "x[z-a]": "invalid character class range: `z-a`",
    "[[:word:]-[:what:]]": "invalid character class range: `[:what:]`",
    r"\p{Klingon}": r"invalid character class range: `\p{Klingon}`",
    "*a": "missing argument to repetition operator: `*`",
    "(?i)*": "missing argument to repetition operator: `*`",
    "a*+": "invalid nested repetition operator: `*+`",
    "a**": "invalid nested repetition operator: `**`",
    "a{1001}": "invalid repeat count: `{1001}`",
    "a{2,1}": "invalid repeat count: `{2,1}`",
    "((a{100}){100})": "invalid repeat count: `{100}`",
    "(?>a)": "invalid or unsupported Perl syntax: `(?>`",
    "(?=a)": "invalid or unsupported Perl syntax: `(?=`",
    "(?!a)": "invalid or unsupported Perl syntax: `(?!`",
    "(?<=a)b": "invalid named capture: `(?<=a)b`",
    "(?<!a)(?<n>b)": "invalid named capture: `(?<!a)(?<n>`",
    "(?P<n": "invalid named capture: `(?P<n`",
    "(?P=n)": "invalid or unsupported Perl syntax: `(?P`",
    r"(a)\1": r"invalid escape sequence: `\1`",
    r"a\Z": r"invalid escape sequence: `\Z`",
    r"a\C": r"invalid escape sequence: `\C`",
    "\\": "trailing backslash at end of expression: ``",
    r"(\pL{100}){10}": r"expression too large: `(\pL{100}){10}`",
}


def unenforced(options: PolicyOptions, **request: str) -> list[str]:
    """Read a policy with a rule for requests; what of it is not served. Raises PolicyError."""
    ports = [{"ports": [{"port": "80", "protocol": "TCP"}], "rules": {"http": [request]}}]
    policy = {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "requests", "namespace": "shop"},
        "spec": {"endpointSelector": {}, "ingress": [{"toPorts": ports}]},
    }
    (rule,) = translate(policy, TranslationContext(options))
    return [f"{one.path}: {one.reason}" for one in rule.unenforced]


@pytest.mark.parametrize("member", ["path", "method"])
@pytest.mark.parametrize("text", TAKEN)
def test_an_expression_of_re2_is_taken(member: str, text: str) -> None:
    assert unenforced(SUPPORTED, **{member: text}) == []


@pytest.mark.parametrize("member", ["path", "method"])
@pytest.mark.parametrize(("text", "reason"), REFUSED.items())
def test_an_expression_that_envoy_would_refuse_is_refused_in_ciliums_words(
    member: str, text: str, reason: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        unenforced(PolicyOptions(), **{member: text})
    assert str(caught.value).endswith(f"error parsing regexp: {reason}")


def test_a_host_that_envoy_would_refuse_is_not_enforced() -> None:
    """Cilium accepts it, and Envoy then refuses the listener with all its rules."""
    assert unenforced(PolicyOptions(), host="(?=a)") == []
    (text,) = unenforced(SUPPORTED, host="(?=a)")
    assert text.endswith("host: error parsing regexp: invalid or unsupported Perl syntax: `(?=`")
    assert unenforced(SUPPORTED, host=r"\Qexample.com\E") == []
