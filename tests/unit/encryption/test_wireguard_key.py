"""The file of the node's key, compared with recordings; X25519; rejected combinations of settings."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import msgspec
import pytest

from cells.encryption.wireguard.settings import EncryptionSettings, load_key, public_key, x25519
from tests.support.recordings import recordings

VECTORS = (
    (
        "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
        "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
        "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
    ),
    (
        "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
        "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
        "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
    ),
)
"""RFC 7748, section 5.2: scalar, point, result."""


def test_x25519_is_as_the_rfc_has_it() -> None:
    for scalar, point, result in VECTORS:
        assert x25519(bytes.fromhex(scalar), bytes.fromhex(point)).hex() == result


def test_keys_are_read_as_recorded(tmp_path: Path) -> None:
    cases = [json.loads(file.read_text()) for file in sorted(recordings("wireguard").glob("keyfile_*.json"))]
    read = [case for case in cases if "content_hex" in case]
    assert len(read) == 6
    for case in read:
        path = tmp_path / case["name"]
        path.write_bytes(bytes.fromhex(case["content_hex"]))
        path.chmod(0o644)
        if "error" in case:
            with pytest.raises(ValueError, match=case["error"]):
                load_key(path)
            continue
        key, made = load_key(path)
        assert not made
        assert path.stat().st_mode & 0o777 == 0o600
        assert base64.b64encode(key).decode() == case["private_key"]
        assert base64.b64encode(public_key(key)).decode() == case["public_key"]


def test_a_key_is_made_once_for_root_alone(tmp_path: Path) -> None:
    path = tmp_path / "cilium_wg0.key"
    key, made = load_key(path)
    assert made
    assert (len(key), key[0] & 7, key[31] & 0xC0) == (32, 0, 0x40)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path) == (key, False)
    with pytest.raises(IsADirectoryError):
        load_key(tmp_path)


POD_NETWORK = {"encryption_strict_mode_cidr": "10.0.0.0/8"}


@pytest.mark.parametrize(
    ("given", "states"),
    [
        ({"encrypt_node": True}, "encrypt-node=true: needs enable-wireguard"),
        ({"enable_encryption_strict_mode": True, **POD_NETWORK}, "needs enable-wireguard"),
        ({"enable_wireguard": True, "enable_encryption_strict_mode": True}, "expected an IPv4 network"),
        (
            {"node_encryption_opt_out_labels": "a in b"},
            "node-encryption-opt-out-labels=a in b: expected labels",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_refused(given: dict[str, object], states: str) -> None:
    with pytest.raises(ValueError, match=states):
        EncryptionSettings(**given).validate()  # type: ignore[arg-type]  # each of its type


def test_labels_opt_a_node_out_of_the_encryption_of_nodes_alone() -> None:
    selector = "!a,b,c=d,e!=f"
    settings = EncryptionSettings(
        enable_wireguard=True, encrypt_node=True, node_encryption_opt_out_labels=selector
    )
    assert settings.opts_out({"b": "", "c": "d"})
    for labels in (
        {"c": "d"},
        {"b": "", "c": ""},
        {"a": "", "b": "", "c": "d"},
        {"b": "", "c": "d", "e": "f"},
    ):
        assert not settings.opts_out(labels)
    sets = msgspec.structs.replace(settings, node_encryption_opt_out_labels="a in (b, c), d notin (e)")
    assert sets.opts_out({"a": "c"})
    assert not sets.opts_out({"a": "c", "d": "e"})
    assert not sets.opts_out({"a": "d"})
    assert not EncryptionSettings(enable_wireguard=True).opts_out(
        {"node-role.kubernetes.io/control-plane": ""}
    )
