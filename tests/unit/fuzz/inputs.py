"""Malformed input: bytes, texts and JSON that a broken or hostile program may send."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support.examples import scaled


def bounded(examples: int) -> settings:
    """Limit the number of examples, which are the same in every run."""
    return settings(
        max_examples=scaled(examples),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


odd_bytes = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"", b"\0", b"\xff", b"null", b"{", b"[]", b"\xef\xbb\xbf{}", b"a" * 9000]),
)

odd_texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "\0", "\n", "%s%n", "../../etc", "a" * 5000, "\u2028", "☃", "0x10", "-1", "1e9", "true", "null"]
    ),
)

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 2**31, 2**32, 2**63, 2**64, 65536, 1e308, -0.0]),
    odd_texts,
)

json_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=3),
    max_leaves=6,
)


def nested(depth: int) -> bytes:
    """Return an object nested this deep."""
    return b'{"deep":' + b"[" * depth + b"]" * depth + b"}"


@st.composite
def damaged(draw: st.DrawFn, good: Mapping[str, object]) -> bytes:
    """Generate an object's JSON with values changed, missing or added; or its bytes changed."""
    value = dict(good)
    for key in draw(st.lists(st.sampled_from([*good, "unknown", ""]), max_size=3, unique=True)):
        if draw(st.booleans()):
            value[key] = draw(json_values)
        else:
            value.pop(key, None)
    text = json.dumps(value, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    cut, at = draw(st.integers(0, 11)), draw(st.integers(0, len(text) - 1))
    forms = {
        0: lambda: text[:at],
        1: lambda: text[:at] + draw(odd_bytes) + text[at + 1 :],
        2: lambda: text + text,
        3: lambda: nested(draw(st.sampled_from([20, 900, 3000]))),
        4: lambda: text[:-1] + (b"," if value else b"") + nested(draw(st.sampled_from([900, 3000])))[1:],
        5: lambda: draw(odd_bytes),
    }
    return forms[cut]() if cut in forms else text
