"""IPsec's settings and keys: the key file's lines, the keys of each pair of nodes that follow from them, and
the key in force.

Source: Cilium 1.17, IPsec transparent encryption: "SPI algorithm key bits" or "SPI algorithm key
        algorithm key", one key a line, fields separated by exactly one blank.
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
    "networks_of_pods",
    "read_keys",
    "refused_beside",
    "wrong_file",
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
        """Options that are not supported with enable-ipsec."""
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


BESIDE: Final = {
    "enable-ipv4": (False, "nodes find each other's keys by their IPv4 addresses"),
    "enable-wireguard": (True, "WireGuard (--enable-wireguard) cannot be used with IPsec (--enable-ipsec)"),
    "enable-host-firewall": (True, "IPSec cannot be used with the host firewall"),
    "enable-ipv4-egress-gateway": (True, "what pods send to gateways would leave in clear text"),
}
"""Options that IPsec excludes, the refused value of each, and why."""


def refused_beside(values: Mapping[str, object], settings: IpsecSettings) -> Iterator[str]:
    """Settings, by name, that IPsec excludes so that nothing leaves in clear text.

    Source: Cilium 1.17, its checks at the start; and packets that our programs do not mark.
    """
    for option, (wrong, why) in BESIDE.items():
        if values.get(option) is wrong:
            yield f"{option}={str(wrong).lower()}: {why}"
    if (ipam := values.get("ipam")) in {"multi-pool", "delegated-plugin"}:
        yield f"ipam={ipam}: pods' addresses lie in no range of their node"
    for family in ("ipv4", "ipv6"):
        if router := values.get(f"local-router-{family}"):
            yield f"local-router-{family}={router}: states are between addresses of nodes' own ranges"
    for option in ("cni-chaining-mode", "cni-chaining-target"):
        if (value := values.get(option)) not in {None, "", "none", "portmap"}:
            yield f"{option}={value}: programs see what pods send after another plugin has sent it on"
    yield from _proxies_in_clear(values, settings)
    yield from _networks_missing(values, settings)


def _proxies_in_clear(values: Mapping[str, object], settings: IpsecSettings) -> Iterator[str]:
    proxies = values.get("enable-l7-proxy") is True
    if proxies and values.get("routing-mode") == "native":
        yield (
            "enable-l7-proxy=true with routing-mode=native: what proxies send in pods' names would leave in"
            " clear text; set enable-l7-proxy=false, or routing-mode=tunnel"
        )
    asked = values.get("dnsproxy-enable-transparent-mode")
    if proxies and asked is False and not settings.dnsproxy_insecure_skip_transparent_mode_check:
        yield (
            "dnsproxy-enable-transparent-mode=false: the DNS proxy would ask servers in clear text; leave it"
            " unset, or set dnsproxy-insecure-skip-transparent-mode-check=true"
        )


def _networks_missing(values: Mapping[str, object], settings: IpsecSettings) -> Iterator[str]:
    for family in Family:
        if values.get(f"enable-{family}") is True and not networks_of_pods(values, settings, family):
            yield (
                f"{family}-native-routing-cidr: unset, and what pods send to nodes that are not heard of yet"
                " could leave in clear text; set it to the network of all pods, or with ipam=cluster-pool"
                f" cluster-pool-{family}-cidr as the operator has it"
            )


def networks_of_pods(
    values: Mapping[str, object], settings: IpsecSettings, family: Family
) -> tuple[IPNetwork, ...]:
    """Networks of the pods of all nodes, including nodes that are in no table yet; from all settings."""
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
"""What a key file has."""
_ICV_BITS: Final = (96, 128, 256)
_LAST_SPI: Final = 15


class IpsecKeyError(ValueError):
    """A line of the key file is not a valid key. `before` has the keys of the lines before it."""

    def __init__(self, message: str, before: tuple[IpsecKey, ...] = ()) -> None:
        super().__init__(message)
        self.before = before


def wrong_file(path: Path, error: ValueError | OSError) -> str:
    """What is wrong with a key file, and where; does not show keys."""
    if isinstance(error, IpsecKeyError):
        return f"ipsec-key-file={path}, line {len(error.before) + 1}: {error}"
    return f"ipsec-key-file={path}: {error.strerror if isinstance(error, OSError) else 'not text of UTF-8'}"


def _between(one: Algorithm, path: bytes) -> Algorithm:
    """The same algorithm, with the key for one direction between two nodes."""
    key = one.key.octets
    digest = hashlib.sha256 if len(key) <= hashlib.sha256().digest_size else hashlib.sha512
    return msgspec.structs.replace(one, key=KeyOctets(digest(key + path).digest()[: len(key)]))


class IpsecKey(msgspec.Struct, frozen=True):
    """A key of the cluster: either AEAD, or separate authentication and encryption."""

    spi: int
    aead: Algorithm | None = None
    auth: Algorithm | None = None
    crypt: Algorithm | None = None

    @property
    def auth_size(self) -> int:
        """Cilium's estimate of the overhead by the key: bytes of the ICV, or hex digits of the key."""
        if self.aead is not None:
            return self.aead.icv_bits // 8
        return 2 * len(self.auth.key) if self.auth is not None else 0

    def between(
        self, source: IPAddress, destination: IPAddress, source_boot: str, destination_boot: str
    ) -> IpsecKey:
        """The key for packets from one node to another, which changes with every boot of either.

        Addresses are those of the state; boot IDs are the 36 characters of the kernel's boot_id.
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
    """The keys of a key file in order; the last one is used.

    `in_force` is the present key: each line must have another SPI than the one before. Raises IpsecKeyError
    at the first invalid line, with the keys before it.
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
    """Parse an SPI. Every key is per node, so the sign that once requested this has no effect."""
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
    """A field for a message: a possible key in the wrong field is not shown."""
    return "..." if re.search("[0-9a-fA-F]{16}", field) else field


def _octets(address: IPAddress) -> bytes:
    """The last four octets of an IPv4 address, also in IPv6 form."""
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed


# The key in force, and those it has replaced.


class KeyRing:
    """The key in force, and since when others are replaced. Its texts do not show keys."""

    def __init__(self, retained: float, now: Callable[[], float]) -> None:
        """``retained``: seconds that states of a replaced key stay."""
        self._retained = retained
        self._now = now
        self._replaced: dict[int, float] = {}
        self.current: IpsecKey | None = None

    @property
    def spi(self) -> int:
        """SPI of the key in force; 0 if there is none yet."""
        return self.current.spi if self.current is not None else 0

    def load(self, text: str) -> bool:
        """Put the last key of a key file in force. Returns whether it differs from the present one.

        Raises IpsecKeyError for an invalid line, after putting the keys before it in force.
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
        """Whether states of this SPI stay although its key is not in force.

        An unknown one counts from now.
        """
        if not spi or spi == self.spi:
            return False
        return (
            self.current is None or self._now() - self._replaced.setdefault(spi, self._now()) < self._retained
        )

    def next_end(self) -> float | None:
        """Seconds until states of the next replaced key expire; None if no key has been replaced."""
        ends = [since + self._retained - self._now() for since in self._replaced.values()]
        return min((each for each in ends if each > 0), default=None)
