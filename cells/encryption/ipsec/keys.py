"""Settings of IPsec, the format of its key file, and the rotation of keys.

Input:  the key file: one key a line, "SPI algorithm key bits" (AEAD) or "SPI algorithm key algorithm key",
        fields separated by exactly one blank.
Output: the keys, and the keys derived from them for each pair of nodes and direction.
Source: Cilium 1.17, pkg/datapath/linux/ipsec (ipsec_linux.go).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Final

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.netlink.xfrm import Algorithm, KeyOctets
from lifecycle import Duration, Settings, minutes

__all__ = [
    "EXPECTED",
    "IpsecKey",
    "IpsecKeyError",
    "IpsecSettings",
    "KeyRing",
    "cluster_pod_networks",
    "incompatible_settings",
    "key_file_error",
    "read_keys",
]


class IpsecSettings(Settings, frozen=True):
    """Settings of IPsec."""

    enable_ipsec: bool = False
    """Encrypt what pods send to pods of other nodes, by the kernel's IPsec (RFC 4303); all nodes need it.
    Without it, what an agent with it has left in the kernel is removed."""

    ipsec_key_file: str = ""
    """The file of IPsec's keys, as a Secret mounts it: a line is "SPI algorithm key bits"."""

    ipsec_key_rotation_duration: Duration = minutes(5)
    """How long what was made with a key stays after another has replaced it."""

    enable_ipsec_key_watcher: bool = True
    """Put another key of the file in force as soon as it is written, not at the next start."""

    enable_ipsec_encrypted_overlay: bool = False
    """Encrypt packets of the tunnel instead of those in it: refused with enable-ipsec."""

    encrypt_interface: str = ""
    """Devices that encrypt, where they are not found: refused with enable-ipsec."""

    cluster_pool_ipv4_cidr: tuple[IPv4Network, ...] = ()
    """With enable-ipsec and ipam=cluster-pool: the networks of all pods, as the operator has them. What pods
    send there never leaves in clear text."""

    cluster_pool_ipv6_cidr: tuple[IPv6Network, ...] = ()
    """The same for IPv6."""

    dnsproxy_insecure_skip_transparent_mode_check: bool = False
    """With enable-ipsec: let the DNS proxy ask servers from the node's address, so in clear text."""

    def faults(self) -> Iterator[str]:
        """Yield errors of settings that do not depend on other cells."""
        if not self.enable_ipsec:
            return
        if not self.ipsec_key_file:
            yield "enable-ipsec=true needs ipsec-key-file: set it to the file of keys"
        if self.ipsec_key_rotation_duration < 0:
            shown = self.ipsec_key_rotation_duration
            yield f"ipsec-key-rotation-duration={shown}: expected a duration, such as 5m"
        if self.enable_ipsec_encrypted_overlay:
            yield "enable-ipsec-encrypted-overlay=true: not supported, expected false"
        if self.encrypt_interface:
            yield f"encrypt-interface={self.encrypt_interface}: not supported, leave it unset"


INCOMPATIBLE: Final = {
    "enable-ipv4": (False, "nodes find each other's keys by their IPv4 addresses"),
    "enable-wireguard": (True, "WireGuard (--enable-wireguard) cannot be used with IPsec (--enable-ipsec)"),
    "enable-host-firewall": (True, "IPSec cannot be used with the host firewall"),
    "enable-ipv4-egress-gateway": (True, "packets from pods to gateways would leave in clear text"),
}
"""Options of other cells that cannot be used with IPsec: the rejected value, and the reason."""


def incompatible_settings(values: Mapping[str, object], settings: IpsecSettings) -> Iterator[str]:
    """Yield an error for each setting of other cells with which packets would leave in clear text.

    Source: Cilium 1.17, its checks at the start; in addition, features with packets that our programs do not
    mark.
    """
    for option, (wrong, why) in INCOMPATIBLE.items():
        if values.get(option) is wrong:
            yield f"{option}={str(wrong).lower()}: {why}"
    if (ipam := values.get("ipam")) in {"multi-pool", "delegated-plugin"}:
        yield f"ipam={ipam}: pods' addresses are not in pod CIDRs of their node"
    for family in ("ipv4", "ipv6"):
        if router := values.get(f"local-router-{family}"):
            yield f"local-router-{family}={router}: states need router IPs from the nodes' pod CIDRs"
    for option in ("cni-chaining-mode", "cni-chaining-target"):
        if (value := values.get(option)) not in {None, "", "none", "portmap"}:
            yield f"{option}={value}: our programs see packets of pods only after those of the other plugin"
    yield from _proxies_in_clear(values, settings)
    yield from _networks_missing(values, settings)


