"""WireGuard's settings on this node, and the node's key.

Source: Cilium 1.17, option names and the key's file; RFC 7748 (X25519).
"""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from cells.cluster.encryption import (
    ROTATION_READY,
    WIREGUARD_KEY,
    WIREGUARD_LINKS,
    WIREGUARD_OVERHEAD,
    EncryptionKey,
    PublishedKey,
)
from cells.config import AgentConfig
from cells.kubernetes.objects.core import Node
from cells.kubernetes.objects.kind import selector_of
from lifecycle import (
    Duration,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Settings,
    Table,
    seconds,
)

__all__ = ["EncryptionSettings", "WireguardKey"]

_LONGEST_KEEPALIVE: Final = 65535


# Settings, under Cilium's names.


class EncryptionSettings(Settings, frozen=True):
    """Encryption between nodes by WireGuard."""

    enable_wireguard: bool = False
    """Encrypt what pods send to pods of other nodes, by WireGuard; all nodes need it."""

    enable_wireguard_userspace_fallback: bool = False
    """Where the kernel has no WireGuard, run the program wireguard-go instead, which is slower; otherwise the
    agent does not start there."""

    encrypt_node: bool = False
    """Encrypt also what nodes send each other and pods of other nodes themselves; with enable-wireguard."""

    node_encryption_opt_out_labels: str = "node-role.kubernetes.io/control-plane"
    """Nodes that this label selector matches, such as key=value,other in (a,b),!third, keep out of
    encrypt-node."""

    wireguard_persistent_keepalive: Duration = seconds(0)
    """How often a node sends something to each other one though it has nothing to say; 0: never."""

    enable_encryption_strict_mode: bool = False
    """Drop what would leave this node in clear text between addresses of encryption-strict-mode-cidr."""

    encryption_strict_mode_cidr: str = ""
    """The IPv4 network of pods in which strict mode lets nothing pass in clear text."""

    encryption_strict_mode_allow_remote_node_identities: bool = False
    """Let packets to nodes pass in strict mode: needed where their addresses are in that network."""

    @property
    def strict(self) -> IPv4Network | None:
        """The network of strict mode; None without it."""
        return IPv4Network(self.encryption_strict_mode_cidr) if self.enable_encryption_strict_mode else None

    def faults(self) -> Iterator[str]:
        needs = "needs enable-wireguard=true: nothing is encrypted otherwise; set it, or leave this unset"
        if self.encrypt_node and not self.enable_wireguard:
            yield f"encrypt-node=true: {needs}"
        if self.enable_encryption_strict_mode:
            if not self.enable_wireguard:
                yield f"enable-encryption-strict-mode=true: {needs}"
            try:
                IPv4Network(self.encryption_strict_mode_cidr)
            except ValueError as error:
                cidr = self.encryption_strict_mode_cidr
                yield f"encryption-strict-mode-cidr={cidr}: expected an IPv4 network of pods: {error}"
        if not 0 <= self.wireguard_persistent_keepalive <= _LONGEST_KEEPALIVE or (
            self.wireguard_persistent_keepalive % 1
        ):
            yield (
                f"wireguard-persistent-keepalive={self.wireguard_persistent_keepalive}: expected whole"
                " seconds, up to 18h12m15s, or 0s"
            )
        try:
            selector_of(self.node_encryption_opt_out_labels)
        except ValueError as error:
            yield f"node-encryption-opt-out-labels={self.node_encryption_opt_out_labels}: {error}"

    def opts_out(self, labels: dict[str, str]) -> bool:
        """Whether the selector excludes a node with these labels; never without a selector."""
        text = self.node_encryption_opt_out_labels.strip()
        return self.encrypt_node and bool(text) and selector_of(text).matches(labels)


# The key: 32 bytes in a file that only root reads.

KEY_SIZE: Final = 32
_PRIME: Final = 2**255 - 19
_A24: Final = 121665
_BASE_POINT: Final = (9).to_bytes(KEY_SIZE, "little")


class WireguardKey:
    """The node's key, and the next one during a rotation; a hook loads or creates it before the start.

    A key that cannot be read ends the start: HiveError. The files show the progress of a rotation, so that
    the next agent continues it: first there is a next key, then it is also the key in force.
    """

    def __init__(
        self,
        settings: EncryptionSettings,
        agent: AgentConfig,
        nodes: Table[tuple[str, str], Node],
        published: PublishedKey,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.settings = settings
        self._agent = agent
        self._nodes = nodes
        self._log = log
        self.private = b""
        self.public = ""
        """In base64."""
        self.next_private = b""
        """Empty if no rotation is in progress."""
        self.next_public = ""
        self._published = published
        self._path, self._next_path = (agent.state_dir / f"{name}.key" for name in WIREGUARD_LINKS[:2])
        if settings.enable_wireguard:
            lifecycle.append(Hook("load the key of WireGuard", self._start))
            jobs.observe("watch labels of the Node object", self._own_changes, self._publish)

    @property
    def opted_out(self) -> bool:
        """Whether the node's labels exclude its own addresses from encryption."""
        node = self._nodes.get(("", self._agent.node_name))
        return node is not None and self.settings.opts_out(node.labels)

    async def _start(self) -> None:
        path = self._path
        try:
            self.private, made = load_key(path)
            if self._next_path.exists():
                path = self._next_path
                self.next_private, _ = load_key(path)
        except (OSError, ValueError) as error:
            raise HiveError(
                f"failed to load wg private key: {error}; remove {path} to have a new one made"
            ) from error
        self.public = _public_text(self.private)
        if self.next_private:
            self.next_public = _public_text(self.next_private)
        self.publish()
        if made:
            self._log.info("WireGuard key created", path=str(path), public_key=self.public)

    # The steps of a rotation. They write files, and block; raise OSError.

    def make_next(self) -> None:
        """Create and save the next key."""
        self.next_private, _ = load_key(self._next_path)
        self.next_public = _public_text(self.next_private)

    def adopt_next(self) -> None:
        """Make the next key also the key in force, and save it."""
        _write_key(self._path, self.next_private)
        self.private, self.public = self.next_private, self.next_public

    def end_rotation(self) -> None:
        """Remove the next key."""
        self._next_path.unlink(missing_ok=True)
        self.next_private, self.next_public = b"", ""

    async def _own_changes(self) -> AsyncIterator[None]:
        key = ("", self._agent.node_name)
        seen = self._nodes.get(key)
        while True:
            seen = await self._nodes.wait_changed(key, seen)
            yield

    async def _publish(self, _: None) -> None:
        self.publish()

    def publish(self) -> None:
        """Publish the keys to other nodes."""
        number = 0 if self.opted_out else WIREGUARD_KEY
        rotation = self.next_public or ROTATION_READY
        self._published.publish(EncryptionKey(number, self.public, rotation, WIREGUARD_OVERHEAD))


def load_key(path: Path) -> tuple[bytes, bool]:
    """The private key in a file, and whether it was created because the file did not exist.

    Raises OSError, and ValueError if the file has another length.
    """
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = new_key()
        _write_key(path, key)
        return key, True
    if len(key) != KEY_SIZE:
        raise ValueError(f"wgtypes: incorrect key size: {len(key)}")
    path.chmod(0o600)
    return key, False


def _write_key(path: Path, key: bytes) -> None:
    """Write atomically: the file is either complete or unchanged."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(mode=0o600)
    with unfinished.open("wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _public_text(private: bytes) -> str:
    return base64.b64encode(public_key(private)).decode()


def new_key() -> bytes:
    """A random private key (RFC 7748, section 5: clamped)."""
    return _clamped(os.urandom(KEY_SIZE)).to_bytes(KEY_SIZE, "little")


def _clamped(key: bytes) -> int:
    number = int.from_bytes(key, "little")
    return number & ~7 & (1 << 254) - 1 | 1 << 254


def public_key(private: bytes) -> bytes:
    """The public key of a private one."""
    return x25519(private, _BASE_POINT)


def x25519(scalar: bytes, point: bytes) -> bytes:
    """The X25519 function (RFC 7748, section 5).

    Called once a start with the node's own key, so its duration reveals nothing to others. The device does
    all other work with keys.
    """
    number = _clamped(scalar)
    x1 = int.from_bytes(point, "little") % (1 << 255)
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in range(254, -1, -1):
        swap = number >> bit & 1
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % _PRIME, x1 * (da - cb) ** 2 % _PRIME
        x2, z2 = aa * bb % _PRIME, e * (aa + _A24 * e) % _PRIME
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, _PRIME - 2, _PRIME) % _PRIME).to_bytes(KEY_SIZE, "little")
