"""IPsec's key file, and the keys derived from it, compared with recordings of Cilium."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address
from typing import Any

import pytest

from cells.encryption.ipsec.keys import IpsecKey, IpsecKeyError, read_keys
from cells.netlink.xfrm import Algorithm
from tests.support.recordings import recordings

REFUSED = {
    "keyfile_30": "a negative SPI wraps to 255 in Cilium, which no packet's mark can carry",
}
"""Recordings of key files that Cilium accepts and this agent rejects."""


def recorded(kind: str) -> list[dict[str, Any]]:
    files = sorted(recordings("ipsec").glob("*.json"))
    return [each for each in map(json.loads, (file.read_text() for file in files)) if each["kind"] == kind]


def as_recorded(algorithm: Algorithm | None) -> object:
    if algorithm is None:
        return None
    return {
        "icv_len": algorithm.icv_bits,
        "key_hex": algorithm.key.octets.hex(),
        "name": algorithm.name,
        "truncate_len": 0,
    }


def parts(key: IpsecKey | None) -> dict[str, Any]:
    return {name: as_recorded(getattr(key, name)) if key else None for name in ("aead", "auth", "crypt")}


def test_key_files_are_read_as_recorded() -> None:
    cases = recorded("key_file")
    assert len(cases) == 36
    for case in cases:
        fault = None
        try:
            keys = read_keys(case["text"])
        except IpsecKeyError as error:
            keys, fault = error.before, str(error)
        if case["name"] in REFUSED or "panic" in case:
            assert fault, case["name"]
            continue
        # Cilium's message shows what it cannot decode, which may be a key but for a digit.
        expected = re.sub(' key string ".*"$', " key string", case["error"]) if "error" in case else None
        assert fault == expected, case["name"]
        after = case["keys_after"]
        last = keys[-1] if keys else None
        assert (last.spi if last else 0) == after["current_spi"], case["name"]
        assert parts(last) == {name: after.get(name) for name in ("aead", "auth", "crypt")}, case["name"]
        if fault is None:
            assert (last.auth_size if last else 0) == case["auth_key_size"], case["name"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("+3 rfc4106(gcm(aes)) 4443 128\n", None),
        ("+3+ rfc4106(gcm(aes)) 4443 +128\r\n", None),
        ("3 rfc4106(gcm(aes)) 4443 -128", "only ICV lengths 96, 128, and 256 are accepted"),
        ("3 rfc4106(gcm(aes)) 4443 ", "ICV length is invalid or missing"),
        ("3 rfc4106(gcm(aes)) 44\t43 128", "unable to decode AEAD key string"),
        ("3 rfc4106(gcm(aes)) 4443 128\f", "ICV length is invalid or missing"),
        ("-3 rfc4106(gcm(aes)) 4443 128", "failed to parse SPI: the first argument"),
        ("\n", "missing IPSec key or invalid format"),
    ],
)
def test_numbers_and_digits_are_those_that_go_reads(line: str, error: str | None) -> None:
    if error is None:
        assert [key.spi for key in read_keys(line)] == [3]
        return
    with pytest.raises(IpsecKeyError) as caught:
        read_keys(line)
    assert str(caught.value).startswith(error)


def test_keys_of_two_nodes_are_derived_as_recorded() -> None:
    cases = recorded("derive")
    assert len(cases) == 16
    for case in cases:
        key = read_keys(case["text"])[-1].between(
            ip_address(case["src"]), ip_address(case["dst"]), case["src_boot_id"], case["dst_boot_id"]
        )
        expected = case["key"]
        assert key.spi == expected["spi"], case["name"]
        assert parts(key) == {name: expected[name] for name in ("aead", "auth", "crypt")}, case["name"]


def test_a_key_must_have_another_spi_than_the_one_in_force() -> None:
    line = "3 rfc4106(gcm(aes)) 44434241343332312423222114131211f4f3f2f1 128"
    with pytest.raises(IpsecKeyError, match="requires incrementing"):
        read_keys(line, current=read_keys(line)[-1])


def test_ipsec_keys_are_hidden_in_every_text() -> None:
    key = "44434241343332312423222114131211f4f3f2f1"
    shown = [repr(read_keys(f"3 rfc4106(gcm(aes)) {key} 128"))]
    for wrong in (f"3 rfc4106(gcm(aes)) {key}g 128", f"3 {key} rfc4106(gcm(aes)) 128", f"{key} 3 a 128"):
        with pytest.raises(IpsecKeyError) as caught:
            read_keys(wrong)
        shown.append(repr(caught.value) + str(caught.value))
    assert not any(key[:16] in text or "44434241" in text for text in shown)