def _proxies_in_clear(values: Mapping[str, object], settings: IpsecSettings) -> Iterator[str]:
    proxies = values.get("enable-l7-proxy") is True
    if proxies and values.get("routing-mode") == "native":
        yield (
            "enable-l7-proxy=true with routing-mode=native: packets of proxies with pods' addresses would"
            " leave in clear text; set enable-l7-proxy=false, or routing-mode=tunnel"
        )
    transparent = values.get("dnsproxy-enable-transparent-mode")
    if proxies and transparent is False and not settings.dnsproxy_insecure_skip_transparent_mode_check:
        yield (
            "dnsproxy-enable-transparent-mode=false: the DNS proxy would send queries in clear text; leave it"
            " unset, or set dnsproxy-insecure-skip-transparent-mode-check=true"
        )


def _networks_missing(values: Mapping[str, object], settings: IpsecSettings) -> Iterator[str]:
    for family in Family:
        if values.get(f"enable-{family}") is True and not cluster_pod_networks(values, settings, family):
            yield (
                f"{family}-native-routing-cidr: unset, and packets from pods to nodes that are not known yet"
                " could leave in clear text; set it to the network of all pods, or with ipam=cluster-pool"
                f" cluster-pool-{family}-cidr to the operator's value"
            )


def cluster_pod_networks(
    values: Mapping[str, object], settings: IpsecSettings, family: Family
) -> tuple[IPNetwork, ...]:
    """Return the networks of the pods of all nodes by settings, also of nodes that are not known yet."""
    pools: tuple[IPNetwork, ...] = settings.cluster_pool_ipv4_cidr
    if family is Family.IPV6:
        pools = settings.cluster_pool_ipv6_cidr
    if values.get("ipam") == "cluster-pool" and pools:
        return pools
    native = values.get(f"{family}-native-routing-cidr")
    return (native,) if isinstance(native, IPv4Network | IPv6Network) else ()


EXPECTED: Final = (
    'expected a line "SPI algorithm key bits", such as "3+ rfc4106(gcm(aes)) KEY 128" with 40 hexadecimal'
    " digits, as the Secret cilium-ipsec-keys mounts it"
)
"""The expected format, for error messages."""
_ICV_BITS: Final = (96, 128, 256)
_INTEGER: Final = re.compile("[+-]?[0-9]{1,18}")
"""Integers that Go's strconv.Atoi accepts."""
_HEX: Final = re.compile("([0-9a-fA-F]{2})*")
_LAST_SPI: Final = 15


class IpsecKeyError(ValueError):
    """A line of the key file is not a valid key; ``before`` has the keys of the lines before it."""

    def __init__(self, message: str, before: tuple[IpsecKey, ...] = ()) -> None:
        super().__init__(message)
        self.before = before


def key_file_error(path: Path, error: ValueError | OSError) -> str:
    """Return the message for an error of the key file, with path and line, without key material."""
    if isinstance(error, IpsecKeyError):
        return f"ipsec-key-file={path}, line {len(error.before) + 1}: {error}"
    return f"ipsec-key-file={path}: {error.strerror if isinstance(error, OSError) else 'not text of UTF-8'}"


def _derived(one: Algorithm, path: bytes) -> Algorithm:
    """Derive the key of one direction between two nodes, for the same algorithm."""
    key = one.key.octets
    digest = hashlib.sha256 if len(key) <= hashlib.sha256().digest_size else hashlib.sha512
    return msgspec.structs.replace(one, key=KeyOctets(digest(key + path).digest()[: len(key)]))


