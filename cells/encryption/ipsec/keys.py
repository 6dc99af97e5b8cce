"""IPsec keys: the key file's lines, and the keys of each pair of nodes that follow from them.

Source: Cilium 1.17, IPsec transparent encryption: "SPI algorithm key bits" or "SPI algorithm key
        algorithm key", one key a line, fields separated by exactly one blank.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from cells.base.addresses import IPAddress
from cells.netlink.xfrm import Algorithm, KeyOctets

__all__ = ["IpsecKey", "IpsecKeyError", "read_keys"]

_ICV_BITS: Final = (96, 128, 256)
_LAST_SPI: Final = 15


class IpsecKeyError(ValueError):
    """A line of the key file that is no key. The keys of the lines before it are in `before`."""

    def __init__(self, message: str, before: tuple[IpsecKey, ...] = ()) -> None:
        super().__init__(message)
        self.before = before


def _between(one: Algorithm, path: bytes) -> Algorithm:
    """The same algorithm with the key of one direction between two nodes."""
    key = one.key.octets
    digest = hashlib.sha256 if len(key) <= hashlib.sha256().digest_size else hashlib.sha512
    return msgspec.structs.replace(one, key=KeyOctets(digest(key + path).digest()[: len(key)]))


class IpsecKey(msgspec.Struct, frozen=True):
    """A key of the whole cluster: either AEAD, or authentication and encryption apart."""

    spi: int
    aead: Algorithm | None = None
    auth: Algorithm | None = None
    crypt: Algorithm | None = None

    @property
    def auth_size(self) -> int:
        """What Cilium adds to a packet's overhead for the key: bytes of the ICV, or hex digits of the key."""
        if self.aead is not None:
            return self.aead.icv_bits // 8
        return 2 * len(self.auth.key) if self.auth is not None else 0

    def between(
        self, source: IPAddress, destination: IPAddress, source_boot: str, destination_boot: str
    ) -> IpsecKey:
        """The key for packets from one node to another, which changes with every boot of either.

        Addresses are the ones of the state; boot IDs are the 36 characters of the kernel's boot_id.
        """
        path = _octets(source) + _octets(destination) + source_boot.encode() + destination_boot.encode()
        return IpsecKey(
            self.spi,
            *(
                _between(each, path) if each is not None else None
                for each in (self.aead, self.auth, self.crypt)
            ),
        )


def read_keys(text: str, in_force: IpsecKey | None = None) -> tuple[IpsecKey, ...]:
    """The keys of a key file in order; the last is the one to use.

    `in_force` is the key in use: each line must have another SPI than the one before it.
    Raises IpsecKeyError at the first line that is no key; it carries the keys before that line.
    """
    keys: list[IpsecKey] = []
    for line in text.splitlines():
        try:
            key = _key(line, keys[-1] if keys else in_force)
        except IpsecKeyError as fault:
            raise IpsecKeyError(str(fault), tuple(keys)) from None
        keys.append(key)
    return tuple(keys)


def _key(line: str, before: IpsecKey | None) -> IpsecKey:
    key = _parsed(line)
    if before is not None and before.spi == key.spi:
        raise IpsecKeyError("invalid SPI: changing IPSec keys requires incrementing the key id")
    return key


def _parsed(line: str) -> IpsecKey:
    fields = line.split(" ")
    if len(fields) < 3:
        raise IpsecKeyError("missing IPSec key or invalid format")
    spi = _spi(fields[0])
    if len(fields) > 5:
        raise IpsecKeyError("invalid format: too many fields in the IPsec secret")
    if len(fields) == 3:
        raise IpsecKeyError("missing IPSec key or invalid format")
    if len(fields) == 4:
        _, algorithm, key, bits = fields
        if not algorithm.startswith("rfc"):
            raise IpsecKeyError(f'invalid AEAD algorithm "{_shown(algorithm)}"')
        octets = _decoded("AEAD", key)
        if not bits.isascii() or not bits.isdecimal():
            raise IpsecKeyError("ICV length is invalid or missing")
        if int(bits) not in _ICV_BITS:
            raise IpsecKeyError("only ICV lengths 96, 128, and 256 are accepted")
        return IpsecKey(spi, aead=Algorithm(algorithm, KeyOctets(octets), int(bits)))
    _, auth, auth_key, crypt, crypt_key = fields
    return IpsecKey(
        spi,
        auth=Algorithm(auth, KeyOctets(_decoded("authentication", auth_key))),
        crypt=Algorithm(crypt, KeyOctets(_decoded("encryption", crypt_key))),
    )


def _spi(field: str) -> int:
    """The SPI: every key is per node, so the sign that once asked for that changes nothing."""
    number = field.removesuffix("+")
    if not number.isascii() or not number.isdecimal():
        raise IpsecKeyError(
            "failed to parse SPI: the first argument of the IPsec secret is not a number."
            f' Attempted "{_shown(number)}"'
        )
    spi = int(number)
    if spi > _LAST_SPI:
        what = "encryption key space exhausted"
    elif spi == 0:
        what = "zero is not a valid key ID"
    else:
        return spi
    raise IpsecKeyError(
        f'failed to parse SPI: {what}. ID must be nonzero and less than 16. Attempted "{number}"'
    )


def _decoded(what: str, text: str) -> bytes:
    digits = text.removeprefix("0x")
    try:
        return b"" if text == '""' else bytes.fromhex(digits)
    except ValueError:
        raise IpsecKeyError(f"unable to decode {what} key string") from None  # it may be all but a key


def _shown(field: str) -> str:
    """A field for a message: what looks like a key, in the wrong place, is not shown."""
    return "..." if re.search("[0-9a-fA-F]{16}", field) else field


def _octets(address: IPAddress) -> bytes:
    """Four octets of an IPv4 address, also of one in IPv6's form."""
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed
