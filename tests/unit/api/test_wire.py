"""Request bodies are decoded as by encoding/json, and rejected in go-openapi's words."""

import pytest

from cells.api import models
from cells.api.wire import FrameworkError, decode, parse_bool, parse_int


def test_unknown_keys_and_nulls_do_not_matter() -> None:
    body = (
        b'{"state":"ready","k8s-pod-name":null,"labels":null,"from-the-future":{"a":[1]},"addressing":null}'
    )
    request = decode(body, models.EndpointChangeRequest, "endpoint")
    assert request == models.EndpointChangeRequest(state="ready")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 422, "endpoint in body is required"),
        (b"{}", 422, "state in body is required"),
        (b'{"state":null}', 422, "state in body is required"),
        (b'{"state":"happy"}', 422, "endpoint in body: Invalid enum value 'happy' - at `$.state`"),
        (b"{", 400, 'parsing endpoint body from "" failed, because'),
        (b'"state"', 400, 'parsing endpoint body from "" failed, because'),
        (b'{"state":"ready","interface-index":"7"}', 400, "interface-index"),
        (b'{"state":"\xff"}', 400, 'parsing endpoint body from "" failed, because'),
        (b"[" * 100_000, 400, 'parsing endpoint body from "" failed, because'),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, status: int, message: str) -> None:
    with pytest.raises(FrameworkError) as refused:
        decode(body, models.EndpointChangeRequest, "endpoint")
    assert refused.value.status == status
    assert message in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "on", "t", "enabled"])
def test_accepted_spellings_of_true_are_true(text: str) -> None:
    assert parse_bool(text, default=False)


@pytest.mark.parametrize("text", ["false", "0", "", "nonsense"])
def test_other_spellings_are_false(text: str) -> None:
    assert not parse_bool(text, default=True)


@pytest.mark.parametrize(("text", "number"), [(None, 0), ("", 0), ("7", 7), ("-1", -1), ("+5", 5)])
def test_numbers_in_headers_are_parsed(text: str | None, number: int) -> None:
    assert parse_int(text, "client-id in header") == number


@pytest.mark.parametrize("text", ["x", "1.0", "٣", "1_0", "9223372036854775808", "9" * 5000])
def test_text_that_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(FrameworkError, match="client-id in header must be of type int64") as refused:
        parse_int(text, "client-id in header")
    assert (refused.value.status, refused.value.code) == (422, 601)


def test_a_header_that_is_absent_has_its_default() -> None:
    assert parse_bool(None, default=True)
    assert not parse_bool(None, default=False)