class IpsecKey(msgspec.Struct, frozen=True):
    """A key of the cluster: one AEAD algorithm, or an authentication and an encryption algorithm."""

    spi: int
    aead: Algorithm | None = None
    auth: Algorithm | None = None
    crypt: Algorithm | None = None

    @property
    def auth_size(self) -> int:
        """Overhead of authentication as Cilium estimates it: bytes of the ICV, or hex digits of the key."""
        if self.aead is not None:
            return self.aead.icv_bits // 8
        return 2 * len(self.auth.key) if self.auth is not None else 0

    def between(
        self, source: IPAddress, destination: IPAddress, source_boot: str, destination_boot: str
    ) -> IpsecKey:
        """Derive the key for packets from one node to another; it changes when either node boots.

        The addresses are those of the state; boot IDs are the 36 characters of the kernel's boot_id.
        """
        path = _octets(source) + _octets(destination) + source_boot.encode() + destination_boot.encode()
        return IpsecKey(
            self.spi,
            *(
                _derived(each, path) if each is not None else None
                for each in (self.aead, self.auth, self.crypt)
            ),
        )


def read_keys(text: str, current: IpsecKey | None = None) -> tuple[IpsecKey, ...]:
    """Return the keys of a key file in order; the last one becomes active.

    ``current`` is the active key: each line must have another SPI than the previous one. Raises IpsecKeyError
    at the first invalid line.
    """
    keys: list[IpsecKey] = []
    lines = text.split("\n")
    for line in lines if lines[-1] else lines[:-1]:
        try:
            key = _key(line.removesuffix("\r"), keys[-1] if keys else current)
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
            raise IpsecKeyError(f'invalid AEAD algorithm "{_redacted(algorithm)}"')
        octets = _decoded("AEAD", key)
        if not _INTEGER.fullmatch(bits):
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
    """Parse an SPI. A trailing "+", which once requested keys per node, has no effect: all keys are."""
    number = field.removesuffix("+")
    if not _INTEGER.fullmatch(number) or int(number) < 0:
        raise IpsecKeyError(
            "failed to parse SPI: the first argument of the IPsec secret is not a number."
            f' Attempted "{_redacted(number)}"'
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
    digits = "" if text == '""' else text.removeprefix("0x")
    if not _HEX.fullmatch(digits):
        raise IpsecKeyError(f"unable to decode {what} key string")  # without the text, a mistyped key
    return bytes.fromhex(digits)


def _redacted(field: str) -> str:
    """Return a field for an error message, or "..." if it may contain a key."""
    return "..." if re.search("[0-9a-fA-F]{16}", field) else field


def _octets(address: IPAddress) -> bytes:
    """Return the octets of an address; of an IPv4-mapped IPv6 address, those of the IPv4 address."""
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed


# The active key, and the keys that it has replaced.


class KeyRing:
    """The active key, and the times at which previous keys were replaced. Errors do not show key material."""

    def __init__(self, retained: float, now: Callable[[], float]) -> None:
        """``retained``: seconds for which states of a replaced key are retained."""
        self._retained = retained
        self._now = now
        self._replaced: dict[int, float] = {}
        self.current: IpsecKey | None = None

    @property
    def spi(self) -> int:
        """SPI of the active key; 0 before a key is loaded."""
        return self.current.spi if self.current is not None else 0

    def load(self, text: str) -> bool:
        """Activate the last key of a key file. Return whether it differs from the previous one.

        Raises IpsecKeyError for an invalid line, after activating the keys of the lines before it.
        """
        try:
            keys, fault = read_keys(text, self.current), None
        except IpsecKeyError as error:
            keys, fault = error.before, error
        before = self.current
        for key in keys:
            if self.current is not None:
                self._replaced[self.current.spi] = self._now()
            self._replaced.pop(key.spi, None)
            self.current = key
        if fault is not None:
            raise fault
        return self.current != before

    def retains(self, spi: int) -> bool:
        """Return whether states with this SPI, which is not the active one, are still retained.

        The retention of an unknown SPI, e.g. after a restart, starts now.
        """
        if not spi or spi == self.spi:
            return False
        return (
            self.current is None or self._now() - self._replaced.setdefault(spi, self._now()) < self._retained
        )

    def next_expiry(self) -> float | None:
        """Return the seconds until the next replaced key expires, or None."""
        expiries = [since + self._retained - self._now() for since in self._replaced.values()]
        return min((each for each in expiries if each > 0), default=None)
